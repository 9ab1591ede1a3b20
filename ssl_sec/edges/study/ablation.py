"""Runs one recipe with several changes and seeds, probes each run, and compares them in a table.

An arm changes the recipe: `loss=triplet`, `constraint.eta=0.5`, or several changes, `loss=triplet+constraint=sec`. A
name alone is an option of the group `constraint`, or `random`: an encoder with its initial weights. It is a study whose
runs go one after the other in this process, under names of their own, and are not continued.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ssl_sec.edges.folder.descriptions import RunIdentity
from ssl_sec.edges.folder.names import new_name, user_tags
from ssl_sec.edges.machine import announce
from ssl_sec.edges.run.driver import run_training
from ssl_sec.edges.run.summary import Finished, ui_instructions
from ssl_sec.edges.run.sweeps import Sweep
from ssl_sec.edges.storage.bucket import Bucket
from ssl_sec.edges.storage.places import is_remote
from ssl_sec.edges.study.cells import KeptCell, as_csv, figures_of
from ssl_sec.edges.study.comparison import Comparison
from ssl_sec.edges.study.plan import Cell
from ssl_sec.edges.tables import in_table
from ssl_sec.edges.tracking.store import tracking_uri
from ssl_sec.recipes.pretraining.config import PretrainConfig
from ssl_sec.recipes.registry import PRETRAIN

_METRIC = "probe/top1"


def run_ablation(cells: Sequence[Cell]) -> str:
    """Runs every arm with every seed and returns the table.

    Args:
        cells: as `read_arms` returns them.

    Raises:
        UserError: for mistakes of the user.
    """
    arms, seeds = (list(dict.fromkeys(each)) for each in zip(*((cell.arm, cell.seed) for cell in cells), strict=True))
    announce(cells[0].config.runtime)
    results: dict[str, list[Mapping[str, float]]] = {arm: [] for arm in arms}
    kept: list[KeptCell] = []
    finished: Finished | None = None
    sweep = _sweep(cells[0].config, arms, seeds)
    with sweep.ended_after(results, lambda: _table(kept, arms)):
        for cell in cells:
            tags = {**(cell.config.tracking.tags or {}), "arm": cell.arm}
            parent = sweep.run_id or cell.config.tracking.parent_run
            tracking = replace(cell.config.tracking, parent_run=parent, tags=tags)
            begun = time.monotonic()
            finished = run_training(PRETRAIN, replace(cell.config, tracking=tracking))
            results[cell.arm].append(finished.metrics)
            kept.append(_kept(cell, finished, (time.monotonic() - begun) / 60))
    assert finished is not None
    _keep(kept, finished.folder.location.rpartition("/")[0])
    return "\n".join(["", _table(kept, arms), "", ui_instructions(finished, whole_experiment=True)])


def _kept(cell: Cell, finished: Finished, minutes: float) -> KeptCell:
    return KeptCell(
        arm=cell.arm,
        point="",
        seed=cell.seed,
        digest=cell.digest,
        minutes=minutes,
        run_id=finished.run_id or "",
        figures=figures_of(finished.folder.records(), finished.metrics),
    )


def _sweep(config: PretrainConfig, arms: Sequence[str], seeds: Sequence[int]) -> Sweep:
    """The parent run in MLflow."""
    identity = RunIdentity(
        uri=tracking_uri(config.tracking, config.output_dir),
        experiment=config.tracking.experiment or config.recipe_name,
        name=new_name(f"{config.recipe_name}-ablation"),
        tags={
            **user_tags(config.tracking),
            "recipe": config.recipe_name,
            "data": config.data.title,
            "job": "ablate",
        },
    )
    return Sweep.start(identity, {"arms": list(arms), "seeds": list(seeds)}, config.output_dir)


def _table(kept: Sequence[KeptCell], arms: Sequence[str]) -> str:
    if not kept:
        return ""
    baseline = "none" if "none" in arms else arms[0]
    columns, *rows = Comparison.of(kept, _METRIC, baseline).table()
    return in_table(rows, columns)


def _keep(kept: Sequence[KeptCell], recipe: str) -> None:
    """Writes the figures of all runs beside them.

    Args:
        kept: the runs.
        recipe: the folder of the recipe's runs, or its URL.
    """
    name, content = f"{new_name('ablation')}.csv", as_csv(kept)
    if is_remote(recipe):
        Bucket(recipe).write(name, content.encode())
    else:
        Path(recipe, name).write_text(content)
