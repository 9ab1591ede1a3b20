"""Studies whose runs are not started: only the files that they would leave are made."""

import json
from pathlib import Path

import pytest

from ssl_sec.edges.study import job
from tests.edges.study.test_plan import FILE
from tests.jobs import study


class FakeRuns:
    """Leaves the folders of finished runs; a run in `failing` ends with that code and output instead.

    Attributes:
        started: the names of the runs.
        stop_after: after this many runs a signal stops the others.
        printing: what each run prints until it is reported once.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.started: list[str] = []
        self.failing: dict[str, tuple[int, str]] = {}
        self.stop_after: int | None = None
        self.was_stopped = False
        self.printing: str | None = None

    def __call__(self, concurrent: int) -> "FakeRuns":
        return self

    def run(self, tasks, end, report) -> None:
        for task in tasks:
            if self.stop_after is not None and len(self.started) >= self.stop_after:
                self.was_stopped = True
                return
            self.started.append(task.name)
            assert task.arguments[0] == "pretrain" and f"run_name={task.name}" in task.arguments
            if self.printing is not None:
                task.log.parent.mkdir(parents=True, exist_ok=True)
                task.log.write_text(self.printing)
                report([task.name])
            if task.name in self.failing:
                task.log.parent.mkdir(parents=True, exist_ok=True)
                code, output = self.failing[task.name]
                with task.log.open("a") as log:
                    log.write(f"INFO: something\n{output}\n")
                end(task.name, code, 0.1)
                continue
            seed, is_sec = int(task.name[-1]), task.name.startswith("sec")
            top1 = 50 + 3 * seed + (1.0 + 0.1 * seed if is_sec else 0)
            for name, metrics in ((task.name, {"train/norm_mean": 2.0}), (f"{task.name}-probe", {"probe/top1": top1})):
                folder = self.folder / name
                folder.mkdir(parents=True, exist_ok=True)
                record = {"step": 0, "time": 0.0, "metrics": metrics}
                (folder / "metrics.jsonl").write_text(json.dumps(record) + "\n")
            end(task.name, 0, 1.5)


@pytest.fixture
def made(tmp_path, monkeypatch):
    """Runs a study with fake runs: overrides -> what is printed."""
    file = tmp_path / "mine.yaml"
    file.write_text(FILE)
    runs = FakeRuns(tmp_path / "runs" / "mine")
    monkeypatch.setattr(job, "Processes", runs)

    def run(*overrides):
        return study([f"study={file}", f"output_dir={tmp_path / 'runs'}", *overrides])

    return run, runs, tmp_path / "runs" / "mine"
