import pytest
import torch

from ssl_sec.augment.config import AugmentConfig
from ssl_sec.augment.views import SimCLRAugmentation
from ssl_sec.errors import ConfigError
from tests.augment.test_views import BATCH, by_parts, images, whole


def small(config, size=28, channels=3, seed=5):
    (made,) = config.build_small(size, channels, seed)
    return made


def test_without_small_views_none_are_made():
    assert AugmentConfig().build_small(28, 3, 5) == ()
    assert AugmentConfig().sizes_px(28) == {}


@pytest.mark.parametrize(
    ("options", "size_px"),
    [({}, 12), ({"small_view_size_px": 7}, 7), ({"view_size_px": 224}, 96), ({"view_size_px": 1}, 1)],
)
def test_small_views_have_their_number_and_size(options, size_px):
    config = AugmentConfig(small_views=3, **options)
    assert config.sizes_px(28)["augment.small_view_size_px"] == size_px
    assert whole(small(config), images(size=28)).shape == (3 * BATCH, 3, size_px, size_px)


@pytest.mark.parametrize("cuts", [(0, 6, 12), (0, 3, 6, 9, 12)])
def test_small_views_are_the_same_on_any_number_of_workers(cuts):
    made, pixels = small(AugmentConfig(small_views=3, blur_probability=0.5)), images(size=28)
    assert torch.equal(by_parts(made, pixels, cuts), whole(made, pixels))


def test_each_small_view_is_drawn_by_seed_step_and_view():
    pixels = images(size=28)
    two, three = (whole(small(AugmentConfig(small_views=count)), pixels) for count in (2, 3))
    assert torch.equal(two, three[: 2 * BATCH])
    assert not torch.equal(two[:BATCH], two[BATCH:])
    other_seed = whole(small(AugmentConfig(small_views=2), seed=6), pixels)
    other_step = whole(small(AugmentConfig(small_views=2)), pixels, step=4)
    assert not torch.equal(two, other_seed) and not torch.equal(two, other_step)


def test_small_views_are_not_copies_of_large_views():
    options = {"view_size_px": 12, "small_view_size_px": 12, "small_view_min_scale": 0.08, "small_view_max_scale": 1.0}
    config, pixels = AugmentConfig(small_views=2, **options), images(size=28)
    large = config.build(28, 3, 5)
    assert torch.equal(whole(large, pixels), whole(AugmentConfig(view_size_px=12).build(28, 3, 5), pixels))
    assert not torch.equal(whole(large, pixels), whole(small(config), pixels))


def test_crops_of_small_views_are_as_large_as_stated():
    """With coordinates as pixels, a view shows how much of the image it spans."""
    pixels = torch.linspace(0, 255, 64).to(torch.uint8).view(1, 1, 64, 1).expand(300, 1, 64, 64).contiguous()
    config = AugmentConfig(small_views=1, small_view_size_px=32, colour_strength=0.0, flip_probability=0.0)
    views = whole(small(config, size=64, channels=1), pixels)
    spans = views.amax((1, 2, 3)) - views.amin((1, 2, 3))
    # A crop of a share s of the area with an aspect of at most 4/3 is as high as √(s · 4/3) of the image.
    assert 0.15 < spans.min() < 0.25
    assert 0.33 < spans.max() <= (0.14 * 4 / 3) ** 0.5 + 0.02


def test_the_largest_crop_is_no_smaller_than_the_smallest():
    with pytest.raises(ConfigError, match=r"^augment.small_view_max_scale: found 0.1, must be ≥ .*min_scale = 0.2$"):
        AugmentConfig(small_views=2, small_view_min_scale=0.2, small_view_max_scale=0.1)


def test_the_augmentation_is_that_of_the_large_views():
    options = {"colour_strength": 1.0, "grey_probability": 0.3, "blur_probability": 0.5, "solarise_probability": 0.2}
    config = AugmentConfig(small_views=2, **options)
    alike = SimCLRAugmentation(
        image_size_px=12,
        num_channels=3,
        seed=small(config).seed,
        num_views=2,
        min_scale=0.05,
        max_scale=0.14,
        flip_probability=0.5,
        **options,
    )
    pixels = images(size=28)
    assert torch.equal(whole(small(config), pixels), whole(alike, pixels))
