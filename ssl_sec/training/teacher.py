"""A teacher: a copy of the network that follows it and is not trained itself (mean teacher; BYOL, MoCo v3)."""

import copy

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ssl_sec.networks.dropout import GlobalDropout
from ssl_sec.training.schedules import Schedule


class Teacher(nn.Module):
    """ξ ← m_t ξ + (1 − m_t) θ after each step (BYOL, Grill et al. 2020, Eq. 1).

    The teacher has no dropout. Batch norm normalises its views by their own global batch, as it does the network's; the
    running statistics are the teacher's own.

    Args:
        network: views -> features and embeddings; the teacher starts from its weights θ.
        momentum: momentum m_t by global step, in [0, 1].
    """

    def __init__(self, network: nn.Module, momentum: Schedule) -> None:
        super().__init__()
        self.network = copy.deepcopy(network).requires_grad_(False)
        for layer in self.network.modules():
            if isinstance(layer, GlobalDropout):
                layer.probability = 0.0
        self.momentum = momentum
        # In a list, so that the network's state is not part of the teacher's.
        self._followed = [network]

    @torch.no_grad()
    def forward(self, *views: Float[Tensor, "_ channels _ _"]) -> Float[Tensor, "views dim"]:
        """Raw embeddings of the views, of all sizes."""
        return self.network(*views).embeddings

    @torch.no_grad()
    def follow(self, step: int) -> None:
        """Moves the teacher toward the network, after the network has taken the 0-based global step."""
        share = 1 - self.momentum(step)
        for own, followed in zip(self.network.parameters(), self._followed[0].parameters(), strict=True):
            own.lerp_(followed.to(own.dtype), share)
