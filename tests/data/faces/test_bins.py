import pickle
import struct
from pathlib import Path

import numpy as np
import pytest

from ssl_sec.data.faces.bins import read_bin
from tests.data.files import plain
from tests.data.test_sources import line

IMAGES = [plain(value) for value in (1, 2, 3, 1, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22)]
SAME = [True, False, True, True, False, False, True, False, True, True, False]


def python_2(images: list[bytes], same: list[bool]) -> bytes:
    """What Python 2's cPickle writes with protocol 2: an image is a `str`."""
    written = b"\x80\x02]("
    for image in images:
        written += b"T" + struct.pack("<i", len(image)) + image
    return written + b"e](" + b"".join(b"\x88" if value else b"\x89" for value in same) + b"e\x86."


def python_2_array(image: bytes) -> bytes:
    """What it writes of a NumPy array of bytes, of shape [len(image), 1], as OpenCV encodes images."""
    string = b"T" + struct.pack("<i", len(image)) + image
    made = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R"
    element_type = b"cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    return made + b"(K\x01M" + struct.pack("<H", len(image)) + b"K\x01\x86" + element_type + b"\x89" + string + b"tb"


def test_bins_of_python_2(tmp_path):
    path = tmp_path / "a.bin"
    path.write_bytes(python_2(IMAGES, SAME))
    assert read_bin(path) == (IMAGES, SAME)
    arrays = b"".join(map(python_2_array, IMAGES))
    same = b"".join(b"\x88" if value else b"\x89" for value in SAME)
    path.write_bytes(b"\x80\x02](" + arrays + b"e](" + same + b"e\x86.")
    loaded, _ = pickle.loads(path.read_bytes(), encoding="bytes")
    assert all(array.tobytes() == image for array, image in zip(loaded, IMAGES, strict=True))
    assert read_bin(path) == (IMAGES, SAME)


@pytest.mark.parametrize("protocol", range(2, 6))
@pytest.mark.parametrize("shape", [(-1,), (-1, 1)])
def test_bins_with_arrays(tmp_path, protocol, shape):
    path = tmp_path / "a.bin"
    arrays = [np.frombuffer(image, np.uint8).copy().reshape(shape) for image in IMAGES]
    for images, same in (
        (IMAGES, SAME),
        (arrays, SAME),
        (arrays, np.array(SAME)),
        (tuple(arrays), [np.bool_(value) for value in SAME]),
        (IMAGES, [int(value) for value in SAME]),
    ):
        path.write_bytes(pickle.dumps((images, same), protocol))
        assert read_bin(path) == (IMAGES, SAME)


class Foreign:
    """Pickles as a call with the given arguments."""

    def __init__(self, function, *arguments):
        self.made = function, arguments

    def __reduce__(self):
        return self.made


ATTACKS = {
    "posix.system": lambda marker: Foreign(__import__("os").system, f"touch {marker}"),
    "builtins.exec": lambda marker: Foreign(exec, f"open({str(marker)!r}, 'w')"),
    "builtins.getattr": lambda marker: Foreign(getattr, marker, "touch"),
    "functools.partial": lambda marker: __import__("functools").partial(marker.touch),
    f"{type(Path()).__module__}.PosixPath": lambda marker: marker,
}


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("name", ATTACKS)
def test_a_foreign_object_is_named_and_never_made(tmp_path, name, protocol):
    path, marker = tmp_path / "a.bin", tmp_path / "marker"
    path.write_bytes(pickle.dumps(([ATTACKS[name](marker), *IMAGES[1:]], SAME), protocol))
    message = line(lambda: read_bin(path))
    if protocol > 2:
        assert message == f"{path}: holds an object of {name}; allowed: encoded images and booleans"
    assert "holds an object of " in message and not marker.exists()


@pytest.mark.parametrize(
    "content",
    [
        b"\x80\x02cnumpy\ndtype\n}U\x05_makecos\nsystem\nsb.",  # a state for a stand-in
        b"\x80\x02cnumpy\ndtype\nN}U\x05_makeK\x01s\x86b.",  # of slots
        b"\x80\x02cnumpy\nndarray\n)R.",  # what is only ever referred to is called
        b"\x80\x02cnumpy\nndarray\n)\x81.",  # or made anew
        b"\x80\x02cnumpy.core.multiarray\n_reconstruct\n)R}b.",  # an array with a state of its own
        b"\x80\x02c_codecs\nencode\nX\x01\x00\x00\x00aX\x05\x00\x00\x00rot13\x86R.",
        b"\x80\x04\x8c\x08builtins\x8c\x04eval\x93.",
        b"\x80\x04\x8c\x05numpy\x8c\x0bcore.dtypes\x93.",
        b"(ios\nsystem\n.",
        b"\x80\x02Pname\n.",
        b"\x80\x02r\xff\xff\xff\x7f.",
        b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x7f.",
    ],
)
def test_a_crafted_pickle_changes_nothing(tmp_path, content):
    path = tmp_path / "a.bin"
    path.write_bytes(content)
    assert line(lambda: read_bin(path)).startswith(f"{path}: ")
    path.write_bytes(pickle.dumps(([np.frombuffer(image, np.uint8) for image in IMAGES], SAME), 4))
    assert read_bin(path) == (IMAGES, SAME)
