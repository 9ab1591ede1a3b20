"""Overrides in Hydra's grammar.

Hydra accepts a value without quotes only if it has no accents and none of the characters `~`, `#`, `&`, `(` and `=`,
which its grammar uses or does not know. We accept such a value literally.
"""

import json
import re
from functools import cache, lru_cache
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString
from hydra.errors import HydraException

from ssl_sec.errors import ConfigError, printable

# For runs that are made to be compared: no encoder is registered, of which one could become a recipe's best. It comes
# before the overrides that are given, so that these replace it.
UNREGISTERED = "tracking.register_model=false"
# Overrides that are kept parsed, which takes longer than all else that is done with one: a study reads thousands.
_KEPT = 4096
# A comma outside parentheses.
_COMMA = re.compile(r",(?![^()]*\))")


@lru_cache(_KEPT)
def understood(override: str) -> str:
    """Quotes the values of an override that Hydra cannot parse; it stays unchanged if that does not help.

    Args:
        override: `key=value`; commas outside parentheses separate the values of a list in brackets, or of a sweep.
    """
    key, _, text = override.partition("=")
    try:
        _parser().parse_override(override)
    except HydraException:
        if not text:
            return override
    except (ValueError, RecursionError):  # too many digits or brackets, which quotes would hide
        return override
    else:
        return override
    is_list = text.startswith("[") and text.endswith("]")
    values = _COMMA.split(text[1:-1] if is_list else text)
    listed = ",".join(value if _parses(f"key={value}") else in_quotes(value.strip()) for value in values)
    quoted = f"{key}=[{listed}]" if is_list else f"{key}={listed}"
    return quoted if text[0] not in "{'\"" and (is_list or text[0] != "[") and _parses(quoted) else override


@lru_cache(_KEPT)
def parsed(override: str) -> Override:
    """Parses an override.

    Raises:
        ConfigError: if it is not valid.
    """
    try:
        return _parser().parse_override(override)
    except (HydraException, ValueError, RecursionError) as error:  # too many digits, or brackets
        raise ConfigError(f"{printable(repr(override))}: not understood; give key=value, or --help") from error


def key_of(override: str) -> str:
    """The key or group of an override, without Hydra's `+` and `++`."""
    return key_and_value(override)[0]


def key_and_value(override: str) -> tuple[str, str]:
    """The key or group of an override, likewise, and the text of its value."""
    key, _, value = override.partition("=")
    return key.lstrip("+"), value


def assigned(key: str, value: str) -> str:
    """The override that sets a key to a string, with any characters."""
    override = f"{key}={value}"
    read: Any = _parser().parse_override(override).value() if _parses(override) else None
    return override if read == value else f"{key}={in_quotes(value)}"


@cache
def _parser() -> OverridesParser:
    return OverridesParser.create()


def _parses(override: str) -> bool:
    try:
        _parser().parse_override(override)
    except (HydraException, ValueError, RecursionError):  # too many digits, or brackets
        return False
    return True


def in_quotes(value: str) -> str:
    """A quoted string in Hydra's grammar."""
    return QuotedString(text=value, quote=Quote.single).with_quotes()


def in_grammar(value: Any) -> str:
    """A plain nested value in Hydra's grammar."""
    if isinstance(value, str):
        return in_quotes(value)
    if isinstance(value, list):
        return f"[{','.join(map(in_grammar, value))}]"  # pyright: ignore[reportUnknownArgumentType]
    if isinstance(value, dict):
        return f"{{{','.join(f'{key}: {in_grammar(item)}' for key, item in value.items())}}}"  # pyright: ignore[reportUnknownVariableType]
    return json.dumps(value)
