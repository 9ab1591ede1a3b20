"""Optimisers from their configs."""

import pytest
from torch import nn

from ssl_sec.errors import ConfigError
from ssl_sec.losses import CosFaceLoss
from ssl_sec.recipes.face.config import FaceConfig
from ssl_sec.recipes.finetuning.config import FinetuneConfig
from ssl_sec.recipes.metric_learning.config import MetricLearningConfig
from ssl_sec.recipes.pretraining.config import PretrainConfig
from ssl_sec.settings import from_values
from ssl_sec.training.class_sharding import draw_templates
from ssl_sec.training.optimisers.config import (
    CosineAdamWConfig,
    CosineSGDConfig,
    EpochSGDConfig,
    PolynomialAdamWConfig,
    PolynomialSGDConfig,
    SteppedAdamWConfig,
    SteppedSGDConfig,
)
from ssl_sec.training.schedules import Polynomial, StepDecay
from tests.recipes import test_finetuning
from tests.recipes.face import test_recipe
from tests.recipes.metric_learning import test_metric_learning
from tests.recipes.pretraining import test_pretraining


@pytest.mark.parametrize(
    ("config", "kind", "option"),
    [
        (CosineSGDConfig(name="sgd", momentum=0.5, weight_decay=0.1), "SGD", ("momentum", 0.5)),
        (CosineSGDConfig(name="lars", momentum=0.5, weight_decay=0.1), "Lars", ("momentum", 0.5)),
        (CosineAdamWConfig(weight_decay=0.1), "AdamW", ("betas", (0.9, 0.999))),
        (PolynomialSGDConfig(momentum=0.5, weight_decay=0.1), "SGD", ("momentum", 0.5)),
        (PolynomialAdamWConfig(weight_decay=0.1), "AdamW", ("betas", (0.9, 0.999))),
        (EpochSGDConfig(momentum=0.5, weight_decay=0.1), "SGD", ("momentum", 0.5)),
    ],
)
def test_the_optimiser_is_built_over_all_modules(config, kind, option):
    optimiser = config.build(nn.Linear(2, 2), nn.Linear(2, 1))
    assert type(optimiser).__name__ == kind
    assert [len(group["params"]) for group in optimiser.param_groups] == [2, 2]
    assert option in optimiser.param_groups[0].items()
    assert [group["weight_decay"] for group in optimiser.param_groups] == [0.1, 0.0]


@pytest.mark.parametrize(
    "config",
    [
        CosineSGDConfig(weight_decay=0.1, decay_all=True),
        CosineAdamWConfig(weight_decay=0.1, decay_all=True),
        PolynomialSGDConfig(weight_decay=0.1, decay_all=True),
        PolynomialAdamWConfig(weight_decay=0.1, decay_all=True),
        EpochSGDConfig(weight_decay=0.1, decay_all=True),
        SteppedAdamWConfig(weight_decay=0.1, decay_all=True),
        SteppedSGDConfig(learning_rate=0.1, backbone_learning_rate=0.1, weight_decay=0.1, decay_all=True),
    ],
    ids=lambda config: type(config).__name__,
)
def test_all_parameters_can_decay(config):
    groups = config.build(nn.Linear(2, 2), nn.Linear(2, 1)).param_groups
    assert sum(len(group["params"]) for group in groups) == 4
    assert {group["weight_decay"] for group in groups} == {0.1}


def test_lars_adapts_the_rates_of_what_decays_and_so_refuses_decay_of_all():
    with pytest.raises(ConfigError, match=r"^optimiser\.decay_all: found true, must be false with optimiser=lars"):
        CosineSGDConfig(name="lars", decay_all=True)


@pytest.mark.parametrize("kind", [CosineSGDConfig, CosineAdamWConfig])
def test_the_rate_warms_up_over_whole_epochs(kind):
    rate = kind(learning_rate=1.0, warmup_epochs=2).schedule(steps_per_epoch=5, total_steps=100)
    assert [rate(0), rate(9), rate(10), rate(55)] == pytest.approx([0.1, 1.0, 1.0, 0.5])


def test_adamw_has_the_values_of_moco_v3():
    """1.5e-4 for each 256 images (Chen et al. 2021, sections 4.1 and 5)."""
    config = CosineAdamWConfig()
    assert config.learning_rate == pytest.approx(1.5e-4 * 4096 / 256, rel=1e-12)
    assert (config.weight_decay, config.warmup_epochs) == (0.1, 40)


def test_a_rate_may_fall_within_an_epoch():
    rate = EpochSGDConfig(learning_rate=1.0, decay_at_epochs=(1.5,)).schedule(10, 30)
    assert [rate(step) for step in (0, 14, 15, 29)] == [1, 1, 0.1, 0.1]


@pytest.mark.parametrize("kind", [PolynomialSGDConfig, PolynomialAdamWConfig])
def test_the_rate_of_faces_warms_up_over_whole_epochs_and_falls_along_a_parabola(kind):
    config = kind(learning_rate=1.0, warmup_epochs=2)
    assert config.schedule(5, 100) == Polynomial(1.0, 100, warmup_steps=10, power=2.0)
    line = kind(learning_rate=1.0, warmup_epochs=0, power=1.0).schedule(5, 100)
    assert [line(step) for step in (0, 50, 99)] == pytest.approx([1.0, 0.5, 0.01])


def test_the_defaults_are_those_of_arcface_torch():
    """Its configs/base.py, and the warm-up of configs/wf42m_pfc02_vit_h.py, of 16 epochs."""
    sgd, adamw = PolynomialSGDConfig(), PolynomialAdamWConfig()
    assert (sgd.learning_rate, sgd.momentum, sgd.weight_decay, sgd.warmup_epochs) == (0.1, 0.9, 5e-4, 0)
    assert (adamw.learning_rate, adamw.weight_decay, adamw.warmup_epochs) == (1e-3, 0.1, 16 // 8)


def test_adamw_of_metric_learning_has_rates_for_the_backbone_the_templates_and_the_rest():
    backbone, head, loss = nn.Linear(2, 2), nn.Linear(2, 1), CosFaceLoss(3, 1)
    draw_templates(loss, 0, sharded=False)
    config = SteppedAdamWConfig(
        learning_rate=1e-3, backbone_learning_rate=1e-4, template_learning_rate=1e-1, decay_at_steps=(4,)
    )
    optimiser = config.build(backbone, head, loss)
    assert type(optimiser).__name__ == "AdamW"
    found = [([*map(id, g["params"])], g["weight_decay"], g["rate_factor"]) for g in optimiser.param_groups]
    assert found == [
        ([id(backbone.weight)], 0.01, pytest.approx(0.1)),
        ([id(backbone.bias)], 0.0, pytest.approx(0.1)),
        ([id(head.weight)], 0.01, 1.0),
        ([id(head.bias)], 0.0, 1.0),
        ([id(loss.weight)], 0.01, pytest.approx(100)),
    ]
    assert config.schedule(5, 100) == StepDecay(1e-3, (4,), 0.1)


@pytest.mark.parametrize(
    ("config", "values"),
    [
        (PretrainConfig, test_pretraining.VALUES),
        (MetricLearningConfig, test_metric_learning.VALUES),
        (FaceConfig, test_recipe.VALUES),
        (FinetuneConfig, test_finetuning.VALUES),
    ],
)
def test_every_training_can_clip_and_by_default_does_not(config, values):
    """Configurations that were saved before have no such key."""
    assert from_values(config, values).optimiser.clip_norm is None
    clipped = {**values, "optimiser": {**values["optimiser"], "clip_norm": 5}}
    assert from_values(config, clipped).optimiser.clip_norm == 5
    for found in (0, -1.0):
        with pytest.raises(ConfigError, match=rf"^optimiser\.clip_norm: found {float(found)}, must be > 0$"):
            from_values(config, {**values, "optimiser": {**values["optimiser"], "clip_norm": found}})
