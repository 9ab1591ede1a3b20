"""The commands as functions of their arguments."""

from functools import partial

from ssl_sec.edges.commands import align, export, replay, run_recipe

__all__ = ["align", "export", "face", "metric_learning", "pretrain", "probe", "replay"]

pretrain = partial(run_recipe, "pretrain")
probe = partial(run_recipe, "probe")
metric_learning = partial(run_recipe, "metric_learning")
face = partial(run_recipe, "face")
