"""The encoder of a run, for others: python -m jobs.export run=<id, name or folder> format=onnx [output=<folder>]."""

from ssl_sec.edges.commands import export, main

__all__ = ["export"]

if __name__ == "__main__":
    main("export")
