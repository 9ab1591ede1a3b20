"""The lines of a model card that make an encoder's input of a file."""

import re
from dataclasses import replace

import numpy as np
import PIL.Image
import pytest
import torch

from ssl_sec.data.crops import CentreCrop, CentreSquare
from ssl_sec.data.decode import decode_image
from ssl_sec.exporting.reading import reading
from ssl_sec.exporting.record import Record
from ssl_sec.networks.config import ResNetConfig
from tests.data.files import noise
from tests.exporting.test_exporting import PAGE, exportable_resnet


@pytest.mark.parametrize(
    ("num_channels", "crop"),
    [
        (3, None),
        (1, None),
        *((3, CentreCrop(short_side_px=36, size_px=32, keep_aspect=keep)) for keep in (True, False)),
    ],
)
@pytest.mark.parametrize("as_numpy", [False, True])
@pytest.mark.parametrize("bits", [8, 16])
def test_the_lines_for_a_file_make_the_images_that_this_package_reads(
    num_channels, crop, as_numpy, bits, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    exif = PIL.Image.Exif()
    exif[0x0112] = 6  # the photo lies on its side
    if bits == 8:
        noise(77, 50).save("photo.jpg", quality=95, exif=exif)
    else:
        shades = np.random.default_rng(0).integers(0, 2**16, (50, 77), np.uint16)
        PIL.Image.fromarray(shades).save("photo.jpg", format="png", exif=exif)
    exportable = exportable_resnet(18, "cifar", 0.125, num_channels, size=32)
    if crop is not None:
        encoder = ResNetConfig(name="resnet18", stem="cifar", width=0.125)
        record = Record(run="a", encoder=encoder, head=None, image_shape=exportable.image_shape, crop=crop)
        exportable = replace(exportable, record=record)
    exec(reading(exportable, as_numpy), names := {})
    assert isinstance(names["images"], np.ndarray if as_numpy else torch.Tensor)
    images = torch.as_tensor(names["images"])
    ours = decode_image(tmp_path / "photo.jpg", "photo.jpg", num_channels, crop or CentreSquare(size_px=32))[None]
    assert (images.shape, images.dtype) == (ours.shape, torch.float32)
    torch.testing.assert_close(images, ours / 255, rtol=0, atol=0 if crop is None else 1.01 / 255)


@pytest.mark.parametrize("crop", [None, CentreCrop(short_side_px=36, size_px=32, keep_aspect=True)])
@pytest.mark.parametrize(
    ("num_channels", "value_ranges", "dtype"),
    [
        (5, None, "uint8"),
        (5, None, "uint16"),
        (5, ((0.0, 40000.0),), "uint16"),
        (2, ((-1.0, 1.0), (0.0, 0.5)), "float32"),
        (3, ((0.0, 40000.0),), "uint16"),
    ],
)
def test_the_lines_for_an_array_make_the_images_that_this_package_reads(
    num_channels, value_ranges, dtype, crop, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    random = np.random.default_rng(0)
    shape, top = (num_channels, 50, 77), 1 if dtype == "float32" else np.iinfo(dtype).max
    np.save("image.npy", (top * random.random(shape)).astype(dtype))
    exportable = exportable_resnet(18, "cifar", 0.125, num_channels, size=32)
    record = Record(
        run="a",
        encoder=ResNetConfig(name="resnet18", stem="cifar", width=0.125),
        head=None,
        image_shape=exportable.image_shape,
        crop=crop,
        value_ranges=value_ranges,
    )
    exec(reading(replace(exportable, record=record)), names := {})
    square = crop or CentreSquare(size_px=32)
    ours = decode_image(tmp_path / "image.npy", "x", num_channels, square, value_ranges=value_ranges)[None]
    torch.testing.assert_close(names["images"], ours / 255, rtol=0, atol=0 if crop is None else 1.01 / 255)


@pytest.mark.parametrize("num_channels", [1, 3])
@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "CMYK", "YCbCr", "LAB"])
def test_the_lines_convert_every_colour_space_as_this_package_does(num_channels, mode, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    image, random = PIL.Image.new(mode, (40, 40)), np.random.default_rng(0)
    image.frombytes(random.bytes(len(image.tobytes())))
    if mode == "P":
        image.putpalette(random.bytes(3 * 256))
        image.info["transparency"] = 3
    image.save("photo.jpg", format="tiff" if mode in ("CMYK", "YCbCr", "LAB") else "png")
    exec(reading(exportable_resnet(18, "cifar", 0.125, num_channels, size=32)), names := {})
    ours = decode_image(tmp_path / "photo.jpg", "photo.jpg", num_channels, CentreSquare(size_px=32))[None]
    torch.testing.assert_close(names["images"], ours / 255, rtol=0, atol=0)


def test_the_documented_lines_for_a_file_are_those_of_the_cards():
    (lines,) = re.findall(r"```python\n(import numpy, torch\n.*?)\n```", PAGE.read_text(), re.DOTALL)
    assert lines == reading(exportable_resnet(18, "cifar", 1.0, 3, size=32))


def test_there_are_no_lines_for_a_file_of_an_encoder_of_oblong_images():
    exportable = exportable_resnet(18, "cifar", 0.125, 1)
    assert reading(replace(exportable, image_shape=(1, 112, 96))) is None
