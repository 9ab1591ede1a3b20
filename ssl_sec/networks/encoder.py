"""A backbone with the pixel scaling that its weights expect."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn


class Encoder(nn.Module):
    """Images in [0, 1] -> features: backbone((images − mean) / std).

    Args:
        backbone: [batch, channels, height, width] -> [batch, num_features].
        num_features: width of its output.
        mean: one value for each channel, or one for all; 0 leaves the pixels as they are, as SimCLR does.
        std: likewise, > 0.
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self,
        backbone: nn.Module,
        num_features: int,
        mean: Sequence[float] = (0.0,),
        std: Sequence[float] = (1.0,),
    ) -> None:
        super().__init__()
        self.backbone = backbone
        self.num_features = num_features
        self.register_buffer("mean", torch.tensor(list(mean)).view(-1, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(list(std)).view(-1, 1, 1), persistent=False)

    def forward(self, images: Float[Tensor, "batch channels height width"]) -> Float[Tensor, "batch features"]:
        """Features of the images.

        Args:
            images: pixels in [0, 1].
        """
        return self.backbone((images - self.mean) / self.std)
