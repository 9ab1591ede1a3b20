"""JPEGs that are decoded at a part of their size."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image, ImageFilter

from ssl_sec.data.config import FolderConfig
from ssl_sec.data.crops import CentreSquare, RandomBox, ViewCrops
from ssl_sec.data.decode import decode_image
from ssl_sec.errors import DataError
from tests.data.files import encode

WHOLE, SCALED = CentreSquare(size_px=16), CentreSquare(size_px=16, scaled_decoding=True)


def photo(width, height, seed=0):
    """Smooth colours with edges, as most photos have."""
    colours = np.random.default_rng(seed).integers(0, 256, (5, 7, 3), np.uint8)
    image = Image.fromarray(colours).resize((width, height), Image.Resampling.BICUBIC)
    image.paste((250, 20, 20), (width // 3, height // 4, width // 2, height // 2))
    return image.filter(ImageFilter.GaussianBlur(1))


@pytest.fixture
def sizes(monkeypatch):
    """The sizes of the images that were decoded at a part of theirs."""
    found, of_reduced = [], CentreSquare.of_reduced

    def noted(crop, image, size, *more):
        found.append((image.size, size))
        return of_reduced(crop, image, size, *more)

    monkeypatch.setattr(CentreSquare, "of_reduced", noted)
    return found


@pytest.mark.parametrize(("width", "height", "factor"), [(160, 130, 2), (401, 303, 4), (300, 407, 4), (1200, 513, 8)])
@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("options", [{}, {"progressive": True}])
def test_a_large_jpeg_is_decoded_at_a_part_of_its_size(sizes, width, height, factor, orientation, options):
    exif = Image.Exif()
    exif[0x0112] = orientation
    encoded = encode(photo(width, height), "JPEG", quality=90, exif=exif, **options)
    for num_channels in (1, 3):
        whole, scaled = (decode_image(encoded, "x", num_channels, crop).int() for crop in (WHOLE, SCALED))
        assert scaled.shape == (num_channels, 16, 16)
        # The edges of the image are those of its blocks of 8 pixels.
        assert (scaled - whole).abs().float().mean() < 0.6 and (scaled - whole).abs().max() <= 12
    assert sizes == [((-(-width // factor), -(-height // factor)), (width, height))] * 2


@pytest.mark.parametrize("orientation", range(1, 9))
def test_the_parts_that_views_show_are_cut_out_of_the_upright_image(sizes, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    encoded = encode(photo(801, 603), "JPEG", quality=90, exif=exif)
    upright = encode(Image.fromarray(decode_image(encoded, "x", 3).permute(1, 2, 0).numpy()))
    views = (RandomBox(size_px=16, min_scale=0.2), RandomBox(size_px=9, max_scale=0.2))
    whole, scaled = (ViewCrops(size_px=16, scaled_decoding=scales, views=views) for scales in (False, True))
    for draw in (1, 2**40):
        parts = decode_image(encoded, "x", 3, whole, draw)
        assert parts.shape == (3 * (16**2 + 9**2),)
        assert torch.equal(parts, decode_image(upright, "x", 3, whole, draw))
        # Boxes of the reduced image begin and end at its pixels, half of one away at most.
        assert (decode_image(encoded, "x", 3, scaled, draw).int() - parts.int()).abs().float().mean() < 8
    assert (parts.int() - decode_image(encoded, "x", 3, whole, 1).int()).abs().float().mean() > 20
    assert sizes == []
    assert torch.equal(decode_image(encoded, "x", 3, scaled), decode_image(encoded, "x", 3, SCALED))
    assert len(sizes) == 2


@pytest.mark.parametrize("mode", ["L", "CMYK"])
def test_other_colour_spaces(sizes, mode):
    encoded = encode(photo(400, 300).convert(mode), "JPEG", quality=90)
    whole, scaled = (decode_image(encoded, "x", 3, crop).int() for crop in (WHOLE, SCALED))
    assert (scaled - whole).abs().float().mean() < 0.6 and len(sizes) == 1


@pytest.mark.parametrize(
    "encoded",
    [encode(photo(400, 300)), encode(photo(400, 300), "WEBP"), encode(photo(400, 127), "JPEG", quality=90)],
    ids=["PNG", "WEBP", "small JPEG"],
)
def test_other_images_are_decoded_as_a_whole(sizes, encoded):
    assert torch.equal(decode_image(encoded, "x", 3, SCALED), decode_image(encoded, "x", 3, WHOLE))
    assert sizes == []


@pytest.mark.parametrize(("size", "factor"), [((127, 9000), 1), ((128, 128), 2), ((255, 300), 2), ((5000, 256), 4)])
def test_four_times_the_side_of_the_result_remains(size, factor):
    assert SCALED.reduction(size) == factor
    assert WHOLE.reduction(size) == 1
    assert SCALED.reduction((512, 512)) == SCALED.reduction((10_000, 9_000)) == 8


def test_a_truncated_jpeg_is_still_an_error():
    encoded = encode(photo(400, 300), "JPEG", quality=90)
    with pytest.raises(DataError, match="x: cannot be decoded: "):
        decode_image(encoded[: len(encoded) * 2 // 3], "x", 3, SCALED)


@pytest.mark.parametrize("resident_limit_mib", [0, 4096])
def test_a_folder_of_photos_is_read_so_if_its_configuration_says_so(tmp_path, sizes, resident_limit_mib):
    (tmp_path / "train").mkdir()
    for number in range(3):
        photo(400, 300, number).save(tmp_path / "train" / f"{number}.jpg", quality=90)
    config = FolderConfig(root=str(tmp_path), image_size_px=16, resident_limit_mib=resident_limit_mib)
    every = torch.arange(3)
    whole = config.open("train").read(every).images.int()
    assert sizes == []
    scaled = replace(config, scaled_decoding=True).open("train").read(every).images.int()
    assert len(sizes) == 3
    assert not torch.equal(scaled, whole) and (scaled - whole).abs().float().mean() < 0.6
