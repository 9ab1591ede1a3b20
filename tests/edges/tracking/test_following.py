import contextlib
import io
import json
import os
import pty
import re
import termios
import threading
import time
from pathlib import Path

import pytest

from ssl_sec.edges.patience import Patience
from ssl_sec.edges.tracking.following import Follower, Progress
from ssl_sec.recipes.probing.config import ProbeJobConfig
from ssl_sec.settings import from_values


class Collected:
    """A sink that keeps what it gets, and says when it has `wanted` records."""

    def __init__(self, wanted: int = 10**9):
        self.records, self.wanted, self.reached, self.closed = [], wanted, threading.Event(), False

    def __call__(self, records):
        self.records += records
        if len(self.records) >= self.wanted:
            self.reached.set()

    def close(self):
        self.closed = True


class Away(Collected):
    """A sink that fails its first `outages` calls."""

    def __init__(self, outages: int, wanted: int):
        super().__init__(wanted)
        self.outages, self.calls = outages, 0

    def __call__(self, records):
        self.calls += 1
        if self.calls <= self.outages:
            raise ConnectionError(f"down {self.calls}")
        super().__call__(records)


def line(step: int, **metrics: float) -> str:
    return json.dumps({"step": step, "metrics": metrics}) + "\n"


def test_all_complete_lines_arrive_once_in_order(tmp_path: Path):
    path, sink = tmp_path / "metrics.jsonl", Collected(wanted=2)
    with Follower(path, sink, interval_s=0.01):
        path.write_text(line(0, a=1) + line(1, a=2) + '{"step": 2, "met')
        assert sink.reached.wait(10)
        with path.open("a") as file:
            file.write('rics": {"a": 3}}\n')
    assert [record["step"] for record in sink.records] == [0, 1, 2]
    assert sink.closed


def test_a_file_truncated_by_a_resume_is_read_again(tmp_path: Path):
    path, sink = tmp_path / "metrics.jsonl", Collected(wanted=3)
    with Follower(path, sink, interval_s=0.01):
        path.write_text(line(0, a=1) + line(1, a=2) + line(2, a=3))
        assert sink.reached.wait(10)
        path.write_text(line(0, a=1))
    assert [record["step"] for record in sink.records] == [0, 1, 2, 0]


def test_a_rewritten_file_is_read_from_its_start(tmp_path: Path):
    """A resume replaces the file, which may be longer than the old one at the next read."""
    path, sink = tmp_path / "metrics.jsonl", Collected(wanted=2)
    with Follower(path, sink, interval_s=0.01):
        path.write_text(line(0, a=1) + line(1, a=2))
        assert sink.reached.wait(10)
        sink.reached.clear()
        sink.wanted = 5
        (tmp_path / "new").write_text(line(0, a=1.25) + line(1, a=2.25) + line(2, a=3.25))
        (tmp_path / "new").replace(path)
        assert sink.reached.wait(10)
    assert [record["metrics"]["a"] for record in sink.records] == [1, 2, 1.25, 2.25, 3.25]


def test_results_of_a_shorter_run_are_not_shown_as_those_of_its_extension(tmp_path: Path):
    path, stream = tmp_path / "metrics.jsonl", io.StringIO()
    path.write_text(line(19, **{"train/loss": 2.5}) + line(20, **{"retrieval/nmi": 8.5}))
    progress = Progress(total=30, name="run", unit="step", stream=stream, start_step=20)
    with Follower(path, progress, only_new=True):
        (tmp_path / "new").write_text(line(19, **{"train/loss": 2.5}))
        (tmp_path / "new").replace(path)
        with path.open("a") as file:
            file.write(line(20, **{"train/loss": 2.25}) + line(30, **{"retrieval/nmi": 9.5}))
    assert stream.getvalue().splitlines() == ["run: step 21/30  loss 2.2500", "run: step 30/30  NMI % 9.50"]
    path.write_text("")
    with Follower(path, sink := Collected(wanted=1), only_new=True):
        path.write_text(line(0, a=1))
    assert [record["step"] for record in sink.records] == [0]


def test_a_position_inside_a_line_is_detected(tmp_path: Path):
    """Rewritten with the same inode, as some file systems do."""
    path, sink = tmp_path / "metrics.jsonl", Collected(wanted=1)
    with Follower(path, sink, interval_s=0.01):
        path.write_text(line(0, a=1))
        assert sink.reached.wait(10)
        sink.reached.clear()
        sink.wanted = 3
        path.write_text(line(1234567, b=1) + line(1234568, b=2))
        assert sink.reached.wait(10)
    assert [record["step"] for record in sink.records] == [0, 1234567, 1234568]


def test_a_damaged_line_is_skipped(tmp_path: Path):
    """As left by two machines that append to one file."""
    path, sink = tmp_path / "metrics.jsonl", Collected(wanted=2)
    with Follower(path, sink, interval_s=0.01):
        path.write_text(line(0, a=1) + '{"step": 1, "me{"step": 1, "metrics": {}}\n' + line(2, a=3))
        assert sink.reached.wait(10)
        sink.reached.clear()
        sink.wanted = 3
        with path.open("a") as file:
            file.write(line(3, a=4))
        assert sink.reached.wait(10)
    assert [record["step"] for record in sink.records] == [0, 2, 3]


def test_a_sink_gets_all_records_after_an_outage(tmp_path: Path):
    path, sink, errors, lost = tmp_path / "metrics.jsonl", Away(outages=3, wanted=2), [], []
    follower = Follower(path, sink, interval_s=0.01, retry_s=0.02, on_error=errors.append, on_loss=lost.append)
    with follower:
        path.write_text(line(0, a=1))
        with path.open("a") as file:
            file.write(line(1, a=2))
        assert sink.reached.wait(10)
    assert [record["step"] for record in sink.records] == [0, 1]
    assert [str(error) for error in errors] == ["down 1"]  # once an outage
    assert lost == []
    assert sink.closed


def test_a_lasting_outage_is_retried_at_the_end_and_the_loss_reported(tmp_path: Path):
    path, sink, errors, lost = tmp_path / "metrics.jsonl", Away(outages=10**9, wanted=1), [], []
    path.write_text(line(0, a=1) + line(1, a=2))
    follower = Follower(path, sink, interval_s=0.01, retry_s=60.0, on_error=errors.append, on_loss=lost.append)
    with follower:
        while not errors:
            time.sleep(0.01)
    assert sink.calls == 2
    assert len(errors) == 1
    assert lost == [2]


def test_records_that_a_restart_repeats_and_messages_are_not_counted_as_lost(tmp_path: Path):
    path, sink, lost = tmp_path / "metrics.jsonl", Away(outages=10**9, wanted=1), []
    path.write_text(line(0, a=1) + line(1, a=2))
    follower = Follower(path, sink, interval_s=0.01, retry_s=0.01, on_loss=lost.append)
    with follower:
        while sink.calls < 2:
            time.sleep(0.01)
        (tmp_path / "new").write_text(line(0, a=1) + json.dumps({"time": 1.0, "message": "INFO: again"}) + "\n")
        (tmp_path / "new").replace(path)
    assert lost == [1]


def test_a_sink_is_connected_before_there_are_records(tmp_path: Path):
    sink = Away(outages=1, wanted=0)
    with Follower(tmp_path / "metrics.jsonl", sink, interval_s=0.01, retry_s=0.01, connects_first=True):
        assert sink.reached.wait(10)
    assert (sink.calls, sink.records) == (2, [])


def test_an_unresponsive_sink_is_abandoned_at_the_end(tmp_path: Path):
    path, entered, over = tmp_path / "metrics.jsonl", threading.Event(), threading.Event()

    class Silent(Collected):
        def __call__(self, records):
            entered.set()
            over.wait(60)

    path.write_text(line(0, a=1))
    patience = Patience(0.1)
    with Follower(path, Silent(), interval_s=0.01, patience=patience):
        assert entered.wait(10)
    assert patience.is_exhausted and not over.is_set()
    over.set()


def report(step: int, epoch: float) -> dict:
    return {"step": step, "metrics": {"train/epoch": epoch, "train/loss": 5.25, "train/images_per_s": 1234.0}}


def test_progress_writes_a_line_for_each_report_without_a_terminal():
    stream = io.StringIO()
    progress = Progress(total=4, name="run", stream=stream)
    records = [report(0, 0.5), report(1, 1.0), {"time": 1.5, "message": "WARNING: worker 0: one image is bad"}]
    progress(records)
    progress(records)  # a resume rewrites the file
    lines = stream.getvalue().splitlines()
    assert lines[0] == "run: epoch 0.50/4  step 0  loss 5.2500  images/s 1234"
    assert lines[1] == "run: epoch 1.00/4  step 1  loss 5.2500  images/s 1234"  # it came with the first: no time left
    assert lines[2:] == ["WARNING: worker 0: one image is bad"]


def test_a_resumed_run_shows_its_new_metrics_and_their_speed_alone(monkeypatch: pytest.MonkeyPatch):
    now = [100.0]
    monkeypatch.setattr("ssl_sec.edges.tracking.following.time.monotonic", lambda: now[0])
    stream = io.StringIO()
    progress = Progress(total=4, name="run", stream=stream, start_step=20)
    progress([report(0, 0.5), report(10, 1.0)])  # of the earlier process
    for step, epoch in ((20, 2.0), (30, 2.5)):
        now[0] += 60
        progress([report(step, epoch)])
    first, second = stream.getvalue().splitlines()
    assert first == "run: epoch 2.00/4  step 20  loss 5.2500  images/s 1234"
    assert second.endswith("3 min 00 s left")  # half an epoch took a minute


def test_each_training_of_a_probe_is_named_and_counted_to_its_own_end():
    config = from_values(ProbeJobConfig, {"run": "x", "probe": {"epochs": 12}, "runtime": {"name": "local"}})
    stream = io.StringIO()
    progress = Progress(config.length, "probe", stream=stream, parts=config.parts)
    for epoch in range(24):
        progress([{"step": epoch, "metrics": {"probe/loss": 1.0, "probe/epoch": epoch + 1}}])
    progress([{"step": 24, "metrics": {"probe/top1": 50.0}}])
    assert stream.getvalue().splitlines() == [
        "probe: epoch 10.00/12 (choosing the rate)  step 9  loss 1.0000",
        "probe: epoch 12.00/12 (choosing the rate)  step 11  loss 1.0000",
        "probe: epoch 10.00/12 (final)  step 21  loss 1.0000",
        "probe: epoch 12.00/12 (final)  step 23  loss 1.0000",
        "probe: epoch 12.00/12 (final)  step 24  top-1 % 50.00",
    ]


def test_a_report_without_a_figure_that_is_shown_is_no_line():
    stream = io.StringIO()
    progress = Progress(total=4, name="run", stream=stream)
    progress([{"step": 7, "metrics": {"train/verification_accuracy": 81.25, "train/verification_eer": 20.0}}])
    progress([{"step": 8, "metrics": {"face/lfw_norm_std": 3.0}}])
    assert stream.getvalue() == "run: epoch 0.00/4  step 7  training verification % 81.25\n"


def test_progress_draws_one_bar_on_a_terminal():
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    stream = Terminal()
    progress = Progress(total=4, name="run", stream=stream)
    progress([report(0, 1.0)])
    progress([report(1, 2.0)])
    progress.close()
    drawn = stream.getvalue()
    assert "epoch 2.0/4" in drawn
    assert "50%" in drawn
    assert "1234 images/s" in drawn


def everything_on(screen: int) -> str:
    """The output on a closed terminal; Linux signals its end by an error."""
    drawn = b""
    with contextlib.suppress(OSError):
        while part := os.read(screen, 65536):
            drawn += part
    os.close(screen)
    return drawn.decode()


LONGEST = {
    "train/loss": 123.456789,
    "train/images_per_s": 123456.7,
    "train/norm_mean": 12345.678,
    "train/norm_std": 1.0,
    "train/eta": 0.123456,
    "train/lr": 0.00012345,
    "train/epoch": 999.9,
}


@pytest.mark.parametrize("columns", [0, 40, 60, 80, 100, 200])  # 0: the terminal does not say
@pytest.mark.parametrize(
    ("unit", "score", "expected"),
    [
        ("epoch", {"val/knn_top1": 100.0, "val/rankme": 1234.5}, ["epoch 999.9/1000", "kNN 100.0%"]),
        ("step", {"val/recall_at_1": 100.0}, ["step 999991/1000000", "R@1 100.0%"]),
        ("epoch", {"val/verification_accuracy": 100.0}, ["epoch 999.9/1000", "acc 100.0%"]),
    ],
)
def test_the_bar_never_wraps_and_shows_the_main_metrics_in_80_columns(columns, unit, score, expected):
    """On its own terminal, with a long name and the longest values."""
    screen, terminal = pty.openpty()
    termios.tcsetwinsize(terminal, (24, columns))
    with os.fdopen(terminal, "w") as stream:
        total = 1000 if unit == "epoch" else 1_000_000
        progress = Progress(total, "cifar10-resnet50-imagenet-sec-{s0}-20261122-081724", unit, stream)
        progress([{"step": 0, "metrics": {**LONGEST, "train/epoch": 0.1}}])
        progress._started -= 40.0 if unit == "epoch" else 360_000.0  # as if that had taken long
        progress([{"step": 999_990, "metrics": {**LONGEST, "train/images_per_s": 123456.7}}])
        progress([{"step": 999_990, "metrics": score}])
        progress.close()
    lines = [line for line in re.split(r"[\r\n]", re.sub(r"\x1b\[\w+", "", everything_on(screen))) if line]
    assert max(map(len, lines)) < (columns or 80)
    shown = lines[-1].rstrip()
    assert shown.isprintable()
    if columns == 0 or columns >= 80:
        for figure in (*expected, "loss 123.5", "123457 images/s"):
            assert figure in shown
        assert re.search(r"\d:\d\d left", shown)
    if columns == 200:
        assert shown.startswith("cifar10-resnet50-imagenet-sec-{…")
        assert "norm 1.23e+04" in shown


def test_the_name_and_the_bar_come_before_more_metrics():
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    stream = Terminal()
    progress = Progress(total=100, name="cifar10-resnet18-sec-s0", stream=stream)
    metrics = {"train/epoch": 4.5, "train/loss": 5.25, "train/images_per_s": 1234.0, "train/norm_mean": 4.5}
    progress([{"step": 0, "metrics": metrics}])
    progress.close()
    line = stream.getvalue().split("\r")[-1].strip()
    assert re.fullmatch(r"cifar10-resnet18-sec-s0 +4%\|.+\| epoch 4.5/100  loss 5.250  1234 images/s", line)


def test_messages_of_an_earlier_process_are_not_shown_again():
    stream = io.StringIO()
    progress = Progress(total=4, name="run", stream=stream, shown=[(1.5, "INFO: loading digits")])
    progress([{"time": 1.5, "message": "INFO: loading digits"}, {"time": 2.5, "message": "INFO: loading digits"}])
    assert stream.getvalue() == "INFO: loading digits\n"


def test_repeated_steps_are_not_shown_again():
    stream = io.StringIO()
    progress = Progress(total=4, name="run", stream=stream)
    progress([report(5, 2.0), report(3, 1.0), report(5, 2.0)])
    assert len(stream.getvalue().splitlines()) == 1
    progress([{"step": 5, "metrics": {"val/knn_top1": 50.0}}])
    assert "kNN % 50.00" in stream.getvalue().splitlines()[1]
