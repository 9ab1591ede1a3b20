"""The papers' figures, drawn from our pretraining runs.

An arm is a group of runs with the same settings; each seed counts with its newest finished run.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ssl_sec.edges.config import FIGURES
from ssl_sec.edges.report.files import Report
from ssl_sec.edges.report.table import remove_probe
from ssl_sec.edges.tracking.runs import ArchivedRun, RunArchive, newest_of_each_seed
from ssl_sec.errors import ConfigError
from ssl_sec.figures.training import Curve, compared_curves_figure, norm_distributions, norm_distributions_figure

Arms = Mapping[str, Sequence[ArchivedRun]]


def make_figure_report(paper: str, number: str, archive: RunArchive, recipes: Sequence[str] | None) -> Report:
    """Makes a report with a figure of a paper, drawn from our runs.

    Args:
        paper: the paper's short name.
        number: the figure's number, one of `FIGURES`.
        archive: the store with our runs.
        recipes: the recipes whose runs are shown; None for those of the experiment with the newest run.

    Raises:
        ConfigError: for a recipe without runs.
        StorageError: if the store cannot be used.
    """
    arms = _find_arms(archive, recipes)
    return _DRAW[paper, number](f"{paper}-figure-{number}", f"{paper}, Fig. {number}", archive, arms)


def _find_arms(archive: RunArchive, recipes: Sequence[str] | None) -> Arms:
    """Returns the runs of each arm by its label; arms without a constraint come first."""
    if recipes is None:
        runs = archive.newest_experiment()
    else:
        runs = [run for recipe in dict.fromkeys(recipes) for run in archive.finished_pretraining(recipe)]
    # An encoder that was not trained has neither a curve nor norms: no other arm needs a label that sets it apart.
    runs = [run for run in runs if run.settings.get("epochs") != "0"] or runs
    groups: dict[frozenset[tuple[str, str]], list[ArchivedRun]] = {}
    for run in runs:
        groups.setdefault(frozenset(remove_probe(run.settings).items()), []).append(run)
    labels = _make_labels([dict(settings) for settings in groups])
    arms = {label: newest_of_each_seed(group) for label, group in zip(labels, groups.values(), strict=True)}
    return dict(sorted(arms.items(), key=lambda arm: (arm[1][0].params.get("constraint.name") != "none", arm[0])))


def _make_labels(settings: Sequence[Mapping[str, str]]) -> list[str]:
    """Labels each arm by its recipe if there are several, else by its constraint, and by settings that differ."""
    several = len({one.get("recipe") for one in settings}) > 1
    labels = [
        one.get("recipe", "?") if several else one.get("constraint.name", "?").replace("none", "no constraint")
        for one in settings
    ]
    alike: dict[str, list[int]] = {}
    for place, label in enumerate(labels):
        alike.setdefault(label, []).append(place)
    for places in alike.values():
        group = [settings[place] for place in places]
        keys = sorted({key for one in group for key in one})
        differing = [key for key in keys if len({one.get(key) for one in group}) > 1]
        for place in places:
            values = [f"{key} {settings[place].get(key, 'not given')}" for key in differing]
            labels[place] = ", ".join([labels[place], *values])
    return labels


def _draw_norms(name: str, title: str, archive: RunArchive, arms: Arms) -> Report:
    """Draws the final distribution of the norms, with and without the constraint."""
    loaded = {arm: [archive.last_histogram(run) for run in runs] for arm, runs in arms.items()}
    histograms = {arm: [one for one in found if one is not None] for arm, found in loaded.items()}
    histograms = {arm: found for arm, found in histograms.items() if found}
    if not histograms:
        raise ConfigError(
            f"figure: none of the {_count_runs(arms)} has histograms of the norms (norms.json); allowed: runs of this "
            "version with one step or more"
        )
    edges, shares = norm_distributions(histograms)
    labelled = {_label_with_seeds(arm, len(histograms[arm])): values for arm, values in shares.items()}
    rows = [
        {"arm": arm, "num_seeds": len(histograms[arm]), "low": low, "high": high, "share_percent": share}
        for arm, values in shares.items()
        for low, high, share in zip(edges[:-1], edges[1:], values, strict=True)
    ]
    caption = f"{title}: norms of the embeddings, last batch of training"
    text = f"{caption}; {_list_arms(histograms)}"
    return Report(
        name=name,
        text=text,
        markdown=None,
        rows=rows,
        figure=norm_distributions_figure(edges, labelled, caption),
    )


def _draw_accuracy(name: str, title: str, archive: RunArchive, arms: Arms) -> Report:
    """Draws the held-out accuracy during training."""
    return _draw_curves(name, f"{title}: held-out accuracy in training", archive, arms, {"val/knn_top1": _load_points})


def _draw_norm_statistics(name: str, title: str, archive: RunArchive, arms: Arms) -> Report:
    """Draws the held-out accuracy, and the mean and variance of the norms in a batch."""
    panels = {"val/knn_top1": _load_points, "train/norm_mean": _load_points, "train/norm_variance": _load_norm_variance}
    return _draw_curves(name, f"{title}: accuracy and norms in training", archive, arms, panels)


Points = list[tuple[int, float]]
_DRAW = dict(zip(FIGURES, (_draw_norms, _draw_accuracy, _draw_norms, _draw_norm_statistics), strict=True))


def _load_points(archive: RunArchive, run: ArchivedRun, metric: str) -> Points:
    return archive.history(run, metric) if metric in run.metrics else []


def _load_norm_variance(archive: RunArchive, run: ArchivedRun, metric: str) -> Points:
    return [(step, value**2) for step, value in _load_points(archive, run, "train/norm_std")]


def _draw_curves(
    name: str,
    title: str,
    archive: RunArchive,
    arms: Arms,
    metrics: Mapping[str, Callable[[RunArchive, ArchivedRun, str], Points]],
) -> Report:
    panels: dict[str, dict[str, Curve]] = {}
    rows: list[dict[str, Any]] = []
    shown: dict[str, Sequence[ArchivedRun]] = {}
    for metric, load in metrics.items():
        panels[metric] = {}
        for arm, runs in arms.items():
            histories = [points for run in runs if (points := load(archive, run, metric))]
            if not histories or max(map(len, histories)) < 2:  # an encoder that was not trained has no curve
                continue
            shown[arm] = runs
            curve = _average_curves(histories)
            panels[metric][_label_with_seeds(arm, len(runs))] = curve
            deviations = curve.deviations or [None] * len(curve.steps)
            rows += [
                {"metric": metric, "arm": arm, "num_seeds": len(histories), "step": step, "mean": value, "std": std}
                for step, value, std in zip(curve.steps, curve.values, deviations, strict=True)
            ]
    if not rows:
        raise ConfigError(
            f"figure: none of the {_count_runs(arms)} has two points of {' or '.join(metrics)}; allowed: longer runs"
        )
    text = f"{title}; {_list_arms(shown)}"
    return Report(name=name, text=text, markdown=None, rows=rows, figure=compared_curves_figure(panels, title))


def _average_curves(histories: Sequence[Points]) -> Curve:
    """Computes the mean and the standard deviation over runs at the steps that all of them have."""
    by_step = [dict(points) for points in histories]
    steps = sorted(set.intersection(*(set(points) for points in by_step)))
    values = [[points[step] for points in by_step] for step in steps]
    means = [statistics.fmean(at_step) for at_step in values]
    if len(histories) == 1:
        return Curve(steps, means)
    finite = [all(map(math.isfinite, at_step)) for at_step in values]
    deviations = [statistics.stdev(at_step) if ok else math.nan for at_step, ok in zip(values, finite, strict=True)]
    return Curve(steps, means, deviations)


def _label_with_seeds(arm: str, count: int) -> str:
    return f"{arm} ({count} seed{'s' if count > 1 else ''})"


def _count_runs(arms: Arms) -> str:
    count = sum(map(len, arms.values()))
    return f"{count} run{'s' if count > 1 else ''}"


def _list_arms(arms: Mapping[str, Sequence[Any]]) -> str:
    return ", ".join(_label_with_seeds(arm, len(runs)) for arm, runs in arms.items())
