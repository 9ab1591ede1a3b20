"""Limits how long a job waits for a service that may not answer.

MLflow retries by itself if it cannot reach its store: a database that is locked or cannot be opened blocks a call for
minutes. So calls run in threads of their own, and a call without an answer is abandoned: its thread ends with the
process.
"""

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")

# Total time for calls that fail or get no answer.
ANSWER_S = 60.0
# While the service answers pings, a call may take this many times as long.
_MAX_PINGS = 20


class NoAnswer(Exception):
    """The service did not answer in time."""


class Patience:
    """The time that a job will still wait for a service.

    Args:
        limit_s: total time for calls that fail or get no answer; other calls cost nothing.
        ping: a small request to the service, made during a long call; None if there is none.
        is_answer: whether an error is an answer of the service, which then can be reached.
    """

    def __init__(
        self,
        limit_s: float,
        ping: Callable[[], object] | None = None,
        is_answer: Callable[[BaseException], bool] = lambda error: False,
    ) -> None:
        self.limit_s = limit_s
        self._left_s = limit_s
        self._ping = ping
        self._is_answer = is_answer

    @property
    def is_exhausted(self) -> bool:
        """Whether the service is no longer called."""
        return self._left_s <= 0

    def join(self, thread: threading.Thread) -> bool:
        """Waits for a thread that calls the service; returns whether it ended."""
        for _ in range(_MAX_PINGS):
            wait_s = max(self._left_s, 0) / (1 if self._ping is None else 2)
            thread.join(wait_s)
            if not thread.is_alive():
                return True
            if self._ping is None or not _answered(self._ping, wait_s):
                break
        self._left_s = 0.0
        return False

    def call(self, do: Callable[[], T]) -> T:
        """Calls the service.

        Raises:
            NoAnswer: if it did not answer in time, now or before.
            Exception: whatever `do` raises.
        """
        if self.is_exhausted:
            raise NoAnswer(f"no answer for {self.limit_s:g} s")
        call = Call(do)
        started = time.monotonic()
        call.start()
        if not self.join(call):
            raise NoAnswer(f"no answer for {self.limit_s:g} s")
        if call.error is not None:
            if not self._is_answer(call.error):
                self._left_s -= time.monotonic() - started
            raise call.error
        return call.results[0]


def _answered(ask: Callable[[], object], within_s: float) -> bool:
    question = Call(ask)
    question.start()
    question.join(within_s)
    return not question.is_alive() and question.error is None


class Call(threading.Thread, Generic[T]):
    """A call in its own thread, which ends with the process; when it has ended, it holds the result or the error."""

    def __init__(self, do: Callable[[], T]) -> None:
        super().__init__(daemon=True)
        self._do = do
        self.results: list[T] = []
        self.error: BaseException | None = None

    def run(self) -> None:
        """Makes the call."""
        try:
            self.results.append(self._do())
        except BaseException as error:
            self.error = error
