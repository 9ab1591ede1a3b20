"""The commands as functions of their arguments."""

from functools import partial

from ssl_sec.edges.commands import ablate, align, embed, export, preview, replay, report, run_recipe, study, transfer

__all__ = [
    "ablate", "align", "embed", "export", "face", "finetune", "metric_learning", "pretrain", "preview", "probe",
    "replay", "report", "study", "transfer",
]  # fmt: skip

pretrain = partial(run_recipe, "pretrain")
probe = partial(run_recipe, "probe")
finetune = partial(run_recipe, "finetune")
metric_learning = partial(run_recipe, "metric_learning")
face = partial(run_recipe, "face")
