"""Contrastive pretraining: python -m jobs.pretrain experiment=cifar10_sec_100 [probe.enabled=true]."""

from functools import partial

from ssl_sec.edges.commands import main, run_recipe

pretrain = partial(run_recipe, "pretrain")

if __name__ == "__main__":
    main("pretrain")
