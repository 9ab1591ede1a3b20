"""Figures of SFT that compare finished metric-learning runs by one setting: batch size, λ, or the encoder.

Only runs count that are equal except for that setting and the feature transform. Of each seed, the newest run counts;
points are means over seeds, with the sample standard deviation as a bar.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ssl_sec.edges.report.files import Report
from ssl_sec.edges.tables import deviation
from ssl_sec.edges.tracking.comparing import telling
from ssl_sec.edges.tracking.runs import ArchivedRun, RunArchive, newest_of_each_seed
from ssl_sec.errors import ConfigError, counted
from ssl_sec.figures.sweeps import Panel, SweepPoint, panels_figure
from ssl_sec.losses.config import FTLConfig
from ssl_sec.settings import to_values

_BATCH, _WEIGHT, _KIND, _ENCODER = "global_batch_size", "transform.weight", "transform.name", "encoder."
_METRIC = "retrieval/recall_at_1"
# SFT, Section 4.2: "the ablation study on Cars-196 with the ranked list loss".
_RECIPES = ("cars196_ranked_list_sft_baseline", "cars196_ranked_list_sft")

Settings = Mapping[str, str]


@dataclass(frozen=True)
class _Runs:
    """Runs with the same settings, one of each seed."""

    settings: Settings
    runs: Sequence[ArchivedRun]

    def point(self, key: str, metric: str) -> SweepPoint:
        values = [run.metrics[metric] for run in self.runs]
        return SweepPoint(float(self.settings[key]), statistics.fmean(values), deviation(values), len(values))


def make_sweep_report(archive: RunArchive, number: str, recipes: Sequence[str] | None) -> Report:
    """Makes a report with SFT's Fig. 5 or 6b, from finished runs.

    Args:
        archive: the store with our runs.
        number: "5" (Recall@1 by batch size, and by λ) or "6b" (the mean shift of a rotation, by encoder).
        recipes: recipes of the runs; None for those of the paper's figure.

    Raises:
        ConfigError: there is nothing to compare: fewer than two batch sizes, λ or encoders.
        StorageError: if the store cannot be used.
    """
    recipes = recipes or _RECIPES
    return _draw_sweeps(archive, recipes) if number == "5" else _draw_encoders(archive, recipes)


def _draw_sweeps(archive: RunArchive, recipes: Sequence[str]) -> Report:
    groups, left_out = _alike(archive, recipes, _METRIC, (_BATCH, "transform."))
    by_batch: dict[str, list[SweepPoint]] = {}
    by_weight: dict[str, list[SweepPoint]] = {}
    baselines: dict[str, SweepPoint] = {}
    for group in groups:
        kind, batch = group.settings[_KIND], group.settings[_BATCH]
        by_batch.setdefault(_transform_label(group.settings), []).append(group.point(_BATCH, _METRIC))
        if kind == "none":
            baselines[batch] = group.point(_BATCH, _METRIC)
        else:
            by_weight.setdefault(f"{_others_label(group.settings)}, batch size {batch}", []).append(
                group.point(_WEIGHT, _METRIC)
            )
    by_batch, by_weight = (
        {arm: points for arm, points in found.items() if len(points) > 1} for found in (by_batch, by_weight)
    )
    if not by_batch and not by_weight:
        raise ConfigError(
            f"figure: found one batch size and one λ in the {_count_runs(groups)} of {', '.join(recipes)} that can be "
            "compared; allowed: two or more, as global_batch_size=30 and 60, or transform.weight=0.2 and 0.5"
        )
    shown = {arm.rpartition(" ")[2] for arm in by_weight}
    levels = {f"without transform, batch size {batch}": baselines[batch] for batch in baselines if batch in shown}
    panels = [
        Panel("batch size (images)", "test Recall@1 (%)", by_batch, {}),
        Panel("weight λ of the generated rows", "test Recall@1 (%)", by_weight, levels),
    ]
    title = "sft, Fig. 5: other batch sizes and other weights"
    return _report("sft-figure-5", title, [panel for panel in panels if panel.arms], groups, left_out)


def _draw_encoders(archive: RunArchive, recipes: Sequence[str]) -> Report:
    metric = "retrieval/rotation_shift_mean"
    groups, left_out = _alike(archive, recipes, metric, (_ENCODER, "transform."))
    labels = _encoder_labels([group.settings for group in groups])
    encoders = list(dict.fromkeys(labels))
    if len(encoders) < 2:
        raise ConfigError(
            f"figure: found one encoder in the {_count_runs(groups)} of {', '.join(recipes)} that can be "
            "compared; allowed: two or more, as encoder=resnet18 and resnet50"
        )
    arms: dict[str, list[SweepPoint]] = {}
    for group, label in zip(groups, labels, strict=True):
        place = {"place": str(encoders.index(label))}
        point = _Runs({**group.settings, **place}, group.runs).point("place", metric)
        arms.setdefault(_transform_label(group.settings), []).append(point)
    panel = Panel("encoder", r"mean of $\|A\sigma - \sigma\|_2$ (no unit)", arms, {}, tuple(encoders))
    return _report("sft-figure-6b", "sft, Fig. 6b: shift of the variation by a rotation", [panel], groups, left_out)


def _alike(
    archive: RunArchive, recipes: Sequence[str], metric: str, varied: tuple[str, ...]
) -> tuple[list[_Runs], int]:
    """The runs that have the metric and differ from the newest in varied settings alone, and the number of others."""
    runs = [run for recipe in dict.fromkeys(recipes) for run in archive.finished(recipe)]
    runs = [run for run in runs if run.job == "metric_learning" and metric in run.metrics]
    # HDML and DVML are not transforms of SFT, and have no λ.
    runs = [run for run in runs if run.settings[_KIND] == "none" or _WEIGHT in run.settings]
    if not runs:
        raise ConfigError(
            f"recipes: no finished run of {', '.join(recipes)} has {metric}; allowed: recipes of such runs"
        )
    newest = _common(max(runs, key=lambda run: run.started_ms), varied)
    alike = [run for run in runs if _common(run, varied) == newest]
    groups: dict[frozenset[tuple[str, str]], list[ArchivedRun]] = {}
    for run in alike:
        settings = {key: value for key, value in run.settings.items() if key != "recipe"}
        groups.setdefault(frozenset(settings.items()), []).append(run)
    found = [_Runs(dict(settings), newest_of_each_seed(group)) for settings, group in groups.items()]
    return sorted(found, key=lambda group: sorted(group.settings.items())), len(runs) - len(alike)


def _common(run: ArchivedRun, varied: tuple[str, ...]) -> dict[str, str]:
    return {key: value for key, value in run.settings.items() if key != "recipe" and not key.startswith(varied)}


def _transform_label(settings: Settings) -> str:
    return "without transform" if settings[_KIND] == "none" else f"{_others_label(settings)}, λ = {settings[_WEIGHT]}"


def _others_label(settings: Settings) -> str:
    """The transform without its weight; other settings of it are given if they differ from their defaults."""
    shown = {key: str(usual) for key, usual in to_values(FTLConfig()).items() if key not in ("name", "weight")}
    more = [
        f"{key} {found}" for key, usual in shown.items() if (found := settings.get(f"transform.{key}", usual)) != usual
    ]
    return ", ".join([settings[_KIND].upper().replace("SFTD", "SFT-d"), *more])


def _encoder_labels(settings: Sequence[Settings]) -> list[str]:
    """The encoders by name and width, and by what else differs between those of the same."""
    encoders = [{key: value for key, value in one.items() if key.startswith(_ENCODER)} for one in settings]
    names = [_encoder_name(one) for one in encoders]
    labels: list[str] = []
    for name, one in zip(names, encoders, strict=True):
        same = [other for other, found in zip(encoders, names, strict=True) if found == name]
        keys = sorted(telling(one, same))
        labels.append(", ".join([name, *(f"{key.removeprefix(_ENCODER)} {one.get(key, 'not given')}" for key in keys)]))
    return labels


def _encoder_name(settings: Settings) -> str:
    width = settings.get("encoder.width", "1.0")
    return settings["encoder.name"] + ("" if width == "1.0" else f" x{width}")


def _count_runs(groups: Sequence[_Runs]) -> str:
    return counted(sum(len(group.runs) for group in groups), "run")


def _report(name: str, title: str, panels: Sequence[Panel], groups: Sequence[_Runs], left_out: int) -> Report:
    rows: list[dict[str, Any]] = [
        {
            "x": panel.x_label,
            "arm": arm,
            "at": panel.categories[int(point.x)] if panel.categories else point.x,
            "value": point.mean,
            "std": point.deviation,
            "num_seeds": point.num_seeds,
        }
        for panel in panels
        for arm, points in panel.arms.items()
        for point in sorted(points, key=lambda point: point.x)
    ]
    others = f"; left out: {left_out} with other settings than the newest run" if left_out else ""
    lines = [
        f"  {row['arm']}, {row['x']} {row['at']}: {row['value']:.4g} ({counted(row['num_seeds'], 'seed')})"
        for row in rows
    ]
    text = "\n".join([f"{title}; {_count_runs(groups)}{others}", *lines])
    return Report(name=name, text=text, markdown=None, rows=rows, figure=panels_figure(panels, title))
