"""The commands as functions of their arguments."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from ssl_sec.edges.commands import ablate, align, embed, export, preview, replay, report, run_recipe, study, transfer
from ssl_sec.edges.composition.compose import compose
from ssl_sec.edges.composition.keys import kind_of
from ssl_sec.settings import from_values

__all__ = [
    "ablate", "align", "configured", "embed", "export", "face", "finetune", "metric_learning", "pretrain", "preview",
    "probe", "replay", "report", "study", "transfer",
]  # fmt: skip

pretrain = partial(run_recipe, "pretrain")
probe = partial(run_recipe, "probe")
finetune = partial(run_recipe, "finetune")
metric_learning = partial(run_recipe, "metric_learning")
face = partial(run_recipe, "face")


def configured(job: str, overrides: Sequence[str]) -> Any:
    """The configuration of a job."""
    return from_values(kind_of(job), compose(job, overrides))
