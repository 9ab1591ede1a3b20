import io
import math
import sys

import numpy as np
import pytest
import tifffile
import torch
from PIL import Image

from ssl_sec.data import decode
from ssl_sec.data.bands import as_picture
from ssl_sec.data.config import FolderConfig, ParquetConfig, WebDatasetConfig
from ssl_sec.data.crops import CentreCrop, CentreSquare, RandomBox, RandomResizedCrop, ViewCrops
from ssl_sec.data.decode import decode_image
from ssl_sec.data.shards.streamed import StreamedImages
from ssl_sec.errors import ConfigError, DataError
from ssl_sec.settings import from_values
from tests.data.files import coloured_png, encode, noise, write_folder, write_parquet
from tests.data.shards.test_tar import write_tar

RNG = np.random.default_rng(0)
# As a satellite's: 5 channels of 12 bits.
VALUES = RNG.integers(0, 4096, (5, 9, 7), dtype=np.uint16)
RGB_OF_16_BITS = coloured_png(4, 4, 16, b"".join(b"\0" + RNG.bytes(2 * 3 * 4) for _ in range(4)))
RANGES = ((0.0, 4095.0), (100.0, 900.0), (0.0, 1.0), (-50.0, 5000.0), (2000.0, 2001.0))


def npy(array) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def tiff(array, photometric="minisblack", **options) -> bytes:
    file = io.BytesIO()
    tifffile.imwrite(file, array, photometric=photometric, **options)
    return file.getvalue()


def slow_bytes(array, ranges):
    """One value after the other."""
    found = np.zeros(array.shape, np.uint8)
    for channel, row, column in np.ndindex(array.shape):
        low, high = ranges[channel if len(ranges) > 1 else 0]
        share = min(max((float(array[channel, row, column]) - low) / (high - low), 0.0), 1.0)
        found[channel, row, column] = round(255 * share)
    return torch.from_numpy(found)


@pytest.mark.parametrize("num_channels", [1, 2, 3, 4, 13])
def test_bytes_of_any_number_of_channels_stay_as_they_are(num_channels, tmp_path):
    array = RNG.integers(0, 256, (num_channels, 6, 5), dtype=np.uint8)
    np.save(tmp_path / "x.npy", array)
    for source in (npy(array), tmp_path / "x.npy"):
        pixels = decode_image(source, "x", num_channels)
        assert pixels.dtype == torch.uint8 and pixels.is_contiguous()
        assert np.array_equal(pixels.numpy(), array)
    if num_channels == 1:
        assert np.array_equal(decode_image(npy(array[0]), "x", 1).numpy(), array)
        assert np.array_equal(decode_image(npy(array), "x", 3).numpy(), array.repeat(3, 0))


def test_of_16_bits_the_high_byte_is_kept():
    array = np.array([[[0, 255, 256, 0x7FFF, 0x8000, 65535]]], np.uint16)
    assert decode_image(npy(array), "x", 1).flatten().tolist() == [0, 0, 1, 0x7F, 0x80, 255]
    assert decode_image(npy(array.astype(">u2")), "x", 1).flatten().tolist() == [0, 0, 1, 0x7F, 0x80, 255]


@pytest.mark.parametrize("dtype", ["uint16", "int32", "float32", "float64", ">i2"])
@pytest.mark.parametrize("ranges", [RANGES, RANGES[:1]])
def test_ranges_are_mapped_to_bytes_and_clipped(ranges, dtype):
    array = VALUES.astype(dtype)
    found, expected = decode_image(npy(array), "x", 5, value_ranges=ranges), slow_bytes(array, ranges)
    # Shares are computed in float32: a half may be rounded to either side.
    assert (found.int() - expected.int()).abs().max() <= 1
    assert (found != expected).float().mean() < 0.02


def test_what_is_no_number_counts_as_the_lowest_value():
    array = np.array([[[math.nan, math.inf, -math.inf, 1.0]]], np.float32)
    assert decode_image(npy(array), "x", 1, value_ranges=((0.0, 2.0),)).flatten().tolist() == [0, 255, 0, 128]


@pytest.mark.parametrize(
    "source",
    [
        tiff(VALUES),
        tiff(VALUES, planarconfig="separate"),
        tiff(np.moveaxis(VALUES, 0, 2).copy(), planarconfig="contig"),
        tiff(VALUES, compression="zlib"),
        tiff(VALUES, compression="lzw", tile=(16, 16)),
        tiff(VALUES, bigtiff=True, byteorder=">"),
        tiff(VALUES[:, None], imagej=True),
    ],
    ids=["pages", "planes", "samples", "deflate", "lzw in tiles", "BigTIFF", "ImageJ"],
)
def test_the_channels_of_a_tiff_are_its_samples_or_its_pages(source, tmp_path):
    (tmp_path / "x.tif").write_bytes(source)
    for each in (source, tmp_path / "x.tif"):
        assert torch.equal(decode_image(each, "x", 5), decode_image(npy(VALUES), "x", 5))
        found = decode_image(each, "x", 5, value_ranges=RANGES)
        assert torch.equal(found, decode_image(npy(VALUES), "x", 5, value_ranges=RANGES))


def test_a_tiff_of_one_channel_stands_for_each_of_three():
    found = decode_image(tiff(VALUES[0]), "x", 3, value_ranges=((0.0, 4095.0),))
    assert torch.equal(found, slow_bytes(VALUES[:1], RANGES[:1]).expand(3, -1, -1))


@pytest.mark.parametrize(("mode", "num_channels"), [("RGBA", 4), ("LA", 2)])
def test_transparency_is_a_channel_where_so_many_are_asked_for(mode, num_channels):
    image = Image.fromarray(RNG.integers(0, 256, (6, 5, num_channels), dtype=np.uint8), mode=mode)
    found = decode_image(encode(image), "x", num_channels)
    assert np.array_equal(found.permute(1, 2, 0).numpy(), np.asarray(image))


def test_grey_of_16_and_32_bits_has_a_range_too():
    for image in (Image.fromarray(VALUES[0]), Image.fromarray(VALUES[0].astype(np.float32))):
        found = decode_image(encode(image, "TIFF"), "x", 1, value_ranges=RANGES[:1])
        assert torch.equal(found, slow_bytes(VALUES[:1], RANGES[:1]))
    found = decode_image(encode(Image.fromarray(VALUES[0])), "x", 3, value_ranges=RANGES[:1])
    assert torch.equal(found, slow_bytes(VALUES[:1], RANGES[:1]).expand(3, -1, -1))


@pytest.mark.parametrize("photometric", ["minisblack", "miniswhite"])
def test_white_is_white_with_a_range_too(photometric):
    source = tiff(np.array([[0, 55, 200]], np.uint8), photometric)
    found = decode_image(source, "x", 1, value_ranges=((0.0, 255.0),))
    assert torch.equal(found, decode_image(source, "x", 1))
    assert found.flatten().tolist() == ([255, 200, 55] if photometric == "miniswhite" else [0, 55, 200])


def test_a_photo_is_turned_upright_with_a_range_too():
    exif = Image.Exif()
    exif[0x0112] = 6
    source = encode(noise(9, 5), exif=exif)
    assert torch.equal(decode_image(source, "x", 3, value_ranges=((0.0, 255.0),)), decode_image(source, "x", 3))


@pytest.mark.parametrize(
    ("crop", "draw"),
    [
        (CentreSquare(size_px=6), None),
        (CentreCrop(short_side_px=8, size_px=6), None),
        (RandomResizedCrop(short_side_px=8, size_px=5, min_scale=0.3), 7),
        (ViewCrops(size_px=6, views=(RandomBox(size_px=4, min_scale=0.2, max_scale=0.9),) * 2), 7),
    ],
)
def test_each_channel_is_cropped_as_a_grey_image(crop, draw):
    array = RNG.integers(0, 256, (5, 40, 30), dtype=np.uint8)
    found = decode_image(npy(array), "x", 5, crop, draw)
    alone = [decode_image(encode(Image.fromarray(plane)), "x", 1, crop, draw) for plane in array]
    if isinstance(crop, ViewCrops):  # the parts follow one another
        parts = torch.stack([values.view(2, -1) for values in alone], 1)
        assert torch.equal(found, parts.flatten())
    else:
        assert torch.equal(found, torch.cat(alone))


@pytest.mark.parametrize(
    ("source", "options", "found"),
    [
        (npy(VALUES), {"num_channels": 3}, "5 channels found; allowed: 3, as data.num_channels says"),
        (tiff(VALUES), {"num_channels": 4}, "5 channels found; allowed: 4, as data.num_channels says"),
        (encode(noise(4, 4)), {"num_channels": 5}, "3 channels found; allowed: 5, as data.num_channels says"),
        (npy(VALUES[0]), {"num_channels": 5}, "1 channel found; allowed: 5, as data.num_channels says"),
        (npy(VALUES[None]), {}, r"an array of shape \[1, 5, 9, 7\] found; allowed: \[channels, height, width\]"),
        (npy(VALUES.astype(np.float32)), {}, "values of type float32 found; allowed: uint8, uint16, or others with"),
        (npy(VALUES > 9), {"value_ranges": ((0.0, 1.0),)}, "values of type bool found; allowed: integers and floats"),
        (npy(np.array([[["a", 1]]], object)), {}, "cannot be decoded: .*pickle"),
        (npy(VALUES)[:200], {}, "cannot be decoded: "),
        (tiff(VALUES)[:100], {}, "cannot be decoded: "),
        (npy(VALUES[:, :0]), {}, "7 x 0 pixels found; allowed: 1 or more"),
        (encode(noise(4, 4).convert("P")), {}, "pixels of mode P found; allowed: L, LA, RGB"),
        (RGB_OF_16_BITS, {"num_channels": 3, "value_ranges": ((0.0, 9.0),)}, "colours of 16 bits found; allowed "),
        (b"no image", {}, "not an image; allowed: BMP, .*, NPY"),
    ],
)
def test_a_file_that_does_not_fit_is_one_line(source, options, found):
    with pytest.raises(DataError, match=f"^x: {found}") as caught:
        decode_image(source, "x", **{"num_channels": 5, **options})
    assert "\n" not in str(caught.value)


def test_too_many_pixels_are_refused_before_they_are_read(monkeypatch, tmp_path):
    monkeypatch.setattr(decode, "MAX_PIXELS", 62)
    np.save(tmp_path / "x.npy", VALUES)
    for source in (npy(VALUES), tmp_path / "x.npy", tiff(VALUES, compression="zlib")):
        with pytest.raises(DataError, match="^x: 7 x 9 pixels found, at most 62 allowed"):
            decode_image(source, "x", 5)


def test_a_tiff_of_other_channels_is_not_decompressed(monkeypatch):
    monkeypatch.setattr(tifffile.TiffPageSeries, "asarray", None)
    with pytest.raises(DataError, match="^x: 5 channels found; allowed: 4, as data.num_channels says$"):
        decode_image(tiff(VALUES, compression="zlib"), "x", 4)


def test_a_tiff_without_the_package_that_reads_it_is_no_bad_image(monkeypatch):
    monkeypatch.setitem(sys.modules, "tifffile", None)
    with pytest.raises(ConfigError, match=r"^tifffile is not installed, which .* need: pip install 'ssl_sec\[tiff\]'$"):
        decode_image(tiff(VALUES), "x", 5)
    assert decode_image(encode(noise(4, 4), "TIFF"), "x", 3).shape == (3, 4, 4)


@pytest.fixture(scope="module")
def sets(tmp_path_factory):
    """The same images in a folder, in Parquet and in tar files."""
    root = tmp_path_factory.mktemp("bands")
    arrays = RNG.integers(0, 4096, (8, 5, 6, 6), dtype=np.uint16)
    encoded = [npy(array) if number % 2 else tiff(array) for number, array in enumerate(arrays)]
    names = [f"{number}.{'npy' if number % 2 else 'tif'}" for number in range(8)]
    write_folder(root / "folder" / "train", {f"{number}.tif": tiff(array) for number, array in enumerate(arrays)})
    write_parquet(root / "train.parquet", encoded, [0] * 8)
    write_tar(root / "train.tar", dict(zip(names, encoded, strict=True)))
    return root, torch.stack([slow_bytes(array, RANGES) for array in arrays])


@pytest.mark.parametrize("limit_mib", [0, 100])
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("kind", ["folder", "parquet", "webdataset"])
def test_every_kind_of_set_reads_them(sets, kind, window, limit_mib, monkeypatch, tmp_path):
    root, expected = sets
    kinds = {
        "folder": (FolderConfig, {"root": str(root / "folder")}),
        "parquet": (ParquetConfig, {"train": [str(root / "train.parquet")], "shuffle_window": window}),
        "webdataset": (WebDatasetConfig, {"train": [str(root / "train.tar")], "shuffle_window": window or 4}),
    }
    monkeypatch.setenv("SSL_SEC_CACHE", str(tmp_path))
    cls, values = kinds[kind]
    pixels = {"num_channels": 5, "value_ranges": RANGES, "resident_limit_mib": limit_mib}
    image_set = from_values(cls, {"name": kind, **values, **pixels}).open("train")
    assert image_set.image_shape == (5, 6, 6)
    is_by_blocks = kind == "webdataset" or (kind == "parquet" and window is not None)
    assert isinstance(image_set, StreamedImages) == (limit_mib == 0 and is_by_blocks)
    found = image_set.read(torch.arange(8)).images
    assert (found.int() - expected.int()).abs().max() <= 1


def test_arrays_beside_images_are_no_images(tmp_path, monkeypatch):
    monkeypatch.setenv("SSL_SEC_CACHE", str(tmp_path))
    names = ["a.jpg", "a.npy", "b.npy", "b.png"]
    files = {name: npy(VALUES) if name.endswith("npy") else encode(noise(4, 4)) for name in names}
    folder = FolderConfig(root=str(write_folder(tmp_path / "folder" / "train", files).parent)).open("train")
    classes = {f"train/{name[0]}/{name}": content for name, content in files.items()}
    root = write_folder(tmp_path / "classes", {"train/features.npy": npy(VALUES), **classes})
    labelled = FolderConfig(root=str(root)).open("train")
    assert len(labelled) == 2 and labelled.class_names == ("a", "b")
    shard = WebDatasetConfig(train=(str(write_tar(tmp_path / "train.tar", files)),)).open("train")
    for image_set in (folder, shard):
        assert len(image_set) == 2 and image_set.image_shape == (3, 4, 4)


@pytest.mark.parametrize(
    ("ranges", "found"),
    [
        (((0.0, 1.0), (0.0, 2.0)), ": found 2 ranges, must be one range, or one for each of 5 channels"),
        ((), ": found 0 ranges, must be one range"),
        (((3.0, 3.0),), r": found \[3, 3\], must be from a value to a higher one"),
        (((0.0, math.inf),), r"\[0\]\[1\]: found inf, must be a finite number"),
        (((math.nan, 1.0),), r"\[0\]\[0\]: found nan, must be a finite number"),
    ],
)
def test_ranges_that_do_not_fit_are_refused_with_the_configuration(ranges, found):
    with pytest.raises(ConfigError, match=rf"^data.value_ranges{found}"):
        FolderConfig(root="x", num_channels=5, value_ranges=ranges)


def test_a_set_is_read_with_the_ranges_of_another_unless_it_has_its_own():
    data = FolderConfig(root="x")
    assert data.read_as(8, 5, RANGES) == FolderConfig(root="x", image_size_px=8, num_channels=5, value_ranges=RANGES)
    own = FolderConfig(root="x", value_ranges=((0.0, 9.0),))
    assert own.read_as(num_channels=5, value_ranges=RANGES).ranges == ((0.0, 9.0),)
    assert data.read_as(value_ranges=RANGES).ranges is None  # it has three channels
    assert data.read_as(value_ranges=RANGES[:1]).ranges == RANGES[:1]


@pytest.mark.parametrize(("num_channels", "shown"), [(1, 1), (2, 1), (3, 3), (4, 3), (13, 3)])
def test_a_picture_shows_three_channels_or_one(num_channels, shown):
    images = torch.from_numpy(RNG.integers(0, 256, (2, num_channels, 4, 4), dtype=np.uint8))
    assert torch.equal(as_picture(images), images[:, :shown])
