"""The images of a campaign: Parquet, a folder, a packed folder, or random ones for a rehearsal."""

import tarfile
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.simclr import data_values

_RANDOM = {"train": 8, "test": 4}  # images of each class


def prepared(path: Path | None, output: Path) -> dict[str, Any]:
    """The values of `data`; a packed folder is unpacked into the campaign's folder, once.

    Args:
        path: as for `--data`; None makes random images.
        output: the campaign's folder.
    """
    folder = output / "data"
    if path is None:
        if not folder.exists():
            _write_random(folder)
        return data_values(folder)
    if not path.name.endswith((".tar.gz", ".tar")):
        return data_values(path.resolve())
    if not folder.exists():
        unpacked = output / "data.unpacking"
        with tarfile.open(path) as archive:
            archive.extractall(unpacked, filter="data")
        unpacked.rename(folder)
    return data_values(folder)


def _write_random(root: Path) -> None:
    generator = np.random.default_rng(0)
    for split, count in _RANDOM.items():
        for number in range(10):
            folder = root / split / f"class{number}"
            folder.mkdir(parents=True)
            for image in range(count):
                pixels = generator.integers(0, 256, (16, 16, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{image}.png")
