"""Optimisers from their configs."""

import pytest
from torch import nn

from ssl_sec.training.optimisers.config import CosineAdamWConfig, CosineSGDConfig, EpochSGDConfig


@pytest.mark.parametrize(
    ("config", "kind", "option"),
    [
        (CosineSGDConfig(name="sgd", momentum=0.5, weight_decay=0.1), "SGD", ("momentum", 0.5)),
        (CosineSGDConfig(name="lars", momentum=0.5, weight_decay=0.1), "Lars", ("momentum", 0.5)),
        (CosineAdamWConfig(weight_decay=0.1), "AdamW", ("betas", (0.9, 0.999))),
    ],
)
def test_the_optimiser_is_built_over_all_modules(config, kind, option):
    optimiser = config.build(nn.Linear(2, 2), nn.Linear(2, 1))
    assert type(optimiser).__name__ == kind
    assert [len(group["params"]) for group in optimiser.param_groups] == [2, 2]
    assert option in optimiser.param_groups[0].items()
    assert [group["weight_decay"] for group in optimiser.param_groups] == [0.1, 0.0]


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
