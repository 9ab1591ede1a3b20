"""A pytest plugin that appends the outcome of each test to a file, so that it survives if pytest is stopped.

The environment variable SSL_SEC_OUTCOMES names the file: one line of JSON for each test, after a line with the number
of collected tests.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

FILE = "SSL_SEC_OUTCOMES"


def pytest_collection_finish(session: "pytest.Session") -> None:
    """Writes how many tests will run."""
    _append({"collected": len(session.items)})


def pytest_collectreport(report: "pytest.CollectReport") -> None:
    """Writes a file that cannot be imported as a failed test."""
    if report.failed:
        _append({"test": report.nodeid, "outcome": "failed", "reason": _reason_of(report)})


def pytest_runtest_logreport(report: "pytest.TestReport") -> None:
    """Writes the outcome of a test; of its set-up and its end only if they fail or skip."""
    if report.when == "call" or not report.passed:
        _append({"test": report.nodeid, "outcome": report.outcome, "reason": _reason_of(report)})


def _append(values: Mapping[str, Any]) -> None:
    with Path(os.environ[FILE]).open("a") as file:
        file.write(json.dumps(values) + "\n")


def _reason_of(report: "pytest.CollectReport | pytest.TestReport") -> str:
    """The reason why a test failed or was skipped, in one line."""
    found = report.longrepr
    crash = getattr(found, "reprcrash", None)
    text = found[2] if isinstance(found, tuple) else crash.message if crash is not None else str(found or "")
    return text.removeprefix("Skipped: ").strip().partition("\n")[0][:300]


def count_outcomes(path: Path) -> dict[str, Any]:
    """Counts the tests of a file: collected, passed, failed and skipped, the last two with one line of reason."""
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    collected = sum(line.get("collected", 0) for line in lines)
    last = {line["test"]: line for line in lines if "test" in line}  # a later failure at its end replaces a pass
    found: dict[str, dict[str, str]] = {
        outcome: {name: line["reason"] for name, line in last.items() if line["outcome"] == outcome}
        for outcome in ("passed", "failed", "skipped")
    }
    return {
        "collected": collected,
        "passed": len(found["passed"]),
        "failed": found["failed"],
        "skipped": found["skipped"],
    }
