"""Partial FC: a step compares its rows with a part of the classes, drawn anew for each step (An et al. 2022).

Of n classes, a row is compared with those of the batch and with m = r n others, for a sample rate r: the time of a
loss's similarities falls with r. Classes that are neither drawn nor in the batch get no gradient of the loss in this
step.

The classes, in a circle, are divided into m ranges of consecutive numbers, of n / m classes each, that begin somewhere
else in each step, and every range gives one. A worker that holds the templates of some classes thus draws for these
alone, and the draws are a function of (seed, step), whatever the number of workers.
"""

import torch
from torch import Tensor, nn

from ssl_sec.rules import Range
from ssl_sec.seeding import derived_seed, kept_in_place, mix


class ClassSample(nn.Module):
    """The classes that a step's rows are compared with, beside those of the batch.

    Args:
        num_classes: n.
        rate: r in (0, 1), the share of the classes that is drawn.
        seed: the run's seed.

    Attributes:
        places: indices of the drawn classes among those held by this worker; −1 where another worker holds the class of
            a range that they share. None before the first draw.
    """

    # A buffer, as its change from step to step must not cause another compilation.
    places: Tensor | None

    def __init__(self, num_classes: int, rate: float, seed: int) -> None:
        super().__init__()
        Range(gt=0, lt=1).check("rate", rate)
        self.num_classes = num_classes
        self.rate = rate
        self.seed = seed
        self.num_drawn = max(1, round(rate * num_classes))
        self.register_buffer("places", None, persistent=False)

    def draw(self, step: int, held: range, device: torch.device) -> None:
        """Draws the classes of a step.

        Args:
            step: 0-based global step.
            held: the classes whose templates this worker holds, one or more.
            device: device of the templates.
        """
        num_classes, num_drawn = self.num_classes, self.num_drawn
        # Range i has the places ⌊i n / m⌋ up to ⌊(i + 1) n / m⌋ of the circle, which is turned by `shift`.
        shift = derived_seed(self.seed, "shift of classes", step) % num_classes
        first_place = held.start + shift
        first_range = ((first_place + 1) * num_drawn - 1) // num_classes
        # As many as can have a place in common with the held classes: their number must not change from step to step.
        ranges = torch.arange(first_range, first_range + (len(held) - 1) * num_drawn // num_classes + 2, device=device)
        start, stop = ranges * num_classes // num_drawn, (ranges + 1) * num_classes // num_drawn
        draws = mix(ranges % num_drawn + derived_seed(self.seed, "classes", step)) & 0x7FFFFFFFFFFFFFFF
        places = start + draws % (stop - start) - first_place
        is_held = (places >= 0) & (places < len(held))
        self.places = kept_in_place(torch.where(is_held, places, -1), self.places)

    def extra_repr(self) -> str:
        """The values that define the draws."""
        return f"rate={self.rate}, seed={self.seed}"
