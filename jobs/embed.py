"""Embeddings of a data set by a trained encoder: python -m jobs.embed run=<id, name or folder> output=<folder>."""

from ssl_sec.__main__ import main

if __name__ == "__main__":
    main("embed")
