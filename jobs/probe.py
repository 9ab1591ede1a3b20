"""Linear evaluation of a pretraining run: python -m jobs.probe run=<MLflow run id>."""

import sys

from ssl_sec.config import ProbeJobConfig
from ssl_sec.edges.command_line import run_job
from ssl_sec.edges.driver import run_probe
from ssl_sec.edges.summary import summary


def main() -> int:
    """Runs the job of the command line."""
    return run_job("probe", ProbeJobConfig, lambda config: summary(run_probe(config)))


if __name__ == "__main__":
    sys.exit(main())
