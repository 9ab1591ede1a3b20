"""Views of two distributions: every second view is blurred and solarised with probabilities of its own."""

import pytest
import torch

from tests.augment.test_views import augmentation, by_parts, drawn, images, whole

SECOND = {"second_blur_probability": 0.3, "second_solarise_probability": 0.6}


@pytest.mark.parametrize("kind", ["blur", "solarise"])
@pytest.mark.parametrize(("first", "second"), [(0.0, 1.0), (1.0, 0.0), (0.5, 0.2)])
def test_every_second_view_has_probabilities_of_its_own(kind, first, second):
    alone, of_second = f"{kind}_probability", f"second_{kind}_probability"
    pixels = images()
    found = whole(augmentation(num_views=4, **{alone: first, of_second: second}), pixels).chunk(4)
    for view, made in enumerate(found):
        alike = augmentation(num_views=4, **{alone: second if view % 2 else first})
        assert torch.equal(made, whole(alike, pixels).chunk(4)[view])


def test_without_them_all_views_are_alike():
    augment = augmentation(blur_probability=0.5, second_blur_probability=0.5)
    assert augment.second_transforms is augment.transforms
    assert "second_transforms" not in repr(augment) and "second_transforms" in repr(augmentation(**SECOND))


def test_small_views_have_them_too():
    from ssl_sec.augment.config import AugmentConfig

    pixels = images(size=28)
    solarised, plain = (
        AugmentConfig(small_views=2, second_solarise_probability=share).build_small(28, 3, seed=5)[0]
        for share in (1.0, None)
    )
    (first, second), (same, other) = (whole(made, pixels).chunk(2) for made in (solarised, plain))
    assert torch.equal(first, same) and not torch.equal(second, other)


@pytest.mark.parametrize("channels", [1, 3, 5])
def test_workers_make_their_rows_of_the_whole_batchs_views(channels):
    augment, pixels = augmentation(channels, num_views=3, **SECOND), images(channels=channels)
    torch.testing.assert_close(by_parts(augment, pixels, [0, 5, 6, 12]), whole(augment, pixels), rtol=0, atol=1e-6)


def test_the_saturation_has_a_strength_of_its_own():
    factors = drawn(augmentation(colour_strength=0.5, saturation_strength=0.25))[2]
    ranges = [(factors[f"{name}_factor"].min(), factors[f"{name}_factor"].max()) for name in ("contrast", "saturation")]
    assert [(low.item(), high.item()) for low, high in ranges] == [
        (pytest.approx(0.6, abs=0.01), pytest.approx(1.4, abs=0.01)),
        (pytest.approx(0.8, abs=0.01), pytest.approx(1.2, abs=0.01)),
    ]
    assert torch.equal(drawn(augmentation(colour_strength=0.5))[2]["contrast_factor"], factors["contrast_factor"])
