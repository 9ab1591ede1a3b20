"""A pretraining that ends with a probe, on images that cannot be probed."""

from pathlib import Path

import pytest
from PIL import Image

from ssl_sec.errors import UserError
from tests.jobs import pretrain


def write(folder: Path, count: int) -> None:
    folder.mkdir(parents=True)
    for number in range(count):
        Image.new("RGB", (8, 8), (number, 0, 0)).save(folder / f"{number}.png")


@pytest.mark.parametrize(
    ("folders", "more", "message"),
    [
        (
            (".",),
            [],
            r"folder/train: 40 images without labels found; the probe after the training \(probe.enabled=true; false "
            r"leaves it out\) needs the class of each image",
        ),
        (("train/a", "train/b"), [], "photos/test: no such folder"),
        (
            ("train/a", "train/b"),
            ["probe.test_share=0.5", "probe.labels_per_class=19"],
            "probe.labels_per_class: found 19, must be 1 to 18, the images of class 0 that are not held out",
        ),
    ],
)
def test_it_is_refused_before_it_trains(tmp_path: Path, folders, more, message):
    photos = tmp_path / "photos"
    for folder in folders:
        write(photos / folder, 40)
    data = ["data=folder", f"data.root={photos}", "experiment=photos_cpu", "global_batch_size=8", "encoder.width=0.125"]
    place = ["epochs=1", "runtime=local", f"output_dir={tmp_path}/runs", "run_name=it"]
    with pytest.raises(UserError, match=message):
        pretrain([*data, *place, "probe.enabled=true", *more])
    assert not list((tmp_path / "runs").glob("*/it/checkpoints/*"))
