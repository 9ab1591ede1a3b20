"""The driver follows a run's figures, for the terminal and for MLflow, in a thread of its own."""

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from io import TextIOBase
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


# How figures are shown in a line of a log.
_LINE_FIGURES = {
    "train/loss": "loss {:.4f}",
    "train/norm_mean": "norm {:.3g}",
    "train/norm_std": "± {:.2g}",
    "train/eta": "η {:.3g}",
    "train/lr": "lr {:.3g}",
    "train/images_per_s": "images/s {:.0f}",
    "val/knn_top1": "kNN % {:.2f}",
    "val/rankme": "RankMe {:.1f}",
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
}
# And in the bar, where 80 columns must do.
_BAR_FIGURES = {
    "train/loss": "loss {:#.4g}",
    "probe/loss": "loss {:#.4g}",
    "val/knn_top1": "kNN {:.1f}%",
    "val/recall_at_1": "R@1 {:.1f}%",
    "train/recall_at_1": "R@1 {:.1f}%",
    "val/verification_accuracy": "acc {:.1f}%",
    "train/verification_accuracy": "acc {:.1f}%",
    "probe/top1": "top-1 {:.1f}%",
    "train/images_per_s": "{:.0f} images/s",
}
# What a wider terminal shows as well.
_MORE_BAR_FIGURES = {
    "train/norm_mean": "norm {:.3g}",
    "val/rankme": "RankMe {:.1f}",
    "train/lr": "lr {:.3g}",
    "train/eta": "η {:.3g}",
}
_SHORTEST_NAME, _NAME_BESIDE_BAR, _LONGEST_NAME = 4, 8, 32
_SHORTEST_BAR, _LONGEST_BAR = 4, 20


class Progress:
    """Progress of a run: a bar on a terminal, lines elsewhere.

    Args:
        total: epochs or steps of the run.
        name: of the run.
        unit: which of the two.
        stream: where it is written.
        said: time and text of messages that were shown before this process, and are not shown again.
    """

    def __init__(
        self,
        total: int | float,
        name: str,
        unit: Literal["epoch", "step"] = "epoch",
        stream: TextIOBase | None = None,
        said: Iterable[tuple[float, str]] = (),
    ) -> None:
        self._stream: Any = stream or sys.stderr
        self._total = total
        self._unit = unit
        self._name = name
        self._bar: Any = None
        self._started = time.monotonic()
        self._first_place: float | None = None
        self._shown: dict[str, float] = {}
        self._last_step = -1
        self._last_names: Set[str] = set()
        self._told: set[tuple[float, str]] = set(said)

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

    def _figures(self, metrics: Mapping[str, float], forms: Mapping[str, str] | None = None) -> list[str]:
        forms = _LINE_FIGURES if forms is None else forms
        return [form.format(metrics[name]) for name, form in forms.items() if name in metrics]

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
        seconds = self._seconds_left()
        return "" if seconds is None else f"{_duration(seconds)} left"

    def _seconds_left(self) -> float | None:
        """None at the start, as nothing is known, and at the end."""
        place = self._place()
        if self._first_place is None:
            self._first_place, self._started = place, time.monotonic()
            return None
        done = place - self._first_place
        if done <= 0 or place >= self._total:
            return None
        return (time.monotonic() - self._started) * (self._total - place) / done

    def _draw(self) -> None:
        columns = _columns(self._stream)
        form = self._bar_format(columns - 1)
        if self._bar is None:
            # With both sizes given, tqdm does not ask the terminal, which may say that it has none.
            self._bar = tqdm(total=self._total, bar_format=form, file=self._stream, ncols=columns, nrows=24)
        self._bar.bar_format, self._bar.ncols = form, columns
        self._bar.n = min(self._place(), self._total)
        self._bar.refresh()

    def _bar_format(self, width: int) -> str:
        """What a run is watched by, in one line of at most `width` characters; the rest of it is the name and the bar.

        Where the terminal is narrower than that, what comes last is left out.
        """
        text = _joined("", self._main_figures(), width)
        # More figures only where name and bar have all that they can take.
        beside = min(len(self._name), _LONGEST_NAME) + len(" 100%|| ") + _LONGEST_BAR
        text = _joined(text, self._figures(self._shown, _MORE_BAR_FIGURES), width - beside)
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

    def _main_figures(self) -> list[str]:
        place, left = self._place(), self._seconds_left()
        return [
            f"epoch {place:.1f}/{self._total}" if self._unit == "epoch" else f"step {place:.0f}/{self._total}",
            *self._figures(self._shown, _BAR_FIGURES),
            *([] if left is None else [f"{_clock(left)} left"]),
        ]


def _duration(seconds: float) -> str:
    minutes, seconds_left = divmod(round(seconds), 60)
    hours, minutes_left = divmod(minutes, 60)
    return f"{hours} h {minutes_left:02d} min" if hours else f"{minutes} min {seconds_left:02d} s"


def _clock(seconds: float) -> str:
    """Hours, minutes and seconds as short as they can be: 1:02:03, or 2:03."""
    minutes, seconds_left = divmod(round(seconds), 60)
    hours, minutes_left = divmod(minutes, 60)
    return f"{hours}:{minutes_left:02d}:{seconds_left:02d}" if hours else f"{minutes}:{seconds_left:02d}"


def _joined(text: str, parts: Iterable[str], width: int) -> str:
    """`text` and those of the parts that fit."""
    for part in parts:
        longer = f"{text}  {part}" if text else part
        text = longer if len(longer) <= width else text
    return text


def _shortened(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def _columns(stream: Any) -> int:
    """The width of a terminal; 80 where it does not say."""
    try:
        return os.get_terminal_size(stream.fileno()).columns or 80
    except (OSError, ValueError):
        return 80


def _literal(text: str) -> str:
    """Text in a format string."""
    return text.replace("{", "{{").replace("}", "}}")
