"""Linear evaluation of a pretraining run: python -m jobs.probe run=<MLflow run id>."""

import sys
from collections.abc import Sequence

from ssl_sec.config import ProbeJobConfig
from ssl_sec.edges.command_line import run_job
from ssl_sec.edges.composition import compose
from ssl_sec.edges.driver import run_probe
from ssl_sec.edges.summary import summary
from ssl_sec.settings import from_values


def probe(overrides: Sequence[str]) -> str:
    """Runs the job and tells its results."""
    return summary(run_probe(from_values(ProbeJobConfig, compose("probe", overrides))))


if __name__ == "__main__":
    sys.exit(run_job("probe", probe, supervise=True))
