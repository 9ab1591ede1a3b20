"""Plain nested values -> frozen dataclasses, with errors that name the key.

A field's annotation says what is allowed: str, int, float, bool, a Literal, tuple[T, ...], dict[str, T], a dataclass,
T | None, or a union of dataclasses, each with a field `name`, a Literal. `Annotated` adds a rule of `ssl_sec.rules`,
such as a range; `Settings` checks the rules of its fields, however it is created.
"""

import dataclasses
import inspect
import re
import sys
import types
from abc import ABCMeta
from collections.abc import Mapping, Sequence
from functools import cache
from typing import (
    Annotated,
    Any,
    ClassVar,
    Literal,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

from ssl_sec.errors import ConfigError, check_option, nearest, shown
from ssl_sec.rules import Range, Rule, check

T = TypeVar("T")


class Complete(ABCMeta):
    """The metaclass of classes with abstract methods: a subclass must define all of them, or its definition fails.

    Classes whose names begin with _ and bases (`class TrainingConfig(..., is_base=True)`) are exempt.
    """

    def __new__(
        cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any], is_base: bool = False, **rest: Any
    ) -> "Complete":
        """Creates the class."""
        return super().__new__(cls, name, bases, namespace, **rest)

    def __init__(
        cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any], is_base: bool = False, **rest: Any
    ) -> None:
        super().__init__(name, bases, namespace, **rest)
        if missing := ", ".join(sorted(cls.__abstractmethods__)):
            if not (is_base or name.startswith("_")):
                raise TypeError(f"class {name} must define {missing}")


_PLAIN = {str: "a string", int: "an integer", float: "a number", bool: "true or false"}


class Settings(metaclass=Complete):
    """A dataclass whose fields follow the rules of their annotations, however it is created.

    Attributes:
        key: place of the settings in a configuration, for messages: `class MonitorConfig(Settings, key="monitor")`.
    """

    key: ClassVar[str] = ""

    def __init_subclass__(cls, key: str | None = None, **rest: Any) -> None:
        super().__init_subclass__(**rest)
        if key is not None:
            cls.key = key

    def __post_init__(self) -> None:
        hints = _hints(type(self), with_rules=True)
        for name in (field.name for field in dataclasses.fields(self)):  # pyright: ignore[reportArgumentType]
            _check(hints[name], getattr(self, name), _join(self.key, name))


class Declared(Settings):
    """Settings whose fields are the parameters of a component's constructor; see `declare_settings`.

    Attributes:
        component: the class that the settings construct.
    """

    component: ClassVar[type[Any]]
    name: str

    def _construct(self, **others: Any) -> Any:
        """An instance of the component; `others` that its constructor does not take are ignored."""
        known = {**vars(self), **others}
        names = inspect.signature(self.component).parameters
        return self.component(**{name: known[name] for name in names if name in known})


def declare_settings(component: type[Any], name: str, base: type[Declared], others: Sequence[str]) -> type[Any]:
    """A dataclass with the parameters of a component's constructor as its fields.

    Args:
        component: the class; its docstring explains the parameters.
        name: the name that chooses it in a configuration.
        base: the base class of the dataclass.
        others: parameters that the configuration does not set.
    """
    hints = get_type_hints(component.__init__, include_extras=True)
    fields: list[tuple[str, Any, Any]] = [("name", Literal[name], name)]
    for parameter in inspect.signature(component).parameters.values():
        if parameter.name not in others and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            default = dataclasses.MISSING if parameter.default is parameter.empty else parameter.default
            fields.append((parameter.name, hints[parameter.name], dataclasses.field(default=default)))
    title, _, rest = inspect.cleandoc(component.__doc__ or "").partition("\n")
    doc = f"{title}\n\nAttributes:{rest.partition('Args:')[2]}"
    namespace = {"component": component, "__doc__": doc, "__module__": base.__module__}
    return dataclasses.make_dataclass(
        f"{component.__name__}Config", fields, bases=(base,), namespace=namespace, frozen=True, kw_only=True
    )


def from_values(cls: type[T], values: Any, path: str = "") -> T:
    """Builds a dataclass from nested mappings.

    Args:
        cls: a dataclass; its `__post_init__` may raise ConfigError for values that contradict each other.
        values: a mapping with the dataclass's field names as keys.
        path: the mapping's place in the configuration, for messages.

    Raises:
        ConfigError: for an unknown key (with the nearest ones), a missing one, or a value of another type.
    """
    if not isinstance(values, Mapping):
        raise ConfigError(f"{path or 'config'}: found {shown(values)}, must be a group of keys")
    fields = {field.name: field for field in dataclasses.fields(cls) if field.init}  # pyright: ignore[reportArgumentType]
    for key in values:
        if key not in fields:
            kind = f" for {values['name']!r}" if "name" in values and "name" in fields else ""
            raise ConfigError(f"{_join(path, str(key))}: unknown key{kind}; {nearest(str(key), fields)}")
    hints = _hints(cls)
    arguments = {name: _value(hints[name], values[name], _join(path, name)) for name in fields if name in values}
    for name, field in fields.items():
        if name not in arguments and field.default is field.default_factory is dataclasses.MISSING:
            raise ConfigError(f"{_join(path, name)}: missing; it has no default")
    try:
        return cls(**arguments)
    except ConfigError as error:
        # The group may stand elsewhere than its key says, in a list or in another group.
        key = getattr(cls, "key", "")
        if not (path and str(error).startswith(f"{key}.")):
            raise
        raise ConfigError(path + str(error).removeprefix(key)) from error


def to_values(settings: Any) -> Any:
    """The nested mappings, lists and plain values that `from_values` takes."""
    if dataclasses.is_dataclass(settings) and not isinstance(settings, type):
        return {f.name: to_values(getattr(settings, f.name)) for f in dataclasses.fields(settings) if f.init}
    if isinstance(settings, tuple):
        return [to_values(item) for item in settings]  # pyright: ignore[reportUnknownVariableType]
    if isinstance(settings, dict):
        return {key: to_values(value) for key, value in settings.items()}  # pyright: ignore[reportUnknownVariableType]
    return settings


def flattened(values: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Dotted keys -> leaf values of nested mappings."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        dotted = _join(path, key)
        flat |= flattened(value, dotted) if isinstance(value, Mapping) else {dotted: value}
    return flat


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


@cache
def _hints(cls: type[Any], with_rules: bool = False) -> dict[str, Any]:
    """Field -> annotation."""
    return get_type_hints(cls, include_extras=with_rules)


def _check(hint: Any, value: Any, key: str) -> None:
    """Checks a value, and its items, by the rules of an annotation."""
    origin, options = get_origin(hint), get_args(hint)
    if origin is Annotated:
        for rule in cast(Sequence[Rule], hint.__metadata__):
            rule.check(key, value)
        _check(options[0], value, key)
    elif origin in (Union, types.UnionType):
        for option in options:
            if _is(option, value):
                _check(option, value, key)
    elif origin is tuple:
        for place, item in enumerate(value):
            _check(options[0], item, f"{key}[{place}]")
    elif hint in (int, float):
        Range().check(key, value)


def _is(hint: Any, value: Any) -> bool:
    """Whether a value has the type of an annotation, as far as needed to decide which rules apply."""
    bare = get_args(hint)[0] if get_origin(hint) is Annotated else hint
    kind = get_origin(bare) or bare
    return isinstance(kind, type) and (isinstance(value, kind) or (kind is float and isinstance(value, int)))


def _value(hint: Any, value: Any, path: str) -> Any:
    origin, options = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return _member(options, value, path)
    if origin is Literal:
        check_option(path, value, hint)
        return value
    if origin is tuple:
        if not isinstance(value, Sequence) or isinstance(value, str):
            is_plain = type(value) in (str, int, float) and re.fullmatch(r"[\w.:/*-]+", str(value))
            hint = f", as in '{path}=[{value}]'" if is_plain else ""
            raise ConfigError(f"{path}: found {shown(value)}, must be a list{hint}")
        return tuple(_value(options[0], item, f"{path}[{place}]") for place, item in enumerate(value))
    if origin is dict:
        if not isinstance(value, Mapping):
            raise ConfigError(f"{path}: found {shown(value)}, must be a group of keys")
        return {str(key): _value(options[1], item, _join(path, str(key))) for key, item in value.items()}
    if dataclasses.is_dataclass(hint):
        return from_values(cast(type[Any], hint), value, path)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        check(abs(value) <= sys.float_info.max, path, value, "a finite number")
        return float(value)
    if type(value) is not hint:
        quoted = f", as '\"{value}\"'" if hint is str and type(value) in (int, float) else ""
        raise ConfigError(f"{path}: found {shown(value)}, must be {_PLAIN[hint]}{quoted}")
    return value


def _member(options: tuple[Any, ...], value: Any, path: str) -> Any:
    if value is None and type(None) in options:
        return None
    members = [option for option in options if option is not type(None)]
    if len(members) == 1:
        return _value(members[0], value, path)
    groups = {
        name: member
        for member in members
        if dataclasses.is_dataclass(member)
        for name in get_args(_hints(member)["name"])
    }
    if groups and isinstance(value, Mapping | str):  # a name alone: with the defaults
        values, key = ({"name": value}, path) if isinstance(value, str) else (value, _join(path, "name"))
        if not isinstance(name := values.get("name"), str) or name not in groups:
            raise ConfigError(f"{key}: found {name!r}; {nearest(str(name), groups)}")
        return from_values(cast(type[Any], groups[name]), values, path)
    for member in members:
        if member not in groups.values():
            try:
                return _value(member, value, path)
            except ConfigError:
                continue
    raise ConfigError(f"{path}: found {shown(value)}, must be {' or '.join(map(_described, members))}")


def _described(hint: Any) -> str:
    """A description of the values of a type, for messages."""
    return " or ".join(map(repr, get_args(hint))) if get_origin(hint) is Literal else _PLAIN.get(hint, "a list")


def wherever_possible(key: str, asked: bool | None, reason: str | None) -> bool:
    """Whether an option applies: always (true), never (false), or wherever it is possible (None).

    Args:
        key: the option's key.
        asked: the option's value.
        reason: why it is not possible here; None if it is possible.

    Raises:
        ConfigError: the option is true, but not possible here.
    """
    if asked and reason is not None:
        raise ConfigError(f"{key}: found true, but {reason}; allowed here: false, or null")
    return asked is not False and reason is None
