"""The effect of each option on the speed of a training step: layout, compilation, optimiser, batch norm, augmentation.

    python -m benchmarks.options                       # ResNet-18, batch 64; five minutes on two CPU cores

Each variant and the default step, in channels_last, take turns of several steps. Augmentation is measured alone.
benchmarks/LOG.md has the conclusions. Writes benchmarks/results/options-{cpu,gpu}.json.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from statistics import median
from typing import Any, cast
from unittest import mock

import torch
from kornia.augmentation import ColorJitter, RandomGrayscale, RandomHorizontalFlip, RandomResizedCrop
from kornia.augmentation.base import _AugmentationBase  # pyright: ignore[reportPrivateUsage]
from torch import Tensor

from benchmarks.measure import (
    choose_device,
    describe_environment,
    format_table,
    make_parser,
    median_ratio,
    run_on_workers,
    save_results,
    time_in_turns,
)
from benchmarks.simclr import Ours, PilImages, Setting, draw_images
from benchmarks.throughput import choose_steps_per_turn
from ssl_sec.augment.config import AugmentConfig
from ssl_sec.data.image_set import ResidentImages
from ssl_sec.recipes import assembly
from ssl_sec.training.objective import Objective
from ssl_sec.training.recipe import Recipe

SIZE_PX = 32
DEFAULT = "default"
SECONDS_PER_TURN = {"cpu": 3.0, "cuda": 5.0}


def main() -> None:
    """Measures every option, prints the tables and writes the results."""
    parser = make_parser("options", __doc__)
    parser.add_argument("--encoder", default="resnet18", choices=["resnet18", "resnet50"])
    parser.add_argument("--batch", type=int, default=64, help="images per step")
    parser.add_argument("--width", type=float, default=1.0, help="multiplies the channels of every layer")
    parser.add_argument("--precision", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=3, help="turns of each variant")
    options = parser.parse_args()
    device = choose_device()
    images = draw_images(10 * options.batch, SIZE_PX)
    figures: dict[str, Any] = {}
    for precision in options.precision:
        setting = Setting(encoder=options.encoder, batch=options.batch, precision=precision, width=options.width)
        figures[f"step, {precision}"] = measure_steps(setting, images, device, options.rounds)
    figures["augmentation"] = measure_augmentations(options.batch, device, options.rounds)
    if device.type == "cpu":
        narrow = Setting(encoder=options.encoder, batch=options.batch, precision="float32", width=options.width / 4)
        figures["batch norm, 2 workers"] = measure_batch_norms(narrow, options.rounds)
    for name, rows in figures.items():
        print(f"\n{name}\n{format_table([_format_row(row) for row in rows])}")
    values = {"environment": describe_environment(), "batch": options.batch, **figures}
    print(f"\n{save_results('options', values)}")


def measure_steps(
    setting: Setting,
    images: ResidentImages,
    device: torch.device,
    rounds: int,
    names: Collection[str] | None = None,
) -> list[dict[str, Any]]:
    """Measures steps with each option, or with the named ones."""
    other = "optimiser fused" if device.type == "cpu" else "optimiser not fused"
    variants: dict[str, Callable[[], Ours]] = {
        DEFAULT: lambda: _make_uncompiled(setting, images, device),
        "contiguous": lambda: _make_uncompiled(setting, images, device, channels_last=False),
        "contiguous, network compiled": lambda: _make_uncompiled(
            setting, images, device, channels_last=False, compile=True
        ),
        "network compiled": lambda: _make_uncompiled(setting, images, device, compile=True),
        "objective compiled": lambda: _compile_objective(setting, images, device),
        other: lambda: _change_optimiser(setting, images, device),
        "augmentation ahead": lambda: _augment_ahead(setting, images, device),
    }
    if device.type == "cuda":
        variants["network in CUDA graphs"] = lambda: _record_network(setting, images, device)
        variants["step in CUDA graphs"] = lambda: _make_uncompiled(setting, images, device, graphs=True)
        variants["network compiled, step in CUDA graphs"] = lambda: _make_uncompiled(
            setting, images, device, compile=True, graphs=True
        )
    chosen = {name: make() for name, make in variants.items() if names is None or name in (DEFAULT, *names)}
    return _measure_turns(chosen, rounds, setting.batch, device)


def _make_uncompiled(setting: Setting, images: ResidentImages, device: torch.device, **changes: bool) -> Ours:
    """Makes a step in channels_last, without compilation and graphs, except for the changes."""
    return Ours(setting, images, device, **{"channels_last": True, "compile": False, "graphs": False, **changes})


def _compile_objective(setting: Setting, images: ResidentImages, device: torch.device) -> Ours:
    ours = _make_uncompiled(setting, images, device)
    compiled = cast(Objective, torch.compile(ours.recipe.objective))
    ours.recipe = replace(ours.recipe, objective=compiled)
    return ours


def _change_optimiser(setting: Setting, images: ResidentImages, device: torch.device) -> Ours:
    ours = _make_uncompiled(setting, images, device)
    # On a GPU ours is already fused; there the unfused optimiser is measured. A group's own value has precedence.
    groups = [{**group, "fused": device.type == "cpu"} for group in ours.recipe.optimiser.param_groups]
    optimiser = torch.optim.SGD(groups, lr=0.0, momentum=groups[0]["momentum"])
    ours.recipe = replace(ours.recipe, optimiser=optimiser)
    return ours


def _augment_ahead(setting: Setting, images: ResidentImages, device: torch.device) -> Ours:
    ours = _make_uncompiled(setting, images, device)
    ours.recipe = replace(ours.recipe, views=ViewsAhead(ours.recipe, device))
    return ours


class ViewsAhead:
    """A recipe's views, which makes those of the next step in advance: on a GPU in a separate stream."""

    def __init__(self, recipe: Recipe, device: torch.device) -> None:
        self._recipe = recipe
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._ready: dict[int, Tensor] = {}

    def __call__(self, images: Tensor, step: int, rows: slice, global_batch_size: int) -> Tensor:
        """Returns the views of this step; they are ready if it follows the last one."""
        views = self._ready.pop(step, None)
        if views is None:
            views = self._recipe.views(images, step, rows, global_batch_size)
        elif self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
            views.record_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            following = self._recipe.image_set.read(self._recipe.sampler.indices(step + 1)[rows]).to(images.device)
            self._ready = {step + 1: self._recipe.views(following.images, step + 1, rows, global_batch_size)}
        return views


def _record_network(setting: Setting, images: ResidentImages, device: torch.device) -> Ours:
    """Makes a step with a compiled network whose kernel launches are recorded once and replayed."""
    compile_and_record = partial(torch.compile, mode="reduce-overhead")
    with mock.patch.object(assembly.torch, "compile", compile_and_record):
        return _make_uncompiled(setting, images, device, compile=True)


def measure_augmentations(batch: int, device: torch.device, rounds: int) -> list[dict[str, Any]]:
    """Measures two views of a batch with each option, and with lightly's transform in one process."""
    images = draw_images(batch, SIZE_PX)
    pixels = images.images.to(device)
    everything = slice(0, batch)

    def make_views(*transforms: _AugmentationBase) -> Callable[[], object]:
        augmentation = AugmentConfig().build(SIZE_PX, 3, seed=0)
        for place, transform in enumerate(transforms):
            augmentation.transforms[place] = transform
        return lambda: augmentation(pixels, 0, everything, batch)

    sides = (SIZE_PX, SIZE_PX)
    crop = RandomResizedCrop(sides, scale=(0.08, 1.0), cropping_mode="resample", align_corners=False)
    turns: dict[str, Callable[[], object]] = {
        DEFAULT: make_views(),
        "crops by slicing": make_views(RandomResizedCrop(sides, scale=(0.08, 1.0), cropping_mode="slice")),
        "jitter without hue": make_views(
            crop, RandomHorizontalFlip(), ColorJitter(0.4, 0.4, 0.4, p=0.8), RandomGrayscale(p=0.2)
        ),
    }
    if find_spec("lightly") is not None:
        pil = PilImages(images)
        turns["lightly's transform"] = lambda: [pil[index] for index in range(batch)]
    return _make_rows(time_in_turns(turns, rounds), batch)


def measure_batch_norms(setting: Setting, rounds: int) -> list[dict[str, Any]]:
    """Measures a step of two gloo workers with global batch norm, and with each worker's own."""
    return run_on_workers(2, _measure_both_batch_norms, setting, rounds)[0]


def _measure_both_batch_norms(setting: Setting, rounds: int) -> list[dict[str, Any]]:
    images, device = draw_images(10 * setting.batch, SIZE_PX), torch.device("cpu")
    ours = _make_uncompiled(setting, images, device)
    with mock.patch.object(assembly, "globalise_batch_norm", lambda network: network):
        own = Ours(setting, images, device, channels_last=True)
    return _measure_turns({DEFAULT: ours, "each worker's own": own}, rounds, setting.batch, device, steps=4)


def _measure_turns(
    variants: Mapping[str, Ours], rounds: int, batch: int, device: torch.device, steps: int | None = None
) -> list[dict[str, Any]]:
    """Measures turns of several steps, since the last step of a turn saves.

    Args:
        variants: the variants, by name.
        rounds: number of turns of each variant.
        batch: number of images in a step.
        device: device on which they train.
        steps: number of steps in a turn; None for as many as fill its time.
    """
    counts = {name: steps or choose_steps_per_turn(ours, SECONDS_PER_TURN, device) for name, ours in variants.items()}
    turns = {name: lambda name=name: variants[name].steps(counts[name]) for name in variants}
    seconds = time_in_turns(turns, rounds)
    return _make_rows({name: [turn / counts[name] for turn in seconds[name]] for name in variants}, batch)


def _make_rows(seconds: Mapping[str, list[float]], batch: int) -> list[dict[str, Any]]:
    """Makes the rows of a table from the seconds per batch in each round."""
    return [
        {
            "choice": name,
            "images_per_s": batch / median(rounds),
            "times_as_fast": median_ratio(seconds[DEFAULT], rounds),
        }
        for name, rounds in seconds.items()
    ]


def _format_row(row: dict[str, Any]) -> dict[str, str]:
    return {
        "": row["choice"],
        "images/s": f"{row['images_per_s']:,.1f}",
        "times as fast": f"{row['times_as_fast']:.2f}",
    }


if __name__ == "__main__":
    main()
