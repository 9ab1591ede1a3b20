"""The driver follows a run's figures, for the terminal and for MLflow, in a thread of its own."""

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence, Set
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from tqdm import tqdm

from ssl_sec.edges.patience import Patience

# {"step": int, "metrics": {name: value}, ...}, or {"time": float, "message": str}.
Record = dict[str, Any]


@runtime_checkable
class Sink(Protocol):
    """Takes figures as they come."""

    def __call__(self, records: Sequence[Record]) -> None:
        """Takes the new records, oldest first."""
        ...

    def close(self) -> None:
        """Takes note that no more will come."""
        ...


@runtime_checkable
class Stream(Protocol):
    """A text file that may be a terminal."""

    def write(self, text: str, /) -> object:
        """Writes text."""
        ...

    def flush(self) -> object:
        """Hands on what is buffered."""
        ...

    def isatty(self) -> bool:
        """Whether it is a terminal."""
        ...


class Follower:
    """Hands the new lines of a JSONL file to a sink, until closed; a context manager.

    A sink that raises keeps its records waiting, and is asked again with all of them after a while and at the end.

    Args:
        path: the file; it need not exist yet, and may be written anew by a resume.
        sink: who gets the records.
        interval_s: between looks at the file.
        retry_s: between tries of a sink that raised.
        on_error: told of the first error of each outage; training must not stop for it.
        on_loss: told at the end of the number of records that the sink never took.
        patience: with which the end waits for a sink that may not answer; None waits as long as it takes.
        asks_at_once: whether the sink is asked with no records at first, so that it may connect to what it needs.
    """

    def __init__(
        self,
        path: Path,
        sink: Sink,
        interval_s: float = 0.5,
        retry_s: float = 5.0,
        on_error: Callable[[Exception], None] = lambda error: None,
        on_loss: Callable[[int], None] = lambda count: None,
        patience: Patience | None = None,
        asks_at_once: bool = False,
    ) -> None:
        self._path = path
        self._sink = sink
        self._interval_s = interval_s
        self._retry_s = retry_s
        self._on_error = on_error
        self._on_loss = on_loss
        self._patience = patience
        self._must_ask = asks_at_once
        self._offset = 0
        self._inode: int | None = None
        self._waiting: list[Record] = []
        self._failing = False
        self._next_try = 0.0
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="follow-figures", daemon=True)

    def __enter__(self) -> "Follower":
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._closed.set()
        if self._patience is None:
            self._thread.join()
        else:
            self._patience.join(self._thread)

    def _follow(self) -> None:
        self._hand_on(at_the_end=False)
        while not self._closed.wait(self._interval_s):
            self._hand_on(at_the_end=False)
        self._hand_on(at_the_end=True)
        if self._waiting:
            self._on_loss(len(self._waiting))
        self._sink.close()

    def _hand_on(self, at_the_end: bool) -> None:
        self._waiting += self._new_records()
        nothing_to_do = not self._waiting and not self._must_ask
        if nothing_to_do or (time.monotonic() < self._next_try and not at_the_end):
            return
        try:
            self._sink(self._waiting)
        except Exception as error:
            self._next_try = time.monotonic() + self._retry_s
            if not self._failing:
                self._on_error(error)
            self._failing = True
        else:
            self._waiting, self._failing, self._must_ask = [], False, False

    def _new_records(self) -> list[Record]:
        """The records of whole lines that were not yet read; all, where a resume has written the file anew."""
        try:
            with self._path.open("rb") as file:
                about = os.fstat(file.fileno())
                if about.st_ino != self._inode or about.st_size < self._offset:
                    self._inode, self._offset = about.st_ino, 0
                file.seek(self._offset)
                content = file.read()
        except FileNotFoundError:
            return []
        whole = content[: content.rfind(b"\n") + 1]
        try:
            records = [json.loads(line) for line in whole.splitlines()]
        except ValueError:  # written anew under the same number, and grown beyond the place where we were
            self._offset = 0
            return []
        self._offset += len(whole)
        return records


class Progress:
    """Progress of a run: a bar on a terminal, lines elsewhere.

    Args:
        total: epochs or steps of the run.
        name: of the run.
        unit: which of the two.
        stream: where it is written.
    """

    def __init__(
        self, total: int | float, name: str, unit: Literal["epoch", "step"] = "epoch", stream: Stream | None = None
    ) -> None:
        self._stream: Stream = stream or sys.stderr
        self._total = total
        self._unit = unit
        self._name = name
        self._bar: Any = None
        self._started = time.monotonic()
        self._first_place: float | None = None
        self._shown: dict[str, float] = {}
        self._last_step = -1
        self._last_names: Set[str] = set()
        self._told: set[tuple[float, str]] = set()

    def __call__(self, records: Sequence[Record]) -> None:
        """Shows the newest figures; without a terminal, a line for each report."""
        on_terminal = self._stream.isatty()
        for record in records:
            if "message" in record:
                self._tell(record)
                continue
            if self._is_old(record):
                continue
            self._shown |= record["metrics"]
            if not on_terminal and self._worth_a_line(record):
                self._stream.write(f"{self._name}: {self._line(record)}\n")
        self._stream.flush()
        if on_terminal:
            self._draw()

    def close(self) -> None:
        """Leaves the bar as it stands."""
        if self._bar is not None:
            self._bar.close()

    def _is_old(self, record: Record) -> bool:
        """Whether the step's figures were shown; those of one step may come in several records."""
        step, names = record["step"], record["metrics"].keys()
        if step < self._last_step or (step == self._last_step and names <= self._last_names):
            return True
        self._last_names = names | (self._last_names if step == self._last_step else set())
        self._last_step = step
        return False

    def _tell(self, record: Record) -> None:
        told = record["time"], record["message"]
        if told not in self._told:  # a resume writes the file anew
            self._told.add(told)
            tqdm.write(record["message"], file=self._stream)

    def _worth_a_line(self, record: Record) -> bool:
        epoch = record["metrics"].get("probe/epoch", 0)
        return bool(self._figures(record["metrics"])) and epoch % 10 == 0

    def _place(self) -> float:
        """How far the run is, in its unit."""
        if self._unit == "step":
            return float(min(self._last_step + 1, self._total))
        return float(self._shown.get("train/epoch", self._shown.get("probe/epoch", 0.0)))

    def _figures(self, metrics: dict[str, float]) -> list[str]:
        names = {
            "train/loss": ("loss", ".4f"),
            "train/norm_mean": ("norm", ".3g"),
            "train/norm_std": ("±", ".2g"),
            "train/eta": ("η", ".3g"),
            "train/lr": ("lr", ".3g"),
            "train/images_per_s": ("images/s", ".0f"),
            "val/knn_top1": ("kNN %", ".2f"),
            "val/rankme": ("RankMe", ".1f"),
            "val/recall_at_1": ("held-out R@1 %", ".2f"),
            "train/recall_at_1": ("training R@1 %", ".2f"),
            "val/verification_accuracy": ("held-out verification %", ".2f"),
            "train/verification_accuracy": ("training verification %", ".2f"),
            "retrieval/recall_at_1": ("R@1 %", ".2f"),
            "retrieval/nmi": ("NMI %", ".2f"),
            "retrieval/f1": ("F1 %", ".2f"),
            "probe/loss": ("loss", ".4f"),
            "probe/top1": ("top-1 %", ".2f"),
            "probe/top5": ("top-5 %", ".2f"),
        }
        return [f"{label} {metrics[name]:{form}}" for name, (label, form) in names.items() if name in metrics]

    def _line(self, record: Record) -> str:
        left = self._time_left()
        in_epochs = [f"epoch {self._place():.2f}/{self._total}"] if self._unit == "epoch" else []
        return "  ".join(
            [
                *in_epochs,
                f"step {record['step']}" if in_epochs else f"step {self._place():.0f}/{self._total}",
                *self._figures(record["metrics"]),
                *([left] if left and "train/loss" in record["metrics"] else []),
            ]
        )

    def _time_left(self) -> str:
        place = self._place()
        if self._first_place is None:
            self._first_place, self._started = place, time.monotonic()
            return ""
        done = place - self._first_place
        if done <= 0 or place >= self._total:
            return ""
        seconds = (time.monotonic() - self._started) * (self._total - place) / done
        return f"{_duration(seconds)} left"

    def _draw(self) -> None:
        if self._bar is None:
            place = "epoch {n:.1f}/{total}" if self._unit == "epoch" else "step {n:.0f}/{total}"
            form = "{desc} {percentage:3.0f}%|{bar:20}| " + place + " [{elapsed}<{remaining}] {postfix}"
            self._bar = tqdm(total=self._total, desc=self._name, bar_format=form, file=self._stream, dynamic_ncols=True)
        self._bar.set_postfix_str("  ".join(self._figures(self._shown)), refresh=False)
        self._bar.update(min(self._place(), self._total) - self._bar.n)
        self._bar.refresh()


def _duration(seconds: float) -> str:
    minutes, seconds_left = divmod(round(seconds), 60)
    hours, minutes_left = divmod(minutes, 60)
    return f"{hours} h {minutes_left:02d} min" if hours else f"{minutes} min {seconds_left:02d} s"
