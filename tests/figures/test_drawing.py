import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssl_sec.figures.drawing import arm_look, message, percentages_between


def test_percentages_are_shared_out_evenly_within_a_bin():
    assert percentages_between([0.0, 2.0, 4.0], [3, 1], [0.0, 1.0, 2.0, 3.0, 4.0]) == pytest.approx(
        [37.5, 37.5, 12.5, 12.5]
    )
    assert percentages_between([0.0, 2.0, 4.0], [3, 1], [1.0, 3.0]) == pytest.approx([50])
    assert percentages_between([0.0, 2.0], [4], np.array([-1.0, 0.0, 5.0])) == pytest.approx([0, 100])


@given(st.lists(st.integers(0, 50), min_size=1, max_size=9).filter(any), st.integers(1, 30))
def test_bins_over_the_whole_range_hold_everything(counts, num_bins):
    edges = np.linspace(-1, 3, len(counts) + 1).tolist()
    shares = percentages_between(edges, counts, np.linspace(-1, 3, num_bins + 1))
    assert shares.sum() == pytest.approx(100)
    assert (shares >= 0).all()


def test_twenty_one_arms_look_different():
    assert len({arm_look(place) for place in range(21)}) == 21
    assert len({arm_look(place)[0] for place in range(7)}) == 7


def test_a_message_figure_has_only_its_message():
    figure = message("nothing to see")
    assert [text.get_text() for text in figure.texts] == ["nothing to see"]
    assert figure.axes == []
