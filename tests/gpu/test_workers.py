"""Communication by NCCL: on one GPU the functions that a single worker never calls, and on two all of them.

On the CPU the same is rehearsed by gloo.
"""

import multiprocessing

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules._functions import SyncBatchNorm

from ssl_sec.collectives import (
    _GatherRows,
    _SumOverWorkers,
    average_gradients,
    gather_rows,
    max_int_over_workers,
    own_rows,
    sum_over_workers,
)
from ssl_sec.networks import batch_norm as global_batch_norm
from ssl_sec.networks.batch_norm import GlobalBatchNorm, globalise_batch_norm

CHANNELS = 6
LAYOUTS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
# Of values, gradients and statistics, as a share of the largest.
BOUNDS = {torch.float32: 1e-4, torch.bfloat16: 2e-2}


@pytest.fixture
def alone(device, monkeypatch):
    """A group of one worker, whose batch norm communicates nevertheless."""
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


class TorchsOwn(nn.BatchNorm2d):
    """With what torch.nn.SyncBatchNorm calls where there are several workers."""

    def forward(self, values):
        running = self.running_mean, self.running_var
        return SyncBatchNorm.apply(
            values, self.weight, self.bias, *running, self.eps, self.momentum, dist.group.WORLD, 1
        )


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_global_batch_norm_is_torchs_sync_batch_norm(device, dtype, layout):
    if device.type == "cpu":
        pytest.skip("torch's needs a GPU")
    values, weights = images(device, dtype, LAYOUTS[layout])
    found = normalised(layer_of(GlobalBatchNorm, device), values, weights)
    expected = normalised(layer_of(TorchsOwn, device), values, weights)
    for name, value in expected.items():
        if name != "num_batches_tracked":  # which the module counts, not the function
            assert apart(found[name], value) < (1e-5 if name.startswith("running") else BOUNDS[dtype]), name


def network():
    torch.manual_seed(0)
    layers = nn.Conv2d(3, CHANNELS, 3, bias=False), nn.BatchNorm2d(CHANNELS), nn.ReLU(), nn.Flatten()
    return nn.Sequential(*layers, nn.Linear(CHANNELS * 9, 4)).double()


def objective_of(embeddings):
    """Of all rows of the global batch, so that none is like another."""
    similarities = embeddings @ embeddings.T
    return similarities.logsumexp(1).mean() + embeddings.square().mean()


def batch(device):
    return torch.randn(8, 3, 5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).to(device)


def one_of_two(rank, kind, rendezvous):
    """What a worker gathers and computes, as arrays, in its own process."""
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(backend(device), f"file://{rendezvous}", world_size=2, rank=rank)
    try:
        model = average_gradients(globalise_batch_norm(network()).to(device).train(), device)
        own = own_rows(8)
        value = objective_of(gather_rows(model(batch(device)[own])))
        value.backward()
        mine = torch.full((2,), 1.0 + rank, device=device, requires_grad=True)
        total = sum_over_workers(mine)
        (of_mine,) = torch.autograd.grad((total * (1.0 + rank)).sum(), mine)
        found = {
            "value": value,
            "rows": torch.arange(8)[own],
            "sum": total,
            "of the sum": of_mine,
            "highest": torch.tensor(max_int_over_workers(5 + rank, device)),
        }
        found |= {f"of {name}": parameter.grad for name, parameter in model.module.named_parameters()}
        found |= dict(model.module.named_buffers())
        return {name: each.detach().cpu().numpy() for name, each in found.items()}
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.distributed
def test_two_workers_equal_one(device, tmp_path):
    if device.type == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    with multiprocessing.get_context("spawn").Pool(2) as processes:
        arguments = [(rank, device.type, str(tmp_path / "rendezvous")) for rank in range(2)]
        workers = processes.starmap(one_of_two, arguments, chunksize=1)
    whole = network().to(device).train()
    value = objective_of(whole(batch(device)))
    value.backward()
    expected = {"value": value, "sum": torch.full((2,), 3.0), "of the sum": torch.full((2,), 3.0)}
    expected |= {"highest": torch.tensor(6)}
    expected |= {f"of {name}": parameter.grad for name, parameter in whole.named_parameters()}
    expected |= dict(whole.named_buffers())
    assert [row for worker in workers for row in worker["rows"]] == list(range(8))
    for worker in workers:
        assert set(worker) == {*expected, "rows"}
        for name, each in expected.items():
            torch.testing.assert_close(torch.from_numpy(worker[name]), each.detach().cpu(), rtol=1e-8, atol=1e-10)
