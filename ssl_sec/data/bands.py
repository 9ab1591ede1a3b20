"""Images of any number of channels, and of values that are no 8-bit colours: NumPy's files, TIFF, and Pillow's modes.

Each channel becomes 8 bits by itself: with a range of values, low to high is mapped to 0 to 255, and what lies outside
is clipped. Without one, 8 bits stay as they are, and of 16 bits the high byte is kept, as of other images.
"""

import math
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt8
from numpy.typing import NDArray
from PIL import ImageFile
from torch import Tensor

from ssl_sec.errors import ConfigError, DataError, counted

# Lowest and highest value of all channels, or of each.
ValueRanges = tuple[tuple[float, float], ...]

NUMPY_EXTENSION = ".npy"
_NUMPY_START = b"\x93NUMPY"
_TIFF_STARTS = (b"II*\x00", b"MM\x00*", b"II+\x00", b"MM\x00+")
# What Pillow opens without a change of its values; other modes are palettes or colour spaces.
_MODES = ("L", "LA", "RGB", "RGBA", "I", "F")


def check_value_ranges(ranges: ValueRanges | None, num_channels: int) -> None:
    """Checks that there is one range, or one for each channel, each from a value to a higher one.

    Raises:
        ConfigError: it is not so.
    """
    if ranges is None:
        return
    if len(ranges) not in (1, num_channels):
        allowed = f"one range, or one for each of {counted(num_channels, 'channel')}"
        raise ConfigError(f"data.value_ranges: found {counted(len(ranges), 'range')}, must be {allowed}")
    for low, high in ranges:
        if not low < high:
            raise ConfigError(f"data.value_ranges: found [{low:g}, {high:g}], must be from a value to a higher one")


def is_numpy_file(source: Path | bytes) -> bool:
    """Whether an encoded image is an array in NumPy's format; of a file, by its name."""
    if isinstance(source, Path):
        return source.suffix.lower() == NUMPY_EXTENSION
    return source.startswith(_NUMPY_START)


def is_tiff(source: Path | bytes) -> bool:
    """Whether an encoded image is a TIFF."""
    if isinstance(source, bytes):
        return source.startswith(_TIFF_STARTS)
    with source.open("rb") as file:
        return file.read(4) in _TIFF_STARTS


def read_numpy_file(source: Path | bytes, max_pixels: int) -> NDArray[Any]:
    """The array of a file in NumPy's format, [channels, height, width].

    Args:
        source: a file's path, or the encoded bytes.
        max_pixels: largest number of pixels.

    Raises:
        DataError: it has another number of dimensions, or more pixels.
        ValueError: it is damaged, or holds Python objects.
    """
    # Mapped, so that a file of too many pixels is not read.
    array = (
        np.load(source, mmap_mode="r", allow_pickle=False)
        if isinstance(source, Path)
        else np.load(BytesIO(source), allow_pickle=False)
    )
    if array.ndim == 2:
        array = array[None]
    if array.ndim != 3:
        raise DataError(f"an array of shape {list(array.shape)} found; allowed: [channels, height, width]")
    _check_pixels(array.shape[1:], max_pixels)
    return array


def read_tiff(source: Path | bytes, num_channels: int, max_pixels: int) -> NDArray[Any]:
    """The channels of the first image of a TIFF, [channels, height, width]: its samples, its pages, or both.

    8 bits of which 0 is white are inverted, as Pillow inverts them.

    Args:
        source: a file's path, or the encoded bytes.
        num_channels: as for `as_bytes`; nothing is decompressed of a file with others.
        max_pixels: largest number of pixels.

    Raises:
        DataError: it has other channels, or more pixels.
        ConfigError: tifffile is not installed.
    """
    try:
        import tifffile
    except ImportError:
        needed = "data.num_channels and data.value_ranges of TIFFs need: pip install 'ssl_sec[tiff]'"
        raise ConfigError(f"tifffile is not installed, which {needed}") from None
    with tifffile.TiffFile(source if isinstance(source, Path) else BytesIO(source)) as file:
        series = file.series[0]
        height, width = series.axes.index("Y"), series.axes.index("X")
        shape = series.shape[height], series.shape[width]
        _check_pixels(shape, max_pixels)
        _check_channels(series.size // math.prod(shape), num_channels)
        array = np.moveaxis(series.asarray(maxworkers=1), (height, width), (-2, -1))
        if array.dtype == np.uint8 and series.keyframe.photometric == tifffile.PHOTOMETRIC.MINISWHITE:
            array = 255 - array
    return array.reshape(-1, *array.shape[-2:])


def read_opened(image: ImageFile.ImageFile, has_ranges: bool) -> NDArray[Any]:
    """The channels of an image that Pillow has opened, [channels, height, width].

    Args:
        image: the image, not yet loaded.
        has_ranges: whether its values have a range.

    Raises:
        DataError: it has a palette or another colour space, or 16-bit colours and ranges: Pillow keeps their high byte.
    """
    if image.mode not in _MODES and not image.mode.startswith("I;16"):
        raise DataError(f"pixels of mode {image.mode} found; allowed: {', '.join((*_MODES, 'I;16'))}")
    if has_ranges and len(image.getbands()) > 1 and any("16" in str(tile.args) for tile in image.tile):
        raise DataError("colours of 16 bits found; allowed with data.value_ranges: TIFF, or NumPy's files")
    array = np.asarray(image)
    return array[None] if array.ndim == 2 else np.moveaxis(array, 2, 0)


def as_bytes(
    array: NDArray[Any], num_channels: int, ranges: ValueRanges | None
) -> UInt8[np.ndarray, "channels height width"]:
    """The channels as 8 bits.

    Args:
        array: values, [channels, height, width]; one channel stands for each of three.
        num_channels: number of channels that are needed.
        ranges: lowest and highest value, of all channels or of each; None for 8 or 16 bits alone.

    Raises:
        DataError: it has other channels, or values that need a range.
    """
    _check_channels(len(array), num_channels)
    if len(array) != num_channels:
        array = array.repeat(num_channels, 0)
    if ranges is not None:
        if array.dtype.kind not in "uif":
            raise DataError(f"values of type {array.dtype} found; allowed: integers and floats")
        low, high = np.array(ranges, np.float32).T[:, :, None, None]
        shares = (array.astype(np.float32) - low) / (high - low)
        # NaN, as satellites' images have where there is no value, counts as the lowest one.
        return np.rint(255 * np.nan_to_num(shares, nan=0.0).clip(0, 1)).astype(np.uint8)
    if array.dtype == np.uint8:
        return np.ascontiguousarray(array)
    if array.dtype.kind == "u" and array.dtype.itemsize == 2:
        return (array >> 8).astype(np.uint8)
    raise DataError(f"values of type {array.dtype} found; allowed: uint8, uint16, or others with data.value_ranges")


def as_picture(pixels: UInt8[Tensor, "*rest _ height width"]) -> UInt8[Tensor, "*rest _ height width"]:
    """The channels that a picture shows, in the third dimension from the end: of two the first, of others three."""
    num_channels = pixels.shape[-3]
    return pixels if num_channels in (1, 3) else pixels[..., : 3 if num_channels > 3 else 1, :, :]


def _check_channels(found: int, num_channels: int) -> None:
    """Raises a DataError unless there are so many channels, or one for each of three."""
    if found != num_channels and (found, num_channels) != (1, 3):
        raise DataError(f"{counted(found, 'channel')} found; allowed: {num_channels}, as data.num_channels says")


def _check_pixels(shape: Sequence[int], max_pixels: int) -> None:
    height, width = shape
    if height * width > max_pixels:
        raise DataError(f"{width} x {height} pixels found, at most {max_pixels} allowed")
    if height * width == 0:
        raise DataError(f"{width} x {height} pixels found; allowed: 1 or more")
