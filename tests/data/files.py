"""Small image files, good and bad, Parquet files that hold them, and pairs of them."""

import csv
import json
import struct
import zlib
from collections.abc import Collection
from io import BytesIO
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from PIL import Image

from ssl_sec.data.encoded_images import EncodedImages
from ssl_sec.data.standard_sets import open_digits
from ssl_sec.data.stores import MemoryStore


def encode(image: Image.Image, image_format: str = "PNG", **options) -> bytes:
    file = BytesIO()
    image.save(file, image_format, **options)
    return file.getvalue()


def plain(value: int, width: int = 8, height: int = 8) -> bytes:
    """A PNG of one grey value."""
    return encode(Image.new("RGB", (width, height), (value, value, value)))


def noisy_set(num_images: int, bad: Collection[int], num_classes: int = 4, name: str = "noise/train") -> EncodedImages:
    """Grey images of noise with random labels; some are damaged and are skipped."""
    generator = np.random.default_rng(0)
    pixels = generator.integers(0, 256, (num_images, 8, 8), dtype=np.uint8)
    encoded = [b"damaged" if number in bad else encode(Image.fromarray(image)) for number, image in enumerate(pixels)]
    return EncodedImages(
        store=MemoryStore.of(map(str, range(num_images)), encoded),
        labels=torch.from_numpy(generator.integers(0, num_classes, num_images)),
        class_names=tuple(map(str, range(num_classes))),
        image_shape=(1, 8, 8),
        name=name,
        description="noise",
        on_bad_image="skip",
    )


def noise(width: int = 64, height: int = 64) -> Image.Image:
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def bomb(width: int = 20_000, height: int = 20_000) -> bytes:
    """A PNG of a few bytes whose header claims many pixels."""
    return coloured_png(width, height, 8, b"")


def coloured_png(width: int, height: int, bits: int, rows: bytes) -> bytes:
    """A PNG of colours of 8 or 16 bits, as Pillow cannot write them; each row begins with a byte of 0."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", width, height, bits, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def write_parquet(
    path: Path,
    images: list[bytes | None],
    labels: list | pa.Array,
    class_names: list[str] | None = None,
    image_column: str = "image",
    label_column: str = "label",
) -> Path:
    column = pa.array(
        [None if image is None else {"bytes": image, "path": "a.png"} for image in images],
        pa.struct({"bytes": pa.binary(), "path": pa.string()}),
    )
    labels = labels if isinstance(labels, pa.Array) else pa.array(labels, pa.int64())
    table = pa.table({image_column: column, label_column: labels})
    if class_names is not None:
        features = {image_column: {"_type": "Image"}, label_column: {"names": class_names, "_type": "ClassLabel"}}
        table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    pq.write_table(table, path, row_group_size=4)
    return path


def write_folder(root: Path, images: dict[str, bytes]) -> Path:
    for name, image in images.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(image)
    return root


def write_digit_pairs(root: Path) -> tuple[Path, Path]:
    """A table of pairs of test digits in two folds, and the folder of the ten people."""
    digits = open_digits("test")
    names = []
    for number, label in enumerate(digits.labels[:80].tolist()):
        path = root / "images" / f"digit {label}" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(digits.read(torch.tensor([number])).images[0, 0].numpy()).save(path)
        names.append((f"digit {label}/{number}.png", label))
    with (root / "pairs.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["first", "second", "same", "fold"])
        for fold, (first, one), (second, other) in (
            (number % 2, names[number], names[-step]) for number in range(40) for step in range(1, 20)
        ):
            writer.writerow([first, second, int(one == other), fold])
    return root / "pairs.csv", root / "images"
