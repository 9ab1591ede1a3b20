"""Images a second of pretraining: ours, lightly's recipe and a plain PyTorch loop, with one network, batch, precision.

    python -m benchmarks.throughput                                    # ResNet-18, batch 256, some minutes on two cores
    python -m benchmarks.throughput --encoder resnet18 resnet50 --batch 256 1024 4096 --images <Parquet or images>

They take turns, on a CPU each in a process of its own; an image counts once, with both of its views. Beside the rates:
the share of the highest rate that a product or a convolution reaches here (model FLOP utilisation), and where a step of
ours spends its time, measured in steps that wait for the device after each part; on a GPU also how often a step waits
for it. Without --images, the pixels are random: no rate depends on them. A contender that fails, as where memory is too
small for it, has the error instead of a rate.
Writes benchmarks/results/throughput-{cpu,gpu}.json (with --encoder resnet50 --width 0.5,
throughput-resnet50-x0.5-…) and a plot beside it.
"""

import contextlib
import gc
import multiprocessing
import os
import statistics
import time
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.measure import (
    RESULTS,
    command_line,
    environment,
    in_turn,
    peak_memory,
    peak_rate,
    ratio,
    save,
    table,
    told,
    wait,
)
from benchmarks.simclr import Contender, Lightly, Ours, Plain, Setting, data_values, opened_images, random_images
from ssl_sec.batch import Batch
from ssl_sec.data.image_set import ResidentImages
from ssl_sec.training.recipe import Recipe
from ssl_sec.training.step import autocast

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# On a GPU so many that the batches which a loader has ready are few beside those of a turn.
SECONDS_A_TURN = {"cpu": 8.0, "cuda": 5.0}
# Steps that compile, start processes and find algorithms; and those whose time says how many are a turn.
WARM_UP = {"cpu": (1, 1), "cuda": (10, 20)}
NUM_RANDOM_IMAGES = {"cpu": 10_000, "cuda": 50_000}
PEERS = ("lightly", "plain loop")
OURS = "ours"


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What a variant of ours sets.

    Attributes:
        runtime: values of `runtime`.
        augment: values of `augment`.
    """

    runtime: Mapping[str, Any] = field(default_factory=dict)
    augment: Mapping[str, Any] = field(default_factory=dict)


_AS_ON_GPUS = {"channels_last": True, "compile": True, "graphs": True}
CHOICES: Mapping[str, Mapping[str, Choice]] = {
    "cpu": {OURS: Choice(), "ours, contiguous": Choice(runtime={"channels_last": False})},
    "cuda": {
        OURS: Choice(runtime=_AS_ON_GPUS),
        "ours, without CUDA graphs": Choice(runtime={**_AS_ON_GPUS, "graphs": False}),
        "ours, views by kornia": Choice(runtime=_AS_ON_GPUS, augment={"fused": False}),
        "ours, not compiled": Choice(runtime={**_AS_ON_GPUS, "compile": False}),
    },
}


def main() -> None:
    """Measures every setting, prints the table and writes the figures."""
    parser = command_line("throughput", __doc__)
    parser.add_argument("--encoder", nargs="+", default=["resnet18"], choices=["resnet18", "resnet50"])
    parser.add_argument("--batch", nargs="+", type=int, default=[256], help="images of a step")
    parser.add_argument("--width", type=float, default=1.0, help="of every layer, as a multiple")
    parser.add_argument("--precision", nargs="+", default=["float32"], choices=["float32", "bfloat16"])
    parser.add_argument("--images", type=Path, help="a Parquet file, or a folder of them or of images by class")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--contender", nargs="+", help="which of them; all if not given")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    images = images_of(options.images, device, max(options.batch))
    rows: list[dict[str, Any]] = []
    for encoder in options.encoder:
        for precision in options.precision:
            for batch in options.batch:
                setting = Setting(encoder=encoder, batch=batch, precision=precision, width=options.width)
                found = measure(setting, images, device, options.rounds, options.contender, apart=device.type == "cpu")
                print(table([shown(row) for row in found]), end="\n\n", flush=True)
                rows += found
    others = [encoder for encoder in options.encoder if encoder != "resnet18"]
    name = "-".join(["throughput", *others, *([] if options.width == 1 else [f"x{options.width:g}"])])
    path = save(name, {"environment": environment(), "images": images.description, "rows": rows})
    draw(rows).savefig(RESULTS / path.with_suffix(".svg").name)
    print(path)


def images_of(path: Path | None, device: torch.device, at_least: int) -> ResidentImages:
    """The images at a path, in memory; random ones of 32 pixels where none is given."""
    if path is not None:
        return opened_images(data_values(path))
    return random_images(max(NUM_RANDOM_IMAGES[device.type], at_least), 32)


def contenders(device: torch.device) -> dict[str, Callable[[Setting, ResidentImages], Contender]]:
    """Who takes part, by name."""

    def ours(choice: Choice) -> Callable[[Setting, ResidentImages], Contender]:
        return lambda setting, images: Ours(setting, images, device, augment=choice.augment, **choice.runtime)

    made = {name: ours(choice) for name, choice in CHOICES[device.type].items()}
    made["plain loop"] = lambda setting, images: Plain(setting, images, device)
    made["lightly"] = lambda setting, images: Lightly(setting, images, device, os.cpu_count() or 1)
    return made


class Apart:
    """A contender in a process of its own, so that how it keeps memory is nothing to the others."""

    def __init__(self, name: str, setting: Setting, images: ResidentImages, device: torch.device) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, name, setting, images, device))
        self._process.start()
        theirs.close()

    def steps(self, count: int) -> None:
        """Takes so many steps."""
        self._answer(count)

    def parts(self) -> dict[str, Any] | None:
        """As for `parts_of`."""
        return self._answer("parts")

    def close(self) -> None:
        """Ends the process."""
        with contextlib.suppress(BrokenPipeError):  # it has ended
            self._connection.send(None)
        self._process.join()

    def _answer(self, asked: int | str) -> Any:
        self._connection.send(asked)
        answer = self._connection.recv()
        if isinstance(answer, BaseException):
            raise answer
        return answer


def _serve(connection: Connection, name: str, setting: Setting, images: ResidentImages, device: torch.device) -> None:
    contender = None
    while (asked := connection.recv()) is not None:
        try:
            contender = contender or contenders(device)[name](setting, images)
            answer = parts_of(contender, device) if asked == "parts" else contender.steps(asked)
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
    apart: bool = False,
) -> list[dict[str, Any]]:
    """The figures of contenders that take turns at one setting.

    Args:
        setting: what they train.
        images: on what.
        device: where.
        rounds: how often each has its turn.
        names: of those that take part; None for all.
        apart: whether each has a process of its own, as it would have in use.
    """
    made = {name: make for name, make in contenders(device).items() if names is None or name in names}
    trained: dict[str, Contender | Apart] = {}
    counts: dict[str, int] = {}
    errors: dict[str, str] = {}

    def kept(name: str, turn: Callable[[], object]) -> Any:
        """What the turn of a contender returns; one that fails leaves the others."""
        if name not in errors:
            try:
                return turn()
            except Exception as error:
                errors[name] = told(error)
        if contender := trained.pop(name, None):
            with contextlib.suppress(Exception):
                contender.close()
            del contender
        _free_memory()

    for name, make in made.items():

        def start(name: str = name, make: Callable[[Setting, ResidentImages], Contender] = make) -> None:
            trained[name] = Apart(name, setting, images, device) if apart else make(setting, images)
            counts[name] = steps_a_turn(trained[name], SECONDS_A_TURN, device)

        kept(name, start)
        print(f"{name}: {errors.get(name) or f'{counts[name]} steps a turn'}", flush=True)
    turns = {name: (lambda name=name: kept(name, lambda: trained[name].steps(counts[name]))) for name in list(trained)}
    taken = in_turn(turns, rounds, warm_up=False)
    seconds = {name: [each / counts[name] for each in taken[name]] for name in trained}
    peak = peak_rate(device, setting.precision)
    rows: list[dict[str, Any]] = []
    for name in made:
        row: dict[str, Any] = {**asdict(setting), "contender": name}
        if contender := trained.get(name):
            rates = [setting.batch / each for each in seconds[name]]
            row |= {
                "images_per_s": statistics.median(rates),
                "each": rates,
                "times_as_fast_as": {
                    peer: ratio(seconds[peer], seconds[name]) for peer in PEERS if peer in seconds and peer != name
                },
            }
            if device.type == "cuda":
                height = kept(name, lambda contender=contender: peak_memory(lambda: contender.steps(1)))
                row["peak_mib"] = None if height is None else height / 2**20
            parts = kept(
                name,
                lambda contender=contender: (
                    contender.parts() if isinstance(contender, Apart) else parts_of(contender, device)
                ),
            )
            if parts is not None:
                row["mfu"] = row["images_per_s"] * parts["flops_per_image"] / peak
                row |= parts
        rows.append(row | ({"error": errors[name]} if name in errors else {}))
    for contender in trained.values():
        contender.close()
    trained.clear()
    torch.compiler.reset()  # another batch size is another graph, not one of any size
    _free_memory()
    return rows


def steps_a_turn(contender: Contender | Apart, seconds: Mapping[str, float], device: torch.device) -> int:
    """How many steps of a contender take so many seconds of a device's kind."""
    first, timed = WARM_UP[device.type]
    contender.steps(first)
    wait()
    start = time.perf_counter()
    contender.steps(timed)
    wait()
    return max(1, round(timed * seconds[device.type] / (time.perf_counter() - start)))


def _free_memory() -> None:
    """Gives back what contenders that are gone have left."""
    gc.collect()
    torch.cuda.empty_cache()


def parts_of(contender: Contender, device: torch.device) -> dict[str, Any] | None:
    """Of ours: the operations of an image, and where a step spends its time. None of others."""
    if not isinstance(contender, Ours):
        return None
    recipe = contender.recipe
    parts: dict[str, Any] = {"waits_a_step": waits_a_step(contender)} if device.type == "cuda" else {}
    return {**parts, "flops_per_image": flops_per_image(recipe), "shares": shares(recipe, device)}


def waits_a_step(contender: Contender, steps: int = 20) -> float:
    """How often a step waits for the GPU, as torch counts it; what the end of a call does is left out."""

    def waits(count: int) -> int:
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                contender.steps(count)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return sum("synchronizing CUDA operation" in str(each.message) for each in caught)

    return (waits(2 * steps) - waits(steps)) / steps


def flops_per_image(recipe: Recipe) -> float:
    """Operations of the forward and backward pass of both views of an image, by torch's counter."""
    views = torch.zeros(2, *recipe.image_set.image_shape, device=next(recipe.encoder.parameters()).device)
    with FlopCounterMode(display=False) as counter:
        recipe.head(recipe.encoder(views)).sum().backward()
    recipe.optimiser.zero_grad()
    return counter.get_total_flops()


def shares(recipe: Recipe, device: torch.device, steps: int = 2) -> dict[str, float]:
    """The parts of a step as shares of it: one that waits for the device after each part."""
    recipe.model.train()
    spent: dict[str, float] = {}
    clock = time.perf_counter()

    def done(part: str) -> None:
        nonlocal clock
        wait()
        now = time.perf_counter()
        spent[part] = spent.get(part, 0.0) + now - clock
        clock = now

    for step in range(steps + 1):
        if step == 1:
            spent.clear()  # the first one warms up
        done("other")
        rows = slice(0, recipe.sampler.global_batch_size)
        batch: Batch = recipe.image_set.read(recipe.sampler.indices(step)).to(device)
        done("data")
        views = recipe.views(batch.images, step, rows, recipe.sampler.global_batch_size)
        views = views.contiguous(memory_format=recipe.computation.layout)
        done("augmentation")
        with autocast(device, recipe.computation.precision):
            embeddings = recipe.model(views)
        done("forward")
        leaf = embeddings.detach().requires_grad_()
        recipe.objective(leaf, recipe.row_labels(batch, rows), step).total.backward()
        done("loss")
        embeddings.backward(leaf.grad)
        done("backward")
        recipe.optimiser.step()
        recipe.optimiser.zero_grad()
        done("optimiser")
    total = sum(spent.values())
    return {part: seconds / total for part, seconds in spent.items() if part != "other"}


def shown(row: Mapping[str, Any]) -> dict[str, str]:
    """A row of the table."""
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
    """Images a second over the batch, a plot for each network and precision."""
    from matplotlib.figure import Figure  # a machine that only measures needs none

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
