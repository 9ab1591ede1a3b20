"""Any image model of timm by its name."""

from typing import Any

from torch import nn

from ssl_sec.errors import ConfigError, nearest


def timm_backbone(model: str, pretrained: bool, num_channels: int, image_size_px: int) -> tuple[nn.Module, int]:
    """A timm backbone without its classifier, and the width of its features.

    Args:
        model: a name that `timm.list_models()` knows.
        pretrained: whether timm downloads its weights.
        num_channels: of the images.
        image_size_px: of the images; models with a fixed input size are built for it.

    Raises:
        ConfigError: for a name that timm does not know, with its nearest ones.
    """
    backbone, _ = _create(model, pretrained, num_channels, image_size_px)
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
        raise ConfigError(f"encoder.pretrained: found True, but timm has no weights for {model!r}; allowed: false")
    config = timm.get_pretrained_cfg(model)
    assert config is not None
    return tuple(config.mean), tuple(config.std)


def _create(model: str, pretrained: bool, num_channels: int, image_size_px: int) -> tuple[nn.Module, dict[str, Any]]:
    import timm  # its registry takes a second to import, and most runs do not need it

    _check_known(model)
    arguments: dict[str, Any] = {"num_classes": 0, "in_chans": num_channels, "img_size": image_size_px}
    try:
        backbone = timm.create_model(model, pretrained=pretrained, **arguments)
    except TypeError:  # convolutional models take any size and no such argument
        del arguments["img_size"]
        backbone = timm.create_model(model, pretrained=pretrained, **arguments)
    assert isinstance(backbone, nn.Module)
    return backbone, arguments


def _check_known(model: str) -> None:
    import timm

    if not timm.is_model(model):
        raise ConfigError(f"encoder.model: timm knows no {model!r}; {nearest(model, timm.list_models())}")
