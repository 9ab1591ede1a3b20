"""Errors about overrides that a job does not accept: unknown keys, several values for one run."""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from hydra.core.override_parser.types import Override

from ssl_sec.edges.composition.experiments import Experiment, merged
from ssl_sec.edges.composition.hints import is_of_probe, is_plain, listed_names, meant, suggestion, swept
from ssl_sec.edges.composition.keys import defaults_by_name, keys_of, kind_of
from ssl_sec.edges.composition.options import EXPERIMENT, is_in_files, options, primary, usable, values_of_option
from ssl_sec.recipes.registry import trainings
from ssl_sec.settings import flattened

# Keys of earlier versions, and what has replaced them.
_RENAMED = {
    "benchmarks": "give test_sets, with the same values, to jobs.face",
    "probe.decay_epochs": "give probe.decay_at, shares of probe.epochs, as [0.6,0.75,0.9] for 60, 75, 90 of 100",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """The choices of overrides, before Hydra composes them.

    Attributes:
        options: group -> option, chosen by the overrides, their experiment and the job.
        typed: group -> option, chosen by the overrides alone.
        experiment: the chosen experiment, without values that other options replace; None if none is chosen.
        dropped: group -> key -> value of the experiment, for another option than the chosen one.
        instead_of: group -> the option that the dropped values are for.
    """

    options: Mapping[str, str]
    typed: Mapping[str, str]
    experiment: Experiment | None
    dropped: Mapping[str, Mapping[str, Any]]
    instead_of: Mapping[str, str]


def defaults_of_override(job: str, override: Override) -> dict[str, Any] | None:
    """The defaults chosen by name below a group, as in `monitor.data=digits`; None if the override chooses none."""
    key, value = override.key_or_group, None if override.is_sweep_override() else override.value()
    return defaults_by_name(job, key, value) if "." in key and isinstance(value, str) else None


def sweep_mistake(job: str, override: Override, choice: Choice) -> str:
    """The error about several values for a key."""
    assert override.input_line is not None
    values = _values(job, choice)
    allowed = {key.name: key.allowed for key in keys_of(kind_of(job), values)}.get(override.key_or_group, "")
    return swept(job, override.input_line, allowed.startswith("list of"), allowed.startswith("text"))


def unknown_key(job: str, given: Sequence[Override], choice: Choice, in_files: bool = False) -> str | None:
    """The error about the first override whose key does not exist once the groups are chosen; None if all do.

    Args:
        job: name of the job.
        given: the overrides.
        choice: the choices of the overrides.
        in_files: checks only what config files show, which are read without torch.
    """
    typed = [each.key_or_group for each in given if each.key_or_group not in choice.options and not each.is_add()]
    values = _values(job, choice, in_files) if typed else {}
    for each in [] if in_files else given:
        if (defaults := defaults_of_override(job, each)) is not None:
            for part in reversed(each.key_or_group.split(".")):
                defaults = {part: defaults}
            values = merged(values, defaults)
    keys = {*flattened(values), *choice.options, *values, *_groups_of_keys(values)}
    for key in typed:
        group, _, rest = key.partition(".")
        is_certain = not in_files or group not in primary(job).keys or (group in values and "." not in rest)
        if key in keys or not is_certain:
            continue
        if key in _RENAMED:
            return f"{key}: unknown key; {_RENAMED[key]}"
        if in_files and not is_plain(key, keys):
            return unknown_key(job, given, choice)
        return f"{key}: unknown key{_meaning(job, key, keys, choice, {} if in_files else _elsewhere(job))}"
    return None


def _meaning(
    job: str, key: str, keys: Set[str], choice: Choice, elsewhere: Mapping[str, Sequence[tuple[str, str]]]
) -> str:
    """A clause that suggests keys for an unknown one: of other options, of other jobs, or with another name."""
    group, parent = key.partition(".")[0], key.rpartition(".")[0]
    is_null = parent in keys and not any(one.startswith(f"{parent}.") for one in keys)
    if is_null and defaults_by_name(job, parent, "folder") is not None:
        return f"; name the set, too: for example {parent}=folder {parent}.root=<folder>"
    if having := _usable_ones(job, elsewhere.get(key, ())):
        now = choice.options[group]
        if (group, now) == ("data", "null"):
            return "; name the set, too, also that of the run: for example data=folder data.root=<folder>"
        explained = options(group, job).get(now, "").partition(";")[0].rstrip(".")
        return f" with {group}={now}{f' ({explained})' if explained else ''}; {listed_names(having)} has it"
    for possible in meant(key, elsewhere.keys() - keys) if is_of_probe(key, meant(key, keys)) else []:
        if having := _usable_ones(job, elsewhere[possible]):
            return f"; did you mean {possible!r}, with {listed_names(having)}?"
    others = [other for other in trainings() if group in primary(other).keys - primary(job).keys]
    return f"; {suggestion(key, keys, others)}"


def _values(job: str, choice: Choice, in_files: bool = False) -> dict[str, Any]:
    """The values of a choice; if only files are read, without those of options that are in no file."""
    options = {group: name for group, name in choice.options.items() if not in_files or is_in_files(group, name)}
    of_groups = {group: values_of_option(group, name, job) or {} for group, name in options.items()}
    values = {**primary(job).values, **of_groups}
    unread = choice.options.keys() - options.keys()
    over = {} if choice.experiment is None else choice.experiment.values
    return merged(values, {key: value for key, value in over.items() if key not in unread})


def _groups_of_keys(values: Mapping[str, Any], path: str = "") -> set[str]:
    """The dotted keys that hold other keys."""
    found = {f"{path}{key}": value for key, value in values.items() if isinstance(value, Mapping)}
    return {*found, *(key for name, value in found.items() for key in _groups_of_keys(value, f"{name}."))}


def _elsewhere(job: str) -> dict[str, list[tuple[str, str]]]:
    """The keys of all options of a job's groups -> the groups and options that have them."""
    found: dict[str, list[tuple[str, str]]] = {}
    for group in primary(job).options.keys() - {EXPERIMENT}:
        for name in options(group, job):
            for key in flattened({group: values_of_option(group, name, job) or {}}):
                found.setdefault(key, []).append((group, name))
    return found


def _usable_ones(job: str, having: Sequence[tuple[str, str]]) -> list[str]:
    """Those options that a job can use, as `group=option`."""
    return [f"{group}={name}" for group, name in having if usable(job, group, name)]
