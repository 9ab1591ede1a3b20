"""Encoded images to pixels: every file becomes uint8 [channels, height, width] or a `DataError` of one line.

The rules for each kind of file:

- Colour spaces (CMYK, YCbCr), palettes and 1-bit images are converted to RGB or to grey.
- 16 bits per channel are scaled to 8 by keeping the high byte, never clipped. 32 bits have no known
  range and are refused.
- Alpha is dropped, as in torchvision's folders, so that the same file gives the same pixels in both.
- The EXIF orientation is applied. A broken EXIF block is ignored: the pixels are intact.
- Of an animated file, or one with several pages, the first frame is read.
- The number of pixels is read from the header and refused above a limit before anything is decompressed.
- Images of other numbers of channels than 1 and 3, and of values with a range, are read by `ssl_sec.data.bands`, and so
  are NumPy's files.

The result neither depends on Pillow's global state nor changes it, but for the reader of HEIC, so that threads may
decode concurrently.
"""

import itertools
import math
import re
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np
import torch
from jaxtyping import UInt8
from numpy.typing import NDArray
from PIL import ExifTags, Image, ImageFile, UnidentifiedImageError, features
from torch import Tensor

from ssl_sec.data.bands import (
    NUMPY_EXTENSION,
    ValueRanges,
    as_bytes,
    check_value_ranges,
    is_numpy_file,
    is_tiff,
    read_numpy_file,
    read_opened,
    read_tiff,
)
from ssl_sec.data.crops import CentreSquare, Crop, ViewCrops
from ssl_sec.errors import ConfigError, DataError, check_option, first_line, printable

OnBadImage = Literal["raise", "skip"]

# Pillow's limit for its error: photos of 108 million pixels are read, and decoding one takes 0.7 GiB.
MAX_PIXELS = 178_956_970
# Pillow warns at half of it.
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)

# Photos of phones: HEIC needs pillow-heif, AVIF a Pillow that was built with it, as its wheels are.
_OF_PHONES = {"AVIF": (".avif",), "HEIF": (".heic", ".heif", ".hif")}


# Pillow can open more, some of it by starting other programs (EPS runs Ghostscript).
FORMATS = (
    *("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP"),
    *(("AVIF",) if features.check("avif") else ()),
    *(("HEIF",) if find_spec("pillow_heif") else ()),
)
EXTENSIONS = frozenset(
    (
        *".bmp .gif .jfif .jpe .jpeg .jpg .pbm .pgm .png .ppm .tif .tiff .webp".split(),
        *(extension for name, extensions in _OF_PHONES.items() if name in FORMATS for extension in extensions),
        NUMPY_EXTENSION,
    )
)
# Formats of photos that are not read.
UNREAD_EXTENSIONS = (
    frozenset(".arw .avif .cr2 .cr3 .dng .heic .heif .hif .jp2 .jxl .nef .orf .raf .rw2".split()) - EXTENSIONS
)
_HEIF_NEEDS = "HEIC needs: pip install 'ssl_sec[heif]'"
# What the file's first box has in bytes 4 to 12, of photos and of sequences (ISO/IEC 23008-12).
_HEIF_BRANDS = frozenset(b"ftyp" + brand for brand in (b"heic", b"heix", b"hevc", b"heim", b"heis", b"mif1", b"msf1"))


def advice_for(name: str) -> str:
    """What to do with a file of a format that is not read."""
    return _HEIF_NEEDS if name.lower().endswith(_OF_PHONES["HEIF"]) else "convert them to JPEG, PNG or WebP"


# EXIF 2.3, tag 0x0112: operation that turns the stored pixels upright.
UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
# Those in which the stored columns, or rows, stand in the other direction.
_FROM_THE_RIGHT, _FROM_BELOW = frozenset((2, 3, 7, 8)), frozenset((3, 4, 6, 7))


@dataclass(frozen=True, kw_only=True)
class Decoding:
    """How the encoded images of a set become pixels.

    Attributes:
        image_size_px: side to which the largest centred square of an image is resized; None leaves that to `crop`.
        num_channels: channels of the images: 3 for RGB, 1 for grey, others for images of so many channels.
        value_ranges: lowest and highest value of the pixels, which become 0 and 255: one pair for all channels, or one
            for each; None takes 8 bits as they are, and the high byte of 16.
        on_bad_image: action on an unreadable image: raise an error, or skip it: drop it from a resident set, replace it
            in a streamed one; None raises an error if no option can skip the image.
        resident_limit_mib: largest size of the pixels at which a set is decoded into memory.
        scaled_decoding: whether a JPEG whose sides are 8 · image_size_px or more is decoded at a half, a quarter or an
            eighth of them, so that 4 · image_size_px remain.
        crop: the crop of images of any size, taken whenever they are read: the set is then streamed, however small it
            is; without effect if image_size_px is given. Without either, all images must have one size.
    """

    image_size_px: int | None = None
    num_channels: int = 3
    value_ranges: ValueRanges | None = None
    on_bad_image: OnBadImage | None = None
    resident_limit_mib: int = 4096
    scaled_decoding: bool = False
    crop: Crop | None = None

    def __post_init__(self) -> None:
        if self.num_channels < 1:
            raise ConfigError(f"data.num_channels: found {self.num_channels}, must be ≥ 1")
        check_value_ranges(self.value_ranges, self.num_channels)
        if self.image_size_px is not None and self.image_size_px < 1:
            raise ConfigError(f"data.image_size_px: found {self.image_size_px}, must be ≥ 1, or null")
        if self.on_bad_image is not None:
            check_option("data.on_bad_image", self.on_bad_image, OnBadImage)

    @property
    def square(self) -> Crop | None:
        """The crop of each image; None if there is none."""
        if self.image_size_px is None:
            return self.crop
        return CentreSquare(size_px=self.image_size_px, scaled_decoding=self.scaled_decoding)

    def is_resident(self, num_images: int, image_shape: tuple[int, int, int]) -> bool:
        """Whether `num_images` images of a shape are decoded into memory."""
        fits = num_images * math.prod(image_shape) <= self.resident_limit_mib * 2**20
        return fits and (self.crop is None or self.image_size_px is not None)


# For colour images that already have one size.
AS_THEY_ARE = Decoding()

# Images held at once: enough for every thread, few enough for memory.
IMAGES_IN_THREADS = 256
IMAGES_IN_TURN = 32
# The time of an image that is worth threads. For smaller ones, threads wait for Python's lock instead: decoding one of
# 32 pixels takes 0.1 ms in turn, and longer in any number of threads.
_WORTH_THREADS_S = 3e-4

Item = TypeVar("Item")
Result = TypeVar("Result")


def decode_image(
    source: Path | bytes,
    name: str,
    num_channels: int,
    crop: Crop | None = None,
    draw: int | None = None,
    value_ranges: ValueRanges | None = None,
) -> UInt8[Tensor, "channels height width"] | UInt8[Tensor, " values"]:
    """The pixels of one encoded image.

    Args:
        source: a file's path, or the encoded bytes.
        name: name of the image in errors: the path, or the Parquet file and row.
        num_channels: 3 for RGB, 1 for grey (ITU-R 601 luma), others for images of so many channels.
        crop: the crop of the upright image; None keeps the whole image.
        draw: random number for a random crop.
        value_ranges: lowest and highest value, of all channels or of each; None for 8 bits and the high byte of 16.

    Returns:
        Pixels, 0-255, of shape [num_channels, crop.size_px, crop.size_px] if there is a crop. The parts that
        `ViewCrops` cuts with a draw, [num_channels, size_px, size_px] each, follow one another in one dimension.

    Raises:
        DataError: the file cannot be opened, is not an image of a known format, is truncated, has too many
            pixels, other channels, or pixels of 32 bits without a range; one line that names it.
        ConfigError: it is a TIFF, and the package that reads its channels is not installed.
    """
    name = printable(name)
    if is_numpy_file(source) or num_channels not in (1, 3) or value_ranges is not None:
        planes, orientation = _read_planes(source, name, num_channels, value_ranges)
        stored_size = planes[0].size
    else:
        pixels, stored_size, orientation = _read(source, name, num_channels, crop)
        planes = [pixels]
    upright = partial(_turned, orientation=orientation)
    if isinstance(crop, ViewCrops) and draw is not None:
        of_planes = (crop.parts(upright(plane), draw) for plane in planes)
        return torch.from_numpy(np.concatenate([_as_array(part).ravel() for part in zip(*of_planes, strict=True)]))
    if isinstance(crop, CentreSquare) and planes[0].size != stored_size:
        is_mirrored = orientation in _FROM_THE_RIGHT, orientation in _FROM_BELOW
        planes = [upright(crop.of_reduced(plane, stored_size, is_mirrored)) for plane in planes]
    else:
        planes = [upright(plane) if crop is None else crop(upright(plane), draw) for plane in planes]
    return torch.from_numpy(_as_array(planes))


def _read_planes(
    source: Path | bytes, name: str, num_channels: int, value_ranges: ValueRanges | None
) -> tuple[list[Image.Image], int]:
    """The channels, each as an image, and the EXIF orientation."""
    orientation = 1
    with _reading(name):
        if is_numpy_file(source):
            array = read_numpy_file(source, MAX_PIXELS)
        elif is_tiff(source):
            array = read_tiff(source, num_channels, MAX_PIXELS)
        else:
            with _opened(source) as image:
                array = read_opened(image, value_ranges is not None)
                orientation = _orientation(image)
        return [Image.fromarray(plane) for plane in as_bytes(array, num_channels, value_ranges)], orientation


@contextmanager
def _opened(source: Path | bytes) -> Iterator[ImageFile.ImageFile]:
    """The image, of which the header alone has been read."""
    if "HEIF" in FORMATS:
        _register_heif()
    try:
        opened = Image.open(source if isinstance(source, Path) else BytesIO(source), formats=FORMATS)
    except UnidentifiedImageError:
        raise DataError(_why_unidentified(source)) from None
    with opened as image:
        width, height = image.size
        if width * height > MAX_PIXELS:
            raise DataError(f"{width} x {height} pixels found, at most {MAX_PIXELS} allowed")
        yield image


@cache
def _register_heif() -> None:
    """Adds the reader of HEIC to those of Pillow, when it is first needed: it is slow to import."""
    from pillow_heif import register_heif_opener

    register_heif_opener()


def _why_unidentified(source: Path | bytes) -> str:
    if isinstance(source, Path):
        with source.open("rb") as file:
            first = file.read(12)
    else:
        first = source[:12]
    if first[4:] in _HEIF_BRANDS and "HEIF" not in FORMATS:
        return _HEIF_NEEDS
    return f"not an image; allowed: {', '.join((*FORMATS, 'NPY'))}"


def _read(
    source: Path | bytes, name: str, num_channels: int, crop: Crop | None
) -> tuple[Image.Image, tuple[int, int], int]:
    """The pixels as they are stored, perhaps at a part of their size; their whole size, and their EXIF orientation."""
    with _reading(name), _opened(source) as image:
        width, height = image.size
        if isinstance(crop, CentreSquare) and (factor := crop.reduction(image.size)) > 1:
            image.draft(None, (width // factor, height // factor))  # pyright: ignore[reportArgumentType]
        image.load()
        orientation = _orientation(image)
        pixels, mode = _to_8_bit(image), "L" if num_channels == 1 else "RGB"
        # To convert is to copy.
        return pixels if pixels.mode == mode else pixels.convert(mode), (width, height), orientation


@contextmanager
def _reading(name: str) -> Iterator[None]:
    """A context that turns the errors of a file into one line that names it."""
    try:
        yield
    except ConfigError:
        raise
    except DataError as error:
        raise DataError(f"{name}: {error}") from error.__cause__
    except Image.DecompressionBombError as error:
        found = re.findall(r"\d+", str(error))[0]
        raise DataError(f"{name}: {found} pixels found, at most {MAX_PIXELS} allowed") from None
    # For a malformed file the readers raise errors of any kind: OSError, SyntaxError, struct.error, ValueError,
    # IndexError, ….
    except Exception as error:
        raise DataError(f"{name}: cannot be decoded: {first_line(error)}") from error


def _turned(pixels: Image.Image, orientation: int) -> Image.Image:
    return pixels.transpose(UPRIGHT[orientation]) if orientation in UPRIGHT else pixels


def _as_array(planes: Sequence[Image.Image]) -> NDArray[np.uint8]:
    """Pixels of shape [channels, height, width]; with NumPy, as torch would start threads in each thread."""
    arrays = (np.array(plane) for plane in planes)
    ordered = [array.reshape(*array.shape[:2], -1).transpose(2, 0, 1) for array in arrays]
    return np.concatenate(ordered) if len(ordered) > 1 else np.ascontiguousarray(ordered[0])


def map_in_threads(function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[tuple[Item, Result]]:
    """Yields each item with its result, in order; in threads as soon as they are worth it.

    Args:
        function: for one image; the first error that it raises is raised here.
        items: the images, which are taken as they are needed.
    """
    remaining, in_threads = iter(items), False
    with ThreadPoolExecutor() as pool:
        while held := list(itertools.islice(remaining, IMAGES_IN_THREADS if in_threads else IMAGES_IN_TURN)):
            begun = time.perf_counter()
            results = list((pool.map if in_threads else map)(function, held))
            in_threads = in_threads or time.perf_counter() - begun > _WORTH_THREADS_S * len(held)
            yield from zip(held, results, strict=True)


def _orientation(image: Image.Image) -> int:
    try:
        return image.getexif().get(ExifTags.Base.Orientation, 1)
    except Exception:  # as varied as above
        return 1


def _to_8_bit(image: Image.Image) -> Image.Image:
    # Pillow holds 16-bit grey in these modes; it reduces 16-bit colours itself, also to the high byte.
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PPM"):
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise DataError("32-bit pixels found; allowed: at most 16 bits per channel, or data.value_ranges")
    if image.mode in ("L", "RGB"):
        return image
    # Grey with alpha stays grey; Pillow converts everything else by way of RGB, or of RGBA where a palette
    # has transparent entries.
    if image.mode == "LA":
        return image.convert("L")
    return image.convert("RGBA" if "transparency" in image.info else "RGB").convert("RGB")
