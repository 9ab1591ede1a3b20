import itertools
import math
from dataclasses import replace

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from mlflow.utils.validation import _validate_metric_name

from ssl_sec.edges.study.comparison import Comparison, curves_of
from ssl_sec.figures.study import ArmInterval, Cause, causes_figure, curves_figure, values_figure
from tests.edges.study.test_cells import kept


def cells(points=("",)):
    shifts = {"sec": 1.0, "none": 0.0, "l2reg": -2.0}
    return [
        kept(arm, point, seed, **{"probe/top1": base + 3 * seed + shift + 0.1 * seed * shift, "probe/knn_top1": 40.0})
        for base, point in zip(itertools.count(50, 10), points)
        for seed in (0, 1, 2)
        for arm, shift in shifts.items()
    ]


def test_the_baseline_comes_first_and_the_others_are_compared_to_it():
    made = Comparison.of(cells(), "probe/top1", "none", 2)
    assert [row.arm for row in made.rows] == ["none", "sec", "l2reg"]
    columns, none, sec, l2reg = made.table()
    assert columns == [
        *("arm", "runs", "probe top-1 %", "kNN top-1 %", "difference from none [95 %]", "p (Holm, 2)"),
        "kNN difference [95 %]",
    ]
    assert none == ["none", "3", "53.00 ± 3.00", "40.00 ± 0.00", "", "", ""]
    assert sec[:5] == ["sec", "3", "54.10 ± 3.10", "40.00 ± 0.00", "+1.10 [+0.85, +1.35]"]
    assert l2reg[4] == "-2.20 [-2.70, -1.70]"
    assert float(sec[5]) == pytest.approx(0.006, abs=1e-3)
    assert sec[6] == "+0.00"  # equal in all runs
    by_knn = Comparison.of(cells(), "probe/knn_top1", "none", 2).table()[0]
    assert by_knn[2:] == ["kNN top-1 %", "probe top-1 %", "difference from none [95 %]", "p (Holm, 2)"]


def test_the_metric_of_an_arm_is_the_mean_of_its_runs():
    runs = [kept("sec", "", seed, **{"probe/top1": value}) for seed, value in enumerate((1.0, 2.0, 6.0))]
    assert Comparison.of(runs, "probe/top1", "none", 1).metrics() == {"study/mean sec": 3.0}


def test_p_is_adjusted_for_the_comparisons_that_are_planned():
    alone, planned = (Comparison.of(cells(), "probe/top1", "none", family) for family in (2, 12))
    smallest = [min(row.difference.p for row in made.rows if row.difference) for made in (alone, planned)]
    assert smallest[1] == pytest.approx(6 * smallest[0])
    two = [cell for cell in cells() if cell.arm != "l2reg"]
    assert "p" in Comparison.of(two, "probe/top1", "none", 1).table()[0]


def test_a_point_is_compared_within_itself():
    made = Comparison.of(cells(("temperature=0.1", "temperature=0.5")), "probe/top1", "none", 2)
    assert [row[0] for row in made.table()] == ["at", *["temperature=0.1"] * 3, *["temperature=0.5"] * 3]
    metrics = made.metrics()
    assert metrics["study/difference temperature 0.5 sec"] == pytest.approx(1.1)
    assert (
        metrics["study/difference_low temperature 0.5 sec"] < 1.1 < metrics["study/difference_high temperature 0.5 sec"]
    )
    (axes,) = made.over_values().axes
    assert (axes.get_xlabel(), [text.get_text() for text in axes.get_legend().get_texts()]) == (
        "temperature",
        ["sec", "l2reg"],
    )
    assert len(made.forest().axes) == 2


def test_mlflow_takes_the_metrics_of_arms_and_points_of_any_name():
    points = ("probe.decay_at=[0.5,0.9]", "encoder.weights=/a//b/")
    made = Comparison.of(cells(points), "probe/top1", "none", 2)
    rows = [replace(row, arm="sec+dcl (0.1)") if row.arm == "sec" else row for row in made.rows]
    found = replace(made, rows=rows).metrics()
    assert {"study/mean probe.decay_at 0.5 0.9 sec dcl 0.1", "study/difference encoder.weights a b l2reg"} <= {*found}
    assert len(found) == 2 * (3 + 2 * 3)
    for name in found:
        _validate_metric_name(name)


def test_the_title_over_one_panel_of_values_is_not_cut_off():
    figure = Comparison.of(cells(("temperature=0.1", "temperature=0.5")), "probe/top1", "none", 2).over_values()
    (title,) = figure.texts
    extent = title.get_window_extent(FigureCanvasAgg(figure).get_renderer())
    assert 0 <= extent.x0 < extent.x1 <= figure.bbox.width


def test_values_are_on_one_scale_in_which_every_pair_fits():
    values = ("epochs=5", "epochs=50", "temperature=0.1", "temperature=0.5")
    runs = [cell for cell in cells(values) if cell.point != "epochs=50" or cell.seed == 0]
    epochs, temperature = Comparison.of(runs, "probe/top1", "none", 8).over_values().axes
    assert [label.get_text() for label in epochs.get_xticklabels()] == ["5", "50"]
    assert epochs.get_ylim() == temperature.get_ylim()
    for axes, counts in ((epochs, [3, 1, 3, 1]), (temperature, [3, 3, 3, 3])):
        dots = [line.get_ydata() for line in axes.lines if line.get_marker() == "o"]
        assert [len(pairs) for pairs in dots] == counts
        assert all(abs(pair) < axes.get_ylim()[1] for pairs in dots for pair in pairs)
    means = [line for line in epochs.lines if line.get_marker() == "D"]
    assert [line.get_fillstyle() for line in means] == ["full", "none", "full", "none"]


def test_an_arm_that_has_one_value_stands_beside_those_that_have_more():
    runs = [cell for cell in cells(("beta=1", "beta=2")) if (cell.arm, cell.point) != ("sec", "beta=1")]
    (axes,) = Comparison.of(runs, "probe/top1", "none", 4).over_values().axes
    means = [line.get_xdata().tolist() for line in axes.lines if line.get_marker() == "D"]
    assert means == [[1], [2], [2]]


def test_a_value_that_is_not_finite_has_no_place_among_the_others():
    (axes,) = Comparison.of(cells(("beta=1", "beta=inf", "beta=2")), "probe/top1", "none", 6).over_values().axes
    assert [label.get_text() for label in axes.get_xticklabels()] == ["1", "2"]


def test_causes_are_ratios_to_the_baseline_paired_by_seed():
    def with_causes(arm, seed, norm, deviation, step):
        metrics = {"norm_mean": norm * (1 + seed), "norm_std": deviation * (1 + seed)}
        metrics |= {"step_angle_mean": step, "step_angle_std": step**2}
        named = {f"mean/train/{name}": value for name, value in metrics.items()}
        differs = (0.5 + seed) * (arm == "sec")  # 0.5 and 1.5
        return kept(arm, "", seed, **{"probe/top1": 50.0 + seed + differs, **named})

    runs = [with_causes("none", seed, 8.0, 2.0, 0.1) for seed in (0, 1)]
    # Turns 1 and 4 times as large: the geometric mean is 2.
    runs += [with_causes("sec", seed, 4.0, 0.5, 0.1 * 4**seed) for seed in (0, 1)]
    made = Comparison.of(runs, "probe/top1", "none", 2).causes()
    places, half_width = {}, 12.706 * 0.5  # t with one degree of freedom, times the standard error
    for axes in made.axes:
        (arm,) = (line for line in axes.get_lines() if line.get_marker() == "o")
        places[axes.get_xlabel()] = (arm.get_xdata()[0], arm.get_ydata()[0])
        (interval,) = axes.collections
        low, high = interval.get_segments()[0][:, 1]
        assert (low, high) == pytest.approx((1 - half_width, 1 + half_width), abs=1e-3)
    assert places == {
        "turn of an embedding in a step": (pytest.approx(2), 1),
        "unevenness of turns\n(deviation / mean)": (pytest.approx(2), 1),
        "mean norm": (pytest.approx(0.5), 1),
        "spread of norms\n(deviation / mean)": (pytest.approx(0.5), 1),
    }


def test_a_cause_is_left_out_unless_it_is_known_of_each_seed():
    def with_norm(arm, seed, norm):
        causes = {"mean/train/step_angle_mean": 0.1, "mean/train/norm_mean": norm}
        return kept(arm, "", seed, **{"probe/top1": 50.0, **causes})

    runs = [with_norm(arm, seed, float(arm == "none" or seed == 0)) for arm in ("none", "sec") for seed in (0, 1)]
    (axes,) = Comparison.of(runs, "probe/top1", "none", 1).causes().axes
    assert axes.get_xlabel() == "turn of an embedding in a step"


def test_an_arm_that_is_not_trained_has_no_ratios_of_steps():
    """Its steps turn nothing, by 0 ± 0."""

    def with_steps(arm, seed, angle):
        names = ("step_angle_mean", "step_angle_std")
        causes = {f"mean/train/{name}": angle for name in names} | {"mean/train/norm_mean": 4.0 + (arm == "untrained")}
        return kept(arm, "", seed, **{"probe/top1": 50.0 + seed, **causes})

    runs = [with_steps(arm, seed, angle) for arm, angle in (("none", 0.1), ("untrained", 0.0)) for seed in (0, 1)]
    (axes,) = Comparison.of(runs, "probe/top1", "none", 1).causes().axes
    (arm,) = (line for line in axes.get_lines() if line.get_marker() == "o")
    assert (axes.get_xlabel(), arm.get_xdata()[0]) == ("mean norm", pytest.approx(1.25))


def test_norms_of_zero_have_no_ratio():
    named = {"mean/train/norm_mean": 0.0, "mean/train/norm_std": 0.0}
    runs = [kept(arm, "", seed, **{"probe/top1": 50.0, **named}) for arm in ("none", "sec") for seed in (0, 1)]
    assert Comparison.of(runs, "probe/top1", "none", 1).causes() is None


def test_a_run_without_a_metric_does_not_count_in_its_mean():
    runs = [kept("none", "", seed, **{"probe/top1": 50.0 + seed}) for seed in (0, 1)]
    both = {"probe/top1": 60.0, "probe/knn_top1": 40.0}
    runs += [kept("sec", "", 0, **both), kept("sec", "", 1, **{"probe/knn_top1": 44.0})]
    made = Comparison.of(runs, "probe/top1", "none", 1)
    _, none, sec = made.table()
    assert none[1:] == ["2", "50.50 ± 0.71", ""]
    assert sec[1:] == ["2", "60.00", "42.00 ± 2.83"]
    assert made.rows[1].difference.num_pairs == 1


def test_a_cause_that_one_arm_lacks_is_drawn_of_the_others():
    norm, step = "mean/train/norm_mean", "mean/train/step_angle_mean"
    known = {"none": {norm: 2.0, step: 0.1}, "sec": {norm: 1.0}, "l2reg": {norm: 3.0, step: 0.3}}
    runs = [kept(arm, "", 0, **{"probe/top1": 50.0, **causes}) for arm, causes in known.items()]
    places = {}
    for axes in Comparison.of(runs, "probe/top1", "none", 2).causes().axes:
        dots = [line for line in axes.get_lines() if line.get_marker() == "o"]
        places[axes.get_xlabel()] = [float(line.get_xdata()[0]) for line in dots]
    expected = {"turn of an embedding in a step": [3.0], "mean norm": [0.5, 1.5]}
    assert places == {name: pytest.approx(values) for name, values in expected.items()}


def test_no_difference_is_a_line_in_every_panel_and_the_points_have_one_scale():
    made = Comparison.of(cells(("temperature=0.1", "temperature=0.5")), "probe/top1", "none", 2)
    forest = made.forest().axes
    assert forest[0].get_xlim() == forest[1].get_xlim()
    assert all(list(axes.lines[0].get_xdata()) == [0, 0] for axes in forest)
    causes = causes_figure([Cause("sec", "", {"norm": 0.5}, 0.5, 0.2)], {"norm": "mean norm"}, "top-1 %", "none")
    for (axes,) in (made.over_values().axes, causes.axes):
        assert list(axes.lines[0].get_ydata()) == [0, 0]
    assert causes.axes[0].lines[1].get_xydata().tolist() == [[1, 0]]  # the baseline


@pytest.mark.parametrize("ratios", [(0.3, 1.16), (1.23, 1.27), (0.3, 2.2), (0.05, 20)])
def test_the_ratios_on_the_axis_of_causes_do_not_overlap(ratios):
    panels = dict.fromkeys(("turn", "unevenness", "norm", "spread"), "as multiples")
    arms = [Cause(f"arm {ratio}", "", dict.fromkeys(panels, ratio), 0.5, 0.2) for ratio in ratios]
    figure = causes_figure(arms, panels, "probe top-1 %", "none")
    FigureCanvasAgg(figure).draw()
    low, high = figure.axes[0].get_xlim()
    ticks = [tick for tick in figure.axes[0].xaxis.get_major_ticks() if low <= tick.get_loc() <= high]
    boxes = [tick.label1.get_window_extent() for tick in ticks]
    assert len(boxes) >= 2
    assert all(left.x1 < right.x0 for left, right in itertools.pairwise(boxes))


def test_the_legend_of_causes_names_arms_that_the_first_panel_lacks():
    arms = [Cause("sec", "", {"turn": 2.0, "norm": 0.5}, 0.5, 0.2), Cause("l2reg", "", {"norm": 0.7}, 0.1, 0.2)]
    figure = causes_figure(arms, {"turn": "turn", "norm": "mean norm"}, "probe top-1 %", "none")
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["none", "sec", "l2reg"]


@pytest.mark.parametrize("first", [0.1, 0.0])  # a logarithmic axis and another
def test_many_values_on_an_axis_do_not_overlap(first: float):
    entries = [(value / 10, ArmInterval("sec", 0.5, 0.2, [0.4, 0.6])) for value in range(1, 31)]
    figure = values_figure(
        {"eta": {"sec": [(first, entries[0][1]), *entries]}, "other": {"sec": entries[:2]}}, "top-1 %", "none"
    )
    FigureCanvasAgg(figure).draw()
    ticks = figure.axes[0].get_xticklabels()
    boxes = [tick.get_window_extent() for tick in ticks]
    assert len(boxes) >= 5 and ticks[0].get_text() == f"{first:g}"
    assert all(left.x1 < right.x0 for left, right in itertools.pairwise(boxes))


def test_each_arm_of_causes_has_a_look_of_its_own():
    arms = [Cause(f"arm {place}", "", {"norm": 1 + place}, 0.5, 0.2) for place in range(9)]
    lines = causes_figure(arms, {"norm": "mean norm"}, "probe top-1 %", "none").axes[0].get_lines()
    looks = [(line.get_color(), line.get_marker()) for line in lines if line.get_marker() in ("o", "D")]
    assert len(looks) == len({*looks}) == 9


def test_an_arm_has_one_colour_in_all_plots_of_a_study():
    arms = [Cause(arm, "", {"norm": 0.5}, 0.5, 0.2) for arm in ("sec", "l2reg")]
    causes = causes_figure(arms, {"norm": "mean norm"}, "probe top-1 %", "none").axes[0].containers
    run = {"train/loss": [[(0, 2.0), (1, 1.0)]]}
    curves = curves_figure({"none": run, "sec": run, "l2reg": run}, "title").axes[0].lines
    assert [bars.lines[0].get_color() for bars in causes] == [line.get_color() for line in curves[1:]]
    over = Comparison.of(cells(("temperature=0.1", "temperature=0.5")), "probe/top1", "none", 2).over_values().axes[0]
    assert [line.get_color() for line in over.get_legend().get_lines()] == [line.get_color() for line in curves[1:]]


def test_a_run_that_failed_counts_in_the_mean_curve_up_to_its_last_step():
    whole, failed = [(0, 4.0), (2, 3.0), (10, 1.0)], [(0, 4.0), (2, 5.0)]
    (axes,) = curves_figure({"none": {"train/loss": [whole, failed]}}, "title").axes
    assert list(axes.lines[0].get_ydata()) == [4.0, 4.0, 1.0]


def test_the_mean_curve_has_the_steps_of_all_runs_in_order():
    runs = [[(0, 0.0), (8, 8.0), (1000, 1000.0)], [(100, 200.0), (500, 1000.0)], []]
    (axes,) = curves_figure({"none": {"train/loss": runs}}, "title").axes
    assert list(axes.lines[0].get_xdata()) == [0, 8, 100, 500, 1000]
    assert list(axes.lines[0].get_ydata()) == pytest.approx([0, 8, 150, 750, 1000])


def test_without_norms_there_is_no_figure_of_causes():
    assert Comparison.of(cells(), "probe/top1", "none", 2).causes() is None


def test_one_seed_has_no_interval_and_its_table_no_column_of_differences():
    made = Comparison.of([cell for cell in cells() if cell.seed == 0], "probe/top1", "none", 2)
    assert made.table()[0] == ["arm", "runs", "probe top-1 %", "kNN top-1 %"]
    assert "study/difference_low sec" not in made.metrics()
    (axes,) = made.forest().axes
    assert [line.get_fillstyle() for line in axes.lines if line.get_marker() == "D"] == ["none", "none"]
    assert made.over_values() is None


def test_without_the_baseline_there_is_nothing_to_compare():
    made = Comparison.of([cell for cell in cells() if cell.arm == "sec"], "probe/top1", "none", 2)
    assert made.rows[0].difference is None and made.forest() is None


def test_the_forest_shows_each_pair_and_the_interval():
    (axes,) = Comparison.of(cells(), "probe/top1", "none", 2).forest().axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["sec", "l2reg"]
    pairs = next(line for line in axes.lines if len(line.get_xdata()) == 3)
    assert list(pairs.get_xdata()) == pytest.approx([1.0, 1.1, 1.2])


def test_the_pairs_of_the_forest_have_one_seed():
    runs = [cell for cell in cells() if (cell.arm, cell.seed) not in {("sec", 0), ("none", 1)}]
    (axes,) = Comparison.of(runs, "probe/top1", "none", 2).forest().axes
    pairs = [list(line.get_xdata()) for line in axes.lines if line.get_marker() == "o"]
    assert pairs == [pytest.approx([-2.0, -2.4]), pytest.approx([1.2])]


def test_curves_are_means_over_the_runs_of_an_arm():
    records = [{"step": step, "metrics": {"train/loss": 4.0 - step}} for step in (0, 2)]
    curves = curves_of(records, ["train/loss", "val/knn_top1"])
    assert curves == {"train/loss": [(0, 4.0), (2, 2.0)], "val/knn_top1": []}
    other = [(0, 6.0), (1, 5.0), (2, 4.0)]
    figure = curves_figure({"none": {"train/loss": [curves["train/loss"], other], "val/knn_top1": [[]]}}, "title")
    drawn = [list(line.get_ydata()) for axes in figure.axes for line in axes.lines]
    assert drawn == [[5.0, 4.0, 3.0]] and len(figure.axes) == 1  # no panel without a curve
    assert curves_figure({"none": {}}, "title") is None
    assert not math.isnan(drawn[0][0])


def test_the_panels_of_curves_have_one_range_of_whole_steps():
    both = {"train/loss": [[(0, 2.0), (19, 1.0)]], "val/knn_top1": [[(19, 80.0)]]}
    losses, scores = curves_figure({"none": both}, "title").axes
    assert losses.get_xlim() == scores.get_xlim()
    assert all(tick == int(tick) for axes in (losses, scores) for tick in axes.get_xticks())
