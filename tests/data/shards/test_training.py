"""Pretraining on images without labels, read by blocks: the same run from each form, on any number of workers."""

import pyarrow.parquet as pq
import pytest
from PIL import Image

from ssl_sec.data.standard_sets import open_digits
from tests.data.files import encode, write_folder, write_parquet
from tests.data.shards.test_tar import write_tar
from tests.fakes import assert_identical
from tests.recipes.pretraining.test_pretraining import WITHOUT_LABELS, run
from tests.recipes.same_runs import assert_resumes_bit_equal, assert_the_same_on_workers, curve

# Blocks of 16 images, windows of three of them, six steps an epoch.
NUM_IMAGES, PER_BLOCK = 96, 16
SMALL = {"global_batch_size": 16, "epochs": 2, "checkpoint": {"every_epochs": 1}}


@pytest.fixture(scope="module")
def sets(tmp_path_factory):
    """Kind -> values of `data` of the same digits in a flat folder, tar shards and Parquet."""
    folder = tmp_path_factory.mktemp("images")
    digits = open_digits("train").images[:NUM_IMAGES]
    images = {f"{number:03d}.png": encode(Image.fromarray(image[0].numpy())) for number, image in enumerate(digits)}
    names = sorted(images)
    write_folder(folder / "flat", images)
    for shard, first in enumerate(range(0, NUM_IMAGES, PER_BLOCK)):
        write_tar(folder / f"{shard}.tar", {name: images[name] for name in names[first : first + PER_BLOCK]})
    file = write_parquet(folder / "all.parquet", [images[name] for name in names], [0] * NUM_IMAGES)
    pq.write_table(pq.read_table(file).drop_columns("label"), file, row_group_size=PER_BLOCK)
    shared = {"num_channels": 1, "cache_folder": str(folder / "cache")}
    return {
        "folder": {"name": "folder", "root": str(folder / "flat"), "num_channels": 1},
        "webdataset": {**shared, "name": "webdataset", "train": [str(folder / "{0..5}.tar")]},
        "parquet": {**shared, "name": "parquet", "train": [str(file)]},
    }


def by_blocks(data):
    return {**data, "resident_limit_mib": 0, "shuffle_window": 3 * PER_BLOCK}


@pytest.fixture(scope="module")
def whole(sets, tmp_path_factory):
    """An uninterrupted run from shards that are read by blocks."""
    runtime, _ = run(tmp_path_factory.mktemp("whole"), data=by_blocks(sets["webdataset"]), **SMALL)
    assert len(runtime.series("train/loss")) == 12
    return runtime


def test_the_curve_is_the_same_from_a_folder_shards_and_parquet(sets, whole, tmp_path):
    runs = [run(tmp_path, data=data, **SMALL)[0] for data in sets.values()]
    assert WITHOUT_LABELS <= runs[0].reports[-1][1].keys()
    for other in runs[1:]:
        assert curve(other.reports) == curve(runs[0].reports)
        assert_identical(other.last_state(), runs[0].last_state())
    parquet, _ = run(tmp_path, data=by_blocks(sets["parquet"]), **SMALL)
    assert curve(parquet.reports) == curve(whole.reports)
    assert curve(whole.reports) != curve(runs[0].reports)  # blocks have an order of their own


@pytest.mark.distributed
def test_two_workers_that_read_blocks_equal_one(sets, whole, tmp_path):
    changes = {"data": by_blocks(sets["webdataset"]), **SMALL}
    assert_the_same_on_workers(run, tmp_path, whole, changes)


def test_a_run_stopped_in_mid_epoch_resumes_bit_equal(sets, whole, tmp_path):
    changes = {"data": by_blocks(sets["webdataset"]), **SMALL}
    assert_resumes_bit_equal(run, tmp_path, whole, 8, **changes)
