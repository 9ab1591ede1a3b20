"""Packs what a campaign needs on a machine without a network: the images, and wheels except torch's and torchvision's.

On that machine:

    python -m pip install --no-index --no-deps <folder>/wheels/*.whl
    python -m benchmarks.campaign --data <folder>/images.tar.gz --output <campaign folder>

faiss, scikit-learn and Arrow are too large and left out: the comparisons with the first two are skipped, and the images
do not need Arrow.
"""

import io
import re
import subprocess
import sys
import tarfile
from collections.abc import Iterable
from pathlib import Path

from benchmarks.campaign.report import ROOT
from benchmarks.simclr import describe_data

PYTHON = "3.12"
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64", "any")

# The packages that the campaign and the tests for GPUs import, without torch, torchvision and their dependencies.
WHEELS = {
    "kornia": "augmentation",
    "kornia_rs": "kornia imports it",
    "jaxtyping": "shapes in signatures",
    "wadler_lindig": "jaxtyping imports it",
    "safetensors": "encoder weights",
    "PyYAML": "a run's configuration",
    "timm": "LARS, in the tests that need a GPU",
    "lightly": "the peer",
    "pytorch-lightning": "only lightly's kNN imports it",
    "torchmetrics": "pytorch-lightning imports it",
    "lightning-utilities": "lightly imports it",
    "packaging": "lightning-utilities and pytest import it",
    "tqdm": "lightly imports it",
    "pytest": "the tests that need a GPU",
    "iniconfig": "pytest imports it",
    "pluggy": "pytest imports it",
    "Pygments": "pytest imports it",
    "hypothesis": "the tests that need a GPU",
    "sortedcontainers": "hypothesis imports it",
    "beartype": "checks shapes in the tests",
}


def pack(folder: Path, data: Path | None) -> int:
    """Downloads the wheels, packs the images and prints their sizes; returns the exit code.

    Args:
        folder: folder for the files.
        data: Parquet files of the images; None for wheels only.
    """
    wheels = folder / "wheels"
    wheels.mkdir(parents=True, exist_ok=True)
    options = ["--no-deps", "--only-binary=:all:", f"--python-version={PYTHON}"]
    options += [f"--platform={each}" for each in PLATFORMS]
    wanted = [f"{name}=={version}" for name, version in read_pinned_versions(WHEELS).items()]
    command = [sys.executable, "-m", "pip", "download", "--quiet", *options, "--dest", str(wheels), *wanted]
    if code := subprocess.run(command).returncode:
        return code
    if data is not None:
        pack_images(data, folder / "images.tar.gz")
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    for path in files:
        print(f"{path.stat().st_size / 2**20:8.2f} MiB  {path.relative_to(folder)}")
    print(f"{sum(path.stat().st_size for path in files) / 2**20:8.2f} MiB  in total")
    return 0


def read_pinned_versions(names: Iterable[str]) -> dict[str, str]:
    """Reads the versions of packages from constraints.txt.

    Raises:
        KeyError: a package is missing.
    """
    lines = (line.partition("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    versions = {_normalise(name): version.strip() for name, _, version in lines}
    return {name: versions[_normalise(name)] for name in names}


def _normalise(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name.strip()).lower()


def pack_images(data: Path, path: Path) -> None:
    """Copies the encoded images from Parquet to a .tar.gz with a folder per class, which is read without Arrow.

    Args:
        data: the value of `--data`.
        path: path of the .tar.gz.
    """
    from ssl_sec.data.parquet import reading
    from ssl_sec.data.parquet.columns import Columns

    values = describe_data(data)
    with tarfile.open(path, "w:gz") as archive:
        for split in ("train", "test"):
            files = reading.inspect(values[split], Columns())
            number = 0
            for rows in reading.iterate_rows(files):
                for encoded, label in zip(rows.encoded.to_pylist(), rows.labels.tolist(), strict=True):
                    # Class folders are numbers, so that they are sorted by label.
                    info = tarfile.TarInfo(f"{split}/{label:05d}/{number:06d}{_suffix(encoded)}")
                    info.size = len(encoded)
                    archive.addfile(info, io.BytesIO(encoded))
                    number += 1


def _suffix(encoded: bytes) -> str:
    return ".png" if encoded.startswith(b"\x89PNG") else ".jpg"
