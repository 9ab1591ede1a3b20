"""Draws some images with their augmented views, without training: python -m jobs.preview experiment=digits."""

from ssl_sec.__main__ import main

if __name__ == "__main__":
    main("preview")
