import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ssl_sec.collectives import (
    average_gradients,
    average_parameter_gradients,
    gather_objects,
    gather_rows,
    max_int_over_workers,
    own_rows,
    rank,
    sum_over_workers,
    world_size,
)
from tests.workers import on_workers

CPU = torch.device("cpu")


def test_without_a_process_group_there_is_one_worker():
    rows = torch.ones(3, 2)
    assert (world_size(), rank()) == (1, 0)
    assert gather_rows(rows) is rows
    assert gather_objects({"any": 3}) == [{"any": 3}]
    assert sum_over_workers(rows) is rows
    assert own_rows(7) == slice(0, 7)
    assert max_int_over_workers(3, CPU) == 3
    model = nn.Linear(2, 2)
    assert average_gradients(model, CPU) is model
    average_parameter_gradients(model)
    model(torch.ones(1, 2)).sum().backward()
    assert model.bias.grad.tolist() == [1, 1]


def everything():
    """The result of each function on this worker, for rows that name their worker."""
    mine = torch.full((2, 3), float(rank()), dtype=torch.float64)
    mine[1] += 0.5
    strided = torch.stack([mine, mine], dim=2)[..., 0]
    return {
        "rank": rank(),
        "world_size": world_size(),
        "gathered": gather_rows(mine).tolist(),
        "strided": gather_rows(strided).tolist(),
        "labels": gather_rows(torch.tensor([10 * rank(), 10 * rank() + 1])).tolist(),
        "sum": sum_over_workers(mine).tolist(),
        "own": own_rows(8),
        "highest": max_int_over_workers(rank() + 1, CPU),
        "objects": gather_objects({"rank": rank(), "bytes": bytes(rank())}),  # of different sizes
        "mine": mine.tolist(),
    }


@pytest.mark.distributed
@pytest.mark.parametrize("num_workers", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_all_workers_gather_all_rows_in_rank_order(tmp_path, num_workers):
    results = on_workers(num_workers, tmp_path, everything)
    expected = [[r + extra] * 3 for r in range(num_workers) for extra in (0.0, 0.5)]
    total = sum(range(num_workers))
    share = 8 // num_workers
    for number, answers in enumerate(results):
        assert (answers["rank"], answers["world_size"]) == (number, num_workers)
        assert answers["gathered"] == answers["strided"] == expected
        assert answers["labels"] == [10 * r + extra for r in range(num_workers) for extra in (0, 1)]
        assert answers["sum"] == [[float(total)] * 3, [total + 0.5 * num_workers] * 3]
        assert answers["own"] == slice(number * share, (number + 1) * share)
        assert answers["highest"] == num_workers
        assert answers["objects"] == [{"rank": r, "bytes": bytes(r)} for r in range(num_workers)]
        assert answers["mine"] == expected[2 * number : 2 * number + 2]


def gradients_of_a_global_function():
    """The gradients of L = Σ_ij c_ij (Σ over workers of w x)_ij + Σ d · gather(x)², by one worker."""
    x = torch.arange(6, dtype=torch.float64).view(2, 3) + 10 * rank()
    x.requires_grad_()
    coefficients = torch.arange(1, 7, dtype=torch.float64).view(2, 3)
    weights = torch.arange(1, 2 * world_size() + 1, dtype=torch.float64)[:, None]
    value = (coefficients * sum_over_workers((rank() + 1) * x)).sum() + (weights * gather_rows(x).square()).sum()
    (gradient,) = torch.autograd.grad(value, x)
    own = weights[own_rows(len(weights))]
    return gradient, (rank() + 1) * coefficients + 2 * own * x.detach()


@pytest.mark.distributed
@pytest.mark.parametrize("num_workers", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_each_worker_gets_its_gradient_once_for_every_copy_of_the_loss(tmp_path, num_workers):
    for gradient, of_one_copy in on_workers(num_workers, tmp_path, gradients_of_a_global_function):
        torch.testing.assert_close(gradient, num_workers * of_one_copy, rtol=1e-14, atol=0)


def averaged_gradients():
    torch.manual_seed(rank())  # DDP gives every worker the first one's weights
    network = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).double()
    network[1].running_mean.fill_(float(rank()))
    model = average_gradients(network, CPU)
    before = network[1].running_mean.clone()
    model.eval()
    model(torch.full((2, 3), 1.0 + rank(), dtype=torch.float64)).sum().backward()
    is_wrapped = isinstance(model, DistributedDataParallel)
    return is_wrapped, network[0].weight.detach(), network[0].weight.grad, before, network[1].running_mean


@pytest.mark.distributed
def test_gradients_are_averaged_and_buffers_are_left_alone(tmp_path):
    first, second = on_workers(2, tmp_path, averaged_gradients)
    assert first[0] and second[0]
    assert torch.equal(first[1], second[1])
    # The rows are 1 and 2, so that the gradients are 2 and 4 times one over √(1 + ε).
    torch.testing.assert_close(first[2], torch.full((2, 3), 3.0, dtype=torch.float64), rtol=1e-4, atol=0)
    assert torch.equal(first[2], second[2])
    for _, _, _, before, after in (first, second):
        assert torch.equal(before, after)


def ranges_and_averages():
    """This worker's ranges of some numbers of rows, and a gradient, which is 1 + rank before it is averaged."""
    layer = nn.Linear(2, 1, bias=False)
    average_parameter_gradients(layer)
    for _ in range(2):
        layer.zero_grad()
        # Used twice: the average is taken once, of the whole gradient.
        inputs = torch.full((1, 2), (1.0 + rank()) / 2)
        (layer(inputs) + layer(inputs)).sum().backward()
    return [own_rows(count) for count in (0, 1, 3, 7, 8)], layer.weight.grad.tolist()


@pytest.mark.distributed
@pytest.mark.parametrize("num_workers", [2, 3])
def test_ranges_partition_any_number_of_rows_and_gradients_are_averaged(tmp_path, num_workers):
    results = on_workers(num_workers, tmp_path, ranges_and_averages)
    for column, count in enumerate((0, 1, 3, 7, 8)):
        ranges = [ranges[column] for ranges, _ in results]
        assert [row for part in ranges for row in range(count)[part]] == list(range(count))
        assert max(len(range(count)[part]) for part in ranges) <= -(-count // num_workers)
    average = sum(range(1, num_workers + 1)) / num_workers
    assert all(gradient == [[average, average]] for _, gradient in results)
