"""How long a job waits for a service that may not answer.

MLflow tries again by itself where it cannot reach its store: a database that is locked or cannot be opened holds a call
back for minutes. So calls run in threads of their own, and one that is not answered is left behind: the thread ends
with the process.
"""

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")

# In all, for calls that fail or are not answered.
ANSWER_S = 60.0
# A call that is at work while the service answers is waited for this many times as long.
_MOST_LOOKS = 20


class NoAnswer(Exception):
    """The service did not answer in time."""


class Patience:
    """The time that a job still waits for a service.

    Args:
        limit_s: in all, for calls that fail or are not answered; a call that does its work costs nothing.
        answers: asks the service something small, while a call takes long; None if there is nothing to ask.
    """

    def __init__(self, limit_s: float, answers: Callable[[], object] | None = None) -> None:
        self.limit_s = limit_s
        self._left_s = limit_s
        self._answers = answers

    @property
    def is_over(self) -> bool:
        """Whether the service is asked no more."""
        return self._left_s <= 0

    def join(self, thread: threading.Thread) -> bool:
        """Waits for a thread that calls the service; returns whether it ended."""
        for _ in range(_MOST_LOOKS):
            wait_s = max(self._left_s, 0) / (1 if self._answers is None else 2)
            thread.join(wait_s)
            if not thread.is_alive():
                return True
            if self._answers is None or not _answered(self._answers, wait_s):
                break
        self._left_s = 0.0
        return False

    def call(self, do: Callable[[], T]) -> T:
        """Calls the service.

        Raises:
            NoAnswer: if it did not answer in time, now or before.
            Exception: whatever `do` raises.
        """
        if self.is_over:
            raise NoAnswer(f"no answer for {self.limit_s:g} s")
        call = Call(do)
        started = time.monotonic()
        call.start()
        if not self.join(call):
            raise NoAnswer(f"no answer for {self.limit_s:g} s")
        if call.error is not None:
            self._left_s -= time.monotonic() - started
            raise call.error
        return call.results[0]


def _answered(ask: Callable[[], object], within_s: float) -> bool:
    question = Call(ask)
    question.start()
    question.join(within_s)
    return not question.is_alive() and question.error is None


class Call(threading.Thread, Generic[T]):
    """A call in a thread of its own, which ends with the process; once it has ended, its result or its error."""

    def __init__(self, do: Callable[[], T]) -> None:
        super().__init__(daemon=True)
        self._do = do
        self.results: list[T] = []
        self.error: BaseException | None = None

    def run(self) -> None:
        """Calls."""
        try:
            self.results.append(self._do())
        except BaseException as error:
            self.error = error
