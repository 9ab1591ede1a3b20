"""Memory and time of a training step with a million class templates, sharded over workers.

    python -m benchmarks.classes                     # 2 workers, 1,000,000 classes x 512, batch 256, on the CPU
    python -m benchmarks.classes classes=100000 rows=64 steps=3

Each worker holds the templates of half of the classes, with their gradients and momentum, and trains them with ArcFace
and SGD; in the sampled cases, a step compares with a tenth of the classes (Partial FC). The peer, torch's cross-entropy
of all cosines, runs in one process. Each case runs in its own processes, whose peak resident memory is measured. The
losses of all cases are shown for comparison.
Writes benchmarks/results/classes-cpu.json.
"""

import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from benchmarks.measure import describe_environment, format_table, read_peak_resident_mib, run_on_workers, save_results
from ssl_sec.collectives import average_parameter_gradients, own_rows, world_size
from ssl_sec.losses import ArcFaceLoss
from ssl_sec.losses.templates.base import TemplateLoss
from ssl_sec.training.class_sharding import draw_templates
from ssl_sec.training.objective import Objective
from ssl_sec.training.schedules import Constant

WORKERS, DIM, SCALE, MARGIN_RADIANS = 2, 512, 64.0, 0.45
SAMPLE_RATE = 0.1
SIZES = {"classes": 1_000_000, "rows": 256, "steps": 2}


class Trained(NamedTuple):
    """The losses of some steps, and their time without that of drawing the templates."""

    losses: list[float]
    seconds_per_step: float


def make_batch(rows: int, classes: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws the embeddings and labels of a step."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(rows, DIM, generator=generator), torch.randint(classes, (rows,), generator=generator)


def train_ours(sizes: dict[str, int], is_sharded: bool, class_sample_rate: float) -> Trained:
    """Trains with the objective that the recipes use."""
    with torch.device("meta"):
        loss = ArcFaceLoss(sizes["classes"], DIM, SCALE, MARGIN_RADIANS)
    draw_templates(loss, 0, is_sharded)
    loss.sample_classes(class_sample_rate, seed=0)
    objective = Objective(loss, None, Constant(0.0))
    average_parameter_gradients(objective, [loss.weight] if is_sharded else [])

    def value(rows: torch.Tensor, labels: torch.Tensor, step: int) -> torch.Tensor:
        loss.draw_classes(step)
        return objective(rows, labels, step).total

    return train(sizes, loss, value, own_rows(sizes["rows"]))


def train_plain(sizes: dict[str, int]) -> Trained:
    """Trains with torch's own cross-entropy of the logits of all classes."""
    with torch.device("meta"):
        loss = ArcFaceLoss(sizes["classes"], DIM)
    draw_templates(loss, 0, sharded=False)

    def value(rows: torch.Tensor, labels: torch.Tensor, step: int) -> torch.Tensor:
        cosines = functional.linear(functional.normalize(rows), functional.normalize(loss.weight))
        own = labels.unsqueeze(1)
        harder = (cosines.gather(1, own).clamp(-1 + 1e-7, 1 - 1e-7).acos() + MARGIN_RADIANS).cos()
        return functional.cross_entropy(SCALE * cosines.scatter(1, own, harder), labels)

    return train(sizes, loss, value, slice(None))


def train(sizes: dict[str, int], loss: TemplateLoss, value: Callable[..., torch.Tensor], own: slice) -> Trained:
    """Trains the templates."""
    optimiser = torch.optim.SGD(nn.ParameterList([loss.weight]), lr=0.1, momentum=0.9)
    losses: list[float] = []
    start = time.perf_counter()
    for step in range(sizes["steps"]):
        rows, labels = make_batch(sizes["rows"], sizes["classes"], step)
        optimiser.zero_grad(set_to_none=True)
        total = value(rows[own].requires_grad_(), labels[own], step)
        total.backward()
        optimiser.step()
        losses.append(total.item())
    return Trained(losses, (time.perf_counter() - start) / sizes["steps"])


def measure_worker(case: str, sizes: dict[str, int]) -> dict[str, Any]:
    """Measures one worker: its losses, its time per step and its peak memory beyond that of the imports."""
    before = read_peak_resident_mib()
    rate = SAMPLE_RATE if case == "sampled" else 1.0
    trained = train_plain(sizes) if case == "plain" else train_ours(sizes, world_size() > 1, rate)
    return {**trained._asdict(), "peak_mib": read_peak_resident_mib() - before}


def measure_case(case: str, workers: int, sizes: dict[str, int]) -> dict[str, Any]:
    """Measures a case: the losses, and the slowest and the largest of the workers."""
    found = run_on_workers(workers, measure_worker, case, sizes)
    return {
        "case": case,
        "workers": workers,
        "losses": found[0]["losses"],
        "seconds_per_step": max(each["seconds_per_step"] for each in found),
        "peak_mib_per_worker": max(each["peak_mib"] for each in found),
    }


def main(arguments: list[str]) -> None:
    """Measures every case, prints the table and writes the results."""
    sizes = SIZES | {name: int(value) for name, _, value in (argument.partition("=") for argument in arguments)}
    logits_mib = sizes["rows"] * sizes["classes"] * 4 / 2**20
    templates_mib = sizes["classes"] * DIM * 4 / 2**20
    cases = [("ours", WORKERS), ("ours", 1), ("sampled", WORKERS), ("sampled", 1), ("plain", 1)]
    rows = [measure_case(case, workers, sizes) for case, workers in cases]
    print(f"templates {templates_mib:.0f} MiB, logits of all classes {logits_mib:.0f} MiB")
    shown = [
        {
            "": row["case"],
            "workers": str(row["workers"]),
            "peak MiB per worker": f"{row['peak_mib_per_worker']:.0f}",
            "s/step": f"{row['seconds_per_step']:.2f}",
            "losses": ", ".join(f"{loss:.6f}" for loss in row["losses"]),
        }
        for row in rows
    ]
    print(format_table(shown))
    values = {"environment": describe_environment(), **sizes, "logits_mib": logits_mib, "results": rows}
    print(f"\n{save_results('classes', values)}")


if __name__ == "__main__":
    main(sys.argv[1:])
