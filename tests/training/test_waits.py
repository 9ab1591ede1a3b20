"""Between two reports the host never waits for the device, counted on a fake GPU."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
import torch

from ssl_sec.data.image_set import ResidentImages
from ssl_sec.networks.convolutions import lay_out
from ssl_sec.recipes.pretraining.monitor import Monitor
from ssl_sec.training.cadence import Cadence
from ssl_sec.training.optimisers import groups
from ssl_sec.training.step import train
from tests.fakes import FakeRuntime
from tests.recipes.face import test_recipe
from tests.recipes.metric_learning import test_metric_learning
from tests.recipes.pretraining import test_pretraining
from tests.training.fake_gpu import FakeGPU

FLOAT32 = {"name": "local", "precision": "float32"}
SELDOM = Cadence(log_every_steps=3, save_every_steps=10**6, monitor_every_steps=10**6)


def colour_images():
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (120, 3, 12, 12), dtype=torch.uint8, generator=generator)
    return ResidentImages(
        images=pixels, labels=torch.arange(120) % 10, class_names=tuple("abcdefghij"), name="noise", description="noise"
    )


def pretraining(optimiser, runtime, images, clip_norm=None):
    config = test_pretraining.config(
        runtime=FLOAT32,
        augment={},
        optimiser={"name": optimiser, "learning_rate": 0.1, "clip_norm": clip_norm},
        global_batch_size=40,
    )
    recipe = test_pretraining.build_recipe(config, images, runtime)
    return replace(recipe, observer=Monitor(config, recipe, runtime).online_probe)


def metric_learning(optimiser, runtime, images, transform="none", loss="triplet", **options):
    config = test_metric_learning.config(
        runtime=FLOAT32,
        transform={"name": transform, **options},
        loss={"name": loss},
        optimiser={"name": optimiser, "learning_rate": 0.1, "backbone_learning_rate": 0.1},
        global_batch_size=40,
    )
    return test_metric_learning.build_recipe(config, images, runtime)


def faces(optimiser, runtime, images, loss="c_contrastive", class_sample_rate=1.0, **options):
    config = test_recipe.config(
        runtime=FLOAT32,
        optimiser={"name": optimiser, **options},
        loss={"name": loss},
        class_sample_rate=class_sample_rate,
        global_batch_size=40,
    )
    return test_recipe.build_recipe(config, images, runtime)


CASES = {
    "pretraining, sgd": (pretraining, "sgd"),
    "pretraining, lars": (pretraining, "lars"),
    "pretraining, adamw": (pretraining, "adamw"),
    "triplet, adam": (metric_learning, "adam"),
    "hdml, adam": (partial(metric_learning, transform="hdml"), "adam"),
    "dvml, adam": (partial(metric_learning, transform="dvml"), "adam"),
    "memory, adam": (partial(metric_learning, transform="memory", size=100, from_step=1), "adam"),
    "contrastive with sft, adam": (partial(metric_learning, transform="sft", loss="contrastive"), "adam"),
    "agents, sgd": (partial(faces, decay_at_epochs=[]), "sgd_epochs"),
    "sampled classes, sgd": (partial(faces, loss="arcface", class_sample_rate=0.3, decay_at_epochs=[]), "sgd_epochs"),
    "agents, adamw, clipped": (partial(faces, clip_norm=0.1), "adamw"),
    "pretraining, clipped": (partial(pretraining, clip_norm=0.1), "sgd"),
}


def counted(case):
    """Waits up to each report of five steps, and all launches; in a process whose autograd knows the device."""
    build, optimiser = CASES[case]
    runtime, waits = FakeRuntime(), []
    groups._are_on_gpu = lambda found: True  # one launch for all parameters, as on a GPU
    with FakeGPU() as gpu:
        runtime.device = gpu.device
        recipe = replace(build(optimiser, runtime, colour_images().to(gpu.device)), total_steps=5)
        lay_out(recipe.encoder, torch.device("cpu"), channels_last=True)  # which computes what the device seems to
        runtime.report = lambda step, *figures: waits.append((step, gpu.waits.total()))
        runtime.save = lambda step, state: None
        gpu.reset()
        train(recipe, runtime, SELDOM, lambda steps_taken: {})
    return waits[:-1], gpu.launches.total()  # the last report is the monitor's


# What they do is also in other cases.
SLOW = {"pretraining, sgd", "triplet, adam", "agents, adamw, clipped"}


@pytest.fixture(scope="module")
def process():
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        yield pool


@pytest.mark.parametrize("case", [pytest.param(case, marks=[pytest.mark.slow] * (case in SLOW)) for case in CASES])
def test_the_host_waits_only_for_reports(case, process):
    waits, launches = process.submit(counted, case).result()
    steps, totals = zip(*waits, strict=True)
    assert max(later - earlier for earlier, later in pairwise(steps)) > 1
    # One transfer of the figures, and one of the norms for the histogram of an epoch.
    assert max(later - earlier for earlier, later in pairwise((0, *totals))) <= 2
    assert launches > 1000
