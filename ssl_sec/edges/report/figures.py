"""The papers' figures, drawn from our runs.

An arm is a group of runs with the same settings; of each seed, the newest finished run counts. All arms are runs of one
job, whose recipe determines the comparisons that can be drawn.
"""

import logging
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ssl_sec.edges.report.files import Report
from ssl_sec.edges.report.measurements import remove_probe
from ssl_sec.edges.tables import deviation
from ssl_sec.edges.tracking.comparing import telling
from ssl_sec.edges.tracking.runs import ArchivedRun, RunArchive, newest_of_each_seed
from ssl_sec.errors import ConfigError, counted
from ssl_sec.figures.comparing import ComparisonFigure
from ssl_sec.figures.training import Curve, compared_curves_figure
from ssl_sec.papers import Paper, PaperFigure
from ssl_sec.recipes.registry import RECIPES, RecipeRow

logger = logging.getLogger("ssl_sec")

# The square of train/norm_std, which MLflow has.
_VARIANCE = "train/norm_variance"

Arms = Mapping[str, Sequence[ArchivedRun]]
Points = list[tuple[int, float]]


class _Panel(NamedTuple):
    """A metric of some arms."""

    metric: str
    arms: Arms


def make_figure_report(
    name: str, figure: PaperFigure, paper: Paper, archive: RunArchive, recipes: Sequence[str] | None
) -> Report:
    """Makes a report with a figure of a paper, drawn from runs of these recipes, or of the newest experiment if None.

    Raises:
        ConfigError: for a recipe without runs, recipes of several jobs, or runs for which the figure cannot be drawn.
        DataError: if runs cannot be compared.
        StorageError: if the store cannot be used.
    """
    runs = _find_runs(archive, recipes)
    row = RECIPES[runs[0].job]
    drawn = {**dict.fromkeys(_CURVES if row.curves else ()), **row.comparisons}
    shown = next((each for each in figure.shows if each in drawn), None)
    if shown is None:
        allowed = [each.number for each in paper.figures if drawn.keys() & set(each.shows)]
        raise ConfigError(
            f"figure: found {figure.number}, which is not drawn from runs of jobs.{row.name}; allowed with them: "
            f"{', '.join(allowed) or 'none'}"
        )
    arms = _find_arms(runs)
    report, title = f"{name}-figure-{figure.number}", f"{name}, Fig. {figure.number}"
    comparison = drawn[shown]
    if comparison is None:
        return _CURVES[shown](report, title, archive, arms, row)
    return _draw_comparison(report, title, archive, arms, comparison)


def _find_runs(archive: RunArchive, recipes: Sequence[str] | None) -> list[ArchivedRun]:
    """Returns the runs that are shown, one or more, all of one job."""
    if recipes is None:
        runs = archive.newest_experiment()
        logger.info(
            "drawing the newest experiment, %s (jobs.%s); recipes=[<names>] draws others", runs[0].recipe, runs[0].job
        )
    else:
        runs = [run for recipe in dict.fromkeys(recipes) for run in archive.finished_trainings(recipe)]
    jobs = sorted({f"jobs.{run.job}" for run in runs})
    if len(jobs) > 1:
        raise ConfigError(f"recipes: found runs of {' and '.join(jobs)}; allowed: recipes of one of them")
    # An untrained encoder has neither a curve nor norms; it is left out, so that no label need differ from its own.
    length = RECIPES[runs[0].job].length
    return [run for run in runs if run.settings.get(length) not in ("0", "0.0")] or runs


def _find_arms(runs: Sequence[ArchivedRun]) -> Arms:
    """Returns the runs of each arm by its label; arms without a constraint come first."""
    groups: dict[frozenset[tuple[str, str]], list[ArchivedRun]] = {}
    for run in runs:
        groups.setdefault(frozenset(remove_probe(run.settings).items()), []).append(run)
    labels = _make_labels([dict(settings) for settings in groups])
    arms = {label: newest_of_each_seed(group) for label, group in zip(labels, groups.values(), strict=True)}
    return dict(sorted(arms.items(), key=lambda arm: (arm[1][0].params.get("constraint.name") != "none", arm[0])))


def _make_labels(settings: Sequence[Mapping[str, str]]) -> list[str]:
    """Labels each arm by its recipe if there are several, else by its constraint, and by settings that differ.

    Arms of one recipe with different constraints also show other settings that differ, such as the learning rate, even
    if no two of them have the same constraint.
    """
    several = len({one.get("recipe") for one in settings}) > 1
    names = [
        one.get("recipe", "?") if several else one.get("constraint.name", "?").replace("none", "no constraint")
        for one in settings
    ]
    labels: list[str] = []
    for name, one in zip(names, settings, strict=True):
        alike = [each for each, other in zip(settings, names, strict=True) if other == name]
        of_recipe = [] if several else [key for key in telling(one, settings) if not key.startswith("constraint.")]
        keys = sorted({*telling(one, alike), *of_recipe})
        labels.append(", ".join([name, *(f"{key} {one.get(key, 'not given')}" for key in keys)]))
    return labels


def _draw_comparison(name: str, title: str, archive: RunArchive, arms: Arms, comparison: ComparisonFigure) -> Report:
    """Draws a comparison from the runs' files; of one run of each arm if runs are not pooled."""
    found: dict[str, list[Any]] = {}
    names: dict[str, str] = {}
    for arm, runs in arms.items():
        read = [(run, one) for run in runs if (one := _read(archive, run, comparison)) is not None]
        if read:
            label = _label_with_seeds(arm, len(read)) if comparison.pools_seeds else f"{arm} (seed {read[0][0].seed})"
            names[label] = arm
            found[label] = [one for _, one in (read if comparison.pools_seeds else read[:1])]
    if not found:
        raise ConfigError(
            f"figure: none of the {_count_runs(arms)} has {comparison.about} ({comparison.artifact}); allowed: runs of "
            "this version with one step or more"
        )
    caption = f"{title}: {comparison.about}"
    data_sets: dict[str, dict[str, list[Any]]] = {}
    for label, read in found.items():
        data_sets.setdefault(arms[names[label]][0].params.get("data.name", "?"), {})[label] = read
    if len(data_sets) > 1 and comparison.draw_panels is not None:
        figure, rows = comparison.draw_panels(data_sets, caption)
    else:
        figure, rows = comparison.draw(found, caption)
    counted = [
        {**row, "arm": names.get(row["arm"], row["arm"]), "num_seeds": len(found.get(row["arm"], [0]))} for row in rows
    ]
    text = f"{caption}; {', '.join(found)}"
    return Report(name=name, text=text, markdown=None, rows=counted, figure=figure)


def _read(archive: RunArchive, run: ArchivedRun, comparison: ComparisonFigure) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        path = archive.download(run, comparison.artifact, Path(folder))
        return None if path is None else comparison.read(path)


def _draw_curve(name: str, title: str, archive: RunArchive, arms: Arms, row: RecipeRow) -> Report:
    """Draws the accuracy during training; for arms with several data sets or losses, a panel for each."""
    metric = _choose_metric(arms, row)
    varied = [key for key in ("data.name", "loss.name") if len({runs[0].params.get(key) for runs in arms.values()}) > 1]
    groups: dict[str, dict[str, Sequence[ArchivedRun]]] = {}
    for arm, runs in arms.items():
        groups.setdefault(", ".join(runs[0].params.get(key, "?") for key in varied) or metric, {})[arm] = runs
    panels = {group: _Panel(metric, shown) for group, shown in groups.items()}
    return _draw_curves(name, f"{title}: accuracy in training", archive, panels, metric if varied else None)


def _draw_norm_statistics(name: str, title: str, archive: RunArchive, arms: Arms, row: RecipeRow) -> Report:
    """Draws the accuracy during training, and the mean and variance of the norms in a batch."""
    panels = {metric: _Panel(metric, arms) for metric in (_choose_metric(arms, row), "train/norm_mean", _VARIANCE)}
    return _draw_curves(name, f"{title}: accuracy and norms in training", archive, panels)


# The figures that are drawn from the metrics in MLflow.
_CURVES = {"curve": _draw_curve, "norm_statistics": _draw_norm_statistics}


def _choose_metric(arms: Arms, row: RecipeRow) -> str:
    """Returns the first of the recipe's curves that most arms have."""
    return max(row.curves, key=lambda metric: sum(any(metric in run.metrics for run in runs) for runs in arms.values()))


def _load_points(archive: RunArchive, run: ArchivedRun, metric: str) -> Points:
    if metric == _VARIANCE:
        return [(step, value**2) for step, value in _load_points(archive, run, "train/norm_std")]
    return archive.history(run, metric) if metric in run.metrics else []


def _draw_curves(
    name: str, title: str, archive: RunArchive, panels: Mapping[str, _Panel], metric: str | None = None
) -> Report:
    """Draws curves; if a metric is given, it is that of all panels."""
    drawn: dict[str, dict[str, Curve]] = {}
    rows: list[dict[str, Any]] = []
    shown: dict[str, Sequence[Points]] = {}
    for key, panel in panels.items():
        drawn[key] = {}
        for arm, runs in panel.arms.items():
            histories = [points for run in runs if (points := _load_points(archive, run, panel.metric))]
            if not histories:
                continue
            curve = _average_curves(histories)
            if len(curve.steps) < 2:  # an encoder that was not trained, or runs without common steps
                continue
            shown[arm] = histories
            drawn[key][_label_with_seeds(arm, len(histories))] = curve
            about = {"metric": panel.metric, "arm": arm, "num_seeds": len(histories)}
            deviations = curve.deviations or [None] * len(curve.steps)
            rows += [
                {**about, "step": step, "mean": value, "std": std}
                for step, value, std in zip(curve.steps, curve.values, deviations, strict=True)
            ]
    if not rows:
        arms = {arm: runs for panel in panels.values() for arm, runs in panel.arms.items()}
        metrics = dict.fromkeys(panel.metric for panel in panels.values())
        raise ConfigError(
            f"figure: none of the {_count_runs(arms)} has two points of {' or '.join(metrics)} at steps that all runs "
            "of its arm have; allowed: longer runs"
        )
    arms = ", ".join(_label_with_seeds(arm, len(runs)) for arm, runs in shown.items())
    text = f"{title}; {arms}"
    figure = compared_curves_figure(drawn, title, metric)
    return Report(name=name, text=text, markdown=None, rows=rows, figure=figure)


def _average_curves(histories: Sequence[Points]) -> Curve:
    """Computes the mean and the standard deviation over runs at the steps that all of them have."""
    by_step = [dict(points) for points in histories]
    steps = sorted(set.intersection(*(set(points) for points in by_step)))
    values = [[points[step] for points in by_step] for step in steps]
    means = [statistics.fmean(at_step) for at_step in values]
    deviations = [spread for at_step in values if (spread := deviation(at_step)) is not None]
    return Curve(steps, means, deviations or None)


def _label_with_seeds(arm: str, count: int) -> str:
    return f"{arm} ({counted(count, 'seed')})"


def _count_runs(arms: Arms) -> str:
    return counted(sum(map(len, arms.values())), "run")
