"""Pretraining of vision transformers on images and views of sizes that they were not made for."""

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from ssl_sec.errors import ConfigError
from ssl_sec.recipes.pretraining.recipe import build_recipe
from tests.fakes import FakeRuntime
from tests.recipes.pretraining.test_pretraining import VALUES, config, run
from tests.recipes.same_runs import assert_resumes_bit_equal, assert_the_same_curve, on_a_worker
from tests.workers import on_workers

# MoCo v3 with its optimiser, in float64; warm for one of two epochs.
MOCO_V3 = {
    "encoder": {"name": "timm", "model": "test_vit"},
    "loss": {"name": "mocov3", "momentum": 0.8, "predictor_dim": 24},
    "constraint": {"name": "none"},
    "optimiser": {"name": "adamw", "learning_rate": 1e-3, "warmup_epochs": 1},
}


def changes(view_size_px=None, **encoder):
    """Of the digits' run, whose images have 8 pixels, less than a patch of 16."""
    return {
        "encoder": encoder or {"name": "timm", "model": "test_vit"},
        "augment": {"min_scale": 0.4, "view_size_px": view_size_px},
        "runtime": {"name": "local", "device": "cpu", "precision": "float32"},
    }


@pytest.mark.parametrize(
    "view_size_px", [None, pytest.param(24, marks=pytest.mark.slow), pytest.param(40, marks=pytest.mark.slow)]
)
def test_a_resumed_run_with_views_of_any_size_ends_bit_equal(view_size_px, tmp_path):
    whole, store = run(tmp_path, **changes(view_size_px))
    assert len(whole.series("val/knn_top1")) == 2
    embeddings = load_file(store.encoder_path)["pos_embed"]
    assert embeddings.shape == (1, 2, 64)  # a class token and one padded patch: the images' size
    assert_resumes_bit_equal(run, tmp_path, whole, 4, **changes(view_size_px))


def test_views_that_an_encoder_cannot_take_are_refused_by_their_key(tmp_path):
    with pytest.raises(ConfigError, match="^augment.view_size_px: found 24, which the encoder cannot take") as refused:
        run(tmp_path, **changes(24, name="ir18", width=0.0625))
    assert "\n" not in str(refused.value)


@pytest.fixture(scope="module")
def moco_v3(tmp_path_factory):
    """An uninterrupted run of ten steps on one worker."""
    runtime, _ = run(tmp_path_factory.mktemp("moco_v3"), **MOCO_V3)
    return runtime


def losses(reports):
    return [metrics["train/loss"] for _, metrics, *_ in reports if "train/loss" in metrics]


@pytest.mark.slow
@pytest.mark.distributed
def test_adamw_trains_the_same_on_two_workers_and_resumes_on_one(tmp_path, moco_v3):
    expected = moco_v3.last_state()
    for reports, state in on_workers(2, tmp_path, on_a_worker, run, tmp_path, MOCO_V3):
        assert losses(reports) == pytest.approx(losses(moco_v3.reports), rel=1e-8)
        torch.testing.assert_close(state, expected, rtol=1e-6, atol=1e-8)
    (first, state), _ = on_workers(2, tmp_path, on_a_worker, run, tmp_path, MOCO_V3, 3)
    assert {float(each["step"]) for each in state["optimiser"]["state"].values()} == {3}
    second, state = on_a_worker(run, tmp_path, MOCO_V3, state=state)
    assert losses(first + second) == pytest.approx(losses(moco_v3.reports), rel=1e-8)
    torch.testing.assert_close(state, expected, rtol=1e-6, atol=1e-8)


def test_a_resumed_run_of_adamw_ends_bit_equal(tmp_path, moco_v3):
    assert_resumes_bit_equal(run, tmp_path, moco_v3, 4, **MOCO_V3)


def test_adamw_has_a_state_of_all_but_the_teacher_and_no_decay_of_biases_and_norms():
    settings = config(**MOCO_V3)
    recipe = build_recipe(settings, settings.data.open("train"), FakeRuntime())
    decayed, spared = recipe.optimiser.param_groups
    assert (decayed["weight_decay"], spared["weight_decay"]) == (0.1, 0.0)
    names = {id(each): name for name, each in recipe.model.named_parameters()}
    assert names.keys() == {id(each) for group in (decayed, spared) for each in group["params"]}
    norms = [module for module in recipe.model.modules() if isinstance(module, nn.LayerNorm | nn.BatchNorm1d)]
    biases = [module.bias for module in recipe.model.modules() if isinstance(module, nn.Linear | nn.Conv2d)]
    of_norms = [each for norm in norms for each in norm.parameters()]
    expected = {names[id(each)] for each in (*of_norms, *biases) if each is not None}
    assert {names[id(each)] for each in spared["params"]} == expected


@pytest.mark.parametrize("loss", [MOCO_V3, {"encoder": MOCO_V3["encoder"], "loss": {"name": "ntxent"}}])
def test_a_run_in_micro_batches_has_the_same_curve(loss, tmp_path):
    """Of views of two sizes, with a teacher and without, and SEC on the norms of the whole batch."""
    augment = {"min_scale": 0.4, "small_views": 2, "small_view_size_px": 5, "small_view_max_scale": 0.4}
    values = {**loss, "augment": augment, "epochs": 1}
    expected, _ = run(tmp_path, **values)
    found, _ = run(tmp_path, **values, runtime={**VALUES["runtime"], "micro_batch_size": 24})
    assert_the_same_curve(found.reports, expected.reports, rel=1e-7)
    torch.testing.assert_close(found.last_state(), expected.last_state(), rtol=1e-6, atol=1e-9)


def test_micro_batches_of_an_encoder_with_batch_norm_are_refused(tmp_path):
    with pytest.raises(
        ConfigError, match="^runtime.micro_batch_size: found 24, must be null: the encoder has batch norm"
    ):
        run(tmp_path, runtime={**VALUES["runtime"], "micro_batch_size": 24})
