"""Probes of one encoder on several data sets: python -m jobs.transfer run=<id, name or folder> sets=[...]."""

from ssl_sec.__main__ import main

if __name__ == "__main__":
    main("transfer")
