"""Parquet files of a data set on the Hugging Face Hub, by `hf://` URLs; the Hub is a server on loopback."""

import hashlib
import json
import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pyarrow.parquet as pq
import pytest
import torch
from fsspec.config import conf
from huggingface_hub import HfFileSystem

from ssl_sec.data.decode import Decoding
from ssl_sec.data.encoded_images import EncodedImages
from ssl_sec.data.image_set import ImageSet, ResidentImages
from ssl_sec.data.parquet.opening import open_parquet
from ssl_sec.data.shards.streamed import StreamedImages
from ssl_sec.errors import MissingDataError
from tests.data.files import plain, write_parquet
from tests.data.test_image_set import values
from tests.edges.servers import QuietHandler, served

URL = "hf://datasets/me/set"


@pytest.fixture
def published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder whose files are those of the data set me/set, at each of three revisions."""
    root = tmp_path / "published"
    (root / "data").mkdir(parents=True)

    def described(path: Path) -> dict[str, str | int]:
        kind, oid = ("directory", "0" * 40) if path.is_dir() else ("file", hashlib.sha1(path.read_bytes()).hexdigest())
        return {"type": kind, "oid": oid, "size": path.stat().st_size, "path": str(path.relative_to(root))}

    class Handler(QuietHandler):
        def do_GET(self) -> None:
            path = unquote(urlsplit(self.path).path)
            if re.fullmatch("/api/datasets/me/set(/revision/(main|v1|refs/convert/parquet))?", path):
                return self._send(json.dumps({"id": "me/set", "sha": "0" * 40}).encode())
            if found := re.fullmatch("/api/datasets/me/set/tree/(main|v1|refs/convert/parquet)/?(.*)", path):
                return self._send(
                    json.dumps([described(each) for each in sorted((root / found[2]).iterdir())]).encode()
                )
            if found := re.fullmatch("/datasets/me/set/resolve/(main|v1|refs/convert/parquet)/(.+)", path):
                begin, end = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
                return self._send((root / found[2]).read_bytes()[begin : end + 1], 206)
            return self._send(b"{}", 404, {"X-Error-Code": "RepoNotFound"})

        def _send(self, content: bytes, code: int = 200, headers: dict[str, str] | None = None) -> None:
            self.send_response(code)
            for name, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

    with served(Handler) as address:
        monkeypatch.setitem(conf, "hf", {"endpoint": address, "token": False})
        HfFileSystem.clear_instance_cache()
        yield root
        HfFileSystem.clear_instance_cache()


def opened(location: str, tmp_path: Path, resident_limit_mib: int = 0, shuffle_window: int | None = None) -> ImageSet:
    decoding = Decoding(resident_limit_mib=resident_limit_mib)
    cache = tmp_path / "cache"
    return open_parquet("train", train=location, decoding=decoding, cache_folder=cache, shuffle_window=shuffle_window)


@pytest.mark.parametrize("revision", ["", "@v1", "@refs%2Fconvert%2Fparquet"])
@pytest.mark.parametrize(
    ("resident_limit_mib", "shuffle_window", "kind"),
    [(1, None, ResidentImages), (0, None, EncodedImages), (0, 8, StreamedImages)],
)
def test_a_data_set_is_read_without_a_download(published, tmp_path, revision, resident_limit_mib, shuffle_window, kind):
    write_parquet(published / "data/train-0.parquet", [plain(i) for i in range(5)], [0, 1, 2, 0, 1], ["a", "b", "c"])
    write_parquet(published / "data/train-1.parquet", [plain(i) for i in range(5, 9)], [2, 0, 1, 2], ["a", "b", "c"])
    location = f"{URL}{revision}/data/train-*.parquet"
    images = opened(location, tmp_path, resident_limit_mib, shuffle_window)
    assert isinstance(images, kind)
    assert images.labels.tolist() == [0, 1, 2, 0, 1, 2, 0, 1, 2] and images.class_names == ("a", "b", "c")
    if not isinstance(images, StreamedImages):  # which no process is sent
        images = pickle.loads(pickle.dumps(images))
    assert values(images.read(torch.tensor([8, 3]))) == [8, 3]


def test_the_copy_of_a_file_that_has_changed_is_not_used(published, tmp_path):
    found, sizes = [], set[int]()
    for first, second in ((1, 2), (2, 1)):
        path = write_parquet(published / "data/train.parquet", [plain(first), plain(second)], [0, 1])
        pq.write_table(pq.read_table(path), path, compression="none")
        sizes.add(path.stat().st_size)
        HfFileSystem.clear_instance_cache()
        found.append(values(opened(f"{URL}/data/train.parquet", tmp_path).read(torch.arange(2))))
    assert len(sizes) == 1  # only the content tells the two apart
    assert found == [[1, 2], [2, 1]]


def test_what_is_not_there_is_one_line(published, tmp_path):
    (published / "data/readme.md").write_text("#")
    with pytest.raises(MissingDataError, match=r"^no Parquet file matches hf://datasets/me/set/data/\*\.parquet; set"):
        opened(f"{URL}/data/*.parquet", tmp_path)
    with pytest.raises(MissingDataError, match=r"^hf://datasets/me/other/\*\.parquet: no such file; set"):
        opened("hf://datasets/me/other/*.parquet", tmp_path)
