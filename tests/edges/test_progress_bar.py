import io
import logging

import pytest

from ssl_sec import progress
from ssl_sec.edges.progress_bar import progress_shown


class Stream(io.StringIO):
    def __init__(self, is_terminal):
        super().__init__()
        self.isatty = lambda: is_terminal


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_job_shows_its_progress_with_a_terminal_and_without(is_terminal, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    stream = Stream(is_terminal)
    monkeypatch.setattr("sys.stderr", stream)
    monkeypatch.setattr(progress, "LOG_EVERY_S", -1.0)
    with progress_shown("embed", 1_000) as update:
        update(250)
        update(750)
    if is_terminal:
        assert "embed: 100%" in stream.getvalue() and "1000/1000" in stream.getvalue() and not caplog.messages
    else:
        assert [message.rpartition(", ")[0] for message in caplog.messages] == ["embed: 250 of 1,000 images"]
        assert not stream.getvalue()
