"""Default names of runs, and the tags by which runs are found."""

import hashlib
import itertools
import json
import re
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ssl_sec.edges.masking import masked_values
from ssl_sec.edges.storage.bucket import Bucket
from ssl_sec.edges.storage.places import url_of
from ssl_sec.errors import writing
from ssl_sec.networks.config import TimmConfig
from ssl_sec.recipes.config import TrainingConfig
from ssl_sec.recipes.tracking import TrackingConfig
from ssl_sec.training.checkpoint import file_sha256

# Tag of a probe, or of a model in MLflow: the checkpoint that it is about; without the tag it is the last one.
CHECKPOINT_TAG = "checkpoint"

# Keys of files that a network starts from; the tag of a key with this suffix has its `weights_digest`.
WEIGHTS = ("encoder.weights", "head.weights")
DIGEST_SUFFIX = ".sha256"


def run_name_of(config: TrainingConfig) -> str:
    """Data set, encoder, loss unless it is NT-Xent, constraint and seed: ``cifar10-resnet18-sec-s0``.

    A recipe may have other parts between encoder and seed.
    """
    # MLflow's list shows 24 letters: the width of the encoder is only in a tag.
    parts = [config.data.title, _encoder(config), *config.name_parts, f"s{config.seed}"]
    return "-".join(re.sub(r"[^\w.]+", "_", part).strip("_") for part in parts)


def training_tags(config: TrainingConfig) -> dict[str, str]:
    """Tags that describe a training run."""
    name, width = _encoder(config), getattr(config.encoder, "width", 1.0)
    return {
        "data": config.data.title,
        "encoder": name if width == 1 else f"{name}x{width:g}",
        "loss": config.loss.name,
        "constraint": config.constraint_name,
        "seed": str(config.seed),
        **config.more_tags,
    }


def weights_tags(config: TrainingConfig, initial: Path) -> dict[str, str]:
    """Tags with the digest of each file of weights that a training starts from; none for a file that is missing.

    Args:
        config: the training's configuration.
        initial: the encoder of another run, in the training's folder if the training starts from one.
    """
    encoder = str(initial) if initial.is_file() else config.encoder.weights
    found: dict[str, str] = {}
    for key, weights in zip(WEIGHTS, (encoder, config.head.weights), strict=True):
        if weights is not None and (path := Path(weights).expanduser()).is_file():
            found[key + DIGEST_SUFFIX] = weights_digest(path)
    return found


def weights_digest(path: Path) -> str:
    """The SHA-256 of a file of weights; of safetensors without the strings in its header.

    So a run's encoder, its export and its version in MLflow have the same digest, though each file has other strings.
    """
    if path.suffix != ".safetensors":
        return file_sha256(path)
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        try:
            header: Any = json.loads(file.read(min(length, path.stat().st_size)))
            tensors = {name: about for name, about in header.items() if name != "__metadata__"}
        except (ValueError, AttributeError):  # no safetensors, which loading reports
            return file_sha256(path)
        digest = hashlib.sha256(json.dumps(tensors, sort_keys=True).encode())
        while block := file.read(2**20):
            digest.update(block)
    return digest.hexdigest()


def user_tags(tracking: TrackingConfig) -> dict[str, str]:
    """The tags given by the user, without secrets."""
    return {key: str(value) for key, value in masked_values(tracking.tags or {}).items()}


def _encoder(config: TrainingConfig) -> str:
    return config.encoder.model if isinstance(config.encoder, TimmConfig) else config.encoder.name


def with_numbers(name: str) -> Iterator[str]:
    """The name, then the name with -2, -3 and so on, without end."""
    yield name
    yield from (f"{name}-{count}" for count in itertools.count(2))


def claim_name(folder: Path, name: str) -> str:
    """Makes a new folder for a run, and returns its name; a number is added if the name is taken.

    Raises:
        StorageError: if no folder can be made there, or object storage cannot be used.
    """
    url = url_of(folder / name)
    bucket = None if url is None else Bucket(url.rpartition("/")[0])
    return next(candidate for candidate in with_numbers(name) if _claim(folder / candidate, bucket))


def _claim(folder: Path, bucket: Bucket | None) -> bool:
    """Makes a new folder for a run, in the bucket if there is one; whether its name was free."""
    if bucket is not None:
        return not bucket.files(folder.name) and bucket.create(f"{folder.name}/.claim", uuid.uuid4().bytes)
    with writing("output_dir", folder):
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            return False
    return True


def new_name(what: str) -> str:
    """A name that ends with the current time."""
    return f"{what}-{time.strftime('%Y%m%d-%H%M%S')}"
