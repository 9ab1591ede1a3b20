"""Two jobs that write to one folder at the same time."""

import contextlib
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ssl_sec.edges.embeddings import neighbours
from ssl_sec.edges.embeddings.written import alone_in
from ssl_sec.edges.run.signals import interruptible
from ssl_sec.edges.storage import lease
from ssl_sec.edges.storage.bucket import Bucket
from ssl_sec.edges.storage.files import LocalPlace
from ssl_sec.errors import ConfigError, Stopped
from tests.edges.embeddings.test_neighbours import find


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    monkeypatch.setattr("ssl_sec.edges.run.running._FREE_WITHIN_S", 0.0)


def test_a_search_is_refused_while_another_writes_to_the_folder(tmp_path: Path, monkeypatch):
    points = np.random.default_rng(0).normal(size=(400, 4)).astype(np.float32)
    pq.write_table(pa.table({"embedding": list(points)}), tmp_path / "points.parquet")
    output, compute, asked = tmp_path / "output", neighbours.done_on, list[str]()

    def beside(*given: object) -> Iterator[int]:
        if not asked:
            asked.append("k=4")
            reason = (
                f"^output: {re.escape(str(output))} is in use: process {os.getpid()} on .* allowed: another folder, or"
            )
            with pytest.raises(ConfigError, match=reason):
                find(tmp_path / "points.parquet", output, *asked)
        return compute(*given)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(neighbours, "done_on", beside)
    find(tmp_path / "points.parquet", output, "k=2")
    ranks = pq.read_table([*output.glob("neighbours-*.parquet")])["rank"].to_pylist()
    assert len(ranks) == 800 and set(ranks) == {1, 2}
    assert not (output / ".running").exists()
    with pytest.raises(ConfigError, match="output: .* holds another search, with k 2 instead of 4"):
        find(tmp_path / "points.parquet", output, "k=4")


def test_a_place_in_object_storage_has_one_writer_of_each_split(s3: str):
    place = Bucket(s3, "output")
    with alone_in(place, "train"):
        refusal = f"^output: {s3} is in use: process {os.getpid()} on .* allowed: another folder, or waiting"
        with alone_in(place, "test"), pytest.raises(ConfigError, match=refusal), alone_in(place, "train"):
            pass
        assert list(place.files()) == [".lease-train"]
    assert not place.files()


def test_a_job_whose_place_was_taken_over_is_interrupted(s3: str, monkeypatch):
    monkeypatch.setattr(lease, "_RENEWED_EVERY_S", 0.05)
    place = Bucket(s3, "output")
    with alone_in(place, "train"), pytest.raises(Stopped), interruptible("whole parts are kept"):
        place.write(".lease-train", b"{}")
        time.sleep(30)
        pytest.fail("not interrupted")
    assert list(place.files()) == [".lease-train"]


def test_other_splits_may_be_written_at_once_and_an_error_frees_the_folder(tmp_path: Path):
    place = LocalPlace(folder=tmp_path / "output")
    with contextlib.suppress(KeyError), alone_in(place, "train"):
        with alone_in(place, "test"), pytest.raises(ConfigError, match="is in use"), alone_in(place, "train"):
            pass
        raise KeyError
    with alone_in(place, "train"):
        assert (tmp_path / "output/.running").is_dir()
    assert not list((tmp_path / "output").iterdir())
