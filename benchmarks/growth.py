"""How time and memory grow with the rows of NT-Xent, the classes, the images of the data set and the workers.

    python -m benchmarks.growth                        # three minutes on two CPU cores
    python -m benchmarks.growth --classes 1000 10000 100000 1000000

The workers are gloo processes on shared cores: they show how much is sent, not how long it would take. The time on 8 to
1,024 GPUs is estimated from the bytes (`benchmarks.communication`), not measured. Writes
benchmarks/results/growth-{cpu,gpu}.json and a plot.
"""

import time
from collections.abc import Callable
from math import sqrt
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional

from benchmarks import communication
from benchmarks.measure import (
    RESULTS,
    choose_device,
    describe_environment,
    format_table,
    make_parser,
    measure_peak_memory,
    measure_peak_rate,
    run_on_workers,
    save_results,
    time_in_turns,
)
from benchmarks.simclr import Ours, Setting, draw_images
from ssl_sec import losses
from ssl_sec.batch import Batch
from ssl_sec.collectives import world_size
from ssl_sec.data.image_set import ResidentImages
from ssl_sec.data.samplers import ShuffledBatches
from ssl_sec.edges.run.cpu import schedule_as_batch

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DIM = 128
FACE_DIM, FACE_ROWS = 512, 256
# With more rows the peer, which computes all cosines at once, runs out of memory.
MAX_DENSE_ROWS = 16_384
SETTING = Setting(encoder="resnet18", batch=64, precision="float32", width=0.25)


def main() -> None:
    """Measures everything, prints the tables and writes the results."""
    parser = make_parser("growth", __doc__)
    parser.add_argument(
        "--rows", nargs="+", type=int, default=[512, 2048, 8192, 16_384, 65_536], help="rows of NT-Xent"
    )
    parser.add_argument("--workers", nargs="+", type=int, default=[1, 2, 4], help="gloo workers")
    images = [10_000, 100_000, 1_000_000, 10_000_000]
    parser.add_argument("--images", nargs="+", type=int, default=images, help="images of the data set")
    parser.add_argument("--classes", nargs="+", type=int, default=[1000, 10_000, 100_000], help="classes of ArcFace")
    options = parser.parse_args()
    device = choose_device()
    peak = measure_peak_rate(device, "float32")
    measured = {
        "rows": [measure_rows(count, device, peak) for count in options.rows],
        "classes": [measure_classes(count, device, peak) for count in options.classes],
        "images": [measure_images(count) for count in options.images],
        "workers": [measure_workers(count) for count in options.workers] if device.type == "cpu" else [],
    }
    for name, rows in measured.items():
        if rows:
            print(f"\n{name}\n{format_table([_format_row(row) for row in rows])}")
    estimated = communication.estimate()
    print(
        f"\nestimated, not measured: {communication.ASSUMED}\n{format_table([_format_row(row) for row in estimated])}"
    )
    path = save_results("growth", {"environment": describe_environment(), **measured, "estimated": estimated})
    draw(measured).savefig(RESULTS / path.with_suffix(".svg").name)
    print(f"\n{path}")


def measure_rows(num_rows: int, device: torch.device, peak: float) -> dict[str, Any]:
    """Measures NT-Xent's forward and backward pass: ours, and dense with all cosines at once.

    The limit is the time of the matrix products at the machine's best rate: each pair's cosine once, and the gradient.
    """
    generator = torch.Generator().manual_seed(0)
    embeddings = (torch.randn(num_rows, DIM, generator=generator) / sqrt(DIM)).to(device).requires_grad_()
    labels = torch.arange(num_rows // 2, device=device).repeat(2)
    loss = losses.NTXentLoss(0.5)

    def ours() -> None:
        embeddings.grad = None
        loss(embeddings, labels).backward()

    def dense() -> None:
        embeddings.grad = None
        rows = functional.normalize(embeddings)
        logits = (rows @ rows.T / 0.5).masked_fill(torch.eye(num_rows, dtype=torch.bool, device=device), float("-inf"))
        functional.cross_entropy(logits, torch.arange(num_rows, device=device).roll(num_rows // 2)).backward()

    figures = _measure_time_and_memory(ours, dense if num_rows <= MAX_DENSE_ROWS else None)
    return {"rows": num_rows, **figures, "limit_ms": 1e3 * 3 * num_rows**2 * DIM / peak}


def measure_classes(num_classes: int, device: torch.device, peak: float) -> dict[str, Any]:
    """Measures ArcFace's forward and backward pass on one worker: ours, and torch's cross-entropy of all logits.

    The limit is the time of three matrix products at the machine's best rate: the cosines and both gradients.
    """
    torch.manual_seed(0)
    loss = losses.ArcFaceLoss(num_classes, FACE_DIM).to(device)
    embeddings = torch.randn(FACE_ROWS, FACE_DIM).to(device).requires_grad_()
    labels = torch.randint(num_classes, (FACE_ROWS,)).to(device)

    def ours() -> None:
        loss.zero_grad(set_to_none=True)
        loss(embeddings, labels).backward()

    def dense() -> None:
        loss.zero_grad(set_to_none=True)
        cosines = functional.linear(functional.normalize(embeddings), functional.normalize(loss.weight))
        functional.cross_entropy(64.0 * cosines, labels).backward()

    limit_ms = 1e3 * 3 * 2 * FACE_ROWS * num_classes * FACE_DIM / peak
    return {"classes": num_classes, **_measure_time_and_memory(ours, dense), "limit_ms": limit_ms}


def _measure_time_and_memory(ours: Callable[[], None], dense: Callable[[], None] | None) -> dict[str, Any]:
    turns = {"ours": ours} if dense is None else {"ours": ours, "dense": dense}
    seconds = time_in_turns(turns, rounds=1)
    if sum(each for (each,) in seconds.values()) < 1:
        seconds = time_in_turns(turns, rounds=5)
    figures: dict[str, Any] = {}
    for name, function in turns.items():
        figures |= {f"{name}_ms": 1e3 * median(seconds[name]), f"{name}_mib": measure_peak_memory(function) / 2**20}
    return figures


def measure_images(num_images: int) -> dict[str, Any]:
    """Measures the sampling and reading of a batch from a resident set of small images."""
    pixels = torch.zeros(num_images, 1, 8, 8, dtype=torch.uint8)
    labels = torch.zeros(num_images, dtype=torch.int64)
    images = ResidentImages(images=pixels, labels=labels, class_names=("any",), name="zeros", description="")
    sampler = ShuffledBatches(num_images=num_images, global_batch_size=256, seed=0)
    step = 0

    def read_batch() -> Batch:
        nonlocal step
        step += 1
        return images.read(sampler.indices(step))

    seconds = time_in_turns({"ours": read_batch}, rounds=5, calls=20)["ours"]
    return {"images": num_images, "ours_ms": 1e3 * median(seconds), "ours_mib": measure_peak_memory(read_batch) / 2**20}


def measure_workers(count: int) -> dict[str, Any]:
    """Measures steps of the same recipe on this number of workers, and the data that they send."""
    found = run_on_workers(count, _train)
    assert len({each["calls"] for each in found}) == 1
    return {"workers": count, **found[0]}


def _train(steps: int = 5) -> dict[str, float]:
    """Measures the data that one worker sends in a step, and how long a step takes."""
    ours = Ours(SETTING, draw_images(1000, 32), torch.device("cpu"))
    schedule_as_batch()  # as workers do
    ours.steps(2)
    with communication.count_sent() as sent:
        ours.steps(1)
    network = nn.ModuleList([ours.recipe.encoder, ours.recipe.head])
    if world_size() > 1:
        rows = 2 * SETTING.batch // world_size()
        expected = communication.compute_expected(network, rows, world_size(), is_saved=True)  # as the last step is
        assert sent == expected, "the estimate is out of date"
    start = time.perf_counter()
    with communication.count_sent() as total:
        ours.steps(steps)
    seconds = (time.perf_counter() - start) / steps
    parameters = sum(parameter.numel() for parameter in network.parameters())
    return {
        "ms_per_step": 1e3 * seconds,
        "percent_in_calls": 100 * total.seconds / steps / seconds,
        "calls": sent.calls,
        "kib_without_gradients": sent.num_bytes / 1024,
        "gradients_kib": 4 * parameters / 1024,
    }


def _format_row(row: dict[str, Any]) -> dict[str, str]:
    return {
        key.replace("_", " "): f"{value:,.2f}" if isinstance(value, float) else f"{value:,}"
        for key, value in row.items()
    }


def draw(measured: dict[str, list[dict[str, Any]]]) -> "Figure":
    """Draws time and memory over the rows and over the classes, on logarithmic axes."""
    from matplotlib.figure import Figure  # measuring alone does not need matplotlib

    from ssl_sec.figures.drawing import add_grid, arm_look

    figure = Figure(figsize=(9, 6), layout="constrained")
    for plots, kind in zip(figure.subplots(2, 2), ("rows", "classes"), strict=True):
        for axes, unit, unit_label in zip(plots, ("ms", "mib"), ("ms", "MiB"), strict=True):
            for place, (name, label) in enumerate((("dense", "all at once"), ("ours", "ours"))):
                points = [(each[kind], each[f"{name}_{unit}"]) for each in measured[kind] if f"{name}_{unit}" in each]
                colour, style = arm_look(place)
                axes.loglog(*zip(*points, strict=True), color=colour, linestyle=style, marker="o", label=label)
            axes.set(xlabel=f"{kind} of {'NT-Xent' if kind == 'rows' else 'ArcFace'}", ylabel=unit_label)
            axes.legend(frameon=False)
            add_grid(axes)
    return figure


if __name__ == "__main__":
    main()
