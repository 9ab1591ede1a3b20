"""Linear evaluation of a pretraining run: python -m jobs.probe run=<MLflow run id>."""

from ssl_sec.edges.commands import main, probe

__all__ = ["probe"]

if __name__ == "__main__":
    main("probe")
