"""Runs one recipe with several changes and seeds: python -m jobs.ablate experiment=digits [seeds=[0,1,2]]."""

from ssl_sec.__main__ import main

if __name__ == "__main__":
    main("ablate")
