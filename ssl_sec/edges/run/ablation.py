"""Runs one recipe with several changes and seeds, probes each run, and compares them in a table.

An arm changes the recipe: `loss=triplet`, `constraint.eta=0.5`, or several changes, `loss=triplet+constraint=sec`. A
name alone is an option of the group `constraint`, or `random`: an encoder with its initial weights.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ssl_sec.edges.folder.descriptions import RunIdentity
from ssl_sec.edges.folder.names import new_name, user_tags
from ssl_sec.edges.machine import announce
from ssl_sec.edges.run.driver import run_training
from ssl_sec.edges.run.summary import Finished, ui_instructions
from ssl_sec.edges.run.sweeps import Sweep, mean_and_std
from ssl_sec.edges.storage.bucket import Bucket
from ssl_sec.edges.storage.places import is_remote
from ssl_sec.edges.tables import in_table
from ssl_sec.edges.tracking.store import tracking_uri
from ssl_sec.recipes.pretraining.config import PretrainConfig
from ssl_sec.recipes.registry import PRETRAIN

_COLUMNS = {"probe/top1": "probe top-1 %", "probe/top5": "probe top-5 %", "probe/knn_top1": "kNN top-1 %"}

Results = Mapping[str, Sequence[Mapping[str, float]]]


def run_ablation(configs: Mapping[tuple[str, int], PretrainConfig]) -> str:
    """Runs every arm with every seed and returns the table.

    Args:
        configs: of each arm and seed, as `read_arms` returns them.

    Raises:
        UserError: for mistakes of the user.
    """
    arms, seeds = (list(dict.fromkeys(each)) for each in zip(*configs, strict=True))
    announce(next(iter(configs.values())).runtime)
    results: dict[str, list[Mapping[str, float]]] = {arm: [] for arm in arms}
    finished: Finished | None = None
    sweep = _sweep(next(iter(configs.values())), arms, seeds)
    with sweep.ended_after(results, lambda: _table({arm: runs for arm, runs in results.items() if runs})):
        for (arm, _), config in configs.items():
            tags = {**(config.tracking.tags or {}), "arm": arm}
            tracking = replace(config.tracking, parent_run=sweep.run_id or config.tracking.parent_run, tags=tags)
            finished = run_training(PRETRAIN, replace(config, tracking=tracking))
            results[arm].append(finished.metrics)
    assert finished is not None
    _keep(results, seeds, finished.folder.location.rpartition("/")[0])
    return "\n".join(["", _table(results), "", ui_instructions(finished, whole_experiment=True)])


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


def _table(results: Results) -> str:
    if not results:
        return ""
    of = "arm" if any("=" in arm for arm in results) else "constraint"
    rows = [[arm, *(mean_and_std([run[key] for run in runs]) for key in _COLUMNS)] for arm, runs in results.items()]
    num_seeds = max(map(len, results.values()))
    table = in_table(rows, [of, *_COLUMNS.values()])
    return table if num_seeds == 1 else f"{table}\n(mean ± standard deviation over {num_seeds} seeds)"


def _keep(results: Results, seeds: Sequence[int], recipe: str) -> None:
    """Writes the figures of all runs beside them.

    Args:
        results: of each arm.
        seeds: of its runs.
        recipe: the folder of the recipe's runs, or its URL.
    """
    kept = {"seeds": list(seeds), "results": {arm: [dict(run) for run in runs] for arm, runs in results.items()}}
    name, content = f"{new_name('ablation')}.json", json.dumps(kept, indent=1)
    if is_remote(recipe):
        Bucket(recipe).write(name, content.encode())
    else:
        Path(recipe, name).write_text(content)
