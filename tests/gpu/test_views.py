"""The views on a GPU: drawn on the CPU, whatever the images' device, and the same to rounding."""

import pytest
import torch

from ssl_sec.augment.config import AugmentConfig, CropConfig, FlipConfig
from ssl_sec.augment.views import FusedSimCLRAugmentation
from tests.gpu.waiting import forbidden

BUILDS = {
    "simclr, colour": (3, lambda size: AugmentConfig().build(size, 3, seed=5)),
    "simclr, grey": (1, lambda size: AugmentConfig().build(size, 1, seed=5)),
    "simclr, imagenet": (3, lambda size: AugmentConfig(colour_strength=1.0).build(size, 3, seed=5)),
    "simclr, of crops": (
        3,
        lambda size: AugmentConfig(from_original=True, blur_probability=0.5).build(size, 3, seed=5),
    ),
    "retrieval": (3, lambda size: CropConfig().on_device(size, seed=5)),
    "flip": (3, lambda size: FlipConfig().build(seed=5)),
}


def pixels(count, size, channels=3):
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (count, channels, size, size), generator=generator, dtype=torch.uint8)


def images_of(name, count, size):
    """Images, or the crops of two views of them that were cut as they were decoded."""
    channels, _ = BUILDS[name]
    return pixels(2 * count, size, channels).view(count, -1) if "crops" in name else pixels(count, size, channels)


def whole(augment, images, step=3):
    return augment(images, step, slice(0, len(images)), len(images))


def drawn(augment, shape, step=3):
    """All that is drawn for a step's first view, by transform and name."""
    draws = augment._draw(torch.Size(shape), step, 0)
    return {f"{draw.name}.{name}": value for draw in draws for name, value in draw.data.items()}


def bound(size):
    # kornia solves for its matrix in float32, and noise shows every shift; a GPU rounds sums of products once.
    return 3e-5 if size <= 32 else 1e-4


@pytest.mark.parametrize("size", [32, 96])
@pytest.mark.parametrize("name", BUILDS)
def test_a_device_makes_the_views_of_the_cpu_from_the_same_draws(name, size, device):
    channels, build = BUILDS[name]
    images, shape = images_of(name, 16, size), (16, channels, size, size)
    here, reference = build(size), build(size)
    before = drawn(here, shape)
    for step in range(3):
        expected = whole(reference, images, step)
        views = whole(here, images.to(device), step)
        assert views.device.type == device.type
        torch.testing.assert_close(views.cpu(), expected, rtol=0, atol=bound(size))
        assert torch.equal(whole(here, images.to(device), step), views)
    after = drawn(here, shape)
    assert all(value.device.type == "cpu" for value in after.values())
    torch.testing.assert_close(after, before, rtol=0, atol=0)


@pytest.mark.parametrize("name", BUILDS)
def test_making_views_waits_for_nothing(name, device):
    _, build = BUILDS[name]
    images, augment = images_of(name, 16, 32).to(device), build(32)
    first = whole(augment, images, 0)
    with forbidden(device):
        second = whole(augment, images, 1)
    assert first.shape == second.shape and not torch.equal(first, second)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [8, 32, 64])
def test_one_launch_makes_kornias_views(size, gpu):
    """Without a GPU, `tests/augment/test_fused.py` runs the kernel in Triton's interpreter."""
    pytest.importorskip("triton")
    kornias, ours = (AugmentConfig().build(size, 3, seed=5, device=device) for device in (torch.device("cpu"), gpu))
    assert isinstance(ours, FusedSimCLRAugmentation) and not isinstance(kornias, FusedSimCLRAugmentation)
    images = pixels(64, size)
    here = images.to(gpu)
    whole(ours, here)  # the kernel is compiled
    for step in range(5):
        with forbidden(gpu):
            views = whole(ours, here, step)
        torch.testing.assert_close(views.cpu(), whole(kornias, images, step), rtol=0, atol=bound(size))
        assert torch.equal(whole(ours, here, step), views)
