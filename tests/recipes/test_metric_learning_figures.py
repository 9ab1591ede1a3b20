import dataclasses

import numpy as np
import pytest
import torch
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from ssl_sec.evaluation.directions import (
    ClassSpread,
    CosineDistributions,
    DirectionChanges,
    Distribution,
    class_spread,
    cosine_distributions,
    direction_changes,
)
from ssl_sec.recipes.metric_learning.figures import (
    class_divergences_figure,
    cosine_difference_figure,
    cosine_distributions_figure,
    direction_changes_figure,
    retrieved_figure,
)
from tests.evaluation.test_directions import LABELS
from tests.figures.test_training import draw, rendered, texts


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
    assert len(rendered(figure)) > 1000


def test_collapsed_embeddings_violate_every_triplet():
    found = cosine_distributions(torch.full((3000, 7), 0.3), torch.arange(3000) % 3, seed=0, max_pairs=5000)
    assert found.violations == 1
    assert found.positives.counts[-1] == found.negatives.counts[-1] == 5000
    assert found.positives.mean == pytest.approx(1, abs=1e-6)
    assert len(rendered(cosine_distributions_figure({"run": found}, ""))) > 1000
    assert len(rendered(cosine_difference_figure({"run": found}, ""))) > 1000


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


def retrieved(num_queries: int, num_retrieved: int, channels: int, height: int = 12, width: int = 16):
    generator = torch.Generator().manual_seed(0)
    shape = (channels, height, width)
    images = torch.randint(256, (num_queries, 1 + num_retrieved, *shape), generator=generator, dtype=torch.uint8)
    correct = torch.rand(num_queries, num_retrieved, generator=generator) < 0.5
    return images[:, 0], images[:, 1:], correct


def grid_of(figure: Figure, columns: int) -> np.ndarray:
    return np.array(figure.axes).reshape(-1, columns)


@pytest.mark.parametrize("channels", [1, 3])
def test_retrieved_images_stand_beside_their_query(channels):
    query_images, retrieved_images, correct = retrieved(4, 3, channels)
    names = ["a car", "a bird of a long name that is wrapped", "", "d"]
    figure = retrieved_figure(query_images, retrieved_images, correct, names)
    grid = grid_of(figure, 4)
    assert [axes.get_title() for axes in grid[0]] == ["query", "1", "2", "3"]
    assert [axes.get_ylabel().replace("\n", " ") for axes in grid[:, 0]] == names
    for row, (query, *places) in enumerate(grid):
        shown = [np.asarray(axes.images[0].get_array()).reshape(12, 16, channels) for axes in (query, *places)]
        assert np.array_equal(shown[0], query_images[row].permute(1, 2, 0))
        assert not query.texts
        for place, axes in enumerate(places):
            assert np.array_equal(shown[1 + place], retrieved_images[row, place].permute(1, 2, 0))
            right = bool(correct[row, place])
            colours = {to_hex(spine.get_edgecolor()).upper() for spine in axes.spines.values()}
            assert colours == {"#009E73" if right else "#CC3311"}
            assert [text.get_text() for text in axes.texts] == ["✓" if right else "✗"]
    assert {True, False} == set(correct.flatten().tolist())
    # A dark grey image is not stretched to white.
    assert {image.norm.vmax for axes in figure.axes for image in axes.images} == {255}
    assert len(rendered(figure)) > 1000


def test_one_image_retrieved_for_one_query_and_none():
    assert len(retrieved_figure(*retrieved(1, 1, 3)).axes) == 2
    assert texts(retrieved_figure(*retrieved(0, 3, 3))) == ["no images were retrieved"]
    assert texts(retrieved_figure(*retrieved(2, 0, 3))) == ["no images were retrieved"]
    with pytest.raises(AssertionError, match="2 queries"):
        retrieved_figure(*retrieved(2, 1, 3), query_names=["one"])


def test_divergences_are_sorted_by_the_first_arm():
    arms = {
        "baseline": ClassSpread([2, 5, 8], [0.6, 0.1, 0.2], 0.3),
        "SFT": ClassSpread([2, 5, 8], [0.4, 0.2, 0.3], 0.1),
    }
    figure = class_divergences_figure(arms, "ranked list")
    classes, deviations, energies = figure.axes
    baseline, transformed, mean = classes.lines
    assert baseline.get_ydata().tolist() == [0.1, 0.2, 0.6]
    assert transformed.get_ydata().tolist() == [0.2, 0.3, 0.4]
    assert np.unique(mean.get_ydata()).tolist() == pytest.approx([0.3])
    assert (baseline.get_color(), baseline.get_marker()) != (transformed.get_color(), transformed.get_marker())
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["baseline", "SFT", "mean, baseline"]
    assert classes.get_xlabel() == "classes, sorted by divergence (baseline)"
    heights = [bar.get_height() for bar in deviations.patches]
    assert heights == pytest.approx([np.std([0.6, 0.1, 0.2]), np.std([0.4, 0.2, 0.3])])
    assert [bar.get_height() for bar in energies.patches] == [0.3, 0.1]
    assert [to_hex(bar.get_facecolor()) for bar in energies.patches] == [baseline.get_color().lower(), "#0072b2"]
    assert [text.get_text() for text in energies.texts] == ["0.3", "0.1"]
    assert [axes.get_ylabel() for axes in figure.axes] == [
        "divergence (no unit)",
        "standard deviation of the divergences",
        "$r_w$ (no unit)",
    ]
    assert len(rendered(figure)) > 1000


@pytest.mark.parametrize(("num_classes", "num_shown", "apart"), [(100, 100, 1), (101, 51, 2), (1000, 100, 10)])
def test_of_many_classes_some_are_shown_and_all_are_counted(num_classes, num_shown, apart):
    divergences = torch.rand(num_classes, generator=torch.Generator().manual_seed(0)).tolist()
    classes, deviations, _ = class_divergences_figure(
        {"run": ClassSpread(list(range(num_classes)), divergences, 0.5)}, ""
    ).axes
    points, mean = classes.lines
    assert points.get_xdata().tolist() == list(range(0, num_classes, apart))
    assert points.get_ydata().tolist() == sorted(divergences)[::apart]
    assert len(points.get_xdata()) == num_shown
    assert mean.get_ydata()[0] == pytest.approx(np.mean(divergences))
    assert deviations.patches[0].get_height() == pytest.approx(np.std(divergences))


def test_arms_of_different_classes_are_not_compared():
    with pytest.raises(AssertionError, match="different classes"):
        class_divergences_figure({"a": ClassSpread([1], [0.1], 0.1), "b": ClassSpread([2], [0.1], 0.1)}, "")


@pytest.mark.parametrize(("labels", "panels"), [([], 0), ([4], 3), ([4, 4], 3), ([1, 2, 3], 3)])
def test_few_images_have_a_figure_of_their_spread(labels, panels):
    labels = torch.tensor(labels, dtype=torch.int64)
    spread = class_spread(torch.ones(len(labels), 4), labels)
    assert spread.divergences == pytest.approx([0] * len(labels.unique()), abs=1e-12)
    figure = class_divergences_figure({"run": spread}, "")
    assert len(figure.axes) == panels
    assert len(rendered(figure)) > 1000
