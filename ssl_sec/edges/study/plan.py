"""The cells of a study, arms times points times seeds, and the searches that come before them."""

import itertools
import re
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from ssl_sec.edges.composition.compose import compose, on_training, training_of
from ssl_sec.edges.composition.config_folders import CONFIG_FOLDER, config_file, own_folders
from ssl_sec.edges.config.study import StudyConfig, StudyFile
from ssl_sec.edges.overrides import UNREGISTERED, in_grammar, parsed, understood
from ssl_sec.edges.run.job_values import values_of
from ssl_sec.edges.study.digest import digest_of
from ssl_sec.edges.tune.space import Search, read_search
from ssl_sec.errors import ConfigError, first_line, nearest
from ssl_sec.recipes.config import TrainingConfig
from ssl_sec.recipes.pretraining.config import MONITORED
from ssl_sec.recipes.registry import PRETRAIN, RECIPES
from ssl_sec.settings import from_values

# Keys that differ in each run of a study, or that the study itself sets.
_RESERVED = {
    "seed": "seeds",
    "run_name": "nothing: runs are named after arm and seed",
    "resume": "nothing: a study resumes its runs",
}
# Keys that the overrides in a study's file may not have.
_RESERVED_IN_FILES = {**_RESERVED, "recipe": "the name of the file, or recipe=<name> on the command line"}

# The key that probes a pretraining at its end.
PROBED = "probe.enabled"
# The tags in MLflow that distinguish the runs of a study: the last is the digest of a run's configuration.
CELL_TAGS = ("arm", "point", "cell")


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """A setting at which arms are compared.

    Attributes:
        key: the varied key; empty for the recipe as it is.
        value: value of the key, with the other changes where several points share it.
        label: label in the names of its runs, different for each point of the study.
        overrides: overrides that set the value.
    """

    key: str = ""
    value: str = ""
    label: str = ""
    overrides: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """`key=value`; empty for the recipe as it is."""
        return f"{self.key}={self.value}" if self.key else ""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A run of a study."""

    job: str
    arm: str
    point: Point
    seed: int
    overrides: tuple[str, ...]
    config: TrainingConfig

    @property
    def key(self) -> tuple[str, str, int]:
        """The key of the cell: arm, point and seed."""
        return self.arm, self.point.name, self.seed

    @property
    def name(self) -> str:
        """The name of its run."""
        return str(self.config.run_name)

    @property
    def tags(self) -> dict[str, str]:
        """The tags of its run in MLflow, in addition to its seed."""
        found = dict(zip(CELL_TAGS, (self.arm, self.point.name, self.digest), strict=True))
        return {name: value for name, value in found.items() if value}

    @cached_property
    def digest(self) -> str:
        """The digest of all settings that affect the result, except the seed."""
        return digest_of(self.config, self.job)


@dataclass(frozen=True, kw_only=True)
class ArmAt:
    """An arm at a point.

    Attributes:
        arm: name of the arm.
        point: the point.
        overrides: overrides that its runs share, without those that are searched.
        config: configuration that its runs share; that of the search where there is one.
        search: search for the other overrides; None if there are none.
    """

    arm: str
    point: Point
    overrides: tuple[str, ...]
    config: TrainingConfig
    search: Search | None

    @property
    def key(self) -> tuple[str, str]:
        """The key: arm and point."""
        return self.arm, self.point.name

    @property
    def name(self) -> str:
        """The beginning of the names of its runs."""
        return named(self.point.label, self.arm)


@dataclass(frozen=True, kw_only=True)
class Study:
    """A study.

    Attributes:
        name: the recipe of its runs.
        job: the training of its runs.
        file: content of its file.
        config: settings of the job.
        seeds: seeds of each arm.
        arms: the arms at each point.
    """

    name: str
    job: str
    file: StudyFile
    config: StudyConfig
    seeds: tuple[int, ...]
    arms: Sequence[ArmAt]

    @property
    def baseline(self) -> str:
        """The arm that the others are compared with."""
        return self.file.baseline or next(iter(self.file.arms))

    @property
    def points(self) -> list[Point]:
        """The points at which the arms are compared, in order."""
        return list({arm.point.name: arm.point for arm in self.arms}.values())

    def arms_at(self, point: Point) -> list[ArmAt]:
        """The arms at a point."""
        return [arm for arm in self.arms if arm.point == point]

    def cells(self, chosen: Mapping[tuple[str, str], Sequence[str]]) -> list[Cell]:
        """The runs in order of points, and of seeds at each point, so that arms can be compared before all have ended.

        Args:
            chosen: (arm, point) -> overrides that its search has found; arms whose search is missing are left out.
        """
        known = {arm.key: arm for arm in self.arms if arm.search is None}
        for arm in self.arms:
            if arm.search is not None and arm.key in chosen:
                overrides = (*arm.overrides, *chosen[arm.key])
                config = _config(self.job, arm.arm, overrides)
                known[arm.key] = replace(arm, overrides=overrides, config=config)
        return [
            _cell(self.job, known[arm.key], seed)
            for point, seed in itertools.product(self.points, self.seeds)
            for arm in self.arms_at(point)
            if arm.key in known
        ]


def named(*parts: str) -> str:
    """A name for files, made from parts that may be empty."""
    return "-".join(re.sub(r"[^\w.]+", "_", part).strip("_") for part in parts if part)


def read_study(overrides: Sequence[str]) -> Study:
    """The study that the overrides describe.

    Args:
        overrides: overrides of the study, and of all its trainings.

    Raises:
        ConfigError: if a key, a value or the study's file is wrong.
    """
    own = {field.name for field in fields(StudyConfig)}
    each = {text: parsed(text).key_or_group for text in map(understood, overrides)}
    given = [parsed(text).value() for text, key in each.items() if key == "study"]
    asked = [value for value in given if value is not None]  # the composition reports null, as any other key's
    path, file = load_file(str(asked[-1])) if asked else (Path(), None)
    if file is not None:
        _require_no_reserved_keys(file, path)
    both = [*(file.shared if file else ()), *each]
    # Without a file, the composition reports that it is missing.
    job = training_of(both, None if file is None else file.job)
    values = compose(on_training("study", job), both)
    config = from_values(StudyConfig, {key: values[key] for key in own})
    assert file is not None
    name = path.stem
    typed = [text for text, key in each.items() if key not in own]
    typed_keys = {key for key in each.values() if key not in own}
    for key in _RESERVED:
        if key in typed_keys:
            raise ConfigError(f"{key}: a study sets it; allowed: {_RESERVED[key]}")
    shared = (
        UNREGISTERED,
        *([f"{PROBED}=true"] if RECIPES[job].probes_itself else []),
        *file.shared,
        *typed,
        *([] if "recipe" in typed_keys else [f"recipe={name}"]),
    )
    _require_different_names(file, path)
    arms = _chosen_arms(config, file)
    points = _chosen_points(config, file)
    found = [
        _arm_at(job, arm, point, (*shared, *point.overrides), arms[arm], file, path) for point in points for arm in arms
    ]
    return Study(name=name, job=job, file=file, config=config, seeds=config.seeds or file.seeds, arms=found)


def load_file(study: str) -> tuple[Path, StudyFile]:
    """The file of a study and its content.

    Raises:
        ConfigError: if there is none, or it cannot be read.
    """
    found = Path(study).expanduser() if study.endswith((".yaml", ".yml")) else None
    if found is None:
        packaged = config_file("study", study)
        found = None if packaged is None else packaged.path
    if found is None or not found.is_file():
        folders = (CONFIG_FOLDER, *own_folders())
        names = {path.stem for folder in folders for path in (folder / "study").glob("*.yaml")}
        raise ConfigError(f"study: found {study!r}; {nearest(study, names)}, or the path of a YAML file")
    try:
        values = yaml.load(found.read_text(encoding="utf-8"), _UniqueKeys)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"study: {found} cannot be read: {first_line(error)}") from error
    try:
        return found, from_values(StudyFile, _as_text(values))
    except ConfigError as error:
        raise ConfigError(f"{found}: {error}") from None


class _UniqueKeys(yaml.SafeLoader):
    """Refuses a key that is given twice, of which YAML would take the last: an arm would be missing."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """The values of a node."""
        given = set[str]()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue  # refused below
            if key.value in given:
                raise yaml.MarkedYAMLError(problem=f"key {key.value!r} is given twice", problem_mark=key.start_mark)
            given.add(key.value)
        return super().construct_mapping(node, deep)


def _as_text(values: Any) -> Any:
    """The file's values, with numbers and truth values of arms and points as text."""
    if not isinstance(values, dict):
        return values
    return {key: _texts(each) if key in ("arms", "over") else each for key, each in values.items()}


def _texts(groups: Any) -> Any:
    if not isinstance(groups, dict):
        return groups
    return {
        str(key): [_text(value) for value in values] if isinstance(values, list) else values
        for key, values in groups.items()
    }


def _text(value: Any) -> Any:
    return value if isinstance(value, str) else yaml.safe_dump(value).splitlines()[0]


def _require_no_reserved_keys(file: StudyFile, path: Path) -> None:
    """Raises a ConfigError if the file sets what the study sets itself."""
    arms = [(f"arms.{arm}", overrides) for arm, overrides in file.arms.items()]
    points = [(f"over.{point.key}", point.overrides) for point in points_of(file)]
    for where, overrides in (("shared", file.shared), *arms, *points, ("search", file.search)):
        for text in overrides:
            key = parsed(understood(text)).key_or_group
            allowed = _RESERVED_IN_FILES.get(key)
            if key == "output_dir" and where != "shared":  # the folder of all runs, and of what is drawn of them
                allowed = "output_dir in shared, or on the command line"
            if allowed is not None and (where, key) != ("search", "seed"):  # a search has a seed of its own
                raise ConfigError(f"{path}: {where}: found {text!r}; {key} is the study's; allowed: {allowed}")


def _require_different_names(file: StudyFile, path: Path) -> None:
    """Raises a ConfigError if two arms or two values have the same name, by which their runs and metrics are found."""
    for what, names in (("over", [point.label for point in points_of(file)]), ("arms", list(file.arms))):
        known: dict[str, str] = {}
        for name in names:
            if (plain := named(name)) in known:
                both = f"{known[plain]!r} and {name!r}, whose runs would both be named {plain!r}"
                raise ConfigError(f"{path}: {what}: found {both}; allowed: names that differ in letters or digits")
            known[plain] = name


def _chosen_arms(config: StudyConfig, file: StudyFile) -> dict[str, tuple[str, ...]]:
    baseline = file.baseline or next(iter(file.arms))
    for arm in config.arms or ():
        if arm not in file.arms:
            raise ConfigError(f"arms: found {arm!r}; {nearest(arm, file.arms)}")
    chosen = file.arms if config.arms is None else {baseline, *config.arms}
    return {arm: overrides for arm, overrides in file.arms.items() if arm in chosen}


def _chosen_points(config: StudyConfig, file: StudyFile) -> list[Point]:
    points = points_of(file)
    names = [point.name for point in points if point.name]
    for name in config.points or ():
        if name not in names:
            allowed = nearest(name, names) if names else "allowed: null, since the study has no over"
            raise ConfigError(f"points: found {name!r}; {allowed}")
    return [point for point in points if config.points is None or point.name in config.points]


def points_of(file: StudyFile) -> list[Point]:
    """The points at which arms are compared: the values of each key, or the recipe as it is.

    A value that is given more than once, with other changes, is named with them.
    """
    points: list[Point] = []
    for key, values in (file.over or {}).items():
        parts = [re.split(r"\+(?!\d)", value) for value in values]  # 1e+5 is a number
        times = Counter(own for own, *_ in parts)
        for own, *others in parts:
            name = own if times[own] == 1 else "+".join((own, *others))
            label = name if len(file.over or {}) == 1 else f"{key.rpartition('.')[2]}_{name}"
            points.append(Point(key=key, value=name, label=label, overrides=(f"{key}={own}", *others)))
    return points or [Point()]


def num_comparisons(file: StudyFile) -> int:
    """The number of a study's differences from the baseline, over all points."""
    return (len(file.arms) - 1) * len(points_of(file))


def _arm_at(
    job: str, arm: str, point: Point, shared: tuple[str, ...], own: Sequence[str], file: StudyFile, path: Path
) -> ArmAt:
    each = {text: parsed(understood(text)) for text in own}
    swept = [text for text, one in each.items() if one.is_sweep_override()]
    overrides = (*shared, *(text for text in own if text not in swept))
    if not swept:
        config = _config(job, arm, overrides)
        return ArmAt(arm=arm, point=point, overrides=overrides, config=config, search=None)
    name = f"run_name={named(point.label, arm)}-search"
    # Of images without labels, the usual metric of a search is not measured.
    metric = [f"metric={file.metric}"] if file.metric in MONITORED and file.metric != PRETRAIN.score else []
    try:
        search = read_search([*overrides, *metric, *file.search, *swept, name])
    except ConfigError as error:
        raise ConfigError(f"{path}: arms.{arm}: {error}") from None
    return ArmAt(arm=arm, point=point, overrides=overrides, config=search.config, search=search)


def _cell(job: str, arm: ArmAt, seed: int) -> Cell:
    """A run of an arm, with the tags by which it is found in MLflow."""
    name = f"{arm.name}-s{seed}"
    config = replace(arm.config, seed=seed, run_name=name, resume="auto")
    cell = Cell(job=job, arm=arm.arm, point=arm.point, seed=seed, overrides=(), config=config)
    tags = {**(config.tracking.tags or {}), **cell.tags}
    given = in_grammar({key: str(value) for key, value in tags.items()})
    own = (f"seed={seed}", f"run_name={name}", "resume=auto", f"tracking.tags={given}")
    tracking = replace(config.tracking, tags=tags)
    return replace(cell, overrides=(*arm.overrides, *own), config=replace(config, tracking=tracking))


def _config(job: str, arm: str, overrides: Sequence[str]) -> TrainingConfig:
    try:
        return from_values(RECIPES[job].training, values_of(job, overrides))
    except ConfigError as error:
        raise ConfigError(f"arms.{arm}: {error}") from None
