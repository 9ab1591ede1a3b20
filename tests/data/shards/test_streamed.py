import errno
import logging
import threading

import pyarrow.parquet as pq
import pytest
import torch

from ssl_sec.data import log
from ssl_sec.data.decode import Decoding
from ssl_sec.data.encoded_images import EncodedImages
from ssl_sec.data.fingerprint import fingerprint
from ssl_sec.data.image_set import subset
from ssl_sec.data.loading import batches
from ssl_sec.data.parquet.blocks import RowGroups
from ssl_sec.data.parquet.columns import Columns
from ssl_sec.data.parquet.opening import open_parquet
from ssl_sec.data.parquet.reading import inspect
from ssl_sec.data.samplers import ShuffledBatches
from ssl_sec.data.shards import blocks
from ssl_sec.data.shards.blocks import BlockReader
from ssl_sec.data.shards.locations import one_line
from ssl_sec.data.shards.streamed import StreamedImages, require_any_order, shuffled_batches, streamed
from ssl_sec.data.stores import limit_images
from ssl_sec.errors import ConfigError, DataError, MissingDataError
from tests.data.files import plain, write_parquet
from tests.data.test_image_set import values
from tests.data.test_sources import line

CPU = torch.device("cpu")


class Made:
    """Blocks of images that have their numbers as their grey value; counts reads, and fails on request."""

    def __init__(self, sizes, errors=(), bad=()):
        self.sizes = torch.tensor(sizes)
        self.reads, self.errors, self.bad = [], list(errors), bad
        self.lock = threading.Lock()

    def image_name(self, block, row):
        return f"block {block} row {row}"

    def read(self, block):
        with self.lock:
            self.reads.append(block)
            if self.errors:
                raise self.errors.pop()
        first = int(self.sizes[:block].sum())
        return [b"bad" if first + row in self.bad else plain(first + row) for row in range(int(self.sizes[block]))]


def made(sizes, window=16, labels=None, on_bad_image="raise", class_names=(), **more):
    labels = torch.full((sum(sizes),), -1) if labels is None else labels
    source = Made(sizes, **more)
    decoding = Decoding(on_bad_image=on_bad_image)
    return source, streamed(
        source, labels, class_names, (3, 8, 8), "made/train", "made", decoding=decoding, window=window
    )


def epoch(images, sampler, threads=2, rows=slice(None)):
    steps = (sampler.indices(step)[rows] for step in range(sampler.steps_per_epoch))
    return [values(batch) for batch in batches(images, steps, CPU, threads)]


def test_an_epoch_reads_every_block_once():
    source, images = made([8] * 25, window=32)
    sampler = shuffled_batches(images, 16, seed=0)
    read = epoch(images, sampler)
    assert read == [sampler.indices(step).tolist() for step in range(12)]
    assert sorted(source.reads) == sorted(set(source.reads)) and len(source.reads) <= 25


def test_threads_decode_several_batches_at_a_time(monkeypatch):
    """Also where a window has no more than two batches, so that few blocks are read ahead."""
    _, images = made([8] * 25, window=32)
    sampler = shuffled_batches(images, 16, seed=0)
    decode, both = StreamedImages._decode, threading.Barrier(2, timeout=30)

    def together(self, indices, draws):
        both.wait()  # breaks unless another batch is decoded meanwhile
        return decode(self, indices, draws)

    monkeypatch.setattr(StreamedImages, "_decode", together)
    assert epoch(images, sampler, threads=2) == [sampler.indices(step).tolist() for step in range(12)]


@pytest.mark.parametrize("num_workers", [2, 4])
def test_workers_divide_the_blocks(num_workers):
    reads = 0
    for rank in range(num_workers):
        source, images = made([4] * 64, window=32)
        sampler = shuffled_batches(images, 16, seed=0)
        rows = slice(rank * 16 // num_workers, (rank + 1) * 16 // num_workers)
        read = epoch(images, sampler, rows=rows)
        assert read == [sampler.indices(step)[rows].tolist() for step in range(16)]
        reads += len(source.reads)
    assert reads <= 64 + 16  # a block on the border of two lanes is read by both


@pytest.mark.parametrize(
    ("num_workers", "window", "batch_size", "said"),
    [
        (1, 1, 32, None),
        (2, 80, 32, None),
        (8, 100, 32, "about 4 times, and once with a window of 320, or with blocks of 12"),
        (3, 40, 96, "about 3 times, and once with a window of 120, or with blocks of 13"),
        (4, 80, 100, "about 2 times, and once with a window of 160, or with blocks of 20"),
        (4, 400, 100, None),  # ten lanes, of which four workers share some: more are not possible
        (32, 640, 32, None),
    ],
)
def test_blocks_that_are_too_large_for_the_workers_are_named(
    monkeypatch, caplog, num_workers, window, batch_size, said
):
    log._log.cache_clear()
    monkeypatch.setattr("ssl_sec.data.shards.streamed.world_size", lambda: num_workers)
    _, images = made([50, 30] * 8, window=window)
    for _ in range(2):
        shuffled_batches(images, batch_size, seed=0)
    found = (
        f"made/train: blocks of 40 images in the mean are too large for data.shuffle_window={window} and {num_workers}"
    )
    expected = [] if said is None else [f"{found} workers: each is read {said}, such as row groups of Parquet"]
    assert caplog.messages == expected


def test_a_resume_reads_no_earlier_blocks():
    source, images = made([4] * 64, window=32)
    sampler = shuffled_batches(images, 16, seed=0)
    rest = (sampler.indices(step) for step in range(14, 16))
    read = [values(batch) for batch in batches(images, rest, CPU, 1)]
    assert read == [sampler.indices(step).tolist() for step in range(14, 16)]
    assert len(source.reads) < 64 / 2


def test_few_images_are_in_memory():
    source = Made([4] * 50)
    reader = BlockReader(source, capacity=12)
    for block in range(50):
        assert list(reader[block]) == [plain(4 * block + row) for row in range(4)]
    assert len(reader._kept) == 3 and reader._num_kept == 12
    reader.prefetch([48, 49])
    assert len(source.reads) == 50  # they are still there


def test_a_failed_block_is_retried_and_a_missing_one_is_not(monkeypatch, caplog):
    waited = []
    monkeypatch.setattr(blocks.time, "sleep", waited.append)
    monkeypatch.setattr(blocks, "RETRY_AFTER_S", (1.0, 2.0))
    source = Made([2], errors=[DataError("a.tar: busy"), DataError("a.tar: busy")])
    with caplog.at_level(logging.WARNING, "ssl_sec.data"):
        assert len(BlockReader(source, 10)[0]) == 2
    assert caplog.messages == [f"a.tar: busy; trying again in {wait_s} s" for wait_s in (1, 2)]
    assert waited == [1, 2]
    source = Made([2], errors=[DataError(f"a.tar: error {number}") for number in range(3)])
    reader = BlockReader(source, 10)
    assert line(lambda: reader[0]) == "a.tar: error 0"
    assert len(reader[0]) == 2  # later it is there
    source = Made([2], errors=[MissingDataError("a.tar: no such file")])
    assert line(lambda: BlockReader(source, 10)[0], MissingDataError) == "a.tar: no such file"
    assert len(source.reads) == 1


def test_damage_is_not_tried_again(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(blocks, "RETRY_AFTER_S", (0.0, 0.0))
    path = write_parquet(tmp_path / "a.parquet", [plain(n) for n in range(3)], [0, 1, 2])
    groups = RowGroups(files=inspect(path, Columns()))
    whole = path.read_bytes()
    path.write_bytes(whole[:4] + bytes(len(whole) - 4))
    assert line(lambda: BlockReader(groups, 10)[0]).startswith(f"{path}: cannot be read: ") and not caplog.messages

    def refuse(block):
        with one_line("a.tar"):
            raise refused.pop()

    source = Made([2])
    for error in (OSError(errno.EIO, "busy"), TimeoutError("late"), ConnectionResetError(), RuntimeError("server")):
        refused = [error] * 3
        monkeypatch.setattr(source, "read", refuse)
        assert line(lambda: BlockReader(source, 10)[0]).startswith("a.tar: cannot be read: ") and not refused


def test_a_bad_image_is_named_or_replaced_from_its_block(caplog):
    _, images = made([4, 4], bad={3, 5, 6})
    assert line(lambda: images.read(torch.arange(4))).startswith("block 0 row 3: not an image; allowed: ")
    _, images = made([4, 4], bad={3, 5, 6}, on_bad_image="skip")
    batch = images.read(torch.arange(8))
    assert values(batch) == batch.indices.tolist() == [0, 1, 2, 0, 4, 7, 7, 7] and images.num_bad_images == 3
    assert [images.image_name(index) for index in (3, 4)] == ["block 0 row 3", "block 1 row 0"]
    encoded = [(index, name, source()) for index, name, source in images.candidates(torch.arange(2, 6))]
    assert [index for index, *_ in encoded] == [2, 3, 4, 5]
    assert encoded[1:3] == [(3, "block 0 row 3", b"bad"), (4, "block 1 row 0", plain(4))]
    _, images = made([4, 2], bad={4, 5}, on_bad_image="skip")
    assert "2 images in a row cannot be read" in line(lambda: images.read(torch.tensor([5])))


def test_a_view_has_its_own_images(tmp_path):
    _, images = made([5, 5, 5], bad={6}, on_bad_image="skip")
    view = subset(images, torch.tensor([1, 4, 6, 8, 13]))
    assert values(view.read(torch.arange(5))) == [1, 4, 8, 8, 13]
    sampler = shuffled_batches(view, 2, seed=0)
    assert sorted(value for batch in epoch(view, sampler) for value in batch) == sorted(
        {2: 8}.get(i, [1, 4, 6, 8, 13][i]) for step in range(2) for i in sampler.indices(step).tolist()
    )
    assert len(limit_images(images, 7, seed=0)) == 7


def test_a_sample_needs_few_blocks():
    source, images = made([2] * 100)
    chosen = images.sample(20, seed=0)
    assert len(chosen) == 20 and chosen.tolist() == sorted(set(chosen.tolist()))
    own = images.apart()
    assert values(own.read(chosen)) == chosen.tolist() and len(source.reads) == 10
    assert len(images.reader._kept) == 0
    assert torch.equal(images.sample(10**6, seed=0), torch.arange(200))


def test_a_sample_of_a_sorted_set_has_most_classes():
    labels = torch.arange(100).repeat_interleave(40)
    source, images = made([16] * 250, labels=labels, class_names=tuple(map(str, range(100))))
    chosen = images.sample_of_classes(1000, seed=0)
    counts = labels[chosen].bincount(minlength=100)
    assert len(chosen) == len(chosen.unique()) == 1000 and int((counts >= 2).sum()) >= 85
    again, other = (images.sample_of_classes(1000, seed) for seed in (0, 1))
    assert torch.equal(chosen, again) and not torch.equal(chosen, other)
    # Where a sample cannot have ten images of each class, it has those of some.
    few = labels[images.sample_of_classes(100, seed=0)].bincount(minlength=100)
    assert 9 <= int((few > 0).sum()) <= 20
    # Of a shuffled set, no more blocks are read than are needed.
    shuffled = labels[torch.randperm(4000, generator=torch.Generator().manual_seed(0))]
    source, images = made([16] * 250, labels=shuffled, class_names=tuple(map(str, range(100))))
    for num_images in (1000, 1008):
        images.apart().read(images.sample_of_classes(num_images, seed=0))
        assert len(set(source.reads)) == 63  # of 16


def test_row_groups_are_read_without_a_copy(tmp_path):
    files = [
        write_parquet(
            tmp_path / f"{number}.parquet", [plain(10 * number + i) for i in range(10)], [i % 2 for i in range(10)]
        )
        for number in range(3)
    ]  # groups of 4, 4 and 2
    decoding = Decoding(resident_limit_mib=0)
    images = open_parquet("train", files, decoding=decoding, cache_folder=tmp_path / "cache", shuffle_window=8)
    assert isinstance(images, StreamedImages) and not (tmp_path / "cache").exists()
    assert images.reader.blocks.sizes.tolist() == [4, 4, 2] * 3
    assert values(images.read(torch.arange(30))) == list(range(30)) and images.labels.tolist() == [0, 1] * 15
    assert images.reader.blocks.image_name(4, 1) == f"{files[1]} row 5"
    sampler = shuffled_batches(images, 5, seed=0)
    assert epoch(images, sampler) == [sampler.indices(step).tolist() for step in range(6)]
    laid_out = open_parquet("train", files, decoding=decoding, cache_folder=tmp_path / "cache")
    assert isinstance(laid_out, EncodedImages)
    assert isinstance(shuffled_batches(laid_out, 5, seed=0), ShuffledBatches)
    assert fingerprint(images) == fingerprint(images.apart())
    other = open_parquet("train", files[:2], decoding=decoding, shuffle_window=8)
    assert fingerprint(other) != fingerprint(images)
    require_any_order(laid_out, "it")
    assert line(lambda: require_any_order(images, "it"), ConfigError) == (
        "data.shuffle_window: found 8, must be null: it reads images in an order of its own"
    )
    unlabelled = tmp_path / "none.parquet"
    pq.write_table(pq.read_table(files[0]).drop_columns("label"), unlabelled)
    images = open_parquet("train", unlabelled, decoding=decoding, shuffle_window=8)
    assert images.labels.tolist() == [-1] * 10 and images.class_names == ()


def test_an_error_is_raised_at_its_batch_and_ends_the_threads():
    _, images = made([4] * 8, bad={13})
    flow = batches(images, [torch.arange(4 * i, 4 * i + 4) for i in range(8)], CPU, 2)
    assert [values(next(flow)) for _ in range(3)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert "block 3 row 1" in line(lambda: next(flow))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("decode")]
