import pytest
import timm
import torch

from ssl_sec.errors import ConfigError
from ssl_sec.networks import timm_backbone
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


def test_an_unknown_name_is_answered_with_the_nearest():
    with pytest.raises(ConfigError, match=r"^encoder.model: timm knows no 'resnet51'; did you mean '.*resnet50.*$"):
        timm_backbone("resnet51", pretrained=False, num_channels=3, image_size_px=32)


def test_a_model_tells_the_scaling_that_its_weights_expect():
    imagenet = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    assert timm_scaling("resnet50") == timm_scaling("resnet50.tv_in1k") == imagenet
    assert timm_scaling("test_vit") == ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))


@pytest.mark.parametrize("model", ["botnet50ts_256", "resnet50.no_such_weights"])
def test_weights_that_timm_has_not_are_refused(model):
    with pytest.raises(ConfigError, match=f"^encoder.pretrained: found True, but timm has no weights for '{model}'"):
        timm_scaling(model)


def test_the_scaling_of_an_unknown_name_is_answered_with_the_nearest():
    with pytest.raises(ConfigError, match=r"^encoder.model: timm knows no 'resnet51'; did you mean"):
        timm_scaling("resnet51")
