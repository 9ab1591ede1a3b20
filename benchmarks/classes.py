"""A million class templates on workers that could not hold the logits: memory and time of a training step.

    python -m benchmarks.classes                     # 2 workers, 1,000,000 classes x 512, batch 256, on the CPU
    python -m benchmarks.classes classes=100000 rows=64 steps=3

Each worker holds the templates of half of the classes with their gradients and momentum, and takes ArcFace's steps by
SGD; the peer, torch's cross-entropy of all cosines, runs in one process. Every part runs in a process of its own, whose
peak of resident memory the system tells. Losses after each step are compared.
Writes benchmarks/results/classes-cpu.json.
"""

import json
import multiprocessing
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from benchmarks.measure import environment, save, table
from ssl_sec.class_sharding import draw_templates
from ssl_sec.collectives import average_parameter_gradients, own_rows
from ssl_sec.losses import ArcFaceLoss
from ssl_sec.losses.template import TemplateLoss
from ssl_sec.objective import Objective
from ssl_sec.schedules import Constant

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


def part(name: str, rank: int, world_size: int, folder: str, sizes: dict[str, int]) -> None:
    """One process; leaves its losses, its seconds and its peak memory."""
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // world_size))
    if world_size > 1:
        dist.init_process_group("gloo", f"file://{folder}/meet", world_size=world_size, rank=rank)
    before = _peak_mib()
    start = time.perf_counter()
    losses = plain(sizes) if name == "plain" else ours(sizes, shared_out=world_size > 1)
    told = {"losses": losses, "seconds": time.perf_counter() - start, "peak_mib": _peak_mib() - before}
    Path(folder, str(rank)).write_text(json.dumps(told))
    if world_size > 1:
        dist.destroy_process_group()


def measured(name: str, world_size: int, sizes: dict[str, int]) -> dict[str, Any]:
    """Losses, seconds a step and the highest peak of the workers' memory, beyond that of the imports."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        arguments = [(name, rank, world_size, folder, sizes) for rank in range(world_size)]
        processes = [context.Process(target=part, args=each) for each in arguments]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        if any(process.exitcode for process in processes):
            raise SystemExit(f"{name} on {world_size} workers ended early, as a machine without memory lets it")
        told = [json.loads(Path(folder, str(rank)).read_text()) for rank in range(world_size)]
    return {
        "case": name,
        "workers": world_size,
        "losses": told[0]["losses"],
        "seconds_a_step": max(each["seconds"] for each in told) / sizes["steps"],
        "peak_mib_a_worker": max(each["peak_mib"] for each in told),
    }


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


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
