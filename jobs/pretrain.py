"""Contrastive pretraining: python -m jobs.pretrain experiment=cifar10_sec_100 [probe.enabled=true]."""

import sys

from ssl_sec.config import PretrainConfig
from ssl_sec.edges.command_line import run_job
from ssl_sec.edges.driver import run_pretraining
from ssl_sec.edges.summary import summary


def main() -> int:
    """Runs the job of the command line."""
    return run_job("pretrain", PretrainConfig, lambda config: summary(run_pretraining(config)))


if __name__ == "__main__":
    sys.exit(main())
