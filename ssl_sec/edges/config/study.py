"""The configuration of jobs.study, and of the file that describes a study."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from ssl_sec.errors import ConfigError, nearest
from ssl_sec.recipes.registry import require_training
from ssl_sec.rules import Count, Local, NotEmpty, Seed, check
from ssl_sec.settings import Settings


@dataclass(frozen=True)
class Distinct:
    """A list without repeated values.

    Attributes:
        what: name of the values in messages.
    """

    what: str

    def check(self, key: str, value: Sequence[object]) -> None:
        """Raises a ConfigError that names the key if a value is repeated."""
        check(len(set(value)) == len(value), key, value, f"different {self.what}")


Seeds = Annotated[tuple[Seed, ...], NotEmpty(), Distinct("seeds")]


@dataclass(frozen=True, kw_only=True)
class StudyConfig(Settings):
    """A study, or a part of it; the other keys are those of its training.

    Attributes:
        study: the study: a name of configs/study, or the path of such a file.
        arms: some of its arms; null for all. The baseline always runs.
        points: some of its points, as its table names them, such as loss=ntxent; null for all.
        seeds: seeds that replace the study's own; null keeps those.
        concurrent: number of runs at a time, each in its own process.
        cells: CSV file with the metrics of the runs: runs in it are not run again, and each run is added when it ends;
            null for cells.csv in the folder of the study's runs. The file of its searches is kept next to it.
        run: false only compares the finished runs, and starts none; without a file of cells they are read from MLflow.
    """

    study: str
    arms: tuple[str, ...] | None = None
    points: Annotated[tuple[str, ...], NotEmpty()] | None = None
    seeds: Seeds | None = None
    concurrent: Count = 1
    cells: Local | None = None
    run: bool = True


@dataclass(frozen=True, kw_only=True)
class StudyFile(Settings):
    """The content of a study.

    Attributes:
        arms: name -> overrides of the recipe. Values that are Hydra's sweeps, such as interval(0.1,1), are searched by
            jobs.tune first, at each point of the study.
        seeds: each arm runs once with each of these, at each point.
        shared: overrides of all runs, applied before those of an arm.
        baseline: the arm that the others are compared with; null for the first.
        over: key -> values at which the arms are compared, one key at a time; `64+optimiser.learning_rate=0.1` changes
            other keys with the value. null: the recipe as it is.
        search: overrides of jobs.tune for the arms with sweeps, such as trials=8, and of their trainings. Trials are
            compared by the study's metric if that is one of the monitor's, and otherwise by that of jobs.tune.
        metric: the metric that the arms are compared by; null for the training's own, of test images if all runs have
            it: probe/top1, retrieval/recall_at_1, or the accuracy on the first test set of faces.
        job: the training that is run, such as metric_learning for jobs.metric_learning; null for that of the
            experiment, or pretrain.
    """

    arms: dict[str, tuple[str, ...]]
    seeds: Seeds
    shared: tuple[str, ...] = ()
    baseline: str | None = None
    over: dict[str, tuple[str, ...]] | None = None
    search: tuple[str, ...] = ()
    metric: str | None = None
    job: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check(len(self.arms) > 0, "arms", self.arms, "one arm or more")
        if self.baseline is not None and self.baseline not in self.arms:
            raise ConfigError(f"baseline: found {self.baseline!r}; {nearest(self.baseline, self.arms)}")
        if self.job is not None:
            require_training(self.job)
        for key, values in (self.over or {}).items():
            check(len(values) > 0, f"over.{key}", values, "one value or more")
