import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ssl_sec.augment.config import AugmentConfig, CropConfig
from ssl_sec.augment.views import FlipAugmentation, SimCLRAugmentation, already_cropped, unit_range
from ssl_sec.errors import ConfigError

BATCH = 12


def images(count=BATCH, channels=3, size=9, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count, channels, size, size), generator=generator, dtype=torch.uint8)


def augmentation(channels=3, size=8, **options):
    drawn = {"seed": options.pop("seed", 5), "num_views": options.pop("num_views", 2)}
    return AugmentConfig(**options).build(size, channels, **drawn)


def whole(augment, pixels, step=3):
    return augment(pixels, step, slice(0, len(pixels)), len(pixels))


def drawn(augment, channels=3, side_px=9, count=1000):
    """What each transform draws for images of one size: name -> numbers."""
    return [each.data for each in augment._draw(torch.Size((count, channels, side_px, side_px)), step=0, view=0)]


def by_parts(augment, pixels, cuts, step=3):
    """The views that workers with these rows make, in the order of the whole batch."""
    parts = []
    for start, stop in zip(cuts[:-1], cuts[1:], strict=True):
        views = augment(pixels[start:stop], step, slice(start, stop), len(pixels))
        parts.append(views.view(augment.num_views, stop - start, *views.shape[1:]))
    return torch.cat(parts, dim=1).flatten(0, 1)


def test_pixels_become_numbers_from_0_to_1():
    pixels = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16)
    unit = unit_range(pixels)
    assert unit.dtype == torch.float32
    assert unit.flatten().tolist() == pytest.approx([value / 255 for value in range(256)])
    assert (unit.min().item(), unit.max().item()) == (0, 1)


def test_channels_that_are_no_colours_are_distorted_alike():
    """The views of five equal channels are those of one grey channel."""
    grey = images(channels=1)
    options = {"blur_probability": 0.5, "solarise_probability": 0.2, "quarter_turn_probability": 0.3}
    found = whole(augmentation(5, **options), grey.expand(-1, 5, -1, -1))
    expected = whole(augmentation(1, **options), grey)
    torch.testing.assert_close(found, expected.expand(-1, 5, -1, -1), rtol=0, atol=1e-6)


@pytest.mark.parametrize("channels", [1, 3, 5])
@pytest.mark.parametrize("num_views", [1, 2, 3])
def test_views_have_their_size_and_stay_in_range(channels, num_views):
    views = whole(augmentation(channels, num_views=num_views), images(channels=channels))
    assert views.shape == (num_views * BATCH, channels, 8, 8)
    assert views.dtype == torch.float32
    assert 0 <= views.min() and views.max() <= 1
    assert views.std() > 0.1


@pytest.mark.parametrize("size", [5, 8, 20])
def test_views_may_have_another_size_than_the_images(size):
    views = whole(AugmentConfig(view_size_px=size, blur_probability=1.0).build(9, 3, seed=5), images())
    assert views.shape == (2 * BATCH, 3, size, size)


@pytest.mark.parametrize("channels", [1, 3])
@given(cuts=st.lists(st.integers(1, BATCH - 1), unique=True, max_size=4), step=st.integers(0, 50))
@settings(max_examples=15)
def test_the_views_of_some_rows_are_those_rows_of_the_whole_batchs_views(channels, cuts, step):
    turns = {"vertical_flip_probability": 0.5, "quarter_turn_probability": 0.5}
    augment = augmentation(channels, colour_strength=1.0, solarise_probability=0.5, **turns)
    pixels, cuts = images(channels=channels), [0, *sorted(cuts), BATCH]
    assert torch.equal(by_parts(augment, pixels, cuts, step), whole(augment, pixels, step))
    blurred = augmentation(channels, blur_probability=0.5)  # a convolution rounds by its batch
    torch.testing.assert_close(by_parts(blurred, pixels, cuts, step), whole(blurred, pixels, step), rtol=0, atol=1e-6)


@pytest.mark.parametrize("at_once", [1, 5, BATCH])
def test_the_images_of_a_large_batch_are_transformed_in_parts(at_once, monkeypatch):
    augment, pixels = augmentation(num_views=3, colour_strength=1.0, solarise_probability=0.5), images()
    expected, sizes = whole(augment, pixels), []
    augment.transforms.register_forward_hook(lambda module, args, output: sizes.append(len(args[0])))
    monkeypatch.setattr("ssl_sec.augment.views._VALUES_AT_ONCE", at_once * 3 * 9 * 9 + 2)
    assert torch.equal(whole(augment, pixels), expected)
    assert max(sizes) == at_once and sum(sizes) == 3 * BATCH


@pytest.mark.parametrize("channels", [1, 3])
@given(cuts=st.lists(st.integers(1, BATCH - 1), unique=True, max_size=4), step=st.integers(0, 50))
@settings(max_examples=10)
def test_retrieval_views_of_some_rows_are_those_rows_of_the_whole_batchs_views(channels, cuts, step):
    augment = CropConfig().on_device(8, seed=5)
    pixels = images(channels=channels)
    views = whole(augment, pixels, step)
    assert views.shape == (BATCH, channels, 8, 8)
    assert torch.equal(by_parts(augment, pixels, [0, *sorted(cuts), BATCH], step), views)


def test_images_that_are_cropped_already_are_their_views():
    pixels = images()
    views = already_cropped(pixels[4:7], 3, slice(4, 7), BATCH)
    assert torch.equal(views, unit_range(pixels)[4:7])


@pytest.mark.parametrize("count", range(1, 7))
def test_views_of_small_batches_can_be_split(count):
    """The draw of ColorJitter's order has four entries, whatever the batch."""
    augment = augmentation(colour_strength=1.0)
    for step in range(6):
        pixels = images(count, seed=step)
        assert torch.equal(by_parts(augment, pixels, list(range(count + 1)), step), whole(augment, pixels, step))


def test_every_row_has_its_own_draw():
    one_image = images(1).expand(BATCH, -1, -1, -1)
    views = whole(augmentation(), one_image).flatten(1)
    assert len(views.unique(dim=0)) == 2 * BATCH


def test_the_draws_do_not_depend_on_the_pixels():
    augment = augmentation(colour_strength=0.0, flip_probability=0.5)
    dark, bright = images() // 4, images() // 4 * 2
    torch.testing.assert_close(2 * whole(augment, dark), whole(augment, bright), rtol=1e-5, atol=1e-6)


def test_first_views_come_before_second_ones():
    """With one colour per image, and crops only, a view shows its image."""
    pixels = (20 * torch.arange(BATCH, dtype=torch.uint8)).view(-1, 1, 1, 1).expand(-1, 3, 9, 9).contiguous()
    views = whole(augmentation(colour_strength=0.0), pixels)
    colours = (views.flatten(1).amax(1) * 255).round().long()
    assert colours.tolist() == [20 * number for number in range(BATCH)] * 2


def test_views_are_a_function_of_seed_and_step():
    pixels = images()
    views = whole(augmentation(), pixels)
    assert torch.equal(whole(augmentation(), pixels), views)
    assert not torch.equal(whole(augmentation(seed=6), pixels), views)
    assert not torch.equal(whole(augmentation(), pixels, step=4), views)
    assert not torch.equal(views[:BATCH], views[BATCH:])


def test_torchs_random_state_is_neither_used_nor_moved():
    augment, pixels = augmentation(), images()
    torch.manual_seed(1)
    views = whole(augment, pixels)
    torch.manual_seed(2)
    before = torch.get_rng_state()
    assert torch.equal(whole(augment, pixels), views)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_crop_of_the_whole_image_is_the_image():
    augment = augmentation(size=9, min_scale=1.0, flip_probability=0.0, colour_strength=0.0)
    differences = (whole(augment, images()) - unit_range(images()).repeat(2, 1, 1, 1)).flatten(1).abs().amax(1)
    # The aspect ratio is still drawn, so that not every crop of this area fits into the image.
    assert differences.min() < 1e-5


def test_flips_happen_with_their_probability():
    gradient = torch.arange(0, 252, 28, dtype=torch.uint8).expand(400, 3, 9, 9).contiguous()

    def share_flipped(probability):
        augment = augmentation(num_views=1, colour_strength=0.0, flip_probability=probability)
        views = whole(augment, gradient)
        return (views[..., 0] > views[..., -1]).all(2).all(1).float().mean().item()

    assert share_flipped(0.0) == 0
    assert share_flipped(1.0) == 1
    assert share_flipped(0.3) == pytest.approx(0.3, abs=0.08)


def test_the_crops_of_retrieval_have_the_sizes_and_flips_stated():
    """With coordinates as pixels, a view shows the width and height of its crop."""
    across = torch.linspace(0, 255, 64).round().to(torch.uint8).expand(64, 64)
    pixels = torch.stack([across, across.T]).expand(600, 2, 64, 64).contiguous()

    def measured(**options):
        views = whole(CropConfig(**options).on_device(16, seed=5), pixels)
        # The corners of a view show those pixels that are the corners of the crop.
        slopes = torch.stack([views[:, 0, 0, -1] - views[:, 0, 0, 0], views[:, 1, -1, 0] - views[:, 1, 0, 0]])
        width, height = slopes.abs() * 63 + 1
        return width * height / 64**2, width / height, slopes[0] < 0

    areas, aspects, flipped = measured()
    assert 0.15 < areas.min() < 0.2 and 0.85 < areas.max() < 1.01
    assert 0.7 < aspects.min() < 0.8 and 1.25 < aspects.max() < 1.43
    assert flipped.float().mean().item() == pytest.approx(0.5, abs=0.06)
    areas, aspects, flipped = measured(min_scale=0.5, min_aspect=1.0, max_aspect=1.0, flip_probability=0.0)
    assert 0.45 < areas.min() < 0.55 and aspects.sub(1).abs().max() < 0.03 and not flipped.any()


def test_crops_are_no_smaller_than_stated():
    """With coordinates as pixels, a view shows how much of the image it spans."""
    rows = torch.linspace(0, 255, 64).to(torch.uint8)
    pixels = rows.view(1, 1, 64, 1).expand(300, 1, 64, 64).contiguous()

    def least_span(min_scale):
        augment = augmentation(1, size=32, num_views=1, colour_strength=0.0, flip_probability=0.0, min_scale=min_scale)
        views = whole(augment, pixels)
        return (views.amax((1, 2, 3)) - views.amin((1, 2, 3))).min().item()

    assert least_span(0.08) < 0.4
    assert least_span(0.8) > 0.7


def test_the_aspects_of_simclrs_crops_are_between_3_4_and_4_3():
    (crop, *_) = drawn(augmentation(colour_strength=0.0, flip_probability=0.0), side_px=1000)
    width, height = (crop["src"][:, 2] - crop["src"][:, 0] + 1).unbind(1)
    aspects = width / height
    assert aspects.min().item() == pytest.approx(3 / 4, abs=0.02)
    assert aspects.max().item() == pytest.approx(4 / 3, abs=0.02)


@pytest.mark.parametrize(("channels", "hue", "saturation"), [(3, 0.2, 0.8), (1, 0.0, 0.0)])
@pytest.mark.parametrize("strength", [0.5, 1.0])
def test_the_colour_distortion_is_as_strong_as_simclrs(channels, hue, saturation, strength):
    _, _, jitter, *_ = drawn(augmentation(channels, colour_strength=strength), channels)
    ranges = {"brightness": (1, 0.8), "contrast": (1, 0.8), "saturation": (1, saturation), "hue": (0, hue)}
    for name, (middle, width) in ranges.items():
        factors = jitter[f"{name}_factor"]
        ends = middle - width * strength, middle + width * strength
        assert (factors.min().item(), factors.max().item()) == pytest.approx(ends, abs=0.01), name


def test_colours_are_distorted_in_four_fifths_and_a_fifth_are_grey():
    pixels = torch.tensor([200, 100, 50], dtype=torch.uint8).view(1, 3, 1, 1).expand(500, 3, 9, 9).contiguous()
    views = whole(augmentation(num_views=1, colour_strength=0.5), pixels)[:, :, 4, 4] * 255
    kept = (views - torch.tensor([200.0, 100.0, 50.0])).abs().amax(1) < 0.5
    grey = views.amax(1) - views.amin(1) < 0.5
    assert kept.float().mean().item() == pytest.approx(0.2 * 0.8, abs=0.05)
    assert grey.float().mean().item() == pytest.approx(0.2, abs=0.06)


def test_grey_images_change_brightness():
    pixels = torch.full((200, 1, 9, 9), 100, dtype=torch.uint8)
    values = whole(augmentation(1, num_views=1), pixels)[:, 0, 4, 4] * 255
    assert values.min() > 50 and values.max() < 150
    assert (values - 100).abs().lt(0.5).float().mean().item() == pytest.approx(0.2, abs=0.06)
    assert len(values.round().unique()) > 30


def test_the_repr_shows_the_settings():
    assert "seed=5, num_views=2" in repr(augmentation())


def test_the_augmentation_is_built_with_its_settings():
    views = AugmentConfig(flip_probability=0.0, colour_strength=0.0).build(8, 1, seed=3, num_views=4)
    assert (views.seed, views.num_views, len(list(views.transforms.children()))) == (3, 4, 1)
    assert views(torch.zeros(2, 1, 9, 9, dtype=torch.uint8), 0, slice(0, 2), 2).shape == (8, 1, 8, 8)


def plain_views(size=8, **options):
    """Views of whole images without any other change, and the same with these options."""
    none = {"min_scale": 1.0, "colour_strength": 0.0, "flip_probability": 0.0}
    pixels = images(count=400, size=size)
    return tuple(whole(augmentation(size=size, num_views=1, **{**none, **more}), pixels) for more in ({}, options))


def test_solarised_views_are_inverted_above_one_half():
    before, after = plain_views(solarise_probability=0.3)
    inverted = torch.where(before >= 0.5, 1 - before, before)
    is_solarised = (after - before).abs().amax(dim=(1, 2, 3)) > 1e-6
    assert torch.allclose(after[is_solarised], inverted[is_solarised])
    assert torch.equal(after[~is_solarised], before[~is_solarised])
    assert is_solarised.float().mean() == pytest.approx(0.3, abs=0.08)


def test_flips_and_turns_give_all_orientations_the_same_probability():
    before, after = plain_views(flip_probability=0.5, vertical_flip_probability=0.5, quarter_turn_probability=0.5)
    counts = [0] * 8
    for one, turned in zip(before, after, strict=True):
        orientations = [side.rot90(turns, (1, 2)) for side in (one, one.flip(2)) for turns in range(4)]
        found = [bool(torch.allclose(each, turned, atol=1e-4)) for each in orientations]
        assert sum(found) == 1
        counts[found.index(True)] += 1
    assert all(0.07 < count / len(before) < 0.18 for count in counts)


def test_vertical_flips_alone_are_exact():
    before, after = plain_views(vertical_flip_probability=0.3)
    is_flipped = (after != before).any(dim=(1, 2, 3))
    assert torch.equal(after[is_flipped], before[is_flipped].flip(2))
    assert is_flipped.float().mean() == pytest.approx(0.3, abs=0.08)


def test_blurred_views_are_those_of_a_gaussian():
    before, after = plain_views(size=30, blur_probability=0.3)
    is_blurred = (after - before).abs().amax(dim=(1, 2, 3)) > 1e-6
    assert is_blurred.float().mean() == pytest.approx(0.3, abs=0.08)
    sigmas = []
    for one, blurred in zip(before[is_blurred][:20], after[is_blurred][:20], strict=True):
        padded = torch.nn.functional.pad(one.double(), (1, 1, 1, 1), mode="reflect")
        # A kernel of three: the middle and its neighbours, by the first row's ratio.
        errors = {}
        for tenth in range(1, 201):
            weights = torch.exp(-torch.tensor([1.0, 0.0, 1.0]).double() / (2 * (tenth / 100) ** 2))
            weights /= weights.sum()
            kernel = torch.outer(weights, weights).expand(3, 1, 3, 3)
            slow = torch.nn.functional.conv2d(padded.unsqueeze(0), kernel, groups=3)[0]
            errors[tenth / 100] = float((slow - blurred).abs().max())
        sigmas.append(min(errors, key=errors.get))
        assert errors[sigmas[-1]] < 1.5e-2
    assert all(0.1 <= sigma <= 2.0 for sigma in sigmas) and len(set(sigmas)) > 5


def test_the_blur_of_imagenets_views_is_simclrs():
    augment = augmentation(size=224, blur_probability=1.0)
    assert augment.transforms[-1].flags["kernel_size"] == (23, 23)
    sigmas = drawn(augment)[-1]["sigma"]
    assert (sigmas.min().item(), sigmas.max().item()) == pytest.approx((0.1, 2.0), abs=0.02)


def test_draws_are_unchanged_without_blur_and_solarisation():
    """Older runs, whose settings are the defaults now, resume on the same views."""
    named = [type(each).__name__ for each in augmentation().transforms.children()]
    assert named == ["RandomResizedCrop", "RandomHorizontalFlip", "ColorJitter", "RandomGrayscale"]
    assert augmentation(grey_probability=0.2).transforms[-1].p == 0.2


def test_the_kernel_makes_no_blur_no_solarisation_no_turns_and_no_views_that_are_cropped_already(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    kinds = ("blur", "solarise", "second_blur", "second_solarise", "vertical_flip", "quarter_turn")
    probabilities = {f"{kind}_probability": 0.5 for kind in kinds}
    for option, value in {**probabilities, "from_original": True}.items():
        asked = AugmentConfig(fused=True, **{option: value})
        with pytest.raises(ConfigError, match=r"augment\.fused: found true"):
            asked.build(32, 3, 0, device=torch.device("cuda"))


@pytest.mark.usefixtures("unchecked_types")
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_images_other_than_pixels_from_0_to_255_are_refused(dtype):
    flip = FlipAugmentation(seed=0, flip_probability=0.5)
    for make in (unit_range, lambda images: flip(images, 0, slice(0, 2), 2)):
        with pytest.raises(TypeError, match=f"^images: found {dtype}, must be uint8 from 0 to 255, as "):
            make(torch.zeros(2, 3, 4, 4, dtype=dtype))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"min_scale": 0.0}, r"min_scale: found 0.0, must be in \(0, 1\]"),
        ({"max_scale": 0.1}, r"max_scale: found 0.1, must be in \[0.2, 1\]"),
        ({"flip_probability": 2.0}, r"flip_probability: found 2.0, must be in \[0, 1\]"),
        ({"grey_probability": -1.0}, "grey_probability: found -1.0"),
        ({"blur_probability": 3.0}, "blur_probability: found 3.0"),
        ({"second_blur_probability": 3.0}, "second_blur_probability: found 3.0"),
        ({"second_solarise_probability": -1.0}, "second_solarise_probability: found -1.0"),
        ({"vertical_flip_probability": 1.5}, r"vertical_flip_probability: found 1.5, must be in \[0, 1\]"),
        ({"quarter_turn_probability": -0.5}, "quarter_turn_probability: found -0.5"),
        ({"colour_strength": -1.0}, r"colour_strength: found -1.0, must be in \[0, 2.5\]"),
        ({"saturation_strength": 3.0}, r"saturation_strength: found 3.0, must be in \[0, 2.5\]"),
        ({"num_views": 0}, "num_views: found 0, must be ≥ 1"),
        ({"num_channels": 0}, "num_channels: found 0, must be ≥ 1"),
    ],
)
def test_a_value_outside_its_range_is_refused(values, message):
    usual = {"min_scale": 0.2, "flip_probability": 0.5, "colour_strength": 0.5, "num_views": 2, "num_channels": 3}
    with pytest.raises(ConfigError, match=f"^{message}"):
        SimCLRAugmentation(image_size_px=8, seed=0, **{**usual, **values})
