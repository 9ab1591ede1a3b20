"""A million class templates on workers that could not hold the logits: memory and time of a training step.

    python -m benchmarks.classes                     # 2 workers, 1,000,000 classes x 512, batch 256, on the CPU
    python -m benchmarks.classes classes=100000 rows=64 steps=3

Each worker holds the templates of half of the classes with their gradients and momentum, and takes ArcFace's steps by
SGD; the peer, torch's cross-entropy of all cosines, runs in one process. Every part runs in a process of its own, whose
peak of resident memory the system tells. Losses after each step are compared.
Writes benchmarks/results/classes-cpu.json.
"""

import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from benchmarks.measure import environment, on_workers, peak_resident_mib, save, table
from ssl_sec.collectives import average_parameter_gradients, own_rows, world_size
from ssl_sec.losses import ArcFaceLoss
from ssl_sec.losses.template import TemplateLoss
from ssl_sec.training.class_sharding import draw_templates
from ssl_sec.training.objective import Objective
from ssl_sec.training.schedules import Constant

WORKERS, DIM, SCALE, MARGIN_RADIANS = 2, 512, 64.0, 0.45
SIZES = {"classes": 1_000_000, "rows": 256, "steps": 2}


def batch(rows: int, classes: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Embeddings and labels of a step."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(rows, DIM, generator=generator), torch.randint(classes, (rows,), generator=generator)


def ours(sizes: dict[str, int], shared_out: bool) -> list[float]:
    """Losses of the steps, by the objective that training uses."""
    with torch.device("meta"):
        loss = ArcFaceLoss(sizes["classes"], DIM, SCALE, MARGIN_RADIANS)
    draw_templates(loss, 0, shared_out)
    objective = Objective(loss, None, Constant(0.0))
    average_parameter_gradients(objective, [loss.weight] if shared_out else [])
    return steps(sizes, loss, lambda rows, labels, step: objective(rows, labels, step).total, own_rows(sizes["rows"]))


def plain(sizes: dict[str, int]) -> list[float]:
    """The same, by torch's own cross-entropy of the logits of all classes."""
    with torch.device("meta"):
        loss = ArcFaceLoss(sizes["classes"], DIM)
    draw_templates(loss, 0, shared_out=False)

    def value(rows: torch.Tensor, labels: torch.Tensor, step: int) -> torch.Tensor:
        cosines = functional.linear(functional.normalize(rows), functional.normalize(loss.weight))
        own = labels.unsqueeze(1)
        harder = (cosines.gather(1, own).clamp(-1 + 1e-7, 1 - 1e-7).acos() + MARGIN_RADIANS).cos()
        return functional.cross_entropy(SCALE * cosines.scatter(1, own, harder), labels)

    return steps(sizes, loss, value, slice(None))


def steps(sizes: dict[str, int], loss: TemplateLoss, value: Callable[..., torch.Tensor], own: slice) -> list[float]:
    """Trains the templates; returns the losses."""
    optimiser = torch.optim.SGD(nn.ParameterList([loss.weight]), lr=0.1, momentum=0.9)
    losses: list[float] = []
    for step in range(sizes["steps"]):
        rows, labels = batch(sizes["rows"], sizes["classes"], step)
        optimiser.zero_grad(set_to_none=True)
        total = value(rows[own].requires_grad_(), labels[own], step)
        total.backward()
        optimiser.step()
        losses.append(total.item())
    return losses


def part(name: str, sizes: dict[str, int]) -> dict[str, Any]:
    """What one process has to tell: its losses, its seconds and its peak memory beyond that of the imports."""
    before = peak_resident_mib()
    start = time.perf_counter()
    losses = plain(sizes) if name == "plain" else ours(sizes, shared_out=world_size() > 1)
    seconds = (time.perf_counter() - start) / sizes["steps"]
    return {"losses": losses, "seconds_a_step": seconds, "peak_mib": peak_resident_mib() - before}


def measured(name: str, workers: int, sizes: dict[str, int]) -> dict[str, Any]:
    """Losses, seconds a step and the highest peak of the workers' memory."""
    told = on_workers(workers, part, name, sizes)
    return {
        "case": name,
        "workers": workers,
        "losses": told[0]["losses"],
        "seconds_a_step": max(each["seconds_a_step"] for each in told),
        "peak_mib_a_worker": max(each["peak_mib"] for each in told),
    }


def main(arguments: list[str]) -> None:
    """Measures, prints and saves."""
    sizes = SIZES | {name: int(value) for name, _, value in (argument.partition("=") for argument in arguments)}
    logits_mib = sizes["rows"] * sizes["classes"] * 4 / 2**20
    templates_mib = sizes["classes"] * DIM * 4 / 2**20
    rows = [measured("ours", WORKERS, sizes), measured("ours", 1, sizes), measured("plain", 1, sizes)]
    print(f"templates {templates_mib:.0f} MiB, logits of all classes {logits_mib:.0f} MiB")
    shown = [
        {
            "": row["case"],
            "workers": str(row["workers"]),
            "peak MiB a worker": f"{row['peak_mib_a_worker']:.0f}",
            "s a step": f"{row['seconds_a_step']:.2f}",
            "losses": ", ".join(f"{loss:.6f}" for loss in row["losses"]),
        }
        for row in rows
    ]
    print(table(shown))
    print(f"\n{save('classes', {'environment': environment(), **sizes, 'logits_mib': logits_mib, 'results': rows})}")


if __name__ == "__main__":
    main(sys.argv[1:])
