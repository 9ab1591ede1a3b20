"""Runs of the recipes with clipped gradients, and with the optimisers that are not their defaults."""

from functools import partial

import pytest
import torch
from torch import nn

from ssl_sec.collectives import rank, world_size
from ssl_sec.errors import Stopped
from ssl_sec.networks import Network
from ssl_sec.training.optimisers.groups import parameter_groups
from tests.fakes import FakeRuntime
from tests.recipes import test_finetuning
from tests.recipes.face import test_recipe
from tests.recipes.metric_learning import test_metric_learning
from tests.recipes.pretraining import test_pretraining
from tests.recipes.same_runs import assert_resumes_bit_equal, assert_the_same_curve
from tests.training import test_step
from tests.workers import on_workers

NORM = "train/weight_gradient_norm"
LAYOUTS = torch.channels_last, torch.contiguous_format
STEPPED = {"name": "adamw", "learning_rate": 1e-3, "backbone_learning_rate": 5e-4, "decay_at_steps": [6]}
PROXIES = {**test_metric_learning.PROXIES, "optimiser": {**STEPPED, "template_learning_rate": 1e-2, "clip_norm": 0.5}}
DIVIDED = {"share_classes_from": 2}
# The job, what its run has, and what the workers' runs have in addition.
RUNS = {
    "pretraining": (
        test_pretraining,
        {"optimiser": {"name": "sgd", "learning_rate": 0.1, "clip_norm": 0.5}, "epochs": 1},
        {},
    ),
    "fine-tuning": (test_finetuning, {"optimiser": {"name": "adamw", "clip_norm": 0.5}, "epochs": 2}, {}),
    "metric learning": (test_metric_learning, {"optimiser": {**STEPPED, "clip_norm": 0.5}}, {}),
    "metric learning, proxies": (test_metric_learning, PROXIES, {}),
    "metric learning, divided proxies": (test_metric_learning, PROXIES, DIVIDED),
    "faces, adamw": (
        test_recipe,
        {"optimiser": {"name": "adamw", "warmup_epochs": 1, "clip_norm": 1.0}},
        {},
    ),
    "faces, sgd": (test_recipe, {"optimiser": {"name": "sgd_polynomial", "clip_norm": 1.0}}, {}),
    "faces, divided": (test_recipe, {"optimiser": {"name": "sgd_polynomial", "clip_norm": 1.0}}, DIVIDED),
}
# Their optimisers and losses are those of other runs, too.
SLOW = {"metric learning", "metric learning, proxies", "metric learning, divided proxies", "faces, adamw", "faces, sgd"}


def of_steps(runtime):
    """What was reported for each step of training."""
    return [(step, metrics) for step, metrics, _ in runtime.reports if "train/loss" in metrics]


def on_a_worker(name, folder):
    job, changes, more = RUNS[name]
    runtime = FakeRuntime(rank(), world_size())
    job.run(folder, runtime, **changes, **more)
    return of_steps(runtime)


@pytest.mark.distributed
@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in RUNS])
def test_two_workers_equal_one(tmp_path, name):
    job, changes, _ = RUNS[name]
    alone, _ = job.run(tmp_path, **changes)
    clip_norm = changes["optimiser"]["clip_norm"]
    assert max(alone.series(NORM).values()) > clip_norm
    for reports in on_workers(2, tmp_path, on_a_worker, name, tmp_path):
        assert_the_same_curve(reports, of_steps(alone))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("metric learning", marks=pytest.mark.slow),
        "metric learning, proxies",
        pytest.param("faces, adamw", marks=pytest.mark.slow),
        pytest.param("faces, sgd", marks=pytest.mark.slow),
    ],
)
def test_a_stopped_and_resumed_run_ends_bit_equal(tmp_path, name):
    job, changes, _ = RUNS[name]
    whole, _ = job.run(tmp_path, **changes)
    assert_resumes_bit_equal(job.run, tmp_path, whole, 4, **changes)


def test_the_rates_of_faces_follow_the_parabola(tmp_path):
    optimiser = {"name": "adamw", "learning_rate": 0.01, "warmup_epochs": 1}
    runtime, _ = test_recipe.run(tmp_path, optimiser=optimiser)
    risen, fallen = [0.0025, 0.005, 0.0075, 0.01], [0.01 * (1 - step / 4) ** 2 for step in range(4)]
    assert list(runtime.series("train/lr").values()) == pytest.approx(risen + fallen, rel=1e-12)
    losses = list(runtime.series("train/metric_loss").values())
    assert losses[-1] < losses[0]
    decays = {group["weight_decay"] for group in runtime.last_state()["optimiser"]["param_groups"]}
    assert decays == {0.1, 0.0}


def test_a_run_that_is_all_warm_up_is_said_to_be(tmp_path, caplog):
    with caplog.at_level("INFO"):
        test_recipe.run(tmp_path, optimiser={"name": "sgd_polynomial", "warmup_epochs": 3}, epochs=0.5)
    said = "optimiser.warmup_epochs: the run's 2 steps are all warm-up: the rate ends at 0.0167, below 0.1"
    assert said in caplog.messages


def test_a_polynomial_is_tied_to_the_length_of_the_run():
    tied = test_recipe.config(optimiser={"name": "sgd_polynomial"}).tied_to_the_length()
    assert tied == ["optimiser.learning_rate (it falls over the whole run)", "constraint.ramp"]
    assert test_recipe.config().tied_to_the_length() == ["constraint.ramp"]


def of_convolutions(optimiser_of, layout):
    """A run with an optimiser in one launch, as on a GPU, and its weights in a memory layout."""
    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Conv2d(1, 5, 2), nn.ReLU(), nn.Conv2d(5, 6, 2), nn.Flatten())
    network = Network(encoder, nn.Linear(6, 4)).double().to(memory_format=layout)
    optimiser = optimiser_of(parameter_groups([network], 1e-2), lr=0.0, fused=True)
    return test_step.recipe(encoder=encoder, head=network.head, model=network, optimiser=optimiser)


@pytest.mark.parametrize("optimiser_of", [partial(torch.optim.SGD, momentum=0.9), torch.optim.AdamW], ids=str)
@pytest.mark.parametrize("layouts", [LAYOUTS, LAYOUTS[::-1]], ids=str)
def test_a_run_resumes_with_weights_in_another_memory_layout(optimiser_of, layouts):
    """On a GPU, fused optimisers refuse a state in another layout than the weights; on a CPU they mistake it."""
    before, after = layouts
    whole = test_step.run(of_convolutions(optimiser_of, before))
    stopped = FakeRuntime(stop_at=5)
    with pytest.raises(Stopped):
        test_step.run(of_convolutions(optimiser_of, before), runtime=stopped)
    resumed = of_convolutions(optimiser_of, after)
    end = test_step.run(resumed, first_step=resumed.restore(stopped.last_state()))
    torch.testing.assert_close(end.last_state()["encoder"], whole.last_state()["encoder"], rtol=1e-9, atol=1e-12)
