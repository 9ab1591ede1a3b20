from ssl_sec.figures.transfer import transfer_figure


def test_each_measure_has_a_point_for_each_set_that_it_measured():
    figure = transfer_figure({"a": {"kNN": (50.0, None), "5 labels": (40.0, 1.5)}, "b": {"kNN": (70.0, None)}})
    (axes,) = figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["a", "b"]
    shown = {str(each.get_label()): each.lines[0].get_xdata().tolist() for each in axes.containers}
    assert shown == {"kNN": [50, 70], "5 labels": [40]}
    (bars,) = axes.containers[1].lines[2]
    assert [point[0] for point in bars.get_segments()[0].tolist()] == [38.5, 41.5]


def test_the_points_of_a_single_measure_are_level_with_the_names_of_the_sets():
    (axes,) = transfer_figure({"a": {"kNN": (50.0, None)}, "b": {"kNN": (70.0, 1.0)}}).axes
    assert list(map(float, axes.lines[0].get_ydata())) == [0, 1]
