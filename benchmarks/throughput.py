"""Pretraining speed in images per second: ours, lightly's recipe and a plain PyTorch loop.

    python -m benchmarks.throughput                                # ResNet-18, batch 256, a few minutes on two cores
    python -m benchmarks.throughput --encoder resnet18 resnet50 --batch 256 1024 4096 --images <Parquet or images>

All have the same network, batch and precision, and take turns; on a CPU each runs in its own process. An image counts
once, with both of its views. The table also has the rate as a share of this machine's best matrix product or
convolution (model FLOP utilisation), and how our step divides its time, measured by waiting for the device after each
part; on a GPU also how often a step waits for it. Without --images the pixels are random, which does not change the
speed. If a contender fails, for example without enough memory, its error is shown instead.
Writes benchmarks/results/throughput-{cpu,gpu}.json (with --encoder resnet50 --width 0.5,
throughput-resnet50-x0.5-…) and a plot.
"""

import contextlib
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.contest import Contest, free_memory
from benchmarks.measure import (
    RESULTS,
    choose_device,
    describe_environment,
    format_table,
    make_parser,
    measure_peak_memory,
    measure_peak_rate,
    median_ratio,
    save_results,
    synchronize,
    time_in_turns,
)
from benchmarks.simclr import (
    Contender,
    Lightly,
    Ours,
    Plain,
    Setting,
    count_flops_per_image,
    count_waits_per_step,
    describe_data,
    draw_images,
    open_images,
)
from ssl_sec.batch import Batch
from ssl_sec.data.image_set import ResidentImages
from ssl_sec.training.recipe import Recipe
from ssl_sec.training.step import autocast

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SECONDS_PER_TURN = {"cpu": 8.0, "cuda": 2.0}
# The number of steps to compile, start processes and choose algorithms; then of those timed for a turn's length.
WARM_UP = {"cpu": (1, 1), "cuda": (10, 20)}
NUM_RANDOM_IMAGES = {"cpu": 10_000, "cuda": 50_000}
PEERS = ("lightly", "plain loop")
OURS = "ours"


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The settings of a variant of ours.

    Attributes:
        runtime: values of `runtime`.
        augment: values of `augment`.
    """

    runtime: Mapping[str, Any] = field(default_factory=dict)
    augment: Mapping[str, Any] = field(default_factory=dict)


_GPU_DEFAULTS = {"channels_last": True, "compile": True, "graphs": True}
CHOICES: Mapping[str, Mapping[str, Choice]] = {
    "cpu": {OURS: Choice(), "ours, contiguous": Choice(runtime={"channels_last": False})},
    "cuda": {
        OURS: Choice(runtime=_GPU_DEFAULTS),
        "ours, without CUDA graphs": Choice(runtime={**_GPU_DEFAULTS, "graphs": False}),
        "ours, views by kornia": Choice(runtime=_GPU_DEFAULTS, augment={"fused": False}),
        "ours, not compiled": Choice(runtime={**_GPU_DEFAULTS, "compile": False}),
    },
}


def main() -> None:
    """Measures every setting, prints the table and writes the results."""
    parser = make_parser("throughput", __doc__)
    parser.add_argument("--encoder", nargs="+", default=["resnet18"], choices=["resnet18", "resnet50"])
    parser.add_argument("--batch", nargs="+", type=int, default=[256], help="images per step")
    parser.add_argument("--width", type=float, default=1.0, help="multiplies the channels of every layer")
    parser.add_argument("--precision", nargs="+", default=["float32"], choices=["float32", "bfloat16"])
    parser.add_argument(
        "--images", type=Path, help="a Parquet file, or a folder with Parquet files or with a subfolder per class"
    )
    parser.add_argument("--rounds", type=int, default=3, help="turns of each contender")
    parser.add_argument("--contender", nargs="+", help="the contenders to measure; default: all")
    options = parser.parse_args()
    device = choose_device()
    images = load_images(options.images, device, max(options.batch))
    rows: list[dict[str, Any]] = []
    for encoder in options.encoder:
        for precision in options.precision:
            for batch in options.batch:
                setting = Setting(encoder=encoder, batch=batch, precision=precision, width=options.width)
                separate = device.type == "cpu"
                found = measure(setting, images, device, options.rounds, options.contender, separate)
                print(format_table([format_row(row) for row in found]), end="\n\n", flush=True)
                rows += found
    others = [encoder for encoder in options.encoder if encoder != "resnet18"]
    name = "-".join(["throughput", *others, *([] if options.width == 1 else [f"x{options.width:g}"])])
    path = save_results(name, {"environment": describe_environment(), "images": images.description, "rows": rows})
    draw(rows).savefig(RESULTS / path.with_suffix(".svg").name)
    print(path)


def load_images(path: Path | None, device: torch.device, at_least: int) -> ResidentImages:
    """Loads the images at a path into memory; without a path, draws random ones of 32 pixels."""
    if path is not None:
        return open_images(describe_data(path))
    return draw_images(max(NUM_RANDOM_IMAGES[device.type], at_least), 32)


def list_contenders(device: torch.device) -> dict[str, Callable[[Setting, ResidentImages], Contender]]:
    """Returns the constructor of each contender by its name."""

    def make_ours(choice: Choice) -> Callable[[Setting, ResidentImages], Contender]:
        return lambda setting, images: Ours(setting, images, device, augment=choice.augment, **choice.runtime)

    return {
        **{name: make_ours(choice) for name, choice in CHOICES[device.type].items()},
        "plain loop": lambda setting, images: Plain(setting, images, device),
        "lightly": lambda setting, images: Lightly(setting, images, device, os.cpu_count() or 1),
    }


class ContenderProcess:
    """A contender in a separate process, so that its memory does not affect the others."""

    def __init__(self, name: str, setting: Setting, images: ResidentImages, device: torch.device) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, name, setting, images, device))
        self._process.start()
        theirs.close()

    def ready(self) -> None:
        """Does the same as the contender."""
        self._call("ready")

    def steps(self, count: int) -> None:
        """Takes `count` steps."""
        self._call(count)

    def measure_parts(self) -> dict[str, Any] | None:
        """Does the same as the function `measure_parts`."""
        return self._call("parts")

    def close(self) -> None:
        """Ends the process."""
        with contextlib.suppress(BrokenPipeError):  # the process has already ended
            self._connection.send(None)
        self._process.join()

    def _call(self, request: int | str) -> Any:
        self._connection.send(request)
        answer = self._connection.recv()
        if isinstance(answer, BaseException):
            raise answer
        return answer


def _serve(connection: Connection, name: str, setting: Setting, images: ResidentImages, device: torch.device) -> None:
    contender = None
    while (request := connection.recv()) is not None:
        try:
            contender = contender or list_contenders(device)[name](setting, images)
            match request:
                case "parts":
                    answer = measure_parts(contender, device)
                case "ready":
                    answer = contender.ready()
                case _:
                    answer = contender.steps(request)
        except Exception as error:
            answer = error
        connection.send(answer)
    if contender is not None:
        contender.close()


def measure(
    setting: Setting,
    images: ResidentImages,
    device: torch.device,
    rounds: int,
    names: Collection[str] | None = None,
    separate: bool = False,
    on_rows: Callable[[list[dict[str, Any]]], object] = lambda rows: None,
) -> list[dict[str, Any]]:
    """Measures contenders, which take turns, in one setting.

    Args:
        setting: the network, batch and precision.
        images: images to train on.
        device: device on which they train.
        rounds: number of turns of each contender.
        names: names of the contenders; None for all.
        separate: whether each runs in its own process, as it would in use.
        on_rows: called with the rows whenever there are more of them.
    """
    peak = measure_peak_rate(device, setting.precision)
    chosen = {name: make for name, make in list_contenders(device).items() if names is None or name in names}
    contest, counts = Contest(), dict[str, int]()
    for name, make in chosen.items():
        if separate:
            contest.enter(name, partial(ContenderProcess, name, setting, images, device))
        else:
            contest.enter(name, partial(make, setting, images))
        count = contest.attempt(name, lambda contender: choose_steps_per_turn(contender, SECONDS_PER_TURN, device))
        if count is not None:
            counts[name] = count
        print(f"{name}: {contest.errors.get(name) or f'{count} steps per turn'}", flush=True)
    timings = time_in_turns(
        {
            name: partial(contest.attempt, name, lambda one, count=count: one.steps(count))
            for name, count in counts.items()
        },
        rounds,
        warm_up=False,
        before={name: partial(contest.attempt, name, lambda one: one.ready()) for name in counts},
    )
    seconds = {name: [each / counts[name] for each in timings[name]] for name in contest.contenders}
    rows: list[dict[str, Any]] = [{**asdict(setting), "contender": name} for name in chosen]
    for row in rows:
        if row["contender"] in seconds:
            row |= _compute_rates(row["contender"], seconds, setting.batch)
    on_rows(rows)
    for row in rows:
        name = row["contender"]
        if device.type == "cuda":
            row |= contest.attempt(name, _measure_step_memory) or {}
        parts = contest.attempt(name, lambda contender: measure_parts(contender, device))
        if parts is not None:
            row |= {"mfu": row["images_per_s"] * parts["flops_per_image"] / peak, **parts}
        if name in contest.errors:
            row["error"] = contest.errors[name]
        on_rows(rows)
    contest.close()
    torch.compiler.reset()  # another batch size gets its own graph, not one for any size
    free_memory()
    return rows


def _compute_rates(name: str, seconds: Mapping[str, list[float]], batch: int) -> dict[str, Any]:
    """Computes a contender's images per second, and how many times as fast as the peers it is.

    Args:
        name: the contender.
        seconds: seconds per step in each turn, by contender.
        batch: images of a step.
    """
    rates = [batch / each for each in seconds[name]]
    peers = [peer for peer in PEERS if peer in seconds and peer != name]
    return {
        "images_per_s": statistics.median(rates),
        "each": rates,
        "times_as_fast_as": {peer: median_ratio(seconds[peer], seconds[name]) for peer in peers},
    }


def _measure_step_memory(contender: Contender) -> dict[str, float]:
    """Measures the peak memory of a step in this process, unless it is replayed.

    A replayed graph uses memory that was allocated when it was recorded: a step allocates nothing.
    """
    if isinstance(contender, Ours) and contender.recipe.graphed:
        return {}
    return {"peak_mib": measure_peak_memory(lambda: contender.steps(1)) / 2**20}


def choose_steps_per_turn(contender: Contender, seconds: Mapping[str, float], device: torch.device) -> int:
    """Chooses the steps of a contender that take the given seconds, by the type of the device."""
    first, timed = WARM_UP[device.type]
    contender.steps(first)
    contender.ready()
    synchronize()
    start = time.perf_counter()
    contender.steps(timed)
    synchronize()
    return max(1, round(timed * seconds[device.type] / (time.perf_counter() - start)))


def measure_parts(contender: Contender, device: torch.device) -> dict[str, Any] | None:
    """Measures the operations per image of ours and how a step divides its time; returns None for the peers."""
    if isinstance(contender, ContenderProcess):
        return contender.measure_parts()
    if not isinstance(contender, Ours):
        return None
    recipe = contender.recipe
    parts: dict[str, Any] = {"waits_per_step": count_waits_per_step(contender)} if device.type == "cuda" else {}
    return {**parts, "flops_per_image": count_flops_per_image(recipe), "shares": measure_shares(recipe, device)}


def measure_shares(recipe: Recipe, device: torch.device) -> dict[str, float]:
    """Measures the share of each part in a step that waits for the device after each part."""
    recipe.model.train()
    spent: dict[str, float] = {}
    clock = time.perf_counter()

    def end(part: str) -> None:
        nonlocal clock
        synchronize()
        now = time.perf_counter()
        spent[part] = spent.get(part, 0.0) + now - clock
        clock = now

    for step in range(3):
        if step == 1:
            spent.clear()  # the first step is the warm-up
        end("other")
        rows = slice(0, recipe.sampler.global_batch_size)
        batch: Batch = recipe.image_set.read(recipe.sampler.indices(step)).to(device)
        end("data")
        views = recipe.views(batch.images, step, rows, recipe.sampler.global_batch_size)
        views = views.contiguous(memory_format=recipe.computation.layout)
        end("augmentation")
        with autocast(device, recipe.computation.precision):
            embeddings = recipe.model(views).embeddings
        end("forward")
        leaf = embeddings.detach().requires_grad_()
        recipe.objective(leaf, recipe.row_labels(batch, rows), step).total.backward()
        end("loss")
        embeddings.backward(leaf.grad)
        end("backward")
        recipe.optimiser.step()
        recipe.optimiser.zero_grad()
        end("optimiser")
    total = sum(spent.values())
    return {part: seconds / total for part, seconds in spent.items() if part != "other"}


def format_row(row: Mapping[str, Any]) -> dict[str, str]:
    """Formats a row of the table."""
    times = row.get("times_as_fast_as", {})
    return {
        "": row["contender"],
        "network": f"{row['encoder']} x {row['width']:g}",
        "batch": f"{row['batch']:,}",
        "precision": row["precision"],
        "images/s": f"{row['images_per_s']:,.1f}" if "images_per_s" in row else row["error"],
        **{f"times {peer}": f"{times[peer]:.2f}" if peer in times else "-" for peer in PEERS},
        "of peak": f"{100 * row['mfu']:.0f} %" if "mfu" in row else "-",
        "parts of a step": ", ".join(f"{part} {100 * share:.1f} %" for part, share in row.get("shares", {}).items()),
    }


def draw(rows: list[dict[str, Any]]) -> "Figure":
    """Draws images per second over the batch, with one plot per network and precision."""
    from matplotlib.figure import Figure  # measuring alone does not need matplotlib

    from ssl_sec.figures.drawing import add_grid, arm_look

    rows = [row for row in rows if "images_per_s" in row]
    kinds = sorted({(row["encoder"], row["precision"]) for row in rows})
    figure = Figure(figsize=(4.5 * len(kinds), 3.6), layout="constrained")
    for axes, (encoder, precision) in zip(figure.subplots(1, len(kinds), squeeze=False)[0], kinds, strict=True):
        of_kind = [row for row in rows if (row["encoder"], row["precision"]) == (encoder, precision)]
        for place, name in enumerate(dict.fromkeys(row["contender"] for row in of_kind)):
            own = [row for row in of_kind if row["contender"] == name]
            colour, style = arm_look(place)
            batches, rates = [row["batch"] for row in own], [row["images_per_s"] for row in own]
            axes.plot(batches, rates, color=colour, linestyle=style, marker="o", label=name)
        axes.set(title=f"{encoder}, {precision}", xlabel="batch", ylabel="images/s (two views each)", ylim=(0, None))
        axes.set_xscale("log", base=2)
        axes.legend(frameon=False)
        add_grid(axes)
    return figure


if __name__ == "__main__":
    main()
