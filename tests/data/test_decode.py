import itertools
import math
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from PIL import Image, ImageFile

from ssl_sec.data import decode
from ssl_sec.data.crops import CentreCrop, CentreSquare, RandomResizedCrop
from ssl_sec.data.decode import IMAGES_IN_THREADS, IMAGES_IN_TURN, MAX_PIXELS, decode_image, map_in_threads
from ssl_sec.errors import DataError, printable
from tests.data.files import bomb, encode, noise, plain


def error_line(source, **options) -> str:
    with pytest.raises(DataError) as caught:
        decode_image(source, "x.png", 3, **options)
    message = str(caught.value)
    assert "\n" not in message and message.startswith("x.png: ")
    return message


def test_rgb_and_grey_are_exact():
    image = noise(5, 7)
    rgb = decode_image(encode(image), "x", 3)
    assert rgb.dtype == torch.uint8 and rgb.is_contiguous()
    assert np.array_equal(rgb.permute(1, 2, 0).numpy(), np.asarray(image))
    grey = decode_image(encode(image), "x", 1)
    assert np.array_equal(grey[0].numpy(), np.asarray(image.convert("L")))
    assert torch.equal(decode_image(encode(image.convert("L")), "x", 3), grey.expand(3, -1, -1))


def test_file_equals_bytes(tmp_path):
    (tmp_path / "x.png").write_bytes(encode(noise()))
    assert torch.equal(decode_image(tmp_path / "x.png", "x", 3), decode_image(encode(noise()), "x", 3))


@pytest.mark.parametrize("num_channels", [1, 3])
def test_cmyk_jpeg(num_channels):
    # Cyan ink alone is (0, 255, 255).
    pixels = decode_image(encode(Image.new("CMYK", (8, 8), (255, 0, 0, 0)), "JPEG"), "x", num_channels)
    expected = [(0.587 + 0.114) * 255] if num_channels == 1 else [0.0, 255.0, 255.0]
    assert torch.allclose(pixels.float().mean((1, 2)), torch.tensor(expected), atol=3)


def test_one_bit():
    image = Image.new("1", (2, 1))
    image.putpixel((1, 0), 1)
    assert decode_image(encode(image), "x", 1).tolist() == [[[0, 255]]]


@pytest.mark.parametrize("image_format", ["PNG", "TIFF", "PPM"])
def test_16_bit_grey_is_scaled_and_not_clipped(image_format):
    values = np.array([[0, 255, 256, 0x7F00, 0x8000, 65535]], dtype=np.uint16)
    pixels = decode_image(encode(Image.fromarray(values), image_format), "x", 1)
    assert pixels[0, 0].tolist() == [0, 0, 1, 0x7F, 0x80, 255]


@pytest.mark.parametrize("value", [np.int32(7), np.float32(0.5)])
def test_32_bit_is_refused(value):
    assert "32-bit" in error_line(encode(Image.fromarray(np.full((2, 2), value)), "TIFF"))


@pytest.mark.parametrize("transparency", [None, 1, bytes([255, 0, 128])])
def test_palette(transparency):
    image = Image.new("P", (3, 1))
    image.putpalette([10, 20, 30, 40, 50, 60, 70, 80, 90])
    for x in range(3):
        image.putpixel((x, 0), x)
    options = {} if transparency is None else {"transparency": transparency}
    pixels = decode_image(encode(image, **options), "x", 3)
    assert pixels[:, 0].T.tolist() == [[10, 20, 30], [40, 50, 60], [70, 80, 90]]


@pytest.mark.parametrize(("mode", "colour"), [("RGBA", (9, 9, 9, 0)), ("LA", (9, 0))])
@pytest.mark.parametrize("num_channels", [1, 3])
def test_alpha_is_dropped(mode, colour, num_channels):
    pixels = decode_image(encode(Image.new(mode, (2, 2), colour)), "x", num_channels)
    assert pixels.shape == (num_channels, 2, 2) and (pixels == 9).all()


def test_animation_gives_the_first_frame():
    frames = [Image.new("L", (4, 4), value) for value in (50, 200)]
    for image_format in ("GIF", "PNG"):
        encoded = encode(frames[0], image_format, save_all=True, append_images=frames[1:])
        assert (decode_image(encoded, "x", 1) == 50).all()


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("image_format", ["PNG", "TIFF"])
def test_exif_orientation(orientation, image_format):
    stored = np.arange(6, dtype=np.uint8).reshape(2, 3)
    # EXIF 2.3: which side of the scene the stored row 0 and column 0 are.
    upright = {
        1: stored,
        2: stored[:, ::-1],
        3: stored[::-1, ::-1],
        4: stored[::-1],
        5: stored.T,
        6: np.rot90(stored, -1),
        7: stored[::-1, ::-1].T,
        8: np.rot90(stored),
    }[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    assert np.array_equal(decode_image(encode(Image.fromarray(stored), image_format, exif=exif), "x", 1)[0], upright)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("image_format", ["AVIF", "HEIF"])
def test_photos_of_phones_are_upright(orientation, image_format):
    """Both formats have their own tags of orientation, too, which are not applied a second time."""
    stored = np.arange(6, dtype=np.uint8).reshape(2, 3) * 40
    exif = Image.Exif()
    exif[0x0112] = orientation
    tags = exif.tobytes()
    photo = Image.fromarray(stored.repeat(32, 0).repeat(32, 1)).convert("RGB")
    read = decode_image(encode(photo, image_format, exif=tags, quality=95), "x", 3)
    png = decode_image(encode(Image.fromarray(stored), "PNG", exif=tags), "x", 3)
    middles = read[:, 16::32, 16::32].int()  # clear of the blurred edges
    assert middles.shape == png.shape and (middles - png.int()).abs().max() <= 4


def test_heic_without_its_reader_names_the_package(monkeypatch):
    photo = encode(Image.new("RGB", (64, 64)), "HEIF")
    monkeypatch.setattr(decode, "FORMATS", ("JPEG", "AVIF"))
    assert error_line(photo) == "x.png: HEIC needs: pip install 'ssl_sec[heif]'"


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(("image_format", "exif"), [("JPEG", b"Exif\0\0nonsense"), ("PNG", b"nonsense")])
def test_broken_exif_is_ignored(image_format, exif):
    """Of which Pillow makes an error in a PNG alone."""
    assert decode_image(encode(noise(), image_format, exif=exif), "x", 3).shape == (3, 64, 64)


def test_resizing_takes_the_centred_square():
    pixels = np.zeros((4, 12), dtype=np.uint8)
    pixels[:, 4:8] = 200
    assert (decode_image(encode(Image.fromarray(pixels)), "x", 1, crop=CentreSquare(size_px=2)) == 200).all()
    assert (decode_image(encode(Image.fromarray(pixels.T.copy())), "x", 1, crop=CentreSquare(size_px=9)) == 200).all()


def test_resizing_is_antialiased():
    stripes = np.zeros((64, 64), dtype=np.uint8)
    stripes[:, ::2] = 255
    small = decode_image(encode(Image.fromarray(stripes)), "x", 1, crop=CentreSquare(size_px=8)).float()
    assert (small - 127.5).abs().max() < 8


def test_an_image_of_the_right_size_is_untouched():
    encoded = encode(noise(16, 16))
    assert torch.equal(decode_image(encoded, "x", 3, crop=CentreSquare(size_px=16)), decode_image(encoded, "x", 3))


@pytest.mark.parametrize("num_channels", [1, 3])
def test_the_crop_is_that_of_the_upright_image(num_channels):
    image, exif = noise(60, 40).convert("L" if num_channels == 1 else "RGB"), Image.Exif()
    exif[0x0112] = 6
    turned = encode(image.transpose(Image.Transpose.ROTATE_90), exif=exif)
    random_crop = RandomResizedCrop(short_side_px=30, size_px=20)
    for crop, draw in ((CentreCrop(short_side_px=30, size_px=20), None), (random_crop, 5), (random_crop, 6)):
        pixels = decode_image(turned, "x", num_channels, crop, draw)
        assert pixels.shape == (num_channels, 20, 20)
        expected = np.asarray(crop(image, draw)).reshape(20, 20, num_channels)
        assert np.array_equal(pixels.permute(1, 2, 0).numpy(), expected)


def test_a_strip_needs_no_long_intermediate():
    # Its short side resized first would give 64 x 1,280,000 pixels.
    strip = encode(Image.new("L", (20_000, 1), 7))
    assert (decode_image(strip, "x", 1, crop=CentreSquare(size_px=64)) == 7).all()


@pytest.mark.parametrize("image_format", ["JPEG", "PNG", "GIF", "BMP", "TIFF", "WEBP"])
def test_truncated(image_format):
    encoded = encode(noise(), image_format)
    error_line(encoded[: len(encoded) // 2])


@pytest.mark.parametrize("encoded", [b"", b"hello, world", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"])
def test_bytes_that_are_no_image(encoded):
    message = error_line(encoded)
    assert "not an image" in message and "PNG" in message


def test_missing_file(tmp_path):
    assert "No such file" in error_line(tmp_path / "x.png")


def test_bombs_are_refused_from_the_header(monkeypatch):
    message = error_line(bomb())
    assert "400000000" in message and str(MAX_PIXELS) in message
    # Up to that limit the image itself is looked at, without a warning; this one has no pixels.
    with warnings.catch_warnings(record=True) as caught:
        warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)  # as the module does
        assert "10000 x 9000" not in error_line(bomb(10_000, 9_000))
    assert not caught and MAX_PIXELS == 2 * Image.MAX_IMAGE_PIXELS
    monkeypatch.setattr(decode, "MAX_PIXELS", 64)
    assert decode_image(plain(0), "x", 3).shape == (3, 8, 8)
    monkeypatch.setattr(decode, "MAX_PIXELS", 63)
    assert "at most 63 allowed" in error_line(plain(0))


def test_errors_stay_on_one_line():
    with pytest.raises(DataError) as caught:
        decode_image(b"", "a\nb\x1b[31m\u00e9", 3)
    assert str(caught.value).startswith("a\\nb\\x1b[31m\u00e9: ")
    assert printable("caf\u00e9 1") == "caf\u00e9 1"


def test_threads_and_global_state():
    before = (Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES)
    encoded = [plain(value) for value in range(64)]
    with ThreadPoolExecutor(8) as pool:
        images = list(pool.map(lambda image: decode_image(image, "x", 3), encoded))
    assert [int(image[0, 0, 0]) for image in images] == list(range(64))
    assert (Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES) == before


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::RuntimeWarning")
def test_random_damage_raises_nothing_else():
    random = np.random.default_rng(0)
    for image_format in ("JPEG", "PNG", "GIF", "TIFF", "WEBP", "BMP", "PPM"):
        encoded = np.frombuffer(encode(noise(16, 16), image_format), dtype=np.uint8)
        for _ in range(40):
            damaged = encoded.copy()
            damaged[random.integers(0, min(len(damaged), 300), 3)] = random.integers(0, 256, 3)
            try:
                decode_image(damaged.tobytes(), "x", 3, crop=CentreSquare(size_px=8))
            except DataError as error:
                assert "\n" not in str(error)


COUNTS = [0, 1, IMAGES_IN_TURN, IMAGES_IN_THREADS, 2 * IMAGES_IN_THREADS + IMAGES_IN_TURN + 1]


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("worth", [0.0, math.inf])
def test_each_item_comes_with_its_result_in_order(monkeypatch, count, worth):
    monkeypatch.setattr(decode, "_WORTH_THREADS_S", worth)
    assert list(map_in_threads(lambda item: -item, iter(range(count)))) == [(item, -item) for item in range(count)]


@pytest.mark.parametrize(("worth", "first", "others"), [(0.0, 1, 4), (math.inf, 1, 1)])
def test_threads_begin_if_images_take_long(monkeypatch, worth, first, others):
    monkeypatch.setattr(decode, "_WORTH_THREADS_S", worth)
    monkeypatch.setattr(decode, "ThreadPoolExecutor", lambda: ThreadPoolExecutor(4))
    all_run = threading.Barrier(others, timeout=60)

    def work(item):
        if item in range(IMAGES_IN_TURN, IMAGES_IN_TURN + others):
            all_run.wait()
        return threading.get_ident()

    found = dict(map_in_threads(work, range(3 * IMAGES_IN_TURN)))
    assert len({found[item] for item in range(IMAGES_IN_TURN)}) == first
    assert len({found[item] for item in range(IMAGES_IN_TURN, IMAGES_IN_TURN + others)}) == others


def test_items_are_taken_as_they_are_needed():
    taken = []
    endless = (taken.append(item) or item for item in itertools.count())
    results = map_in_threads(str, endless)
    assert [next(results) for _ in range(3)] == [(0, "0"), (1, "1"), (2, "2")]
    assert len(taken) == IMAGES_IN_TURN


def test_the_first_error_is_raised_after_the_results_before_it():
    def invert(item):
        return 1 / (item - IMAGES_IN_TURN)

    results = map_in_threads(invert, range(3 * IMAGES_IN_TURN))
    assert len(list(itertools.islice(results, IMAGES_IN_TURN))) == IMAGES_IN_TURN
    with pytest.raises(ZeroDivisionError):
        next(results)
