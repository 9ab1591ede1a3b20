import importlib.util
import json
import re
import subprocess
from dataclasses import replace
from functools import partial
from pathlib import Path

import PIL.Image
import pytest
import timm.data
import torch
from torch import nn

from ssl_sec.data.crops import CentreCrop
from ssl_sec.errors import ConfigError
from ssl_sec.exporting import FILE_NAMES, FORMATS, Exportable, check_export, checking, require_packages
from ssl_sec.exporting.reading import reading
from ssl_sec.exporting.record import Record, read_record
from ssl_sec.networks import (
    Encoder,
    bn_inception,
    googlenet,
    ir,
    light_cnn,
    published_googlenet,
    resnet,
    sphereface_net,
    timm_backbone,
)
from ssl_sec.networks.architecture import OwnNetwork, TimmModel, TorchvisionGoogLeNet, TorchvisionResNet
from ssl_sec.networks.backbones.timm import timm_arguments
from ssl_sec.networks.config import ResNetConfig, TimmConfig
from ssl_sec.networks.heads import BatchNormLinearHead, LinearBatchNormHead, LinearHead, MaxoutHead, ProjectionHead
from tests.data.files import noise

PAGE = Path(__file__).parents[2] / "docs" / "export.md"


def exportable_of(build, architecture, num_channels=3, size=32, mean=(0.5,), std=(0.5,)):
    torch.manual_seed(0)
    backbone, num_features = build()
    return Exportable(
        encoder=trained(Encoder(backbone, num_features, mean, std)),
        architecture=architecture,
        image_shape=(num_channels, size, size),
        dim=num_features,
    )


def exportable_resnet(depth, stem, width, num_channels, size=8, mean=(0.0,), std=(1.0,)):
    architecture = TorchvisionResNet(depth=depth, stem=stem, width=width, num_channels=num_channels)
    build = partial(resnet, depth, stem, width, num_channels)
    return exportable_of(build, architecture, num_channels, size, mean, std)


def exportable_timm(model, num_channels, size, mean=(0.0,), std=(1.0,)):
    architecture = TimmModel(model=model, arguments=timm_arguments(model, num_channels, size))
    build = partial(timm_backbone, model, False, num_channels, size)
    return exportable_of(build, architecture, num_channels, size, mean, std)


def exportable_googlenet(num_channels):
    architecture = TorchvisionGoogLeNet(num_channels=num_channels)
    return exportable_of(partial(googlenet, num_channels, 32), architecture, num_channels)


def exportable_published_googlenet():
    return exportable_of(partial(published_googlenet, 3, 32), OwnNetwork(title="GoogLeNet without batch norm"))


def exportable_bn_inception():
    return exportable_of(partial(bn_inception, 3, 33), OwnNetwork(title="BN-Inception"), size=33, **SCALED)


def exportable_face(build):
    return exportable_of(partial(build, image_size_px=32), OwnNetwork(title="a network of faces"), std=(128 / 255,))


def exportable_ir():
    return exportable_face(partial(ir, "se_ir50", 0.0625))


def exportable_sphereface():
    return exportable_face(partial(sphereface_net, (1, 1, 1, 1), 0.0625))


def exportable_light_cnn():
    return exportable_face(partial(light_cnn, 0.125, num_channels=3))


def exportable_embedding(head, stem="cifar"):
    exportable = exportable_resnet(18, stem, 0.125, 1, mean=(0.3,), std=(0.2,))
    return replace(exportable, head=trained(head), dim=5)


def trained(network):
    """Sets running statistics that a new batch norm does not have."""
    for module in network.modules():
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            nn.init.normal_(module.running_mean, std=0.1)
            nn.init.uniform_(module.running_var, 0.5, 2)
    return network.eval()


def some_images(exportable, count=5):
    return torch.rand(count, *exportable.image_shape, generator=torch.Generator().manual_seed(1))


SCALED = {"mean": (0.1, 0.2, 0.3), "std": (0.5, 0.6, 0.7)}
CASES = {
    "narrow safetensors": ("safetensors", lambda: exportable_resnet(18, "cifar", 0.125, 1, mean=(0.3,), std=(0.2,))),
    "bottleneck safetensors": ("safetensors", lambda: exportable_resnet(50, "imagenet", 0.0625, 3, 32, **SCALED)),
    "googlenet safetensors": ("safetensors", lambda: exportable_googlenet(1)),
    "published googlenet torchscript": ("torchscript", exportable_published_googlenet),
    "published googlenet onnx": ("onnx", exportable_published_googlenet),
    "mlp torchscript": ("torchscript", lambda: exportable_embedding(ProjectionHead(64, 7, 5, num_layers=3))),
    "narrow torchscript": ("torchscript", lambda: exportable_resnet(18, "cifar", 0.125, 1, mean=(0.3,), std=(0.2,))),
    "narrow pt2": ("pt2", lambda: exportable_resnet(18, "cifar", 0.125, 1, mean=(0.3,), std=(0.2,))),
    "mlp pt2": ("pt2", lambda: exportable_embedding(ProjectionHead(64, 7, 5, num_layers=3))),
    "bn_inception pt2": ("pt2", exportable_bn_inception),
    "ir pt2": ("pt2", exportable_ir),
    "timm pt2": ("pt2", lambda: exportable_timm("test_vit", 3, 32, **SCALED)),
    "bn_inception torchscript": ("torchscript", exportable_bn_inception),
    "bn_inception onnx": ("onnx", exportable_bn_inception),
    "ir torchscript": ("torchscript", exportable_ir),
    "ir onnx": ("onnx", exportable_ir),
    "sphereface onnx": ("onnx", exportable_sphereface),
    "light_cnn onnx": ("onnx", exportable_light_cnn),
    "timm safetensors": ("safetensors", lambda: exportable_timm("test_vit", 3, 32, **SCALED)),
    "timm torchscript": ("torchscript", lambda: exportable_timm("test_vit", 3, 32, **SCALED)),
    "timm onnx": ("onnx", lambda: exportable_timm("test_vit", 3, 32, **SCALED)),
    "timm timm": ("timm", lambda: exportable_timm("test_vit.r160_in1k", 3, 32, **SCALED)),
    "mlp without batch norm": ("hub", lambda: exportable_embedding(ProjectionHead(64, 7, 5, batch_norm=False))),
    "mlp safetensors": ("safetensors", lambda: exportable_embedding(ProjectionHead(64, 7, 5, num_layers=3))),
    "bn_fc safetensors": ("safetensors", lambda: exportable_embedding(BatchNormLinearHead(64, 5))),
    "fc safetensors": ("safetensors", lambda: exportable_embedding(LinearHead(64, 5, dropout=0.3))),
    "fc_bn safetensors": ("safetensors", lambda: exportable_embedding(LinearBatchNormHead(64, 5, dropout=0.3))),
    "maxout safetensors": ("safetensors", lambda: exportable_embedding(MaxoutHead(64, 5, dropout=0.3))),
    "maxout torchscript": ("torchscript", lambda: exportable_embedding(MaxoutHead(64, 5, dropout=0.3))),
    "fc_bn onnx": ("onnx", lambda: exportable_embedding(LinearBatchNormHead(64, 5, dropout=0.3))),
    "narrow hub": ("hub", lambda: exportable_resnet(18, "cifar", 0.125, 1, mean=(0.3,), std=(0.2,))),
    "mlp hub": ("hub", lambda: exportable_embedding(ProjectionHead(64, 7, 5, num_layers=3))),
    "ir hub": ("hub", exportable_ir),
    "timm hub": ("hub", lambda: exportable_timm("test_vit.r160_in1k", 3, 32, **SCALED)),
    "resnet timm": ("timm", lambda: exportable_resnet(18, "imagenet", 1.0, 1, 32, mean=(0.3,), std=(0.2,))),
}


# Each format, with a head and without, is among the fast ones.
SLOW = {
    *("published googlenet torchscript", "published googlenet onnx"),
    *(
        "bn_inception onnx",
        "bn_inception torchscript",
        "bn_inception pt2",
        "ir onnx",
        "ir pt2",
        "ir torchscript",
        "light_cnn onnx",
        "timm safetensors",
        "timm pt2",
        "timm torchscript",
    ),
    *("bn_fc safetensors", "fc safetensors", "fc_bn safetensors", "maxout safetensors"),
    *("bottleneck safetensors", "googlenet safetensors", "sphereface onnx", "maxout torchscript", "timm onnx"),
    *("ir hub", "timm hub"),
}


# The others are read back by forks of one process, which has imported torch.
IN_THEIR_OWN_PROCESS = SLOW | {"narrow safetensors", "fc_bn onnx"}


@pytest.fixture(autouse=True)
def forks_read_back(warm_reader, monkeypatch):
    monkeypatch.setattr(checking, "subprocess", warm_reader)


@pytest.mark.parametrize("case", [pytest.param(case, marks=pytest.mark.slow if case in SLOW else ()) for case in CASES])
def test_exports_read_back_give_the_networks_output(case, tmp_path, monkeypatch):
    if case in IN_THEIR_OWN_PROCESS:
        monkeypatch.setattr(checking, "subprocess", subprocess)
    name, made = CASES[case]
    exportable = made()
    images = some_images(exportable)
    FORMATS[name].write(exportable, images, tmp_path)
    check = check_export(FORMATS[name], exportable, images, tmp_path)
    assert check.num_images == 5
    assert check.largest_difference <= check.allowed == FORMATS[name].tolerance * check.largest_value
    assert check.largest_value > 0
    assert {path.name for path in tmp_path.iterdir()} <= FILE_NAMES


def documented_lines():
    return dict(re.findall(r"```python\n# format=(\w+)\n(.*?)\n```", PAGE.read_text(), re.DOTALL))


@pytest.mark.parametrize("name", FORMATS)
def test_the_documentation_reads_each_format_as_the_check_does(name):
    """The check runs these lines."""
    exportable = exportable_resnet(18, "cifar", 1.0, 3)
    assert documented_lines()[name] == f"{FORMATS[name].loading(exportable)}\n{FORMATS[name].use(exportable)}"


def test_the_documented_lines_for_weights_alone_read_a_resnet(tmp_path):
    exportable = exportable_resnet(18, "cifar", 1.0, 3)
    FORMATS["safetensors"].write(exportable, some_images(exportable), tmp_path)
    check_export(FORMATS["safetensors"], exportable, some_images(exportable), tmp_path)


def test_timms_config_states_scaling_and_size(tmp_path):
    exportable = exportable_timm("test_vit", 3, 32, mean=(0.5,), std=(0.25,))
    FORMATS["timm"].write(exportable, some_images(exportable), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["pretrained_cfg"]["mean"] == [0.5, 0.5, 0.5]
    assert config["pretrained_cfg"]["std"] == [0.25, 0.25, 0.25]
    assert config["pretrained_cfg"]["input_size"] == [3, 32, 32]
    assert config["model_args"] == dict(timm_arguments("test_vit", 3, 32))
    assert not config["pretrained_cfg"]["fixed_input_size"]


@pytest.mark.parametrize("keep_aspect", [True, False])
@pytest.mark.parametrize(("short_side_px", "size_px"), [(36, 32), (14, 9), (32, 32)])
def test_timms_own_transform_makes_the_images_of_the_card(short_side_px, size_px, keep_aspect, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    noise(77, 50).save("photo.jpg", quality=95)
    exportable = exportable_timm("test_vit", 3, size_px)
    crop = CentreCrop(short_side_px=short_side_px, size_px=size_px, keep_aspect=keep_aspect)
    encoder = TimmConfig(model="test_vit", mean=(0.0,), std=(1.0,))
    record = Record(run="a", encoder=encoder, head=None, image_shape=exportable.image_shape, crop=crop)
    exportable = replace(exportable, record=record)
    FORMATS["timm"].write(exportable, some_images(exportable), tmp_path)
    model = timm.create_model(f"local-dir:{tmp_path}", pretrained=True)
    transform = timm.data.create_transform(**timm.data.resolve_data_config({}, model=model))
    exec(reading(exportable), names := {})
    photo = transform(PIL.Image.open("photo.jpg").convert("RGB"))
    torch.testing.assert_close(photo[None], names["images"], rtol=0, atol=1e-6)


@pytest.mark.parametrize(("stem", "width"), [("cifar", 1.0), ("imagenet", 0.5), ("cifar", 0.125)])
def test_a_resnet_that_timm_cannot_build_is_refused_with_the_possible_formats(stem, width, tmp_path):
    exportable = exportable_resnet(18, stem, width, 3)
    with pytest.raises(
        ConfigError, match="format: found 'timm', .* allowed .*: safetensors, pt2, onnx, torchscript, hub$"
    ):
        FORMATS["timm"].write(exportable, some_images(exportable), tmp_path)


def test_a_googlenet_is_refused_by_timm(tmp_path):
    exportable = exportable_googlenet(3)
    with pytest.raises(
        ConfigError, match="format: found 'timm', .* allowed .*: safetensors, pt2, onnx, torchscript, hub$"
    ):
        FORMATS["timm"].write(exportable, some_images(exportable), tmp_path)


@pytest.mark.parametrize("name", ["safetensors", "timm"])
def test_a_bn_inception_is_refused_by_formats_without_the_forward_pass(name, tmp_path):
    exportable = exportable_bn_inception()
    images = some_images(exportable)
    with pytest.raises(
        ConfigError, match=f"format: found '{name}', but .* BN-Inception; allowed .*: pt2, onnx, torchscript, hub$"
    ):
        FORMATS[name].write(exportable, images, tmp_path)
        check_export(FORMATS[name], exportable, images, tmp_path)


def test_other_features_do_not_pass(tmp_path):
    exportable = exportable_resnet(18, "cifar", 0.125, 1)
    FORMATS["torchscript"].write(exportable, some_images(exportable), tmp_path)
    with torch.no_grad():
        exportable.encoder.backbone.layer4[1].bn2.bias += 0.01
    with pytest.raises(
        ConfigError, match="torchscript was written, but differs from the trained network by .* is allowed"
    ):
        check_export(FORMATS["torchscript"], exportable, some_images(exportable), tmp_path)


@pytest.mark.filterwarnings("error::FutureWarning")
def test_torchs_warning_of_its_deprecated_format_is_not_repeated(tmp_path):
    exportable = exportable_resnet(18, "cifar", 0.125, 1)
    record = Record(run="a", encoder=ResNetConfig(name="resnet18"), head=None, image_shape=exportable.image_shape)
    FORMATS["torchscript"].write(replace(exportable, record=record), some_images(exportable), tmp_path)
    (tmp_path / "README.md").touch()
    assert not checking.is_tied_to_cpu(tmp_path)
    assert read_record(tmp_path) == (tmp_path / "encoder.pt", record)


def test_nan_features_do_not_pass(tmp_path):
    exportable = exportable_resnet(18, "cifar", 0.125, 1)
    with torch.no_grad():
        exportable.encoder.backbone.layer4[1].bn2.bias.fill_(float("nan"))
    FORMATS["torchscript"].write(exportable, some_images(exportable), tmp_path)
    with pytest.raises(ConfigError, match="differs from the trained network by nan"):
        check_export(FORMATS["torchscript"], exportable, some_images(exportable), tmp_path)


def test_a_file_that_cannot_be_read_back_is_one_line(tmp_path):
    exportable = exportable_resnet(18, "cifar", 0.125, 1)
    (tmp_path / "encoder.safetensors").write_bytes(b"no weights")
    with pytest.raises(
        ConfigError, match="safetensors was written, but reading it back fails: .+; nothing is kept"
    ) as raised:
        check_export(FORMATS["safetensors"], exportable, some_images(exportable), tmp_path)
    assert "\n" not in str(raised.value)


def test_an_encoder_that_a_format_cannot_hold_is_one_line(tmp_path):
    class Unexportable(nn.Module):
        def forward(self, images):
            raise RuntimeError("no such operator\nand more")

    exportable = Exportable(
        encoder=Encoder(Unexportable(), 3).eval(),
        architecture=TimmModel(model="odd", arguments={}),
        image_shape=(3, 8, 8),
        dim=3,
    )
    with pytest.raises(
        ConfigError, match="does not support timm's odd: no such operator; try: safetensors, pt2, onnx, timm, hub$"
    ):
        FORMATS["torchscript"].write(exportable, some_images(exportable), tmp_path)


def test_a_missing_package_is_named_with_the_command_to_install_it(monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "onnxruntime" else found(name))
    require_packages(FORMATS["torchscript"])
    with pytest.raises(ConfigError, match=r"onnxruntime is not installed; install with: pip .* -e '.\[onnx\]'$"):
        require_packages(FORMATS["onnx"])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "timm" else found(name))
    with pytest.raises(ConfigError, match=r"timm is not installed; install with: pip install .* -e \.$"):
        require_packages(FORMATS["timm"])
