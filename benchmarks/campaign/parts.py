"""The parts of a campaign: tests, speed, training runs with their probes, and what else is measured on a GPU."""

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
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch

from benchmarks import evaluation, growth, measure, options, throughput
from benchmarks.campaign.recipes import stored
from benchmarks.campaign.running import Part
from benchmarks.campaign.sheet import Plan, Sheet
from benchmarks.measure import environment, peak_rate
from benchmarks.simclr import Setting, opened_images, random_images
from ssl_sec.data.image_set import ResidentImages
from ssl_sec.edges.folder.folder import RunFolder
from ssl_sec.edges.run.worker import Worker, work
from ssl_sec.errors import Stopped
from ssl_sec.recipes.pretraining.config import PretrainConfig
from ssl_sec.recipes.probing.config import ProbeJobConfig
from ssl_sec.settings import from_values, to_values

SEEDS = (0, 1, 2)
# At the larger batch those alone whose memory fits beside each other.
CONTENDERS: Mapping[int, tuple[str, ...] | None] = {
    256: None,
    1024: ("ours", "ours, without CUDA graphs", "plain loop", "lightly"),
}
_PROGRESS_S = 20.0


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How large everything is.

    Attributes:
        width: of every network, as a multiple.
        batches: of the speed table.
        rounds: turns of each contender.
        seeds: of ResNet-18's runs.
        training: values of every training run.
        tests: what pytest collects.
        rows: of NT-Xent.
        classes: of ArcFace.
        evaluated: images of the evaluation.
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


def parts_of(plan: Plan) -> list[Part]:
    """All parts, in their order."""
    scale = TINY if plan.rehearsal else FULL
    speed = [
        Part(
            name=f"speed-{encoder}-{batch}",
            limit_s=480,
            measure=lambda sheet, encoder=encoder, batch=batch: _speed(sheet, scale, encoder, batch),
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
            measure=lambda sheet, recipe=f"{encoder}-{arm}", seed=seed: _run(sheet, scale, recipe, seed),
        )
        for encoder, arm, seed in arms
    ]
    parts = [
        Part(name="gpu-tests", limit_s=480, measure=lambda sheet: _tests(sheet, scale)),
        *speed,
        *runs,
        Part(name="views", limit_s=120, measure=lambda sheet: _views(sheet, scale)),
        Part(name="options", limit_s=480, measure=lambda sheet: _options(sheet, scale)),
        Part(name="growth", limit_s=240, measure=lambda sheet: _growth(sheet, scale)),
        Part(name="evaluation", limit_s=480, measure=lambda sheet: _evaluation(sheet, scale)),
    ]
    return [replace(part, measure=_hurried(part.measure)) for part in parts] if plan.rehearsal else parts


def _device() -> torch.device:
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def _tests(sheet: Sheet, scale: Scale) -> None:
    """The tests that need a GPU, by pytest in a process of its own."""
    report = sheet.path.with_suffix(".xml")
    command = ["-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *scale.tests]
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, *command], cwd=root, capture_output=True, text=True)
    print(done.stdout[-2000:], flush=True)
    sheet.write(environment=environment(), exit_code=done.returncode, **outcomes(report))
    report.unlink(missing_ok=True)
    if done.returncode not in (0, 1, 5):  # 1: tests failed, which are named; 5: there are none
        raise RuntimeError((done.stdout + done.stderr).strip()[-1000:])


def outcomes(report: Path) -> dict[str, Any]:
    """What a JUnit file tells: how many tests were collected, passed and skipped, and which failed, with a line why."""
    cases = [*ElementTree.parse(report).iter("testcase")] if report.exists() else []
    failed: dict[str, str] = {}
    skipped: dict[str, str] = {}
    for case in cases:
        name = f"{case.get('classname')}::{case.get('name')}"
        for kinds, found in ((("failure", "error"), failed), (("skipped",), skipped)):
            for told in (each for kind in kinds for each in case.findall(kind)):
                found[name] = (told.get("message") or "").strip().partition("\n")[0][:300]
    passed = len(cases) - len(failed) - len(skipped)
    return {"collected": len(cases), "passed": passed, "failed": failed, "skipped": skipped}


def _images(plan: Plan, at_least: int) -> ResidentImages:
    images = None if plan.data is None else opened_images(plan.data)
    if images is not None and len(images) >= at_least:
        return images
    return random_images(max(throughput.NUM_RANDOM_IMAGES[_device().type], at_least), 32)


def _hurried(measured: Callable[[Sheet], None]) -> Callable[[Sheet], None]:
    """Measures with turns of single steps, as a rehearsal does; in the process of a part."""

    def hurried(sheet: Sheet) -> None:
        throughput.SECONDS_A_TURN.update(cpu=0.0)
        options.SECONDS_A_TURN.update(cpu=0.0)
        measure.PEAK_SIZES.update(cpu=(128, 1))
        measured(sheet)

    return hurried


def _setting(scale: Scale, encoder: str, batch: int) -> Setting:
    return Setting(encoder=encoder, batch=batch, precision="bfloat16", width=scale.width)


def _speed(sheet: Sheet, scale: Scale, encoder: str, batch: int) -> None:
    """Ours, its choices and the peers, in turns."""
    images = _images(sheet.plan, batch)
    sheet.write(environment=environment(), images=images.description)
    setting = _setting(scale, encoder, batch)
    sheet.write(rows=throughput.measure(setting, images, _device(), scale.rounds, CONTENDERS.get(batch)))


def _views(sheet: Sheet, scale: Scale) -> None:
    rows = options.of_augmentations(scale.batches[0], _device(), scale.rounds)
    sheet.write(environment=environment(), batch=scale.batches[0], rows=rows)


def _options(sheet: Sheet, scale: Scale) -> None:
    setting = _setting(scale, "resnet18", scale.batches[0])
    names = ("optimiser fused", "augmentation ahead") if sheet.plan.rehearsal else None  # none that compiles
    rows = options.of_steps(setting, _images(sheet.plan, setting.batch), _device(), scale.rounds, names)
    sheet.write(environment=environment(), encoder=setting.encoder, batch=setting.batch, rows=rows)


def _growth(sheet: Sheet, scale: Scale) -> None:
    device = _device()
    peak = peak_rate(device, "float32")
    sheet.write(environment=environment(), rows=[], classes=[])
    for key, counts, measured in (
        ("rows", scale.rows, growth.of_rows),
        ("classes", scale.classes, growth.of_classes),
    ):
        for count in counts:
            try:
                found = measured(count, device, peak)
            except torch.OutOfMemoryError as error:
                found = {key: count, "error": measure.told(error)}
            sheet.figures[key].append(found)
            sheet.write()


def _evaluation(sheet: Sheet, scale: Scale) -> None:
    sheet.write(environment=environment(), images=scale.evaluated)
    sheet.write(rows=evaluation.measure(scale.evaluated, rounds=1))


def _merged(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(values)
    for key, value in changes.items():
        merged[key] = {**merged[key], **value} if isinstance(value, Mapping) else value
    return merged


def run_values(plan: Plan, scale: Scale, recipe: str, seed: int) -> dict[str, Any]:
    """The values of a training run."""
    values = _merged(stored()[recipe], {**scale.training, "seed": seed, "output_dir": plan.checkpoints})
    values["encoder"] = {**values["encoder"], "width": scale.width}
    return values if plan.data is None else {**values, "data": plan.data}


def _run(sheet: Sheet, scale: Scale, recipe: str, seed: int) -> None:
    """A pretraining, taken up where it was, and its probe."""
    if sheet.plan.data is None:
        raise ValueError("a training run needs --data")
    config = from_values(PretrainConfig, run_values(sheet.plan, scale, recipe, seed))
    folder = RunFolder(Path(sheet.plan.checkpoints) / sheet.name)
    probe = ProbeJobConfig(run=str(folder.path), probe=config.probe, runtime=config.runtime, data=config.data)
    probed = RunFolder(folder.path.with_name(f"{sheet.name}-probe"))
    sheet.write(environment=environment(), recipe=config.recipe, encoder=config.encoder.name, seed=seed)

    def write() -> None:
        sheet.write(**training_figures(folder, probed))

    _worked("pretrain", config, folder, write)
    probed.path.mkdir(parents=True, exist_ok=True)
    shutil.copy(folder.encoder_path, probed.encoder_path)
    shutil.copy(folder.config_path, probed.path / "pretrain.yaml")
    _worked("probe", probe, probed, write)
    write()
    shutil.rmtree(folder.checkpoints_path, ignore_errors=True)  # the encoder and the figures stay


def _worked(job: Any, config: PretrainConfig | ProbeJobConfig, folder: RunFolder, progress: Callable[[], None]) -> None:
    """Does a job in its folder, from its last checkpoint on, and asks it to stop at SIGTERM.

    Raises:
        Stopped: it was asked to.
        UserError: it failed, as for an objective that is no number.
    """
    if folder.outcome() == "finished":
        return
    values = to_values(config)
    (folder.resume if folder.holds_run else folder.start)(values)
    signal.signal(signal.SIGTERM, lambda *_: folder.stop_path.touch())
    logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="  %(message)s")
    over = threading.Event()
    teller = threading.Thread(target=_tell, args=(folder, over, progress), daemon=True)
    teller.start()
    try:
        work(job, values, str(folder.path), Worker(rank=0, world_size=1, device=_device()))
    finally:
        over.set()
        teller.join()
    if (error := folder.error()) is not None:
        raise error
    if folder.outcome() == "stopped":
        raise Stopped("stopped; the state is saved")


def _tell(folder: RunFolder, over: threading.Event, progress: Callable[[], None]) -> None:
    while not over.wait(_PROGRESS_S):
        progress()
        last = {key: value for record in folder.records()[-5:] for key, value in record["metrics"].items()}
        shown = ", ".join(f"{key} {value:,.4g}" for key, value in last.items() if key in _TOLD)
        print(f"  {time.strftime('%H:%M:%S')} {shown}", flush=True)


_TOLD = ("train/epoch", "train/loss", "train/images_per_s", "val/knn_top1", "probe/epoch", "probe/loss")


def training_figures(folder: RunFolder, probed: RunFolder) -> dict[str, Any]:
    """What a run's folders tell: its speed, its curves by epoch, and what its probe found."""
    records = folder.records()
    rates = [each["metrics"]["train/images_per_s"] for each in records if "train/images_per_s" in each["metrics"]]
    curve = {
        int(each["metrics"]["train/epoch"]): [each["metrics"][key] for key in _CURVES]
        for each in records
        if each["metrics"].get("train/epoch", 0.5).is_integer()
    }
    monitored = [(each["step"], each["metrics"]) for each in records if "val/knn_top1" in each["metrics"]]
    found = {key: value for each in probed.records() for key, value in each["metrics"].items() if key in _FOUND}
    return {
        "steps": max((each["step"] for each in records), default=-1) + 1,
        "images_per_s": statistics.median(rates) if rates else None,
        "curves": {"of": ["epoch", *_CURVES], "rows": [[epoch, *row] for epoch, row in curve.items()]},
        "monitored": [[step, metrics["val/knn_top1"]] for step, metrics in monitored],
        **found,
    }


_CURVES = ("train/loss", "train/norm_mean", "train/norm_std")
_FOUND = ("probe/top1", "probe/top5", "probe/knn_top1", "probe/learning_rate")


def of_names(plan: Plan, patterns: Sequence[str]) -> list[Part]:
    """The parts whose names fit one of the patterns, all where there is none.

    Raises:
        SystemExit: a pattern fits none.
    """
    from fnmatch import fnmatch

    parts = parts_of(plan)
    for pattern in patterns:
        if not any(fnmatch(part.name, pattern) for part in parts):
            raise SystemExit(f"{pattern}: no such part; allowed: {', '.join(part.name for part in parts)}")
    return [part for part in parts if not patterns or any(fnmatch(part.name, pattern) for pattern in patterns)]
