"""The parts of a campaign: tests, speed, training runs with their probes, and the other benchmarks."""

import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch

from benchmarks import evaluation, growth, measure, options, throughput
from benchmarks.campaign.running import Part
from benchmarks.campaign.scale import FULL, TINY, Scale
from benchmarks.campaign.sheet import Plan, Sheet
from benchmarks.campaign.study import list_study_parts
from benchmarks.campaign.training import train_and_probe
from benchmarks.measure import choose_device, describe_environment, describe_error, measure_peak_rate
from benchmarks.simclr import Setting, draw_images, open_images
from ssl_sec.data.image_set import ResidentImages

# At the larger batch only those that fit into memory together.
CONTENDERS: Mapping[int, tuple[str, ...] | None] = {
    256: None,
    1024: ("ours", "ours, without CUDA graphs", "plain loop", "lightly"),
}


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
            measure=lambda sheet, recipe=f"{encoder}-{arm}", seed=seed: train_and_probe(sheet, scale, recipe, seed),
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
        *list_study_parts(scale),
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
