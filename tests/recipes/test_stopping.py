"""Stops of an evaluation, which all workers make at the same place."""

import pytest

from ssl_sec.errors import Stopped
from ssl_sec.recipes import stopping
from ssl_sec.recipes.stopping import stop_if_requested
from ssl_sec.training.step import Request
from tests.fakes import FakeRuntime


@pytest.mark.parametrize("of_all", Request)
def test_a_worker_without_a_request_stops_with_the_others(monkeypatch, of_all):
    """Only worker 0 is asked to stop; the others would wait for it in the next collective."""
    asked = []
    monkeypatch.setattr(stopping, "max_int_over_workers", lambda request, device: asked.append(request) or int(of_all))
    runtime = FakeRuntime(1, 2)
    stop_if_requested(runtime, alone=True)
    assert not asked
    if of_all == Request.STOP:
        with pytest.raises(Stopped, match="^stopped during an evaluation$"):
            stop_if_requested(runtime)
    else:
        stop_if_requested(runtime)
    assert asked == [Request.NONE]
