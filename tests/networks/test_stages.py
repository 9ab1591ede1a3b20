import pytest
import torch

from ssl_sec.errors import ConfigError
from ssl_sec.networks.config import (
    BNInceptionConfig,
    GoogLeNetConfig,
    IRConfig,
    LightCNNConfig,
    PixelsConfig,
    ResNetConfig,
    SphereFaceNetConfig,
    TimmConfig,
)
from ssl_sec.networks.frozen import FrozenBatchNorm
from ssl_sec.networks.stages import freeze_all_but, stages_of

# With the number of their stages, and the first name of the last one.
ENCODERS = [
    (ResNetConfig(name="resnet18", width=0.125), 32, 5, "layer4"),
    (ResNetConfig(name="resnet50", width=0.125, stem="imagenet"), 32, 5, "layer4"),
    (BNInceptionConfig(), 32, 12, "inception_5b_1x1"),
    (GoogLeNetConfig(), 32, 12, "inception5b"),
    (IRConfig(name="se_ir50", width=0.0625), 32, 5, "layer4"),
    (SphereFaceNetConfig(width=0.0625, units=(1, 1, 1, 1)), 32, 4, "layer4"),
    (LightCNNConfig(width=0.125), 32, 5, "conv5a"),
    (TimmConfig(model="resnet18"), 32, 5, "layer4"),
    (TimmConfig(model="vit_tiny_patch16_224"), 32, 13, "blocks"),
    (TimmConfig(model="eva02_tiny_patch14_224"), 28, 13, "blocks"),
    (TimmConfig(model="poolformer_s12"), 64, 5, "stages"),
    (TimmConfig(model="pit_ti_224"), 64, 4, "transformers"),
    (PixelsConfig(), 32, 0, None),
]


@pytest.mark.parametrize(("config", "size", "number", "last"), ENCODERS, ids=lambda value: getattr(value, "name", ""))
def test_the_stages_of_every_encoder_are_in_order_and_have_each_parameter_once(config, size, number, last):
    backbone = config.build(3, size).backbone
    stages = stages_of(backbone)
    assert len(stages) == number and all(stages)
    names = [name for names in stages for name in names]
    assert sorted(names) == sorted(name for name, _ in backbone.named_parameters())
    if last is not None:
        assert stages[-1][0].partition(".")[0] == last


def test_norms_belong_to_the_stage_before_them():
    stages = stages_of(ResNetConfig(name="resnet18", width=0.125).build(3, 32).backbone)
    assert stages[0] == ["conv1.weight", "bn1.weight", "bn1.bias"]
    stages = stages_of(TimmConfig(model="vit_tiny_patch16_224").build(3, 32).backbone)
    assert {"cls_token", "pos_embed", "patch_embed.proj.weight"} <= set(stages[0])
    assert {"norm.weight", "norm.bias"} < set(stages[-1])
    assert {"cls_token", "pos_embed"} < set(stages_of(TimmConfig(model="pit_ti_224").build(3, 64).backbone)[0])
    stages = stages_of(TimmConfig(model="eva02_tiny_patch14_224").build(3, 28).backbone)
    assert {"fc_norm.weight", "blocks.11.norm1.weight"} < set(stages[-1])


@pytest.mark.parametrize("config", [ResNetConfig(name="resnet18", width=0.125), TimmConfig(model="resnet18")], ids=str)
def test_frozen_stages_have_no_gradients_and_keep_the_statistics_of_their_batch_norms(config):
    torch.manual_seed(0)
    backbone = config.build(3, 32).backbone
    names = [*backbone.state_dict()]
    freeze_all_but(backbone, 2, key="trained_stages")
    assert [*backbone.state_dict()] == names
    before = {name: value.clone() for name, value in backbone.state_dict().items()}
    backbone.train()
    backbone(torch.randn(4, 3, 32, 32)).sum().backward()
    trained = {name for name, parameter in backbone.named_parameters() if parameter.grad is not None}
    assert trained == {name for name, _ in backbone.named_parameters() if name.startswith(("layer3.", "layer4."))}
    changed = {name.partition(".")[0] for name, value in backbone.state_dict().items() if not value.equal(before[name])}
    assert changed == {"layer3", "layer4"}
    frozen = {name.partition(".")[0] for name, layer in backbone.named_modules() if isinstance(layer, FrozenBatchNorm)}
    assert frozen == {"bn1", "layer1", "layer2"}


def test_all_stages_are_trained_if_their_number_is_given():
    backbone = ResNetConfig(name="resnet18", width=0.125).build(3, 32).backbone
    freeze_all_but(backbone, 5, key="trained_stages")
    assert all(parameter.requires_grad for parameter in backbone.parameters())
    with pytest.raises(
        ConfigError, match="^trained_stages: found 6, must be 0 to 5, the stages of the encoder, or all$"
    ):
        freeze_all_but(backbone, 6, key="trained_stages")
