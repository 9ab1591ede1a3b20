"""Faces cut out by five points each: python -m jobs.align images=<folder> landmarks=<csv> output=<folder>."""

from ssl_sec.edges.commands import align, main

__all__ = ["align"]

if __name__ == "__main__":
    main("align")
