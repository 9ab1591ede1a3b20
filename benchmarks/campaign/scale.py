"""The sizes of a campaign's measurements, in full and in a rehearsal."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Scale:
    """The sizes of all measurements.

    Attributes:
        width: factor for the channels of every network.
        batches: the batch sizes of the speed table.
        rounds: the number of turns of each contender.
        seeds: seeds of ResNet-18's runs.
        study_seeds: the seeds of the study's runs.
        training: values of every training run.
        tests: the paths that pytest collects.
        rows: the numbers of rows of NT-Xent.
        classes: the numbers of classes of ArcFace.
        evaluated: the number of images in the evaluation.
        studied: the encoders of the study.
        arms: the arms of the study, in groups that follow each other; the first has the baseline.
        trials: the largest number of trials of an arm's search.
        small_arms: number of arms of a study with small runs, likewise for the next two; None for all.
        small_seeds: number of their seeds.
        small_trials: number of trials of each of their searches.
        processes: number of small runs at once.
    """

    width: float = 1.0
    batches: tuple[int, ...] = (256, 1024)
    rounds: int = 3
    seeds: tuple[int, ...] = (0, 1, 2)
    study_seeds: tuple[int, ...] = (0, 1, 2, 3, 4, 5, 6, 7)
    training: Mapping[str, Any]
    tests: tuple[str, ...] = ("tests",)
    rows: tuple[int, ...] = (512, 2048, 8192, 32_768, 65_536)
    classes: tuple[int, ...] = (10_000, 100_000, 1_000_000)
    evaluated: int = 50_000
    studied: tuple[str, ...] = ("resnet18", "resnet50")
    arms: tuple[tuple[str, ...], ...] = (
        ("none", "sec"),
        ("gradscale", "l2reg"),
        ("fixed_radius", "sec_ema"),
        ("cut_init",),
    )
    trials: int = 6
    small_arms: int | None = None
    small_seeds: int | None = None
    small_trials: int | None = None
    processes: int = 12


# The check of the images is left out, which saves decoding them once: the images of a known set need none.
FULL = Scale(training={"check_images": 0})
TINY = Scale(
    width=0.125,
    batches=(8,),
    rounds=1,
    seeds=(0,),
    study_seeds=(0,),
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
    studied=("resnet18",),
    arms=(("none", "sec"),),
    trials=2,
    small_arms=2,
    small_seeds=1,
    small_trials=1,
    processes=1,
)


@dataclass(frozen=True, kw_only=True)
class SmallStudy:
    """A study, or a part of one.

    Attributes:
        points: the points to run; all if none are given.
        seeds: seeds of every arm.
    """

    points: tuple[str, ...] = ()
    seeds: tuple[int, ...]


SMALL_STUDIES: Mapping[str, SmallStudy] = {
    "confirm": SmallStudy(seeds=(0, 1, 2)),
    "confirm_rates": SmallStudy(seeds=(0, 1, 2)),
    "when_cpu": SmallStudy(seeds=(0, 1, 2)),
    "sec_cpu": SmallStudy(points=("loss=dcl",), seeds=tuple(range(8))),
}
