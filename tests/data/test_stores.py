import pickle

from ssl_sec.data.stores import FileStore, PackedBytes
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
