"""The description of a search in the folder of its runs, by which the same search continues and another is refused."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ssl_sec.edges.folder.text import text_of
from ssl_sec.errors import ConfigError, StorageError, first_line, writing
from ssl_sec.files import replace_text


class OtherSearchError(ConfigError):
    """Another search has the name."""

    def __init__(self, name: str, difference: str) -> None:
        self.difference = difference
        super().__init__(f"run_name: {name} is another search, with {difference}; allowed: another name")


def claimed(folder: Path, name: str, described: Mapping[str, Any]) -> bool:
    """Whether the search is new; if so, its description is stored.

    Raises:
        OtherSearchError: if another search has the name.
        StorageError: if the file cannot be read, or the folder cannot be written.
    """
    path, text = folder / f"{name}.tune.json", json.dumps(described, indent=1)
    if path.exists():
        try:
            before, now = json.loads(text_of(path) or "{}"), json.loads(text)
        except ValueError as error:
            raise StorageError(
                f"run_name: {path} cannot be read: {first_line(error)}; allowed: another name"
            ) from error
        for key in {**before, **now}:
            if before.get(key) != now.get(key):
                difference = f"{key} {json.dumps(before.get(key))} instead of {json.dumps(now.get(key))}"
                raise OtherSearchError(name, difference)
        return False
    with writing("output_dir", path):
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, text)
    return True
