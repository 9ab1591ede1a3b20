"""A trial of a search: a training in its own process, whose measurements go to Ray Tune.

It is the same command that a user would start: it has its own folder and its run in MLflow, it saves and resumes, and
its effects on memory and devices end with it.
"""

import signal
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypedDict

from ray.tune import Trainable

from ssl_sec.edges.folder.text import json_lines, text_of
from ssl_sec.edges.run.supervision import describe_signal, start_command
from ssl_sec.edges.tune.space import Space, chosen_overrides
from ssl_sec.errors import nearest
from ssl_sec.recipes.pretraining.config import MONITORED, OF_LABELS

# Time between two checks for new measurements of a trial.
_LOOK_EVERY_S = 0.5
# How long a trial that is stopped may take to save and to end its run in MLflow; it stops at a reported step.
_STOP_WITHIN_S = 600.0


class TrialPlan(TypedDict):
    """The settings that all trials share.

    Attributes:
        name: name of the search, with which the names of the trials begin.
        folder: folder that contains their folders.
        cwd: working directory of the trials.
        metric: the metric that is compared.
        job: the training, which is the name of its job.
        every: epochs or steps between two measurements.
        length: epochs or steps of each trial.
        overrides: overrides in Hydra's grammar.
    """

    name: str
    folder: str
    cwd: str
    metric: str
    job: str
    every: int
    length: int
    overrides: list[str]


def trial_name(search: str, counts_from: int, trial: Any) -> str:
    """The name of a trial's run, which has its number, from 1.

    Args:
        search: name of the search.
        counts_from: Ray Tune's number of the first trial.
        trial: Ray Tune's trial, whose tag begins with its number.
    """
    return f"{search}-{int(trial.experiment_tag.partition('_')[0]) + 1 - counts_from:03d}"


def log_of(plan: TrialPlan, name: str) -> Path:
    """The file with the output of a trial."""
    return Path(plan["folder"]) / f"{plan['name']}-logs" / f"{name}.txt"


def stop_path(plan: TrialPlan) -> Path:
    """The file that exists while a stop of the search is requested."""
    return Path(plan["folder"]) / f"{plan['name']}.tune.stop"


def last_line(log: Path, begin: int = 0) -> str:
    """The last error of a trial, or the last line that it printed; empty if it printed nothing.

    Args:
        log: file of its output.
        begin: number of characters from earlier starts.
    """
    lines = text_of(log)[begin:].splitlines()
    errors = [line for line in lines if line.startswith("error: ")]
    return (errors or lines or [""])[-1].removeprefix("error: ")


def reason_of(code: int, log: Path, begin: int = 0) -> str:
    """Why a command failed.

    Args:
        code: its exit code, or -n if signal n killed it, which left it no time to print a reason.
        log: file of its output.
        begin: number of characters from earlier starts.
    """
    if code < 0:
        return f"the process was {describe_signal(signal.Signals(-code))}"
    return last_line(log, begin) or f"exit code {code}"


def lacks_metric(reason: str, metric: str) -> bool:
    """Whether a trial has failed because it has no value of a metric."""
    return reason.startswith(_unmeasured(metric))


def _not_measured(metric: str, known: Iterable[str]) -> str:
    """Why a trial has no value of a metric; names those that it has."""
    return f"{_unmeasured(metric)}; {nearest(metric, [name for name in known if name in MONITORED])}"


def _unmeasured(metric: str) -> str:
    why = "needs labelled images" if metric in OF_LABELS else "is not measured"
    return f"metric: found {metric!r}, which {why}"


class TrainingTrial(Trainable):
    """A training as Ray Tune sees it: a step is a measurement."""

    _run: "subprocess.Popen[bytes] | None" = None

    def setup(self, config: dict[str, Any], *, plan: TrialPlan, space: Space) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Starts the training, or resumes it if it has begun; does neither while the search stops.

        Args:
            config: key -> chosen value.
            plan: the settings that all trials share.
            space: key -> its values.
        """
        self._plan, self._num_reported = plan, 0
        name = self.trial_name
        self._folder = Path(plan["folder"]) / name
        self._log = log_of(plan, name)
        self._begin = len(text_of(self._log))
        if stop_path(plan).exists():
            return
        overrides = [*plan["overrides"], *chosen_overrides(space, config), f"run_name={name}", "resume=auto"]
        self._run = start_command([plan["job"], *overrides], self._log, cwd=plan["cwd"])

    def step(self) -> dict[str, Any]:
        """The next measurement; the last one again when the training has ended; nothing when the search stops.

        Raises:
            RuntimeError: if it failed, with its last line.
        """
        while True:
            # Ray calls `cleanup` only when this call has ended, and kills the process if that takes long.
            if stop_path(self._plan).exists():
                self.cleanup()
                return {}  # nobody reads it
            assert self._run is not None
            ended = self._run.poll()  # checked before the metrics are read, so that none is missed
            found = [record["metrics"] for record in json_lines(self._folder / "metrics.jsonl") if "metrics" in record]
            values = [metrics[self._plan["metric"]] for metrics in found if self._plan["metric"] in metrics]
            at = (self._num_reported + 1) * self._plan["every"]
            # After the last measurement the scheduler would stop the trial while it still saves and uploads.
            if len(values) > self._num_reported and at < self._plan["length"]:
                self._num_reported += 1
                return self._result(values[self._num_reported - 1], at)
            known = {name for metrics in found for name in metrics}
            if not values and not known.isdisjoint(MONITORED):  # it would not be measured later, either
                self.cleanup()
                raise self._failure(_not_measured(self._plan["metric"], known))
            if ended is not None:
                break
            try:
                self._run.wait(_LOOK_EVERY_S)
            except subprocess.TimeoutExpired:
                continue
        if ended != 0:
            raise self._failure(reason_of(ended, self._log, self._begin))
        if not values:
            raise self._failure(_not_measured(self._plan["metric"], known))
        return {**self._result(values[-1], self._plan["length"]), "done": True}

    def cleanup(self) -> None:
        """Stops the training, which saves its state."""
        if self._run is None or self._run.poll() is not None:
            return
        self._run.send_signal(signal.SIGTERM)
        try:
            self._run.wait(_STOP_WITHIN_S)
        except subprocess.TimeoutExpired:
            self._run.kill()
            self._run.wait()

    def save_checkpoint(self, checkpoint_dir: str) -> dict[str, Any]:
        """Does nothing: the training saves itself."""
        return {}

    def load_checkpoint(self, checkpoint: dict[str, Any] | None) -> None:
        """Does nothing: the training resumes from its own folder."""

    def _failure(self, reason: str) -> RuntimeError:
        """The error of a trial, whose log ends with the reason: the job that warns of it reads only the log."""
        if last_line(self._log, self._begin) != reason:
            with self._log.open("a", encoding="utf-8") as log:
                log.write(f"error: {reason}\n")
        return RuntimeError(reason)

    def _result(self, value: float, at: int) -> dict[str, Any]:
        return {self._plan["metric"]: value, "at": at}
