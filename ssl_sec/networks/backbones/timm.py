"""Any image model of timm by its name, for images of any size that it can take.

Vision transformers (ViT, DeiT, EVA) are built to interpolate their position embeddings to the size of each batch, and
to pad images whose side is no multiple of their patches; Swin to cut windows from maps of any size. Convolutional
networks take any size as they are. The others, such as BEiT and CaiT, take images of the size that they are built for.
"""

import copy
import itertools
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._python_dispatch import TorchDispatchMode

from ssl_sec.errors import ConfigError, MissingDataError, first_line, nearest
from ssl_sec.networks.encoder import why_not_taken

# What timm's models and layers call the rates of their dropout and stochastic depth.
_RATES = ("drop_rate", "drop_path_rate", "drop_prob", "attn_drop", "drop")


def timm_backbone(model: str, pretrained: bool, num_channels: int, image_size_px: int) -> tuple[nn.Module, int]:
    """A timm backbone without its classifier, dropout and stochastic depth, and the width of its features.

    Args:
        model: a name that `timm.list_models()` knows.
        pretrained: whether timm downloads its weights.
        num_channels: channels of the images.
        image_size_px: side of the images that the model is built for; it also takes other sizes if it can.

    Raises:
        ConfigError: for a name that timm does not know, with its nearest ones; for a size that the model cannot take.
        MissingDataError: its weights cannot be downloaded.
    """
    backbone, _ = _create(model, pretrained, num_channels, image_size_px)
    _stop_random_layers(backbone)
    if _draws(backbone, num_channels, image_size_px):
        raise ConfigError(
            f"encoder.model: found {model!r}, which draws random numbers in training; must be a model without, since a "
            "run does not depend on the number of workers"
        )
    # Some models, MobileNetV3 among them, widen their features once more after the pooling.
    return backbone, int(backbone.head_hidden_size)  # pyright: ignore[reportArgumentType]


def timm_arguments(model: str, num_channels: int, image_size_px: int) -> dict[str, Any]:
    """The arguments of `timm.create_model` that build the same backbone; arguments as for `timm_backbone`."""
    return _create(model, False, num_channels, image_size_px)[1]


def timm_scaling(model: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation, by channel, of the pixels in [0, 1] that timm's weights of a model expect.

    Raises:
        ConfigError: for a name that timm does not know, or has no weights for.
    """
    import timm

    _check_known(model)
    if not timm.is_model_pretrained(model):
        raise ConfigError(f"encoder.pretrained: found true, but timm has no weights for {model!r}; allowed: false")
    config = timm.get_pretrained_cfg(model)
    assert config is not None
    return tuple(config.mean), tuple(config.std)


def resampled_weights(backbone: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Converts the weights of a timm model that was built for images of another size to this model's size.

    Position embeddings and tables of relative positions are interpolated, as timm does for its own weights.

    Args:
        backbone: a timm model; weights of other modules are returned as they are.
        tensors: the model's state dict, for any image size.
    """
    wanted = backbone.state_dict()
    others = {name for name, value in tensors.items() if name in wanted and value.shape != wanted[name].shape}
    module = sys.modules[type(backbone).__module__]
    if not others or not module.__name__.startswith("timm.") or not hasattr(module, "checkpoint_filter_fn"):
        return dict(tensors)
    try:
        filtered = module.checkpoint_filter_fn(dict(tensors), backbone)
    except (AssertionError, IndexError, RuntimeError, ValueError):  # weights of another model; the caller says which
        return dict(tensors)
    # A filter of another patch size is interpolated, too, but makes another model.
    fitting = {
        name: filtered[name]
        for name in others & filtered.keys()
        if filtered[name].shape == wanted[name].shape and not name.startswith("patch_embed.")
    }
    return {**tensors, **fitting}


def _stop_random_layers(backbone: nn.Module) -> None:
    """Sets the rates of dropout and stochastic depth to 0: torch's draws are no function of the seed and the step."""
    for module in backbone.modules():
        if isinstance(module, _DropoutNd):
            module.p = 0.0
        for name in _RATES:
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)


class _Draws(TorchDispatchMode):
    """Notes whether random numbers are drawn."""

    found = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found = self.found or torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def _draws(backbone: nn.Module, num_channels: int, image_size_px: int) -> bool:
    """Whether a forward pass in training draws random numbers; it is made without values, on torch's meta device.

    False of a model that needs values.
    """
    tensors = itertools.chain(backbone.parameters(), backbone.buffers())
    # A copy that holds no values: torch.func.functional_call leaves its own in modules that have two names.
    without_values = copy.deepcopy(backbone, {id(value): torch.empty_like(value, device="meta") for value in tensors})
    images = torch.empty(2, num_channels, image_size_px, image_size_px, device="meta")
    with _Draws() as draws, suppress(NotImplementedError, RuntimeError):
        without_values(images)
    return draws.found


# Arguments that let a model take other sizes than the one that it is built for, by kind of model.
_ANY_SIZE: tuple[dict[str, bool], ...] = (
    {"dynamic_img_size": True, "dynamic_img_pad": True},  # vision transformers
    {"strict_img_size": False},  # Swin
    {},
)


def _create(model: str, pretrained: bool, num_channels: int, image_size_px: int) -> tuple[nn.Module, dict[str, Any]]:
    import timm  # its registry takes a second to import, and most runs do not need it

    _check_known(model)
    common: dict[str, Any] = {"num_classes": 0, "in_chans": num_channels}
    # Convolutional networks have no fixed size.
    for sizes in (*({"img_size": image_size_px, **any_size} for any_size in _ANY_SIZE), {}):
        arguments = {**common, **sizes}
        try:
            if "dynamic_img_pad" in arguments:
                arguments["img_size"] = _padded(model, arguments)
            backbone = timm.create_model(model, pretrained=pretrained, **arguments)
        except TypeError:  # an argument that this kind of model does not have
            if not sizes:
                raise
            continue
        except (ArithmeticError, AssertionError, RuntimeError) as error:
            raise _refusal(model, image_size_px, first_line(error)) from error
        except OSError as error:  # of the Hub's client, without a network among others
            raise MissingDataError(
                f"encoder.pretrained: the weights of {model!r} cannot be downloaded: {first_line(error)}; without a "
                "network, give the file, downloaded elsewhere, as encoder.weights=<file>, too"
            ) from error
        assert isinstance(backbone, nn.Module)
        reason = why_not_taken(backbone, num_channels, image_size_px)
        if reason is not None:
            raise _refusal(model, image_size_px, reason)
        return backbone, arguments
    raise AssertionError("the last arguments fit every model")


def _padded(model: str, arguments: Mapping[str, Any]) -> int:
    """The size in pixels to which images are padded, a multiple of the patch size."""
    import timm

    with torch.device("meta"):
        without_weights = timm.create_model(model, **{**arguments, "img_size": None})
    patch_size_px = without_weights.get_submodule("patch_embed").patch_size[0]  # pyright: ignore[reportIndexIssue]
    return -(-arguments["img_size"] // patch_size_px) * patch_size_px


def _refusal(model: str, image_size_px: int, reason: str) -> ConfigError:
    return ConfigError(
        f"encoder.model: found {model!r}, which cannot take images of {image_size_px} pixels ({reason}); allowed: "
        "images of another size, as data.image_size_px=224, or another model: ViTs and most convolutional networks "
        "take any size"
    )


def _check_known(model: str) -> None:
    import timm

    if not timm.is_model(model):
        raise ConfigError(f"encoder.model: timm knows no {model!r}; {nearest(model, timm.list_models())}")
