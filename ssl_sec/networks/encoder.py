"""A backbone with the pixel scaling that its weights expect, and the trained network: an encoder with its head."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ssl_sec.errors import ConfigError, DataError, first_line
from ssl_sec.modes import evaluating


class Encoder(nn.Module):
    """Images in [0, 1] -> features: backbone((images − mean) / std).

    The state dict has the backbone's values alone: weights are loaded into an encoder of the same mean and std.

    Args:
        backbone: [batch, channels, height, width] -> [batch, num_features].
        num_features: width of the backbone's output.
        mean: mean that is subtracted from the pixels, one value for each channel or one for all; 0 as in SimCLR.
        std: divisor of the pixels, likewise, > 0.
        num_channels: channels of the images; None for any that the backbone takes.
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self,
        backbone: nn.Module,
        num_features: int,
        mean: Sequence[float] = (0.0,),
        std: Sequence[float] = (1.0,),
        num_channels: int | None = None,
    ) -> None:
        super().__init__()
        self.backbone = backbone
        self.num_features = num_features
        self.num_channels = num_channels
        self.register_buffer("mean", torch.tensor(list(mean)).view(-1, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(list(std)).view(-1, 1, 1), persistent=False)

    def forward(self, images: Float[Tensor, "batch channels height width"]) -> Float[Tensor, "batch features"]:
        """Features of the images.

        Args:
            images: pixels in [0, 1].

        Raises:
            TypeError: they are whole numbers, as pixels from 0 to 255 are.
            DataError: they have other channels than the encoder was built for.
        """
        if not images.is_floating_point():
            raise TypeError(f"images: found {images.dtype}, must be floats in [0, 1], as images.float() / 255 is")
        expected = self.num_channels
        # A shape is no number while torch.jit records it.
        is_recorded = torch.jit.is_tracing()  # pyright: ignore[reportPrivateImportUsage]
        if expected is not None and not is_recorded and (images.dim() != 4 or images.shape[1] != expected):
            raise DataError(f"images: found shape {list(images.shape)}, must be [batch, {expected}, height, width]")
        return self.backbone((images - self.mean) / self.std)


class Embedded(NamedTuple):
    """The output of a network for some views.

    Attributes:
        features: the encoder's output.
        embeddings: the head's output.
    """

    features: Float[Tensor, "views features"]
    embeddings: Float[Tensor, "views dim"]


class Network(nn.Module):
    """An encoder and its head: features = encoder(views), embeddings = head(features).

    Views of several sizes are encoded size by size, and the head takes the features of all of them at once, as in SwAV
    (Caron et al. 2020): batch norm in the encoder has the statistics of one size, batch norm in the head those of all.

    Args:
        encoder: views in [0, 1] -> features.
        head: features -> raw embeddings.
        micro_batch_size: views that the encoder takes at once, ≥ 1; None for all of a size. The head takes all
            features.
    """

    def __init__(self, encoder: nn.Module, head: nn.Module, micro_batch_size: int | None = None) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = head
        self._in_micro_batches: Callable[[Tensor], Tensor] | None = None
        if micro_batch_size is not None:
            from ssl_sec.networks.micro_batches import in_micro_batches  # with torch._dynamo, which takes a second

            self._in_micro_batches = partial(in_micro_batches, encoder, size=micro_batch_size)

    def forward(
        self, views: Float[Tensor, "views channels height width"], *others: Float[Tensor, "_ channels _ _"]
    ) -> Embedded:
        """Features and raw embeddings of the views, those of the first size before those of the others.

        Args:
            views: views of the first size.
            others: views of other sizes, a batch for each.
        """
        encode = self._in_micro_batches or self.encoder
        of_each = [encode(each) for each in (views, *others)]
        features = torch.cat(of_each) if others else of_each[0]
        return Embedded(features, self.head(features))


@torch.no_grad()
def why_not_taken(network: nn.Module, num_channels: int, image_size_px: int) -> str | None:
    """The reason why a network cannot take images of a size; None if it can.

    Args:
        network: the network; it is tried on one black image, in evaluation mode.
        num_channels: channels of the images.
        image_size_px: side of the images.
    """
    weight = next(network.parameters(), torch.zeros(()))
    image = weight.new_zeros(1, num_channels, image_size_px, image_size_px)
    try:
        with evaluating(network):
            network(image)
    except (ArithmeticError, AssertionError, RuntimeError, ValueError) as error:
        return first_line(error)
    return None


def check_size(key: str, network: nn.Module, num_channels: int, image_size_px: int) -> None:
    """Raises a ConfigError that names the key if a network cannot take images; arguments as for `why_not_taken`."""
    reason = why_not_taken(network, num_channels, image_size_px)
    if reason is not None:
        allowed = "sizes that the encoder can take, or another encoder"
        raise ConfigError(f"{key}: found {image_size_px}, which the encoder cannot take ({reason}); allowed: {allowed}")
