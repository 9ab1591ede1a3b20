"""Exports the encoder of a run: python -m jobs.export run=<id, name or folder> format=onnx [output=<folder>]."""

from ssl_sec.__main__ import main

if __name__ == "__main__":
    main("export")
