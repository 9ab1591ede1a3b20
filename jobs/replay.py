"""Figures that MLflow has not, after an outage: python -m jobs.replay folder=<the run's folder>."""

from ssl_sec.edges.commands import main, replay

__all__ = ["replay"]

if __name__ == "__main__":
    main("replay")
