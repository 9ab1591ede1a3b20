"""What each row has with all classes, a tile of classes at a time.

The matrix of all rows and classes is never whole: a tile of it is reduced to a number a row and forgotten, and made
again in the backward pass. Memory is that of the rows, the templates and their gradients.
"""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor

# Rows times classes of what is made at once: 64 MiB in float32.
TILE_ENTRIES = 1 << 24
# Beyond it: a tile that stays in the cache is reduced faster than a larger one, while a GPU wants few launches.
CPU_TILE_CLASSES = 2048

Part = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def over_tiles(
    part: Part,
    rows: Float[Tensor, "rows dim"],
    templates: Float[Tensor, "classes dim"],
    places: Int64[Tensor, " rows"],
    own: Float[Tensor, " rows"],
) -> Float[Tensor, "rows tiles"]:
    """What `part` makes of each tile of classes.

    Args:
        part: (rows, templates of a tile, places in the tile, own) -> a number a row; a function of these alone.
        rows: what stands for the rows.
        templates: one a class.
        places: which class is the row's own; none of these if it is out of their range.
        own: similarity of each row to its own template.
    """
    step = max(1, TILE_ENTRIES // max(1, len(rows)))
    if len(templates) <= step:
        return part(rows, templates, places, own).unsqueeze(1)
    if not rows.is_cuda:
        step = min(step, CPU_TILE_CLASSES)
    result = _OverTiles.apply(part, step, rows, templates, places, own)
    assert isinstance(result, Tensor)
    return result


def without_own(
    values: Float[Tensor, "rows some"], places: Int64[Tensor, " rows"], instead: float
) -> Float[Tensor, "rows some"]:
    """The values, with `instead` in each row's own place, where that is among these."""
    column = places.clamp(0, values.shape[1] - 1).unsqueeze(1)
    kept = torch.where(places.unsqueeze(1) == column, instead, values.gather(1, column))
    return values.scatter(1, column, kept)


class _OverTiles(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, part: Part, step: int, rows: Tensor, templates: Tensor, places: Tensor, own: Tensor
    ) -> Tensor:
        ctx.part, ctx.step = part, step
        ctx.save_for_backward(rows, templates, places, own)
        starts = range(0, len(templates), step)
        return torch.stack([part(rows, templates[a : a + step], places - a, own) for a in starts], 1)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        rows, templates, places, own = ctx.saved_tensors
        grad_rows, grad_own = torch.zeros_like(rows), torch.zeros_like(own)
        grad_templates = torch.empty_like(templates)
        for number, start in enumerate(range(0, len(templates), ctx.step)):
            tile = slice(start, start + ctx.step)
            inputs = [value.detach().requires_grad_() for value in (rows, templates[tile], own)]
            with torch.enable_grad():
                values = ctx.part(inputs[0], inputs[1], places - start, inputs[2])
            of_rows, of_templates, of_own = torch.autograd.grad(
                values, inputs, grad_outputs[0][:, number], allow_unused=True, materialize_grads=True
            )
            grad_rows += of_rows
            grad_own += of_own
            grad_templates[tile] = of_templates
        return None, None, grad_rows, grad_templates, None, grad_own
