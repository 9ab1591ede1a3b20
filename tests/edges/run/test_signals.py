import signal
from pathlib import Path

import pytest

from ssl_sec.edges.run import signals
from ssl_sec.edges.run.signals import stopped_by_signals


def test_a_second_ctrl_c_stops_at_once(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(signals, "_SAME_SIGNAL_S", 0.0)
    with pytest.raises(KeyboardInterrupt), stopped_by_signals(tmp_path / "stop"):
        signal.raise_signal(signal.SIGTERM)
        assert (tmp_path / "stop").exists()
        signal.raise_signal(signal.SIGINT)


def test_a_stop_before_there_is_a_run_interrupts(tmp_path: Path):
    with pytest.raises(KeyboardInterrupt), stopped_by_signals(tmp_path / "not" / "yet" / "stop"):
        signal.raise_signal(signal.SIGTERM)
