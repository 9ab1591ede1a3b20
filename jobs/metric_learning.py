"""Deep metric learning: python -m jobs.metric_learning experiment=cars196_triplet_sec data.root=<folder>."""

from functools import partial

from ssl_sec.edges.commands import main, run_recipe

metric_learning = partial(run_recipe, "metric_learning")

if __name__ == "__main__":
    main("metric_learning")
