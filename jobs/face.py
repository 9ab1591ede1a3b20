"""Face recognition: python -m jobs.face experiment=casia_arcface_sec data.root=<folder>."""

from ssl_sec.edges.commands import face, main

__all__ = ["face"]

if __name__ == "__main__":
    main("face")
