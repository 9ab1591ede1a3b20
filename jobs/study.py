"""Compares arms of one recipe pair by pair over seeds: python -m jobs.study study=digits [key=value ...]."""

from ssl_sec.__main__ import main

if __name__ == "__main__":
    main("study")
