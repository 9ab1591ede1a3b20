"""Crops faces aligned by five landmarks: python -m jobs.align images=<folder> landmarks=<csv> output=<folder>."""

from ssl_sec.__main__ import main

if __name__ == "__main__":
    main("align")
