"""One recipe under several constraints and seeds, each run probed, in one table.

The arm `random` keeps the encoder as it was initialised: what the network's architecture gives without training.
"""

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ssl_sec.config import PretrainConfig
from ssl_sec.edges.command_line import in_table
from ssl_sec.edges.composition import compose, options
from ssl_sec.edges.driver import Finished, new_name, run_pretraining
from ssl_sec.edges.mlflow_tracker import tracking_uri
from ssl_sec.edges.run_names import own_tags
from ssl_sec.edges.summary import how_to_look
from ssl_sec.edges.sweeps import Sweep
from ssl_sec.errors import ConfigError, nearest
from ssl_sec.settings import from_values

_COLUMNS = {"probe/top1": "probe top-1 %", "probe/top5": "probe top-5 %", "probe/knn_top1": "kNN top-1 %"}
_RANDOM = "random"

Results = Mapping[str, Sequence[Mapping[str, float]]]


def run_ablation(overrides: Sequence[str]) -> str:
    """Runs every arm with every seed and returns the table.

    Args:
        overrides: of the pretraining, and `arms=[...]` and `seeds=[...]`.

    Raises:
        UserError: for what the user can mend; no run is started if the arms or the recipe are wrong.
    """
    values = compose("ablate", overrides)
    arms, seeds = [str(arm) for arm in values["arms"]], [int(seed) for seed in values["seeds"]]
    allowed = {_RANDOM, *options()["constraint"]}
    for arm in arms:
        if arm not in allowed:
            raise ConfigError(f"arms: found {arm!r}; {nearest(arm, allowed)}")
    shared = [override for override in overrides if override.partition("=")[0] not in ("arms", "seeds")]
    configs = {(arm, seed): _config(shared, arm, seed) for seed in seeds for arm in arms}
    results: dict[str, list[Mapping[str, float]]] = {arm: [] for arm in arms}
    finished: Finished | None = None
    sweep = _sweep(next(iter(configs.values())), arms, seeds)
    with sweep.ended_after(results, lambda: _table({arm: runs for arm, runs in results.items() if runs})):
        for (arm, _), config in configs.items():
            tracking = replace(config.tracking, parent_run=sweep.run_id or config.tracking.parent_run)
            finished = run_pretraining(replace(config, tracking=tracking))
            results[arm].append(finished.metrics)
    assert finished is not None
    _keep(results, seeds, finished.folder.path.parent)
    return "\n".join(["", _table(results), "", how_to_look(finished, at_all=True)])


def _sweep(config: PretrainConfig, arms: Sequence[str], seeds: Sequence[int]) -> Sweep:
    """The run in MLflow that all others belong to."""
    output_dir = Path(config.output_dir).expanduser().resolve()
    return Sweep.start(
        tracking_uri(config.tracking, output_dir),
        experiment=config.tracking.experiment or config.recipe_name,
        name=new_name(f"{config.recipe_name}-ablation"),
        values={"arms": list(arms), "seeds": list(seeds)},
        output_dir=output_dir,
        tags={
            **own_tags(config.tracking),
            "recipe": config.recipe_name,
            "data": config.data.title,
            "job": "ablate",
        },
    )


def _config(shared: Sequence[str], arm: str, seed: int) -> PretrainConfig:
    chosen = ["constraint=none", "epochs=0"] if arm == _RANDOM else [f"constraint={arm}"]
    own = [f"seed={seed}", "run_name=null", "probe.enabled=true"]
    return from_values(PretrainConfig, compose("pretrain", [*shared, *chosen, *own]))


def _table(results: Results) -> str:
    if not results:
        return ""
    rows = [[arm, *(_cell([run[key] for run in runs]) for key in _COLUMNS)] for arm, runs in results.items()]
    num_seeds = max(map(len, results.values()))
    table = in_table(rows, ["constraint", *_COLUMNS.values()])
    return table if num_seeds == 1 else f"{table}\n(mean ± standard deviation over {num_seeds} seeds)"


def _cell(values: Sequence[float]) -> str:
    spread = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.2f}{spread}"


def _keep(results: Results, seeds: Sequence[int], folder: Path) -> None:
    told = {"seeds": list(seeds), "results": {arm: [dict(run) for run in runs] for arm, runs in results.items()}}
    (folder / f"{new_name('ablation')}.json").write_text(json.dumps(told, indent=1))
