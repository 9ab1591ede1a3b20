"""Whether training depends on the number of workers: the differences between runs on 1, 2 and 4 workers.

    python -m benchmarks.invariance        # about 5 minutes on two CPU cores

Trains the digits recipe with SEC-EMA on gloo workers on the CPU. The metrics of every step and the final weights with
2 and 4 workers are compared with those of one worker. In float64 they agree to rounding error over the whole run. In
float32 a single activation that rounds to the other side of a ReLU changes a gradient by a thousandth, so runs diverge
at the recipe's learning rate, as any two runs do that sum in another order; at a tiny learning rate they agree.
Writes benchmarks/results/invariance-cpu.json, with the differences of every step.
"""

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.measure import describe_environment, format_table, print_environment, run_on_workers, save_results
from benchmarks.simclr import QuietRuntime
from ssl_sec.data.image_set import ImageSet
from ssl_sec.edges.composition.compose import compose
from ssl_sec.recipes.pretraining.config import PretrainConfig
from ssl_sec.recipes.pretraining.recipe import run
from ssl_sec.settings import from_values
from ssl_sec.training.norms import NormHistogram

WORKERS = (1, 2, 4)
# Precision, learning rate, epochs of 11 steps; the digits recipe has a learning rate of 0.3.
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


@dataclass(frozen=True, kw_only=True)
class Recorder(QuietRuntime):
    """A runtime that keeps the metrics and the weights.

    Attributes:
        curves: metric -> its value at each step.
        weights: the weights of the last save.
    """

    curves: dict[str, list[float]]
    weights: dict[str, Tensor]

    def report(self, step: int, metrics: Mapping[str, float], norms: NormHistogram | None = None) -> None:
        """Keeps the metrics that must not depend on the number of workers."""
        for name in COMPARED:
            if name in metrics:
                self.curves[name].append(metrics[name])

    def save(self, step: int, state: Mapping[str, Any]) -> None:
        """Keeps the weights."""
        self.weights.update(
            {
                f"{part}.{name}": tensor.detach().clone()
                for part in ("encoder", "head", "objective")
                for name, tensor in state[part].items()
            }
        )


class TemporaryStore:
    """A RunStore in a folder that is deleted afterwards."""

    def __init__(self, folder: Path) -> None:
        self.encoder_path = folder / "encoder.safetensors"
        self.head_path = folder / "head.safetensors"
        self.features_path = folder / "features.pt"
        self.views_path = folder / "views.pt"
        self.examples_path = folder / "examples.pt"
        self.check_path = folder / "check.json"

    def describe_data(self, image_set: ImageSet, *, is_resumed: bool = False) -> None:
        """Does nothing: the set is known."""

    def describe_test_data(self, image_sets: Mapping[str, ImageSet]) -> None:
        """Does nothing, likewise."""

    def forget_records_from(self, step: int) -> None:
        """Does nothing: there are no records."""

    def newest_step(self) -> None:
        """There is no checkpoint."""

    def restored_state(self, device: torch.device, held: slice | None = None) -> None:
        """Returns None: every run starts at step 0."""


def main() -> None:
    """Trains with every number of workers in every precision, prints the table and writes the results."""
    environment = describe_environment()
    print_environment(environment)
    rows: list[dict[str, Any]] = []
    for precision, learning_rate, epochs in SETTINGS:
        changes = (f"runtime.precision={precision}", f"optimiser.learning_rate={learning_rate}", f"epochs={epochs}")
        alone, *others = (run_on_workers(count, train, (*RECIPE, *changes))[0] for count in WORKERS)
        for count, (curves, weights) in zip(WORKERS[1:], others, strict=True):
            differences = compare_curves(curves, alone[0])
            rows.append(
                {
                    "precision": precision,
                    "learning_rate": learning_rate,
                    "workers": count,
                    "first_10_steps": max(differences[:10]),
                    "all_steps": max(differences),
                    "final_weights": compare_weights(weights, alone[1]),
                    "difference_by_step": differences,
                }
            )
            print(".", end="", flush=True)
    shown = [
        {
            "precision": row["precision"],
            "learning rate": f"{row['learning_rate']:g}",
            "workers": f"{row['workers']} and 1",
            "metrics, first 10 steps": f"{row['first_10_steps']:.1e}",
            "steps": str(len(row["difference_by_step"])),
            "metrics, all steps": f"{row['all_steps']:.1e}",
            "final weights": f"{row['final_weights']:.1e}",
        }
        for row in rows
    ]
    print("\n\nlargest relative difference\n" + format_table(shown))
    print(f"\n{save_results('invariance', {'environment': environment, 'recipe': RECIPE, 'rows': rows})}")


def train(recipe: tuple[str, ...]) -> tuple[dict[str, list[float]], dict[str, Tensor]]:
    """Trains on this worker; returns the curves and the final weights."""
    config = from_values(PretrainConfig, compose("pretrain", list(recipe)))
    recorder = Recorder(device=torch.device("cpu"), curves={name: [] for name in COMPARED}, weights={})
    with tempfile.TemporaryDirectory() as folder:
        run(config, recorder, TemporaryStore(Path(folder)))
    return recorder.curves, recorder.weights


def compare_curves(curves: dict[str, list[float]], expected: dict[str, list[float]]) -> list[float]:
    """Computes the largest relative difference of the metrics at each step; the constraint's relative to the loss."""
    steps = range(len(expected["train/loss"]))
    # The constraint, a part of the loss, starts near 0, where its own relative difference is meaningless.
    return [
        max(
            abs(curves[name][step] - expected[name][step])
            / max(abs(expected[name][step]), abs(expected["train/loss"][step]) if name == "train/constraint" else 0.0)
            for name in COMPARED
        )
        for step in steps
    ]


def compare_weights(weights: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Computes the norm of the difference of all weights and buffers, relative to their norm."""
    floating = [name for name, tensor in expected.items() if tensor.is_floating_point()]
    squared = sum((weights[name].double() - expected[name].double()).square().sum().item() for name in floating)
    return (squared / sum(expected[name].double().square().sum().item() for name in floating)) ** 0.5


if __name__ == "__main__":
    main()
