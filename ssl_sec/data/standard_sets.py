"""Opens one split of a standard set: scikit-learn's digits, and CIFAR and MNIST by torchvision."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from ssl_sec.data.image_set import ResidentImages, Split
from ssl_sec.errors import DataError, MissingDataError, check_option, first_line
from ssl_sec.files import locked

DIGITS_SPLIT_SEED = 0

# Name of a set -> its folder, as torchvision names it.
_FOLDERS = {"cifar10": "cifar-10-batches-py", "cifar100": "cifar-100-python", "mnist": "MNIST/raw"}

# What torchvision raises depends on what went wrong: RuntimeError for wrong checksums and for a page that is not there,
# URLError (an OSError) without a network, and others for a damaged file of MNIST.
_TORCHVISION_ERRORS = (RuntimeError, OSError, ValueError, AssertionError, LookupError)


def open_digits(split: Split) -> ResidentImages:
    """The 1,797 handwritten digits that come with scikit-learn, grey, 8 x 8 pixels.

    Their values of 0-16 are scaled to 0-255 and rounded. The set has no official split: a fifth of each class
    (360 images) is the test split, drawn with a fixed seed.
    """
    check_option("split", split, Split)
    # Imported late: it would take a quarter of the time of importing this module.
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    pixels, targets = load_digits(return_X_y=True)
    rows = np.arange(len(targets))
    train, test = train_test_split(rows, test_size=0.2, stratify=targets, random_state=DIGITS_SPLIT_SEED)
    chosen = np.sort(train if split == "train" else test)
    images = np.rint(pixels[chosen].reshape(-1, 1, 8, 8) * (255 / 16)).astype(np.uint8)
    return ResidentImages(
        images=torch.from_numpy(images),
        labels=torch.from_numpy(targets[chosen].astype(np.int64)),
        class_names=tuple(map(str, range(10))),
        name=f"digits/{split}",
        description=f"scikit-learn's digits, {split} split of a stratified 80/20 split, seed {DIGITS_SPLIT_SEED}",
    )


def open_cifar10(split: Split, root: str | Path, download: bool = False) -> ResidentImages:
    """CIFAR-10: 50,000 and 10,000 RGB images of 32 x 32 pixels in 10 classes.

    Args:
        split: the official training or test images.
        root: folder that holds `cifar-10-batches-py`.
        download: fetch the set into `root` if it is not there; that of a complete set need not be writable.

    Raises:
        MissingDataError: there is no such set, or its checksums are wrong.
        DataError: the set cannot be downloaded.
    """
    from torchvision.datasets import CIFAR10  # torchvision takes two seconds to import

    return _open_cifar(CIFAR10, "cifar10", split, Path(root), download)


def open_cifar100(split: Split, root: str | Path, download: bool = False) -> ResidentImages:
    """CIFAR-100, with its 100 fine classes, from `cifar-100-python`; otherwise as `open_cifar10`."""
    from torchvision.datasets import CIFAR100

    return _open_cifar(CIFAR100, "cifar100", split, Path(root), download)


def open_mnist(split: Split, root: str | Path, download: bool = False) -> ResidentImages:
    """MNIST: 60,000 and 10,000 grey images of 28 x 28 pixels in 10 classes, from `MNIST/raw`.

    Otherwise as `open_cifar10`; torchvision compares checksums only of what it downloads.
    """
    from torchvision.datasets import MNIST

    images = _open_torchvision(MNIST, "mnist", split, Path(root), download)
    return ResidentImages(
        images=images.data.unsqueeze(1),
        labels=images.targets.long(),
        class_names=tuple(map(str, range(10))),
        name=f"mnist/{split}",
        description=f"mnist by torchvision, official {split} split",
    )


def _open_cifar(dataset: Any, name: str, split: Split, root: Path, download: bool) -> ResidentImages:
    images = _open_torchvision(dataset, name, split, root, download)
    return ResidentImages(
        images=torch.from_numpy(images.data).permute(0, 3, 1, 2).contiguous(),
        labels=torch.tensor(images.targets),
        class_names=tuple(images.classes),
        name=f"{name}/{split}",
        description=f"{name} by torchvision, official {split} split",
    )


def _open_torchvision(dataset: Any, name: str, split: Split, root: Path, download: bool) -> Any:
    check_option("split", split, Split)
    try:
        return dataset(str(root), train=split == "train")
    except _TORCHVISION_ERRORS as error:
        if not download:
            raise _missing(name, root) from error
    folder = root / _FOLDERS[name]
    # Files of MNIST that are there, perhaps cut off by a download that was killed, are not fetched again.
    hint = f"; if {folder} is damaged, remove it" if folder.is_dir() else ""
    try:
        root.mkdir(parents=True, exist_ok=True)
        # One process of each machine downloads; the others wait and find the files.
        with locked(root / f".{name}.lock"):
            return dataset(str(root), train=split == "train", download=True)
    except _TORCHVISION_ERRORS as error:
        raise DataError(f"{name}: cannot be downloaded to {root}: {first_line(error)}{hint}") from error


def require_downloaded(name: str, root: Path) -> None:
    """Checks that the folder of a set of torchvision exists, without importing torchvision.

    Args:
        name: name of the set.
        root: folder that holds it.

    Raises:
        MissingDataError: it does not exist.
    """
    if not (root / _FOLDERS[name]).is_dir():
        raise _missing(name, root)


def _missing(name: str, root: Path) -> MissingDataError:
    return MissingDataError(
        f"{name}: {root / _FOLDERS[name]} is missing or incomplete; set data.download=true to fetch it, "
        "or data.root to the folder that holds it; from Python, download=True or root"
    )
