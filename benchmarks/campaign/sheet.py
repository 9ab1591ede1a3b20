"""The folder of a campaign: what was asked for, how far each part is, and its figures."""

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from benchmarks.measure import write_json

State = Literal["running", "done", "failed", "stopped"]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a campaign was asked for; its folder keeps it for the calls that follow.

    Attributes:
        output: its folder, absolute.
        checkpoints: where the folders of training runs lie, absolute.
        data: the values of `data`; None for random images.
        rehearsal: whether all is done at a tiny size.
    """

    output: str
    checkpoints: str
    data: dict[str, Any] | None = None
    rehearsal: bool = False

    @property
    def folder(self) -> Path:
        """The campaign's folder."""
        return Path(self.output)

    def keep(self) -> None:
        """Writes the plan; a folder may have been moved, and its images too.

        Raises:
            SystemExit: the folder is a rehearsal's, and this is none, or the reverse.
        """
        path = self.folder / "plan.json"
        if path.exists() and Plan.kept(self.folder).rehearsal != self.rehearsal:
            kinds = ("a campaign", "a rehearsal")
            raise SystemExit(f"{self.folder}: found {kinds[not self.rehearsal]}, must be {kinds[self.rehearsal]}")
        write_json(path, asdict(self))

    @classmethod
    def kept(cls, folder: Path) -> "Plan":
        """The plan of a campaign's folder."""
        return cls(**json.loads((folder / "plan.json").read_text()))


@dataclass(frozen=True)
class Sheet:
    """The figures of a part, in a file that is whole at any time.

    Attributes:
        plan: the campaign's.
        name: the part's.
        figures: so far.
    """

    plan: Plan
    name: str
    figures: dict[str, Any] = field(default_factory=dict)

    @property
    def path(self) -> Path:
        """The file."""
        return self.plan.folder / "results" / f"{self.name}.json"

    def read(self) -> dict[str, Any]:
        """What the file has; nothing where there is none."""
        return json.loads(self.path.read_text()) if self.path.exists() else {}

    def state(self) -> State | None:
        """How far the part is; None if it was never begun."""
        return self.read().get("state")

    def write(self, state: State = "running", **figures: Any) -> None:
        """Adds figures to those that were written before by this process."""
        self.figures.update(figures)
        head = {"part": self.name, "state": state, "rehearsal": self.plan.rehearsal, "written": round(time.time())}
        write_json(self.path, {**head, **self.figures})

    def close(self, state: State, reason: str) -> None:
        """Ends a part whose process could not; the figures that it had written stay."""
        before: Mapping[str, Any] = self.read()
        write_json(self.path, {"part": self.name, **before, "state": state, "error": reason})
