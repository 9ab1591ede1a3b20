"""Python code that makes an encoder's input of an image file, as this package reads files, without this package."""

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
    to_rgb = 'image = image.convert("RGB")\n'
    # A direct conversion of other colour spaces to grey fails or rounds differently.
    to_grey = f'if image.mode not in ("L", "LA"):\n    {to_rgb}image = image.convert("L")\n'
    crop = None if exportable.record is None else exportable.record.crop
    if crop is None:
        cut = (
            "side = min(image.size)\n"
            "left, top = (image.width - side) // 2, (image.height - side) // 2\n"
            "square = image.crop((left, top, left + side, top + side))\n"
            f"square = square.resize(({width}, {width}), Image.Resampling.BILINEAR)\n"
        )
    else:
        short, size = crop.short_side_px, crop.size_px
        resized = (
            "short = min(image.size)\n"
            f"width, height = {short} * image.width // short, {short} * image.height // short\n"
            if crop.keep_aspect
            else f"width, height = {short}, {short}\n"
        )
        cut = (
            f"{resized}"
            f"left, top = round((width - {size}) / 2), round((height - {size}) / 2)\n"
            "square = image.resize((width, height), Image.Resampling.BILINEAR)\n"
            f"square = square.crop((left, top, left + {size}, top + {size}))\n"
        )
    pixels = f"numpy.array(square, numpy.float32).reshape(1, {width}, {width}, {channels}).transpose(0, 3, 1, 2) / 255"
    return (
        f"import numpy{'' if as_numpy else ', torch'}\n"
        "from PIL import Image, ImageOps\n\n"
        'image = ImageOps.exif_transpose(Image.open("photo.jpg"))\n'
        'if image.mode.startswith("I"):  # grey of 16 bits, of which the high byte is kept\n'
        "    image = Image.fromarray((numpy.array(image) >> 8).astype(numpy.uint8))\n"
        f"{to_grey if channels == 1 else to_rgb}{cut}images = {pixels if as_numpy else f'torch.from_numpy({pixels})'}"
    )
