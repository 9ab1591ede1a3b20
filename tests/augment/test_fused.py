"""Views in one launch equal kornia's; without a GPU, Triton's interpreter runs the kernel on the CPU (conftest.py)."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ssl_sec.augment.config import AugmentConfig
from ssl_sec.augment.views import FusedSimCLRAugmentation, SimCLRAugmentation, why_not_fused
from ssl_sec.errors import ConfigError
from tests.augment.test_views import by_parts, whole

pytest.importorskip("triton")
GPU = torch.device("cuda")
HERE = GPU if torch.cuda.is_available() else torch.device("cpu")


def pixels(count, height, width, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count, 3, height, width), generator=generator, dtype=torch.uint8).to(HERE)


def both(size, layout=torch.contiguous_format, **options):
    drawn = {"min_scale": 0.08, "flip_probability": 0.5, "colour_strength": 0.5}
    options = {"image_size_px": size, "num_channels": 3, "seed": 5, "num_views": 2, **drawn, **options}
    return SimCLRAugmentation(**options), FusedSimCLRAugmentation(layout, **options)


@pytest.mark.parametrize("strength", [0.0, 0.5, 1.0])
@given(
    height=st.integers(2, 12),
    width=st.integers(2, 12),
    flips=st.sampled_from([0.0, 0.5, 1.0]),
    num_views=st.integers(1, 3),
    step=st.integers(0, 10**6),
)
@settings(max_examples=6)
def test_views_equal_kornias(strength, height, width, flips, num_views, step):
    kornias, ours = both(
        min(height, width), colour_strength=strength, flip_probability=flips, num_views=num_views, min_scale=0.05
    )
    images = pixels(4, height, width, seed=step)
    torch.testing.assert_close(whole(ours, images, step), whole(kornias, images, step), rtol=0, atol=1e-5)


def test_views_of_cifar_equal_kornias():
    kornias, ours = both(32)
    images = pixels(6, 32, 32)
    torch.testing.assert_close(whole(ours, images), whole(kornias, images), rtol=0, atol=1e-5)


def test_black_grey_and_saturated_pixels_have_kornias_hue():
    kornias, ours = both(4, colour_strength=1.0)
    images = torch.tensor([0, 255, 128, 1], dtype=torch.uint8).view(4, 1, 1, 1).expand(4, 3, 4, 4).clone()
    images[3, 0] = 255
    images = images.to(HERE)
    for step in range(2):
        torch.testing.assert_close(whole(ours, images, step), whole(kornias, images, step), rtol=0, atol=1e-5)


def test_workers_make_their_rows_of_the_whole_batchs_views():
    _, ours = both(6)
    images = pixels(6, 6, 6)
    assert torch.equal(by_parts(ours, images, [0, 3, 4, 6]), whole(ours, images))


def test_the_layout_is_as_requested():
    layouts = (torch.contiguous_format, torch.channels_last)
    plain, last = (both(5, layout=layout)[1] for layout in layouts)
    images = pixels(3, 5, 5)
    views = whole(last, images)
    assert views.is_contiguous(memory_format=torch.channels_last) and not views.is_contiguous()
    assert torch.equal(views, whole(plain, images))


def test_fused_views_are_used_if_possible_and_refused_if_not(monkeypatch):
    monkeypatch.setattr("ssl_sec.augment.views.why_no_kernels", lambda device: None)  # with or without a C compiler
    automatic, asked, declined = AugmentConfig(), AugmentConfig(fused=True), AugmentConfig(fused=False)
    assert isinstance(automatic.build(32, 3, 0, device=GPU), FusedSimCLRAugmentation)
    assert isinstance(asked.build(64, 3, 0, device=GPU), FusedSimCLRAugmentation)
    for built in (
        automatic.build(32, 3, 0),
        automatic.build(96, 3, 0, device=GPU),
        declined.build(32, 3, 0, device=GPU),
    ):
        assert not isinstance(built, FusedSimCLRAugmentation)
    for arguments, reason in (
        ((32, 3, 0, 2), "the device is cpu"),
        ((32, 1, 0, 2, GPU), "the images have 1 channel"),
        ((65, 3, 0, 2, GPU), "the views are 65 pixels wide, and the kernel makes at most 64"),
    ):
        with pytest.raises(ConfigError, match=f"^augment.fused: found true, but {reason}"):
            asked.build(*arguments)


def test_a_machine_without_triton_takes_kornia(monkeypatch):
    monkeypatch.setattr("ssl_sec.compilers.find_spec", lambda name: None)
    assert why_not_fused(32, 3, GPU) == "Triton is not installed"
    assert not isinstance(AugmentConfig().build(32, 3, 0, device=GPU), FusedSimCLRAugmentation)
