"""A function of many images in threads: order, errors, and what is held."""

import itertools

import pytest

from ssl_sec.data.threads import IMAGES_AT_ONCE, IMAGES_PER_TASK, map_in_threads


@pytest.mark.parametrize("count", [0, 1, IMAGES_PER_TASK, IMAGES_AT_ONCE, 2 * IMAGES_AT_ONCE + IMAGES_PER_TASK + 1])
def test_each_item_comes_with_its_result_in_order(count):
    assert list(map_in_threads(lambda item: -item, iter(range(count)))) == [(item, -item) for item in range(count)]


def test_items_are_taken_lazily():
    taken = []
    endless = (taken.append(item) or item for item in itertools.count())
    results = map_in_threads(str, endless)
    assert [next(results) for _ in range(3)] == [(0, "0"), (1, "1"), (2, "2")]
    assert len(taken) == IMAGES_AT_ONCE
    results.close()


def test_the_first_error_is_raised_after_the_results_before_its_task():
    def invert(item):
        return 1 / (item - IMAGES_PER_TASK)

    results = map_in_threads(invert, range(3 * IMAGES_PER_TASK))
    assert len(list(itertools.islice(results, IMAGES_PER_TASK))) == IMAGES_PER_TASK
    with pytest.raises(ZeroDivisionError):
        next(results)
