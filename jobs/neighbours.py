"""Neighbours and near-duplicates of embedded images: python -m jobs.neighbours embeddings=<folder> output=<folder>."""

from ssl_sec.__main__ import main

if __name__ == "__main__":
    main("neighbours")
