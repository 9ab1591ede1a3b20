"""Pretrains by our recipe and by lightly's parts, from the same weights on the same images, and probes both encoders.

    OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES= python -m benchmarks.accuracy.pretraining --data cifar10

NT-Xent at the rate of SEC's recipe, with a cosine over the steps. Of lightly are the transform on PIL images and
NT-Xent; torch's DataLoader shuffles the images, and torch's SGD also decays biases and batch norm. Both probes are
ours. A time is that of a whole pretraining, without the probe. Results are written after every run, and an interrupted
benchmark continues with the runs that are missing.

Writes benchmarks/results/accuracy-{cpu,gpu}.json.
"""

import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from benchmarks.invariance import TemporaryStore
from benchmarks.measure import (
    choose_device,
    describe_environment,
    format_table,
    make_parser,
    read_results,
    save_results,
)
from benchmarks.simclr import PilImages, QuietRuntime, describe_data
from ssl_sec.data.image_set import ResidentImages
from ssl_sec.edges.composition.compose import compose
from ssl_sec.edges.run.cpu import keep_freed_memory
from ssl_sec.edges.tables import mean_and_std
from ssl_sec.recipes.pretraining.config import PretrainConfig
from ssl_sec.recipes.pretraining.recipe import build_recipe, run
from ssl_sec.recipes.probing.recipe import linear_evaluation, open_splits
from ssl_sec.settings import from_values, to_values
from ssl_sec.training.optimisers.config import CosineSGDConfig
from ssl_sec.training.step import autocast

NAMES = ("ours", "lightly")
SHOWN = ("probe/top1", "probe/top5", "probe/knn_top1", "seconds")


def main() -> None:
    """Runs what the results do not have yet, prints the table and writes the results."""
    parser = make_parser("accuracy.pretraining", __doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder with train.parquet and test.parquet")
    parser.add_argument("--images", type=int, default=15_000, help="number of training images, balanced by class")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--width", type=float, default=0.25, help="factor for the channels of the ResNet-18")
    parser.add_argument("--batch", type=int, default=256, help="images of a step")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options = parser.parse_args()
    setting = {key: getattr(options, key) for key in ("images", "epochs", "width", "batch")}
    results = read_results("accuracy")
    rows: list[dict[str, Any]] = results["runs"] if results.get("setting") == setting else []
    for seed in options.seeds:
        for name in NAMES:
            if not any((row["name"], row["seed"]) == (name, seed) for row in rows):
                rows.append({"name": name, "seed": seed, **measure(name, make_config(options.data, setting, seed))})
                save_results("accuracy", {"setting": setting, "environment": describe_environment(), "runs": rows})
                print(format_table([summarise(each, rows) for each in NAMES if _of(each, rows)]), flush=True)


def make_config(data: Path, setting: dict[str, Any], seed: int) -> PretrainConfig:
    """Makes the configuration of a pretraining: `experiment=cifar10_cpu` without a constraint, in the given setting."""
    values = compose("pretrain", ["experiment=cifar10_cpu", "constraint=none", "data.train=[x]", f"seed={seed}"])
    values |= {"epochs": setting["epochs"], "global_batch_size": setting["batch"], "check_images": 0}
    values["data"] = {**values["data"], **describe_data(data), "max_images": setting["images"]}
    values["encoder"] = {**values["encoder"], "width": setting["width"]}
    values["monitor"] = {"every_epochs": setting["epochs"], "max_images": 1000, "online_probe": False}
    return from_values(PretrainConfig, values)


def measure(name: str, config: PretrainConfig) -> dict[str, float]:
    """Pretrains and probes; returns accuracies on the test images in percent, and the seconds of the pretraining."""
    if choose_device().type == "cpu":
        keep_freed_memory()  # as a worker does
    torch.manual_seed(config.seed)  # lightly draws from torch's generator; ours has its own
    splits = open_splits(config.data, config.probe)
    begun = time.perf_counter()
    encoder = pretrain(config, splits[0].image_shape) if name == "ours" else pretrain_by_lightly(config)
    seconds = time.perf_counter() - begun
    runtime = QuietRuntime(choose_device())
    found = linear_evaluation(encoder, *splits, config.probe, config.runtime.on(runtime.device), runtime)
    return {"seconds": seconds, **found.metrics()}


def pretrain(config: PretrainConfig, image_shape: tuple[int, int, int]) -> nn.Module:
    """Pretrains as `jobs.pretrain` does in one process; returns the encoder."""
    runtime = QuietRuntime(choose_device())
    with tempfile.TemporaryDirectory() as path:
        store = TemporaryStore(Path(path))
        run(config, runtime, store)
        encoder = replace(config.encoder, weights=str(store.encoder_path)).build(*image_shape[:2])
        return encoder.to(runtime.device)


def pretrain_by_lightly(config: PretrainConfig) -> nn.Module:
    """Pretrains the same network on the same images by lightly's parts; returns the encoder."""
    from lightly.loss import NTXentLoss

    device, images = choose_device(), config.data.open("train")
    assert isinstance(images, ResidentImages) and isinstance(config.optimiser, CosineSGDConfig)
    recipe = build_recipe(config, images, QuietRuntime(device))  # for its network and its schedule
    network = nn.Sequential(recipe.encoder, recipe.head).train()
    loss = NTXentLoss(to_values(config.loss)["temperature"])
    optimiser = torch.optim.SGD(
        network.parameters(), lr=0.0, momentum=config.optimiser.momentum, weight_decay=config.optimiser.weight_decay
    )
    pairs = PilImages(images, normalise=False)
    batches = DataLoader(pairs, config.global_batch_size, shuffle=True, drop_last=True)
    step = 0
    for _ in range(config.epochs):
        for first, second in batches:
            optimiser.param_groups[0]["lr"] = recipe.learning_rate(step)
            optimiser.zero_grad()
            with autocast(device, recipe.computation.precision):
                embeddings = network(torch.cat([first, second]).to(device))
            loss(*embeddings.float().chunk(2)).backward()
            optimiser.step()
            step += 1
    return recipe.encoder


def summarise(name: str, rows: list[dict[str, Any]]) -> dict[str, str]:
    """Makes the row of the table of ours or of lightly: mean and standard deviation over the seeds."""
    own = _of(name, rows)
    shown = [key for key in SHOWN if key in own[0]]  # top-5 needs more than five classes
    return {"": name, "seeds": str(len(own)), **{key: mean_and_std([row[key] for row in own]) for key in shown}}


def _of(name: str, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in rows if row["name"] == name]


if __name__ == "__main__":
    main()
