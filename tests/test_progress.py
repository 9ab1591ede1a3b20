import logging

import pytest
import torch
from torch import nn

from ssl_sec import progress
from ssl_sec.data.decode import Decoding
from ssl_sec.data.parquet.opening import open_parquet
from ssl_sec.data.shards.opening import open_webdataset
from ssl_sec.evaluation.features import extract_features
from ssl_sec.evaluation.retrieval import precision_at_r, recall_at_k
from ssl_sec.progress import duration, logged
from tests.data.files import plain, write_parquet
from tests.data.shards.test_tar import write_shards
from tests.workers import on_workers


class Clock:
    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(progress.time, "monotonic", lambda: self.now)


def test_a_long_task_logs_how_far_it_is_and_a_short_one_nothing(monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    clock = Clock(monkeypatch)
    taken = []
    for item in logged(iter([3_000, 3_000, 4_000]), "loading folder/train", 10_000, size=lambda number: number):
        taken.append(item)
        clock.now += 60.0
    assert taken == [3_000, 3_000, 4_000]
    assert caplog.messages == [
        "loading folder/train: 3,000 of 10,000 images, 2 min 20 s left",
        "loading folder/train: 6,000 of 10,000 images, 1 min 20 s left",
    ]
    caplog.clear()
    for _ in logged(range(1_000), "reading", 1_000, "shards"):
        clock.now += 1.01 * progress.LOG_EVERY_S / 1_000
    assert len(caplog.messages) == 1 and caplog.messages[0].endswith("of 1,000 shards, 0 min 00 s left")


def test_only_worker_0_logs(monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(progress, "LOG_EVERY_S", -1.0)
    monkeypatch.setattr(progress, "rank", lambda: 1)
    assert list(logged(range(3), "reading", 3)) == [0, 1, 2] and not caplog.messages


@pytest.mark.parametrize(
    "seconds, text", [(0.4, "0 min 00 s"), (59.6, "1 min 00 s"), (3_599, "59 min 59 s"), (3_661, "1 h 01 min")]
)
def test_durations(seconds, text):
    assert duration(seconds) == text


def features_of_shards(locations, cache_folder):
    images = open_webdataset("train", locations, cache_folder=cache_folder)
    with pytest.MonkeyPatch.context() as patch:
        messages: list[str] = []
        patch.setattr(progress, "LOG_EVERY_S", -1.0)
        patch.setattr(progress.logger, "info", lambda message, *values: messages.append(message % values))
        extract_features(nn.Flatten(), images, device=torch.device("cpu"), batch_size=2)
    return messages


def test_what_takes_long_with_many_images_logs_how_far_it_is(tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(progress, "LOG_EVERY_S", -1.0)
    file = write_parquet(tmp_path / "a.parquet", [plain(value) for value in range(300)], [0] * 300)
    open_parquet("train", str(file), decoding=Decoding(resident_limit_mib=0), cache_folder=tmp_path / "cache")
    assert caplog.messages[0].startswith(f"copying {file}: 256 of 300 images, ")
    caplog.clear()
    write_shards(tmp_path, num_shards=2, num_images=5)
    shards = str(tmp_path / "*.tar")
    open_webdataset("train", shards, cache_folder=tmp_path / "cache")
    texts = [message.rpartition(", ")[0] for message in caplog.messages]
    assert texts == [
        "looking for images in the shards: 1 of 2 shards",
        *(f"loading webdataset/train: {done} of 10 images" for done in range(1, 10)),
    ]
    of_all = [f"computing features of webdataset/train: {done} of 10 images" for done in (4, 8)]
    one, other = on_workers(2, tmp_path, features_of_shards, shards, tmp_path / "cache")
    assert [message.rpartition(", ")[0] for message in one] == of_all and not other


def test_retrieval_logs_how_far_it_is(monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(progress, "LOG_EVERY_S", -1.0)
    rows, labels = torch.randn(20, 3, generator=torch.Generator().manual_seed(0)), torch.arange(20) % 4
    recall_at_k(rows, labels, (1,), tile_size=8)
    precision_at_r(rows, labels, tile_size=128)
    texts = [message.rpartition(", ")[0] for message in caplog.messages]
    # Images that rank each other: three tiles with themselves, and three pairs of tiles.
    ranked = [f"ranking the images: {done} of 6 tiles" for done in range(1, 6)]
    assert texts == [*ranked, "MAP@R: 1 of 3 tiles", "MAP@R: 2 of 3 tiles"]
