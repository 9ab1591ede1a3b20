"""Clipping of the gradient g of all weights together by its norm (Pascanu et al. 2013, Algorithm 1).

    g ← min(1, c / ‖g‖) · g

A weight that several workers have counts once in ‖g‖.
"""

from collections.abc import Collection, Sequence

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

from ssl_sec.collectives import gather_rows


@torch.no_grad()
def clip_gradients(optimiser: Optimizer, clip_norm: float, held: Collection[Tensor] = ()) -> Float[Tensor, ""]:
    """Scales the gradients of all parameters of an optimiser to a norm of at most `clip_norm`; every worker calls it.

    The host does not wait for the device.

    Args:
        optimiser: its parameters have the gradients of the global loss, equal on every worker but for the held ones.
        clip_norm: c > 0.
        held: parameters that no other worker has.

    Returns:
        ‖g‖, before the gradients are scaled. If it is not finite, they all become NaN.
    """
    parameters: list[Tensor] = [parameter for group in optimiser.param_groups for parameter in group["params"]]
    held_ids = set(map(id, held))
    common = [parameter for parameter in parameters if id(parameter) not in held_ids]
    norms = [_norm(common).reshape(1)] if common else []
    if held:
        norms.append(gather_rows(_norm([*held]).reshape(1)))
    norm = torch.linalg.vector_norm(torch.cat(norms))
    # Gradients that are finite, but whose norm is not, would else become 0, and training would go on without a word.
    clip_grads_with_norm_(parameters, clip_norm, norm.masked_fill(norm.isinf(), torch.nan))
    return norm


def _norm(parameters: Sequence[Tensor]) -> Float[Tensor, ""]:
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return get_total_norm(gradients) if gradients else parameters[0].new_zeros(())
