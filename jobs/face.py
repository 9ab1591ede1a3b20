"""Face recognition: python -m jobs.face experiment=casia_arcface_sec data.root=<folder>."""

from ssl_sec.__main__ import main

if __name__ == "__main__":
    main("face")
