"""Counts, before a training, the images of a user's files that repeat others and those that cannot be read.

Two images are duplicates if their encoded bytes are equal. Of each image 16 bytes are kept. The workers share the
images.
"""

import contextlib
import hashlib
import json
import logging
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor

from ssl_sec.collectives import gather_objects, max_int_over_workers, own_rows
from ssl_sec.data.config import ParquetConfig, WebDatasetConfig
from ssl_sec.data.crops import CentreSquare
from ssl_sec.data.decode import FORMATS, decode_image, map_in_threads
from ssl_sec.data.encoded_images import LISTED_BAD_IMAGES, Candidate, DecodedImages
from ssl_sec.data.image_set import ImageSet, ResidentImages, check_shape
from ssl_sec.data.shards.cache_files import made_once
from ssl_sec.data.shards.streamed import StreamedImages
from ssl_sec.data.stores import unreadable_images
from ssl_sec.errors import DataError, counted, first_line, printable
from ssl_sec.progress import logged
from ssl_sec.recipes.pretraining.config import PretrainConfig
from ssl_sec.recipes.pretraining.opening import open_encoded
from ssl_sec.settings import from_values
from ssl_sec.training.step import Runtime, log_once

logger = logging.getLogger("ssl_sec.data")

_DIGEST_BYTES = 16
_NOTHING = bytes(_DIGEST_BYTES)  # the digest of an image without bytes, which repeats no other
_NAMED = 3  # in the log
_LISTED_DUPLICATES = 1000  # in the file
_CACHE_LAYOUT = 3  # increase it when the fields of a check, or what is counted, change


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageCheck:
    """What was found in the files of a training set.

    Attributes:
        num_images: number of images in the set.
        num_checked: number of images that were checked.
        num_duplicates: number of checked images with the same bytes as an earlier one.
        num_unreadable: number of images that cannot be decoded.
        duplicates: the first _LISTED_DUPLICATES, each with the image that it repeats.
        unreadable: the reasons why the first LISTED_BAD_IMAGES cannot be decoded, with their names.
    """

    num_images: int
    num_checked: int
    num_duplicates: int
    num_unreadable: int
    duplicates: tuple[tuple[str, ...], ...] = ()
    unreadable: tuple[str, ...] = ()

    def __str__(self) -> str:
        part = "" if self.num_checked == self.num_images else f" of {self.num_images:,}"
        some = "; ".join(f"{printable(name)} repeats {printable(other)}" for name, other in self.duplicates[:_NAMED])
        repeated = f"{counted(self.num_duplicates, 'duplicate')}{f', first: {some}' if some else ''}"
        why = f", first: {'; '.join(self.unreadable[:_NAMED])}" if self.unreadable else ""
        return f"checked {self.num_checked:,}{part} images: {repeated}; {self.num_unreadable:,} unreadable{why}"


def check_images(config: PretrainConfig, image_set: ImageSet, runtime: Runtime, path: Path) -> None:
    """Logs what `check` finds and writes it to a file, once for a run; every worker calls it.

    Args:
        config: the run's configuration.
        image_set: the training set.
        runtime: this worker's runtime.
        path: path of the file; a resumed run already has it.

    Raises:
        DataError: images cannot be decoded, and the data set's option is not to skip them.
    """
    is_done = max_int_over_workers(int(runtime.rank == 0 and path.exists()), runtime.device)
    found = None if is_done or not config.check_images else check(config, image_set, runtime)
    if found is None or runtime.rank > 0:
        return
    is_fine = found.num_duplicates == found.num_unreadable == 0
    # A set in memory has named the images that it left out when it was opened.
    shown = replace(found, unreadable=()) if isinstance(image_set, ResidentImages) else found
    logger.log(logging.INFO if is_fine else logging.WARNING, "%s: %s", image_set.name, shown)
    path.write_text(json.dumps(asdict(found)))


def check(config: PretrainConfig, image_set: ImageSet, runtime: Runtime) -> ImageCheck | None:
    """Reads the images of a user's files, at most `config.check_images` of them; None for a published set.

    Of a larger set, evenly spaced images are read; of a set read by blocks, those of one window.

    Raises:
        DataError: images cannot be decoded, and the data set's option is not to skip them.
    """
    # The pixels of a set in memory have been decoded already, so only its duplicates are counted.
    decoded = image_set if isinstance(image_set, ResidentImages) else None
    is_decoded = decoded is not None
    encoded = open_encoded(config.data) if is_decoded else image_set
    if encoded is None:
        return None
    assert isinstance(encoded, DecodedImages)
    num_checked = min(config.check_images, len(encoded))
    if isinstance(encoded, StreamedImages) and not is_decoded:
        encoded = encoded.apart()
        indices = encoded.sample(min(num_checked, encoded.window), seed=0)
    else:
        indices = torch.arange(num_checked) * len(encoded) // num_checked
    cache = None if is_decoded else _cache_path(config, encoded)
    known = gather_objects(_read(cache) if runtime.rank == 0 else None)[0]
    if known is not None and (not known.num_unreadable or encoded.on_bad_image == "skip"):
        return known
    log_once(runtime, "looking for duplicates and unreadable images among %s", f"{len(indices):,}")
    shares = gather_objects(_look_at(encoded, indices[own_rows(len(indices))], not is_decoded, runtime))
    reasons = [reason for _, own in shares for reason in own]
    if reasons and encoded.on_bad_image != "skip":
        raise unreadable_images(reasons, len(indices), encoded.name, encoded.on_bad_image)
    repeated = _repeated(b"".join(digests for digests, _ in shares))
    first = sorted(repeated)[:_LISTED_DUPLICATES]
    found = ImageCheck(
        num_images=len(encoded),
        num_checked=len(indices),
        num_duplicates=len(repeated),
        num_unreadable=len(reasons) if decoded is None else decoded.num_bad_images,
        duplicates=tuple(
            (encoded.image_name(int(indices[place])), encoded.image_name(int(indices[repeated[place]])))
            for place in first
        ),
        unreadable=tuple(map(str, reasons[:LISTED_BAD_IMAGES])) if decoded is None else decoded.bad_images,
    )
    if cache is not None and runtime.rank == 0:
        _keep(found, cache)
    return found


def _cache_path(config: PretrainConfig, image_set: DecodedImages) -> Path | None:
    """The file that keeps the check of a set for later runs; None for folders, whose files may change unnoticed."""
    if not isinstance(config.data, ParquetConfig | WebDatasetConfig):
        return None
    # The description has a digest of the names, sizes and modification times of the files.
    # Without a crop, an image of another size is an error.
    decoding = image_set.image_shape[0], image_set.value_ranges, image_set.crop is None, FORMATS
    key = (_CACHE_LAYOUT, image_set.description, decoding, config.check_images)
    name = hashlib.sha256(repr(key).encode()).hexdigest()[:32]
    return Path(config.data.cache_folder).expanduser() / f"{name}.check.json"


def _keep(found: ImageCheck, path: Path) -> None:
    """Keeps a check for later runs; does nothing if the folder cannot be written, since nothing else may need it."""

    def write(file: BinaryIO) -> None:
        file.write(json.dumps(asdict(found)).encode())

    with contextlib.suppress(DataError):
        made_once(path, write)


def _read(path: Path | None) -> ImageCheck | None:
    """The check of an earlier run; None if there is none."""
    try:
        return None if path is None else from_values(ImageCheck, json.loads(path.read_text()))
    except (OSError, ValueError):
        return None


def _look_at(
    image_set: DecodedImages, indices: Int64[Tensor, " own"], decodes: bool, runtime: Runtime
) -> tuple[bytes, list[DataError]]:
    """The digests of some images, concatenated, and the errors of those that are unreadable."""
    digests, reasons = bytearray(), list[DataError]()
    looks = map_in_threads(partial(_look, image_set, decodes), image_set.candidates(indices))
    workers = runtime.world_size
    for _, (digest, reason) in logged(looks, "checking", len(indices) * workers, size=lambda _: workers):
        digests += digest
        reasons += [] if reason is None else [reason]
    return bytes(digests), reasons


def _look(image_set: DecodedImages, decodes: bool, candidate: Candidate) -> tuple[bytes, DataError | None]:
    """The digest of an image, and its error if it is unreadable.

    Raises:
        DataError: its size differs from that of the others, and they are not resized.
    """
    _, name, source = candidate
    try:
        found = source()
        content = found.read_bytes() if isinstance(found, Path) else found
    except DataError as error:
        return _NOTHING, error
    except OSError as error:
        return _NOTHING, DataError(f"{printable(name)}: cannot be read: {first_line(error)}")
    digest = hashlib.blake2b(content, digest_size=_DIGEST_BYTES).digest() if content else _NOTHING
    if not decodes:
        return digest, None
    try:
        reduces = isinstance(image_set.crop, CentreSquare) and image_set.crop.scaled_decoding
        crop, channels = image_set.crop if reduces else None, image_set.image_shape[0]
        image = decode_image(content, name, channels, crop, value_ranges=image_set.value_ranges)
    except DataError as error:
        return digest, error
    if image_set.crop is None:
        check_shape(image, image_set.image_shape, name)
    return digest, None


def _repeated(digests: bytes) -> dict[int, int]:
    """Index of each digest that occurs earlier -> index of its first occurrence."""
    numbers = np.frombuffer(digests, np.uint64).reshape(-1, _DIGEST_BYTES // 8)
    order = np.lexsort(numbers.T)  # stable: equal digests keep their order
    ordered = numbers[order]
    is_repeated = np.zeros(len(order), bool)
    is_repeated[1:] = (ordered[1:] == ordered[:-1]).all(1) & ordered[1:].any(1)
    firsts = np.maximum.accumulate(np.where(is_repeated, 0, np.arange(len(order))))
    return dict(zip(order[is_repeated].tolist(), order[firsts[is_repeated]].tolist(), strict=True))
