"""Images to label first: python -m jobs.select embeddings=<folder> output=<folder> count=<number>."""

from ssl_sec.__main__ import main

if __name__ == "__main__":
    main("select")
