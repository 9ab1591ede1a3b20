"""Features of a batch that are computed part by part, with the gradient of the whole batch (Gao et al. 2021).

The encoder computes the features of one micro-batch after the other and keeps no activations; the loss compares all of
them; in the backward pass each micro-batch is computed a second time with its gradient. Memory then grows with the size
of a micro-batch instead of with that of the batch, for one more forward pass. This needs an encoder whose features of
an image do not depend on the other images: one without batch norm, or with a frozen one.
"""

from typing import no_type_check

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]
from torch.utils.checkpoint import checkpoint

from ssl_sec.networks.frozen import FrozenBatchNorm
from ssl_sec.rules import check


@torch.compiler.disable(recursive=False, reason="the encoder is compiled for a micro-batch, not for the batch")
@no_type_check  # the tests' type checks would add a frame, which alone would be left out
def in_micro_batches(
    encoder: nn.Module, views: Float[Tensor, "views channels height width"], size: int
) -> Float[Tensor, "views features"]:
    """The features of views, computed `size` views at a time, and again in the backward pass.

    Args:
        encoder: views -> features, each of its view alone.
        views: the batch.
        size: views of a micro-batch, ≥ 1.
    """
    if len(views) <= size:
        return encoder(views)
    return torch.cat([checkpoint(encoder, part, use_reentrant=False) for part in views.split(size)])


def require_separable(encoder: nn.Module, size: int) -> None:
    """Refuses micro-batches of an encoder whose features of a view depend on the other views.

    Raises:
        ConfigError: it has batch norm that is not frozen.
    """
    layers = encoder.modules()
    has_batch_norm = any(isinstance(each, _BatchNorm) and not isinstance(each, FrozenBatchNorm) for each in layers)
    allowed = "null: the encoder has batch norm, which needs the whole batch; runtime.recompute=true saves memory, too"
    check(not has_batch_norm, "runtime.micro_batch_size", size, allowed)
