"""The parts of a campaign: tests, speed, training runs with their probes, and the other benchmarks."""

import logging
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch

from benchmarks import evaluation, growth, measure, options, throughput
from benchmarks.campaign.recipes import load_recipes
from benchmarks.campaign.running import Part
from benchmarks.campaign.sheet import Plan, Sheet
from benchmarks.measure import choose_device, describe_environment, describe_error, measure_peak_rate
from benchmarks.simclr import Setting, draw_images, open_images
from ssl_sec.data.image_set import ResidentImages
from ssl_sec.edges.folder.folder import RunFolder
from ssl_sec.edges.run.worker import Worker, work
from ssl_sec.errors import Stopped
from ssl_sec.recipes.pretraining.config import PretrainConfig
from ssl_sec.recipes.probing.config import ProbeJobConfig
from ssl_sec.settings import from_values, to_values

SEEDS = (0, 1, 2)
# At the larger batch only those that fit into memory together.
CONTENDERS: Mapping[int, tuple[str, ...] | None] = {
    256: None,
    1024: ("ours", "ours, without CUDA graphs", "plain loop", "lightly"),
}
_PROGRESS_S = 20.0


@dataclass(frozen=True, kw_only=True)
class Scale:
    """The sizes of all measurements.

    Attributes:
        width: multiplies the channels of every network.
        batches: the batch sizes of the speed table.
        rounds: the number of turns of each contender.
        seeds: the seeds of ResNet-18's runs.
        training: values of every training run.
        tests: the paths that pytest collects.
        rows: the numbers of rows of NT-Xent.
        classes: the numbers of classes of ArcFace.
        evaluated: the number of images in the evaluation.
    """

    width: float = 1.0
    batches: tuple[int, ...] = (256, 1024)
    rounds: int = 3
    seeds: tuple[int, ...] = SEEDS
    training: Mapping[str, Any]
    tests: tuple[str, ...] = ("tests",)
    rows: tuple[int, ...] = (512, 2048, 8192, 32_768, 65_536)
    classes: tuple[int, ...] = (10_000, 100_000, 1_000_000)
    evaluated: int = 50_000


FULL = Scale(training={})
TINY = Scale(
    width=0.125,
    batches=(8,),
    rounds=1,
    seeds=(0,),
    training={
        "epochs": 2,
        "global_batch_size": 40,
        "monitor": {"every_epochs": 1, "max_images": 40},
        "checkpoint": {"every_epochs": 1},
        "probe": {"epochs": 2},
        "log_every_steps": 1,
    },
    tests=("tests/gpu/test_objective.py",),
    rows=(64,),
    classes=(10,),
    evaluated=1500,
)


def list_parts(plan: Plan) -> list[Part]:
    """Returns all parts, in order."""
    scale = TINY if plan.rehearsal else FULL
    speed = [
        Part(
            name=f"speed-{encoder}-{batch}",
            limit_s=480,
            measure=lambda sheet, encoder=encoder, batch=batch: _measure_speed(sheet, scale, encoder, batch),
        )
        for batch in scale.batches
        for encoder in ("resnet50", "resnet18")
    ]
    arms = [("resnet50", arm, 0) for arm in ("ntxent", "sec")]
    arms += [("resnet18", arm, seed) for seed in scale.seeds for arm in ("ntxent", "sec", "sec_ema", "l2reg")]
    runs = [
        Part(
            name=f"train-{encoder}-{arm}-s{seed}",
            limit_s=3600,
            measure=lambda sheet, recipe=f"{encoder}-{arm}", seed=seed: _train_and_probe(sheet, scale, recipe, seed),
        )
        for encoder, arm, seed in arms
    ]
    parts = [
        Part(name="gpu-tests", limit_s=480, measure=lambda sheet: _run_tests(sheet, scale)),
        *speed,
        *runs,
        Part(name="views", limit_s=120, measure=lambda sheet: _measure_views(sheet, scale)),
        Part(name="options", limit_s=480, measure=lambda sheet: _measure_options(sheet, scale)),
        Part(name="growth", limit_s=240, measure=lambda sheet: _measure_growth(sheet, scale)),
        Part(name="evaluation", limit_s=480, measure=lambda sheet: _measure_evaluation(sheet, scale)),
    ]
    return [replace(part, measure=_shorten(part.measure)) for part in parts] if plan.rehearsal else parts


def _run_tests(sheet: Sheet, scale: Scale) -> None:
    """Runs the tests that need a GPU, by pytest in its own process."""
    report = sheet.path.with_suffix(".xml")
    command = ["-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *scale.tests]
    root = Path(__file__).parents[2]
    pytest = subprocess.run([sys.executable, *command], cwd=root, capture_output=True, text=True)
    print(pytest.stdout[-2000:], flush=True)
    sheet.write(environment=describe_environment(), exit_code=pytest.returncode, **count_outcomes(report))
    report.unlink(missing_ok=True)
    if pytest.returncode not in (0, 1, 5):  # 1: tests failed, and are listed; 5: no tests were collected
        raise RuntimeError((pytest.stdout + pytest.stderr).strip()[-1000:])


def count_outcomes(report: Path) -> dict[str, Any]:
    """Counts the tests of a JUnit file: collected, passed, failed and skipped, the last two with one line of reason."""
    cases = [*ElementTree.parse(report).iter("testcase")] if report.exists() else []
    failed: dict[str, str] = {}
    skipped: dict[str, str] = {}
    for case in cases:
        name = f"{case.get('classname')}::{case.get('name')}"
        for kinds, found in ((("failure", "error"), failed), (("skipped",), skipped)):
            for outcome in (each for kind in kinds for each in case.findall(kind)):
                found[name] = (outcome.get("message") or "").strip().partition("\n")[0][:300]
    passed = len(cases) - len(failed) - len(skipped)
    return {"collected": len(cases), "passed": passed, "failed": failed, "skipped": skipped}


def _load_images(plan: Plan, at_least: int) -> ResidentImages:
    images = None if plan.data is None else open_images(plan.data)
    if images is not None and len(images) >= at_least:
        return images
    return draw_images(max(throughput.NUM_RANDOM_IMAGES[choose_device().type], at_least), 32)


def _shorten(measure_part: Callable[[Sheet], None]) -> Callable[[Sheet], None]:
    """Makes a part measure turns of single steps, for a rehearsal; the changed settings end with the part's process."""

    def measure_shortened(sheet: Sheet) -> None:
        throughput.SECONDS_PER_TURN.update(cpu=0.0)
        options.SECONDS_PER_TURN.update(cpu=0.0)
        measure.PEAK_SIZES.update(cpu=(128, 1))
        measure_part(sheet)

    return measure_shortened


def _make_setting(scale: Scale, encoder: str, batch: int) -> Setting:
    return Setting(encoder=encoder, batch=batch, precision="bfloat16", width=scale.width)


def _measure_speed(sheet: Sheet, scale: Scale, encoder: str, batch: int) -> None:
    """Measures our variants and the peers, in turns."""
    images = _load_images(sheet.plan, batch)
    sheet.write(environment=describe_environment(), images=images.description)
    setting = _make_setting(scale, encoder, batch)
    sheet.write(rows=throughput.measure(setting, images, choose_device(), scale.rounds, CONTENDERS.get(batch)))


def _measure_views(sheet: Sheet, scale: Scale) -> None:
    rows = options.measure_augmentations(scale.batches[0], choose_device(), scale.rounds)
    sheet.write(environment=describe_environment(), batch=scale.batches[0], rows=rows)


def _measure_options(sheet: Sheet, scale: Scale) -> None:
    setting = _make_setting(scale, "resnet18", scale.batches[0])
    names = ("optimiser fused", "augmentation ahead") if sheet.plan.rehearsal else None  # those that do not compile
    rows = options.measure_steps(setting, _load_images(sheet.plan, setting.batch), choose_device(), scale.rounds, names)
    sheet.write(environment=describe_environment(), encoder=setting.encoder, batch=setting.batch, rows=rows)


def _measure_growth(sheet: Sheet, scale: Scale) -> None:
    device = choose_device()
    peak = measure_peak_rate(device, "float32")
    sheet.write(environment=describe_environment(), rows=[], classes=[])
    for key, counts, measure_one in (
        ("rows", scale.rows, growth.measure_rows),
        ("classes", scale.classes, growth.measure_classes),
    ):
        for count in counts:
            try:
                found = measure_one(count, device, peak)
            except torch.OutOfMemoryError as error:
                found = {key: count, "error": describe_error(error)}
            sheet.figures[key].append(found)
            sheet.write()


def _measure_evaluation(sheet: Sheet, scale: Scale) -> None:
    sheet.write(environment=describe_environment(), images=scale.evaluated)
    sheet.write(rows=evaluation.measure(scale.evaluated, rounds=1))


def _merge(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(values)
    for key, value in changes.items():
        merged[key] = {**merged[key], **value} if isinstance(value, Mapping) else value
    return merged


def make_run_values(plan: Plan, scale: Scale, recipe: str, seed: int) -> dict[str, Any]:
    """Makes the values of a training run."""
    values = _merge(load_recipes()[recipe], {**scale.training, "seed": seed, "output_dir": plan.checkpoints})
    values["encoder"] = {**values["encoder"], "width": scale.width}
    return values if plan.data is None else {**values, "data": plan.data}


def _train_and_probe(sheet: Sheet, scale: Scale, recipe: str, seed: int) -> None:
    """Runs or resumes a pretraining, then its probe."""
    if sheet.plan.data is None:
        raise ValueError("a training run needs --data")
    config = from_values(PretrainConfig, make_run_values(sheet.plan, scale, recipe, seed))
    folder = RunFolder(Path(sheet.plan.checkpoints) / sheet.name)
    probe = ProbeJobConfig(run=str(folder.path), probe=config.probe, runtime=config.runtime, data=config.data)
    probe_folder = RunFolder(folder.path.with_name(f"{sheet.name}-probe"))
    sheet.write(environment=describe_environment(), recipe=config.recipe, encoder=config.encoder.name, seed=seed)

    def write() -> None:
        sheet.write(**read_figures(folder, probe_folder))

    _run_job("pretrain", config, folder, write)
    probe_folder.path.mkdir(parents=True, exist_ok=True)
    shutil.copy(folder.encoder_path, probe_folder.encoder_path)
    shutil.copy(folder.config_path, probe_folder.path / "pretrain.yaml")
    _run_job("probe", probe, probe_folder, write)
    write()
    shutil.rmtree(folder.checkpoints_path, ignore_errors=True)  # the encoder and the figures are kept


def _run_job(job: Any, config: PretrainConfig | ProbeJobConfig, folder: RunFolder, write: Callable[[], None]) -> None:
    """Runs a job in its folder, or resumes it from its last checkpoint; SIGTERM stops it after a save.

    Raises:
        Stopped: the job was stopped.
        UserError: the job failed, for example because the objective is not finite.
    """
    if folder.outcome() == "finished":
        return
    values = to_values(config)
    (folder.resume if folder.holds_run else folder.start)(values)
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


_PROGRESS_METRICS = ("train/epoch", "train/loss", "train/images_per_s", "val/knn_top1", "probe/epoch", "probe/loss")


def read_figures(folder: RunFolder, probe_folder: RunFolder) -> dict[str, Any]:
    """Reads a run's speed, its curves by epoch and its probe's results from their folders."""
    records = folder.records()
    rates = [each["metrics"]["train/images_per_s"] for each in records if "train/images_per_s" in each["metrics"]]
    curve = {
        int(each["metrics"]["train/epoch"]): [each["metrics"][key] for key in _CURVES]
        for each in records
        if each["metrics"].get("train/epoch", 0.5).is_integer()
    }
    monitored = [(each["step"], each["metrics"]) for each in records if "val/knn_top1" in each["metrics"]]
    results = {
        key: value for each in probe_folder.records() for key, value in each["metrics"].items() if key in _PROBE_RESULTS
    }
    return {
        "steps": max((each["step"] for each in records), default=-1) + 1,
        "images_per_s": statistics.median(rates) if rates else None,
        "curves": {"of": ["epoch", *_CURVES], "rows": [[epoch, *row] for epoch, row in curve.items()]},
        "monitored": [[step, metrics["val/knn_top1"]] for step, metrics in monitored],
        **results,
    }


_CURVES = ("train/loss", "train/norm_mean", "train/norm_std")
_PROBE_RESULTS = ("probe/top1", "probe/top5", "probe/knn_top1", "probe/learning_rate")


def select_parts(plan: Plan, patterns: Sequence[str]) -> list[Part]:
    """Returns the parts whose names match a pattern; all parts if there are no patterns.

    Raises:
        SystemExit: a pattern matches no part.
    """
    parts = list_parts(plan)
    for pattern in patterns:
        if not any(fnmatch(part.name, pattern) for part in parts):
            raise SystemExit(f"{pattern}: no such part; allowed: {', '.join(part.name for part in parts)}")
    return [part for part in parts if not patterns or any(fnmatch(part.name, pattern) for pattern in patterns)]
