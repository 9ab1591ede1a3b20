"""The gradient of a loss is bit-equal at every call, whatever other threads compute."""

import json
import threading

import pytest
import torch

from ssl_sec.losses import classes
from tests.losses.cases import ALL_LOSSES, NUM_CLASSES

# Large enough for torch to divide an operation among threads.
ROWS, DIM = 510, 128
CALLS = 16  # a gradient that depends on the order differed in a sixth of the calls or more


@pytest.fixture(scope="module", autouse=True)
def other_threads():
    """Threads that compute, so that the parts of a parallel operation end in another order at each call."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    ended = threading.Event()

    def compute():
        generator = torch.Generator().manual_seed(0)
        while not ended.is_set():
            size = int(torch.randint(10, 400, (1,), generator=generator))
            matrix = torch.rand(size, size, generator=generator)
            (matrix @ matrix).sum()
            json.loads(json.dumps({str(number): number for number in range(2000)}))

    threads = [threading.Thread(target=compute, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    yield
    ended.set()
    for thread in threads:
        thread.join()
    torch.set_num_threads(before)


@pytest.mark.parametrize("case", ALL_LOSSES, ids=str)
def test_a_gradient_is_the_same_at_every_call(case):
    """With many rows of a class: a sum of three numbers or more depends on their order."""
    torch.manual_seed(0)
    loss = case.make(NUM_CLASSES, DIM, **case.values) if case.of_classes else case.make(**case.values)
    for template in loss.parameters():
        torch.nn.init.normal_(template)
    loss.eval()  # the centres of a class stay
    labels = case.arrange(torch.arange(ROWS) % NUM_CLASSES)
    embeddings = torch.randn(len(labels), DIM)
    leaves = [embeddings.requires_grad_(), *loss.parameters()]
    first = torch.autograd.grad(loss(embeddings, labels), leaves)
    for _ in range(CALLS):
        again = torch.autograd.grad(loss(embeddings, labels), leaves)
        assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))


def test_gathering_and_scattering_rows_equal_indexing():
    values = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    index = torch.tensor([4, 0, 0, 2, 0])
    taken = classes.take_rows(values, index)
    assert torch.equal(taken, values[index])
    (gradient,) = torch.autograd.grad((taken * torch.arange(15).view(5, 3)).sum(), values)
    assert gradient[0].tolist() == [3 + 6 + 12, 4 + 7 + 13, 5 + 8 + 14]
    assert gradient[1].tolist() == [0, 0, 0]
    summed = classes.sum_rows(values, index, 6)
    assert summed.shape == (6, 3) and summed[5].tolist() == [0, 0, 0]
    torch.testing.assert_close(summed[0], values[[1, 2, 4]].sum(0))
    assert torch.autograd.gradcheck(lambda rows: classes.sum_rows(rows, index, 6), values)
