"""The files of a run to which lines are appended, each a JSON object: metrics, starts of workers, errors.

Metrics are written to `metrics.jsonl` first; the driver follows that file for the console and for MLflow.
"""

import contextlib
import json
import os
import socket
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ssl_sec.edges.folder.descriptions import installed_versions
from ssl_sec.edges.folder.text import append_json, has_metrics, json_lines
from ssl_sec.edges.masking import masked
from ssl_sec.errors import StorageError, first_line, writing
from ssl_sec.files import replace_text
from ssl_sec.training.norms import NormHistogram


class RunLogs:
    """What a run logs in its folder.

    Args:
        path: path of the folder, absolute.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metrics_path = path / "metrics.jsonl"  # metrics, and messages for the console
        self.workers_path = path / "workers.jsonl"  # each start of a worker
        self.failures_path = path / "failures.jsonl"  # errors of workers, with tracebacks

    def log_message(self, level: str, message: str) -> None:
        """Writes a message for the console of the driver, unless the folder cannot be written."""
        with contextlib.suppress(StorageError):
            self.append_record({"time": time.time(), "message": masked(f"{level}: {message}")})

    def append_record(self, record: Mapping[str, Any]) -> None:
        """Adds a line to the metrics.

        Raises:
            StorageError: if the folder was removed, or cannot be written.
        """
        with writing("output_dir", self.path):
            try:
                append_json(self.metrics_path, record)
            except FileNotFoundError as error:
                raise self.removal() from error

    def records(self) -> list[dict[str, Any]]:
        """All metrics, without messages."""
        return [record for record in json_lines(self.metrics_path) if has_metrics(record)]

    def messages(self) -> list[tuple[float, str]]:
        """Time and text of all messages."""
        return [(record["time"], record["message"]) for record in json_lines(self.metrics_path) if "message" in record]

    def last_metrics(self) -> dict[str, float]:
        """The last value of each metric."""
        return {key: value for record in self.records() for key, value in record["metrics"].items()}

    def histograms(self) -> list[NormHistogram]:
        """The histograms of the norms, oldest first."""
        return [NormHistogram(**record["norms"]) for record in self.records() if "norms" in record]

    def forget_records_from(self, step: int) -> None:
        """Drops the metrics of steps that will be repeated; messages stay."""
        kept = [each for each in json_lines(self.metrics_path) if not has_metrics(each) or each["step"] < step]
        replace_text(self.metrics_path, "".join(json.dumps(record) + "\n" for record in kept))

    def log_worker(self, rank: int, world_size: int, node: str) -> None:
        """Logs the start of this worker process."""
        about = {"rank": rank, "world_size": world_size, "node": node, "pid": os.getpid(), "started": _now()}
        self.add_worker({**about, "versions": installed_versions()})

    def add_worker(self, about: Mapping[str, Any]) -> None:
        """Logs the start of a worker process, unless the folder cannot be written."""
        with contextlib.suppress(OSError):
            append_json(self.workers_path, about)

    def workers(self) -> list[dict[str, Any]]:
        """The starts of worker processes, oldest first."""
        return json_lines(self.workers_path)

    def newest_workers(self) -> dict[int, dict[str, Any]]:
        """Rank -> the newest start of each worker of the newest group; none before the first start."""
        workers = self.workers()
        return {each["rank"]: each for each in workers if each["world_size"] == workers[-1]["world_size"]}

    def changed_versions(self) -> list[str]:
        """The packages that decide the curve and have another version here than where the run began, with both."""
        began = next((each["versions"] for each in self.workers() if isinstance(each.get("versions"), dict)), {})
        now = installed_versions()
        return [
            f"{name} was {began[name]} and is {now[name]}" for name in now if began.get(name, now[name]) != now[name]
        ]

    def log_failure(self, rank: int, error: BaseException) -> None:
        """Logs an error of this process."""
        about = {"rank": rank, "host": socket.gethostname(), "pid": os.getpid(), "time": _now()}
        trace = "".join(traceback.format_exception(error))
        self.add_failure({**about, "error": masked(first_line(error)), "traceback": masked(trace)})

    def add_failure(self, about: Mapping[str, Any]) -> None:
        """Logs the error of a worker process, unless the folder cannot be written."""
        with contextlib.suppress(OSError):
            append_json(self.failures_path, about)

    def failures(self) -> list[dict[str, Any]]:
        """The errors of workers, oldest first; without those of killed processes."""
        return json_lines(self.failures_path)

    def removal(self) -> StorageError:
        """The error for a folder that was removed while its run was active."""
        lost = "what it had saved is lost; the same command starts the run again"
        return StorageError(f"output_dir: {self.path} was removed during the run: {lost}")


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")
