"""Linear evaluation of a pretrained or fine-tuned encoder: python -m jobs.probe run=<id, name or folder>."""

from ssl_sec.__main__ import main

if __name__ == "__main__":
    main("probe")
