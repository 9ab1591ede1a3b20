"""Class templates sharded over the workers: each holds the templates of a range of classes.

No worker then holds all templates, their gradients or their optimiser's state, nor the logits of all classes. The
result is exact: every worker gathers the rows of all workers anyway, and the workers combine a few numbers per row.
The initial values of a template depend on its class and the run's seed alone, not on the worker that holds it.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ssl_sec.collectives import max_over_workers, own_rows, sum_over_workers
from ssl_sec.losses.templates.base import TemplateLoss
from ssl_sec.seeding import derived_seed

# Classes whose templates are drawn together.
_BLOCK = 1024


@dataclass(frozen=True, slots=True)
class HeldRows:
    """Rows of a tensor that is sharded over the workers.

    Attributes:
        rows: rows that this worker holds.
        first: index of the first of these rows among all rows.
    """

    rows: Tensor
    first: int


class _Workers:
    """Combines the workers' values of each row."""

    def sum(self, values: Float[Tensor, "batch *more"]) -> Float[Tensor, "batch *more"]:
        return sum_over_workers(values)

    def highest(self, values: Float[Tensor, " batch"]) -> Float[Tensor, " batch"]:
        return max_over_workers(values)


def draw_templates(loss: nn.Module, seed: int, sharded: bool) -> None:
    """Draws the initial templates of a loss: all of them, or those of this worker's range of classes.

    Args:
        loss: changed in place: its template losses get their templates, and buffers on the meta device move to the CPU.
        seed: the run's seed.
        sharded: whether the workers hold different classes.
    """
    for module in template_losses(loss):
        held = own_rows(module.num_classes) if sharded else slice(0, module.num_classes)
        assert held.start < held.stop, "each worker holds a template"
        module.hold(held.start, _draw(held, module, seed), _Workers() if sharded else None)
    for module in loss.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_meta:
                module.register_buffer(name, torch.zeros(buffer.shape, dtype=buffer.dtype))


def template_losses(loss: nn.Module) -> Iterator[TemplateLoss]:
    """The losses with templates among the parts of a loss."""
    return (module for module in loss.modules() if isinstance(module, TemplateLoss))


def held_templates(loss: nn.Module) -> dict[str, HeldRows]:
    """The templates that no other worker has, by their names in the loss's state."""
    return {
        f"{name}.weight" if name else "weight": HeldRows(module.weight, module.first_class)
        for name, module in loss.named_modules()
        if isinstance(module, TemplateLoss) and not module.holds_all
    }


def _draw(held: slice, loss: TemplateLoss, seed: int) -> Float[Tensor, "held dim"]:
    dim = loss.weight.shape[1]
    templates = torch.empty(held.stop - held.start, dim)
    for block in range(held.start // _BLOCK, -(-held.stop // _BLOCK)):
        generator = torch.Generator().manual_seed(derived_seed(seed, "templates", block))
        drawn = torch.empty(_BLOCK, dim).normal_(std=loss.initial_std, generator=generator)
        first, last = max(held.start, block * _BLOCK), min(held.stop, (block + 1) * _BLOCK)
        templates[first - held.start : last - held.start] = drawn[first - block * _BLOCK : last - block * _BLOCK]
    return templates
