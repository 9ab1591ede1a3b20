"""A training whose loss grows instead of falling."""

import logging

logger = logging.getLogger(__name__)

# What a user may try whose training diverged or collapsed.
SMALLER_STEPS = "a lower optimiser.learning_rate, optimiser.warmup_epochs or optimiser.clip_norm may prevent it"
# Multiple of the first loss that no training reaches whose loss only fluctuates.
_GROWTH = 10.0


class DivergenceWarning:
    """Warns once of a loss that has grown far beyond the first one."""

    def __init__(self) -> None:
        self._first: float | None = None
        self._has_warned = False

    def check(self, loss: float, step: int) -> None:
        """Looks at the loss of a step.

        Args:
            loss: the loss, finite.
            step: 0-based global step.
        """
        if self._first is None:
            self._first = loss
        # Hinges may begin near 0, and losses that are logarithms of ratios below it.
        if loss > _GROWTH * (1 + abs(self._first)) and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "the loss is %.4g at step %d, and was %.4g at first: the training diverges; %s",
                *(loss, step, self._first, SMALLER_STEPS),
            )
