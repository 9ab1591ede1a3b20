"""Small pictures of embedded images, from their data set or their files."""

import base64
import io
import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import UInt8
from PIL import Image
from torch import Tensor

from ssl_sec.data.bands import as_picture
from ssl_sec.data.config import DataConfig
from ssl_sec.data.crops import CentreSquare
from ssl_sec.data.decode import decode_image
from ssl_sec.data.fingerprint import fingerprint
from ssl_sec.embeddings.reading import EmbeddingSet
from ssl_sec.errors import DataError, counted, first_line
from ssl_sec.settings import Settings, from_values

logger = logging.getLogger("ssl_sec")

# The longest side of a picture; smaller images keep their size.
_SIDE_PX = 96

# The key of an image: its split, if it has one, its row in its set and its path.
Key = tuple[str | None, int, str | None]


@dataclass(frozen=True, kw_only=True)
class _Holder(Settings):
    data: DataConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Thumbnails:
    """Pictures as addresses that hold them (`data:image/png;base64,…`).

    Attributes:
        pictures: picture of each image that could be read.
        missing: the reason why pictures are missing; None if none are.
    """

    pictures: Mapping[Key, str]
    missing: str | None


def thumbnails(images: Iterable[Key], embeddings: EmbeddingSet, data: DataConfig | None) -> Thumbnails:
    """The pictures of some images.

    Args:
        images: keys of the images.
        embeddings: the embeddings, whose files say which data set was embedded.
        data: the data set, if it has been moved; None for the one that was embedded.
    """
    pictures: dict[Key, str] = {}
    missing: str | None = None
    by_split: dict[str | None, list[Key]] = {}
    for key in dict.fromkeys(images):
        by_split.setdefault(key[0], []).append(key)
    for split, keys in by_split.items():
        try:
            found = _from_set(split, keys, embeddings, data)
        except (OSError, ValueError) as error:
            found, why = _from_files(keys), first_line(error)
            if len(found) < len(keys):
                missing = why
                number = counted(len(keys) - len(found), "picture")
                of_split = f" of the {split} split" if split else ""
                logger.warning("%s%s could not be read: %s", number, of_split, why)
        pictures |= found
    return Thumbnails(pictures=pictures, missing=missing)


def _from_set(split: str | None, keys: list[Key], embeddings: EmbeddingSet, data: DataConfig | None) -> dict[Key, str]:
    """The pictures, read from the data set that was embedded."""
    origin = next((file.origin for file in embeddings.files if file.split == split and file.origin), None)
    if origin is None:
        raise ValueError(
            "the files do not say which images they are of; allowed: a column 'path' with files of this machine"
        )
    data = (data or from_values(_Holder, {"data": origin["data"]}).data).undecoded()
    *_, height, width = origin["image_shape"]
    # Oblong images were not cropped: they have one size.
    image_set = data.open_to_embed(origin["split"], CentreSquare(size_px=width) if height == width else None)
    if fingerprint(image_set) != origin["digest"]:
        raise DataError(
            f"the {origin['split']} split of {data.title} does not have the images that were embedded; "
            "allowed: data=<their set>"
        )
    images = image_set.read(torch.tensor([row for _, row, _ in keys])).images.cpu()
    return {key: _address(image) for key, image in zip(keys, images, strict=True)}


def _from_files(keys: list[Key]) -> dict[Key, str]:
    """The pictures of those images whose path is a file of this machine."""
    found: dict[Key, str] = {}
    for key in keys:
        path = key[2]
        if path is not None and os.path.isfile(path):
            try:
                found[key] = _address(decode_image(Path(path), path, 3))
            except DataError:
                continue  # the page says that it is missing
    return found


def _address(pixels: UInt8[Tensor, "channels height width"]) -> str:
    """The picture as PNG, encoded in the address itself."""
    array = as_picture(pixels).permute(1, 2, 0).numpy()
    image = Image.fromarray(array.squeeze(2) if array.shape[2] == 1 else array)
    image.thumbnail((_SIDE_PX, _SIDE_PX))
    file = io.BytesIO()
    image.save(file, "png")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
