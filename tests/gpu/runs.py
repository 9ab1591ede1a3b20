"""A tiny pretraining run on colour images that are small enough for views in one launch."""

from dataclasses import replace

import torch

from ssl_sec.data.image_set import ResidentImages
from ssl_sec.errors import Stopped
from ssl_sec.recipes.pretraining.config import PretrainConfig
from ssl_sec.recipes.pretraining.recipe import build_recipe
from ssl_sec.settings import from_values
from ssl_sec.training.step import Cadence, train
from tests.fakes import FakeRuntime

BATCH_SIZE = 24
RUNTIME = {"name": "local", "channels_last": True, "compile": False}


def recipe_on(
    device, *, precision="float32", fused=None, graphs=False, optimiser="sgd", constraint="sec_ema", total_steps=12
):
    """The recipe and its runtime.

    Args:
        device: of the images and the network.
        precision: of the forward pass.
        fused: whether views are made in one launch; None for wherever that is possible.
        graphs: whether steps are recorded and replayed.
        optimiser: sgd or lars.
        constraint: sec or sec_ema.
        total_steps: of the run.
    """
    generator = torch.Generator().manual_seed(0)
    images = ResidentImages(
        images=torch.randint(0, 256, (120, 3, 16, 16), dtype=torch.uint8, generator=generator),
        labels=torch.arange(120) % 10,
        class_names=tuple("abcdefghij"),
        name="noise",
        description="noise",
    )
    values = {
        "data": {"name": "digits"},
        "augment": {"fused": fused},
        "encoder": {"name": "resnet18", "width": 0.125},
        "head": {"name": "mlp", "dim": 16},
        "loss": {"name": "ntxent"},
        "constraint": {"name": constraint, "eta": 1.0, **({"rho": 0.3} if constraint == "sec_ema" else {})},
        "optimiser": {"name": optimiser, "learning_rate": 0.1},
        "runtime": {**RUNTIME, "precision": precision, "graphs": graphs},
        "epochs": 2,
        "global_batch_size": BATCH_SIZE,
    }
    runtime = FakeRuntime()
    runtime.device = device
    built = build_recipe(from_values(PretrainConfig, values), images.to(device), runtime)
    return replace(built, total_steps=total_steps), runtime


def trained(recipe, runtime, *, first_step=0, log_every_steps=6):
    """Trains to the end, or until the runtime wants a stop."""
    seldom = Cadence(log_every_steps=log_every_steps, save_every_steps=10**6, monitor_every_steps=10**6)
    try:
        train(recipe, runtime, seldom, lambda steps_taken: {}, first_step)
    except Stopped:
        assert runtime.stop_at is not None
