"""Plain nested values -> frozen dataclasses, with errors that name the key.

A field's annotation says what is allowed: str, int, float, bool, a Literal, tuple[T, ...], dict[str, T], a dataclass,
T | None, or a union of dataclasses, told apart by the field `name` that each declares as a Literal.
"""

import dataclasses
import types
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from ssl_sec.errors import ConfigError, nearest

T = TypeVar("T")

_PLAIN = {str: "a string", int: "an integer", float: "a number", bool: "true or false"}


def from_values(cls: type[T], values: Any, path: str = "") -> T:
    """Builds a dataclass from nested mappings.

    Args:
        cls: a dataclass; its `__post_init__` may raise ConfigError for values that do not go together.
        values: a mapping with the dataclass's field names as keys.
        path: where the mapping stands in the configuration, for messages.

    Raises:
        ConfigError: for an unknown key (with the nearest ones), a missing one, or a value of another type.
    """
    if not isinstance(values, Mapping):
        raise ConfigError(f"{path or 'config'}: found {values!r}, must be a group of keys")
    fields = {field.name: field for field in dataclasses.fields(cls) if field.init}  # pyright: ignore[reportArgumentType]
    for key in values:
        if key not in fields:
            kind = f" for {values['name']!r}" if "name" in values and "name" in fields else ""
            raise ConfigError(f"{_join(path, str(key))}: unknown key{kind}; {nearest(str(key), fields)}")
    hints = get_type_hints(cls)
    arguments = {name: _value(hints[name], values[name], _join(path, name)) for name in fields if name in values}
    for name, field in fields.items():
        if name not in arguments and field.default is field.default_factory is dataclasses.MISSING:
            raise ConfigError(f"{_join(path, name)}: missing; it has no default")
    return cls(**arguments)


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


def check(condition: bool, key: str, found: object, allowed: str) -> None:
    """Raises a ConfigError that names the key, what was found and what is allowed, unless the condition holds."""
    if not condition:
        raise ConfigError(f"{key}: found {found!r}, must be {allowed}")


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _value(hint: Any, value: Any, path: str) -> Any:
    origin, options = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return _member(options, value, path)
    if origin is Literal:
        if not any(type(value) is type(option) and value == option for option in options):
            raise ConfigError(f"{path}: found {value!r}; {nearest(str(value), map(str, options))}")
        return value
    if origin is tuple:
        if not isinstance(value, Sequence) or isinstance(value, str):
            raise ConfigError(f"{path}: found {value!r}, must be a list")
        return tuple(_value(options[0], item, f"{path}[{place}]") for place, item in enumerate(value))
    if origin is dict:
        if not isinstance(value, Mapping):
            raise ConfigError(f"{path}: found {value!r}, must be a group of keys")
        return {str(key): _value(options[1], item, _join(path, str(key))) for key, item in value.items()}
    if dataclasses.is_dataclass(hint):
        return from_values(cast(type[Any], hint), value, path)
    number_as_float = hint is float and isinstance(value, int) and not isinstance(value, bool)
    if number_as_float:
        return float(value)
    if type(value) is not hint:
        raise ConfigError(f"{path}: found {value!r}, must be {_PLAIN[hint]}")
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
        for name in get_args(get_type_hints(member)["name"])
    }
    if isinstance(value, Mapping) and groups:
        name = value.get("name")
        if not isinstance(name, str) or name not in groups:
            raise ConfigError(f"{_join(path, 'name')}: found {name!r}; {nearest(str(name), groups)}")
        return from_values(cast(type[Any], groups[name]), value, path)
    for member in members:
        if member not in groups.values():
            try:
                return _value(member, value, path)
            except ConfigError:
                continue
    raise ConfigError(f"{path}: found {value!r}, must be {' or '.join(map(_described, members))}")


def _described(hint: Any) -> str:
    """What a value of this type is, for messages."""
    return " or ".join(map(repr, get_args(hint))) if get_origin(hint) is Literal else _PLAIN.get(hint, "a list")
