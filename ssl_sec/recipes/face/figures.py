"""Figures of a run of face recognition: ROCs, scores, and the worst pairs of its test sets.

A score is the cosine of a pair of images, templates or videos.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, UInt8
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure, SubFigure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from torch import Tensor

from ssl_sec.data.bands import as_picture
from ssl_sec.errors import DataError, counted
from ssl_sec.evaluation.directions import PairCosines, pair_cosines
from ssl_sec.evaluation.faces.quality import quality_auc, refused_after_discards
from ssl_sec.evaluation.faces.roc import equal_error_rate, tar_at_far
from ssl_sec.evaluation.faces.verification import best_threshold
from ssl_sec.figures import NUMBERS
from ssl_sec.figures.comparing import ComparisonFigure, Drawn, from_plain, numbers_of
from ssl_sec.figures.directions import draw_cosines
from ssl_sec.figures.drawing import add_grid, add_legend, arm_look, draw_distribution, message, small_plots
from ssl_sec.figures.plane import plane_figure
from ssl_sec.figures.runs import RunRecord, training_figures
from ssl_sec.figures.training import norm_distributions, norm_distributions_figure
from ssl_sec.training.norms import norm_histogram


class Verification(NamedTuple):
    """The scores of a test set's pairs.

    Attributes:
        scores: score of each pair, in [-1, 1], or NaN.
        same: whether each pair is of one person; there are pairs of both kinds.
    """

    scores: Float[Tensor, " pairs"]
    same: Bool[Tensor, " pairs"]


class Discards(NamedTuple):
    """The genuine pairs of a test set, at one threshold.

    Attributes:
        quality: the lesser norm of each pair.
        refused: whether it is refused.
        far: false accept rate at the threshold, in (0, 1).
    """

    quality: Float[Tensor, " genuine"]
    refused: Bool[Tensor, " genuine"]
    far: float


class HardPairs(NamedTuple):
    """Some pairs of images, the hardest first.

    Attributes:
        first: the first image of each, grey or RGB, 0-255.
        second: the second image of each, likewise.
        scores: score of each pair.
    """

    first: UInt8[Tensor, "pairs channels height width"]
    second: UInt8[Tensor, "pairs channels height width"]
    scores: Float[Tensor, " pairs"]


def draw(run: RunRecord) -> dict[str, Figure]:
    """Draws curves and norms, and of the test sets of pairs ROCs, scores, norms and the hardest pairs.

    Embeddings of two dimensions are drawn on their plane, and histograms of pairs of videos as rows of a picture.
    """
    figures = training_figures(run)
    if run.features_path.exists():
        plane = torch.load(run.features_path, weights_only=True)
        points = plane["embeddings"], plane["labels"]
        figures["plane"] = plane_figure(*points, run.data().class_names, plane.get("probabilities"))
    kept = {path.stem: torch.load(path, weights_only=True) for path in run.test_set_paths()}
    if kept:
        discarded = {
            title: Discards(one["quality"], one["refused"], float(one["far"]))
            for title, one in kept.items()
            if "quality" in one
        }
        verified = {title: Verification(one["scores"], one["same"]) for title, one in kept.items()}
        figures["roc"] = roc_figure(verified, "Test sets: ROC")
        figures["scores"] = scores_figure(verified, "Test sets: cosines of pairs")
        if discarded:
            figures["discards"] = discards_figure(discarded, "Test sets: refusals after short embeddings are discarded")
        figures["test_set_norms"] = _test_set_norms_figure({title: one["norms"] for title, one in kept.items()})
    for title, one in kept.items():
        if "same_first" in one:
            different, same = (
                HardPairs(*(one[f"{kind}_{part}"] for part in ("first", "second", "scores")))
                for kind in ("different", "same")
            )
            figures[f"hardest_{title}"] = hardest_pairs_figure(different, same, f"{title}: the hardest pairs")
        if "same_histograms" in one:
            histograms = one["different_histograms"], one["same_histograms"]
            figures[f"histograms_{title}"] = histograms_figure(*histograms, f"{title}: cosines of two videos' frames")
    return figures


def roc_figure(test_sets: Mapping[str, Verification], title: str) -> Figure:
    """True accept rate over false accept rate, from the rate of a single impostor of a test set.

    Args:
        test_sets: one or more test sets, by title.
        title: title of the figure.
    """
    figure = Figure(figsize=(7, 4.6), layout="constrained")
    axes = figure.subplots()
    lowest = 100.0
    for place, (name, (scores, same)) in enumerate(test_sets.items()):
        num_impostors = int((~same).sum())
        accepted = np.unique(np.geomspace(1, num_impostors, 500).round())
        # Half an impostor more, as the quotient may round to a little less.
        rates = tar_at_far(scores, same, [min((count + 0.5) / num_impostors, 1.0) for count in accepted.tolist()])
        true = 100 * np.array(list(rates.values()))
        colour, style = arm_look(place)
        label = f"{name}: EER {100 * equal_error_rate(scores, same):.2f} %"
        look = {"color": colour, "linestyle": style, "linewidth": 1.5, "drawstyle": "steps-post"}
        axes.plot(accepted / num_impostors, true, label=label, **look)
        lowest = min(lowest, float(true[0]))
    axes.set(xlabel="false accept rate (share of the impostors)", ylabel="true accept rate (%)", title=title)
    axes.set(xscale="log", xlim=(None, 1), ylim=(max(lowest - 0.05 * (100 - lowest) - 0.5, 0), 100.5))
    add_legend(figure, [axes])
    add_grid(axes)
    return figure


def discards_figure(test_sets: Mapping[str, Discards], title: str) -> Figure:
    """Genuine pairs that are refused, after those of the lowest quality were discarded, up to half of them.

    Args:
        test_sets: one or more test sets of pairs, by title.
        title: title of the figure.
    """
    figure = Figure(figsize=(7, 4.6), layout="constrained")
    axes = figure.subplots()
    for place, (name, (quality, refused, far)) in enumerate(test_sets.items()):
        rates = refused_after_discards(quality, refused)[: len(refused) // 2 + 1]
        auc = quality_auc(quality, refused)
        colour, style = arm_look(place)
        tells = "" if auc is None else f", AUC {100 * auc:.1f} %"
        label = f"{name}, FAR {100 * far:g} %{tells}"
        shares = 100 * np.arange(len(rates)) / len(refused)
        axes.plot(shares, 100 * rates.numpy(), color=colour, linestyle=style, linewidth=1.5, label=label)
        axes.axhline(100 * float(rates[0]), color=colour, linewidth=0.7, alpha=0.5)
    axes.plot([], [], color="gray", linewidth=0.7, label="nothing discarded")
    axes.set(xlabel="discarded pairs of one person, those with the shortest embedding first (%)", title=title)
    axes.set(ylabel="refused pairs of the others (%)", xlim=(0, 50))
    axes.set_ylim(0, max(axes.get_ylim()[1], 0.1))  # if none is refused, too
    add_legend(figure, [axes])
    add_grid(axes)
    return figure


def scores_figure(test_sets: Mapping[str, Verification], title: str, num_bins: int = 100) -> Figure:
    """Scores of pairs of one person and of two, with the most accurate threshold; one panel for each test set.

    Args:
        test_sets: one or more test sets, by title.
        title: title of the figure.
        num_bins: number of equal bins between the lowest and the highest of all scores.
    """
    figure, all_axes = small_plots(len(test_sets), (4.6, 3.4), least_width=6.5, margin=0.4)
    figure.suptitle(title)
    held = torch.cat([scores[scores.isfinite()] for scores, _ in test_sets.values()])
    low, high = (float(held.min()), float(held.max())) if len(held) else (-1.0, 1.0)
    # Scores that are all the same still need bins with a width.
    edges = np.linspace(low, max(high, low + 1e-3), num_bins + 1)
    for axes, (name, (scores, same)) in zip(all_axes, test_sets.items(), strict=True):
        is_finite = scores.isfinite()
        scores, same = scores[is_finite].double(), same[is_finite]
        for place, (kind, chosen) in enumerate((("two people", scores[~same]), ("one person", scores[same]))):
            counts, _ = np.histogram(chosen.numpy(), edges)
            spread = f": {chosen.mean().item():z.2f} ± {chosen.std(correction=0):.2f}" if len(chosen) else ": none"
            draw_distribution(axes, (100 * counts / max(len(chosen), 1)).tolist(), edges.tolist(), place, kind + spread)
        threshold = best_threshold(scores, same)
        share = ((scores > threshold) == same).double().mean() if len(same) else torch.tensor(0.0)
        # It lies beyond the scores if one class for all pairs is the most accurate.
        place = min(max(threshold, low), high)
        label = f"threshold {place:z.2f}: {100 * share:.2f} % right"
        axes.axvline(place, ymax=0.74, color="0.3", linewidth=1, label=label)
        axes.set(xlabel="cosine of the pair (no unit)", ylabel="share of pairs in a bin (%)", title=name)
        # Leaves room for the legend above.
        axes.set(xlim=(edges[0] - 0.02, edges[-1] + 0.02), ylim=(0, axes.get_ylim()[1] * 1.35))
        axes.legend(loc="upper left", frameon=False, fontsize=8)
        add_grid(axes)
    return figure


def hardest_pairs_figure(different: HardPairs, same: HardPairs, title: str) -> Figure:
    """The most similar pairs of two people and the least similar pairs of one, one image above the other.

    Args:
        different: pairs of two people.
        same: pairs of one person.
        title: title of the figure.
    """
    columns = max(len(different.scores), len(same.scores))
    height, width = different.first.shape[2:]
    cell_inches = 1.2
    size = (max(cell_inches * columns, 4.0), 4 * cell_inches * height / width + 1.2)
    figure = Figure(figsize=size, layout=ConstrainedLayoutEngine(h_pad=0.02, hspace=0))
    figure.suptitle(title)
    above, below = figure.subfigures(2, 1, squeeze=False)[:, 0]
    _show_pairs(above, different, columns, "two people, most similar")
    _show_pairs(below, same, columns, "one person, least similar")
    return figure


def histograms_figure(
    different: Float[Tensor, "different bins"], same: Float[Tensor, "same bins"], title: str
) -> Figure:
    """Histograms of the cosines of two videos' frames, one row for each pair (NormFace, Fig. 9b).

    Args:
        different: for each pair of two people, the share of the cosines in each of equal bins from -1 to 1; NaN leaves
            a row blank.
        same: likewise for pairs of one person.
        title: title of the figure.
    """
    figure = Figure(figsize=(9.5, 4.6), layout="constrained")
    figure.suptitle(title)
    percentages = [100 * histograms.double().numpy() for histograms in (different, same)]
    highest = max((np.nanmax(each) for each in percentages if np.isfinite(each).any()), default=1.0)
    all_axes = figure.subplots(1, 2)
    # The square root shows wide histograms beside narrow ones.
    norm = PowerNorm(0.5, vmin=0, vmax=highest)
    for axes, shown, kind in zip(all_axes, percentages, ("two people", "one person"), strict=True):
        look = {"aspect": "auto", "interpolation": "nearest", "cmap": "viridis", "norm": norm}
        axes.imshow(np.ma.masked_invalid(shown), extent=(-1, 1, len(shown), 0), **look)
        axes.set(
            xlabel="cosine of two frames (no unit)",
            ylabel="pair of videos",
            title=f"{counted(len(shown), 'pair')} of {kind}",
            xticks=np.linspace(-1, 1, 5),
        )
    figure.colorbar(all_axes[0].images[0], ax=all_axes, label="share of the frames' pairs in a bin (%)")
    return figure


def _show_pairs(figure: SubFigure, pairs: HardPairs, columns: int, title: str) -> None:
    figure.suptitle(f"{title} (cosine)", fontsize=10)
    grid = figure.subplots(2, columns, squeeze=False)
    for axes in grid.flatten():
        axes.set_axis_off()
    for column, score in enumerate(pairs.scores.tolist()):
        grid[0, column].set_title(f"{score:.2f}", fontsize=9)
        for axes, images in zip(grid[:, column], (pairs.first, pairs.second), strict=True):
            axes.imshow(as_picture(images[column]).permute(1, 2, 0).numpy(), cmap="gray", vmin=0, vmax=255)


def _test_set_norms_figure(norms: Mapping[str, torch.Tensor]) -> Figure:
    histograms = {
        f"{title}: {values.mean():#.3g} ± {values.std(correction=0):#.2g}": [norm_histogram(values, step=0)]
        for title, values in norms.items()
        if values.isfinite().all()
    }
    if not histograms:
        return message("no test set has finite embeddings")
    return norm_distributions_figure(*norm_distributions(histograms), "Test sets: norms of the embeddings")


def measure(run: RunRecord) -> dict[str, Any]:
    """The cosines of the pairs of each test set of pairs, by its title, as plain values."""
    cosines: dict[str, Any] = {}
    for path in run.test_set_paths():
        kept = torch.load(path, weights_only=True)
        is_finite = kept["scores"].isfinite()
        scores, same = kept["scores"][is_finite], kept["same"][is_finite]
        cosines[path.stem] = asdict(pair_cosines(scores[same], scores[~same]))
    return {"cosines": cosines}


def _draw_test_sets(arms: Mapping[str, Sequence[Mapping[str, PairCosines]]], title: str) -> Drawn:
    """Draws the cosines on each test set that all arms have."""
    everywhere = set[str].intersection(*(set(one) for runs in arms.values() for one in runs))
    if not everywhere:
        raise DataError(f"{', '.join(arms)} have no test set of pairs in common, on which their cosines are compared")
    several = len(everywhere) > 1
    shown = {
        (f"{arm}, {name}" if several else arm): [one[name] for one in runs]
        for name in sorted(everywhere)
        for arm, runs in arms.items()
    }
    return draw_cosines(shown, title if several else f"{title}, {next(iter(everywhere))}")


# Keyed by the names that the figures of `ssl_sec.papers` use.
COMPARISONS: Mapping[str, ComparisonFigure] = {
    "cosines": ComparisonFigure(
        about="cosines of the test sets' pairs",
        artifact=NUMBERS,
        read=numbers_of(
            "cosines", lambda test_sets: {name: from_plain(PairCosines, one) for name, one in test_sets.items()}
        ),
        draw=_draw_test_sets,
    ),
}
