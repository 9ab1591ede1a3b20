"""Runs one recipe with several changes and seeds, probes each run if it can, and compares them in a table.

An arm changes the recipe: `loss=triplet`, `constraint.eta=0.5`, or several changes, `loss=triplet+constraint=sec`. A
name alone is an option of the group `constraint`, or `random`: an encoder with its initial weights. An ablation is a
study whose runs follow each other in this process. The same command continues an interrupted ablation; after one that
has ended, it starts a new one.
"""

import hashlib
import json
import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from ssl_sec.edges.environment import use_allowed_cpus
from ssl_sec.edges.folder.folder import RunFolder
from ssl_sec.edges.folder.names import claim_name, new_name, run_name_of
from ssl_sec.edges.machine import announce
from ssl_sec.edges.run.driver import require_files, run_recipe
from ssl_sec.edges.run.running import running
from ssl_sec.edges.run.summary import Finished, ui_instructions
from ssl_sec.edges.run.sweeps import Sweep
from ssl_sec.edges.storage.files import place_at
from ssl_sec.edges.storage.places import local_folder
from ssl_sec.edges.study.cells import KeptCell, as_csv, metrics_of
from ssl_sec.edges.study.comparison import Comparison, deciding_metric
from ssl_sec.edges.study.plan import Cell
from ssl_sec.edges.tables import in_markdown, in_table
from ssl_sec.errors import Stopped, StorageError, first_line
from ssl_sec.recipes.registry import RECIPES, RecipeRow

logger = logging.getLogger("ssl_sec")


def run_ablation(cells: Sequence[Cell]) -> str:
    """Runs every arm with every seed and returns the table.

    Args:
        cells: the result of `read_arms`.

    Raises:
        UserError: for mistakes of the user, or if another process runs the same ablation.
        Stopped: if a stop was requested; the same command continues.
    """
    use_allowed_cpus()
    announce(cells[0].config.runtime)
    for cell in cells:
        require_files(cell.config)
    with running(RunFolder(_stem(cells)), "arms", "other arms or seeds"):
        return _run_all(cells)


def _run_all(cells: Sequence[Cell]) -> str:
    arms, seeds = (list(dict.fromkeys(each)) for each in zip(*((cell.arm, cell.seed) for cell in cells), strict=True))
    results: dict[str, list[Mapping[str, float]]] = {arm: [] for arm in arms}
    kept: list[KeptCell] = []
    finished: Finished | None = None
    recipe, names = RECIPES[cells[0].job], _Names(cells)
    config, values = cells[0].config, {"arms": arms, "seeds": seeds}
    name = new_name(f"{config.recipe_name}-ablation")
    sweep = Sweep.of_trainings(config, values, names.sweep_path, job="ablate", name=name)
    rows = partial(_rows, recipe, kept, arms)
    with sweep.ended_after(results, lambda: _text(rows()), lambda: in_markdown(*rows())):
        for cell in cells:
            had_begun, begun = names.has(cell), time.monotonic()
            finished = _run(cell, names.of(cell), sweep)
            if had_begun:
                sweep.adopt([finished.run_id])
            minutes = math.nan if had_begun else (time.monotonic() - begun) / 60
            results[cell.arm].append(finished.metrics)
            kept.append(_kept(cell, finished, minutes))
    assert finished is not None
    names.place.write(f"{new_name('ablation')}.csv", as_csv(kept).encode())
    names.remove()
    found = finished if sweep.experiment_id is None else replace(finished, experiment_id=sweep.experiment_id)
    return "\n".join(["", _text(rows()), "", ui_instructions(found, whole_experiment=True)])


def _stem(cells: Sequence[Cell]) -> Path:
    """The path, without an ending, of the files that let the same command continue an ablation."""
    config = cells[0].config
    decides = json.dumps([[*cell.key, cell.digest] for cell in cells])
    digest = hashlib.sha256(decides.encode()).hexdigest()[:12]
    return local_folder(config.output_dir) / config.recipe_name / f".ablation-{digest}"


class _Names:
    """The names of an ablation's runs until it has ended, in a file that lets the same command continue it.

    Args:
        cells: all runs of the ablation.

    Attributes:
        place: place of the file, next to the runs.
        sweep_path: file with the id of the parent run in MLflow.

    Raises:
        StorageError: if the file cannot be read.
    """

    def __init__(self, cells: Sequence[Cell]) -> None:
        config, stem = cells[0].config, _stem(cells)
        self._folder = stem.parent
        self.place = place_at(f"{config.output_dir.rstrip('/')}/{config.recipe_name}", "output_dir")
        self._name = f"{stem.name}.json"
        self.sweep_path = self._folder / f"{stem.name}.mlflow_run_id"
        begun = self.place.read(self._name) or b"{}"
        try:
            self._names: dict[str, str] = json.loads(begun)
        except ValueError as error:
            where = f"{self.place}/{self._name}"
            raise StorageError(f"{where} cannot be read: {first_line(error)}; to start anew, delete it") from error
        if self._names:
            logger.info(
                "continuing an ablation that was interrupted: %d of %d runs had begun; to start anew, delete %s/%s",
                *(len(self._names), len(cells), self.place, self._name),
            )

    def has(self, cell: Cell) -> bool:
        """Whether a run has begun."""
        return self._key(cell) in self._names

    def of(self, cell: Cell) -> str:
        """The name of a run; for one that has not begun, a new name, which is stored.

        Raises:
            StorageError: if it cannot be written.
        """
        if not self.has(cell):
            self._names[self._key(cell)] = claim_name(self._folder, run_name_of(cell.config))
            self.place.write(self._name, json.dumps(self._names).encode())
        return self._names[self._key(cell)]

    def remove(self) -> None:
        """Removes the files, so that the same command starts anew."""
        self.place.remove([self._name])
        self.sweep_path.unlink(missing_ok=True)

    @staticmethod
    def _key(cell: Cell) -> str:
        return f"{cell.arm} {cell.seed}"


def _run(cell: Cell, name: str, sweep: Sweep) -> Finished:
    tags = {**(cell.config.tracking.tags or {}), "arm": cell.arm}
    parent = sweep.run_id or cell.config.tracking.parent_run
    tracking = replace(cell.config.tracking, parent_run=parent, tags=tags)
    try:
        return run_recipe(RECIPES[cell.job], replace(cell.config, tracking=tracking, run_name=name, resume="auto"))
    except Stopped as error:
        raise Stopped("stopped; the same command continues the ablation") from error


def _kept(cell: Cell, finished: Finished, minutes: float) -> KeptCell:
    return KeptCell(
        arm=cell.arm,
        point="",
        seed=cell.seed,
        digest=cell.digest,
        minutes=minutes,
        run_id=finished.run_id or "",
        metrics=metrics_of(finished.folder.records(), finished.metrics),
    )


def _rows(recipe: RecipeRow, kept: Sequence[KeptCell], arms: Sequence[str]) -> list[list[str]]:
    """The header of the table and its rows; empty as long as no run has ended."""
    if not kept:
        return []
    baseline = "none" if "none" in arms else arms[0]
    return Comparison.of(kept, deciding_metric(recipe, kept), baseline, len(arms) - 1).table()


def _text(rows: Sequence[Sequence[str]]) -> str:
    return in_table(*rows) if rows else ""
