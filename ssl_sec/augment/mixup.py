"""Mixup: views and labels of two images, mixed (Zhang et al. 2018).

    x̃ = λ x + (1 − λ) x′,    ỹ = λ y + (1 − λ) y′,    λ ~ Beta(α, α), one for each step

The images of a step are in random order, so that its rows 2k and 2k + 1 are two random images: they are each other's
partners. Workers with an even number of rows hold both, and mix what one worker would mix.
"""

import random

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from ssl_sec.augment.views import Views
from ssl_sec.seeding import derived_seed


def partners(rows: Shaped[Tensor, "rows *rest"]) -> Shaped[Tensor, "rows *rest"]:
    """The rows in the order of their partners: 1, 0, 3, 2, …; their number must be even."""
    return rows.unflatten(0, (-1, 2)).flip(1).flatten(0, 1)


class Mixup:
    """One view of each image, mixed with that of its partner.

    Args:
        views: function that makes one view of each image.
        alpha: α > 0; larger values bring the shares nearer to one half.
        seed: the run's seed.
    """

    def __init__(self, views: Views, alpha: float, seed: int) -> None:
        self.views = views
        self.alpha = alpha
        self.seed = seed

    def share(self, step: int) -> float:
        """λ in [0, 1] of a step, a function of (seed, step) alone."""
        return random.Random(derived_seed(self.seed, "mixup", step)).betavariate(self.alpha, self.alpha)

    @torch.no_grad()
    def __call__(
        self, images: Tensor, step: int, rows: slice, global_batch_size: int
    ) -> Float[Tensor, "views channels height width"]:
        """The mixed views of this worker's rows of the global batch; arguments as for `Views`."""
        views = self.views(images, step, rows, global_batch_size)
        return torch.lerp(partners(views), views, self.share(step))
