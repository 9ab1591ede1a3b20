import contextlib
import itertools
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from benchmarks import measure, simclr, throughput
from benchmarks.campaign import __main__ as campaign
from benchmarks.campaign import parts, recipes, running, training
from benchmarks.campaign.data import prepare_data
from benchmarks.campaign.running import Part
from benchmarks.campaign.sheet import Plan, Sheet
from ssl_sec.edges.folder.folder import RunFolder
from ssl_sec.errors import Stopped
from tests.fakes import FakeClock
from tests.gpu.packed import missing_modules

ROOT = Path(__file__).parents[2]

# Parts are forked from the test's process, which has threads of hypothesis and torch; the parts do not use them.
pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


@pytest.fixture
def plan(tmp_path):
    made = Plan(output=str(tmp_path / "campaign"), checkpoints=str(tmp_path / "runs"), rehearsal=True)
    running.set_deadline(made.folder, minutes=10)
    return made


def counting(name, log, then=lambda sheet: None, limit_s=60.0):
    def measure(sheet):
        with log.open("a") as file:
            file.write(name)
        then(sheet)

    return Part(name=name, limit_s=limit_s, measure=measure)


def states(plan):
    return {path.stem: json.loads(path.read_text())["state"] for path in sorted(plan.folder.glob("results/*.json"))}


def until(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_finished_parts_are_skipped(plan, tmp_path):
    log = tmp_path / "log"
    some = [counting("a", log, lambda sheet: sheet.write(figure=1)), counting("b", log)]
    assert running.work(plan, some) and running.work(plan, some)
    assert log.read_text() == "ab"
    assert running.work(plan, some, again=("b",))
    assert log.read_text() == "abb"
    assert Sheet(plan, "a").read()["figure"] == 1
    assert json.loads((plan.folder / "status.json").read_text())["parts"] == {"a": "done", "b": "done"}


def test_a_failed_part_keeps_its_reason_and_the_others_run(plan, tmp_path):
    def fails(sheet):
        sheet.write(rows=[1])
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")

    some = [
        counting("a", tmp_path / "log", fails),
        counting("b", tmp_path / "log", lambda sheet: os.kill(os.getpid(), signal.SIGKILL)),
        counting("c", tmp_path / "log"),
    ]
    running.work(plan, some)
    assert states(plan) == {"a": "failed", "b": "failed", "c": "done"}
    assert Sheet(plan, "a").read()["rows"] == [1]
    assert Sheet(plan, "a").read()["error"].startswith("OutOfMemoryError: CUDA out of memory")
    assert Sheet(plan, "b").read()["error"] == "its process ended with SIGKILL"


def test_the_time_of_a_training_that_failed_counts_where_it_continues(plan, tmp_path):
    def fails(sheet):
        sheet.write(train_s=sheet.read().get("train_s", 0.0) + 5.0)
        raise torch.OutOfMemoryError("CUDA out of memory")

    for again in ((), ("a",)):
        running.work(plan, [counting("a", tmp_path / "log", fails)], again)
    assert Sheet(plan, "a").read()["train_s"] == 10.0


def test_a_part_is_stopped_at_its_limit_and_the_next_one_runs(plan, tmp_path):
    some = [counting("a", tmp_path / "log", lambda sheet: time.sleep(60), limit_s=0.3), counting("b", tmp_path / "log")]
    running.work(plan, some)
    assert states(plan) == {"a": "failed", "b": "done"}
    assert Sheet(plan, "a").read()["error"] == "exceeded its limit of 0 s"


def test_a_part_is_stopped_at_the_deadline_and_run_by_the_next_call(plan, tmp_path):
    log = tmp_path / "log"

    def outlasts_the_deadline(sheet):
        running.set_deadline(plan.folder, minutes=0)
        time.sleep(60)

    running.set_deadline(plan.folder, minutes=10)
    running.work(plan, [counting("a", log, outlasts_the_deadline), counting("b", log)])
    assert states(plan) == {"a": "stopped"}
    running.set_deadline(plan.folder, minutes=10)
    running.work(plan, [counting("a", log), counting("b", log)])
    assert states(plan) == {"a": "done", "b": "done"}
    assert log.read_text() == "aab"


def test_a_part_dies_with_its_worker_and_another_call_continues(plan, tmp_path):
    log, pid_file = tmp_path / "log", tmp_path / "pid"

    def waits(sheet):
        pid_file.write_text(str(os.getpid()))
        time.sleep(60)

    worker = multiprocessing.get_context("fork").Process(target=running.work, args=(plan, [counting("a", log, waits)]))
    worker.start()
    until(lambda: pid_file.exists() and pid_file.read_text())
    assert running.has_worker(plan.folder)
    assert not running.work(plan, [counting("a", log)])  # refused: another one is running
    worker.kill()
    worker.join()
    pid = int(pid_file.read_text())
    until(lambda: not Path(f"/proc/{pid}").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text().split()[2])
    assert states(plan) == {"a": "running"} and not running.has_worker(plan.folder)
    running.work(plan, [counting("a", log)])
    assert states(plan) == {"a": "done"} and log.read_text() == "aa"


def test_a_call_follows_the_running_worker(plan, capsys):
    with running.lock_folder(plan.folder):
        (plan.folder / "log.txt").write_text("before\n")
        writer = threading.Timer(0.3, lambda: (plan.folder / "log.txt").open("a").write("after\n"))
        writer.start()
        assert running.follow(plan, ["false"], {}, time.time() + 1.0) == 0
    assert capsys.readouterr().out == "following the running worker\nafter\n"


def test_a_call_starts_a_worker_and_reports_its_death(plan, capsys):
    command = [sys.executable, "-c", "import sys; print('hello', flush=True); sys.exit(3)"]
    assert running.follow(plan, command, dict(os.environ), time.time() + 30) == 1
    assert capsys.readouterr().out == "hello\n"


def test_a_call_leaves_the_end_of_a_running_worker_as_it_is(plan, monkeypatch, capsys):
    plan.save()
    before = running.read_deadline(plan.folder)
    command = ["campaign", "--rehearse", "--output", str(plan.folder), "--minutes", "99", "--follow", "0"]
    monkeypatch.setattr(sys, "argv", command)
    with running.lock_folder(plan.folder):
        assert campaign.main() == 0
    assert running.read_deadline(plan.folder) == before
    assert capsys.readouterr().out.startswith("following the running worker")


def test_a_folder_has_one_campaign(plan):
    plan.save()
    plan.save()
    with pytest.raises(SystemExit, match="found a rehearsal"):
        Plan(output=plan.output, checkpoints=plan.checkpoints).save()


def rehearsal_with_images(folder):
    output = folder / "campaign"
    data = prepare_data(None, output)
    return Plan(output=str(output), checkpoints=str(folder / "runs"), data=data, rehearsal=True)


@pytest.mark.slow
def test_a_stopped_training_run_resumes_from_its_checkpoint_and_is_probed(tmp_path, monkeypatch):
    plan = rehearsal_with_images(tmp_path)
    monkeypatch.setitem(parts.TINY.training, "epochs", 8)
    monkeypatch.setitem(parts.TINY.training, "monitor", {"every_epochs": 8, "max_images": 40})
    some = parts.select_parts(plan, ["train-resnet18-sec-s0"])
    folder = RunFolder(tmp_path / "runs" / some[0].name)
    running.set_deadline(plan.folder, minutes=10)
    append, numbers = RunFolder.append_record, itertools.count(1)

    def append_and_stop(self, record):
        append(self, record)
        if next(numbers) == 3:
            running.set_deadline(plan.folder, minutes=0)
            until(self.stop_path.exists)

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "append_record", append_and_stop)  # in the process of the part, which is forked
        running.work(plan, some)
    assert states(plan) == {some[0].name: "stopped"} and folder.outcome() == "stopped"
    taken = folder.newest_step()
    assert taken is not None and 0 < taken < 16
    seconds = Sheet(plan, some[0].name).read()["train_s"]
    running.set_deadline(plan.folder, minutes=10)
    running.work(plan, some)
    found = Sheet(plan, some[0].name).read()
    assert found["state"] == "done", found
    assert found["train_s"] > seconds > 0
    assert found["steps"] == 16 and len(found["curves"]["rows"]) == 8
    assert 0 <= found["probe/top1"] <= 100 and found["recipe"] == "cifar10_sec_100"
    assert 0 <= found["probe/logistic_top1"] <= 100
    assert folder.encoder_path.exists() and not folder.checkpoints_path.exists()
    assert [worker["rank"] for worker in folder.workers()] == [0, 0]


def test_a_run_that_began_with_other_settings_starts_again(tmp_path, monkeypatch):
    """As after a change of the recipes: its epochs would else be partly of the one, partly of the other."""
    plan = rehearsal_with_images(tmp_path)
    sheet = Sheet(plan, "train-resnet18-sec-s0")
    folder, _ = training.folders_of(sheet)
    rates = iter((0.1, 0.1, 0.2, 0.2))
    work, begun = training.work, []

    def stop_at_first(job, values, run_folder, worker):
        begun.append((values["optimiser"]["learning_rate"], run_folder.newest_step()))
        if len(begun) in (1, 3):
            run_folder.stop_path.touch()
        work(job, values, run_folder, worker)

    monkeypatch.setattr(training, "work", stop_at_first)
    for number, rate in enumerate(rates):
        changes = {"epochs": 2, "optimiser.learning_rate": rate, "log_every_steps": 1 + number}
        with contextlib.suppress(Stopped):
            training.train(sheet, parts.TINY, "resnet18-sec", 0, changes)
    assert begun == [(0.1, None), (0.1, 1), (0.2, None), (0.2, 1)]
    assert folder.outcome() == "finished" and sheet.read()["changes"]["optimiser.learning_rate"] == 0.2


def test_a_training_run_that_is_done_runs_again_from_its_start(tmp_path):
    plan = rehearsal_with_images(tmp_path)
    some = parts.select_parts(plan, ["search-resnet18-sec-0"])
    sheet = Sheet(plan, some[0].name)
    running.set_deadline(plan.folder, minutes=10)
    for again in ((), (some[0].name,)):
        assert running.work(plan, some, again)
        assert sheet.read()["state"] == "done" and sheet.read()["steps"] > 0, sheet.read()
        left = sheet.run_paths[0] / "of_the_first"
        assert not left.exists()
        left.touch()


class FakeContender:
    """A contender without a network, whose steps take a millisecond of a clock."""

    def __init__(self, clock, fails_at=None):
        self._clock, self._fails_at, self._taken = clock, fails_at, 0

    def ready(self):
        pass

    def steps(self, count):
        self._taken += count
        if self._fails_at is not None and self._taken > self._fails_at:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        self._clock.sleep(0.001 * count)

    def close(self):
        pass


def test_a_contender_that_runs_out_of_memory_does_not_stop_the_others(monkeypatch):
    def never(setting, images):
        raise torch.OutOfMemoryError("CUDA out of memory")

    clock = FakeClock()
    for module in (measure, throughput):
        monkeypatch.setattr(module, "time", clock)
    made = {
        "ours": lambda *_: FakeContender(clock),
        "never": never,
        "later": lambda *_: FakeContender(clock, fails_at=3),
        "lightly": lambda *_: FakeContender(clock),
    }
    monkeypatch.setattr(throughput, "list_contenders", lambda device: made)
    monkeypatch.setitem(throughput.SECONDS_PER_TURN, "cpu", 0.002)
    monkeypatch.setitem(measure.PEAK_SIZES, "cpu", (128, 1))
    setting = simclr.Setting(encoder="resnet18", batch=8, precision="float32", width=0.125)
    written = []
    rows = throughput.measure(
        setting,
        simclr.draw_images(10, 16),
        torch.device("cpu"),
        rounds=2,
        on_rows=lambda rows: written.append(json.loads(json.dumps(rows))),
    )
    assert "images_per_s" in written[0][0] and written[-1] == rows
    assert [row["contender"] for row in rows] == [*made]
    assert [row.get("error") for row in rows] == [None, "out of memory", "out of memory", None]
    assert [*rows[0]["times_as_fast_as"]] == ["lightly"]
    assert throughput.format_row(rows[1])["images/s"] == "out of memory"
    assert len(throughput.draw(rows).axes[0].lines) == 2


def test_training_runs_use_the_papers_recipe(tmp_path):
    plan = Plan(output=str(tmp_path), checkpoints=str(tmp_path), data={"name": "folder", "root": "images"})
    values = training.make_run_values(plan, parts.FULL, "resnet50-sec", seed=2)
    values_of_recipe = recipes.load_recipes()["resnet50-sec"]
    changed = {"seed": 2, "output_dir": str(tmp_path), "data": plan.data, "check_images": 0}
    assert values == values_of_recipe | changed
    names = [part.name for part in parts.list_parts(plan)]
    assert len(set(names)) == len(names)
    assert names[:9] == [
        *("speed-resnet50-256", "speed-resnet18-256", "gpu-tests"),
        *("cells-confirm", "cells-confirm_rates", "cells-when_cpu", "cells-sec_cpu"),
        *("train-resnet18-ntxent-s0", "train-resnet18-sec-s0"),
    ]
    assert names[13:24] == [
        *("train-resnet50-ntxent-s0", "train-resnet50-sec-s0"),
        *("train-resnet50-ntxent_supcontrast-s0", "train-resnet50-sec_supcontrast-s0"),
        *("train-resnet50-ntxent_supcontrast_warm-s0", "train-resnet50-sec_supcontrast_warm-s0"),
        *("train-resnet18-ntxent_tuned-s0", "train-resnet18-sec_tuned-s0", "train-resnet18-dcl_tuned-s0"),
        *("speed-resnet50-1024", "speed-resnet18-1024"),
    ]
    assert sum(name.startswith("train-resnet18-") for name in names) == 15
    studied = names[names.index("evaluation") + 1 :]
    assert studied[:2] == ["search-resnet18-none-0", "search-resnet18-sec-0"]
    assert studied[12:29] == [
        *(f"study-resnet18-{arm}-s{seed}" for seed in range(8) for arm in ("none", "sec")),
        "long-resnet18",
    ]
    assert len(studied) == 2 * 7 * (6 + 8) + 1
    with pytest.raises(SystemExit, match="no such part"):
        parts.select_parts(plan, ["sped-*"])


def test_the_commit_can_be_given_where_git_is_missing(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert measure.describe_environment()["commit"] is None
    monkeypatch.setenv("SSL_SEC_COMMIT", "abc")
    assert measure.describe_environment()["commit"] == "abc"


BLOCKED = """
import sys
from importlib.machinery import PathFinder
from pathlib import Path

class Finder(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in {blocked!r} else PathFinder.find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Finder
from benchmarks.campaign import parts, running
from benchmarks.campaign.data import prepare_data
from benchmarks.campaign.sheet import Plan

folder = Path(sys.argv[1])
plan = Plan(output=str(folder), checkpoints=str(folder / "runs"), data=prepare_data(None, folder), rehearsal=True)
running.set_deadline(folder, minutes=10)
running.work(plan, parts.select_parts(plan, sys.argv[2:]))
"""


def test_a_campaign_runs_with_what_is_packed_for_it(tmp_path):
    names = ["speed-resnet18-8", "train-resnet18-sec_ema-s0"]
    code = BLOCKED.format(blocked=missing_modules() | {"pytorch_lightning", "torchmetrics", "timm"})
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path), *names], cwd=ROOT, capture_output=True, text=True, check=True
    )
    found = {name: json.loads((tmp_path / "results" / f"{name}.json").read_text()) for name in names}
    assert {name: each["state"] for name, each in found.items()} == dict.fromkeys(names, "done"), done.stdout
    assert not [row for row in found[names[0]]["rows"] if "error" in row]
    assert {"probe/top1", "probe/logistic_top1"} <= set(found[names[1]])


@pytest.mark.slow
def test_a_rehearsal_runs_every_part(tmp_path):
    command = [sys.executable, "-m", "benchmarks.campaign", "--rehearse", "--output", str(tmp_path / "out")]
    subprocess.run([*command, "--minutes", "30"], cwd=ROOT, check=True)
    status = json.loads((tmp_path / "out" / "status.json").read_text())
    assert status["parts"] == dict.fromkeys(status["parts"], "done")
    kinds = {name.partition("-")[0] for name in status["parts"]}
    once = {"gpu", "views", "options", "growth", "evaluation"}
    assert kinds == {*once, "speed", "cells", "train", "search", "study", "long"}
    again = subprocess.run([*command, "--minutes", "30"], cwd=ROOT, check=True, capture_output=True, text=True)
    assert ": started" not in again.stdout
