import pytest
import timm
import torch

from ssl_sec.errors import ConfigError, MissingDataError, StorageError
from ssl_sec.networks import load_weights, save_weights, timm_backbone
from ssl_sec.networks.backbones import timm as timm_module
from ssl_sec.networks.backbones.timm import timm_scaling


@pytest.mark.parametrize("model", ["test_resnet", "test_vit", "test_efficientnet", "mobilenetv3_small_050"])
@pytest.mark.parametrize("num_channels", [1, 3])
def test_a_model_gives_features_of_the_width_that_it_states(model, num_channels):
    backbone, num_features = timm_backbone(model, pretrained=False, num_channels=num_channels, image_size_px=32)
    features = backbone.eval()(torch.randn(2, num_channels, 32, 32))
    assert features.shape == (2, num_features)
    assert num_features > 1


def test_features_are_those_before_the_classifier():
    torch.manual_seed(0)
    backbone, _ = timm_backbone("test_resnet", pretrained=False, num_channels=3, image_size_px=32)
    whole = timm.create_model("test_resnet", pretrained=False)
    backbone.load_state_dict(whole.state_dict(), strict=False)
    images = torch.randn(2, 3, 32, 32)
    logits = whole.fc(backbone.eval()(images))
    torch.testing.assert_close(logits, whole.eval()(images))


@pytest.mark.parametrize("model", ["ghostnet_050", "swin_tiny_patch4_window7_224"])
def test_dropout_and_stochastic_depth_of_a_model_are_off(model):
    backbone, _ = timm_backbone(model, pretrained=False, num_channels=3, image_size_px=32)
    images, state = torch.randn(4, 3, 32, 32), torch.get_rng_state()
    first, second = backbone.train()(images), backbone(images)
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_model_with_a_layer_in_two_places_is_built():
    backbone, num_features = timm_backbone("coat_lite_tiny", pretrained=False, num_channels=3, image_size_px=32)
    assert backbone.eval()(torch.randn(2, 3, 32, 32)).shape == (2, num_features)


def test_a_model_that_draws_random_numbers_is_refused(monkeypatch):
    monkeypatch.setattr(timm_module, "_stop_random_layers", lambda backbone: None)
    with pytest.raises(ConfigError, match=r"^encoder.model: found 'ghostnet_050', which draws random numbers in train"):
        timm_backbone("ghostnet_050", pretrained=False, num_channels=3, image_size_px=32)


def test_an_unknown_name_suggests_the_nearest():
    with pytest.raises(ConfigError, match=r"^encoder.model: timm knows no 'resnet51'; did you mean '.*resnet50.*$"):
        timm_backbone("resnet51", pretrained=False, num_channels=3, image_size_px=32)


def test_a_part_of_a_name_suggests_those_that_begin_with_it():
    with pytest.raises(ConfigError, match=r"no 'vit_smal'; did you mean 'vit_small_patch8_224' or 'vit_small_patch"):
        timm_backbone("vit_smal", pretrained=False, num_channels=3, image_size_px=32)


def test_a_model_has_the_scaling_that_its_weights_expect():
    imagenet = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    assert timm_scaling("resnet50") == timm_scaling("resnet50.tv_in1k") == imagenet
    assert timm_scaling("test_vit") == ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))


@pytest.mark.parametrize("model", ["botnet50ts_256", "resnet50.no_such_weights"])
def test_weights_that_timm_lacks_are_refused(model):
    with pytest.raises(ConfigError, match=f"^encoder.pretrained: found true, but timm has no weights for '{model}'"):
        timm_scaling(model)


def test_weights_that_cannot_be_downloaded_are_one_line(monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(
        MissingDataError, match=r"^encoder.pretrained: .* cannot be downloaded: .*encoder.weights=<file>"
    ):
        timm_backbone("test_resnet", pretrained=True, num_channels=3, image_size_px=32)


def test_the_scaling_of_an_unknown_name_suggests_the_nearest():
    with pytest.raises(ConfigError, match=r"^encoder.model: timm knows no 'resnet51'; did you mean"):
        timm_scaling("resnet51")


VITS = ["test_vit", "test_vit3", "deit_tiny_patch16_224", "eva02_tiny_patch14_224"]


@pytest.mark.parametrize("model", [*VITS, "swin_tiny_patch4_window7_224", "test_resnet"])
def test_a_model_takes_images_of_other_sizes_than_its_own(model):
    backbone, num_features = timm_backbone(model, pretrained=False, num_channels=3, image_size_px=32)
    for size_px in (16, 32, 64, 96):
        assert backbone.eval()(torch.randn(2, 3, size_px, size_px)).shape == (2, num_features)


@pytest.mark.parametrize("size_px", [8, 20, 50])
def test_images_are_padded_to_whole_patches(size_px):
    backbone, _ = timm_backbone("test_vit", pretrained=False, num_channels=3, image_size_px=size_px)
    images = torch.randn(2, 3, size_px, size_px)
    whole = -(-size_px // 16) * 16
    padded = torch.nn.functional.pad(images, (0, whole - size_px, 0, whole - size_px))
    features = backbone.eval()(images)
    assert torch.equal(features, backbone(padded))
    if size_px > 16:  # what timm builds by default has no place for the last patches
        assert not torch.allclose(features, backbone(images[..., : whole - 16, : whole - 16]))
    assert backbone.pos_embed.shape[1] == 1 + (whole // 16) ** 2


def test_initial_weights_equal_timms():
    torch.manual_seed(0)
    ours, _ = timm_backbone("test_vit", pretrained=False, num_channels=3, image_size_px=32)
    torch.manual_seed(0)
    theirs = timm.create_model("test_vit", img_size=32, num_classes=0)
    torch.testing.assert_close(dict(ours.state_dict()), dict(theirs.state_dict()), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("model", "size_px"), [("beit_base_patch16_224", 8), ("test_maxvit", 28), ("test_convnext", 8)]
)
def test_a_size_that_a_model_cannot_take_is_refused_in_one_line(model, size_px):
    refused = f"^encoder.model: found '{model}', which cannot take .* {size_px} pixels"
    with pytest.raises(ConfigError, match=refused) as error:
        timm_backbone(model, pretrained=False, num_channels=3, image_size_px=size_px)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("model", "others"), [("test_vit", {"pos_embed"}), ("swinv2_cr_tiny_224", set())])
def test_weights_of_another_size_are_interpolated(model, others, tmp_path):
    """timm's own interpolation of position embeddings; all other weights are as they were."""
    trained, _ = timm_backbone(model, pretrained=False, num_channels=3, image_size_px=64)
    save_weights(trained, tmp_path / "encoder.safetensors")
    loaded, _ = timm_backbone(model, pretrained=False, num_channels=3, image_size_px=32)
    load_weights(loaded, tmp_path / "encoder.safetensors")
    found, saved = loaded.state_dict(), trained.state_dict()
    assert {name for name in saved if not torch.equal(saved[name], found[name])} == others
    for name in others:
        expected = timm.layers.resample_abs_pos_embed(saved[name], new_size=(2, 2), num_prefix_tokens=1)
        torch.testing.assert_close(found[name], expected, rtol=0, atol=0)


@pytest.mark.slow
def test_a_table_of_relative_positions_is_interpolated(tmp_path):
    trained, _ = timm_backbone("beit_base_patch16_224", pretrained=False, num_channels=3, image_size_px=64)
    for block in trained.blocks:
        torch.nn.init.constant_(block.attn.relative_position_bias_table, 3.0)
    save_weights(trained, tmp_path / "encoder.safetensors")
    loaded, _ = timm_backbone("beit_base_patch16_224", pretrained=False, num_channels=3, image_size_px=32)
    load_weights(loaded, tmp_path / "encoder.safetensors")
    table = "blocks.0.attn.relative_position_bias_table"
    assert loaded.state_dict()[table].shape != trained.state_dict()[table].shape
    found = loaded.state_dict()[table]
    torch.testing.assert_close(found, torch.full_like(found, 3.0))


@pytest.mark.parametrize(
    ("trained", "size_px", "other", "refused"),
    [
        ("test_vit", 32, "test_vit3", r"^encoder.weights: .* does not fit the encoder: "),
        ("vit_small_patch16_224", 64, "vit_small_patch32_224", r"does not fit the encoder: .*patch_embed.proj.weight"),
    ],
)
def test_weights_of_another_model_or_patch_size_are_refused(tmp_path, trained, size_px, other, refused):
    backbone, _ = timm_backbone(trained, pretrained=False, num_channels=3, image_size_px=size_px)
    save_weights(backbone, tmp_path / "encoder.safetensors")
    another, _ = timm_backbone(other, pretrained=False, num_channels=3, image_size_px=64)
    with pytest.raises(StorageError, match=refused):
        load_weights(another, tmp_path / "encoder.safetensors")
