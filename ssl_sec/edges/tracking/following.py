"""The driver follows the metrics of a run, for the terminal and for MLflow, in a thread of its own."""

import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from io import TextIOBase
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from tqdm import tqdm

from ssl_sec.edges.folder.text import has_metrics, json_objects
from ssl_sec.edges.patience import Patience
from ssl_sec.progress import duration

# {"step": int, "metrics": {name: value}, ...}, or {"time": float, "message": str}.
Record = dict[str, Any]


@runtime_checkable
class Sink(Protocol):
    """Takes records as they arrive."""

    def __call__(self, records: Sequence[Record]) -> None:
        """Takes new records, oldest first."""
        ...

    def close(self) -> None:
        """Is called after the last record."""
        ...


class Follower:
    """Passes new lines of a JSONL file to a sink, until closed; a context manager.

    If a sink raises an error, its records stay pending, and are passed again after a while and at the end.

    Args:
        path: the file; it need not exist yet, and a resume may replace it.
        sink: takes the records.
        interval_s: time between two checks of the file.
        retry_s: time between two tries after an error of the sink.
        on_error: called with the first error of each outage.
        on_loss: called at the end with the number of records of metrics that the sink never took.
        patience: how long to wait for a sink that does not answer at the end; None waits forever.
        connects_first: whether the sink is called at the start without records, so that it can connect.
        only_new: whether the lines that the file has now are not passed, unless a resume replaces it.
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
        connects_first: bool = False,
        only_new: bool = False,
    ) -> None:
        self._path = path
        self._sink = sink
        self._interval_s = interval_s
        self._retry_s = retry_s
        self._on_error = on_error
        self._on_loss = on_loss
        self._patience = patience
        self._must_connect = connects_first
        self._offset = 0
        self._newest = b""  # the last line before the offset
        self._inode: int | None = None
        self._pending: list[Record] = []
        self._failing = False
        self._next_try = 0.0
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="follow-metrics", daemon=True)
        if only_new:
            self._new_records()

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
        self._deliver(at_the_end=False)
        while not self._closed.wait(self._interval_s):
            self._deliver(at_the_end=False)
        self._deliver(at_the_end=True)
        if lost := sum(map(has_metrics, self._pending)):
            self._on_loss(lost)
        self._sink.close()

    def _deliver(self, at_the_end: bool) -> None:
        new = self._new_records()  # may forget the pending ones
        self._pending += new
        nothing_to_do = not self._pending and not self._must_connect
        if nothing_to_do or (time.monotonic() < self._next_try and not at_the_end):
            return
        try:
            self._sink(self._pending)
        except Exception as error:
            self._next_try = time.monotonic() + self._retry_s
            if not self._failing:
                self._on_error(error)
            self._failing = True
        else:
            self._pending, self._failing, self._must_connect = [], False, False

    def _new_records(self) -> list[Record]:
        """The records of new complete lines; all records, with none pending, if a resume has replaced the file."""
        try:
            with self._path.open("rb") as file:
                inode = os.fstat(file.fileno()).st_ino
                file.seek(self._offset - len(self._newest))
                # A file that has replaced the other may have its inode, and be longer.
                if inode != self._inode or file.read(len(self._newest)) != self._newest:
                    self._inode, self._offset, self._newest, self._pending = inode, 0, b"", []
                    file.seek(0)
                content = file.read()
        except FileNotFoundError:
            return []
        whole = content[: content.rfind(b"\n") + 1]
        if whole:
            self._offset += len(whole)
            self._newest = whole[whole.rfind(b"\n", 0, -1) + 1 :]
        return json_objects(whole.decode(errors="replace"))


# Metric -> its format in a line of the log.
_LINE_METRICS = {
    "train/loss": "loss {:.4f}",
    "train/norm_mean": "norm {:.3g}",
    "train/norm_std": "± {:.2g}",
    "train/eta": "η {:.3g}",
    "train/lr": "lr {:.3g}",
    "train/images_per_s": "images/s {:.0f}",
    "val/knn_top1": "kNN % {:.2f}",
    "val/probe_top1": "probe % {:.2f}",
    "val/rankme": "RankMe {:.1f}",
    "val/top1": "held-out top-1 % {:.2f}",
    "train/top1": "training top-1 % {:.2f}",
    "val/recall_at_1": "held-out R@1 % {:.2f}",
    "train/recall_at_1": "training R@1 % {:.2f}",
    "val/verification_accuracy": "held-out verification % {:.2f}",
    "train/verification_accuracy": "training verification % {:.2f}",
    "retrieval/recall_at_1": "R@1 % {:.2f}",
    "retrieval/nmi": "NMI % {:.2f}",
    "retrieval/f1": "F1 % {:.2f}",
    "probe/loss": "loss {:.4f}",
    "probe/top1": "top-1 % {:.2f}",
    "probe/top5": "top-5 % {:.2f}",
    "finetune/top1": "top-1 % {:.2f}",
    "finetune/top5": "top-5 % {:.2f}",
}
# Metric -> its format in the bar, which has 80 columns.
_BAR_METRICS = {
    "train/loss": "loss {:#.4g}",
    "probe/loss": "loss {:#.4g}",
    "val/knn_top1": "kNN {:.1f}%",
    "val/top1": "top-1 {:.1f}%",
    "train/top1": "top-1 {:.1f}%",
    "val/recall_at_1": "R@1 {:.1f}%",
    "train/recall_at_1": "R@1 {:.1f}%",
    "val/verification_accuracy": "acc {:.1f}%",
    "train/verification_accuracy": "acc {:.1f}%",
    "probe/top1": "top-1 {:.1f}%",
    "finetune/top1": "top-1 {:.1f}%",
    "train/images_per_s": "{:.0f} images/s",
}
# Further metrics in the bar of a wider terminal.
_MORE_BAR_METRICS = {
    "train/norm_mean": "norm {:.3g}",
    "val/rankme": "RankMe {:.1f}",
    "train/lr": "lr {:.3g}",
    "train/eta": "η {:.3g}",
}
_SHORTEST_NAME, _NAME_BESIDE_BAR, _LONGEST_NAME = 4, 8, 32
_SHORTEST_BAR, _LONGEST_BAR = 4, 20


class Progress:
    """Shows the progress of a run: a bar on a terminal, lines elsewhere.

    Args:
        total: epochs or steps of the whole run.
        name: name of the run.
        unit: unit of the total, epochs or steps.
        stream: stream to write to.
        shown: time and text of messages that an earlier process has shown.
        start_step: step at which a run resumes; its earlier metrics were shown already, and do not count for its speed.
        parts: names of equally long parts of the run, each of which counts its epochs to its own end.
    """

    def __init__(
        self,
        total: int | float,
        name: str,
        unit: Literal["epoch", "step"] = "epoch",
        stream: TextIOBase | None = None,
        shown: Iterable[tuple[float, str]] = (),
        start_step: int = 0,
        parts: Sequence[str] = (),
    ) -> None:
        self._start_step = start_step
        self._parts = parts or ("",)
        self._stream: Any = stream or sys.stderr
        self._total = total
        self._unit = unit
        self._name = name
        self._bar: Any = None
        self._started = time.monotonic()
        self._first_place: float | None = None
        self._metrics: dict[str, float] = {}
        self._last_step = -1
        self._last_names: Set[str] = set()
        self._shown_messages: set[tuple[float, str]] = set(shown)

    def __call__(self, records: Sequence[Record]) -> None:
        """Shows the newest metrics; without a terminal, in a line for each record."""
        on_terminal = self._stream.isatty()
        for record in records:
            if "message" in record:
                self._show_message(record)
                continue
            if self._is_old(record):
                continue
            self._metrics |= record["metrics"]
            if not on_terminal and record["step"] >= self._start_step and self._worth_a_line(record):
                self._stream.write(f"{self._name}: {self._line(record)}\n")
        # The records of the first call may have waited for each other, so that they show no speed.
        if self._first_place is None and self._last_step >= self._start_step:
            self._first_place, self._started = self._place(), time.monotonic()
        self._stream.flush()
        if on_terminal:
            self._draw()

    def close(self) -> None:
        """Closes the bar."""
        if self._bar is not None:
            self._bar.close()

    def _is_old(self, record: Record) -> bool:
        """Whether these metrics were shown; those of one step may come in several records."""
        step, names = record["step"], record["metrics"].keys()
        if step < self._last_step or (step == self._last_step and names <= self._last_names):
            return True
        self._last_names = names | (self._last_names if step == self._last_step else set())
        self._last_step = step
        return False

    def _show_message(self, record: Record) -> None:
        message = record["time"], record["message"]
        if message not in self._shown_messages:  # a resume replaces the file
            self._shown_messages.add(message)
            tqdm.write(record["message"], file=self._stream)

    def _worth_a_line(self, record: Record) -> bool:
        place, end, _ = self._epoch()
        is_shown = "probe/epoch" not in record["metrics"] or place % 10 == 0 or place == end
        return bool(self._format(record["metrics"])) and is_shown

    def _place(self) -> float:
        """The progress of the run, in its unit."""
        if self._unit == "step":
            return float(min(self._last_step + 1, self._total))
        return float(self._metrics.get("train/epoch", self._metrics.get("probe/epoch", 0.0)))

    def _epoch(self) -> tuple[float, float, str]:
        """The epochs of the present part so far, its length, and its name for a text."""
        place, length = self._place(), self._total / len(self._parts)
        number = min(math.ceil(place / length), len(self._parts)) - 1 if place > 0 else 0
        return place - number * length, length, self._parts[number] and f" ({self._parts[number]})"

    def _format(self, metrics: Mapping[str, float], forms: Mapping[str, str] = _LINE_METRICS) -> list[str]:
        return [form.format(metrics[name]) for name, form in forms.items() if name in metrics]

    def _line(self, record: Record) -> str:
        left = self._seconds_left()
        place, end, part = self._epoch()
        in_epochs = [f"epoch {place:.2f}/{end:g}{part}"] if self._unit == "epoch" else []
        return "  ".join(
            [
                *in_epochs,
                f"step {record['step']}" if in_epochs else f"step {self._place():.0f}/{self._total}",
                *self._format(record["metrics"]),
                *([f"{duration(left)} left"] if left is not None and "train/loss" in record["metrics"] else []),
            ]
        )

    def _seconds_left(self) -> float | None:
        """The time to the end; None if it is not known."""
        if self._first_place is None:
            return None
        place = self._place()
        done = place - self._first_place
        if done <= 0 or place >= self._total:
            return None
        return (time.monotonic() - self._started) * (self._total - place) / done

    def _draw(self) -> None:
        columns = _columns(self._stream)
        form = self._bar_format(columns - 1)
        if self._bar is None:
            # With both sizes given, tqdm does not ask the terminal, which may not know them.
            self._bar = tqdm(total=self._total, bar_format=form, file=self._stream, ncols=columns, nrows=24)
        self._bar.bar_format, self._bar.ncols = form, columns
        self._bar.n = min(self._place(), self._total)
        self._bar.refresh()

    def _bar_format(self, width: int) -> str:
        """One line of at most `width` characters: the name, the bar and the main metrics.

        On a narrow terminal the last metrics are left out.
        """
        text = _joined("", self._main_parts(), width)
        # More metrics only if the name and the bar have their full width.
        beside = min(len(self._name), _LONGEST_NAME) + len(" 100%|| ") + _LONGEST_BAR
        text = _joined(text, self._format(self._metrics, _MORE_BAR_METRICS), width - beside)
        room = width - len(text) - 1
        if room < _SHORTEST_NAME:
            return _literal(text)
        beside_bar = room - len(" 100%||") - _SHORTEST_BAR
        name = _shortened(self._name, min(beside_bar if beside_bar >= _NAME_BESIDE_BAR else room, _LONGEST_NAME))
        room -= len(f"{name} 100%||")
        if room < _SHORTEST_BAR:
            return _literal(f"{name} {text}")
        bar = f"{{percentage:3.0f}}%|{{bar:{min(room, _LONGEST_BAR)}}}|"
        return f"{_literal(name)} {bar} {_literal(text)}"

    def _main_parts(self) -> list[str]:
        (place, end, part), left = self._epoch(), self._seconds_left()
        return [
            f"epoch {place:.1f}/{end:g}{part}" if self._unit == "epoch" else f"step {self._place():.0f}/{self._total}",
            *self._format(self._metrics, _BAR_METRICS),
            *([] if left is None else [f"{tqdm.format_interval(left)} left"]),
        ]


def _joined(text: str, parts: Iterable[str], width: int) -> str:
    """`text` with the parts that fit."""
    for part in parts:
        longer = f"{text}  {part}" if text else part
        text = longer if len(longer) <= width else text
    return text


def _shortened(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def _columns(stream: Any) -> int:
    """The width of a terminal; 80 if it is not known."""
    try:
        return os.get_terminal_size(stream.fileno()).columns or 80
    except (OSError, ValueError):
        return 80


def _literal(text: str) -> str:
    """Escapes text for a format string."""
    return text.replace("{", "{{").replace("}", "}}")
