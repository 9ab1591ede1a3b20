from ssl_sec.figures.sweeps import arms_figure

RESULTS = {
    "none": [{"probe/top1": 80.0, "train/loss": 1.0}, {"probe/top1": 84.0}],
    "eta 0.5, width 2": [{"probe/top1": 90.0, "val/knn_top1": 70.0}],
}


def test_each_run_is_a_point_and_each_arm_a_row():
    first, second = arms_figure(RESULTS, ["probe/top1", "val/knn_top1"]).axes
    assert [label.get_text() for label in first.get_yticklabels()] == list(RESULTS)
    assert sorted(x for line in first.lines for x in line.get_xdata()[:2] if line.get_marker() == "o") == [80, 84, 90]
    assert second.get_xlabel() == "held-out kNN top-1 %"
