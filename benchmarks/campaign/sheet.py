"""The folder of a campaign: its plan, and the state and the results of each part."""

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from benchmarks.measure import RESULTS, write_json

# The folder of the results in the repository.
COMMITTED = RESULTS / "campaign"

State = Literal["running", "done", "failed", "stopped"]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The settings of a campaign, saved in its folder for later calls.

    Attributes:
        output: the campaign's folder, absolute.
        checkpoints: the folder of the training runs, absolute.
        data: the values of `data`; None for random images.
        rehearsal: whether everything runs at a tiny size.
    """

    output: str
    checkpoints: str
    data: dict[str, Any] | None = None
    rehearsal: bool = False

    @property
    def folder(self) -> Path:
        """The campaign's folder."""
        return Path(self.output)

    def save(self) -> None:
        """Writes the plan; the paths of an earlier one are replaced, since its folder may have been moved.

        Raises:
            SystemExit: the folder has a rehearsal and this is a campaign, or the reverse.
        """
        path = self.folder / "plan.json"
        if path.exists() and Plan.load(self.folder).rehearsal != self.rehearsal:
            kinds = ("a campaign", "a rehearsal")
            raise SystemExit(f"{self.folder}: found {kinds[not self.rehearsal]}, must be {kinds[self.rehearsal]}")
        write_json(path, asdict(self))

    @classmethod
    def load(cls, folder: Path) -> "Plan":
        """Loads the plan of a campaign's folder."""
        return cls(**json.loads((folder / "plan.json").read_text()))


@dataclass(frozen=True)
class Sheet:
    """The state and the results of a part, in a file that is replaced atomically.

    Attributes:
        plan: the campaign's plan.
        name: the part's name.
        results: the results written by this process.
    """

    plan: Plan
    name: str
    results: dict[str, Any] = field(default_factory=dict)

    @property
    def path(self) -> Path:
        """The file."""
        return self.plan.folder / "results" / f"{self.name}.json"

    @property
    def run_paths(self) -> tuple[Path, Path]:
        """The folders of the part's pretraining and of its probe, if it is a training run."""
        folder = Path(self.plan.checkpoints) / self.name
        return folder, folder.with_name(f"{self.name}-probe")

    def read(self) -> dict[str, Any]:
        """Reads the file; returns nothing if it does not exist."""
        return json.loads(self.path.read_text()) if self.path.exists() else {}

    def read_state(self) -> State | None:
        """Reads the state of the part; None if it was never started."""
        return self.read().get("state")

    def write(self, state: State = "running", **results: Any) -> None:
        """Adds results to those of this process and writes the file."""
        self.results.update(results)
        header = {"part": self.name, "state": state, "rehearsal": self.plan.rehearsal, "written": round(time.time())}
        write_json(self.path, {**header, **self.results})

    def close(self, state: State, reason: str) -> None:
        """Sets the state of a part whose process has ended; its results are kept."""
        before: Mapping[str, Any] = self.read()
        write_json(self.path, {"part": self.name, **before, "state": state, "error": reason})
