"""A study from its command: what is run, kept, compared and recorded in MLflow."""

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import mlflow
import pytest
from matplotlib.figure import Figure
from mlflow.entities import Run

from ssl_sec.edges.folder.folder import RunFolder
from ssl_sec.edges.storage.bucket import Bucket
from ssl_sec.edges.storage.places import local_folder
from ssl_sec.edges.study import job
from ssl_sec.edges.study.cells import KeptCells
from ssl_sec.edges.tune.trials import Trial
from ssl_sec.errors import ConfigError, Stopped, StorageError, UserError
from tests.edges.conftest import QUICK, half_a_picture
from tests.edges.study.test_plan import FILE, OVER, SEARCHED

DRAWS_PICTURES = True


def parents(tmp_path) -> list[Run]:
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path}/runs/mlflow.db")
    return [
        run
        for experiment in client.search_experiments()
        for run in client.search_runs([experiment.experiment_id], "tags.job = 'study'", order_by=["start_time"])
    ]


def test_finished_runs_are_kept_and_compared(made, tmp_path):
    run, runs, folder = made
    text = run()
    assert runs.started == ["none-s0", "sec-s0", "none-s1", "sec-s1"]
    rows = [re.split("  +", line) for line in text.splitlines()]
    assert ["none", "2", "51.50 ± 2.12"] in rows
    assert ["sec", "2", "52.55 ± 2.19", "+1.05 [+0.41, +1.69]", "0.030"] in rows
    assert {path.name for path in folder.glob("cells*")} == {
        *("cells.csv", "cells.md", "cells-forest.png", "cells-causes.png", "cells-curves.png")
    }
    assert "| sec | 2 | 52.55 ± 2.19 |" in (folder / "cells.md").read_text()
    (parent,) = parents(tmp_path)
    assert parent.info.status == "FINISHED" and "arm" not in parent.data.tags
    assert parent.data.metrics["study/difference sec"] == pytest.approx(1.05)
    assert "| sec | 2 |" in parent.data.tags["mlflow.note.content"]
    artifacts = {
        file.path
        for at in (None, "plots")
        for file in mlflow.MlflowClient(f"sqlite:///{tmp_path}/runs/mlflow.db").list_artifacts(parent.info.run_id, at)
    }
    assert {"cells.csv", "cells.md", "plots/cells-forest.png", "plots/cells-curves.png"} <= artifacts


def test_a_full_disk_leaves_no_half_plot(made, monkeypatch):
    run, _, folder = made
    monkeypatch.setattr(Figure, "savefig", half_a_picture)
    with pytest.raises(StorageError, match="^cells: .* cannot be written: No space left on device"):
        run()
    assert {path.name for path in folder.iterdir() if "cells" in path.name} <= {
        "cells.csv",
        ".cells.csv.lock",
        "cells.md",
    }


def test_a_study_says_at_its_start_where_to_look(made, caplog):
    run, _, folder = made
    with caplog.at_level("INFO", "ssl_sec"):
        run("concurrent=3")
    begin = caplog.messages[: next(i for i, text in enumerate(caplog.messages) if "(1 of 4)" in text)]
    assert begin[-1] == f"running 4 runs, 3 at a time; the output is in {folder}/logs"
    assert any(text.startswith("MLflow UI: ") for text in begin)
    caplog.clear()
    with caplog.at_level("INFO", "ssl_sec"):
        run()
    assert not any(text.startswith("running ") for text in caplog.messages)


@pytest.mark.parametrize(("concurrent", "minutes"), [(1, 4), (2, 2), (3, 2)])
def test_the_time_left_counts_the_runs_that_run_side_by_side(made, caplog, concurrent, minutes):
    run, _, _ = made
    with caplog.at_level("INFO", "ssl_sec"):
        run(f"concurrent={concurrent}")
    first = next(text for text in caplog.messages if text.startswith("none-s0 (1 of 4)"))
    assert first.endswith(f"in 1.5 min; about {minutes} min left")
    last = next(text for text in caplog.messages if " (4 of 4): " in text)
    assert last.endswith("in 1.5 min")


def test_the_time_left_counts_the_runs_of_all_points(made, tmp_path, caplog):
    (tmp_path / "mine.yaml").write_text(FILE + OVER)
    run, runs, _ = made
    with caplog.at_level("INFO", "ssl_sec"):
        run("concurrent=3")
    assert len(runs.started) == 12
    first = next(text for text in caplog.messages if " (1 of 12): " in text)
    assert first.endswith("in 1.5 min; about 6 min left")


def test_every_search_is_followed_by_the_runs_of_its_point(made, tmp_path, monkeypatch):
    (tmp_path / "mine.yaml").write_text(SEARCHED + "over: {global_batch_size: [64, 128]}\n")
    run, runs, folder = made
    events = runs.started

    def run_search(search):
        events.append(f"search {search.config.global_batch_size}")
        return [Trial(name="s-001", overrides=[], values={}, metric=40.0, at=8)], 0, folder

    monkeypatch.setattr("ssl_sec.edges.tune.job.run_search", run_search)
    run()
    assert [re.sub(r"^global_batch_size_|-(none|sec)-s0$", "", each) for each in events] == [
        *("search 64", "64", "64", "search 128", "128", "128")
    ]


def test_the_time_of_a_run_that_had_begun_is_not_known(made, caplog):
    run, _, folder = made
    RunFolder(folder / "none-s0").start({})
    with caplog.at_level("INFO", "ssl_sec"):
        run()
    assert [cell.arm for cell in KeptCells(folder / "cells.csv") if math.isnan(cell.minutes)] == ["none"]
    (first, second) = [text for text in caplog.messages if " of 4): " in text][:2]
    assert first.startswith("none-s0 (1 of 4)") and first.endswith("in 1.5 min") and "left" in second


def test_a_study_continues_also_from_its_file_alone(made, tmp_path):
    run, runs, folder = made
    runs.stop_after = 1
    with pytest.raises(Stopped, match="the same command continues the study"):
        run()
    assert [parent.info.status for parent in parents(tmp_path)] == ["KILLED"]
    kept = tmp_path / "kept.csv"
    (folder / "cells.csv").rename(kept)
    runs.stop_after, runs.was_stopped, runs.started = None, False, []
    whole = run(f"cells={kept}")
    assert runs.started == ["sec-s0", "none-s1", "sec-s1"]
    runs.started = []
    assert run(f"cells={kept}").splitlines()[:7] == whole.splitlines()[:7]
    assert runs.started == []
    text = run(f"cells={kept}", "run=false", "seeds=[1]")
    assert "MLflow" not in text and re.search("^sec +1 +54.10$", text, re.M)
    (parent,) = parents(tmp_path)  # all in one
    assert parent.info.status == "FINISHED"
    note = parent.data.tags["mlflow.note.content"]
    assert note.count("| sec | 2 |") == 1 and note.count("- resumed: ") <= 2
    history = mlflow.MlflowClient(f"sqlite:///{tmp_path}/runs/mlflow.db").get_metric_history(
        parent.info.run_id, "study/mean none"
    )
    assert [(point.step, point.value) for point in history] == [(1, 50.0), (2, 50.0), (3, 51.5), (4, 51.5)]


def test_a_study_that_another_process_runs_is_refused_unless_it_runs_another_part(made, tmp_path, monkeypatch):
    run, runs, _ = made
    monkeypatch.setattr("ssl_sec.edges.run.running._FREE_WITHIN_S", 0.0)
    finish = runs.run

    def run_beside(tasks, end, report) -> None:
        monkeypatch.setattr(runs, "run", finish)
        with pytest.raises(ConfigError, match=rf"^study: .*/study-\w+ is in use: process {os.getpid()} .*: other arms"):
            run("seeds=[0]")
        assert "sec" in run("seeds=[1]")
        finish(tasks, end, report)

    monkeypatch.setattr(runs, "run", run_beside)
    run("seeds=[0]")
    assert runs.started == ["none-s1", "sec-s1", "none-s0", "sec-s0"]
    assert [parent.info.status for parent in parents(tmp_path)] == ["FINISHED"]
    assert not (tmp_path / "runs" / ".running").exists()


def test_another_store_gets_its_own_run(made, tmp_path):
    run, _, _ = made
    run()
    other = f"sqlite:///{tmp_path}/other.db"
    run(f"tracking.uri={other}")
    assert len(parents(tmp_path)) == 1
    client = mlflow.MlflowClient(other)
    (found,) = client.search_runs([each.experiment_id for each in client.search_experiments()], "tags.job = 'study'")
    assert found.info.status == "FINISHED"


def test_without_its_file_a_study_compares_the_metrics_of_mlflow(made):
    run, runs, folder = made
    whole = run().splitlines()
    kept = (folder / "cells.csv").read_text()
    (folder / "cells.csv").unlink()
    runs.started = []
    assert run("run=false").splitlines()[:4] == whole[:4]
    assert (folder / "cells.csv").read_text() == kept
    assert runs.started == []


def test_comparing_before_any_run_is_one_line(made):
    run, runs, _ = made
    assert run("run=false") == "no run has ended yet"
    assert runs.started == []


def test_a_run_that_fails_is_named_after_the_others_have_run(made, tmp_path):
    run, runs, folder = made
    runs.failing = {"sec-s0": (2, "error: no GPU")}
    expected = f"1 run failed; the last: sec-s0: no GPU; the output is in {folder / 'logs'}; the same command runs"
    with pytest.raises(UserError, match=re.escape(expected)):
        run()
    assert len(runs.started) == 4
    assert [parent.info.status for parent in parents(tmp_path)] == ["FAILED"]
    runs.failing, runs.started = {}, []
    run()
    assert runs.started == ["sec-s0"]


@pytest.mark.parametrize(
    ("code", "output", "reason"),
    [
        (
            -signal.SIGKILL,
            "sec-s0: epoch 1",
            "the process was killed by SIGKILL, the machine or container may have run out of memory",
        ),
        pytest.param(130, "stopped; resume it with: ...", "stopped; resume it with: ...", marks=pytest.mark.slow),
    ],
)
def test_a_run_that_fails_again_has_the_reason_of_its_last_start(made, code, output, reason):
    run, runs, _ = made
    for runs.failing in ({"sec-s0": (2, "error: no GPU")}, {"sec-s0": (code, output)}):
        with pytest.raises(UserError) as failed:
            run()
    assert f"the last: sec-s0: {reason}; the output" in str(failed.value)


@pytest.mark.parametrize(
    ("printed", "shown"),
    [
        ("", "none-s0: starting"),
        ("INFO: device: cpu\nINFO: drawing the plots\n", "none-s0: drawing the plots"),
        ("INFO: device: cpu\nnone-s0: epoch 1.00/8  step 9  7 s left\n", "none-s0: epoch 1.00/8  step 9  7 s left"),
        ("none-s0-probe: epoch 2.00/8\n", "none-s0-probe: epoch 2.00/8"),
    ],
)
def test_the_last_line_of_a_running_run_is_logged(made, caplog, printed, shown):
    caplog.set_level("INFO", "ssl_sec")
    run, runs, _ = made
    runs.printing = printed
    run("seeds=[0]", "arms=[none]")
    assert shown in caplog.messages


def test_the_compared_metric_is_kept_or_named_after_the_first_run(made, tmp_path):
    run, runs, folder = made
    (tmp_path / "mine.yaml").write_text(FILE + "metric: probe/top_1\n")
    with pytest.raises(ConfigError, match="metric: found 'probe/top_1', which is not measured; .*'probe/top1'"):
        run()
    assert len(runs.started) == 1 and not (folder / "cells.csv").exists()
    (tmp_path / "mine.yaml").write_text(FILE + "metric: train/norm_mean\n")
    assert "+0.00" in run()
    assert {kept.metrics["train/norm_mean"] for kept in KeptCells(folder / "cells.csv")} == {2.0}


def test_the_curves_show_the_compared_metric_where_it_was_measured_along_the_runs(made, tmp_path, monkeypatch):
    run, _, folder = made
    run()
    for path in folder.glob("*-s?/metrics.jsonl"):
        records = [{"step": step, "metrics": {"val/rankme": 3.0, "train/norm_mean": 2.0}} for step in (4, 8)]
        last = {"step": 8, "metrics": {"val/alpha_req": 1.0}}
        path.write_text("".join(json.dumps(record) + "\n" for record in (*records, last)))
    drawn: list[set[str]] = []
    monkeypatch.setattr(
        job, "curves_figure", lambda arms, _: drawn.append({name for one in arms.values() for name in one})
    )
    for metric in ("val/rankme", "val/alpha_req", "probe/top1"):
        (tmp_path / "mine.yaml").write_text(FILE + f"metric: {metric}\n")
        run("run=false")
    assert ["val/rankme" in names for names in drawn] == [True, False, False]
    assert not any("val/alpha_req" in names or "probe/top1" in names for names in drawn)  # no curve is one point


def test_runs_of_another_configuration_are_not_mixed_in(made):
    run, runs, _ = made
    run()
    runs.started = []
    with pytest.raises(ConfigError, match=r"cells: .*cells.csv has none, seed 0, with another configuration"):
        run("epochs=3")
    assert runs.started == []


def test_object_storage_needs_a_file_for_the_cells(made):
    run, _, _ = made
    with pytest.raises(ConfigError, match="cells: found null, must be a file where output_dir is object storage"):
        run("output_dir=s3://bucket/runs")


def test_runs_in_object_storage_are_read_from_there_and_leave_no_folders_here(made, s3, tmp_path, monkeypatch):
    run, runs, folder = made
    run_tasks = runs.run

    def run_and_store(tasks, end, report) -> None:
        """The process of a run stores its folder, and removes it here."""

        def stored(name: str, code: int, minutes: float) -> None:
            for each in (name, f"{name}-probe"):
                Bucket(f"{s3}/mine").write(f"{each}/metrics.jsonl", (folder / each / "metrics.jsonl").read_bytes())
                shutil.rmtree(folder / each)
            end(name, code, minutes)

        run_tasks(tasks, stored, report)

    monkeypatch.setattr(runs, "run", run_and_store)
    text = run(f"output_dir={s3}", f"cells={tmp_path / 'cells.csv'}", f"tracking.uri=sqlite:///{tmp_path}/m.db")
    assert "51.50 ± 2.12" in text
    assert not list(local_folder(s3).glob("mine/*-s*"))


def command(file: Path, *overrides: str) -> list[str]:
    return [sys.executable, "-m", "jobs.study", f"study={file}", *QUICK[1:3], *QUICK[3:], *overrides]


@pytest.mark.slow
@pytest.mark.distributed
def test_real_runs_are_interrupted_and_continued(tmp_path: Path):
    """A Ctrl-C while two runs train; the same command resumes both, and searches first."""
    file = tmp_path / "mine.yaml"
    file.write_text(
        "shared: [experiment=digits, runtime=local, constraint=none]\n"
        "arms: {none: ['optimiser.learning_rate=choice(0.3,0.2)'], sec: [constraint=sec]}\n"
        "search: [trials=2, scheduler=none, epochs=2, searcher=random]\nseeds: [0, 1]\n"
    )
    given = [f"output_dir={tmp_path}/runs", "epochs=30", "concurrent=2"]
    first = subprocess.Popen(command(file, *given), stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    folder, deadline = tmp_path / "runs" / "mine", time.monotonic() + 300
    while not any((folder / name / "metrics.jsonl").exists() for name in ("none-s0", "sec-s0")):
        assert first.poll() is None and time.monotonic() < deadline, first.communicate()[1]
        time.sleep(0.1)
    os.kill(first.pid, signal.SIGINT)
    _, errors = first.communicate(timeout=120)
    assert first.returncode == 130, errors
    assert "the same command continues the study" in errors
    second = subprocess.run(command(file, *given), capture_output=True, text=True, timeout=500)
    assert second.returncode == 0, second.stderr
    assert re.search(r"^none +2 +\S+ ± ", second.stdout, re.M) and re.search(r"^sec +2 .*\[", second.stdout, re.M)
    assert "resuming after step" in "".join(path.read_text() for path in (folder / "logs").iterdir())
    assert (folder / "cells.csv").read_text().count("\n") == 5
    assert (folder / "cells-searches.csv").read_text().count("\n") == 3
