"""The papers' figures that pretraining runs can draw.

An arm is all runs of the same settings, each seed by its newest finished run.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ssl_sec.edges.report.files import Report
from ssl_sec.edges.tracking.runs import ArchivedRun, RunArchive, newest_of_each_seed
from ssl_sec.errors import ConfigError
from ssl_sec.figures.training import Curve, compared_curves_figure, norm_distributions, norm_distributions_figure

Arms = Mapping[str, Sequence[ArchivedRun]]


def figure_report(paper: str, number: str, archive: Callable[[], RunArchive], recipes: Sequence[str] | None) -> Report:
    """A figure of a paper, drawn from our runs.

    Args:
        paper: its short name.
        number: of the figure.
        archive: opens the store of our runs.
        recipes: whose runs are shown; None for those of the experiment with the newest run.

    Raises:
        ConfigError: for a figure that we cannot draw, or a recipe without runs.
        StorageError: if the store cannot be used.
    """
    if (paper, number) not in _FIGURES:
        allowed = ", ".join(f"paper={name} figure={one}" for name, one in _FIGURES)
        raise ConfigError(f"figure: found paper={paper} figure={number}; allowed: {allowed}")
    runs = archive()
    return _FIGURES[paper, number](f"{paper}-figure-{number}", f"{paper}, Fig. {number}", runs, _arms(runs, recipes))


def _arms(archive: RunArchive, recipes: Sequence[str] | None) -> Arms:
    """The runs of each arm by its label; those without a constraint come first."""
    if recipes is None:
        runs = archive.newest_experiment()
    else:
        runs = [run for recipe in dict.fromkeys(recipes) for run in archive.finished_pretraining(recipe)]
    groups: dict[frozenset[tuple[str, str]], list[ArchivedRun]] = {}
    for run in runs:
        groups.setdefault(frozenset(_settings(run).items()), []).append(run)
    labels = _labels([dict(settings) for settings in groups])
    arms = {label: newest_of_each_seed(group) for label, group in zip(labels, groups.values(), strict=True)}
    return dict(sorted(arms.items(), key=lambda arm: (_constraint(arm[1][0]) != "none", arm[0])))


def _settings(run: ArchivedRun) -> dict[str, str]:
    return {key: value for key, value in run.settings.items() if not key.startswith("probe.")}


def _constraint(run: ArchivedRun) -> str:
    return run.params.get("constraint.name", "?")


def _labels(settings: Sequence[Mapping[str, str]]) -> list[str]:
    """What each arm is called: its recipe if there are several, its constraint, and what else tells it apart."""
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
            told = [f"{key} {settings[place].get(key, 'not told')}" for key in differing]
            labels[place] = ", ".join([labels[place], *told])
    return labels


def _norms(name: str, title: str, archive: RunArchive, arms: Arms) -> Report:
    """How the norms are distributed at the end, with and without the constraint."""
    kept = {arm: [archive.last_histogram(run) for run in runs] for arm, runs in arms.items()}
    histograms = {arm: [one for one in found if one is not None] for arm, found in kept.items()}
    histograms = {arm: found for arm, found in histograms.items() if found}
    if not histograms:
        raise ConfigError(
            f"figure: none of the {_count(arms)} chosen kept histograms of the norms (norms.json); allowed: runs of "
            "one step or more, from this version on"
        )
    edges, shares = norm_distributions(histograms)
    labelled = {_with_seeds(arm, len(histograms[arm])): values for arm, values in shares.items()}
    rows = [
        {"arm": arm, "num_seeds": len(histograms[arm]), "low": low, "high": high, "share_percent": share}
        for arm, values in shares.items()
        for low, high, share in zip(edges[:-1], edges[1:], values, strict=True)
    ]
    what = "norms of the embeddings, last batch of training"
    text = f"{title}: {what}; {_told(histograms)}"
    return Report(
        name=name,
        text=text,
        markdown=None,
        rows=rows,
        figure=norm_distributions_figure(edges, labelled, f"{title}: {what}"),
    )


def _accuracy(name: str, title: str, archive: RunArchive, arms: Arms) -> Report:
    """Held-out accuracy while training goes on."""
    return _curves(name, f"{title}: held-out accuracy in training", archive, arms, {"val/knn_top1": _as_it_is})


def _norm_statistics(name: str, title: str, archive: RunArchive, arms: Arms) -> Report:
    """Accuracy, and mean and variance of the norms in a batch."""
    panels = {"val/knn_top1": _as_it_is, "train/norm_mean": _as_it_is, "train/norm_variance": _norm_variance}
    return _curves(name, f"{title}: accuracy and norms in training", archive, arms, panels)


Points = list[tuple[int, float]]
_FIGURES: Mapping[tuple[str, str], Callable[[str, str, RunArchive, Arms], Report]] = {
    ("sec", "1"): _norms,
    ("sec", "4"): _accuracy,
    ("sec", "5a"): _norms,
    ("sec", "6"): _norm_statistics,
}


def _as_it_is(archive: RunArchive, run: ArchivedRun, metric: str) -> Points:
    return archive.history(run, metric) if metric in run.metrics else []


def _norm_variance(archive: RunArchive, run: ArchivedRun, metric: str) -> Points:
    return [(step, value**2) for step, value in _as_it_is(archive, run, "train/norm_std")]


def _curves(
    name: str,
    title: str,
    archive: RunArchive,
    arms: Arms,
    metrics: Mapping[str, Callable[[RunArchive, ArchivedRun, str], Points]],
) -> Report:
    panels: dict[str, dict[str, Curve]] = {}
    rows: list[dict[str, Any]] = []
    shown: dict[str, Sequence[ArchivedRun]] = {}
    for metric, points_of in metrics.items():
        panels[metric] = {}
        for arm, runs in arms.items():
            histories = [points for run in runs if (points := points_of(archive, run, metric))]
            if not histories or max(map(len, histories)) < 2:  # an encoder that was not trained has no curve
                continue
            shown[arm] = runs
            curve = _mean_curve(histories)
            panels[metric][_with_seeds(arm, len(runs))] = curve
            deviations = curve.deviations or [None] * len(curve.steps)
            rows += [
                {"metric": metric, "arm": arm, "num_seeds": len(histories), "step": step, "mean": value, "std": std}
                for step, value, std in zip(curve.steps, curve.values, deviations, strict=True)
            ]
    if not rows:
        raise ConfigError(
            f"figure: none of the {_count(arms)} chosen has two points of {' or '.join(metrics)}; allowed: longer runs"
        )
    text = f"{title}; {_told(shown)}"
    return Report(name=name, text=text, markdown=None, rows=rows, figure=compared_curves_figure(panels, title))


def _mean_curve(histories: Sequence[Points]) -> Curve:
    """The mean over runs at the steps that all of them have."""
    by_step = [dict(points) for points in histories]
    steps = sorted(set.intersection(*(set(points) for points in by_step)))
    values = [[points[step] for points in by_step] for step in steps]
    means = [statistics.fmean(at_step) for at_step in values]
    if len(histories) == 1:
        return Curve(steps, means)
    finite = [all(map(math.isfinite, at_step)) for at_step in values]
    deviations = [statistics.stdev(at_step) if ok else math.nan for at_step, ok in zip(values, finite, strict=True)]
    return Curve(steps, means, deviations)


def _with_seeds(arm: str, count: int) -> str:
    return f"{arm} ({count} seed{'s' if count > 1 else ''})"


def _count(arms: Arms) -> str:
    count = sum(map(len, arms.values()))
    return f"{count} run{'s' if count > 1 else ''}"


def _told(arms: Mapping[str, Sequence[Any]]) -> str:
    return ", ".join(_with_seeds(arm, len(runs)) for arm, runs in arms.items())
