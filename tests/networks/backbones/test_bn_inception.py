import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ssl_sec.errors import ConfigError
from ssl_sec.networks import Encoder, bn_inception, load_weights
from ssl_sec.networks.backbones.bn_inception import CAFFE_MEAN, CAFFE_STD

# Convolutions of the published weights: (name, inputs, outputs, size of the kernel).
STEM = [("conv1_7x7_s2", 3, 64, 7), ("conv2_3x3_reduce", 64, 64, 1), ("conv2_3x3", 64, 192, 3)]
# Blocks: inputs; outputs of 1x1, 3x3_reduce, 3x3, double_3x3_reduce, double_3x3_1, double_3x3_2, pool_proj.
BLOCKS = {
    "3a": (192, 64, 64, 64, 64, 96, 96, 32),
    "3b": (256, 64, 64, 96, 64, 96, 96, 64),
    "3c": (320, None, 128, 160, 64, 96, 96, None),
    "4a": (576, 224, 64, 96, 96, 128, 128, 128),
    "4b": (576, 192, 96, 128, 96, 128, 128, 128),
    "4c": (576, 160, 128, 160, 128, 160, 160, 128),
    "4d": (608, 96, 128, 192, 160, 192, 192, 128),
    "4e": (608, None, 128, 192, 192, 256, 256, None),
    "5a": (1056, 352, 192, 320, 160, 224, 224, 128),
    "5b": (1024, 352, 192, 320, 192, 224, 224, 128),
}
HALVING = ("3c", "4e")


def published_convolutions():
    convolutions = list(STEM)
    for block, (inputs, single, reduce, triple, double_reduce, first, second, projection) in BLOCKS.items():
        convolutions += [
            (f"inception_{block}_{layer}", *sizes)
            for layer, *sizes in [
                ("1x1", inputs, single, 1),
                ("3x3_reduce", inputs, reduce, 1),
                ("3x3", reduce, triple, 3),
                ("double_3x3_reduce", inputs, double_reduce, 1),
                ("double_3x3_1", double_reduce, first, 3),
                ("double_3x3_2", first, second, 3),
                ("pool_proj", inputs, projection, 1),
            ]
            if sizes[1] is not None
        ]
    return convolutions


def published_weights(seed=0):
    """A state dict as bn_inception-52deb4733.pth is: vectors of batch norms are [1, channels], nothing is counted."""
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for name, inputs, outputs, size in published_convolutions():
        scale = (2 / (inputs * size**2)) ** 0.5
        state[f"{name}.weight"] = scale * torch.randn(outputs, inputs, size, size, generator=generator)
        state[f"{name}.bias"] = 0.1 * torch.randn(outputs, generator=generator)
        for key in ("weight", "bias", "running_mean", "running_var"):
            state[f"{name}_bn.{key}"] = torch.rand(1, outputs, generator=generator) + 0.5
    state["last_linear.weight"] = torch.ones(1000, 1024)
    state["last_linear.bias"] = torch.ones(1000)
    return state


@pytest.fixture(scope="module")
def weights():
    return published_weights()


@pytest.fixture(scope="module")
def backbone(weights, tmp_path_factory):
    path = tmp_path_factory.mktemp("weights") / "bn_inception.pth"
    torch.save(weights, path, _use_new_zipfile_serialization=False)  # as files of that age are
    made, num_features = bn_inception(3, 224)
    assert num_features == 1024
    load_weights(made, path)
    return made.eval()


def test_names_and_shapes_are_those_of_the_published_weights(weights):
    made, _ = bn_inception(3, 224)
    counts = {name for name in made.state_dict() if name.endswith("num_batches_tracked")}
    shapes = {name: tuple(value.shape) for name, value in made.state_dict().items() if name not in counts}
    published = {name: tuple(value.shape[1:] if "_bn." in name else value.shape) for name, value in weights.items()}
    assert shapes == {name: shape for name, shape in published.items() if not name.startswith("last_linear")}
    assert len(shapes) == 69 * 6
    assert len(counts) == 69
    assert all(layer.eps == 1e-5 for layer in made.modules() if isinstance(layer, nn.BatchNorm2d))


@torch.no_grad()
def caffe_features(weights, images):
    """The network of the prototxt, layer by layer, on blue, green and red from 0 to 255 less Caffe's mean."""

    def layer(name, maps, stride=1):
        kernel = weights[f"{name}.weight"]
        maps = F.conv2d(maps, kernel, weights[f"{name}.bias"], stride, padding=kernel.shape[-1] // 2)
        scale, shift, mean, variance = (
            weights[f"{name}_bn.{key}"].view(1, -1, 1, 1) for key in ("weight", "bias", "running_mean", "running_var")
        )
        return ((maps - mean) / (variance + 1e-5).sqrt() * scale + shift).clamp(min=0)

    def rounded_up(maps):
        return F.max_pool2d(maps, 3, 2, ceil_mode=True)

    maps = rounded_up(layer("conv1_7x7_s2", images, stride=2))
    maps = rounded_up(layer("conv2_3x3", layer("conv2_3x3_reduce", maps)))
    sizes = []
    for block in BLOCKS:
        name, stride = f"inception_{block}", 2 if block in HALVING else 1
        triple = layer(f"{name}_3x3", layer(f"{name}_3x3_reduce", maps), stride)
        double = layer(f"{name}_double_3x3_1", layer(f"{name}_double_3x3_reduce", maps))
        double = layer(f"{name}_double_3x3_2", double, stride)
        if block in HALVING:
            maps = torch.cat([triple, double, rounded_up(maps)], 1)
        else:
            pooled = F.max_pool2d(maps, 3, 1, 1) if block == "5b" else F.avg_pool2d(maps, 3, 1, 1)
            maps = torch.cat([layer(f"{name}_1x1", maps), triple, double, layer(f"{name}_pool_proj", pooled)], 1)
        sizes.append(maps.shape[-1])
    return maps.mean((2, 3)), sizes


@pytest.mark.parametrize(("size", "sizes"), [(64, [8, 4, 2]), (224, [28, 14, 7]), (227, [28, 14, 7])])
def test_features_are_those_of_caffes_layers_and_input(weights, backbone, size, sizes):
    pixels = torch.rand(1, 3, size, size, generator=torch.Generator().manual_seed(1))
    red, green, blue = (255 * pixels).unbind(1)
    expected, seen = caffe_features(weights, torch.stack([blue - 104, green - 117, red - 123], 1))
    assert seen == [sizes[0]] * 2 + [sizes[1]] * 5 + [sizes[2]] * 3
    with torch.no_grad():
        features = Encoder(backbone, 1024, CAFFE_MEAN, CAFFE_STD)(pixels)
    assert features.shape == (1, 1024)
    torch.testing.assert_close(features, expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item())


def test_the_first_convolution_gets_caffes_input(backbone):
    pixels = torch.randint(0, 256, (2, 3, 16, 16), generator=torch.Generator().manual_seed(1))
    seen = []
    handle = backbone.conv1_7x7_s2.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    with torch.no_grad():
        Encoder(backbone, 1024, CAFFE_MEAN, CAFFE_STD)(pixels / 255)
    handle.remove()
    expected = pixels[:, [2, 1, 0]] - torch.tensor([104, 117, 123]).view(3, 1, 1)
    torch.testing.assert_close(seen[0], expected.float(), rtol=0, atol=1e-4)


@pytest.mark.parametrize("size", [(7, 7), (8, 8), (30, 41), (45, 60)])
@pytest.mark.parametrize("num_channels", [1, 3])
def test_images_of_any_size_have_features(size, num_channels):
    """Maps of an odd size, where Caffe's pooling and convolutions of stride 2 differ by one."""
    torch.manual_seed(0)
    made, num_features = bn_inception(num_channels, min(size))
    features = made.eval()(torch.rand(2, num_channels, *size))
    assert features.shape == (2, num_features)
    assert features.isfinite().all() and features.std() > 0


def test_smaller_images_are_refused():
    with pytest.raises(
        ConfigError, match="^encoder.name: found 'bn_inception', which needs images of 7 pixels or more; these have 6$"
    ):
        bn_inception(3, 6)


def test_every_weight_is_trained():
    torch.manual_seed(0)
    made, _ = bn_inception(3, 32)
    made(torch.rand(4, 3, 32, 32)).square().sum().backward()
    assert all(parameter.grad is not None for parameter in made.parameters())
