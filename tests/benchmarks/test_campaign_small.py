"""Studies with small runs in a campaign: what is run, and what is written to docs/studies."""

import csv
import json
import math
import os
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import pytest

from benchmarks.campaign import cells, recipes, small, training
from benchmarks.campaign.data import prepare_data
from benchmarks.campaign.scale import FULL, SMALL_STUDIES, TINY
from benchmarks.campaign.sheet import Plan, Sheet
from benchmarks.campaign.training import make_run_values
from ssl_sec.edges.study.cells import KeptCells
from ssl_sec.edges.study.plan import load_file, read_study
from ssl_sec.edges.study.searches import KeptSearches
from tests.benchmarks.test_campaign import until

FILES = ["data.train=[/any/train.parquet]", "data.test=[/any/test.parquet]"]


@pytest.fixture
def plan(tmp_path):
    output = tmp_path / "campaign"
    output.mkdir()
    return Plan(output=str(output), checkpoints=str(tmp_path / "runs"), data=prepare_data(None, output), rehearsal=True)


def test_all_planned_runs_are_run():
    runs = {}
    for name, study in SMALL_STUDIES.items():
        assert study.seeds == load_file(name)[1].seeds
        runs[name] = len(small.list_arms(name)) * len(study.seeds)
    assert runs == {"confirm": 12, "confirm_rates": 27, "when_cpu": 108, "sec_cpu": 56}


def test_recipes_equal_those_that_hydra_composes(monkeypatch):
    """Those of one study; another test has all."""
    monkeypatch.setattr(recipes, "SMALL_STUDIES", {"confirm": SMALL_STUDIES["confirm"]})
    monkeypatch.setattr(recipes, "_study_arms", list)
    composed = recipes.compose_recipes()
    assert composed.items() <= recipes.load_recipes().items() and len(composed) > 15


@pytest.mark.slow
def test_recipes_and_trials_equal_those_that_hydra_composes():
    for name in SMALL_STUDIES:
        assert len(small.list_arms(name)) == len(recipes.list_small_arms(name))
    assert recipes.load_recipes() == recipes.compose_recipes()
    assert recipes.load_trials() == recipes.compose_trials()


@pytest.mark.parametrize("study", ["confirm", "confirm_rates", "when_cpu"])
def test_runs_that_the_documentation_has_are_not_run_again(tmp_path, study):
    kept = csv.DictReader((small._STUDIES / f"{study}.csv").read_text().splitlines())
    empty = Plan(output=str(tmp_path), checkpoints=str(tmp_path), data=None, rehearsal=False)
    seeds, arms = SMALL_STUDIES[study].seeds, small.list_arms(study)
    tasks = [small.Task(name=f"{arm}-s{seed}", arm=arm, seed=seed) for seed in seeds for arm in arms]
    assert len(small._without_known(empty, FULL, study, tasks)) == len(tasks) - len(list(kept))


@pytest.mark.parametrize("study", SMALL_STUDIES)
def test_runs_have_the_values_of_their_arms(plan, study):
    for arm in small.list_arms(study):
        expected = recipes.load_recipes()[arm]
        found = make_run_values(plan, FULL, arm, seed=3, changes=small._ON_GPU)
        changed = {key for key in expected if found[key] != expected[key]}
        assert changed == {"data", "log_every_steps", "output_dir", "runtime", "seed"}
        assert found["runtime"] == {**expected["runtime"], "compile": False}
        assert found["seed"] == 3


@pytest.mark.slow
def test_a_searched_study_runs_and_its_figures_are_kept(plan, tmp_path):
    part = next(each for each in small.list_small_parts(TINY) if each.name == "cells-sec_cpu")
    sheet = Sheet(plan, part.name)
    part.measure(sheet)
    found = sheet.read()
    assert [(run["arm"], run["seed"]) for run in found["runs"]] == [("sec_cpu-dcl-none", 0), ("sec_cpu-dcl-sec", 0)]
    assert [trial["trial"] for trial in found["trials"]] == [0, 0]
    assert not list((tmp_path / "runs" / "sec_cpu").iterdir())

    folder = tmp_path / "studies"
    assert cells.keep_cells({part.name: found}, folder) == [folder / "sec_cpu.csv"]
    trials = list(KeptSearches(folder / "sec_cpu-searches.csv"))
    study = read_study(["study=sec_cpu", "points=[loss=dcl]", *FILES])
    chosen = {arm.key: best for arm in study.arms if (best := KeptSearches(folder / "sec_cpu-searches.csv").best(arm))}
    assert set(chosen) == {("none", "loss=dcl"), ("sec", "loss=dcl")} == {(one.arm, one.point) for one in trials}
    kept = KeptCells(folder / "sec_cpu.csv").of(study.cells(chosen))  # a study takes them for its own
    planned = {cell.key: cell.digest for cell in study.cells(chosen)}
    assert [(one.arm, one.point, one.seed) for one in kept] == [("none", "loss=dcl", 0), ("sec", "loss=dcl", 0)]
    assert all(one.digest == planned[one.key] for one in kept)
    for one, run in zip(kept, found["runs"], strict=True):
        assert one.metrics["probe/top1"] == pytest.approx(run["probe"]["probe/top1"], rel=1e-5)
        assert one.metrics["mean/train/norm_mean"] == pytest.approx(run["mean"]["train/norm_mean"], rel=1e-5)
        assert {"probe/knn_top1", "val/rankme", "train/loss"} <= set(one.metrics) and math.isfinite(one.minutes)

    repeated = replace(kept[0], metrics={"probe/top1": 99.0})
    KeptCells(folder / "sec_cpu.csv").add(repeated)  # on another machine
    cells.keep_cells({part.name: found}, folder)
    assert KeptCells(folder / "sec_cpu.csv").of(study.cells(chosen)) == [repeated, kept[1]]

    def refused(*arguments):
        raise AssertionError("it had run already")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(small, "train", refused)
        patch.setattr(small, "train_and_probe", refused)
        small._run(
            replace(plan, output=f"{plan.output}/cells/sec_cpu"),
            TINY,
            small.Task(name="sec_cpu-dcl-none-s0", arm="sec_cpu-dcl-none", seed=0),
        )


def test_a_run_that_fails_does_not_stop_the_others(plan, monkeypatch):
    def diverge(*arguments):
        raise FloatingPointError("the objective is nan at step 3")

    monkeypatch.setattr(small, "train_and_probe", diverge)
    task = small.Task(name="when_cpu-epochs_5-none-s0", arm="when_cpu-epochs_5-none", seed=0)
    small._run(plan, TINY, task)
    assert small._read(plan, [task]) == [
        {"arm": task.arm, "seed": 0, "trial": None, "error": Sheet(plan, task.name).read()["error"]}
    ]
    assert "nan at step 3" in Sheet(plan, task.name).read()["error"]
    assert cells.keep_cells({"cells-when_cpu": {"runs": small._read(plan, [task]), "trials": []}}, plan.folder)
    assert not (plan.folder / "when_cpu.csv").exists()


def test_a_stopped_run_is_resumed(plan, monkeypatch):
    task = small.Task(name="when_cpu-epochs_5-none-s0", arm="when_cpu-epochs_5-none", seed=0)
    folder, _ = small.folders_of(Sheet(plan, task.name))
    work, begun = training.work, []

    def stop_at_once(job, values, run_folder, worker):
        begun.append(run_folder.checkpoints_path.exists())
        if len(begun) == 1:
            run_folder.stop_path.touch()
        work(job, values, run_folder, worker)

    monkeypatch.setattr(training, "work", stop_at_once)
    small._run(plan, TINY, task)
    assert Sheet(plan, task.name).read_state() == "stopped"
    assert small._read(plan, [task]) == []
    Sheet(plan, task.name).write("stopped", train_s=600.0)
    small._run(plan, TINY, task)
    assert 10 < small._read(plan, [task])[0]["minutes"] < 11
    assert begun == [False, True, False]  # the run, the rest of it, its probe
    assert [run["last"]["train/epoch"] for run in small._read(plan, [task])] == [2.0]
    assert not folder.path.exists()


def hold_a_pool(path):
    pool = ProcessPoolExecutor(1, get_context("spawn"), small._prepare_process, (1, os.getpid()))
    path.write_text(str(pool.submit(os.getpid).result()))
    time.sleep(60)


@pytest.mark.slow
def test_the_processes_of_a_study_end_with_the_part_that_started_them(tmp_path):
    """They would go on with their runs, which the next worker begins, too."""
    path = tmp_path / "pid"
    part = get_context("spawn").Process(target=hold_a_pool, args=(path,))
    part.start()
    until(lambda: path.exists() and path.read_text())
    part.kill()
    part.join()
    ended = Path(f"/proc/{path.read_text()}")
    until(lambda: not ended.exists() or "Z" in (ended / "stat").read_text().split()[2], seconds=10)


ARM = "sec_cpu-dcl-none"
TRIAL = small.Task(name=f"search-{ARM}-0", arm=ARM, seed=small.SEARCH_SEED, trial=0)
RUN = small.Task(name=f"{ARM}-s3", arm=ARM, seed=3)


@pytest.fixture
def committed(tmp_path, monkeypatch):
    """Writes the results of an earlier campaign."""
    monkeypatch.setattr(small, "COMMITTED", tmp_path)

    def write(*results):
        kept = {"trials": [one for one in results if one["trial"] is not None]}
        kept["runs"] = [one for one in results if one["trial"] is None]
        (tmp_path / "cells-sec_cpu.json").write_text(json.dumps(kept))

    return write


def _result(plan, task, **others):
    last = {"val/knn_top1": 41.5, "train/epoch": 10.0}
    own = {"arm": task.arm, "seed": task.seed, "trial": task.trial, "config": small._digest(plan, TINY, task)}
    return {**own, "last": last, "mean": {}, "minutes": 0.5, **others}


def test_results_in_the_repository_are_not_computed_again(plan, committed, monkeypatch):
    committed(trial := _result(plan, TRIAL))
    small._take_committed(plan, TINY, "sec_cpu", [TRIAL])
    committed(trial, run := _result(plan, RUN, probe={"probe/top1": 50.0}))
    small._take_committed(plan, TINY, "sec_cpu", [RUN])
    monkeypatch.setattr(small, "train", None)
    monkeypatch.setattr(small, "train_and_probe", None)
    small._run(plan, TINY, TRIAL)
    small._run(plan, TINY, RUN)
    assert small._read(plan, [TRIAL, RUN]) == [trial, run]


def test_results_of_another_configuration_are_computed_again(plan, committed):
    committed(_result(plan, TRIAL, config="0123456789ab"))
    small._take_committed(plan, TINY, "sec_cpu", [TRIAL])
    assert Sheet(plan, TRIAL.name).read_state() is None


def test_an_arm_whose_trials_all_failed_does_not_stop_the_others(plan, committed, tmp_path, monkeypatch):
    committed(_result(plan, TRIAL), {**_result(plan, TRIAL), "trial": None, "seed": RUN.seed})
    monkeypatch.setattr(small, "_STUDIES", tmp_path)
    (tmp_path / "sec_cpu.csv").write_text("config,seed\n0123456789ab,3\n")
    Sheet(plan, TRIAL.name).write("failed", error="out of memory")
    small._take_committed(plan, TINY, "sec_cpu", [RUN])
    assert small._without_known(plan, TINY, "sec_cpu", [RUN]) == [RUN]
    small._run(plan, TINY, RUN)
    assert small._read(plan, [RUN])[0]["error"] == f"NoTrialError: all trials of {ARM} failed"


def test_runs_of_another_machine_are_left_out(plan, tmp_path, monkeypatch):
    monkeypatch.setattr(small, "_STUDIES", tmp_path)
    arm = "when_cpu-epochs_5-none"
    first, second, third = (small.Task(name=f"{arm}-s{seed}", arm=arm, seed=seed) for seed in range(3))
    assert small._without_known(plan, TINY, "when_cpu", [first]) == [first]  # no file
    digest = small._digest(plan, TINY, first)
    rows = ["config,seed", f"{digest},0", "0123456789ab,1", f"{digest},2", ""]
    (tmp_path / "when_cpu.csv").write_text("\n".join(rows))
    Sheet(plan, third.name).write("done")
    assert small._without_known(plan, TINY, "when_cpu", [first, second, third]) == [second, third]
