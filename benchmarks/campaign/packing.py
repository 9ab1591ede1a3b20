"""What a machine without a network needs for a campaign: wheels beside those of torch and torchvision, and the images.

There, of a folder that was packed:

    python -m pip install --no-index --no-deps <folder>/wheels/*.whl
    python -m benchmarks.campaign --data <folder>/images.tar.gz --output <folder of the campaign>

faiss, scikit-learn and Arrow are left out for their size: comparisons with the first two are then left out, and the
images need no Arrow.
"""

import io
import re
import subprocess
import sys
import tarfile
from pathlib import Path

from benchmarks.campaign.report import ROOT
from benchmarks.simclr import data_values

PYTHON = "3.12"
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64", "any")

# What is imported by the campaign and by the tests that need a GPU; all that torch and torchvision bring is left out.
WHEELS = {
    "kornia": "augmentation",
    "kornia_rs": "kornia imports it",
    "jaxtyping": "shapes in signatures",
    "wadler_lindig": "jaxtyping imports it",
    "safetensors": "encoder weights",
    "PyYAML": "a run's configuration",
    "timm": "LARS, in the tests that need a GPU",
    "lightly": "the peer",
    "pytorch-lightning": "lightly's kNN imports it; its losses and transforms do without",
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
    """Downloads the wheels and packs the images; prints what they weigh. Returns the exit code.

    Args:
        folder: where they are laid.
        data: Parquet of the images; None packs the wheels alone.
    """
    wheels = folder / "wheels"
    wheels.mkdir(parents=True, exist_ok=True)
    options = ["--no-deps", "--only-binary=:all:", f"--python-version={PYTHON}"]
    options += [f"--platform={each}" for each in PLATFORMS]
    wanted = [f"{name}=={version}" for name, version in pinned(WHEELS).items()]
    command = [sys.executable, "-m", "pip", "download", "--quiet", *options, "--dest", str(wheels), *wanted]
    if code := subprocess.run(command).returncode:
        return code
    if data is not None:
        pack_images(data, folder / "images.tar.gz")
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    for path in files:
        print(f"{path.stat().st_size / 2**20:8.2f} MiB  {path.relative_to(folder)}")
    print(f"{sum(path.stat().st_size for path in files) / 2**20:8.2f} MiB  together")
    return 0


def pinned(names: dict[str, str]) -> dict[str, str]:
    """The versions that constraints.txt has of some packages.

    Raises:
        KeyError: it lacks one.
    """
    lines = (line.partition("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    versions = {_canonical(name): version.strip() for name, _, version in lines}
    return {name: versions[_canonical(name)] for name in names}


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name.strip()).lower()


def pack_images(data: Path, path: Path) -> None:
    """Lays the encoded images of Parquet, as they are, into a folder by class in a .tar.gz, so that no Arrow is needed.

    Args:
        data: as for `--data`.
        path: of the .tar.gz.
    """
    from ssl_sec.data import parquet

    values = data_values(data)
    with tarfile.open(path, "w:gz") as archive:
        for split in ("train", "test"):
            files = parquet.inspect(values[split], None, "label")
            number = 0
            for rows in parquet.iterate_rows(files):
                for encoded, label in zip(rows.encoded.to_pylist(), rows.labels.tolist(), strict=True):
                    # Numbers, so that the order of the names is that of the labels.
                    about = tarfile.TarInfo(f"{split}/{label:05d}/{number:06d}{_suffix(encoded)}")
                    about.size = len(encoded)
                    archive.addfile(about, io.BytesIO(encoded))
                    number += 1


def _suffix(encoded: bytes) -> str:
    return ".png" if encoded.startswith(b"\x89PNG") else ".jpg"
