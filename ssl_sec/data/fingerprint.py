"""Whether two sets are the same images with the same labels, without reading millions of files."""

import hashlib
import math
from functools import partial
from pathlib import Path

import numpy as np

from ssl_sec.data.decode import map_in_threads
from ssl_sec.data.encoded_images import EncodedImages
from ssl_sec.data.image_set import ImageSet, ResidentImages
from ssl_sec.data.shards.streamed import StreamedImages
from ssl_sec.data.stores import FileStore
from ssl_sec.errors import DataError

# Bytes of pixels in memory, and number of encoded images, that are hashed, evenly spaced.
_PIXEL_BYTES = 2**28
_FILES = 512
_BLOCKS = 8


def fingerprint(image_set: ImageSet) -> str:
    """Sixteen hexadecimal digits that differ for different sets, and do not depend on where a set is stored.

    They are a hash of all labels and class names, of the names of all files of a folder, and of the images: the pixels
    of those in memory, up to 256 MiB of them, or 512 of the encoded ones, or eight blocks of a set that is read by
    blocks.
    """
    digest = _listed(image_set)
    if isinstance(image_set, StreamedImages):
        blocks = image_set.reader.blocks
        for block in range(0, len(blocks.sizes), math.ceil(len(blocks.sizes) / _BLOCKS)):
            for image in blocks.read(block):
                digest.update(hashlib.sha256(image).digest())
        if image_set.rows is not None:
            digest.update(image_set.rows.numpy().tobytes())
        return digest.hexdigest()[:16]
    assert isinstance(image_set, ResidentImages | EncodedImages)
    if isinstance(image_set, ResidentImages):
        stride = math.ceil(len(image_set) * math.prod(image_set.image_shape) / _PIXEL_BYTES) or 1
        chosen = slice(None, None, stride)
        pixels = image_set.images[chosen if image_set.rows is None else image_set.rows[chosen]]
        digest.update(np.ascontiguousarray(pixels.cpu().numpy()).data)
        return digest.hexdigest()[:16]
    for image in range(0, len(image_set), math.ceil(len(image_set) / _FILES) or 1):
        digest.update(_content(image_set, image if image_set.rows is None else int(image_set.rows[image])))
    return digest.hexdigest()[:16]


def listing(image_set: ImageSet) -> str:
    """The fingerprint without the images themselves: labels, class names, names of files, sizes of blocks."""
    return _listed(image_set).hexdigest()[:16]


def file_sizes(image_set: ImageSet) -> str | None:
    """Sixteen hexadecimal digits of the sizes of all files of a folder, one look at each; None for other sets."""
    if not (isinstance(image_set, EncodedImages) and isinstance(image_set.store, FileStore)):
        return None
    rows = range(len(image_set)) if image_set.rows is None else image_set.rows.tolist()
    sizes = [size for _, size in map_in_threads(partial(_size, image_set.store), rows)]
    return hashlib.sha256(np.array(sizes, np.int64).tobytes()).hexdigest()[:16]


def _size(store: FileStore, row: int) -> int:
    try:
        return store.source(row).stat().st_size
    except OSError:  # decoding reports a missing image
        return -1


def _listed(image_set: ImageSet) -> "hashlib._Hash":
    digest = hashlib.sha256(repr((image_set.image_shape, image_set.class_names)).encode())
    if image_set.class_names or not isinstance(image_set, StreamedImages):
        digest.update(image_set.labels.numpy().tobytes())
    if isinstance(image_set, StreamedImages):
        digest.update(image_set.reader.blocks.sizes.numpy().tobytes())
    elif isinstance(image_set, EncodedImages) and isinstance(image_set.store, FileStore):
        paths, rows = image_set.store.paths, image_set.rows
        for row in range(len(paths)) if rows is None else rows.tolist():
            digest.update(paths[row] + b"\0")
    return digest


def _content(image_set: EncodedImages, row: int) -> bytes:
    try:
        source = image_set.store.source(row)
        return hashlib.sha256(source.read_bytes() if isinstance(source, Path) else source).digest()
    except (DataError, OSError):  # decoding reports an unreadable image
        return b"unreadable"
