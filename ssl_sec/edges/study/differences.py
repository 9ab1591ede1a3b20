"""Differences between arms, paired by seed: runs of one seed have the same weights, order and augmentation."""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from scipy.stats import t as student_t

from ssl_sec.edges.study.cells import DIGITS
from ssl_sec.edges.tables import decimals

_CONFIDENCE = 0.95


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """The mean of an arm's differences from the baseline over the seeds that both have, with Student's t-interval.

    Attributes:
        mean: mean of the differences; NaN if one of the values is not finite.
        half_width: half the width of the 95 % interval; NaN for one pair, if the mean is NaN, and if the differences
            are all the same: accuracies are multiples of 1 / images, so this says little about other seeds.
        p: p-value of the two-sided t-test of a mean of 0; NaN likewise. Only `adjusted` adjusts it for other
            comparisons.
        num_pairs: number of seeds.
    """

    mean: float
    half_width: float
    p: float
    num_pairs: int

    @property
    def low(self) -> float:
        """The lower end of the interval."""
        return self.mean - self.half_width

    @property
    def high(self) -> float:
        """The upper end of the interval."""
        return self.mean + self.half_width

    def __str__(self) -> str:
        digits = decimals(self.mean, self.low, self.high)
        interval = "" if math.isnan(self.half_width) else f" [{self.low:+.{digits}f}, {self.high:+.{digits}f}]"
        return f"{self.mean:+.{digits}f}{interval}"


def difference(arm: Mapping[int, float], baseline: Mapping[int, float]) -> Difference | None:
    """The difference of an arm from the baseline; None if they have no seed in common.

    Args:
        arm: seed -> value.
        baseline: seed -> value of the baseline.
    """
    pairs = [(arm[seed], baseline[seed]) for seed in arm if seed in baseline]
    if not pairs:
        return None
    differences = [one - other for one, other in pairs]
    # Of values that are not finite, infinities of both signs have no mean at all.
    mean = statistics.fmean(differences) if all(map(math.isfinite, differences)) else math.nan
    count = len(pairs)
    without_spread = Difference(mean=mean, half_width=math.nan, p=math.nan, num_pairs=count)
    if count == 1 or math.isnan(mean):
        return without_spread
    spread = statistics.stdev(differences)
    if spread <= _rounding(chain(*pairs)):
        return without_spread
    error = spread / math.sqrt(count)
    quantile = float(student_t.ppf(0.5 + _CONFIDENCE / 2, count - 1))
    return replace(without_spread, half_width=quantile * error, p=float(2 * student_t.sf(abs(mean) / error, count - 1)))


def _rounding(values: Iterable[float]) -> float:
    """The largest standard deviation that equal differences of these values have, since the values are rounded.

    Each difference is off by at most one unit of the last digit, so the deviation of two or more is at most √2 units.
    """
    largest = max(map(abs, values))
    return 1.5 * 10.0 ** (math.floor(math.log10(largest)) + 1 - DIGITS) if largest > 0 else 0.0


def adjusted(differences: Sequence[Difference], family: int) -> list[Difference]:
    """The differences with Holm's adjusted p-values, which are valid for the whole family together.

    Args:
        differences: the known differences.
        family: number of planned differences; those that are not known yet count as if their p were 1.
    """
    tested = sorted((one.p, place) for place, one in enumerate(differences) if not math.isnan(one.p))
    found = list(differences)
    least = 0.0
    for rank, (p, place) in enumerate(tested):
        least = max(least, min(1.0, (family - rank) * p))
        found[place] = replace(found[place], p=least)
    return found
