"""NormFace's figures: one of a formula, and one of finished runs of face recognition."""

import statistics
from collections.abc import Callable, Sequence

from ssl_sec.edges.report.files import Report
from ssl_sec.edges.tracking.comparing import telling
from ssl_sec.edges.tracking.runs import ArchivedRun, RunArchive, newest_of_each_seed
from ssl_sec.errors import ConfigError, counted
from ssl_sec.figures.normface import AtWeight, bounds_figure, weights_figure
from ssl_sec.losses import normalized_softmax_lower_bound
from ssl_sec.recipes.registry import FACE

# The paper does not say which numbers it shows; 10,575 is that of CASIA-WebFace.
_NUMBERS_OF_CLASSES = (10, 100, 1000, 10_575, 100_000)
_LARGEST_SQUARED_NORM = 30
_METRIC = "face/lfw_accuracy"
_WEIGHT = "loss.weight"
# The recipes that Fig. 8 compares, and runs without a second loss.
_RECIPES = (
    "casia_normface_c_contrastive_wen",
    "casia_normface_center_wen",
    "casia_softmax_center_wen",
    "casia_normface_wen",
)


def make_normface_figure(number: str, open_archive: Callable[[], RunArchive], recipes: Sequence[str] | None) -> Report:
    """Makes a report with a figure of NormFace.

    Args:
        number: the figure's number.
        open_archive: opens the store with our runs, for a figure that shows runs.
        recipes: the recipes whose runs are shown; None for those of the paper.

    Raises:
        ConfigError: no finished run has the data of the figure.
        StorageError: the store cannot be used.
    """
    name, title = f"normface-figure-{number}", f"normface, Fig. {number}"
    if number == "5":
        return _draw_bounds(name, title)
    return _draw_weights(name, title, open_archive(), recipes)


def _draw_bounds(name: str, title: str) -> Report:
    """The bound of Proposition 2 over the squared norm; it needs no run."""
    squared_norms = [place / 4 for place in range(4 * _LARGEST_SQUARED_NORM + 1)]
    bounds = {
        count: [normalized_softmax_lower_bound(count, norm) for norm in squared_norms] for count in _NUMBERS_OF_CLASSES
    }
    rows = [
        {"num_classes": count, "squared_norm": norm, "bound": bound}
        for count, values in bounds.items()
        for norm, bound in zip(squared_norms, values, strict=True)
    ]
    caption = f"{title}: lower bound of the softmax loss after normalisation"
    text = f"{caption}, for {', '.join(f'{count:,}' for count in bounds)} classes"
    figure = bounds_figure(squared_norms, bounds, caption)
    return Report(name=name, text=text, markdown=None, rows=rows, figure=figure)


def _draw_weights(name: str, title: str, archive: RunArchive, recipes: Sequence[str] | None) -> Report:
    """The accuracy on LFW of runs that differ only in the weight of their second loss."""
    chosen = recipes or _RECIPES
    runs = [run for recipe in dict.fromkeys(chosen) for run in archive.finished(recipe) if run.job == FACE.name]
    runs = [run for run in runs if _METRIC in run.metrics]
    if not runs:
        raise ConfigError(
            f"recipes: found {', '.join(chosen)}, of which no run of face recognition has finished with {_METRIC}; "
            "needed: runs with a test set titled lfw"
        )
    groups: dict[frozenset[tuple[str, str]], dict[float | None, list[ArchivedRun]]] = {}
    for run in runs:
        settings = frozenset((key, value) for key, value in run.settings.items() if key != _WEIGHT)
        weight = float(run.settings[_WEIGHT]) if _WEIGHT in run.settings else None
        groups.setdefault(settings, {}).setdefault(weight, []).append(run)
    if max(len(by_weight) for by_weight in groups.values()) < 2:
        raise ConfigError(
            f"figure: none of the runs of {', '.join(chosen)} differ only in {_WEIGHT}; needed: two weights of one "
            f"loss or more, as by loss=combined {_WEIGHT}=0.001,0.01,0.1"
        )
    groups = dict(sorted(groups.items(), key=lambda group: None in group[1]))
    seeds = [
        {weight: newest_of_each_seed(found) for weight, found in sorted(by_weight.items(), key=lambda one: one[0] or 0)}
        for by_weight in groups.values()
    ]
    has_seeds = all(len(found) > 1 for by_weight in seeds for found in by_weight.values())
    spread = "seeds" if has_seeds else "folds"
    arms = {
        label: [_summarise(weight, found, has_seeds) for weight, found in by_weight.items()]
        for label, by_weight in zip(_make_labels([dict(settings) for settings in groups]), seeds, strict=True)
    }
    rows = [
        {
            "arm": label,
            "weight": point.weight,
            "mean": point.mean,
            "std": point.deviation,
            "std_over": spread,
            "num_seeds": len(found),
        }
        for (label, points), by_weight in zip(arms.items(), seeds, strict=True)
        for point, found in zip(points, by_weight.values(), strict=True)
    ]
    caption = f"{title}: accuracy on LFW by the weight of the second loss"
    text = f"{caption}; {', '.join(f'{label} ({_count_weights(points)})' for label, points in arms.items())}"
    return Report(name=name, text=text, markdown=None, rows=rows, figure=weights_figure(arms, spread, caption))


def _summarise(weight: float | None, runs: Sequence[ArchivedRun], has_seeds: bool) -> AtWeight:
    """The mean over seeds, and the deviation over them, or over the folds where a weight has one seed only."""
    values = [run.metrics[_METRIC] for run in runs]
    deviation = (
        statistics.stdev(values) if has_seeds else statistics.fmean(run.metrics[f"{_METRIC}_std"] for run in runs)
    )
    return AtWeight(weight, statistics.fmean(values), deviation)


def _make_labels(settings: Sequence[dict[str, str]]) -> list[str]:
    """Labels each arm by its losses, and by other settings that differ for one recipe or for the same losses."""
    losses = [
        " + ".join(one[key] for key in ("loss.first.name", "loss.second.name") if key in one) or one["loss.name"]
        for one in settings
    ]
    labels: list[str] = []
    for loss, one in zip(losses, settings, strict=True):
        same_recipe = [other for other in settings if other.get("recipe") == one.get("recipe")]
        same_losses = [other for name, other in zip(losses, settings, strict=True) if name == loss]
        keys = {key for key in telling(one, same_recipe) if not key.startswith("loss.")}
        keys |= set(telling(one, same_losses)) - {"recipe"}
        labels.append(", ".join([loss, *(f"{key} {one.get(key, 'not given')}" for key in sorted(keys))]))
    return labels


def _count_weights(points: Sequence[AtWeight]) -> str:
    count = sum(point.weight is not None for point in points)
    return counted(count, "weight") if count else "no second loss"
