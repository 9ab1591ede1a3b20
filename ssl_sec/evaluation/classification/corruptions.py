"""Corruptions of test images, of four kinds and five strengths: how well a classifier of clean images withstands them.

Hendrycks and Dietterich 2019, "Benchmarking Neural Network Robustness to Common Corruptions and Perturbations". The
strengths are those of their CIFAR-10-C, for images of 32 pixels. The blur's σ grows with the shorter side of the image;
the others do not depend on it. As there, corrupted images have 256 levels.
"""

import math
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float, Int64
from kornia.enhance import jpeg_codec_differentiable
from kornia.filters import gaussian_blur2d
from torch import Tensor

from ssl_sec.seeding import derived_seed, mix, normal

# For each kind, from the weakest to the strongest: σ in pixels for a side of 32, σ in units of the range of a pixel,
# libjpeg's quality, and the factor on the distance from the mean of the image's channel.
STRENGTHS = {
    "blur": (0.4, 0.6, 0.7, 0.8, 1.0),
    "noise": (0.04, 0.06, 0.08, 0.09, 0.10),
    "jpeg": (80.0, 65.0, 58.0, 50.0, 40.0),
    "contrast": (0.75, 0.5, 0.4, 0.3, 0.15),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Corruption:
    """A corruption of images on their device; a function of (seed, index of the image) and the image alone.

    Attributes:
        kind: a key of `STRENGTHS`.
        strength: 1 to 5.
        seed: seed of the noise.
    """

    kind: str
    strength: int
    seed: int = 0

    @torch.no_grad()
    def __call__(
        self, images: Float[Tensor, "batch channels height width"], indices: Int64[Tensor, " batch"]
    ) -> Float[Tensor, "batch channels height width"]:
        """The corrupted images.

        Args:
            images: pixels in [0, 1].
            indices: indices of the images in their set.
        """
        by_kind = {"blur": _blurred, "noise": partial(_noisy, indices, self.seed), "jpeg": _coded, "contrast": _faded}
        corrupted = by_kind[self.kind](images, STRENGTHS[self.kind][self.strength - 1])
        return (corrupted.clamp(0, 1) * 255).round() / 255


def corruptions(seed: int) -> list[Corruption]:
    """All corruptions, each kind from the weakest to the strongest."""
    return [
        Corruption(kind=kind, strength=place + 1, seed=seed)
        for kind, values in STRENGTHS.items()
        for place in range(len(values))
    ]


def _blurred(images: Tensor, sigma: float) -> Tensor:
    sigma *= min(images.shape[-2:]) / 32
    size = 2 * math.ceil(4 * sigma) + 1
    return gaussian_blur2d(images, (size, size), (sigma, sigma), border_type="replicate")


def _noisy(indices: Tensor, seed: int, images: Tensor, sigma: float) -> Tensor:
    pixels = torch.arange(images[0].numel(), device=images.device)
    firsts = mix(indices.to(images.device) + derived_seed(seed, "corruption noise"))
    noise = normal(firsts.unsqueeze(1) + pixels, torch.float32)
    return images + sigma * noise.view(images.shape).to(images)


def _coded(images: Tensor, quality: float) -> Tensor:
    """JPEG with halved chroma, by kornia, whose rounding is a cubic near each step and keeps a little more.

    Channels that are no colours are coded as grey images.
    """
    is_coloured = images.shape[1] == 3
    coloured = images if is_coloured else images.flatten(0, 1).unsqueeze(1).expand(-1, 3, -1, -1)
    coded = jpeg_codec_differentiable(coloured.float(), torch.tensor([quality], device=images.device)).to(images)
    return coded if is_coloured else coded.mean(1).view_as(images)


def _faded(images: Tensor, factor: float) -> Tensor:
    means = images.mean((2, 3), keepdim=True)
    return (images - means) * factor + means
