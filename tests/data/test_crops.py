import functools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from sklearn.datasets import load_sample_images
from torchvision import transforms

from ssl_sec.data.crops import NUMBERS_PER_BOX, CentreCrop, CentreSquare, Crop, RandomResizedCrop, row_draws
from ssl_sec.seeding import uniform
from tests.data.files import noise

PHOTOGRAPHS = [Image.fromarray(pixels) for pixels in load_sample_images().images]
CROPS = [CentreSquare(size_px=27), CentreCrop(), RandomResizedCrop()]

BILINEAR = transforms.InterpolationMode.BILINEAR


def difference(one: Image.Image, other: Image.Image) -> int:
    return int(np.abs(np.asarray(one).astype(int) - np.asarray(other).astype(int)).max())


@functools.cache
def numbers_of_draws(count: int) -> list[list[float]]:
    return [uniform(draw, NUMBERS_PER_BOX) for draw in row_draws(3, 0, count).tolist()]


def boxes(crop: RandomResizedCrop, width: int, height: int, count: int) -> torch.Tensor:
    """Left, top, right and bottom of boxes of different draws."""
    drawn = [crop.box(width, height, numbers) for numbers in numbers_of_draws(count)]
    return torch.tensor(drawn, dtype=torch.float64)


def torchvisions_boxes(crop: RandomResizedCrop, width: int, height: int, count: int) -> torch.Tensor:
    image, scale, ratio = torch.empty(1, height, width), [crop.min_scale, 1.0], [crop.min_aspect, crop.max_aspect]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        drawn = [transforms.RandomResizedCrop.get_params(image, scale, ratio) for _ in range(count)]
    return torch.tensor([(left, top, left + w, top + h) for top, left, h, w in drawn], dtype=torch.float64)


def figures(boxes: torch.Tensor, width: int, height: int) -> torch.Tensor:
    """Share of the area, logarithm of the aspect ratio, and the centre, of each box."""
    left, top, right, bottom = boxes.T
    area = (right - left) * (bottom - top) / (width * height)
    aspect = ((right - left) / (bottom - top)).log()
    return torch.stack([area, aspect, (left + right) / (2 * width), (top + bottom) / (2 * height)], dim=1)


def test_draws_are_a_function_of_seed_step_and_row():
    # A change of these numbers breaks the resume of runs that are under way.
    assert row_draws(7, 3, 3).tolist() == [8409338644499788534, 7762195348825339434, -40090260282778369]
    draws = row_draws(1, 7, 12)
    assert torch.equal(draws, row_draws(1, 7, 12))
    assert torch.equal(draws[:5], row_draws(1, 7, 5))
    many = torch.cat([row_draws(seed, step, 100) for seed in range(5) for step in range(20)])
    assert len(many.unique()) == len(many)


@pytest.mark.parametrize(("width", "height"), [(341, 256), (256, 256), (256, 400), (700, 256)])
@pytest.mark.parametrize("options", [{}, {"min_scale": 0.5, "min_aspect": 0.5, "max_aspect": 1.0}])
def test_boxes_are_distributed_as_torchvisions(width, height, options):
    crop, count = RandomResizedCrop(**options), 3000
    ours = figures(boxes(crop, width, height, count), width, height)
    theirs = figures(torchvisions_boxes(crop, width, height, count), width, height)
    spread = theirs.std(0)
    # Five standard errors of the difference of two means; those of a variance are at most twice a normal one's.
    assert ((ours.mean(0) - theirs.mean(0)).abs() <= 5 * spread * math.sqrt(2 / count) + 1e-9).all()
    assert ((ours.std(0) - theirs.std(0)).abs() <= 10 * spread / math.sqrt(count) + 1e-9).all()


@pytest.mark.parametrize(("width", "height"), [(256, 5120), (5120, 256), (256, 1_000_000)])
def test_the_centre_is_cropped_if_no_box_fits(width, height):
    crop = RandomResizedCrop()
    ours = boxes(crop, width, height, 20)
    assert torch.equal(ours, torchvisions_boxes(crop, width, height, 20))
    assert len(ours.unique(dim=0)) == 1


@given(
    width=st.integers(2, 1000),
    height=st.integers(2, 1000),
    draw=st.integers(-(2**63), 2**63 - 1),
    min_scale=st.floats(0.01, 1.0),
)
def test_boxes_lie_in_the_image_and_are_as_large_as_stated(width, height, draw, min_scale):
    crop = RandomResizedCrop(min_scale=min_scale)
    left, top, right, bottom = crop.box(width, height, uniform(draw, NUMBERS_PER_BOX))
    assert 0 <= left < right <= width and 0 <= top < bottom <= height
    part_width, part_height = right - left, bottom - top
    if (part_width, part_height) == (min(width, round(height * 4 / 3)), min(height, round(width / 0.75))):
        return  # the centre, or as large as it
    # Each side was rounded by at most half a pixel.
    assert (part_width + 0.5) * (part_height + 0.5) >= min_scale * width * height
    assert (part_width + 0.5) / (part_height - 0.5) >= 0.75 and (part_width - 0.5) / (part_height + 0.5) <= 4 / 3


@pytest.mark.parametrize("image", [*PHOTOGRAPHS, PHOTOGRAPHS[0].convert("L"), noise(300, 500), noise(80, 61)])
@pytest.mark.parametrize("options", [{}, {"short_side_px": 70, "size_px": 64}, {"short_side_px": 33, "size_px": 33}])
def test_evaluation_is_torchvisions_resize_and_centre_crop(image, options):
    crop = CentreCrop(**options)
    theirs = transforms.Compose([transforms.Resize(crop.short_side_px, BILINEAR), transforms.CenterCrop(crop.size_px)])
    assert difference(crop(image, None), theirs(image)) <= 1


@pytest.mark.parametrize("image", [*PHOTOGRAPHS, PHOTOGRAPHS[1].convert("L"), noise(80, 61)])
def test_a_random_crop_is_cut_from_the_resized_image_and_resized_again(image):
    crop = RandomResizedCrop(flip_probability=0.0)
    resized = transforms.Resize(crop.short_side_px, BILINEAR)(image)
    for draw in row_draws(0, 0, 8).tolist():
        box = crop.box(*resized.size, uniform(draw, 1 + NUMBERS_PER_BOX)[1:])
        assert difference(crop(image, draw), resized.crop(box).resize((227, 227), Image.Resampling.BILINEAR)) <= 1


@pytest.mark.parametrize("image", [*PHOTOGRAPHS, noise(300, 500), noise(80, 61)])
def test_crops_of_a_fixed_size_are_cut_from_the_image_resized_to_a_square(image):
    """Angular loss, section 4.4: 256 x 256, whatever the aspect."""
    share = (227 / 256) ** 2
    fixed = {"min_scale": share, "max_scale": share, "min_aspect": 1.0, "max_aspect": 1.0, "flip_probability": 0.0}
    crop, centre = RandomResizedCrop(keep_aspect=False, **fixed), CentreCrop(keep_aspect=False)
    square = transforms.Resize((256, 256), BILINEAR)(image)
    assert difference(centre(image, None), transforms.CenterCrop(227)(square)) <= 1
    corners = set()
    for draw in row_draws(0, 0, 40).tolist():
        box = crop.box(256, 256, uniform(draw, 1 + NUMBERS_PER_BOX)[1:])
        assert (box[2] - box[0], box[3] - box[1]) == (227, 227)
        assert difference(crop(image, draw), square.crop(box)) <= 1
        corners.add(box[:2])
    assert {max(corner) <= 29 for corner in corners} == {True} and len(corners) > 30


def test_a_random_crop_is_a_function_of_the_draw():
    first, second = row_draws(0, 0, 2).tolist()
    crop = RandomResizedCrop()
    assert difference(crop(PHOTOGRAPHS[0], first), crop(PHOTOGRAPHS[0].copy(), first)) == 0
    assert difference(crop(PHOTOGRAPHS[0], first), crop(PHOTOGRAPHS[0], second)) > 50
    with pytest.raises(AssertionError, match="draw"):
        crop(PHOTOGRAPHS[0], None)


def test_flips_happen_with_their_probability():
    gradient = Image.fromarray(np.tile(np.arange(0, 256, 4, dtype=np.uint8), (64, 1)))
    draws = row_draws(0, 0, 600).tolist()

    def share_flipped(probability):
        crop = RandomResizedCrop(short_side_px=64, size_px=16, flip_probability=probability)
        squares = np.stack([np.asarray(crop(gradient, draw)) for draw in draws])
        return (squares[:, :, 0] > squares[:, :, -1]).all(1).mean()

    assert share_flipped(0.0) == 0 and share_flipped(1.0) == 1
    assert share_flipped(0.3) == pytest.approx(0.3, abs=0.06)


def test_a_flip_does_not_depend_on_the_box():
    # A crop where the flip is not drawn shows what its pixels are without one.
    coordinates = Image.fromarray(np.tile(np.arange(256, dtype=np.uint8), (256, 1)))
    draws = row_draws(0, 0, 600).tolist()
    upright, drawn = (
        np.stack([np.asarray(crop(coordinates, draw))[0].astype(float) for draw in draws])
        for crop in (RandomResizedCrop(size_px=16, flip_probability=0.0), RandomResizedCrop(size_px=16))
    )
    flipped = drawn[:, 0] > drawn[:, -1]
    assert np.array_equal(drawn, np.where(flipped[:, None], upright[:, ::-1], upright))
    for figure in (upright[:, 0], upright[:, -1], upright[:, -1] - upright[:, 0]):
        # Five standard errors.
        assert abs(np.corrcoef(flipped, figure)[0, 1]) < 5 / 600**0.5


@pytest.mark.parametrize("crop", CROPS)
def test_a_fine_checkerboard_becomes_grey(crop):
    squares = (np.indices((1024, 1400)).sum(0) % 2 * 255).astype(np.uint8)
    for draw in row_draws(0, 0, 4).tolist():
        pixels = np.asarray(crop(Image.fromarray(squares), draw)).astype(float)
        assert np.abs(pixels - 127.5).max() < 12


@pytest.mark.parametrize("crop", CROPS)
@pytest.mark.parametrize("mode", ["L", "RGB"])
@pytest.mark.parametrize("size", [(1, 1), (1, 2), (3, 1), (20_000, 1), (1, 20_000), (227, 227), (256, 9), (500, 375)])
def test_any_size_becomes_a_square_of_the_same_colour(crop, mode, size):
    assert isinstance(crop, Crop)
    colour = 7 if mode == "L" else (7, 100, 200)
    for draw in row_draws(0, 0, 5).tolist():
        square = crop(Image.new(mode, size, colour), draw)
        assert square.size == (crop.size_px, crop.size_px) and square.mode == mode
        assert (np.asarray(square) == colour).all()
