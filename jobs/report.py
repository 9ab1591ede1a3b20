"""Results beside the papers': python -m jobs.report table=5, figure=6 or compare <run> <run>."""

from ssl_sec.edges.commands import main, report

__all__ = ["report"]

if __name__ == "__main__":
    main("report")
