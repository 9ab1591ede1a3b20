"""Draws some images with their augmented views, without training: python -m jobs.preview experiment=digits."""

from ssl_sec.edges.commands import main

if __name__ == "__main__":
    main("preview")
