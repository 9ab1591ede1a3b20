"""The parts of a campaign: tests, speed, training runs with their probes, and the other benchmarks."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from fnmatch import fnmatch
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch

from benchmarks import evaluation, growth, measure, options, throughput
from benchmarks.campaign import outcomes
from benchmarks.campaign.recipes import OPEN, TUNED
from benchmarks.campaign.running import Part, end_with
from benchmarks.campaign.scale import FULL, TINY, Scale
from benchmarks.campaign.sheet import Plan, Sheet
from benchmarks.campaign.small import list_small_parts
from benchmarks.campaign.study import list_study_parts
from benchmarks.campaign.training import train_and_probe
from benchmarks.measure import choose_device, describe_environment, describe_error, measure_peak_rate
from benchmarks.simclr import Setting

# Time limit of a test, where pytest-timeout is installed: as long as a test of compiled code waits for its program.
_SECONDS_PER_TEST = 240

# Contenders with the larger network and the larger batch: those that fit into memory together, and compile in a minute.
CONTENDERS = ("ours", "ours, without CUDA graphs", "plain loop", "lightly")


def list_parts(plan: Plan) -> list[Part]:
    """Returns all parts, in order."""
    scale = TINY if plan.rehearsal else FULL

    def speed(batch: int) -> list[Part]:
        return [
            Part(
                name=f"speed-{encoder}-{batch}",
                limit_s=480,
                measure=lambda sheet, encoder=encoder: _measure_speed(sheet, scale, encoder, batch),
            )
            for encoder in ("resnet50", "resnet18")
        ]

    def runs(encoder: str, arms: Sequence[str], seeds: Sequence[int]) -> list[Part]:
        return [
            Part(
                name=f"train-{encoder}-{arm}-s{seed}",
                limit_s=3600,
                measure=lambda sheet, recipe=f"{encoder}-{arm}", seed=seed: train_and_probe(
                    sheet, scale, recipe, seed, logistic=True
                ),
            )
            for seed in seeds
            for arm in arms
        ]

    # The results that half an hour can give come first: the speed, the tests, and whether SEC helps a small network.
    first, *larger = scale.batches
    parts = [
        *speed(first),
        Part(name="gpu-tests", limit_s=480, measure=lambda sheet: _run_tests(sheet, scale)),
        *list_small_parts(scale),
        *runs("resnet18", ("ntxent", "sec"), scale.seeds),
        *runs("resnet50", ("ntxent", "sec", *OPEN), (0,)),
        *runs("resnet18", tuple(TUNED), (0,)),
        *(part for batch in larger for part in speed(batch)),
        *runs("resnet18", ("sec_ema", "l2reg"), scale.seeds),
        Part(name="views", limit_s=120, measure=lambda sheet: _measure_views(sheet, scale)),
        Part(name="options", limit_s=480, measure=lambda sheet: _measure_options(sheet, scale)),
        Part(name="growth", limit_s=240, measure=lambda sheet: _measure_growth(sheet, scale)),
        Part(name="evaluation", limit_s=480, measure=lambda sheet: _measure_evaluation(sheet, scale)),
        *list_study_parts(scale),
    ]
    return [replace(part, measure=_shorten(part.measure)) for part in parts] if plan.rehearsal else parts


def _run_tests(sheet: Sheet, scale: Scale) -> None:
    """Runs the tests that need a GPU, by pytest in its own process; the sheet has each outcome as it comes."""
    path = sheet.path.with_suffix(".jsonl")
    path.unlink(missing_ok=True)
    command = ["-m", "pytest", "-m", "gpu", "-v", "-p", "no:cacheprovider", "-p", outcomes.__name__, *scale.tests]
    if find_spec("pytest_timeout") is not None:
        command.append(f"--timeout={_SECONDS_PER_TEST}")
    sheet.write(environment=describe_environment())
    environment = {**os.environ, outcomes.FILE: str(path)}
    with subprocess.Popen(
        [sys.executable, *command],
        cwd=Path(__file__).parents[2],
        env=environment,
        preexec_fn=partial(end_with, os.getpid()),
    ) as pytest:
        while (code := pytest.poll()) is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                pytest.wait(5)
            sheet.write(**outcomes.count_outcomes(path))
    sheet.write(exit_code=code)
    path.unlink(missing_ok=True)
    if code not in (0, 1, 5):  # 1: tests failed, and are listed; 5: no tests were collected
        raise RuntimeError(f"pytest ended with exit code {code}; its output is in log.txt")


def _shorten(measure_part: Callable[[Sheet], None]) -> Callable[[Sheet], None]:
    """Limits the turns of a part to single steps, for a rehearsal; the changed settings end with the part's process."""

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
    images = throughput.load_images(None, choose_device(), batch)  # random: the content does not change the speed
    sheet.write(environment=describe_environment(), images=images.description)
    setting = _make_setting(scale, encoder, batch)
    throughput.measure(
        setting,
        images,
        choose_device(),
        scale.rounds,
        None if encoder == "resnet18" and batch == scale.batches[0] else CONTENDERS,
        on_rows=lambda rows: sheet.write(rows=rows),
    )


def _measure_views(sheet: Sheet, scale: Scale) -> None:
    rows = options.measure_augmentations(scale.batches[0], choose_device(), scale.rounds)
    sheet.write(environment=describe_environment(), batch=scale.batches[0], rows=rows)


def _measure_options(sheet: Sheet, scale: Scale) -> None:
    setting = _make_setting(scale, "resnet18", scale.batches[0])
    names = ("optimiser fused", "augmentation ahead") if sheet.plan.rehearsal else None  # these do not compile
    images = throughput.load_images(None, choose_device(), setting.batch)
    rows = options.measure_steps(setting, images, choose_device(), scale.rounds, names)
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
            sheet.results[key].append(found)
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
