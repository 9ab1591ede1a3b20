"""A tiny pretraining run on colour images that are small enough for views in one launch."""

from contextlib import contextmanager
from dataclasses import replace

import torch

from ssl_sec.data.image_set import ResidentImages
from ssl_sec.errors import Stopped
from ssl_sec.recipes.pretraining.config import PretrainConfig
from ssl_sec.recipes.pretraining.recipe import build_recipe
from ssl_sec.settings import from_values
from ssl_sec.training.cadence import Cadence
from ssl_sec.training.step import train
from tests.fakes import FakeRuntime

BATCH_SIZE = 24
# At 0.1 twelve steps turn a rounding of 1e-6 into a difference of 1 in the weights; at this rate into one of 4e-3.
LEARNING_RATE = 1e-3
RUNTIME = {"name": "local", "channels_last": True, "compile": False}


def recipe_on(
    device,
    *,
    precision="float32",
    channels_last=True,
    fused=None,
    graphs=False,
    optimiser="sgd",
    constraint="sec_ema",
    total_steps=12,
):
    """The recipe and its runtime.

    Args:
        device: of the images and the network.
        precision: of the forward pass.
        channels_last: whether that is the memory layout of weights and activations.
        fused: whether views are made in one launch; None for wherever that is possible.
        graphs: whether steps are recorded and replayed.
        optimiser: sgd, lars or adamw.
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
        "optimiser": {"name": optimiser, "learning_rate": LEARNING_RATE, "warmup_epochs": 0},
        "runtime": {**RUNTIME, "precision": precision, "channels_last": channels_last, "graphs": graphs},
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


@contextmanager
def deterministic(is_asked_for=True):
    """Algorithms that repeat a run bit for bit, if they are asked for; else those that torch takes by default."""
    cudnn = torch.backends.cudnn
    before = torch.are_deterministic_algorithms_enabled(), cudnn.benchmark, cudnn.allow_tf32
    torch.use_deterministic_algorithms(is_asked_for)
    cudnn.benchmark, cudnn.allow_tf32 = False, before[2] and not is_asked_for
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        cudnn.benchmark, cudnn.allow_tf32 = before[1:]
