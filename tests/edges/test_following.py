import io
import json
import threading
from pathlib import Path

from ssl_sec.edges.following import Follower, Progress


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


class Failing:
    calls = 0

    def __call__(self, records):
        self.calls += 1
        raise ConnectionError("down")

    def close(self):
        raise AssertionError("a sink that failed is not asked again")


def line(step: int, **metrics: float) -> str:
    return json.dumps({"step": step, "metrics": metrics}) + "\n"


def test_all_whole_lines_arrive_once_and_in_order(tmp_path: Path):
    path, sink = tmp_path / "metrics.jsonl", Collected(wanted=2)
    with Follower(path, [sink], interval_s=0.01):
        path.write_text(line(0, a=1) + line(1, a=2) + '{"step": 2, "met')
        assert sink.reached.wait(10)
        with path.open("a") as file:
            file.write('rics": {"a": 3}}\n')
    assert [record["step"] for record in sink.records] == [0, 1, 2]
    assert sink.closed


def test_a_file_that_a_resume_cut_back_is_read_again(tmp_path: Path):
    path, sink = tmp_path / "metrics.jsonl", Collected(wanted=3)
    with Follower(path, [sink], interval_s=0.01):
        path.write_text(line(0, a=1) + line(1, a=2) + line(2, a=3))
        assert sink.reached.wait(10)
        path.write_text(line(0, a=1))
    assert [record["step"] for record in sink.records] == [0, 1, 2, 0]


def test_a_failing_sink_is_told_once_and_the_others_go_on(tmp_path: Path):
    path, good, bad, told = tmp_path / "metrics.jsonl", Collected(wanted=1), Failing(), []
    with Follower(path, [bad, good], interval_s=0.01, on_error=told.append):
        path.write_text(line(0, a=1))
        assert good.reached.wait(10)
        with path.open("a") as file:
            file.write(line(1, a=2))
    assert [record["step"] for record in good.records] == [0, 1]
    assert bad.calls == 1
    assert [str(error) for error in told] == ["down"]


def figures(step: int, epoch: float) -> dict:
    return {"step": step, "metrics": {"train/epoch": epoch, "train/loss": 5.25, "train/images_per_s": 1234.0}}


def test_progress_writes_a_line_for_each_report_without_a_terminal():
    stream = io.StringIO()
    progress = Progress(epochs=4, name="run", stream=stream)
    progress([figures(0, 0.5), figures(1, 1.0), {"message": "WARNING: worker 0: one image is bad"}])
    lines = stream.getvalue().splitlines()
    assert lines[0] == "run: epoch 0.50/4  step 0  loss 5.2500  images/s 1234"
    assert lines[1].startswith("run: epoch 1.00/4  step 1  loss 5.2500")
    assert lines[1].endswith("left")
    assert lines[2] == "WARNING: worker 0: one image is bad"


def test_progress_draws_one_bar_on_a_terminal():
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    stream = Terminal()
    progress = Progress(epochs=4, name="run", stream=stream)
    progress([figures(0, 1.0)])
    progress([figures(1, 2.0)])
    progress.close()
    drawn = stream.getvalue()
    assert "epoch 2.0/4" in drawn
    assert "50%" in drawn
    assert "images/s 1234" in drawn


def test_steps_taken_again_are_not_shown_again():
    stream = io.StringIO()
    progress = Progress(epochs=4, name="run", stream=stream)
    progress([figures(5, 2.0), figures(3, 1.0)])
    assert len(stream.getvalue().splitlines()) == 1
