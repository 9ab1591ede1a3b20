"""A search over any keys of a pretraining: python -m jobs.tune experiment=<name> '<key>=interval(0.1,1)'."""

from ssl_sec.edges.commands import main

if __name__ == "__main__":
    main("tune")
