"""Encoders and heads built by their configs."""

import dataclasses

import pytest
import timm
import torch
from torch import nn

from ssl_sec.errors import ConfigError, DataError, MissingDataError
from ssl_sec.networks import save_weights
from ssl_sec.networks.config import (
    HEAD_CONFIGS,
    BNInceptionConfig,
    GoogLeNetConfig,
    IRConfig,
    LightCNNConfig,
    PixelsConfig,
    ResNetConfig,
    SphereFaceNetConfig,
    TimmConfig,
)
from ssl_sec.recipes.pretraining.config import PretrainConfig
from ssl_sec.settings import from_values
from tests.recipes.test_config import RUN


def test_encoders_are_built_from_their_weights_with_their_pixels_scaled(tmp_path):
    config = ResNetConfig(name="resnet18", width=0.1, mean=(0.5,), std=(0.25,))
    first = config.build(1, 8)
    path = tmp_path / "w.safetensors"
    save_weights(first.backbone, path)
    second = dataclasses.replace(config, weights=str(path)).build(1, 8)
    images = torch.rand(2, 1, 8, 8)
    assert torch.equal(first.eval()(images), second.eval()(images))
    torch.testing.assert_close(first(images), first.backbone((images - 0.5) / 0.25))


@pytest.mark.parametrize(("name", "num_layers"), [("resnet18", 20), ("resnet34", 36), ("resnet50", 53)])
def test_the_name_decides_the_depth(name, num_layers):
    encoder = ResNetConfig(name=name, width=0.02).build(3, 32)
    assert sum(isinstance(module, nn.Conv2d) for module in encoder.modules()) == num_layers


@pytest.mark.parametrize(
    ("config", "num_layers", "title"),
    [
        (IRConfig(name="ir18", width=0.02), 21, "IR-18 of ArcFace, width 0.02"),
        (IRConfig(name="se_ir50", width=0.02), 101, "SE-IR-50 of ArcFace, width 0.02"),
        (SphereFaceNetConfig(width=0.02), 36, "SphereFace's CNN of [3, 4, 6, 3] residual units, width 0.02"),
        (SphereFaceNetConfig(units=(1, 1, 1, 1)), 12, "SphereFace's CNN of [1, 1, 1, 1] residual units, width 1"),
        (LightCNNConfig(width=0.5), 9, "Light CNN-9, width 0.5"),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_encoders_of_faces_are_built_for_a_size_of_images(config, num_layers, title):
    encoder = config.build(1, 20)
    assert sum(isinstance(module, nn.Conv2d) for module in encoder.modules()) == num_layers
    assert encoder.eval()(torch.rand(2, 1, 20, 20)).shape == (2, encoder.num_features)
    assert encoder.num_features % 4 == 0  # a map of 2 x 2
    assert config.architecture(1, 20).title == title


def test_timm_models_are_built():
    encoder = TimmConfig(model="test_resnet").build(1, 32)
    assert encoder.eval()(torch.rand(2, 1, 32, 32)).shape == (2, encoder.num_features)


@pytest.mark.parametrize(
    ("config", "mean", "std"),
    [
        (ResNetConfig(name="resnet18", width=0.05), [0], [1]),
        (BNInceptionConfig(), [123 / 255, 117 / 255, 104 / 255], [1 / 255]),
        (GoogLeNetConfig(), [0.5], [0.5]),
        (GoogLeNetConfig(mean=(0.1, 0.2, 0.3)), [0.1, 0.2, 0.3], [0.5]),
        (IRConfig(name="ir18", width=0.05), [0.5], [128 / 255]),
        (SphereFaceNetConfig(width=0.05), [0.5], [128 / 255]),
        (LightCNNConfig(width=0.05), [0], [1]),
        (TimmConfig(model="test_resnet"), [0], [1]),
    ],
    ids=lambda config: getattr(config, "name", None),
)
def test_pixels_are_scaled_as_the_published_weights_expect_unless_stated(config, mean, std):
    encoder = config.build(3, 32)
    torch.testing.assert_close(encoder.mean.flatten(), torch.tensor(mean, dtype=torch.float32))
    torch.testing.assert_close(encoder.std.flatten(), torch.tensor(std, dtype=torch.float32))


@pytest.fixture
def without_downloads(monkeypatch):
    """Which models timm was asked for with its weights."""
    create, asked = timm.create_model, []

    def recorded(model, pretrained=False, **arguments):
        asked.extend([model] if pretrained else [])
        return create(model, **arguments)

    monkeypatch.setattr(timm, "create_model", recorded)
    return asked


@pytest.mark.parametrize(
    ("model", "mean", "std"),
    [
        ("resnet18", (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
        ("test_vit.r160_in1k", (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
    ],
)
def test_pretrained_timm_models_get_pixels_scaled_as_in_their_training(without_downloads, tmp_path, model, mean, std):
    config = TimmConfig(model=model, pretrained=True)
    first = config.build(3, 32)
    assert set(without_downloads) == {model}
    torch.testing.assert_close(first.mean.flatten(), torch.tensor(mean))
    torch.testing.assert_close(first.std.flatten(), torch.tensor(std))
    assert dataclasses.replace(config, mean=(0.0,), std=(1.0,)).build(3, 32).std.flatten().tolist() == [1]
    without_downloads.clear()
    path = tmp_path / "trained.safetensors"
    save_weights(first.backbone, path)
    again = dataclasses.replace(config, weights=str(path)).build(3, 32)
    assert without_downloads == []
    assert torch.equal(again.mean, first.mean) and torch.equal(again.std, first.std)


@pytest.mark.parametrize(
    ("config", "warns"),
    [
        (ResNetConfig(name="resnet18", width=0.125, stem="imagenet"), True),
        (ResNetConfig(name="resnet18", width=0.125, stem="imagenet", mean=(0.5,), std=(0.5,)), False),
        (ResNetConfig(name="resnet18", width=0.125, stem="cifar"), False),
        (TimmConfig(model="test_vit"), True),
    ],
)
@pytest.mark.parametrize("has_classifier", [True, False])
def test_published_weights_without_their_scaling_are_a_warning(tmp_path, caplog, config, warns, has_classifier):
    encoder = config.build(3, 32)
    state = encoder.backbone.state_dict()
    classifier = {"head.weight" if isinstance(config, TimmConfig) else "fc.weight": torch.zeros(10, 4)}
    torch.save({**state, **(classifier if has_classifier else {})}, tmp_path / "published.pth")
    dataclasses.replace(config, weights=str(tmp_path / "published.pth")).build(3, 32)
    said = [
        text for text in caplog.messages if text.startswith("encoder.weights: the pixels stay in [0, 1]; published")
    ]
    assert len(said) == int(warns and has_classifier)
    assert all("encoder.mean=[0." in text and "encoder.std=[0." in text for text in said)


def test_a_model_without_batch_norm_has_none_to_freeze(tmp_path):
    config = TimmConfig(model="test_vit")
    save_weights(config.build(3, 32).backbone, tmp_path / "w.safetensors")
    with pytest.raises(ConfigError, match="^encoder.freeze_batch_norm: found true, must be false: the encoder has no"):
        dataclasses.replace(config, weights=str(tmp_path / "w.safetensors"), freeze_batch_norm=True).build(3, 32)


def test_a_frozen_backbone_has_its_loaded_statistics_in_training_too(tmp_path):
    torch.manual_seed(0)
    config = ResNetConfig(name="resnet18", width=0.1)
    trained = config.build(3, 8)
    trained(torch.rand(4, 3, 8, 8))
    path = tmp_path / "w.safetensors"
    save_weights(trained.backbone, path)
    frozen = dataclasses.replace(config, weights=str(path), freeze_batch_norm=True).build(3, 8).train()
    images = torch.rand(4, 3, 8, 8)
    torch.testing.assert_close(frozen(images), trained.eval()(images))
    frozen(images).sum().backward()
    trained_names = {name for name, parameter in frozen.backbone.named_parameters() if parameter.requires_grad}
    assert "conv1.weight" in trained_names
    assert not any(".bn" in name or name.startswith("bn") for name in trained_names)
    torch.testing.assert_close(dict(frozen.state_dict()), dict(trained.state_dict()), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("name", "options", "smallest"),
    [("bn_inception", {}, 7), ("googlenet", {}, 15), ("googlenet", {"variant": "published"}, 31)],
)
def test_images_that_are_too_small_for_an_encoder_are_refused_in_one_line(name, options, smallest):
    config = from_values(PretrainConfig, {**RUN, "encoder": {"name": name, "mean": [0.5], **options}}).encoder
    encoder = config.build(1, smallest).eval()
    assert encoder(torch.rand(2, 1, smallest, smallest)).shape == (2, 1024)
    message = (
        f"^encoder.name: found '{name}', which needs images of {smallest} pixels or more; these have {smallest - 1}$"
    )
    with pytest.raises(ConfigError, match=message):
        config.build(1, smallest - 1)


def test_the_heads_hidden_width_defaults_to_the_feature_width():
    assert HEAD_CONFIGS["mlp"](dim=5).build(7, 0).layers[0].weight.shape == (7, 7)
    assert HEAD_CONFIGS["mlp"](dim=5, hidden_dim=9, num_layers=3).build(7, 0).layers[3].weight.shape == (9, 9)


@pytest.mark.parametrize("name", ["bn_fc", "fc", "fc_bn", "maxout"])
def test_a_linear_heads_dropout_has_its_probability_and_the_runs_seed(name):
    found = HEAD_CONFIGS[name](dim=5, dropout=0.3).build(7, 11).dropout
    assert (found.probability, found.width, found.seed) == (0.3, 7 if name == "fc_bn" else 5, 11)


def test_a_maxout_head_has_two_linear_layers():
    assert HEAD_CONFIGS["maxout"]().build(7, 0).fc.weight.shape == (2 * 256, 7)


def test_a_linear_head_has_batch_norm_before_after_or_not_at_all():
    assert [name for name, _ in HEAD_CONFIGS["bn_fc"]().build(7, 0).named_children()] == ["bn", "fc", "dropout"]
    assert [name for name, _ in HEAD_CONFIGS["fc"]().build(7, 0).named_children()] == ["fc", "dropout"]
    assert [name for name, _ in HEAD_CONFIGS["fc_bn"]().build(7, 0).named_children()] == [
        "fc",
        "features",
        "dropout",
    ]
    assert HEAD_CONFIGS["fc"]().build(7, 0).fc.weight.shape == (512, 7)


def test_pixels_are_features_and_embeddings_without_a_network():
    encoder = PixelsConfig().build(3, 4)
    images = torch.rand(2, 3, 4, 4)
    embeddings = HEAD_CONFIGS["identity"](dim=48).build(encoder.num_features, 0)(encoder(images))
    torch.testing.assert_close(embeddings, ((255 * images - 127.5) / 128).flatten(1))
    with pytest.raises(ConfigError, match="head.dim: found 47, must be 48, the number of features"):
        HEAD_CONFIGS["identity"](dim=47).build(encoder.num_features, 0)


@pytest.mark.parametrize(
    "config",
    [HEAD_CONFIGS[name](dim=5) for name in ("mlp", "bn_fc", "fc", "fc_bn", "maxout")],
)
def test_heads_are_built_from_their_weights(tmp_path, config):
    torch.manual_seed(0)
    first = config.build(7, 0)
    path = tmp_path / "head.safetensors"
    save_weights(first, path)
    second = dataclasses.replace(config, weights=str(path)).build(7, 0)
    features = torch.rand(3, 7)
    assert torch.equal(second(features), first(features))
    with pytest.raises(MissingDataError, match="^head.weights: no file /nowhere; give head.weights=<file>$"):
        dataclasses.replace(config, weights="/nowhere").build(7, 0)


def test_a_mean_for_each_channel_needs_as_many_channels():
    encoder = ResNetConfig(name="resnet18", width=0.125, mean=(0.5, 0.5, 0.5))
    assert encoder.build(num_channels=3, image_size_px=8).mean.shape == (3, 1, 1)
    with pytest.raises(ConfigError, match="encoder.mean: .* must be one value, or one for each of 1 channel$"):
        encoder.build(num_channels=1, image_size_px=8)


@pytest.mark.usefixtures("unchecked_types")
@pytest.mark.parametrize("mean", [(0.5,), (0.1, 0.2, 0.3)])
@pytest.mark.parametrize("shape", [(2, 1, 8, 8), (2, 4, 8, 8), (2, 8, 8, 3), (3, 8, 8)])
def test_images_of_other_channels_are_refused(shape, mean):
    encoder = ResNetConfig(name="resnet18", width=0.125, mean=mean).build(3, 8)
    found = ", ".join(map(str, shape))
    with pytest.raises(DataError, match=rf"^images: found shape \[{found}\], must be \[batch, 3, height, width\]$"):
        encoder(torch.rand(shape))


def test_pixels_have_no_batch_norm_to_freeze():
    with pytest.raises(ConfigError, match="^encoder.freeze_batch_norm: found true, must be false: the encoder has no "):
        PixelsConfig(freeze_batch_norm=True).build(3, 8)
