import dataclasses
import itertools
import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from ssl_sec.errors import DataError
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
from ssl_sec.settings import to_values
from tests.figures.test_training import draw, rendered, texts

LABELS = torch.tensor([7, 3, 3, 7, 9, 7, 3, 7])


def legend_of(axes) -> list[str]:
    return [text.get_text() for text in axes.get_legend().get_texts()]


def cosine(first, second) -> float:
    first, second = first.double(), second.double()
    return float(first @ second / (first.norm() * second.norm()))


def slow_cosines(embeddings, labels):
    """Every pair and every triplet, one by one."""
    images = range(len(labels))
    positives, negatives, differences = [], [], []
    for a, b in itertools.combinations(images, 2):
        (positives if labels[a] == labels[b] else negatives).append(cosine(embeddings[a], embeddings[b]))
    for a, p, n in itertools.product(images, repeat=3):
        if a != p and labels[a] == labels[p] != labels[n]:
            differences.append(cosine(embeddings[a], embeddings[p]) - cosine(embeddings[a], embeddings[n]))
    return positives, negatives, differences


def assert_distribution(found: Distribution, values: list[float], low: float, high: float):
    expected, edges = np.histogram(values, bins=round((high - low) * 50), range=(low, high))
    assert found.edges == pytest.approx(edges.tolist(), abs=1e-12)
    assert found.counts == expected.tolist()
    if values:
        assert found.mean == pytest.approx(np.mean(values), abs=1e-7)
        assert found.variance == pytest.approx(np.var(values), abs=1e-7)
    else:
        assert (found.mean, found.variance) == (None, None)


@settings(max_examples=40)
@given(labels=st.lists(st.integers(0, 4), min_size=0, max_size=12), seed=st.integers(0, 99))
def test_few_pairs_and_triplets_are_all_counted_once(labels, seed):
    labels = torch.tensor(labels, dtype=torch.int64)
    embeddings = 3 * draw(len(labels), 5, seed=seed).double()
    found = cosine_distributions(embeddings, labels, seed=0, max_pairs=2000)
    positives, negatives, differences = slow_cosines(embeddings, labels)
    assert_distribution(found.positives, positives, -1, 1)
    assert_distribution(found.negatives, negatives, -1, 1)
    assert_distribution(found.differences, differences, -2, 2)
    if differences:
        assert found.violations == pytest.approx(np.mean(np.array(differences) <= 0))
    else:
        assert found.violations is None


def test_drawn_pairs_and_triplets_are_distributed_as_all_of_them():
    labels = torch.tensor([0] * 2 + [1] * 5 + [2] * 13)  # sizes apart, so that a wrong weight shows
    embeddings = 2 * draw(3, 6, seed=1)[labels] + draw(20, 6)
    num_drawn = 180
    found = [cosine_distributions(embeddings, labels, seed, max_pairs=num_drawn) for seed in range(200)]
    positives, negatives, differences = slow_cosines(embeddings, labels)
    assert len(positives) == 89 and len(negatives) == 101 and len(differences) == 1428
    for one in found:
        assert sum(one.positives.counts) == 89
        assert sum(one.negatives.counts) == 101
        assert sum(one.differences.counts) == num_drawn
    fewer = [cosine_distributions(embeddings, labels, seed, max_pairs=80) for seed in range(200)]
    for drawn, all_values in (
        ([one.positives for one in fewer], positives),
        ([one.negatives for one in fewer], negatives),
        ([one.differences for one in found], differences),
    ):
        error = np.std(all_values) / np.sqrt(200 * sum(drawn[0].counts))
        assert np.mean([one.mean for one in drawn]) == pytest.approx(np.mean(all_values), abs=4 * error)
    share = np.mean(np.array(differences) <= 0)
    error = np.sqrt(share * (1 - share) / (200 * num_drawn))
    assert 0.01 < share < 0.5
    assert np.mean([one.violations for one in found]) == pytest.approx(share, abs=4 * error)


def test_a_seed_decides_which_pairs_are_drawn():
    embeddings, labels = draw(300, 4), torch.arange(300) % 7
    first, again, other = (cosine_distributions(embeddings, labels, seed, max_pairs=50) for seed in (-3, -3, 4))
    assert first == again
    assert first.positives != other.positives
    assert first.negatives != other.negatives
    assert first.differences != other.differences


def test_cosines_depend_on_neither_norms_nor_the_order_of_the_images():
    embeddings, labels = draw(40, 4).double(), torch.arange(40) % 7
    lengths = torch.linspace(1e-3, 1e3, 40).double().unsqueeze(1)
    shuffled = torch.randperm(40, generator=torch.Generator().manual_seed(0))
    found = cosine_distributions(embeddings, labels, seed=0)
    moved = cosine_distributions((embeddings * lengths)[shuffled], labels[shuffled], seed=0)
    assert moved.positives.counts == found.positives.counts
    assert moved.differences.counts == found.differences.counts
    assert moved.negatives.variance == pytest.approx(found.negatives.variance)


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


@pytest.mark.parametrize("bad", [0.0, torch.nan, torch.inf])
def test_embeddings_without_a_direction_are_refused(bad):
    embeddings = draw(6, 3)
    embeddings[[1, 4]] = bad
    labels = torch.zeros(6, dtype=torch.int64)
    message = "^embeddings: found 2 of 6 rows that are zero or not finite; allowed: rows with a direction$"
    with pytest.raises(DataError, match=message):
        cosine_distributions(embeddings, labels, seed=0)
    with pytest.raises(DataError, match=message):
        direction_changes(draw(6, 3), embeddings, 0, 1)
    with pytest.raises(DataError, match=message):
        direction_changes(embeddings, draw(6, 3), 0, 1)
    with pytest.raises(DataError, match=message):
        class_spread(embeddings, labels)


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


def test_a_direction_change_is_one_minus_the_cosine():
    before, after = draw(50, 6).double(), 9 * draw(50, 6, seed=1).double()
    found = direction_changes(before, after, 1000, 2000, num_bins=12)
    changes = [1 - cosine(*pair) for pair in zip(before, after, strict=True)]
    assert (found.first_step, found.last_step) == (1000, 2000)
    expected, edges = np.histogram(changes, bins=12)
    assert found.changes.counts == expected.tolist()
    assert found.changes.edges == pytest.approx(edges.tolist())
    assert found.changes.mean == pytest.approx(np.mean(changes))
    assert found.changes.variance == pytest.approx(np.var(changes))


def test_small_direction_changes_are_not_lost_to_rounding():
    angle = 1e-4
    before = torch.tensor([[1.0, 0.0]])
    after = torch.tensor([[np.cos(angle), np.sin(angle)]], dtype=torch.float32)
    assert direction_changes(before, after, 0, 1).changes.mean == pytest.approx(angle**2 / 2, rel=1e-3)


def test_directions_that_do_not_move_or_turn_round_are_the_ends_of_the_range():
    embeddings = draw(9, 4)
    still = direction_changes(embeddings, 3 * embeddings, 0, 1).changes
    assert (sum(still.counts), still.mean) == (9, pytest.approx(0, abs=1e-12))
    assert all(low < high for low, high in itertools.pairwise(still.edges))
    turned = direction_changes(embeddings, -embeddings, 0, 1).changes
    assert turned.mean == pytest.approx(2)
    none = direction_changes(embeddings[:0], embeddings[:0], 0, 1).changes
    assert (sum(none.counts), none.mean, none.variance) == (0, None, None)


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


def test_class_spread_is_that_of_the_directions():
    embeddings = 5 * draw(8, 4).double()
    spread = class_spread(embeddings, LABELS)
    unit = torch.stack([row / row.norm() for row in embeddings])
    within, means, expected = torch.zeros(4, 4).double(), [], []
    for label in (3, 7, 9):
        members = unit[LABELS == label]
        means.append(members.mean(0))
        scatter = sum(torch.outer(x - means[-1], x - means[-1]) for x in members) / len(members)
        within += scatter / 3
        expected.append(scatter.trace().item())
    assert spread.classes == [3, 7, 9]
    assert spread.divergences == pytest.approx(expected)
    assert spread.divergences[2] == 0  # one image
    values, vectors = torch.linalg.eigh(sum(torch.outer(mean, mean) for mean in means))
    axes = next(k for k in range(1, 5) if values[-k:].sum() >= 0.99 * values.sum())
    leading = vectors[:, -axes:]
    assert spread.within_class_energy == pytest.approx(((leading.T @ within @ leading).trace() / within.trace()).item())


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


def test_the_numbers_survive_json():
    cosines = cosine_distributions(draw(8, 4), LABELS, seed=0)
    told = json.loads(json.dumps(to_values(cosines), allow_nan=False))
    parts = {key: Distribution(**value) for key, value in told.items() if key != "violations"}
    assert CosineDistributions(**parts, violations=told["violations"]) == cosines
    spread = class_spread(draw(8, 4), LABELS)
    assert ClassSpread(**json.loads(json.dumps(dataclasses.asdict(spread), allow_nan=False))) == spread
    changes = direction_changes(draw(8, 4), draw(8, 4, seed=1), 0, 1000)
    told = json.loads(json.dumps(dataclasses.asdict(changes), allow_nan=False))
    assert DirectionChanges(**told | {"changes": Distribution(**told["changes"])}) == changes


def test_a_distribution_needs_one_edge_more_than_bins():
    with pytest.raises(AssertionError, match="one edge more"):
        Distribution([0.0, 1.0], [1, 2], None, None)
