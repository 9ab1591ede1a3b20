"""Small text files that a crash may cut off, and files of JSON objects."""

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def append_json(path: Path, record: Mapping[str, Any]) -> None:
    """Adds an object to a file with one per line."""
    with path.open("a") as file:
        file.write(json.dumps(record) + "\n")


def json_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a file, one per line; lines that a crash cut off are skipped."""
    return json_objects(text_of(path))


def json_objects(text: str) -> list[dict[str, Any]]:
    """The objects of complete lines; others, as left by a crash or by two writers at once, are skipped."""
    found: list[dict[str, Any]] = []
    for line in text.split("\n")[:-1]:
        with contextlib.suppress(ValueError):
            if isinstance(record := json.loads(line), dict):
                found.append(record)
    return found


def has_metrics(record: Mapping[str, Any]) -> bool:
    """Whether a line of a run's metrics file holds metrics; others hold messages."""
    return isinstance(record.get("metrics"), dict) and isinstance(record.get("step"), int)


def text_of(path: Path) -> str:
    """The text of a file in UTF-8, whatever its bytes are; empty if there is no file."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return ""
