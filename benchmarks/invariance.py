"""The same curve on any number of workers: how far the runs of 1, 2 and 4 workers are apart.

    python -m benchmarks.invariance        # some 5 minutes on two CPU cores

Trains the digits recipe with SEC-EMA, gloo between the workers, on the CPU: every figure of every step and the final
weights of 2 and 4 workers are compared with those of one. In float64 they agree to rounding over the whole run. In
float32 one activation that rounds to the other side of a ReLU moves a gradient by a thousandth, so that runs part at
the recipe's learning rate, as any two runs do whose sums have another order; with weights that hardly move they agree.
Writes benchmarks/results/invariance-cpu.json, with the differences of every step.
"""

import os
import pickle
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from torch import Tensor

from benchmarks.measure import environment, save, table
from ssl_sec.data.image_set import ImageSet
from ssl_sec.edges.composition.compose import compose
from ssl_sec.recipes.pretraining.config import PretrainConfig
from ssl_sec.recipes.pretraining.recipe import run
from ssl_sec.settings import from_values
from ssl_sec.training.norms import NormHistogram
from ssl_sec.training.step import Request

WORKERS = (1, 2, 4)
# Precision, learning rate, epochs of 11 steps; the rate of the digits recipe is 0.3.
SETTINGS = (("float64", 0.3, 5), ("float32", 0.0001, 2), ("float32", 0.3, 2))
RECIPE = (
    "experiment=digits",
    "constraint=sec_ema",
    "encoder.width=0.25",
    "global_batch_size=128",
    "log_every_steps=1",
    "monitor.every_epochs=1000",
    "runtime=local",
    "runtime.device=cpu",
)
COMPARED = ("train/loss", "train/metric_loss", "train/constraint", "train/norm_mean", "train/norm_std")


class Recorder:
    """A Runtime that keeps what it is told."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self.device = torch.device("cpu")
        self.curves: dict[str, list[float]] = {name: [] for name in COMPARED}
        self.weights: dict[str, Tensor] = {}

    def report(self, step: int, metrics: Mapping[str, float], norms: NormHistogram | None = None) -> None:
        """Keeps the figures that must not depend on the number of workers."""
        for name in COMPARED:
            if name in metrics:
                self.curves[name].append(metrics[name])

    def save(self, step: int, state: Mapping[str, Any]) -> None:
        """Keeps the weights."""
        self.weights = {
            f"{part}.{name}": tensor.detach().clone()
            for part in ("encoder", "head", "objective")
            for name, tensor in state[part].items()
        }

    def request(self) -> Request:
        """Nobody asks for anything."""
        return Request.NONE


class Nowhere:
    """A RunStore in a folder that is thrown away."""

    def __init__(self, folder: Path) -> None:
        self.encoder_path = folder / "encoder.safetensors"
        self.head_path = folder / "head.safetensors"
        self.features_path = folder / "features.pt"

    def describe_data(self, image_set: ImageSet) -> None:
        """The set is known."""

    def forget_records_from(self, step: int) -> None:
        """There are none."""

    def restored_state(self, device: torch.device, held: slice | None = None) -> None:
        """Every run starts at its beginning."""


def main() -> None:
    """Trains every number of workers in every precision, prints the table and writes the figures."""
    where = environment()
    print(", ".join(f"{key} {value}" for key, value in where.items() if value is not None), flush=True)
    rows: list[dict[str, Any]] = []
    for precision, learning_rate, epochs in SETTINGS:
        changes = (f"runtime.precision={precision}", f"optimiser.learning_rate={learning_rate}", f"epochs={epochs}")
        alone, *others = (trained(count, (*RECIPE, *changes)) for count in WORKERS)
        for count, (curves, weights) in zip(WORKERS[1:], others, strict=True):
            apart = differences(curves, alone[0])
            rows.append(
                {
                    "precision": precision,
                    "learning_rate": learning_rate,
                    "workers": count,
                    "first_10_steps": max(apart[:10]),
                    "all_steps": max(apart),
                    "final_weights": weight_difference(weights, alone[1]),
                    "apart_by_step": apart,
                }
            )
            print(".", end="", flush=True)
    shown = [
        {
            "precision": row["precision"],
            "learning rate": f"{row['learning_rate']:g}",
            "workers": f"{row['workers']} and 1",
            "figures, first 10 steps": f"{row['first_10_steps']:.1e}",
            "steps": str(len(row["apart_by_step"])),
            "figures, all steps": f"{row['all_steps']:.1e}",
            "final weights": f"{row['final_weights']:.1e}",
        }
        for row in rows
    ]
    print("\n\nlargest relative difference\n" + table(shown))
    print(f"\n{save('invariance', {'environment': where, 'recipe': RECIPE, 'rows': rows})}")


def trained(num_workers: int, recipe: tuple[str, ...]) -> tuple[dict[str, list[float]], dict[str, Tensor]]:
    """The curves and the final weights of a run on so many workers."""
    with tempfile.TemporaryDirectory() as folder:
        processes.spawn(_worker, (num_workers, recipe, folder), num_workers)  # pyright: ignore[reportPrivateImportUsage]
        return pickle.loads((Path(folder) / "result").read_bytes())


def differences(curves: dict[str, list[float]], expected: dict[str, list[float]]) -> list[float]:
    """The largest relative difference among the figures, for each step; the constraint's beside the total loss."""
    steps = range(len(expected["train/loss"]))
    # The constraint starts near 0, where a relative difference says nothing; it is part of the loss.
    return [
        max(
            abs(curves[name][step] - expected[name][step])
            / max(abs(expected[name][step]), abs(expected["train/loss"][step]) if name == "train/constraint" else 0.0)
            for name in COMPARED
        )
        for step in steps
    ]


def weight_difference(weights: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The norm of the difference of all weights and buffers, relative to that of the weights."""
    floating = [name for name, tensor in expected.items() if tensor.is_floating_point()]
    apart = sum((weights[name].double() - expected[name].double()).square().sum().item() for name in floating)
    return (apart / sum(expected[name].double().square().sum().item() for name in floating)) ** 0.5


def _worker(rank: int, num_workers: int, recipe: tuple[str, ...], folder: str) -> None:
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // num_workers))
    if num_workers > 1:
        dist.init_process_group("gloo", f"file://{folder}/rendezvous", world_size=num_workers, rank=rank)
    config = from_values(PretrainConfig, compose("pretrain", list(recipe)))
    recorder = Recorder(rank, num_workers)
    run(config, recorder, Nowhere(Path(folder)))
    if rank == 0:
        (Path(folder) / "result").write_bytes(pickle.dumps((recorder.curves, recorder.weights)))
    if num_workers > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
