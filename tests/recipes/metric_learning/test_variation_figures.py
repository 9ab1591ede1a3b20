"""SFT's figures."""

import io
import json
from dataclasses import asdict

import numpy as np
import pytest
import torch

from ssl_sec.evaluation.directions import DistanceDistributions, distance_distributions, pooled
from ssl_sec.evaluation.variation import ENERGIES, class_covariances, relative_deviation, rotation_shifts
from ssl_sec.papers import load
from ssl_sec.recipes.metric_learning.variation_figures import (
    class_covariances_figure,
    draw_distances,
    draw_variation,
    rotation_shifts_figure,
)
from ssl_sec.recipes.registry import RECIPES
from tests.losses.cases import rows

LABELS = torch.arange(6).repeat_interleave(torch.tensor([5, 9, 7, 2, 8, 6]))


def embeddings(dim=5):
    return rows(6, dim, seed=1)[LABELS] + 0.5 * rows(len(LABELS), dim)


def test_the_four_largest_classes_are_drawn_with_their_diagonals_and_eigenvalues():
    covariances = class_covariances(embeddings(), LABELS)
    names = ["none", "beetle", "fly", "bee", "$x_$", "wasp"]
    figure = class_covariances_figure(embeddings(), LABELS, covariances, names)
    space, diagonal, eigenvalues = figure.axes
    sizes = {text.get_text() for text in figure.legends[0].get_texts()}
    assert sizes == {
        "class beetle (9 images)",
        r"class \$x_\$ (8 images)",
        "class fly (7 images)",
        "class wasp (6 images)",
    }
    assert sum(len(points.get_offsets()) for points in space.collections) == len(LABELS)
    for axes, values in ((diagonal, covariances.diagonals), (eigenvalues, covariances.eigenvalues)):
        assert [line.get_ydata().tolist() for line in axes.get_lines()] == values
    assert "relative deviation" in eigenvalues.get_title()


def test_the_axes_in_space_are_the_principal_ones_of_the_directions():
    covariances = class_covariances(embeddings(), LABELS)
    space, diagonal, eigenvalues = class_covariances_figure(embeddings(), LABELS, covariances, list("abcdef")).axes
    unit = torch.nn.functional.normalize(embeddings().double())
    variances = torch.linalg.svdvals(unit - unit.mean(0)).square()
    shares = (variances[:3] / variances.sum()).tolist()
    names = [f"{axis}: {100 * share:.0f} % of variance" for axis, share in zip("XYZ", shares, strict=True)]
    assert [space.get_xlabel(), space.get_ylabel(), space.get_zlabel()] == names
    drawn = [torch.tensor(np.array(points._offsets3d)) for points in space.collections]
    spreads = (torch.cat(drawn, dim=1) ** 2).sum(1)
    assert spreads.tolist() == pytest.approx(variances[:3].tolist(), rel=1e-4)
    assert [points.shape[1] for points in drawn] == [7, *covariances.sizes]  # the grey ones first
    for axes, values in ((diagonal, covariances.diagonals), (eigenvalues, covariances.eigenvalues)):
        assert axes.get_title().endswith(f"\nrelative deviation {100 * relative_deviation(values):.0f} %")
        assert axes.get_lines()[0].get_xdata().tolist() == [1, 2, 3, 4, 5]


def test_distances_of_several_arms_are_drawn_in_percent():
    runs = [distance_distributions(embeddings() + noise, LABELS, seed=0) for noise in (0, rows(len(LABELS), 5, 2))]
    figure, drawn = draw_distances({"one": runs[:1], "both": runs}, "distances")
    both = DistanceDistributions(*(pooled([getattr(run, kind) for run in runs]) for kind in ("positives", "negatives")))
    for axes, distances in zip(figure.axes, (runs[0], both), strict=True):
        assert f"overlap {100 * distances.overlap:.1f} %" in axes.get_title()
        for patch, shown in zip(axes.patches, (distances.positives, distances.negatives), strict=True):
            assert patch.get_data().values.sum() == pytest.approx(100)
            assert f"{shown.mean:.2f}" in patch.get_label()
    for patch, pairs in zip(figure.axes[0].patches, ("positive", "negative"), strict=True):
        shares = [row["share_percent"] for row in drawn if (row["arm"], row["pairs"]) == ("one", pairs)]
        assert shares == patch.get_data().values.tolist() and patch.get_label().startswith(f"{pairs} pairs (mean ")


def test_sfts_figure_4b_compares_the_distances_that_a_run_keeps(tmp_path):
    assert load("sft").figure("4b").shows == ("distances",)
    distances = distance_distributions(embeddings(), LABELS, seed=0)
    (tmp_path / "numbers.json").write_text(json.dumps({"distances": asdict(distances)}))
    comparison = RECIPES["metric_learning"].comparisons["distances"]
    assert comparison.read(tmp_path / comparison.artifact) == distances


def test_shifts_and_energies_are_drawn():
    rotations = rotation_shifts(embeddings(), LABELS, seed=0)
    shifts, energies = rotation_shifts_figure(rotations).axes
    assert shifts.patches[0].get_data().values.sum() == pytest.approx(100)
    edges, counts = np.array(rotations.shifts.edges), np.array(rotations.shifts.counts)
    assert shifts.get_xlim() == (0, edges[1:][counts > 0].max())  # where draws are
    assert [text.get_text() for text in shifts.get_legend().get_texts()] == [f"mean {rotations.shifts.mean:.3f}"]
    (line,) = energies.get_lines()
    assert line.get_xdata().tolist() == pytest.approx([100 * energy for energy in ENERGIES])
    assert line.get_ydata().tolist() == pytest.approx([100 * one for one in rotations.within_class_energies])


@pytest.mark.parametrize("labels", [torch.arange(4), torch.zeros(4, dtype=torch.int64), torch.tensor([0, 0, 1, 1])])
@pytest.mark.parametrize("dim", [2, 5])
def test_few_images_and_dimensions_are_drawn(labels, dim):
    figures = draw_variation(rows(4, dim), labels, list("abcd"))
    assert set(figures) == {"class_covariances", "rotation_shifts"}
    for figure in figures.values():
        figure.savefig(written := io.BytesIO())
        assert written.getvalue().startswith(b"\x89PNG")
