"""Studies that were made for CPUs, on a GPU: their runs take seconds there, several at once.

Each run has a sheet in `<output>/cells/<study>`, and the part's sheet has the results of all finished runs. Runs of an
earlier campaign whose results are in the repository are not run again. Steps are recorded as CUDA graphs but not
compiled, since compiling would take longer than the run. Runs that docs/studies has from another machine are left out.
"""

import csv
import json
import os
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from benchmarks.campaign.recipes import change, load_recipes, load_trials
from benchmarks.campaign.running import Part, end_with
from benchmarks.campaign.scale import SMALL_STUDIES, Scale
from benchmarks.campaign.sheet import COMMITTED, Plan, Sheet
from benchmarks.campaign.study import SEARCH_SEED, SEARCHED, NoTrialError, find_best, search_name
from benchmarks.campaign.training import folders_of, train, train_and_probe
from benchmarks.measure import describe_environment, describe_error
from ssl_sec.data.config import FolderConfig, ParquetConfig
from ssl_sec.data.image_set import ImageSet
from ssl_sec.edges.study.digest import digest_of
from ssl_sec.errors import Stopped, first_line
from ssl_sec.recipes.pretraining.config import PretrainConfig
from ssl_sec.settings import from_values

_PROGRESS_S = 15.0
# The runs of the studies on all machines.
_STUDIES = Path(__file__).parents[2] / "docs" / "studies"
# The results of a run that its study's sheet has.
_KEPT = ("error", "last", "mean", "probe", "minutes", "config")
# Reports as in the runs on CPUs, which report every 10 steps: means over a run's reports are part of its results.
_ON_GPU = {"runtime.compile": False, "log_every_steps": 10}


@dataclass(frozen=True, kw_only=True)
class Task:
    """A run, or a trial of a search.

    Attributes:
        name: name of its sheet.
        arm: name of its arm in the recipes, including that of the study.
        seed: seed of the run.
        trial: number of the trial in the arm's search; None for a run.
    """

    name: str
    arm: str
    seed: int
    trial: int | None = None


def list_small_parts(scale: Scale) -> Iterator[Part]:
    """Returns the studies as parts."""
    for study in SMALL_STUDIES:
        yield Part(
            name=part_name(study), limit_s=1800, measure=lambda sheet, study=study: _measure(sheet, scale, study)
        )


def part_name(study: str) -> str:
    """The name of a study's part."""
    return f"cells-{study}"


def list_arms(study: str) -> list[str]:
    """The names of a study's arms at their points, in the campaign's recipes."""
    return [name for name in load_recipes() if name.startswith(f"{study}-")]


def _measure(sheet: Sheet, scale: Scale, study: str) -> None:
    """Runs the unfinished tasks: first all trials, then the runs, whose values they determine."""
    if sheet.plan.data is None:
        raise ValueError("a training run needs --data")
    arms = list_arms(study)[: scale.small_arms]
    trials = [
        Task(name=search_name(arm, trial), arm=arm, seed=SEARCH_SEED, trial=trial)
        for arm in arms
        for trial in range(_num_trials(scale, arm))
    ]
    seeds = SMALL_STUDIES[study].seeds[: scale.small_seeds]
    runs = [Task(name=f"{arm}-s{seed}", arm=arm, seed=seed) for seed in seeds for arm in arms]
    plan = replace(
        sheet.plan,
        output=str(sheet.plan.folder / "cells" / study),
        checkpoints=str(Path(sheet.plan.checkpoints) / study),
        data={**sheet.plan.data, "max_images": load_recipes()[arms[0]]["data"]["max_images"]},
    )
    sheet.write(environment=describe_environment(), planned=len(runs))
    started_by = scale.processes, os.getpid()
    pool = ProcessPoolExecutor(scale.processes, get_context("spawn"), _prepare_process, started_by)
    with pool:
        for tasks in (trials, runs):
            if not plan.rehearsal:
                _take_committed(plan, scale, study, tasks)
                tasks[:] = _without_known(plan, scale, study, tasks)
                sheet.write(planned=len(runs))
            started = {pool.submit(_run, plan, scale, task) for task in tasks}
            while started:
                ended, started = wait(started, timeout=_PROGRESS_S, return_when=FIRST_COMPLETED)
                _raise_first(ended)
                sheet.write(trials=_read(plan, trials), runs=_read(plan, runs))
                print(f"  {time.strftime('%H:%M:%S')} {study}: {len(started)} of {len(tasks)} left", flush=True)


def _raise_first(ended: set[Future[None]]) -> None:
    """Raises the error of a process that died; errors of runs are in their sheets."""
    for future in ended:
        future.result()


def _num_trials(scale: Scale, arm: str) -> int:
    return len(load_trials().get(arm, [])[: scale.small_trials])


def _read(plan: Plan, tasks: list[Task]) -> list[dict[str, Any]]:
    """The results of the finished tasks."""
    found: list[dict[str, Any]] = []
    for task in tasks:
        results = Sheet(plan, task.name).read()
        if results.get("state") in ("done", "failed"):
            kept = {key: results[key] for key in _KEPT if key in results}
            found.append({"arm": task.arm, "seed": task.seed, "trial": task.trial, **kept})
    return found


def _take_committed(plan: Plan, scale: Scale, study: str, tasks: list[Task]) -> None:
    """Writes the sheets of tasks that have none, if the repository has their results with the same configuration."""
    path = COMMITTED / f"{part_name(study)}.json"
    committed = json.loads(path.read_text()) if path.exists() else {"trials": [], "runs": []}
    kept = {(one["arm"], one["seed"], one["trial"]): one for one in [*committed["trials"], *committed["runs"]]}
    for task in tasks:
        sheet, found = Sheet(plan, task.name), kept.get((task.arm, task.seed, task.trial), {})
        if "last" in found and sheet.read_state() is None and found["config"] == _digest(plan, scale, task):
            searched = {SEARCHED: found["last"][SEARCHED]} if SEARCHED in found["last"] else {}
            sheet.write("done", **{key: found[key] for key in _KEPT if key in found}, **searched)


def _without_known(plan: Plan, scale: Scale, study: str, tasks: list[Task]) -> list[Task]:
    """The tasks without the runs that another machine made, which have no sheet but are in docs/studies."""
    path = _STUDIES / f"{study}.csv"
    rows = list(csv.DictReader(path.read_text().splitlines())) if path.exists() else []
    known = {(row["config"], int(row["seed"])) for row in rows}
    return [
        task
        for task in tasks
        if task.trial is not None
        or Sheet(plan, task.name).read_state() is not None
        or (_digest(plan, scale, task), task.seed) not in known
    ]


def _changes(plan: Plan, scale: Scale, task: Task) -> dict[str, Any]:
    """The values of a task beside those of its arm: a trial's own, or the best of the arm's search."""
    if task.trial is not None:
        return dict(load_trials()[task.arm][task.trial])
    searched = _num_trials(scale, task.arm)
    return find_best(plan, task.arm, searched)[1] if searched else {}


def _digest(plan: Plan, scale: Scale, task: Task) -> str | None:
    """The digest of a task's configuration, as in `jobs.study`; None if all trials of its arm failed."""
    try:
        changes = _changes(plan, scale, task)
    except NoTrialError:  # which the sheet of the task will say
        return None
    return digest_of(from_values(PretrainConfig, change(load_recipes()[task.arm], changes)))


def _prepare_process(processes: int, parent: int) -> None:
    """Gives a process its share of the cores, and makes it keep its decoded images for its next runs."""
    end_with(parent)
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // processes))
    for kind in (FolderConfig, ParquetConfig):
        kind._open = _keep_images(kind._open)


def _keep_images(open_split: Callable[..., ImageSet]) -> Any:
    """Returns a method that opens a split once for all subsets of it."""
    opened = cache(open_split)
    return lambda config, *split, **options: opened(replace(config, max_images=None), *split, **options)


def _run(plan: Plan, scale: Scale, task: Task) -> None:
    """Runs a task in this process, unless it is done; its sheet has its results, or its error."""
    sheet = Sheet(plan, task.name)
    if sheet.read_state() == "done":
        return
    is_continued = sheet.read_state() != "failed"  # of which nothing is left
    before, begun = float(sheet.read().get("train_s", 0.0)) if is_continued else 0.0, time.monotonic()
    sheet.write(train_s=before)
    try:
        run = train_and_probe if task.trial is None else train
        run(sheet, scale, task.arm, task.seed, {**_ON_GPU, **_changes(plan, scale, task)})
        minutes = (before + time.monotonic() - begun) / 60
        sheet.write("done", minutes=minutes, config=_digest(plan, scale, task), **_summarise(sheet))
    except Stopped as stopped:  # by a signal to all processes of the campaign; its checkpoint is resumed
        sheet.write("stopped", error=first_line(stopped))
        return
    except Exception as error:
        sheet.write("failed", error=describe_error(error))
    for folder in folders_of(sheet):
        shutil.rmtree(folder.path, ignore_errors=True)


def _summarise(sheet: Sheet) -> dict[str, dict[str, float]]:
    """The last value of each metric of a run and of its probe; for training, means over the reports after the first."""
    folder, probe = folders_of(sheet)
    records = [record["metrics"] for record in folder.records()]
    values: dict[str, list[float]] = {}
    for metrics in records:
        for name, value in metrics.items():
            values.setdefault(name, []).append(value)
    return {
        "last": {name: each[-1] for name, each in values.items()},
        "mean": {
            name: statistics.fmean(each[1:] or each) for name, each in values.items() if name.startswith("train/")
        },
        "probe": dict(probe.last_metrics()),
    }
