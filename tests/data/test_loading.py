import itertools
import logging
import multiprocessing
import pickle
import time

import pytest
import torch

from ssl_sec.data.loading import _Decoding, batches
from ssl_sec.data.samplers import ShuffledBatches
from ssl_sec.errors import DataError
from tests.data.test_image_set import encoded, resident, values

CPU = torch.device("cpu")


def no_workers_left() -> bool:
    deadline = time.monotonic() + 10
    while multiprocessing.active_children() and time.monotonic() < deadline:
        time.sleep(0.05)
    return not multiprocessing.active_children()


def index_batches(num_images, global_batch_size, steps):
    sampler = ShuffledBatches(num_images=num_images, global_batch_size=global_batch_size, seed=0)
    return [sampler.indices(step) for step in range(steps)]


def test_resident_images_in_order():
    wanted = index_batches(6, 2, 9)
    read = list(batches(resident(), wanted, CPU, num_loader_workers=0, prefetch=1))
    assert [batch.indices.tolist() for batch in read] == [indices.tolist() for indices in wanted]
    assert [values(batch) for batch in read] == [indices.tolist() for indices in wanted]


@pytest.mark.parametrize("num_loader_workers", [0, 2])
def test_encoded_images_in_order(tmp_path, num_loader_workers):
    wanted = index_batches(6, 2, 9)
    random_state = torch.get_rng_state()
    read = list(batches(encoded(tmp_path), wanted, CPU, num_loader_workers, prefetch=2))
    assert [values(batch) for batch in read] == [indices.tolist() for indices in wanted]
    assert torch.equal(torch.get_rng_state(), random_state)
    assert no_workers_left()


def test_bad_images_do_not_depend_on_the_workers(tmp_path, caplog):
    wanted = [torch.tensor([0, 1]), torch.tensor([2, 5]), torch.tensor([5, 2])]
    results = []
    for num_loader_workers in (0, 1, 2):
        image_set = encoded(tmp_path, bad=(2, 5))
        caplog.clear()
        with caplog.at_level(logging.WARNING, "ssl_sec.data"):
            read = list(batches(image_set, wanted, CPU, num_loader_workers, prefetch=1))
        results.append([batch.indices.tolist() for batch in read])
        assert image_set.num_bad_images == 2
        assert ["002.png" in line for line in caplog.messages] == [True, False]
    assert results == [[[0, 1], [3, 0], [0, 3]]] * 3


@pytest.mark.parametrize("num_loader_workers", [0, 1])
def test_an_error_is_one_line_at_its_batchs_turn(tmp_path, num_loader_workers):
    wanted = [torch.tensor([0]), torch.tensor([1]), torch.tensor([0])]
    read = batches(encoded(tmp_path, bad=(1,), on_bad_image="raise"), wanted, CPU, num_loader_workers, prefetch=2)
    assert values(next(read)) == [0]
    with pytest.raises(DataError) as caught:
        next(read)
    assert "001.png" in str(caught.value) and "\n" not in str(caught.value)
    assert no_workers_left()


def test_closing_early_ends_the_workers(tmp_path):
    endless = (torch.tensor([i % 6]) for i in itertools.count())
    read = batches(encoded(tmp_path), endless, CPU, num_loader_workers=2, prefetch=2)
    assert [values(batch) for batch in itertools.islice(read, 5)] == [[0], [1], [2], [3], [4]]
    assert len(multiprocessing.active_children()) == 2
    read.close()
    assert no_workers_left()


def test_what_a_spawned_worker_receives_can_be_pickled(tmp_path):
    # Python 3.14 no longer forks by default.
    decoding = pickle.loads(pickle.dumps(_Decoding(encoded(tmp_path))))
    batch, bad = decoding[[3, 1], None]
    assert values(batch) == [3, 1] and bad == {}
