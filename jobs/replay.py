"""Sends MLflow the metrics that an outage kept from it: python -m jobs.replay folder=<the run's folder>."""

from ssl_sec.__main__ import main

if __name__ == "__main__":
    main("replay")
