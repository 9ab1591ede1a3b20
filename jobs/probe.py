"""Linear evaluation of a pretraining run: python -m jobs.probe run=<id, name or folder>."""

from functools import partial

from ssl_sec.edges.commands import main, run_recipe

probe = partial(run_recipe, "probe")

if __name__ == "__main__":
    main("probe")
