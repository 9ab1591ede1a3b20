"""Pictures of embedded images: never those of other images, and none that this package would not read."""

import base64
import io
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from ssl_sec.data.config import FolderConfig
from ssl_sec.data.fingerprint import fingerprint
from ssl_sec.edges.embeddings.thumbnails import Key, Thumbnails, thumbnails
from ssl_sec.embeddings.computing import paths
from ssl_sec.embeddings.parts import Rows, encoded
from ssl_sec.embeddings.reading import EmbeddingSet, read_set
from ssl_sec.settings import to_values


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """A folder with five photos of different shades."""
    for number in range(5):
        (tmp_path / "photos").mkdir(exist_ok=True)
        Image.new("L", (20, 10), 40 * number).save(tmp_path / "photos" / f"{number}.png")
    return tmp_path / "photos"


def embedded(folder: Path, size_px: int | None = 8) -> tuple[EmbeddingSet, list[Key]]:
    """The embeddings of the images of a folder, and their keys."""
    data = FolderConfig(root=str(folder), num_channels=1, image_size_px=size_px).undecoded()
    image_set = data.open_all("train")
    count = len(image_set)
    rows = Rows(
        rows=np.arange(count),
        paths=paths(image_set, torch.arange(count)),
        labels=np.full(count, -1),
        embeddings=np.eye(count, dtype=np.float32),
    )
    origin = {
        "weights": "w",
        "data": to_values(data),
        "split": "train",
        "image_shape": list(image_set.image_shape),
        "digest": fingerprint(image_set),
    }
    content = encoded(rows, (), origin)
    name = str(folder.with_name("train-00000-of-00001.parquet"))
    keys: list[Key] = [("train", row, path) for row, path in enumerate(rows.paths)]
    return read_set([(name, lambda: io.BytesIO(content))]), keys


def shades(found: Thumbnails) -> dict[str, tuple[tuple[int, int], object]]:
    """Size and shade of the pictures by the names of their files."""
    pictures = {
        Path(path or "").name: Image.open(io.BytesIO(base64.b64decode(address.partition(",")[2]))).convert("L")
        for (_, _, path), address in found.pictures.items()
    }
    return {name: (picture.size, picture.getpixel((0, 0))) for name, picture in pictures.items()}


@pytest.mark.parametrize(("size_px", "size"), [(8, (8, 8)), (None, (20, 10))])
def test_pictures_are_those_of_the_set(photos: Path, size_px: int | None, size: tuple[int, int]):
    embeddings, keys = embedded(photos, size_px)
    found = thumbnails(keys, embeddings, None)
    assert found.missing is None
    assert shades(found) == {f"{number}.png": (size, 40 * number) for number in range(5)}


def test_after_a_file_was_deleted_each_picture_is_of_its_own_file(photos: Path):
    embeddings, keys = embedded(photos)
    (photos / "1.png").unlink()
    found = thumbnails(keys, embeddings, None)
    assert shades(found) == {f"{number}.png": ((20, 10), 40 * number) for number in (0, 2, 3, 4)}
    assert found.missing is not None and found.missing.startswith("the train split of photos does not have the images")


def test_a_set_that_was_moved_is_recognised_by_its_images(photos: Path):
    embeddings, keys = embedded(photos)
    moved = photos.rename(photos.with_name("moved"))
    found = thumbnails(keys, embeddings, FolderConfig(root=str(moved), num_channels=1))
    assert found.missing is None
    assert shades(found) == {f"{number}.png": ((8, 8), 40 * number) for number in range(5)}


def test_files_of_a_foreign_table_are_read_as_data_sets_are(tmp_path: Path):
    Image.fromarray(np.full((4, 4), 0x8000, np.uint16)).save(tmp_path / "deep.png")
    (tmp_path / "bomb.png").write_bytes(_png_of(30_000, 30_000))
    (tmp_path / "drawing.eps").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 4 4\n%%EndComments\n%%EOF\n")
    names = ["deep.png", "bomb.png", "drawing.eps", "none.png"]
    keys: list[Key] = [("mine", row, str(tmp_path / name)) for row, name in enumerate(names)]
    foreign = Rows(rows=np.arange(1), paths=[None], labels=np.array([-1]), embeddings=np.ones((1, 2), np.float32))
    embeddings = read_set([("mine.parquet", lambda: io.BytesIO(encoded(foreign, (), {})))])
    found = thumbnails([*keys, ("mine", 4, str(tmp_path)), ("mine", 5, None)], embeddings, None)
    assert shades(found) == {"deep.png": ((4, 4), 0x80)}
    assert found.missing is not None and found.missing.startswith("the files do not say which images they are of;")
    # A set that is given could not be compared with the images that were embedded.
    assert "data=" not in found.missing
    assert thumbnails(keys, embeddings, FolderConfig(root=str(tmp_path))) == thumbnails(keys, embeddings, None)


def _png_of(width: int, height: int) -> bytes:
    """A PNG that states a size, and has hardly any pixels."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        checksum = zlib.crc32(kind + content)
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", checksum)

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b"")
