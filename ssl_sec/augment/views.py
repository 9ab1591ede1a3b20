"""Augmentation on the device: uint8 images -> views in [0, 1].

SimCLR's three (Chen et al. 2020, appendix A; SEC, appendix B.3): random crop and resize, random flip, colour distortion
of strength s (brightness, contrast, saturation 0.8 s, hue 0.2 s, with probability 0.8; grey with probability 0.2), on
ImageNet a blur as well (a Gaussian of σ in [0.1, 2] pixels and a kernel of a tenth of the side). BYOL blurs and
solarises its two views with different probabilities (Grill et al. 2020, appendix B). Images without an upper side may
also be flipped vertically and turned by 90 degrees. SwAV adds small views of small crops to two large ones (multi-crop,
Caron et al. 2020, section 3.3). Deep metric learning's two (SEC, appendix B.1): random crop and resize, random flip.
The draws of a step are made on the CPU for the whole global batch from (seed, step, view) alone, and each worker
applies its own rows of them on its device, so the views do not depend on the number of workers, and a GPU draws what a
CPU draws.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, cast, runtime_checkable

import torch
from jaxtyping import Float, UInt8
from torch import Tensor, nn

from ssl_sec.compilers import why_no_kernels
from ssl_sec.data.crops import RandomResizedCrop
from ssl_sec.errors import counted
from ssl_sec.rules import Range, check
from ssl_sec.seeding import derived_seed

# The largest side of a view whose pixels fit into the registers of one program of a GPU.
LARGEST_FUSED_VIEW_PX = 64

# Values of the images that are transformed at once: the transforms need several times their memory (512 MiB).
_VALUES_AT_ONCE = 2**27

# Tensors of a draw that the whole batch shares, whatever their length.
_SHARED_DRAWS = frozenset({"order", "forward_input_shape"})


def unit_range(images: UInt8[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Pixels 0-255 as float32 in [0, 1].

    Raises:
        TypeError: they are not uint8, as pixels in [0, 1] are not.
    """
    _require_pixels(images)
    return images.float() / 255


def _require_pixels(images: Tensor) -> None:
    if images.dtype != torch.uint8:
        raise TypeError(f"images: found {images.dtype}, must be uint8 from 0 to 255, as (images * 255).byte() is")


def already_cropped(
    images: UInt8[Tensor, "batch channels height width"], step: int, rows: slice, global_batch_size: int
) -> Float[Tensor, "batch channels height width"]:
    """The one view of images that were cropped when they were decoded (`ssl_sec.data.crops`): the images."""
    return unit_range(images)


@dataclass(frozen=True, kw_only=True, slots=True)
class CutParts:
    """The parts of images for views of one size, which `ssl_sec.data.crops.ViewCrops` has cut.

    Attributes:
        first: number of the first byte of the first part among those of an image.
        num_channels: channels of the images.
        size_px: side of the parts.
    """

    first: int
    num_channels: int
    size_px: int

    def __call__(
        self, images: UInt8[Tensor, "batch values"], num_views: int
    ) -> tuple[UInt8[Tensor, "batch channels size size"], ...]:
        """The parts for the first views, one batch for each view."""
        shape = (self.num_channels, self.size_px, self.size_px)
        values = images[:, self.first : self.first + num_views * math.prod(shape)]
        return values.unflatten(1, (num_views, *shape)).unbind(1)


class _GlobalBatchAugmentation:
    """Views by transforms whose draws are made for the global batch.

    Deliberately not a module: `Module.to` would make kornia draw on the device, whose generator nobody seeds, and wait
    for it. The transforms compute on the device of the images anyway.

    Args:
        transforms: kornia's, in their order.
        seed: the run's seed.
        num_views: views of each image, ≥ 1.
        parts: the parts of the images that the views show, if they were cut out when the images were decoded.
        second_transforms: those of every second view; None if all views have the same.
    """

    def __init__(
        self,
        transforms: list[nn.Module],
        seed: int,
        num_views: int,
        parts: "CutParts | None" = None,
        second_transforms: list[nn.Module] | None = None,
    ) -> None:
        from ssl_sec.augment.transforms import sequence

        self.seed = seed
        self.num_views = num_views
        self.parts = parts
        self.transforms = sequence(transforms)
        self.second_transforms = self.transforms if second_transforms is None else sequence(second_transforms)

    def __repr__(self) -> str:
        differing = "" if self.second_transforms is self.transforms else f", second_transforms={self.second_transforms}"
        shown = f"seed={self.seed}, num_views={self.num_views}, transforms={self.transforms}{differing}"
        return f"{type(self).__name__}({shown})"

    @torch.no_grad()
    def __call__(
        self,
        images: UInt8[Tensor, "batch channels height width"] | UInt8[Tensor, "batch values"],
        step: int,
        rows: slice,
        global_batch_size: int,
    ) -> Float[Tensor, "views channels size size"]:
        """The views of this worker's rows of the global batch, all first views before all second ones.

        Args:
            images: this worker's images, 0-255, or the parts of them that were cut out as they were decoded.
            step: 0-based global step.
            rows: rows of these images in the global batch.
            global_batch_size: rows of all workers.
        """
        of_views = [images] * self.num_views if self.parts is None else self.parts(images, self.num_views)
        global_shape = torch.Size((global_batch_size, *of_views[0].shape[1:]))
        made: list[Tensor] = []
        for view, pixels in enumerate(of_views):
            draws = _rows_of(self._draw(global_shape, step, view), rows, len(images))
            at_once = max(_VALUES_AT_ONCE // math.prod(pixels.shape[1:]), 1)
            for start in range(0, len(pixels), at_once):
                part = pixels[start : start + at_once]
                drawn = _rows_of(draws, slice(start, start + at_once), len(part))
                made.append(self._of(view)(unit_range(part), params=drawn))
        return torch.cat(made)

    def _of(self, view: int) -> Any:
        return self.second_transforms if view % 2 == 1 else self.transforms

    def _draw(self, global_shape: torch.Size, step: int, view: int) -> list[Any]:
        # kornia draws from torch's global generator; only the CPU's is used, and restored afterwards.
        with torch.random.fork_rng(devices=[]), _one_thread():
            torch.default_generator.manual_seed(derived_seed(self.seed, "views", step, view))
            return self._of(view).forward_parameters(global_shape)


class SimCLRAugmentation(_GlobalBatchAugmentation):
    """Two or more views of each image.

    Args:
        image_size_px: side of the views, pixels.
        num_channels: channels of the images; the only colour distortions of other images than those of 3 are
            brightness and contrast.
        seed: the run's seed.
        num_views: views of each image, ≥ 1.
        min_scale: smallest crop, as a share of the image's area, in (0, 1].
        max_scale: largest crop, in [min_scale, 1].
        flip_probability: probability of a horizontal flip, in [0, 1].
        vertical_flip_probability: probability of a vertical flip, in [0, 1].
        quarter_turn_probability: probability of a turn by 90 degrees, in [0, 1].
        parts: the parts of the images that the views show, if they were cut out when the images were decoded; min_scale
            and max_scale are then without effect.
        colour_strength: strength s of the colour distortion, in [0, 2.5]; 0.5 on CIFAR, 1.0 on ImageNet.
        grey_probability: probability that a colour image becomes grey, in [0, 1].
        blur_probability: probability of a Gaussian blur, in [0, 1].
        solarise_probability: probability that pixels above one half are inverted, in [0, 1].
        saturation_strength: strength of the distortion of the saturation, in [0, 2.5]; None for `colour_strength`.
        second_blur_probability: blur_probability of every second view; None for that of the others.
        second_solarise_probability: solarise_probability of every second view; None for that of the others.
    """

    def __init__(
        self,
        *,
        image_size_px: int,
        num_channels: int,
        seed: int,
        num_views: int,
        min_scale: float,
        flip_probability: float,
        colour_strength: float,
        grey_probability: float = 0.2,
        blur_probability: float = 0.0,
        solarise_probability: float = 0.0,
        max_scale: float = 1.0,
        vertical_flip_probability: float = 0.0,
        quarter_turn_probability: float = 0.0,
        parts: CutParts | None = None,
        saturation_strength: float | None = None,
        second_blur_probability: float | None = None,
        second_solarise_probability: float | None = None,
    ) -> None:
        from ssl_sec.augment import transforms

        saturation = colour_strength if saturation_strength is None else saturation_strength
        second_blur = blur_probability if second_blur_probability is None else second_blur_probability
        second_solarise = solarise_probability if second_solarise_probability is None else second_solarise_probability
        check(image_size_px >= 1, "image_size_px", image_size_px, "≥ 1")
        check(num_channels >= 1, "num_channels", num_channels, "≥ 1")
        check(num_views >= 1, "num_views", num_views, "≥ 1")
        Range(gt=0, le=1).check("min_scale", min_scale)
        Range(ge=min_scale, le=1).check("max_scale", max_scale)
        Range(ge=0, le=2.5).check("colour_strength", colour_strength)
        Range(ge=0, le=2.5).check("saturation_strength", saturation)
        for key, probability in (
            ("flip_probability", flip_probability),
            ("vertical_flip_probability", vertical_flip_probability),
            ("quarter_turn_probability", quarter_turn_probability),
            ("grey_probability", grey_probability),
            ("blur_probability", blur_probability),
            ("solarise_probability", solarise_probability),
            ("second_blur_probability", second_blur),
            ("second_solarise_probability", second_solarise),
        ):
            Range(ge=0, le=1).check(key, probability)
        self.image_size_px = image_size_px

        def in_order(blur: float, solarise: float) -> list[nn.Module]:
            cut = () if parts else transforms.crop(image_size_px, (min_scale, max_scale), (3 / 4, 4 / 3))
            return [
                *cut,
                *transforms.flip(flip_probability),
                *transforms.orientations(vertical_flip_probability, quarter_turn_probability),
                *transforms.colours(num_channels, colour_strength, saturation, grey_probability),
                *transforms.blur_and_solarise(image_size_px, blur, solarise),
            ]

        differ = (second_blur, second_solarise) != (blur_probability, solarise_probability)
        super().__init__(
            in_order(blur_probability, solarise_probability),
            seed,
            num_views,
            parts,
            in_order(second_blur, second_solarise) if differ else None,
        )


class FusedSimCLRAugmentation(SimCLRAugmentation):
    """The same views of small colour images in one launch on a GPU; see `ssl_sec.augment.fused`.

    It draws the numbers that `SimCLRAugmentation` draws, and the views differ by rounding: of square images at SimCLR's
    strengths by at most 1e-5, of others, or at larger strengths, by up to 1e-4.

    Args:
        layout: memory layout of the views.
        settings: arguments of `SimCLRAugmentation`.
    """

    def __init__(self, layout: torch.memory_format = torch.contiguous_format, **settings: Any) -> None:
        super().__init__(**settings)
        self.layout = layout

    def __call__(
        self,
        images: UInt8[Tensor, "batch channels height width"],
        step: int,
        rows: slice,
        global_batch_size: int,
    ) -> Float[Tensor, "views channels size size"]:
        """The views of this worker's rows of the global batch, all first views before all second ones."""
        from ssl_sec.augment.fused import fused_views  # Triton is not installed on every machine

        _require_pixels(images)
        global_shape = torch.Size((global_batch_size, *images.shape[1:]))
        drawn = [_rows_of(self._draw(global_shape, step, view), rows, len(images)) for view in range(self.num_views)]
        numbers = torch.cat([self._numbers(draws) for draws in drawn], dim=1)
        if images.is_cuda:
            numbers = numbers.pin_memory().to(images.device, non_blocking=True)
        return fused_views(images.contiguous(), numbers, self.image_size_px, self.layout)

    def _numbers(self, draws: list[Any]) -> Float[Tensor, "numbers batch"]:
        """The kernel's `NUMBERS` from the draws of a view."""
        drawn = {draw.name.partition("_")[0]: cast(Mapping[str, Tensor], draw.data) for draw in draws}
        corners = drawn["RandomResizedCrop"]["src"]
        first, last = corners[:, 0], corners[:, 2]
        nothing = corners.new_zeros(len(corners))

        def read(transform: str, name: str = "batch_prob") -> Tensor:
            return drawn[transform][name] if transform in drawn else nothing

        order = drawn["ColorJitter"]["order"].tolist() if "ColorJitter" in drawn else []
        return torch.stack(
            [
                *first.unbind(1),
                *((last - first) / max(self.image_size_px - 1, 1)).unbind(1),
                *(read(transform) for transform in ("RandomHorizontalFlip", "ColorJitter", "RandomGrayscale")),
                *(read("ColorJitter", f"{step}_factor") for step in ("brightness", "contrast", "saturation", "hue")),
                torch.full_like(nothing, sum(step * 4**place for place, step in enumerate(order))),
            ]
        )


def why_not_fused(image_size_px: int, num_channels: int, device: torch.device) -> str | None:
    """The reason why `FusedSimCLRAugmentation` cannot make these views; None if it can."""
    if device.type != "cuda":
        return f"the device is {device.type}, and the kernel runs on GPUs"
    if num_channels != 3:
        return f"the images have {counted(num_channels, 'channel')}, and the kernel makes colour images"
    if image_size_px > LARGEST_FUSED_VIEW_PX:
        return f"the views are {image_size_px} pixels wide, and the kernel makes at most {LARGEST_FUSED_VIEW_PX}"
    return why_no_kernels(device)


class FlipAugmentation(_GlobalBatchAugmentation):
    """One view of each image: itself, or its mirror image.

    Args:
        seed: the run's seed.
        flip_probability: probability of the flip, in [0, 1].
    """

    def __init__(self, *, seed: int, flip_probability: float) -> None:
        from kornia.augmentation import RandomHorizontalFlip

        Range(ge=0, le=1).check("flip_probability", flip_probability)
        super().__init__([RandomHorizontalFlip(p=flip_probability)], seed, num_views=1)


class RetrievalAugmentation(_GlobalBatchAugmentation):
    """One view of each image: the crops of `ssl_sec.data.crops` for images that have one size already.

    Images are not resized before they are cropped, and crops are not antialiased, which matters little if the images
    are not much larger than their views.

    Args:
        image_size_px: side of the views, pixels.
        crop: the sizes and shapes of the crops, and how often they are mirrored.
        seed: the run's seed.
    """

    def __init__(self, *, image_size_px: int, crop: RandomResizedCrop, seed: int) -> None:
        from ssl_sec.augment import transforms

        scales, aspects = (crop.min_scale, crop.max_scale), (crop.min_aspect, crop.max_aspect)
        crops_and_flips = [*transforms.crop(image_size_px, scales, aspects), *transforms.flip(crop.flip_probability)]
        super().__init__(crops_and_flips, seed, num_views=1)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Uses a single thread: for some thousand numbers, waiting for others takes longer than the work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _rows_of(draws: list[Any], rows: slice, num_rows: int) -> list[Any]:
    """The draws of some rows of the global batch; each is kornia's `ParamItem`, a named tuple of name and data."""
    return [draw._replace(data=_slice(draw.data, rows, num_rows)) for draw in draws]


def _slice(data: dict[str, Tensor], rows: slice, num_rows: int) -> dict[str, Tensor]:
    sliced = {name: value if name in _SHARED_DRAWS else value[rows] for name, value in data.items()}
    shape = sliced["forward_input_shape"].clone()
    shape[0] = num_rows
    return {**sliced, "forward_input_shape": shape}


@runtime_checkable
class Views(Protocol):
    """A function from the images of a worker's rows to their views, all of one size."""

    def __call__(self, images: Tensor, step: int, rows: slice, global_batch_size: int) -> Tensor:
        """The views of the rows, as a function of (seed, step) and the images."""
        ...
