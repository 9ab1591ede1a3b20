"""The result of a study: the arms at each point, and their differences from the baseline."""

import math
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from matplotlib.figure import Figure

from ssl_sec.edges.study.cells import KeptCell
from ssl_sec.edges.study.differences import Difference, adjusted, difference
from ssl_sec.edges.tables import mean_and_std
from ssl_sec.figures.study import ArmInterval, Cause, causes_figure, forest_figure, values_figure
from ssl_sec.metrics import chosen_metrics, metric_label
from ssl_sec.recipes.registry import PROBE, RecipeRow, compared_metrics

# Effects of an arm on norms and steps: name -> label.
_CAUSES = {
    "step": "turn of an embedding in a step",
    "unevenness": "unevenness of turns\n(deviation / mean)",
    "norm": "mean norm",
    "spread": "spread of norms\n(deviation / mean)",
}
_KNN = "probe/knn_top1"


@dataclass(frozen=True, kw_only=True)
class ComparisonRow:
    """An arm at a point.

    Attributes:
        arm: name of the arm.
        point: name of the point.
        metrics: seed -> metric -> value.
        difference: difference from the baseline at this point, with p adjusted for all comparisons of the study; None
            for the baseline.
    """

    arm: str
    point: str
    metrics: Mapping[int, Mapping[str, float]]
    difference: Difference | None

    def of(self, metric: str) -> dict[int, float]:
        """Seed -> value of a metric."""
        return {seed: one[metric] for seed, one in self.metrics.items() if metric in one}


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The rows of a study.

    Attributes:
        rows: rows in order of the points, with the baseline first at each.
        metric: the metric that decides.
        baseline: the arm that the others are compared with.
        family: number of comparisons with the baseline for which p is adjusted.
    """

    rows: Sequence[ComparisonRow]
    metric: str
    baseline: str
    family: int

    @classmethod
    def of(cls, cells: Sequence[KeptCell], metric: str, baseline: str, family: int) -> "Comparison":
        """Compares the given cells, in their order."""
        found: dict[str, dict[str, dict[int, Mapping[str, float]]]] = {}
        for cell in cells:
            found.setdefault(cell.point, {}).setdefault(cell.arm, {})[cell.seed] = cell.metrics
        rows = [
            ComparisonRow(arm=arm, point=point, metrics=arms[arm], difference=None)
            for point, arms in found.items()
            for arm in sorted(arms, key=lambda arm: arm != baseline)
        ]
        plain = cls(rows=rows, metric=metric, baseline=baseline, family=family)
        each = [plain._difference(row, metric) for row in rows]
        holm = iter(adjusted([one for one in each if one is not None], family))
        compared = [
            row if one is None else replace(row, difference=next(holm)) for row, one in zip(rows, each, strict=True)
        ]
        return replace(plain, rows=compared)

    def _difference(self, row: ComparisonRow, metric: str) -> Difference | None:
        """The difference of a row from the baseline at its point; None for the baseline, or without a common seed."""
        baseline = self._baseline_of(row)
        if row.arm == self.baseline or baseline is None:
            return None
        return difference(row.of(metric), baseline.of(metric))

    def _baseline_of(self, row: ComparisonRow) -> ComparisonRow | None:
        """The baseline's row at the point of a row."""
        return next((one for one in self.rows if one.point == row.point and one.arm == self.baseline), None)

    def _compared(self) -> Iterator[tuple[ComparisonRow, Difference, ComparisonRow]]:
        """The rows with a difference, that difference, and the baseline's row at their point."""
        for row in self.rows:
            baseline = self._baseline_of(row)
            if row.difference is not None and baseline is not None:
                yield row, row.difference, baseline

    def table(self) -> list[list[str]]:
        """The header, and a row for each arm at each point."""
        with_points = any(row.point for row in self.rows)
        measured = {name for row in self.rows for one in row.metrics.values() for name in one}
        decides = measured & {self.metric}
        others = PROBE.test_metrics if measured & {*PROBE.test_metrics} else compared_metrics()
        shown = [*decides, *chosen_metrics(others, measured - decides)]
        columns = [*(["at"] if with_points else []), "arm", "runs", *map(metric_label, shown)]
        compares = any(row.difference is not None and row.difference.num_pairs > 1 for row in self.rows)
        beside = [_KNN] if compares and _KNN in shown and self.metric != _KNN else []
        if compares:
            columns += [
                f"difference from {self.baseline} [95 %]",
                f"p (Holm, {self.family})" if self.family > 1 else "p",
            ]
            columns += [f"{metric_label(name).partition(' ')[0]} difference [95 %]" for name in beside]
        lines = [columns]
        for row in self.rows:
            values = [mean_and_std(list(row.of(name).values())) for name in shown]
            if compares:
                values += [*_ends(row), *(str(self._difference(row, name) or "") for name in beside)]
            lines.append([*([row.point] if with_points else []), row.arm, str(len(row.metrics)), *values])
        return lines

    def figures(self) -> dict[str, Figure]:
        """The plots that can be drawn: those of `forest`, `causes` and `over_values`."""
        drawn = {"forest": self.forest(), "causes": self.causes(), "over": self.over_values()}
        return {name: figure for name, figure in drawn.items() if figure is not None}

    def forest(self) -> Figure | None:
        """The differences with their intervals; None without differences."""
        points: dict[str, list[ArmInterval]] = {}
        for row, interval in self._intervals():
            points.setdefault(row.point, []).append(interval)
        return forest_figure(points, metric_label(self.metric), self.baseline) if points else None

    def over_values(self) -> Figure | None:
        """The differences over the values of each varied key; None if no key has two numbers or more."""
        keys: dict[str, dict[str, list[tuple[float, ArmInterval]]]] = {}
        for row, interval in self._intervals():
            key, _, value = row.point.partition("=")
            if (number := _number(value)) is not None and not math.isnan(interval.mean):
                keys.setdefault(key, {}).setdefault(row.arm, []).append((number, interval))
        several = {key: arms for key, arms in keys.items() if max(map(len, arms.values())) > 1}
        return values_figure(several, metric_label(self.metric), self.baseline) if several else None

    def _intervals(self) -> Iterator[tuple[ComparisonRow, ArmInterval]]:
        """The rows with a difference, with the difference of each seed."""
        for row, found, baseline in self._compared():
            ours, theirs = row.of(self.metric), baseline.of(self.metric)
            pairs = [ours[seed] - theirs[seed] for seed in ours if seed in theirs]
            yield row, ArmInterval(row.arm, found.mean, found.half_width, pairs)

    def causes(self) -> Figure | None:
        """The differences over the effects of the arms on norms and steps; None if these are not known."""
        arms: list[Cause] = []
        for row, found, baseline in self._compared():
            ratios = _ratios(row, baseline)
            if ratios:
                arms.append(Cause(row.arm, row.point, ratios, found.mean, found.half_width))
        if not arms:
            return None
        labels = {name: label for name, label in _CAUSES.items() if any(name in arm.ratios for arm in arms)}
        return causes_figure(arms, labels, metric_label(self.metric), self.baseline)

    def metrics(self) -> dict[str, float]:
        """Means, and differences with the ends of their intervals, as metrics of a run in MLflow.

        In their names, letters of points and arms that MLflow does not allow are spaces.
        """
        found: dict[str, float] = {}
        for row in self.rows:
            shown = re.sub(r"[^\w.:-]+", " ", f"{row.point} {row.arm}").strip()
            values = list(row.of(self.metric).values())
            if values:
                found[f"study/mean {shown}"] = statistics.fmean(values)
            if row.difference is not None:
                found[f"study/difference {shown}"] = row.difference.mean
                if not math.isnan(row.difference.half_width):
                    found[f"study/difference_low {shown}"] = row.difference.low
                    found[f"study/difference_high {shown}"] = row.difference.high
        return found


def _ratios(row: ComparisonRow, baseline: ComparisonRow) -> dict[str, float]:
    """Ratios of the means over a run to the baseline's: the geometric mean over the seeds that both have."""
    both = [(row.metrics[seed], baseline.metrics[seed]) for seed in row.metrics if seed in baseline.metrics]
    each = [(_causes_of(ours), _causes_of(theirs)) for ours, theirs in both]
    return {
        name: statistics.geometric_mean([ours[name] / theirs[name] for ours, theirs in each])
        for name in _CAUSES
        if each and all(one.get(name, 0) > 0 for pair in each for one in pair)
    }


def _causes_of(metrics: Mapping[str, float]) -> dict[str, float]:
    """Mean norms and steps of a run."""
    found = {"step": "mean/train/step_angle_mean", "norm": "mean/train/norm_mean"}
    causes = {name: metrics[metric] for name, metric in found.items() if metric in metrics}
    # Without a step, as of an arm whose learning rate is 0, there is nothing to divide by.
    if causes.get("step", 0) > 0 and "mean/train/step_angle_std" in metrics:
        causes["unevenness"] = metrics["mean/train/step_angle_std"] / causes["step"]
    if causes.get("norm", 0) > 0 and "mean/train/norm_std" in metrics:
        causes["spread"] = metrics["mean/train/norm_std"] / causes["norm"]
    return causes


def _ends(row: ComparisonRow) -> list[str]:
    if row.difference is None:
        return ["", ""]
    p = row.difference.p
    return [str(row.difference), "" if math.isnan(p) else "< 0.001" if p < 0.001 else f"{p:.3f}"]


def _number(value: str) -> float | None:
    """The value as a number that has a place on an axis; None if it is none."""
    try:
        number = float(value)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def deciding_metric(recipe: RecipeRow, kept: Sequence[KeptCell]) -> str:
    """The metric by which runs of a recipe are compared: the first of its metrics that all of them have."""
    names = (*recipe.test_metrics, *recipe.view_metrics)
    common = set[str]().union(*(cell.metrics for cell in kept)).intersection(*(cell.metrics for cell in kept))
    return next(iter(chosen_metrics(names, common)), recipe.view_metrics[0])


def curves_of(records: Sequence[Mapping[str, Any]], metrics: Sequence[str]) -> dict[str, list[tuple[float, float]]]:
    """Metric -> (step, value) of the reports of a run."""
    return {
        name: [(record["step"], record["metrics"][name]) for record in records if name in record["metrics"]]
        for name in metrics
    }
