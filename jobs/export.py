"""The encoder of a run, for others: python -m jobs.export run=<id, name or folder> format=onnx [output=<folder>]."""

import sys
from collections.abc import Sequence

from ssl_sec.config import ExportConfig
from ssl_sec.edges.command_line import run_job
from ssl_sec.edges.export import run_export
from ssl_sec.edges.job_values import values_of
from ssl_sec.settings import from_values


def export(overrides: Sequence[str]) -> str:
    """Runs the job and tells what it left and how it is loaded."""
    return run_export(from_values(ExportConfig, values_of("export", overrides))).told()


if __name__ == "__main__":
    sys.exit(run_job("export", export))
