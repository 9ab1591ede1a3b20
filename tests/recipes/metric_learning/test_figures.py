from types import SimpleNamespace

import numpy as np
import pytest
import torch
from matplotlib.colors import to_hex

from ssl_sec.errors import DataError
from ssl_sec.evaluation.directions import ClassSpread, class_spread
from ssl_sec.recipes.metric_learning import recipe
from ssl_sec.recipes.metric_learning.figures import COMPARISONS, class_divergences_figure, measure


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
    figure.draw_without_rendering()  # raises for invalid mathtext


def test_embeddings_without_directions_leave_out_what_concerns_directions(tmp_path, caplog):
    """As those of a collapsed network, whose run ends nevertheless."""
    embeddings, labels = torch.zeros(6, 3), torch.arange(6) // 2
    assert recipe._variation_metrics(embeddings, labels) == {}
    path = tmp_path / "features.pt"
    torch.save({"features": embeddings, "labels": labels, "training_norms": torch.zeros(4)}, path)
    run = SimpleNamespace(features_path=path)
    assert list(measure(run)) == ["training_norms"]
    (warning,) = caplog.messages
    assert warning.startswith("some pictures cannot be drawn: ")


def test_the_variance_of_norms_is_that_of_all_images():
    found = recipe._norm_metrics("test", torch.tensor([[3.0, 4.0], [0.0, 1.0]]))
    assert found == pytest.approx({"test_norm_mean": 3.0, "test_norm_variance": 4.0})


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


@pytest.mark.parametrize(("labels", "panels"), [([], 0), ([4], 0), ([4, 4], 3), ([1, 2, 3], 0)])
def test_few_images_have_a_figure_of_their_spread(labels, panels):
    labels = torch.tensor(labels, dtype=torch.int64)
    spread = class_spread(torch.ones(len(labels), 4), labels)
    assert spread.divergences == pytest.approx([0] * (panels > 0), abs=1e-12)
    figure = class_divergences_figure({"run": spread}, "")
    assert len(figure.axes) == panels
    figure.draw_without_rendering()


def test_the_divergences_of_an_arms_runs_are_averaged():
    runs = [ClassSpread([1, 4], [0.2, 0.6], 0.1), ClassSpread([1, 4], [0.4, 0.2], 0.3)]
    _, rows = COMPARISONS["divergences"].draw({"both": runs}, "")
    assert [(row["class"], row["divergence"]) for row in rows] == [(1, pytest.approx(0.3)), (4, pytest.approx(0.4))]
    assert rows[0]["within_class_energy"] == pytest.approx(0.2)
    with pytest.raises(DataError, match="^b has other test classes than a: their divergences are not compared$"):
        COMPARISONS["divergences"].draw({"a": runs, "b": [ClassSpread([1, 5], [0.2, 0.6], 0.1)]}, "")
