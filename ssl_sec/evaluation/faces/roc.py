"""How well a score separates pairs of the same person (genuine) from pairs of different people (impostors).

At a threshold, FAR (false positive rate) is the share of the impostors that are accepted and TAR (true positive rate)
that of the genuine pairs. A threshold accepts scores that reach it, so equal scores are accepted together, and no tie
counts in favour of the embeddings. Nor does NaN: a genuine pair with it ranks last and an impostor first.
"""

import math
from collections.abc import Iterable
from fractions import Fraction
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ssl_sec.errors import ConfigError, DataError, counted
from ssl_sec.evaluation.arrays import Same, Scores, as_scores, several


class ROC(NamedTuple):
    """The corners of a receiver operating characteristic, from (0, 0) to (1, 1); between them it is straight.

    Attributes:
        fpr: false positive rates, ascending.
        tpr: true positive rates, ascending.
        thresholds: the lowest accepted scores, descending; the first, inf, accepts none.
    """

    fpr: Float[Tensor, " corners"]
    tpr: Float[Tensor, " corners"]
    thresholds: Float[Tensor, " corners"]


def tar_at_far(scores: Scores, same: Same, fars: Iterable[float]) -> dict[float, float]:
    """True accept rate at each false accept rate, in [0, 1], exact over all pairs.

    The threshold is the lowest that accepts ⌊far · impostors⌋ impostors or fewer: TAR is the share of the genuine pairs
    that score more than the next impostor. If no impostor may be accepted, they must score more than every impostor.

    It sorts only the highest scores of the impostors, as many as the greatest FAR needs.

    Args:
        scores: scores of the pairs; higher is more similar.
        same: whether each pair is genuine.
        fars: false accept rates, each in [0, 1], read as the decimal numbers that they print as.

    Raises:
        ConfigError: a FAR is outside [0, 1], or `fars` is one number.
        DataError: the numbers differ, or there are no genuine pairs or no impostors.
    """
    return share_accepted(*_decisive(scores, same, fars))


def num_decisive(fars: Iterable[float], num_impostors: int) -> int:
    """The number of highest impostor scores that decide the thresholds of all `fars`.

    Raises:
        ConfigError: a FAR is outside [0, 1].
    """
    return min(max((_num_accepted(far, num_impostors) for far in fars), default=0) + 1, num_impostors)


def share_accepted(
    genuine: Float[Tensor, " genuine"], highest: Float[Tensor, " highest"], num_impostors: int, fars: Iterable[float]
) -> dict[float, float]:
    """`tar_at_far` for scores that are already sorted.

    Args:
        genuine: scores of the genuine pairs, none of them NaN.
        highest: the `num_decisive` highest scores of the impostors, descending.
        num_impostors: number of all impostors.
        fars: false accept rates, each in [0, 1].
    """
    return {far: int((genuine > _floor(highest, num_impostors, far)).sum()) / len(genuine) for far in fars}


def thresholds_at_far(scores: Scores, same: Same, fars: Iterable[float]) -> dict[float, float]:
    """The score that a pair must exceed to be accepted, at each false accept rate, by the rule of `tar_at_far`.

    Args:
        scores: scores of the pairs; higher is more similar.
        same: whether each pair is genuine.
        fars: false accept rates, each in [0, 1], read as the decimal numbers that they print as.

    Returns:
        The threshold by FAR; -inf where every impostor may be accepted.

    Raises:
        ConfigError: a FAR is outside [0, 1], or `fars` is one number.
        DataError: the numbers differ, or there are no genuine pairs or no impostors.
    """
    _, highest, num_impostors, fars = _decisive(scores, same, fars)
    return {far: _floor(highest, num_impostors, far) for far in fars}


def _decisive(
    scores: Scores, same: Same, fars: Iterable[float]
) -> tuple[Float[Tensor, " genuine"], Float[Tensor, " highest"], int, list[float]]:
    """The arguments of `share_accepted`."""
    fars = several("fars", fars, "rates")
    genuine, impostors = _split(scores, same)
    return genuine, impostors.topk(num_decisive(fars, len(impostors))).values, len(impostors), fars


def accepted_at_far(scores: Scores, same: Same, far: float) -> Bool[Tensor, " genuine"]:
    """Which genuine pairs are accepted at a false accept rate; the rule, the arguments and the errors of `tar_at_far`.

    Args:
        scores: scores of the pairs; higher is more similar.
        same: whether each pair is genuine.
        far: the false accept rate, in [0, 1].
    """
    genuine, impostors = _split(scores, same)
    highest = impostors.topk(num_decisive([far], len(impostors))).values
    return genuine > _floor(highest, len(impostors), far)


def roc(scores: Scores, same: Same) -> ROC:
    """The receiver operating characteristic over all pairs, in float64.

    Args:
        scores: scores of the pairs; higher is more similar.
        same: whether each pair is genuine.

    Raises:
        DataError: the numbers differ, or there are no genuine pairs or no impostors.
    """
    genuine, impostors = _split(scores, same)
    values, order = torch.cat([genuine, impostors]).sort(descending=True)
    true = (order < len(genuine)).cumsum(0)
    del order
    is_last_of_ties = torch.ones_like(true, dtype=torch.bool)
    is_last_of_ties[:-1] = values[1:] != values[:-1]
    last = is_last_of_ties.nonzero().squeeze(1)
    values, true = values[last], torch.cat([true.new_zeros(1), true[last]])
    false = torch.cat([last.new_zeros(1), last + 1]) - true
    rise, run = true.diff(), false.diff()
    is_corner = torch.ones_like(true, dtype=torch.bool)
    is_corner[1:-1] = rise[:-1] * run[1:] != rise[1:] * run[:-1]
    thresholds = torch.cat([values.new_full((1,), torch.inf), values])
    return ROC(
        false[is_corner].double() / len(impostors), true[is_corner].double() / len(genuine), thresholds[is_corner]
    )


def equal_error_rate(scores: Scores, same: Same) -> float:
    """The rate at which FAR = 1 - TAR, in [0, 1]: equal shares of impostors accepted and genuine pairs refused.

    Between two thresholds the rate is interpolated, so scores that are all equal give 0.5. Arguments and errors as for
    `roc`.
    """
    fpr, tpr, _ = roc(scores, same)
    gap = fpr + tpr - 1
    after = int(torch.searchsorted(gap, 0.0))
    before = after - 1
    weight = -gap[before] / (gap[after] - gap[before])
    return torch.lerp(fpr[before], fpr[after], weight).item()


def _floor(highest: Float[Tensor, " highest"], num_impostors: int, far: float) -> float:
    """The score that an accepted pair exceeds."""
    accepted = _num_accepted(far, num_impostors)
    return float(highest[accepted]) if accepted < num_impostors else -math.inf


def _num_accepted(far: float, num_impostors: int) -> int:
    if not 0 <= far <= 1:
        raise ConfigError(f"TAR at FAR = {far}; allowed: 0 to 1")
    # As a decimal number: 0.29 · 100 is 29, but a little less in binary arithmetic.
    return math.floor(Fraction(str(far)) * num_impostors)


def _split(scores: Scores, same: Same) -> tuple[Float[Tensor, " genuine"], Float[Tensor, " impostors"]]:
    """The scores of the genuine pairs and of the impostors, without NaN."""
    scores, same = as_scores(scores, same)
    genuine, impostors = scores[same], scores[~same]
    if len(genuine) == 0 or len(impostors) == 0:
        raise DataError(
            f"verification: {counted(len(genuine), 'genuine pair')} and {counted(len(impostors), 'impostor')}; 1 or "
            "more of each"
        )
    return (
        genuine.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf),
        impostors.nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf),
    )
