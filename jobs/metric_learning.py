"""Deep metric learning: python -m jobs.metric_learning experiment=cars196_triplet_sec data.root=<folder>."""

from ssl_sec.edges.commands import main, metric_learning

__all__ = ["metric_learning"]

if __name__ == "__main__":
    main("metric_learning")
