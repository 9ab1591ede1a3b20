"""Dropout whose draws do not depend on the number of workers.

In training an entry is 0 with probability p, and 1 / (1 − p) times itself otherwise (Srivastava et al. 2014). The draw
is a function of the seed, the step and the row's place in the global batch alone, by `ssl_sec.seeding.mix`: each worker
computes the draws of its own rows, on its device, and no other draw is affected.
"""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ssl_sec.seeding import derived_seed, kept_in_place, mix


class GlobalDropout(nn.Module):
    """Dropout of [rows, width]; in training, `draw_dropout` is called before each step.

    Args:
        probability: p, in [0, 1); with 0 nothing is drawn or changed.
        width: width of the rows.
        seed: the run's seed.
    """

    # A buffer, as its change from step to step must not cause another compilation.
    kept: Tensor | None

    def __init__(self, probability: float, width: int, seed: int) -> None:
        super().__init__()
        self.probability = probability
        self.width = width
        self.seed = seed
        self.register_buffer("kept", None, persistent=False)

    def extra_repr(self) -> str:
        """The values that define the draws."""
        return f"probability={self.probability}, width={self.width}, seed={self.seed}"

    def draw(self, step: int, rows: slice, num_views: int, device: torch.device) -> None:
        """Draws the entries of this worker's rows that a step keeps.

        Args:
            step: 0-based global step.
            rows: this worker's rows of the global batch.
            num_views: views of each row; all first views come before all second ones.
            device: device of the rows.
        """
        if self.probability == 0:
            return
        views = torch.arange(num_views, device=device) + derived_seed(self.seed, "dropout", step)
        places = torch.arange(rows.start, rows.stop, device=device)
        each_row = mix(mix(views).unsqueeze(1) + places).flatten()
        bits = mix(each_row.unsqueeze(1) + torch.arange(self.width, device=device))
        kept = bits >= int(self.probability * 2**64) - 2**63  # all int64 are equally likely
        self.kept = kept_in_place(kept, self.kept)

    def forward(self, values: Float[Tensor, "rows width"]) -> Float[Tensor, "rows width"]:
        """The entries that are kept, scaled, in training; the values in evaluation."""
        if self.probability == 0 or not self.training:
            return values
        if self.kept is None or self.kept.shape != values.shape:
            call = "ssl_sec.networks.dropout.draw_dropout(head, step, rows=slice(0, n), num_views=1, device=device)"
            raise RuntimeError(f"dropout of {list(values.shape)}: nothing was drawn; before each step call {call}")
        return values * self.kept * (1 / (1 - self.probability))


def draw_dropout(module: nn.Module, step: int, rows: slice, num_views: int, device: torch.device) -> None:
    """Draws for every dropout in `module`; arguments as for `GlobalDropout.draw`."""
    for layer in module.modules():
        if isinstance(layer, GlobalDropout):
            layer.draw(step, rows, num_views, device)
