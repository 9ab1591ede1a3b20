"""The keys of each job, as declared by dataclasses: their meaning, allowed values, and the options that have them."""

import dataclasses
import inspect
import pkgutil
import re
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from ssl_sec.errors import nearest
from ssl_sec.recipes.registry import PRETRAIN, RECIPES
from ssl_sec.settings import to_values

# Between a job that runs trainings and the training: `ablate_of_face` has the keys of an ablation and of jobs.face.
OF = "_of_"
# The dataclasses of jobs without a registry row; imported only when they are asked for, as some need torch.
_KINDS = {
    "ablate": "ssl_sec.edges.config:AblateConfig",
    "align": "ssl_sec.edges.config:AlignConfig",
    "embed": "ssl_sec.edges.config.embed:EmbedConfig",
    "export": "ssl_sec.edges.config.export:ExportConfig",
    "neighbours": "ssl_sec.edges.config.neighbours:NeighboursConfig",
    "preview": "ssl_sec.edges.config:PreviewConfig",
    "replay": "ssl_sec.edges.config:ReplayConfig",
    "report": "ssl_sec.edges.config:ReportConfig",
    "select": "ssl_sec.edges.config.select:SelectConfig",
    "study": "ssl_sec.edges.config.study:StudyConfig",
    "transfer": "ssl_sec.recipes.probing.config:TransferConfig",
    "tune": "ssl_sec.edges.config.tune:TuneConfig",
}
_TYPES = {str: "text", int: "integer", float: "number", bool: "true or false"}
_BOUNDS = {"gt": ">", "ge": "≥", "lt": "<", "le": "≤"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Key:
    """A key of a configuration.

    Attributes:
        name: name of the key, dotted.
        explanation: meaning of the key.
        allowed: the allowed values, in words.
        value: current value; `???` if a required value is missing.
    """

    name: str
    explanation: str
    allowed: str
    value: Any


@cache
def kind_of(job: str) -> type[Any]:
    """The dataclass of a job's configuration."""
    if job in RECIPES:
        return RECIPES[job].config
    own, _, training = job.partition(OF)
    kind = pkgutil.resolve_name(_KINDS[own])
    if own not in ("ablate", "preview", "study", "tune"):
        return kind
    bases = (kind, RECIPES[training or PRETRAIN.name].config)
    return dataclasses.make_dataclass(own.capitalize(), [], bases=bases, frozen=True, kw_only=True)


def keys_of(kind: type[Any], values: Mapping[str, Any], path: str = "") -> Iterator[Key]:
    """The keys of a dataclass's configuration.

    Args:
        kind: the dataclass.
        values: nested values; the chosen options decide which keys exist.
        path: dotted path of the configuration.
    """
    hints, explanations = _hints(kind), explanations_of(kind)
    for name, value in values.items():
        if name not in hints:
            continue  # the job itself will refuse it
        key = f"{path}.{name}" if path else name
        member = _member(hints[name], value) if isinstance(value, Mapping) else None
        if member is None:
            yield Key(name=key, explanation=explanations.get(name, ""), allowed=allowed_by(hints[name]), value=value)
            continue
        for inner in keys_of(member, value, key):
            if inner.name != f"{key}.name":
                yield inner
            elif "." in key:
                # A dataclass that is chosen by its name, not as the option of a group.
                names = " | ".join(other for one in _dataclasses(hints[name]) for other in _names(one))
                yield dataclasses.replace(inner, explanation=explanations.get(name, ""), allowed=names)


def unknown_keys(kind: type[Any], values: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """The keys of nested values that a dataclass does not have, dotted."""
    hints = _hints(kind)
    for name, value in values.items():
        key = f"{path}.{name}" if path else name
        if name not in hints:
            yield key
        elif isinstance(value, Mapping) and (member := _member(hints[name], value)) is not None:
            yield from unknown_keys(member, value, key)


def listed_kinds(kind: type[Any], name: str) -> list[type[Any]]:
    """The dataclasses that are allowed as entries of a list; none if the entries are plain values."""
    hint = _bare(_hints(kind)[name])
    return _dataclasses(get_args(hint)[0]) if get_origin(hint) is tuple else []


def keys_of_entry(kind: type[Any]) -> list[Key]:
    """The keys of an entry of a list, with their defaults."""
    return list(keys_of(kind, defaults_of(kind)))


def defaults_of(kind: type[Any]) -> dict[str, Any]:
    """The defaults of a dataclass of plain values, as plain values; `???` for required ones."""
    return {
        field.name: "???" if field.default is dataclasses.MISSING else to_values(field.default)
        for field in dataclasses.fields(kind)
        if field.init
    }


def kinds_by_name(kind: type[Any], group: str) -> dict[str, type[Any]]:
    """The dataclasses that are allowed for a group of a configuration, by name."""
    return {name: one for one in _dataclasses(_hints(kind).get(group)) for name in _names(one)}


def defaults_by_name(job: str, key: str, name: str) -> dict[str, Any] | None:
    """The defaults of a dataclass that is allowed for a key below a group, by its name; None if there is none.

    Args:
        job: name of the job.
        key: dotted, for example `monitor.data`.
        name: name of the dataclass.
    """
    *groups, last = key.split(".")
    kind: type[Any] | None = kind_of(job)
    for group in groups:
        kinds = [] if kind is None else _dataclasses(_hints(kind).get(group))
        kind = kinds[0] if len(kinds) == 1 else None
    found = None if kind is None or not groups else kinds_by_name(kind, last).get(name)
    return None if found is None else {**defaults_of(found), "name": name}


def misfit(job: str, group: str, values: Mapping[str, Any], is_whole: bool) -> str | None:
    """The reason why a job cannot use an option of a group.

    Args:
        job: name of the job.
        group: one of its groups.
        values: values of the option.
        is_whole: whether the option must have all keys, as the package's options do; groups without names are
            distinguished by their keys.

    Returns:
        The key and what is wrong with it; None if the job can use the option.
    """
    hint = _hints(kind_of(job))[group]
    member = _member(hint, values)
    if member is None:
        names = kinds_by_name(kind_of(job), group)
        if "name" not in values:
            return f"name: missing; {nearest('', names)}"
        return f"name: found {values['name']!r}; {nearest(str(values['name']), names)}"
    fields = {field.name for field in dataclasses.fields(member) if field.init}
    unknown = [key for key in values if key not in fields]
    if unknown:
        return f"{unknown[0]}: unknown key; {nearest(unknown[0], fields)}"
    return f"{min(fields - values.keys())}: missing" if is_whole and fields - values.keys() else None


@cache
def explanations_of(kind: type[Any]) -> dict[str, str]:
    """Field -> explanation, from the docstrings of a dataclass and of its bases."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        found |= _attributes(base.__dict__.get("__doc__") or "")
    return found


def summary_of(kind: type[Any]) -> str:
    """The first paragraph of a dataclass's docstring."""
    return _in_help(inspect.cleandoc(kind.__doc__ or "").split("\n\n")[0])


def allowed_by(hint: Any) -> str:
    """The allowed values of a type, in words."""
    origin, options = get_origin(hint), get_args(hint)
    if origin is Annotated:
        bounds = [_bounds(rule) for rule in options[1:]]
        return " ".join([allowed_by(options[0]), *filter(None, bounds)])
    if origin in (Union, types.UnionType):
        names = [name for option in options for one in _dataclasses(option) for name in _names(one)]
        plain = [option for option in options if option is not type(None) and not (names and _dataclasses(option))]
        words = [*([" | ".join(names)] if names else []), *map(allowed_by, plain)]
        return ", or ".join([*dict.fromkeys(words), *(["null"] if type(None) in options else [])])
    if origin is Literal:
        return " | ".join(_TYPES.get(type(option), "") and _literal(option) for option in options)
    if origin is tuple:
        return f"list of {'groups of keys' if _dataclasses(options[0]) else _plural(allowed_by(options[0]))}"
    return _TYPES.get(hint, "group of keys")


def _plural(allowed: str) -> str:
    word, space, rest = allowed.partition(" ")
    return {"text": "texts", "integer": "integers", "number": "numbers"}.get(word, word) + space + rest


def _literal(option: object) -> str:
    return str(option).lower() if isinstance(option, bool) else str(option)


def _bounds(rule: Any) -> str:
    bounds = [f"{sign} {bound:g}" for name, sign in _BOUNDS.items() if (bound := getattr(rule, name, None)) is not None]
    return " and ".join(bounds)


@cache
def _hints(kind: type[Any]) -> dict[str, Any]:
    hints = get_type_hints(kind, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind) if field.init}


def _bare(hint: Any) -> Any:
    return get_args(hint)[0] if get_origin(hint) is Annotated else hint


def _dataclasses(hint: Any) -> list[type[Any]]:
    """The dataclasses that a type allows."""
    bare = _bare(hint)
    if get_origin(bare) in (Union, types.UnionType):
        return [member for option in get_args(bare) for member in _dataclasses(option)]
    return [bare] if dataclasses.is_dataclass(bare) and isinstance(bare, type) else []


def _member(hint: Any, values: Mapping[str, Any]) -> type[Any] | None:
    """The dataclass that fits nested values; None if there is none."""
    kinds = _dataclasses(hint)
    by_name = {name: kind for kind in kinds for name in _names(kind)}
    if not by_name:
        return kinds[0] if kinds else None
    return by_name.get(str(values.get("name")))


def _names(kind: type[Any]) -> tuple[str, ...]:
    return get_args(_bare(_hints(kind)["name"])) if "name" in _hints(kind) else ()


def _attributes(docstring: str) -> dict[str, str]:
    """Name -> explanation of a Google docstring's section `Attributes`."""
    _, _, section = inspect.cleandoc(docstring).partition("\nAttributes:\n")
    found: dict[str, str] = {}
    name = ""
    for line in section.splitlines():
        if line and not line.startswith("    "):
            break  # another section
        begins = re.match(r" {4}(\w+): (.*)", line)
        if begins is not None:
            name = begins[1]
            found[name] = begins[2]
        elif name:
            found[name] += f" {line.strip()}"
    return {name: _in_help(text) for name, text in found.items()}


def _in_help(text: str) -> str:
    """The text of a docstring as shown by the command line: null for None, names of the code left out."""
    text = re.sub(r";? see (section )?`ssl_sec[\w.]*`", "", " ".join(text.split()))
    return re.sub(r"\bNone\b", "null", text).replace("`", "").strip()
