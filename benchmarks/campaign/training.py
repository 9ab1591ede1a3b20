"""Training runs of a campaign with their probes, which are stopped and resumed at will."""

import logging
import shutil
import signal
import statistics
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.campaign.recipes import change, load_recipes
from benchmarks.campaign.scale import Scale
from benchmarks.campaign.sheet import Plan, Sheet
from benchmarks.measure import choose_device, describe_environment
from ssl_sec.edges.folder.folder import RunFolder
from ssl_sec.edges.folder.stored_config import stored_values
from ssl_sec.edges.run.worker import Worker, work
from ssl_sec.edges.study.digest import digest_of
from ssl_sec.errors import Stopped, UserError
from ssl_sec.recipes.pretraining.config import PretrainConfig
from ssl_sec.recipes.probing.config import ProbeJobConfig
from ssl_sec.settings import from_values, to_values

_PROGRESS_S = 20.0
_PROGRESS_METRICS = ("train/epoch", "train/loss", "train/images_per_s", "val/knn_top1", "probe/epoch", "probe/loss")
_CURVES = ("train/loss", "train/norm_mean", "train/norm_std")
# Metrics on held-out training images, at the end of a pretraining.
_HELD_OUT = ("val/knn_top1", "val/probe_top1")
_PROBE_RESULTS = ("probe/top1", "probe/top5", "probe/knn_top1", "probe/logistic_top1", "probe/learning_rate")


def _merge(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(values)
    for key, value in changes.items():
        merged[key] = {**merged[key], **value} if isinstance(value, Mapping) else value
    return merged


def make_run_values(
    plan: Plan, scale: Scale, recipe: str, seed: int, changes: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Makes the values of a training run.

    Args:
        plan: the campaign's plan.
        scale: sizes of the run.
        recipe: a name in recipes.json.
        seed: seed of the run.
        changes: dotted key -> value, replacing those of the recipe.
    """
    values = _merge(load_recipes()[recipe], {"seed": seed, "output_dir": plan.checkpoints})
    values = _merge(change(values, changes or {}), scale.training)
    values["encoder"] = {**values["encoder"], "width": values["encoder"]["width"] * scale.width}
    return values if plan.data is None else {**values, "data": plan.data}


def train_and_probe(
    sheet: Sheet,
    scale: Scale,
    recipe: str,
    seed: int,
    changes: Mapping[str, Any] | None = None,
    *,
    logistic: bool = False,
) -> None:
    """Runs or resumes a pretraining, then its probe.

    Args:
        sheet: sheet of the part, for the results of both, and for `train_s`, the time of the pretraining in all calls.
        scale: sizes of the run.
        recipe: a name in recipes.json.
        seed: seed of the run.
        changes: dotted key -> value, replacing those of the recipe.
        logistic: whether a logistic regression, which has no learning rate, is measured beside the probe.
    """
    config = train(sheet, scale, recipe, seed, changes)
    folder, probe_folder = folders_of(sheet)
    options = replace(config.probe, logistic=logistic)
    probe = ProbeJobConfig(run=str(folder.path), probe=options, runtime=config.runtime, data=config.data)
    copied = {probe_folder.encoder_path: folder.encoder_path, probe_folder.probed_config_path: folder.config_path}
    _run_job("probe", probe, probe_folder, lambda: _write(sheet), copied)
    _write(sheet)


def train(
    sheet: Sheet, scale: Scale, recipe: str, seed: int, changes: Mapping[str, Any] | None = None
) -> PretrainConfig:
    """Runs or resumes a pretraining without a probe; the arguments are those of `train_and_probe`."""
    if sheet.plan.data is None:
        raise ValueError("a training run needs --data")
    config = from_values(PretrainConfig, make_run_values(sheet.plan, scale, recipe, seed, changes))
    folder, _ = folders_of(sheet)
    is_other = folder.holds_run and not _is_run_of(folder, config)
    if is_other:
        print(f"  {folder.path} has other settings, as of an earlier version: it starts again", flush=True)
        for path in filter(Path.exists, sheet.run_paths):
            shutil.rmtree(path)
    before, begun = 0.0 if is_other else float(sheet.read().get("train_s", 0.0)), time.monotonic()
    is_new = folder.outcome() != "finished"
    sheet.write(
        environment=describe_environment(),
        recipe=config.recipe,
        encoder=config.encoder.name,
        seed=seed,
        changes=dict(changes or {}),
        train_s=before,
    )

    def write() -> None:
        _write(sheet, train_s=before + (time.monotonic() - begun if is_new else 0.0))

    try:
        _run_job("pretrain", config, folder, write)
    finally:
        write()
    shutil.rmtree(folder.checkpoints_path, ignore_errors=True)  # the encoder and the results are kept
    return config


def _is_run_of(folder: RunFolder, config: PretrainConfig) -> bool:
    """Whether the run in a folder has the settings of a configuration, except for those without effect."""
    try:
        found = from_values(PretrainConfig, stored_values(folder.config_path))
    except UserError:  # of a version with other keys
        return False
    return (found.seed, digest_of(found)) == (config.seed, digest_of(config))


def folders_of(sheet: Sheet) -> tuple[RunFolder, RunFolder]:
    """The folders of a part's pretraining and of its probe."""
    folder, probe_folder = map(RunFolder, sheet.run_paths)
    return folder, probe_folder


def _write(sheet: Sheet, **results: Any) -> None:
    sheet.write(**read_results(*folders_of(sheet)), **results)


def _run_job(
    job: Any,
    config: PretrainConfig | ProbeJobConfig,
    folder: RunFolder,
    write: Callable[[], None],
    copied: Mapping[Path, Path] | None = None,
) -> None:
    """Runs a job in its folder, or resumes it from its last checkpoint; SIGTERM stops it after a save.

    Args:
        job: name of the job.
        config: its configuration.
        folder: its folder.
        write: writes its results so far.
        copied: path in the folder -> file that is copied to it before the job starts.

    Raises:
        Stopped: the job was stopped.
        UserError: the job failed, for example because the objective is not finite.
    """
    if folder.outcome() == "finished":
        return
    values = to_values(config)
    if folder.holds_run:
        folder.resume(values)
    else:
        folder.start(values, copied)
    folder.stop_path.unlink(missing_ok=True)  # left by an earlier call
    signal.signal(signal.SIGTERM, lambda *_: folder.stop_path.touch())
    logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="  %(message)s")
    ended = threading.Event()
    reporter = threading.Thread(target=_report_progress, args=(folder, ended, write), daemon=True)
    reporter.start()
    try:
        work(job, values, folder, Worker(rank=0, world_size=1, device=choose_device()))
    finally:
        ended.set()
        reporter.join()
    if (error := folder.error()) is not None:
        raise error
    if folder.outcome() == "stopped":
        raise Stopped("stopped; the state is saved")


def _report_progress(folder: RunFolder, ended: threading.Event, write: Callable[[], None]) -> None:
    while not ended.wait(_PROGRESS_S):
        write()
        last = {key: value for record in folder.records()[-5:] for key, value in record["metrics"].items()}
        shown = ", ".join(f"{key} {value:,.4g}" for key, value in last.items() if key in _PROGRESS_METRICS)
        print(f"  {time.strftime('%H:%M:%S')} {shown}", flush=True)


def read_results(folder: RunFolder, probe_folder: RunFolder) -> dict[str, Any]:
    """Reads a run's speed, its curves by epoch, its last metrics and its probe's results from their folders."""
    records = folder.records()
    rates = [each["metrics"]["train/images_per_s"] for each in records if "train/images_per_s" in each["metrics"]]
    curve = {
        int(each["metrics"]["train/epoch"]): [each["metrics"][key] for key in _CURVES]
        for each in records
        if each["metrics"].get("train/epoch", 0.5).is_integer()
    }
    monitored = [(each["step"], each["metrics"]) for each in records if "val/knn_top1" in each["metrics"]]
    last = monitored[-1][1] if monitored and folder.outcome() == "finished" else {}
    results = {
        key: value for each in probe_folder.records() for key, value in each["metrics"].items() if key in _PROBE_RESULTS
    }
    return {
        "steps": max((each["step"] for each in records), default=-1) + 1,
        "images_per_s": statistics.median(rates) if rates else None,
        "curves": {"of": ["epoch", *_CURVES], "rows": [[epoch, *row] for epoch, row in curve.items()]},
        "monitored": [[step, metrics["val/knn_top1"]] for step, metrics in monitored],
        **{key: last[key] for key in _HELD_OUT if key in last},
        **results,
    }
