"""The images of a campaign: Parquet, a folder, an archive, or random ones for a rehearsal."""

import tarfile
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.simclr import describe_data

_IMAGES_PER_CLASS = {"train": 8, "test": 4}  # random ones


def prepare_data(path: Path | None, output: Path) -> dict[str, Any]:
    """Returns the values of `data`; extracts an archive into the campaign's folder, once.

    Args:
        path: the value of `--data`; None for random images.
        output: the campaign's folder.
    """
    folder = output / "data"
    if path is None:
        if not folder.exists():
            _write_random_images(folder)
        return describe_data(folder)
    if not path.name.endswith((".tar.gz", ".tar")):
        return describe_data(path.resolve())
    if not folder.exists():
        temporary = output / "data.unpacking"
        with tarfile.open(path) as archive:
            archive.extractall(temporary, filter="data")
        temporary.rename(folder)
    return describe_data(folder)


def _write_random_images(root: Path) -> None:
    generator = np.random.default_rng(0)
    for split, count in _IMAGES_PER_CLASS.items():
        for number in range(10):
            folder = root / split / f"class{number}"
            folder.mkdir(parents=True)
            for image in range(count):
                pixels = generator.integers(0, 256, (16, 16, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{image}.png")
