"""Contrastive pretraining: python -m jobs.pretrain experiment=cifar10_sec_100 [probe.enabled=true]."""

import sys
from collections.abc import Sequence

from ssl_sec.config import PretrainConfig
from ssl_sec.edges.command_line import run_job
from ssl_sec.edges.composition import compose
from ssl_sec.edges.driver import run_pretraining
from ssl_sec.edges.summary import summary
from ssl_sec.settings import from_values


def pretrain(overrides: Sequence[str]) -> str:
    """Runs the job and tells its results."""
    return summary(run_pretraining(from_values(PretrainConfig, compose("pretrain", overrides))))


if __name__ == "__main__":
    sys.exit(run_job("pretrain", pretrain, supervise=True))
