"""Faces cut out by five points each: python -m jobs.align images=<folder> landmarks=<csv> output=<folder>."""

import sys
from collections.abc import Sequence

from ssl_sec.config import AlignConfig
from ssl_sec.edges.align import run_align
from ssl_sec.edges.command_line import run_job
from ssl_sec.edges.composition import compose
from ssl_sec.settings import from_values


def align(overrides: Sequence[str]) -> str:
    """Runs the job and tells what it left."""
    return run_align(from_values(AlignConfig, compose("align", overrides))).told()


if __name__ == "__main__":
    sys.exit(run_job("align", align))
