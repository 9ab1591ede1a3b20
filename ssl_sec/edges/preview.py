"""Draws the images and the views of a pretraining."""

from pathlib import Path

from ssl_sec.edges.config import PreviewConfig
from ssl_sec.edges.pictures import save_picture
from ssl_sec.errors import counted, writing
from ssl_sec.figures.images import views_figure
from ssl_sec.recipes.assembly import describe_images
from ssl_sec.recipes.config import RunConfig
from ssl_sec.recipes.pretraining.config import PretrainConfig
from ssl_sec.recipes.pretraining.preview import preview


def run_preview(picture: PreviewConfig, config: RunConfig) -> str:
    """Draws some images with the views of the first step; returns a description of the picture.

    Raises:
        DataError: the images cannot be read.
        StorageError: the file cannot be written.
    """
    assert isinstance(config, PretrainConfig)
    found = preview(config, picture.num_images)
    images, views = found.pictures["images"], found.pictures["views"]
    path = Path(picture.output).expanduser().resolve()
    with writing("output", path):
        path.parent.mkdir(parents=True, exist_ok=True)
        save_picture(path, views_figure(images, views))
    sizes = sorted({f"{width} x {height}" for height, width in (each.shape[2:] for each in views)})
    return "\n".join(
        [
            f"data: {describe_images(found.image_set)}",
            f"shown: {counted(len(images), 'image')} of the first step, {counted(len(views), 'view')} of each, "
            f"{', '.join(sizes)} pixels",
            f"picture: {path}",
        ]
    )
