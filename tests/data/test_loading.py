import itertools
import logging
import multiprocessing
import os
import pickle
import subprocess
import sys
import time
from dataclasses import replace

import psutil
import pytest
import torch
from PIL import Image

from ssl_sec.data.crops import RandomResizedCrop, row_draws
from ssl_sec.data.decode import decode_image
from ssl_sec.data.encoded_images import EncodedImages
from ssl_sec.data.loading import _Decoding, batches
from ssl_sec.data.samplers import ShuffledBatches, worker_rows
from ssl_sec.data.stores import FileStore
from ssl_sec.errors import ConfigError, DataError
from tests.data.files import encode, noise, write_folder
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


@pytest.mark.parametrize("num_loader_workers", [0, 1])
def test_a_package_that_is_not_installed_is_one_line(tmp_path, monkeypatch, num_loader_workers):
    image_set = encoded(tmp_path)
    Image.new("L", (8, 8)).save(tmp_path / "000.png", "TIFF")
    monkeypatch.setitem(sys.modules, "tifffile", None)
    read = batches(replace(image_set, value_ranges=((0.0, 9.0),)), [torch.tensor([0])], CPU, num_loader_workers)
    with pytest.raises(ConfigError, match=r"^tifffile is not installed, .*'ssl_sec\[tiff\]'$"):
        next(read)
    assert no_workers_left()


def test_closing_early_stops_the_workers(tmp_path):
    endless = (torch.tensor([i % 6]) for i in itertools.count())
    read = batches(encoded(tmp_path), endless, CPU, num_loader_workers=2, prefetch=2)
    assert [values(batch) for batch in itertools.islice(read, 5)] == [[0], [1], [2], [3], [4]]
    assert len(multiprocessing.active_children()) == 2
    read.close()
    assert no_workers_left()


@pytest.mark.parametrize(("num_batches", "num_processes"), [(1, 1), (2, 2), (5, 2)])
def test_no_more_processes_decode_than_there_are_batches(tmp_path, num_batches, num_processes):
    wanted = [torch.tensor([row]) for row in range(num_batches)]
    read = batches(encoded(tmp_path), wanted, CPU, num_loader_workers=2)
    assert values(next(read)) == [0]
    assert len(multiprocessing.active_children()) == num_processes
    assert [values(batch) for batch in read] == [[row] for row in range(1, num_batches)]
    assert list(batches(encoded(tmp_path), [], CPU, num_loader_workers=2)) == []


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux forks")
def test_workers_are_forked_whatever_the_default(tmp_path):
    default = multiprocessing.get_start_method()
    multiprocessing.set_start_method("forkserver", force=True)
    try:
        read = batches(encoded(tmp_path), itertools.repeat(torch.tensor([1])), CPU, num_loader_workers=2)
        next(read)
        parents = [psutil.Process(worker.pid).ppid() for worker in multiprocessing.active_children()]
        read.close()
    finally:
        multiprocessing.set_start_method(default, force=True)
    assert parents == [os.getpid()] * 2


def test_arguments_of_spawned_workers_can_be_pickled(tmp_path):
    # Outside Linux, workers may be spawned.
    decoding = pickle.loads(pickle.dumps(_Decoding(encoded(tmp_path))))
    batch, bad = decoding[[3, 1], None]
    assert values(batch) == [3, 1] and bad == {}


CROP = RandomResizedCrop(short_side_px=32, size_px=24)


def cropped(root, num_images=6, bad=()) -> EncodedImages:
    """PNGs of noise in different sizes, of which some are text."""
    names = [f"{value:03}.png" for value in range(num_images)]
    pictures = [encode(noise(20 + 9 * value, 60 - 7 * value)) for value in range(num_images)]
    files = {name: b"text" if value in bad else pictures[value] for value, name in enumerate(names)}
    return EncodedImages(
        store=FileStore.of(write_folder(root, files), names),
        labels=torch.arange(num_images),
        class_names=tuple(map(str, range(num_images))),
        image_shape=(3, 24, 24),
        name="c",
        description="made up",
        crop=CROP,
        on_bad_image="skip",
    )


def crops_of_steps(image_set, steps, rank, world_size, num_loader_workers):
    """What one of the workers reads of some steps."""
    sampler = ShuffledBatches(num_images=6, global_batch_size=4, seed=0)
    rows = worker_rows(4, rank, world_size)
    read = batches(
        image_set,
        (sampler.indices(step)[rows] for step in steps),
        CPU,
        num_loader_workers,
        draws=(row_draws(0, step, 4)[rows] for step in steps),
    )
    return torch.stack([batch.images for batch in read])


@pytest.mark.parametrize("bad", [(), (1, 4)])
def test_crops_depend_on_neither_workers_nor_loaders_nor_the_first_step(tmp_path, bad):
    image_set = cropped(tmp_path, bad=bad)
    whole = crops_of_steps(image_set, range(4), 0, 1, num_loader_workers=0)
    for world_size, num_loader_workers in ((1, 1), (2, 2), (4, 0)):
        parts = [crops_of_steps(image_set, range(4), r, world_size, num_loader_workers) for r in range(world_size)]
        assert torch.equal(torch.cat(parts, dim=1), whole)
    assert torch.equal(crops_of_steps(image_set, range(2, 4), 0, 1, num_loader_workers=1), whole[2:])


@pytest.mark.parametrize("num_loader_workers", [0, 1])
def test_each_row_has_its_own_crop_and_a_replacement_that_of_its_row(tmp_path, num_loader_workers):
    image_set = cropped(tmp_path, bad=(2,))
    draws = row_draws(0, 3, 4)
    (batch,) = batches(image_set, [torch.tensor([0, 2, 3, 3])], CPU, num_loader_workers, draws=[draws])
    assert batch.indices.tolist() == [0, 3, 3, 3]
    for image, index, draw in zip(batch.images, batch.indices.tolist(), draws.tolist(), strict=True):
        assert torch.equal(image, decode_image(image_set.store.source(index), "x", 3, CROP, draw))
    assert len(batch.images.flatten(1).unique(dim=0)) == 4


def test_every_batch_needs_draws(tmp_path):
    wanted = [torch.tensor([0, 1]), torch.tensor([2, 3])]
    image_set = cropped(tmp_path)
    with pytest.raises(ValueError, match="shorter"):
        list(batches(image_set, wanted, CPU, 0, draws=[row_draws(0, 0, 2)]))
    with pytest.raises(AssertionError, match="draw"):
        list(batches(image_set, wanted, CPU, 0))


def test_resident_images_need_no_draws_but_may_have_them():
    wanted = index_batches(6, 2, 3)
    read = batches(resident(), wanted, CPU, num_loader_workers=0, draws=[row_draws(0, step, 2) for step in range(3)])
    assert [values(batch) for batch in read] == [indices.tolist() for indices in wanted]


def test_images_are_read_where_the_path_of_temporary_files_is_too_long_for_sockets(tmp_path):
    """In a process of its own, since one keeps its first folder for sockets."""
    longest = tmp_path / ("t" * 100)
    longest.mkdir()
    write_folder(tmp_path / "images", {f"{number}.png": encode(noise(8, 8)) for number in range(6)})
    code = (
        "import torch, sys\n"
        "from ssl_sec.data.config import FolderConfig\n"
        "from ssl_sec.data.loading import batches\n"
        "images = FolderConfig(root=sys.argv[1], image_size_px=8, resident_limit_mib=0).open('train')\n"
        "for batch in batches(images, [torch.arange(6)], torch.device('cpu'), 2):\n"
        "    print(len(batch.images))\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "images")],
        env={**os.environ, "TMPDIR": str(longest)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (result.stdout, os.listdir(longest)) == ("6\n", []), result.stderr


@pytest.mark.timeout(60)  # the data loader itself would wait forever
def test_batches_that_do_not_fit_into_shared_memory_come_through_pipes(tmp_path, monkeypatch, caplog):
    def full(storage: object, *options: object) -> None:
        raise RuntimeError("unable to allocate shared memory(shm) for file </torch_1>: No space left on device (28)")

    monkeypatch.setattr(torch.UntypedStorage, "_share_fd_cpu_", full)
    wanted = index_batches(6, 2, 9)
    read = list(batches(encoded(tmp_path), wanted, CPU, num_loader_workers=2))
    assert [values(batch) for batch in read] == [indices.tolist() for indices in wanted]
    assert [batch.indices.tolist() for batch in read] == [indices.tolist() for indices in wanted]
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith("batches of 0.000366 MiB do not fit into the shared memory (/dev/shm): ")
