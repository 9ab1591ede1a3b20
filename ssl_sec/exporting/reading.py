"""Python code that makes an encoder's input of an image file, as this package reads files, without this package."""

from textwrap import indent

from ssl_sec.data.bands import ValueRanges
from ssl_sec.exporting.formats import Exportable


def reading(exportable: Exportable, as_numpy: bool = False) -> str | None:
    """Python code that makes `images`, float32 in [0, 1] and of one file; None for encoders of oblong images.

    The file is made upright, converted and brought to the size of the training images as by `ssl_sec.data`: the
    pixels are those that `jobs.embed` reads, up to one grey level where a record has a crop.

    Args:
        exportable: the encoder.
        as_numpy: whether the images are a numpy array and no tensor.
    """
    channels, height, width = exportable.image_shape
    if height != width:
        return None
    ranges = None if exportable.record is None else exportable.record.value_ranges
    if channels not in (1, 3) or ranges is not None:
        return _reading_bands(exportable, ranges, as_numpy)
    to_rgb = 'image = image.convert("RGB")\n'
    # A direct conversion of other colour spaces to grey fails or rounds differently.
    to_grey = f'if image.mode not in ("L", "LA"):\n    {to_rgb}image = image.convert("L")\n'
    pixels = f"numpy.array(square, numpy.float32).reshape(1, {width}, {width}, {channels}).transpose(0, 3, 1, 2) / 255"
    return (
        f"import numpy{'' if as_numpy else ', torch'}\n"
        "from PIL import Image, ImageOps\n\n"
        'image = ImageOps.exif_transpose(Image.open("photo.jpg"))\n'
        'if image.mode.startswith("I"):  # grey of 16 bits, of which the high byte is kept\n'
        "    image = Image.fromarray((numpy.array(image) >> 8).astype(numpy.uint8))\n"
        f"{to_grey if channels == 1 else to_rgb}{_cutting(exportable)}"
        f"images = {pixels if as_numpy else f'torch.from_numpy({pixels})'}"
    )


def _reading_bands(exportable: Exportable, ranges: ValueRanges | None, as_numpy: bool) -> str:
    """The code for an array of channels."""
    channels, _, width = exportable.image_shape
    to_bytes = (
        "if values.dtype == numpy.uint16:  # the high byte is kept\n    values = (values >> 8).astype(numpy.uint8)\n"
        if ranges is None
        else f"low, high = numpy.array({[list(each) for each in ranges]}, numpy.float32).T[:, :, None, None]\n"
        "values = ((values.astype(numpy.float32) - low) / (high - low)).clip(0, 1)\n"
        "values = numpy.rint(255 * values).astype(numpy.uint8)\n"
    )
    of_a_plane = indent(f"image = Image.fromarray(plane)\n{_cutting(exportable)}", "    ")
    pixels = "numpy.stack(planes)[None] / 255"
    return (
        f"import numpy{'' if as_numpy else ', torch'}\n"
        "from PIL import Image\n\n"
        f'values = numpy.load("image.npy")  # [{channels}, height, width]\n'
        f"{to_bytes}planes = []\n"
        "for plane in values:\n"
        f"{of_a_plane}"
        "    planes.append(numpy.array(square, numpy.float32))\n"
        f"images = {pixels if as_numpy else f'torch.from_numpy({pixels})'}"
    )


def _cutting(exportable: Exportable) -> str:
    """The code that makes `square` of `image`."""
    width = exportable.image_shape[2]
    crop = None if exportable.record is None else exportable.record.crop
    if crop is None:
        return (
            "side = min(image.size)\n"
            "left, top = (image.width - side) // 2, (image.height - side) // 2\n"
            "square = image.crop((left, top, left + side, top + side))\n"
            f"square = square.resize(({width}, {width}), Image.Resampling.BILINEAR)\n"
        )
    short, size = crop.short_side_px, crop.size_px
    resized = (
        f"short = min(image.size)\nwidth, height = {short} * image.width // short, {short} * image.height // short\n"
        if crop.keep_aspect
        else f"width, height = {short}, {short}\n"
    )
    return (
        f"{resized}"
        f"left, top = round((width - {size}) / 2), round((height - {size}) / 2)\n"
        "square = image.resize((width, height), Image.Resampling.BILINEAR)\n"
        f"square = square.crop((left, top, left + {size}, top + {size}))\n"
    )
