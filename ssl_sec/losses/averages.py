"""Moving averages of figures of the global batch, a_t = (1 − ρ) a_{t−1} + ρ · figure, over the steps of training."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ssl_sec.losses.base import Scalar
from ssl_sec.losses.centres import snapshot
from ssl_sec.rules import Range


class Averages(nn.Module):
    """Moving averages of figures, each a buffer by its name. The first batch sets them.

    The buffers are of float64, so that the averages do not depend on the precision of the run that resumes them, and
    stay so if a model is converted to another precision, in which they would not move.

    Args:
        rho: ρ, the weight of a batch, in (0, 1].
        names: a name for each figure.

    Attributes:
        started: whether a batch has set them.
        moves: whether a batch moves them in training mode; False for rows that are not a batch's own.
    """

    started: Tensor

    def __init__(self, rho: float, *names: str) -> None:
        super().__init__()
        Range(gt=0, le=1).check("rho", rho)
        self.rho = rho
        self.moves = True
        self._names = names
        for name in names:
            self.register_buffer(name, torch.zeros((), dtype=torch.float64))
        self.register_buffer("started", torch.zeros((), dtype=torch.bool))

    def extra_repr(self) -> str:
        """The weight of a batch."""
        return f"rho={self.rho}"

    @torch.no_grad()
    def average(self, *figures: Scalar) -> tuple[Scalar, ...]:
        """The averages, in training mode after the batch has moved them, without waiting for the device.

        Before a batch has set them, they are the figures. A batch whose figures are not all finite, as after an
        overflow in half precision, moves none.

        Args:
            figures: of the global batch, in the order of the names.
        """
        before = [self.get_buffer(name) for name in self._names]
        found = [figure.double() for figure in figures]
        if not (self.training and self.moves):
            return tuple(torch.where(self.started, old, new) for old, new in zip(before, found, strict=True))
        usable = torch.stack(found).isfinite().all()
        after = [
            torch.where(usable, torch.where(self.started, old.lerp(new, self.rho), new), old)
            for old, new in zip(before, found, strict=True)
        ]
        # The result of `copy_` must be used: otherwise torch 2.11 drops the copy from a graph on a CPU.
        kept = tuple(snapshot(old.copy_(new)) for old, new in zip(before, after, strict=True))
        self.started.logical_or_(usable)
        return kept

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Averages":
        def moved(tensor: Tensor) -> Tensor:
            found = fn(tensor)
            return found if found.dtype == tensor.dtype else tensor.to(found.device)

        return super()._apply(moved, recurse)  # pyright: ignore[reportUnknownMemberType]
