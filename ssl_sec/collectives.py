"""Communication between workers; the only module that imports torch.distributed.

The convention that makes W workers equal one: every worker differentiates its own copy of the global loss L, so
the sum over workers is W · L, and the average of the workers' parameter gradients is the gradient of L. Hence
the backward pass of a gather and of a sum is a sum over workers. Without a process group every function behaves as
with a single worker.
"""

import inspect
from collections.abc import Collection
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

T = TypeVar("T")


def world_size() -> int:
    """The number of workers; 1 without a process group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """This worker's number, from 0."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        ctx.num_rows = len(rows)
        gathered = rows.new_empty((world_size() * len(rows), *rows.shape[1:]))
        dist.all_gather_into_tensor(gathered, rows.contiguous())
        return gathered

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Tensor:
        grad = grad_outputs[0].contiguous()
        own = grad.new_empty((ctx.num_rows, *grad.shape[1:]))
        dist.reduce_scatter_tensor(own, grad)
        return own


class _SumOverWorkers(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        total = value.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Tensor:
        grad = grad_outputs[0].contiguous().clone()
        dist.all_reduce(grad)
        return grad


def gather_rows(rows: Tensor) -> Tensor:
    """The rows of all workers in the order of their ranks, with gradients.

    Args:
        rows: [n, ...], the same n on every worker.

    Returns:
        [world_size · n, ...], the same on every worker.
    """
    return rows if world_size() == 1 else _apply(_GatherRows, rows)


def gather_shares(own: Tensor, num_rows: int) -> Tensor:
    """All of `num_rows` rows, of which each worker gives its `own_rows`; the same on every worker."""
    if world_size() == 1:
        return own
    most = -(-num_rows // world_size())
    gathered = gather_rows(torch.cat([own, own.new_zeros(most - len(own), *own.shape[1:])]))
    lengths = [share.stop - share.start for share in (_rows_of(worker, num_rows) for worker in range(world_size()))]
    return torch.cat([rows[:length] for rows, length in zip(gathered.split(most), lengths, strict=True)])


def sum_over_workers(value: Tensor) -> Tensor:
    """The elementwise sum over workers, the same on every worker, with gradients."""
    return value if world_size() == 1 else _apply(_SumOverWorkers, value)


def max_over_workers(value: Tensor) -> Tensor:
    """The elementwise maximum over workers, the same on every worker, without gradients."""
    highest = value.detach().clone()
    if world_size() > 1:
        dist.all_reduce(highest, op=dist.ReduceOp.MAX)
    return highest


def of_first_worker(value: Tensor) -> Tensor:
    """Worker 0's value on every worker, without gradients; all of them give one of its shape and type."""
    first = value.detach().clone()
    if world_size() > 1:
        dist.broadcast(first, src=0)
    return first


def gather_objects(own: T) -> list[T]:
    """The plain values of all workers in the order of their ranks, the same on every worker; they are pickled."""
    gathered: list[Any] = [own] * world_size()
    if world_size() > 1:
        dist.all_gather_object(gathered, own)
    return gathered


def _apply(function: type[torch.autograd.Function], value: Tensor) -> Tensor:
    result = function.apply(value)
    assert isinstance(result, Tensor)
    return result


def own_rows(num_rows: int) -> slice:
    """This worker's range of `num_rows` rows; ranges differ by one row where the workers do not divide them."""
    return _rows_of(rank(), num_rows)


def _rows_of(worker: int, num_rows: int) -> slice:
    return slice(worker * num_rows // world_size(), (worker + 1) * num_rows // world_size())


def max_int_over_workers(value: int, device: torch.device) -> int:
    """The highest of the workers' numbers; every worker must call this."""
    return value if world_size() == 1 else int(max_over_workers(torch.tensor(value, device=device)).item())


def average_gradients(model: nn.Module, device: torch.device) -> nn.Module:
    """The model, with its gradients averaged over workers during the backward pass (DDP)."""
    if world_size() == 1 or not any(parameter.requires_grad for parameter in model.parameters()):
        return model
    # Buffers are updated from global statistics, so they are equal already. torch renamed the argument.
    renamed = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    options: dict[str, Any] = {"forward_sync_buffers" if renamed else "broadcast_buffers": False}
    device_ids = [device.index] if device.type == "cuda" else None
    return DistributedDataParallel(model, device_ids=device_ids, gradient_as_bucket_view=True, **options)


def average_parameter_gradients(module: nn.Module, own: Collection[nn.Parameter] = ()) -> None:
    """Averages the gradient of each of a module's parameters over workers as soon as it is complete.

    For a module with few parameters in addition to the model: no wrapper is needed, and nothing is overlapped.

    Args:
        module: the same on every worker, except for its `own` parameters.
        own: parameters that no other worker has; their gradients are already those of the sum of all workers' losses.
    """
    if world_size() > 1:
        own_ids = set(map(id, own))
        for parameter in module.parameters():
            hook = _divide_gradient if id(parameter) in own_ids else _average_gradient
            parameter.register_post_accumulate_grad_hook(hook)


def _average_gradient(parameter: Tensor) -> None:
    assert parameter.grad is not None
    dist.all_reduce(parameter.grad)
    _divide_gradient(parameter)


def _divide_gradient(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad /= world_size()
