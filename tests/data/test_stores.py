import pickle

import pyarrow as pa

from ssl_sec.data import stores
from ssl_sec.data.stores import ArrowStore, FileStore, PackedBytes
from tests.data.files import plain


def test_file_names_that_are_not_utf_8(tmp_path):
    (tmp_path / "é.png").write_bytes(plain(9))
    store = FileStore.of(tmp_path, ["é.png", b"\xff.png"])
    assert store.source(0).exists()
    assert store.image_name(1).encode().endswith(b"\\xff.png")


def test_packed_bytes_are_the_strings():
    strings = [b"", b"a\0", b"bc", b""]
    packed = pickle.loads(pickle.dumps(PackedBytes.of(iter(strings))))
    assert [packed[row] for row in range(len(packed))] == strings
    assert len(PackedBytes.of([])) == 0


def test_the_columns_of_a_mapped_file_are_made_once(tmp_path, monkeypatch):
    """To make one takes as long as there are record batches."""
    path = tmp_path / "a.arrow"
    batch = pa.record_batch({"name": ["a", "b"], "encoded": pa.array([b"1", b"2"], pa.large_binary())})
    with pa.ipc.new_file(str(path), batch.schema) as writer:
        for _ in range(3):
            writer.write_batch(batch)
    asked, mapped_table = [], stores.mapped_table
    monkeypatch.setattr(stores, "mapped_table", lambda path: asked.append(path) or mapped_table(path))
    store = pickle.loads(pickle.dumps(ArrowStore(path=path)))
    assert [store.source(row) for row in range(6)] == [b"1", b"2"] * 3
    assert [store.image_name(row) for row in range(6)] == ["a", "b"] * 3
    assert len(asked) == 2
