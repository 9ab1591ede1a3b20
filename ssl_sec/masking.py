"""Secrets never reach parameters, metadata, artifacts or logs."""

import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "***"

_USERINFO = re.compile(r"(?<=://)[^/@\s'\"]+@")
_SECRET_KEY = re.compile(
    r"token|passw(or)?d|passphrase|secret|credential|api_?key|access_?key|private_?key", re.IGNORECASE
)


def masked(text: str) -> str:
    """The text with the user names and passwords of its URIs hidden."""
    return _USERINFO.sub(f"{HIDDEN}@", text)


def masked_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Nested values, with those of keys like `token` or `password` and the userinfo of URIs hidden."""
    return {
        key: HIDDEN if _SECRET_KEY.search(key) and value is not None else _masked(value)
        for key, value in values.items()
    }


def _masked(value: Any) -> Any:
    if isinstance(value, Mapping):
        return masked_values(value)
    if isinstance(value, list | tuple):
        return [_masked(item) for item in value]
    return masked(value) if isinstance(value, str) else value
