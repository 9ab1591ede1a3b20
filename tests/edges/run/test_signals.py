import errno
import os
import signal
import time
from pathlib import Path

import pytest

from ssl_sec.edges.run import signals
from ssl_sec.edges.run.signals import announce_stop, handled, stop_requests, stopped_by_signals


def test_a_second_ctrl_c_stops_at_once(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(signals, "_SAME_SIGNAL_S", 0.0)
    with pytest.raises(KeyboardInterrupt), stopped_by_signals(tmp_path / "stop", str):
        signal.raise_signal(signal.SIGTERM)
        assert (tmp_path / "stop").exists()
        signal.raise_signal(signal.SIGINT)


def test_a_ctrl_c_that_arrives_in_the_garbage_collector_is_not_lost(capfd):
    class Collected:
        def __del__(self):
            signal.raise_signal(signal.SIGINT)

    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt), handled(signals.interrupt):
        Collected()
        time.sleep(60)
    assert time.monotonic() - start < 30  # not only after the system call
    assert capfd.readouterr() == ("", "")


def test_the_first_signal_asks_and_a_ctrl_c_that_is_not_the_same_forces(monkeypatch):
    calls = []
    with stop_requests(lambda: calls.append("ask"), lambda: calls.append("force")):
        for number in (signal.SIGINT, signal.SIGINT, signal.SIGHUP, signal.SIGTERM):  # by a terminal, and again by make
            signal.raise_signal(number)
        monkeypatch.setattr(signals, "_SAME_SIGNAL_S", 0.0)
        signal.raise_signal(signal.SIGTERM)
        assert calls == ["ask"]
        signal.raise_signal(signal.SIGINT)
    assert calls == ["ask", "force"]


def test_a_stop_before_there_is_a_run_interrupts(tmp_path: Path):
    with pytest.raises(KeyboardInterrupt), stopped_by_signals(tmp_path / "not" / "yet" / "stop", str):
        signal.raise_signal(signal.SIGTERM)


def test_a_terminal_that_has_closed_is_no_error(monkeypatch):
    def closed(descriptor, text):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "write", closed)
    announce_stop("the state is saved first")


def test_under_nohup_a_hangup_stays_ignored_and_handlers_are_put_back():
    seen: list[int] = []
    before = signal.getsignal(signal.SIGTERM), signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with handled(lambda number, frame: seen.append(number)):
            for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT):
                signal.raise_signal(number)
        assert seen == [signal.SIGTERM, signal.SIGINT]
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        with handled(lambda number, frame: seen.append(number)):
            signal.raise_signal(signal.SIGHUP)
        assert seen[2:] == [signal.SIGHUP]
        assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGHUP)) == (before[0], signal.SIG_DFL)
    finally:
        signal.signal(signal.SIGHUP, before[1])
