"""Any image model of timm by its name."""

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
    import timm  # its registry takes a second to import, and most runs do without

    if not timm.is_model(model):
        raise ConfigError(f"encoder.model: timm knows no {model!r}; {nearest(model, timm.list_models())}")
    options = {"pretrained": pretrained, "in_chans": num_channels, "num_classes": 0}
    try:
        backbone = timm.create_model(model, img_size=image_size_px, **options)
    except TypeError:  # convolutional models take any size and no such argument
        backbone = timm.create_model(model, **options)
    assert isinstance(backbone, nn.Module)
    # Some models, MobileNetV3 among them, widen their features once more after the pooling.
    return backbone, int(backbone.head_hidden_size)  # pyright: ignore[reportArgumentType]
