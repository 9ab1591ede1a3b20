import io

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.ndimage import gaussian_filter

from ssl_sec.evaluation.classification.corruptions import STRENGTHS, Corruption, corruptions


def photos(count=4, channels=3, side=32):
    """Smooth colours with edges."""
    generator = torch.Generator().manual_seed(0)
    coarse = torch.rand(count, channels, 6, 6, generator=generator)
    return torch.nn.functional.interpolate(coarse, (side, side), mode="bicubic").clamp(0, 1)


def corrupt(kind, strength, images, indices=None, seed=0):
    indices = torch.arange(len(images)) if indices is None else indices
    return Corruption(kind=kind, strength=strength, seed=seed)(images, indices)


@pytest.mark.parametrize("channels", [1, 3, 5])
@pytest.mark.parametrize("side", [8, 32, 41])
@pytest.mark.parametrize("kind", STRENGTHS)
def test_each_strength_moves_the_images_further_and_keeps_their_range(kind, side, channels):
    images = photos(channels=channels, side=side)
    moved = []
    for strength in range(1, 6):
        found = corrupt(kind, strength, images)
        assert found.shape == images.shape
        assert 0 <= found.min() and found.max() <= 1
        torch.testing.assert_close(found * 255, (found * 255).round(), rtol=0, atol=1e-4)
        moved.append((found - images).abs().mean().item())
    assert moved == sorted(moved)
    assert moved[0] < moved[-1]


@pytest.mark.parametrize(("height", "width"), [(32, 32), (64, 64), (32, 48), (48, 32)])
def test_the_blur_is_scipys_with_a_width_that_grows_with_the_shorter_side(height, width):
    images = photos(side=64)[:, :, :height, :width].double()
    sigma = 0.8 * min(height, width) / 32
    expected = gaussian_filter(images.numpy(), sigma=(0, 0, sigma, sigma), mode="nearest")
    np.testing.assert_allclose(corrupt("blur", 4, images).numpy(), expected, atol=0.003)


def test_the_noise_has_its_deviation_and_a_fixed_seed():
    images = torch.full((8, 3, 32, 32), 0.5)
    noise = corrupt("noise", 5, images) - 0.5
    assert noise.std().item() == pytest.approx(0.1, rel=0.03)
    assert noise.mean().abs() < 0.003
    assert not torch.equal(corrupt("noise", 5, images, seed=1), corrupt("noise", 5, images))
    assert len(noise.flatten(1).unique(dim=0)) == 8


@pytest.mark.parametrize("kind", STRENGTHS)
def test_an_image_is_corrupted_alike_in_any_batch(kind):
    images = photos(6)
    whole = corrupt(kind, 3, images)
    order = torch.tensor([4, 1])
    torch.testing.assert_close(corrupt(kind, 3, images[order], order), whole[order], rtol=0, atol=1.1 / 255)


@pytest.mark.parametrize("strength", [1, 5])
def test_jpeg_is_nearly_libjpegs(strength):
    images = photos()
    for image, found in zip(images, corrupt("jpeg", strength, images), strict=True):
        pixels = (image * 255).round().byte().permute(1, 2, 0).numpy()
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, "JPEG", quality=int(STRENGTHS["jpeg"][strength - 1]))
        theirs = torch.from_numpy(np.array(Image.open(file))).permute(2, 0, 1) / 255
        lost = (theirs - image).abs().mean()
        assert (found - theirs).abs().mean() < 0.6 * lost


def test_contrast_shrinks_the_distance_from_the_mean():
    images = photos()
    found = corrupt("contrast", 5, images)
    assert (found.std((2, 3)).mean() / images.std((2, 3)).mean()).item() == pytest.approx(0.15, rel=0.03)
    torch.testing.assert_close(found.mean((2, 3)), images.mean((2, 3)), rtol=0, atol=1 / 255)


def test_twenty_corruptions_are_listed():
    assert [(each.kind, each.strength) for each in corruptions(0)[:6]] == [
        *(("blur", strength) for strength in range(1, 6)),
        ("noise", 1),
    ]
    assert len(corruptions(0)) == 20
