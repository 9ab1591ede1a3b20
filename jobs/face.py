"""Face recognition: python -m jobs.face experiment=casia_arcface_sec data.root=<folder>."""

from functools import partial

from ssl_sec.edges.commands import main, run_recipe

face = partial(run_recipe, "face")

if __name__ == "__main__":
    main("face")
