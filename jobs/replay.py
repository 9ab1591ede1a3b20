"""Figures that MLflow has not, after an outage: python -m jobs.replay folder=<the run's folder>."""

import sys
from collections.abc import Sequence

from ssl_sec.config import ReplayConfig
from ssl_sec.edges.command_line import run_job
from ssl_sec.edges.driver import run_replay
from ssl_sec.edges.job_values import values_of
from ssl_sec.edges.summary import summary
from ssl_sec.settings import from_values


def replay(overrides: Sequence[str]) -> str:
    """Runs the job and tells its results."""
    return summary(run_replay(from_values(ReplayConfig, values_of("replay", overrides))))


if __name__ == "__main__":
    sys.exit(run_job("replay", replay))
