"""What workers tell each other, by NCCL: on one GPU the functions that one worker never calls, and on two all of them.

On the CPU the same is rehearsed by gloo.
"""

import copy
import multiprocessing

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ssl_sec import global_batch_norm
from ssl_sec.collectives import (
    _GatherRows,
    _SumOverWorkers,
    average_gradients,
    gather_rows,
    highest_of_workers,
    own_rows,
    sum_over_workers,
)
from ssl_sec.global_batch_norm import GlobalBatchNorm, globalise_batch_norm

CHANNELS = 6
LAYOUTS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
# Of values, gradients and statistics, as a share of the largest.
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


@pytest.fixture
def alone(device, monkeypatch):
    """A group of one worker, whose batch norm sends its messages all the same."""
    dist.init_process_group(backend(device), store=dist.HashStore(), rank=0, world_size=1)
    monkeypatch.setattr(global_batch_norm, "world_size", lambda: 2)
    monkeypatch.setattr(global_batch_norm, "gather_rows", _GatherRows.apply)
    monkeypatch.setattr(global_batch_norm, "sum_over_workers", _SumOverWorkers.apply)
    yield
    dist.destroy_process_group()


def backend(device):
    return "nccl" if device.type == "cuda" else "gloo"


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_one_worker_gathers_its_own_rows(device, dtype):
    rows = torch.arange(6, device=device).view(2, 3).T.to(dtype)  # strided
    assert torch.equal(_GatherRows.apply(rows), rows)
    if dtype.is_floating_point:
        rows.requires_grad_()
        weights = torch.arange(6, device=device, dtype=dtype).view(2, 3).T
        (gradient,) = torch.autograd.grad((weights * _GatherRows.apply(rows)).sum(), rows)
        assert torch.equal(gradient, weights)


@pytest.mark.usefixtures("alone")
def test_one_worker_sums_its_own_value(device):
    value = torch.arange(6.0, device=device).view(2, 3).requires_grad_()
    total = _SumOverWorkers.apply(value)
    assert torch.equal(total, value) and total is not value
    (gradient,) = torch.autograd.grad((3 * total).sum(), value)
    assert torch.equal(gradient, torch.full_like(value, 3))


def images(device, dtype, layout, count=8):
    """Channels of different means and spreads, and weights of the outputs."""
    generator = torch.Generator().manual_seed(0)
    spread = torch.linspace(0.5, 3, CHANNELS).view(1, -1, 1, 1)
    values = spread * (torch.randn(count, CHANNELS, 5, 7, generator=generator) + spread)
    weights = torch.randn(count, CHANNELS, 5, 7, generator=generator)
    return [each.to(device, dtype).to(memory_format=layout) for each in (values, weights)]


def normalised(layer, values, weights):
    """Outputs, gradients and statistics after two steps, by name."""
    layer.train()
    for _ in range(2):
        layer.zero_grad()
        values = values.detach().requires_grad_()
        outputs = layer(values)
        (outputs.square() * weights).sum().backward()
    found = {"outputs": outputs.detach(), "of images": values.grad}
    found |= {f"of {name}": parameter.grad for name, parameter in layer.named_parameters()}
    return found | dict(layer.named_buffers())


def layer_of(kind, device):
    layer = kind(CHANNELS, momentum=0.3).to(device)
    with torch.no_grad():
        layer.weight.copy_(torch.linspace(0.5, 2, CHANNELS))
        layer.bias.copy_(torch.linspace(-1, 1, CHANNELS))
    return layer


def apart(found, expected):
    """How far values are apart, as a share of the largest."""
    found, expected = found.double(), expected.double()
    return ((found - expected).abs().max() / expected.abs().max()).item()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_global_batch_norm_is_that_of_the_whole_batch(device, dtype, layout):
    values, weights = images(device, dtype, LAYOUTS[layout])
    found = normalised(layer_of(GlobalBatchNorm, device), values, weights)
    expected = normalised(layer_of(nn.BatchNorm2d, device), values, weights)
    assert list(found) == list(expected)
    assert found["outputs"].dtype == found["of images"].dtype == dtype
    for name, value in expected.items():
        # Running statistics never see the 8 bits of bfloat16.
        bound = 1e-5 if name.startswith("running") else BOUNDS[dtype]
        assert apart(found[name], value) < bound, name


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_and_that_of_torchs_synchronised_one(gpu, dtype, layout, request):
    request.getfixturevalue("alone_on_gpu")
    values, weights = images(gpu, dtype, LAYOUTS[layout])
    found = normalised(layer_of(GlobalBatchNorm, gpu), values, weights)
    expected = normalised(layer_of(nn.SyncBatchNorm, gpu), values, weights)
    for name, value in expected.items():
        assert apart(found[name], value) < (1e-5 if name.startswith("running") else BOUNDS[dtype]), name


