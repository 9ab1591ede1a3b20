import dataclasses

import numpy as np
import pytest
import torch
from matplotlib.colors import to_hex

from ssl_sec.evaluation.directions import (
    CosineDistributions,
    DirectionChanges,
    Distribution,
    PairCosines,
    cosine_distributions,
    direction_changes,
)
from ssl_sec.figures.directions import (
    cosine_difference_figure,
    cosine_distributions_figure,
    direction_changes_figure,
    draw_cosine_differences,
    draw_cosines,
    draw_direction_changes,
)
from tests.evaluation.test_directions import LABELS
from tests.figures.test_training import draw, texts


def legend_of(axes) -> list[str]:
    return [text.get_text() for text in axes.get_legend().get_texts()]


@pytest.mark.parametrize(
    ("labels", "num_positives", "num_negatives"),
    [([], 0, 0), ([5], 0, 0), ([5, 5, 5], 3, 0), ([0, 1, 2], 0, 3), ([0, 0, 8], 1, 2)],
)
def test_classes_that_form_no_pair_or_no_triplet(labels, num_positives, num_negatives):
    labels = torch.tensor(labels, dtype=torch.int64)
    found = cosine_distributions(draw(len(labels), 4), labels, seed=0)
    assert (sum(found.positives.counts), sum(found.negatives.counts)) == (num_positives, num_negatives)
    assert (found.violations is None) == (num_positives * num_negatives == 0)
    legend = legend_of(cosine_distributions_figure({"run": found}, "").axes[0])
    assert (legend[1] == "positive pairs: none") == (num_positives == 0)
    assert (legend[0] == "negative pairs: none") == (num_negatives == 0)
    figure = cosine_difference_figure({"run": found}, "")
    assert ("no triplet" in legend_of(figure.axes[0])[0]) == (found.violations is None)
    figure.draw_without_rendering()


@pytest.mark.parametrize(("held", "shown"), [([4], (3, 6)), ([0, 2, 3, 7], (0, 9)), ([9], (8, 10)), ([], (0, 10))])
def test_an_axis_of_cosines_ends_one_bin_beyond_the_occupied_ones(held, shown):
    edges = np.linspace(-1, 1, 11).tolist()
    counts = [int(place in held) for place in range(10)]
    found = Distribution(edges, counts, 0.0, 0.1)
    (axes,) = cosine_distributions_figure({"run": PairCosines(found, found)}, "").axes
    assert axes.get_xlim() == pytest.approx([edges[place] for place in shown])


def test_a_mean_just_below_0_has_no_sign():
    cosines = PairCosines(*(Distribution([-1.0, 1.0], [2], mean, 0.04) for mean in (-0.001, -0.2)))
    legend = legend_of(cosine_distributions_figure({"run": cosines}, "").axes[0])
    assert legend == ["negative pairs: -0.20 ± 0.20", "positive pairs: 0.00 ± 0.20"]


def test_collapsed_embeddings_violate_every_triplet():
    found = cosine_distributions(torch.full((3000, 7), 0.3), torch.arange(3000) % 3, seed=0, max_pairs=5000)
    assert found.violations == 1
    assert found.positives.counts[-1] == found.negatives.counts[-1] == 5000
    assert found.positives.mean == pytest.approx(1, abs=1e-6)
    (axes,) = cosine_distributions_figure({"run": found}, "").axes
    for kind in ("positive", "negative"):
        assert shares_shown(axes, kind)[-1] == pytest.approx(100)
    (axes,) = cosine_difference_figure({"run": found}, "").axes
    assert shares_shown(axes, "run").max() == pytest.approx(100)


def shares_shown(axes, label: str) -> np.ndarray:
    """The outline of an arm in percent."""
    (outline,) = [patch for patch in axes.patches if patch.get_label().startswith(label)]
    return outline.get_data().values


def shown_colour(axes, label: str) -> str:
    (outline,) = [patch for patch in axes.patches if patch.get_label().startswith(label)]
    return to_hex(outline.get_edgecolor()).upper()


def two_arms() -> dict[str, CosineDistributions]:
    centres = draw(3, 4, seed=1)[LABELS // 4]
    return {
        name: cosine_distributions(centres + spread * draw(8, 4), LABELS, seed=0)
        for name, spread in (("no constraint", 1.0), ("SEC", 0.3))
    }


def test_the_cosines_of_each_arm_have_a_panel_over_common_axes():
    arms = two_arms()
    figure = cosine_distributions_figure(arms, "triplet")
    assert figure.get_suptitle() == "triplet"
    assert [axes.get_title() for axes in figure.axes] == ["no constraint", "SEC"]
    for axes, cosines in zip(figure.axes, arms.values(), strict=True):
        assert axes.get_xlabel() == "cosine of the pair (no unit)"
        positives = np.array(cosines.positives.counts)
        assert shares_shown(axes, "positive") == pytest.approx(100 * positives / positives.sum())
        assert shares_shown(axes, "negative").sum() == pytest.approx(100)
        assert (shown_colour(axes, "negative"), shown_colour(axes, "positive")) == ("#D55E00", "#0072B2")
        deviation = cosines.positives.variance**0.5
        assert legend_of(axes)[1] == f"positive pairs: {cosines.positives.mean:.2f} ± {deviation:.2f}"
    assert figure.axes[0].get_ylabel() == "share of pairs in a bin (%)"
    assert figure.axes[0].get_xlim() == figure.axes[1].get_xlim()
    low, high = figure.axes[0].get_xlim()
    counts = np.sum([np.add(one.positives.counts, one.negatives.counts) for one in arms.values()], axis=0)
    held = np.flatnonzero(counts)
    edges = arms["SEC"].positives.edges
    assert low <= edges[held[0]] and high >= edges[held[-1] + 1]


def test_the_differences_of_arms_are_compared_in_one_panel():
    arms = two_arms()
    (axes,) = cosine_difference_figure(arms, "triplet").axes
    assert legend_of(axes) == [f"{arm}: {100 * one.violations:.1f} % not above 0" for arm, one in arms.items()]
    for arm, one in arms.items():
        counts = np.array(one.differences.counts)
        assert shares_shown(axes, arm) == pytest.approx(100 * counts / counts.sum())
    assert (axes.get_ylabel(), axes.get_title()) == ("share of triplets in a bin (%)", "triplet")
    assert shown_colour(axes, "SEC") != shown_colour(axes, "no constraint")


def test_changes_have_a_panel_for_each_pair_of_steps_with_the_variances():
    arms = {
        "none": [
            direction_changes(draw(80, 6), draw(80, 6, seed=step + 1), step, step + 1000) for step in (1000, 0, 2000)
        ],
        "SEC": [direction_changes(draw(80, 6), draw(80, 6) + draw(80, 6, seed=9), 0, 1000)],
    }
    figure = direction_changes_figure(arms, "triplet")
    assert [axes.get_title() for axes in figure.axes] == ["step 0 → 1k", "step 1k → 2k", "step 2k → 3k"]
    variances = {(arm, one.first_step): one.changes.variance for arm, changes in arms.items() for one in changes}
    assert legend_of(figure.axes[0]) == [f"{arm}: variance {variances[arm, 0]:.2g}" for arm in arms]
    assert legend_of(figure.axes[1]) == [f"none: variance {variances['none', 1000]:.2g}"]
    assert {axes.get_ylabel() for axes in figure.axes} == {"share of images in a bin (%)"}
    for arm in arms:
        assert 98.9 <= shares_shown(figure.axes[0], arm).sum() <= 100.001
    assert shown_colour(figure.axes[2], "none") == shown_colour(figure.axes[0], "none")
    assert shown_colour(figure.axes[0], "SEC") != shown_colour(figure.axes[0], "none")


def test_long_names_are_listed_once_below_the_panels():
    changes = [direction_changes(draw(80, 6), draw(80, 6, seed=step + 1), step, step + 1) for step in range(2)]
    arms = {f"no constraint, optimiser.learning_rate {rate}": changes for rate in (0.1, 0.2)}
    figure = direction_changes_figure(arms, "")
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == list(arms)
    assert all(text.startswith("variance ") for text in legend_of(figure.axes[1]))
    colours = [to_hex(line.get_color()).upper() for line in legend.get_lines()]
    assert colours == ["#D55E00", "#0072B2"]


def test_an_arm_that_only_has_later_steps_keeps_its_colour():
    later = direction_changes(draw(9, 3), draw(9, 3, seed=1), 5, 6)
    figure = direction_changes_figure({"first": [dataclasses.replace(later, first_step=0)], "second": [later]}, "")
    assert shown_colour(figure.axes[0], "first") != shown_colour(figure.axes[1], "second")


def test_a_panel_ends_where_it_holds_99_percent_of_the_images():
    counts = [0] * 100
    counts[0], counts[49], counts[99] = 500, 495, 5
    changes = DirectionChanges(0, 1, Distribution(np.linspace(0, 2, 101).tolist(), counts, 0.5, 0.1))
    (axes,) = direction_changes_figure({"run": [changes]}, "", num_bins=50).axes
    (outline, *_) = [patch for patch in axes.patches if patch.get_label() != "_nolegend_"]
    assert (outline.get_data().edges[0], outline.get_data().edges[-1]) == (0, pytest.approx(1))
    assert shares_shown(axes, "run")[[0, -1]] == pytest.approx([50, 49.5])


@pytest.mark.parametrize("arms", [{}, {"run": []}])
def test_no_snapshots_say_so(arms):
    assert texts(direction_changes_figure(arms, "")) == ["no embeddings of two steps were kept"]


def test_no_image_that_moved_says_so():
    nothing = direction_changes(torch.zeros(0, 3), torch.zeros(0, 3), 0, 1000)
    assert legend_of(direction_changes_figure({"run": [nothing]}, "").axes[0]) == ["run: no image"]


def test_the_runs_of_an_arm_are_drawn_together():
    one, other = two_arms().values()
    figure, rows = draw_cosines({"both": [one, other], "one": [one]}, "")
    positives = [row["share_percent"] for row in rows if row["arm"] == "both" and row["pairs"] == "positive"]
    counts = np.array(one.positives.counts) + other.positives.counts
    assert positives == pytest.approx(100 * counts / counts.sum())
    assert shares_shown(figure.axes[0], "positive") == pytest.approx(positives)
    assert [axes.get_title() for axes in figure.axes] == ["both", "one"]

    figure, rows = draw_cosine_differences({"both": [one, other]}, "")
    violations = 50 * (one.violations + other.violations)
    assert [row["violations_percent"] for row in rows] == pytest.approx([violations] * 200)
    assert legend_of(figure.axes[0]) == [f"both: {violations:.1f} % not above 0"]


def test_the_changes_of_an_arms_runs_are_drawn_together():
    changes = [direction_changes(draw(80, 6, seed=2 * run), draw(80, 6, seed=2 * run + 1), 0, 9) for run in range(2)]
    figure, rows = draw_direction_changes({"both": [changes[:1], changes[1:]]}, "")
    (axes,) = figure.axes
    of_runs = [one.changes for one in changes]
    mean = sum(one.mean for one in of_runs) / 2
    variance = sum(one.variance + (one.mean - mean) ** 2 for one in of_runs) / 2
    assert legend_of(axes) == [f"both: variance {variance:.2g}"]
    assert {(row["first_step"], row["last_step"]) for row in rows} == {(0, 9)}
    assert [row["variance"] for row in rows] == pytest.approx([variance] * 400)
    assert sum(row["share_percent"] for row in rows) == pytest.approx(100)
