"""One recipe under several changes and seeds: python -m jobs.ablate experiment=digits [seeds=[0,1,2]]."""

from ssl_sec.edges.commands import ablate, main

__all__ = ["ablate"]

if __name__ == "__main__":
    main("ablate")
