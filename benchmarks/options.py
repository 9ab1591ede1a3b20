"""What each choice brings to a step of ours: layout, compilation, optimiser, global batch norm, augmentation.

    python -m benchmarks.options                       # ResNet-18, batch 64; five minutes on two CPU cores

Every variant takes turns of several steps with the step as it is, in channels_last. Augmentation is measured alone, in
views a second, and beside it what changes if another choice is made. benchmarks/LOG.md says what was concluded. Writes
benchmarks/results/options-{cpu,gpu}.json.
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

from benchmarks.measure import command_line, environment, in_turn, on_workers, ratio, save, table
from benchmarks.simclr import Ours, PilImages, Setting, random_images
from benchmarks.throughput import steps_a_turn
from ssl_sec.augment.views import SimCLRAugmentation
from ssl_sec.data.image_set import ResidentImages
from ssl_sec.recipes import assembly
from ssl_sec.training.objective import Objective
from ssl_sec.training.recipe import Recipe

SIZE_PX = 32
AS_IS = "as is"
SECONDS_A_TURN = {"cpu": 3.0, "cuda": 5.0}


def main() -> None:
    """Measures every choice, prints the tables and writes the figures."""
    parser = command_line("options", __doc__)
    parser.add_argument("--encoder", default="resnet18", choices=["resnet18", "resnet50"])
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--width", type=float, default=1.0)
    parser.add_argument("--precision", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    images = random_images(10 * options.batch, SIZE_PX)
    figures: dict[str, Any] = {}
    for precision in options.precision:
        setting = Setting(encoder=options.encoder, batch=options.batch, precision=precision, width=options.width)
        figures[f"step, {precision}"] = of_steps(setting, images, device, options.rounds)
    figures["augmentation"] = of_augmentations(options.batch, device, options.rounds)
    if device.type == "cpu":
        narrow = Setting(encoder=options.encoder, batch=options.batch, precision="float32", width=options.width / 4)
        figures["batch norm, 2 workers"] = of_batch_norms(narrow, options.rounds)
    for name, rows in figures.items():
        print(f"\n{name}\n{table([_shown(row) for row in rows])}")
    print(f"\n{save('options', {'environment': environment(), 'batch': options.batch, **figures})}")


def of_steps(
    setting: Setting,
    images: ResidentImages,
    device: torch.device,
    rounds: int,
    names: Collection[str] | None = None,
) -> list[dict[str, Any]]:
    """Steps with each choice, or with those that are named."""
    other = "optimiser fused" if device.type == "cpu" else "optimiser not fused"
    made: dict[str, Callable[[], Ours]] = {
        AS_IS: lambda: _called(setting, images, device),
        "contiguous": lambda: _called(setting, images, device, channels_last=False),
        "contiguous, network compiled": lambda: _called(setting, images, device, channels_last=False, compile=True),
        "network compiled": lambda: _called(setting, images, device, compile=True),
        "objective compiled": lambda: _objective_compiled(setting, images, device),
        other: lambda: _other_optimiser(setting, images, device),
        "augmentation ahead": lambda: _augmented_ahead(setting, images, device),
    }
    if device.type == "cuda":
        made["network in CUDA graphs"] = lambda: _in_graphs(setting, images, device)
        made["step in CUDA graphs"] = lambda: _called(setting, images, device, graphs=True)
        made["network compiled, step in CUDA graphs"] = lambda: _called(
            setting, images, device, compile=True, graphs=True
        )
    trained = {name: make() for name, make in made.items() if names is None or name in (AS_IS, *names)}
    return _of_turns(trained, rounds, setting.batch, device)


def _called(setting: Setting, images: ResidentImages, device: torch.device, **changes: bool) -> Ours:
    """In channels_last, every operation of a step called as it stands in the code, but for the changes."""
    return Ours(setting, images, device, **{"channels_last": True, "compile": False, "graphs": False, **changes})


def _objective_compiled(setting: Setting, images: ResidentImages, device: torch.device) -> Ours:
    ours = _called(setting, images, device)
    compiled = cast(Objective, torch.compile(ours.recipe.objective))
    ours.recipe = replace(ours.recipe, objective=compiled)
    return ours


def _other_optimiser(setting: Setting, images: ResidentImages, device: torch.device) -> Ours:
    ours = _called(setting, images, device)
    groups = ours.recipe.optimiser.param_groups
    # On a GPU ours is fused already; there the other kind is measured.
    optimiser = torch.optim.SGD(groups, lr=0.0, momentum=groups[0]["momentum"], fused=device.type == "cpu")
    ours.recipe = replace(ours.recipe, optimiser=optimiser)
    return ours


def _augmented_ahead(setting: Setting, images: ResidentImages, device: torch.device) -> Ours:
    ours = _called(setting, images, device)
    ours.recipe = replace(ours.recipe, views=ViewsAhead(ours.recipe, device))
    return ours


class ViewsAhead:
    """A recipe's views, those of the next step made beside this one: on a GPU on a stream of their own."""

    def __init__(self, recipe: Recipe, device: torch.device) -> None:
        self._recipe = recipe
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._made: dict[int, Tensor] = {}

    def __call__(self, images: Tensor, step: int, rows: slice, global_batch_size: int) -> Tensor:
        """The views of this step, from before if it follows the last one."""
        views = self._made.pop(step, None)
        if views is None:
            views = self._recipe.views(images, step, rows, global_batch_size)
        elif self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
            views.record_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            following = self._recipe.image_set.read(self._recipe.sampler.indices(step + 1)[rows]).to(images.device)
            self._made = {step + 1: self._recipe.views(following.images, step + 1, rows, global_batch_size)}
        return views


def _in_graphs(setting: Setting, images: ResidentImages, device: torch.device) -> Ours:
    """The network compiled, its launches recorded once and replayed."""
    recorded = partial(torch.compile, mode="reduce-overhead")
    with mock.patch.object(assembly.torch, "compile", recorded):
        return _called(setting, images, device, compile=True)


def of_augmentations(batch: int, device: torch.device, rounds: int) -> list[dict[str, Any]]:
    """Two views of a batch, by each choice and by lightly's transform in one process."""
    images = random_images(batch, SIZE_PX)
    pixels = images.images.to(device)
    everything = slice(0, batch)

    def views(*transforms: _AugmentationBase) -> Callable[[], object]:
        augmentation = SimCLRAugmentation(image_size_px=SIZE_PX, num_channels=3, seed=0)
        for place, transform in enumerate(transforms):
            augmentation.transforms[place] = transform
        return lambda: augmentation(pixels, 0, everything, batch)

    sides = (SIZE_PX, SIZE_PX)
    crop = RandomResizedCrop(sides, scale=(0.08, 1.0), cropping_mode="resample", align_corners=False)
    turns: dict[str, Callable[[], object]] = {
        AS_IS: views(),
        "crops by slicing": views(RandomResizedCrop(sides, scale=(0.08, 1.0), cropping_mode="slice")),
        "jitter without hue": views(
            crop, RandomHorizontalFlip(), ColorJitter(0.4, 0.4, 0.4, p=0.8), RandomGrayscale(p=0.2)
        ),
    }
    if find_spec("lightly") is not None:
        pil = PilImages(images)
        turns["lightly's transform"] = lambda: [pil[index] for index in range(batch)]
    return _compared(turns, rounds, batch)


def of_batch_norms(setting: Setting, rounds: int) -> list[dict[str, Any]]:
    """A step of two gloo workers with the batch norm of all rows, and with each worker's own."""
    told = on_workers(2, _with_both_batch_norms, setting.encoder, setting.batch, setting.width, rounds)
    return told[0]


def _with_both_batch_norms(encoder: str, batch: int, width: float, rounds: int) -> list[dict[str, Any]]:
    setting = Setting(encoder=encoder, batch=batch, precision="float32", width=width)
    images, device = random_images(10 * batch, SIZE_PX), torch.device("cpu")
    ours = _called(setting, images, device)
    with mock.patch.object(assembly, "globalise_batch_norm", lambda network: network):
        own = Ours(setting, images, device, channels_last=True)
    return _of_turns({AS_IS: ours, "each worker's own": own}, rounds, batch, device, steps=4)


def _of_turns(
    trained: Mapping[str, Ours], rounds: int, batch: int, device: torch.device, steps: int | None = None
) -> list[dict[str, Any]]:
    """Turns of several steps, as the last step of a turn saves; `steps` of them, or as many as fill its seconds."""
    counts = {name: steps or steps_a_turn(ours, SECONDS_A_TURN, device) for name, ours in trained.items()}
    seconds = in_turn({name: lambda name=name: trained[name].steps(counts[name]) for name in trained}, rounds)
    return _rows({name: [each / counts[name] for each in taken] for name, taken in seconds.items()}, batch)


def _compared(turns: dict[str, Callable[[], object]], rounds: int, batch: int) -> list[dict[str, Any]]:
    return _rows(in_turn(turns, rounds), batch)


def _rows(seconds: Mapping[str, list[float]], batch: int) -> list[dict[str, Any]]:
    """Of the seconds that a batch takes, for each round."""
    return [
        {"choice": name, "images_per_s": batch / median(taken), "times_as_fast": ratio(seconds[AS_IS], taken)}
        for name, taken in seconds.items()
    ]


def _shown(row: dict[str, Any]) -> dict[str, str]:
    return {
        "": row["choice"],
        "images/s": f"{row['images_per_s']:,.1f}",
        "times as fast": f"{row['times_as_fast']:.2f}",
    }


if __name__ == "__main__":
    main()
