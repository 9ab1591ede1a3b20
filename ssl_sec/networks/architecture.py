"""The backbones in other libraries: the Python code that builds each of them, with the key names of our weights."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

from ssl_sec.errors import ConfigError
from ssl_sec.networks.backbones.resnet import LAYERS, stage_planes


@runtime_checkable
class Architecture(Protocol):
    """A backbone, as other libraries build it."""

    @property
    def title(self) -> str:
        """Human-readable name."""
        ...

    @property
    def imports(self) -> str:
        """The module whose names `building` uses."""
        ...

    def building(self) -> str:
        """Python code that builds `encoder`, a network from images to features, with our key names and without weights.

        Raises:
            ConfigError: if no other library builds it.
        """
        ...

    def timm_model(self) -> tuple[str, Mapping[str, Any]]:
        """The name and the arguments with which `timm.create_model` builds it.

        Raises:
            ConfigError: if timm has no such model.
        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class TorchvisionResNet:
    """A ResNet of `ssl_sec.networks.backbones.resnet`, as torchvision builds it.

    Attributes:
        depth: 18, 34 or 50.
        stem: "cifar" or "imagenet".
        width: width of every layer, as a multiple of torchvision's.
        num_channels: channels of the images.
    """

    depth: int
    stem: Literal["cifar", "imagenet"]
    width: float
    num_channels: int

    @property
    def title(self) -> str:
        """Human-readable name."""
        stem = "CIFAR stem (3x3, no pooling)" if self.stem == "cifar" else "ImageNet stem"
        return f"ResNet-{self.depth}, {stem}, width {self.width:g}"

    @property
    def imports(self) -> str:
        """The module whose names `building` uses."""
        return "torchvision"

    def building(self) -> str:
        """Python code that changes torchvision's ResNet: its first and last layers and, in a subclass, its width."""
        planes = stage_planes(self.width)
        lines: list[str] = []
        if planes == stage_planes(1.0):
            lines.append(f"encoder = torchvision.models.resnet{self.depth}()")
        else:
            block, repeats = LAYERS[self.depth]
            by_stage = dict(zip(stage_planes(1.0), planes, strict=True))
            lines += [
                "class OtherWidth(torchvision.models.ResNet):",
                "    def _make_layer(self, block, planes, blocks, **options):",
                f"        self.inplanes = {planes[0]} if planes == 64 else self.inplanes",
                f"        return super()._make_layer(block, {by_stage}[planes], blocks, **options)",
                "",
                f"encoder = OtherWidth(torchvision.models.resnet.{block}, {list(repeats)})",
                f"encoder.bn1 = torch.nn.BatchNorm2d({planes[0]})",
            ]
        if self.stem == "cifar":
            lines.append(f"encoder.conv1 = torch.nn.Conv2d({self.num_channels}, {planes[0]}, 3, padding=1, bias=False)")
            lines.append("encoder.maxpool = torch.nn.Identity()")
        elif (self.num_channels, planes[0]) != (3, 64):
            lines.append(
                f"encoder.conv1 = torch.nn.Conv2d({self.num_channels}, {planes[0]}, 7, stride=2, padding=3, bias=False)"
            )
        return "\n".join([*lines, "encoder.fc = torch.nn.Identity()"])

    def timm_model(self) -> tuple[str, Mapping[str, Any]]:
        """The ResNet of timm of the same depth; its stem is always a 7x7 convolution of 64 channels and stride 2.

        Raises:
            ConfigError: for another stem or width.
        """
        if self.stem == "cifar" or stage_planes(self.width) != stage_planes(1.0):
            raise ConfigError(
                f"format: found 'timm', but timm can build no {self.title}: its ResNets have the ImageNet stem with 64 "
                "channels; allowed for this encoder: safetensors, pt2, onnx, torchscript, hub"
            )
        return f"resnet{self.depth}", {"num_classes": 0, "in_chans": self.num_channels}


@dataclass(frozen=True, kw_only=True, slots=True)
class TorchvisionGoogLeNet:
    """A GoogLeNet of `ssl_sec.networks.backbones.googlenet`, as torchvision builds it.

    Attributes:
        num_channels: channels of the images.
    """

    num_channels: int

    @property
    def title(self) -> str:
        """Human-readable name."""
        return "GoogLeNet with batch norm"

    @property
    def imports(self) -> str:
        """The module whose names `building` uses."""
        return "torchvision"

    def building(self) -> str:
        """Python code that removes the classifiers of torchvision's GoogLeNet, and adapts its first layer."""
        lines = ["encoder = torchvision.models.GoogLeNet(aux_logits=False, init_weights=False)"]
        if self.num_channels != 3:
            lines.append(
                f"encoder.conv1.conv = torch.nn.Conv2d({self.num_channels}, 64, 7, stride=2, padding=3, bias=False)"
            )
        return "\n".join([*lines, "encoder.fc = torch.nn.Identity()"])

    def timm_model(self) -> tuple[str, Mapping[str, Any]]:
        """Raises an error: timm has no such model.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            f"format: found 'timm', but timm has no {self.title}; "
            "allowed for this encoder: safetensors, pt2, onnx, torchscript, hub"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnNetwork:
    """A network that no installed library builds; its export needs a format that includes the forward pass.

    Attributes:
        title: human-readable name.
    """

    title: str

    @property
    def imports(self) -> str:
        """torch: no other module is needed."""
        return "torch"

    def building(self) -> str:
        """Raises an error: no other library builds it.

        Raises:
            ConfigError: always.
        """
        raise self._refusal("safetensors", "neither torchvision nor timm can build")

    def timm_model(self) -> tuple[str, Mapping[str, Any]]:
        """Raises an error: timm has no such model.

        Raises:
            ConfigError: always.
        """
        raise self._refusal("timm", "timm cannot build")

    def _refusal(self, name: str, reason: str) -> ConfigError:
        return ConfigError(
            f"format: found {name!r}, but {reason} {self.title}; allowed for this encoder: pt2, onnx, torchscript, hub"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class TimmModel:
    """A model of timm.

    Attributes:
        model: timm's name of the model; a tag of pretrained weights after a point is dropped.
        arguments: other arguments of `timm.create_model`.
    """

    model: str
    arguments: Mapping[str, Any]

    @property
    def title(self) -> str:
        """Human-readable name."""
        return f"timm's {self._name}"

    @property
    def imports(self) -> str:
        """The module whose names `building` uses."""
        return "timm"

    @property
    def _name(self) -> str:
        return self.model.partition(".")[0]

    def building(self) -> str:
        """Python code that calls `timm.create_model`."""
        arguments = ", ".join(f"{key}={value!r}" for key, value in self.arguments.items())
        return f"encoder = timm.create_model({self._name!r}, {arguments})"

    def timm_model(self) -> tuple[str, Mapping[str, Any]]:
        """The model's name and arguments."""
        return self._name, self.arguments
