"""A search over any keys of a pretraining: python -m jobs.tune experiment=<name> '<key>=interval(0.1,1)'."""

from ssl_sec.__main__ import main

if __name__ == "__main__":
    main("tune")
