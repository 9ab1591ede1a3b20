"""The pixels themselves as an encoder, without parameters: they are measured, and not trained."""

import pytest

from ssl_sec.collectives import rank, world_size
from ssl_sec.errors import ConfigError
from tests.fakes import FakeRuntime
from tests.recipes.metric_learning import test_metric_learning as metric_learning
from tests.recipes.pretraining import test_pretraining as pretraining
from tests.recipes.pretraining.test_pretraining import assert_the_same_curve
from tests.workers import on_workers

PIXELS = {"encoder": {"name": "pixels"}, "head": {"name": "identity", "dim": 64}, "constraint": {"name": "none"}}
ADAM = {"name": "adam", "learning_rate": 0.001, "backbone_learning_rate": 0.001, "decay_at_steps": []}
OPTIMISERS = {
    metric_learning: (ADAM, {**ADAM, "name": "sgd"}),
    pretraining: ({"name": "sgd"}, {"name": "lars"}, {"name": "adamw"}),
}
CASES = [(recipe, optimiser) for recipe, optimisers in OPTIMISERS.items() for optimiser in optimisers]


def without_steps(recipe, optimiser):
    of_recipe = {"steps": 0, "transform": {"name": "none"}} if recipe is metric_learning else {"epochs": 0}
    return {**PIXELS, "optimiser": optimiser, **of_recipe}


def measured(folder, changes):
    """What this worker reported at the end."""
    return reported(folder, changes)[-1][1]


def reported(folder, changes):
    """What this worker reported."""
    runtime, _ = metric_learning.run(folder, FakeRuntime(rank(), world_size()), **changes)
    return [(step, metrics) for step, metrics, _ in runtime.reports]


@pytest.mark.parametrize(("recipe", "optimiser"), CASES, ids=str)
def test_the_pixels_are_measured_without_training(tmp_path, recipe, optimiser):
    runtime, _ = recipe.run(tmp_path, **without_steps(recipe, optimiser))
    found = runtime.reports[-1][1]
    assert 0 < found["retrieval/recall_at_1" if recipe is metric_learning else "val/knn_top1"] < 100


@pytest.mark.slow
@pytest.mark.distributed
def test_two_workers_measure_the_pixels_as_one(tmp_path):
    changes = without_steps(metric_learning, ADAM)
    first, _ = on_workers(2, tmp_path, measured, tmp_path, changes)
    assert first == pytest.approx(measured(tmp_path, changes))


@pytest.mark.parametrize("recipe", [metric_learning, pretraining], ids=["metric_learning", "pretraining"])
def test_a_network_without_parameters_is_not_trained(tmp_path, recipe):
    changes = {**PIXELS, **({"transform": {"name": "none"}} if recipe is metric_learning else {})}
    with pytest.raises(ConfigError, match="^encoder: found 'pixels' with head=identity, which have nothing to train; "):
        recipe.run(tmp_path, **changes)


@pytest.mark.distributed
def test_templates_are_trained_on_the_pixels_themselves_and_equally_on_two_workers(tmp_path):
    """The embeddings move nothing, and still have a gradient, of which figures are reported."""
    optimiser = {**ADAM, "name": "sgd", "learning_rate": 0.1, "clip_norm": 0.05}
    changes = {**PIXELS, "optimiser": optimiser, "transform": {"name": "none"}, "loss": {"name": "softmax"}}
    alone = reported(tmp_path, changes)
    losses = [metrics["train/loss"] for _, metrics in alone if "train/loss" in metrics]
    assert losses[-1] < 0.99 * losses[0]
    assert alone[1][1]["train/turn_mean"] > 0 == alone[1][1]["train/step_angle_mean"]
    first, _ = on_workers(2, tmp_path, reported, tmp_path, changes)
    assert_the_same_curve(first, alone)
