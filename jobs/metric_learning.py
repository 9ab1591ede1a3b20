"""Deep metric learning: python -m jobs.metric_learning experiment=cars196_triplet_sec data.root=<folder>."""

import sys
from collections.abc import Sequence

from ssl_sec.config import MetricLearningConfig
from ssl_sec.edges.command_line import run_job
from ssl_sec.edges.composition import compose
from ssl_sec.edges.driver import run_metric_learning
from ssl_sec.edges.summary import summary
from ssl_sec.settings import from_values


def metric_learning(overrides: Sequence[str]) -> str:
    """Runs the job and tells its results."""
    return summary(run_metric_learning(from_values(MetricLearningConfig, compose("metric_learning", overrides))))


if __name__ == "__main__":
    sys.exit(run_job("metric_learning", metric_learning, supervise=True))
