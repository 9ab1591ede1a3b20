import itertools
import threading
import time
from types import SimpleNamespace

import pytest

from ssl_sec.edges.patience import NoAnswer, Patience


@pytest.fixture
def silence():
    """A service that does not answer during the test."""
    over = threading.Event()
    yield over.wait
    over.set()


def test_a_call_returns_its_result_or_raises_its_error():
    patience = Patience(10.0)
    assert patience.call(lambda: 5) == 5

    def fail():
        raise ConnectionError("refused")

    with pytest.raises(ConnectionError, match="refused"):
        patience.call(fail)
    assert not patience.is_exhausted


def test_an_unresponsive_service_is_waited_for_once(silence):
    patience, calls = Patience(0.2, ping=silence), []
    started = time.monotonic()
    with pytest.raises(NoAnswer):
        patience.call(silence)
    assert 0.2 <= time.monotonic() - started < 5
    assert patience.is_exhausted
    with pytest.raises(NoAnswer):
        patience.call(lambda: calls.append(1))
    assert not calls


def test_long_work_is_waited_for_while_the_service_answers():
    done, asked = threading.Event(), []

    def answers():
        asked.append(1)
        if len(asked) == 3:
            done.set()

    patience = Patience(0.02, answers)
    assert patience.call(lambda: done.wait(30)) is True
    assert not patience.is_exhausted


def test_endless_work_is_not_waited_for_even_if_the_service_answers(silence):
    patience, asked = Patience(0.01, lambda: asked.append(1)), []
    with pytest.raises(NoAnswer):
        patience.call(silence)
    assert len(asked) == 20


def test_calls_that_fail_slowly_use_the_patience_up(monkeypatch):
    clock = SimpleNamespace(monotonic=itertools.count(0, 6).__next__)  # each call takes six seconds
    monkeypatch.setattr("ssl_sec.edges.patience.time", clock)
    patience = Patience(10.0)

    def fail():
        raise TimeoutError("database is locked")

    for _ in range(2):
        with pytest.raises(TimeoutError):
            patience.call(fail)
    with pytest.raises(NoAnswer):
        patience.call(fail)


def test_an_error_that_is_an_answer_costs_nothing_however_long_it_took(monkeypatch):
    clock = SimpleNamespace(monotonic=itertools.count(0, 100).__next__)  # as the upload of a file that is then refused
    monkeypatch.setattr("ssl_sec.edges.patience.time", clock)
    patience = Patience(10.0, is_answer=lambda error: isinstance(error, PermissionError))

    def refuse():
        raise PermissionError("403")

    with pytest.raises(PermissionError):
        patience.call(refuse)
    assert not patience.is_exhausted and patience.call(lambda: 5) == 5
