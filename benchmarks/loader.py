"""Loads images from tar shards: ours by blocks, the webdataset library, and a torch DataLoader over files.

    CUDA_VISIBLE_DEVICES= python -m benchmarks.loader                           # 4 minutes on two CPU cores
    CUDA_VISIBLE_DEVICES= python -m benchmarks.loader --data 'photos/*.parquet' --size 64

One epoch of the same JPEGs, decoded and cropped to a square, in batches of 256, without a network to train; the loaders
take turns. Ours draws the images of step t as a function of (seed, t), and shuffles in a window of 512 images. So does
webdataset, whose order depends on the number of its processes. The images are random (500 x 375 pixels) or taken from
the image column of Parquet files.

The same shards are then read from a server on this machine that answers each request after a delay, and that counts the
bytes it sends: in an epoch, and up to the first batch of a run that resumes in the middle of one.

Writes benchmarks/results/loader-{cpu,gpu}.json.
"""

import contextlib
import io
import itertools
import multiprocessing
import os
import shutil
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import v2
from torchvision.transforms.functional import to_pil_image

from benchmarks.measure import (
    describe_environment,
    format_table,
    make_parser,
    median_ratio,
    save_results,
    time_in_turns,
)
from ssl_sec.data.decode import Decoding
from ssl_sec.data.loading import batches
from ssl_sec.data.shards.opening import open_webdataset
from ssl_sec.data.shards.streamed import shuffled_batches

NUM_IMAGES, NUM_SHARDS, BATCH, WINDOW = 4096, 16, 256, 512
MIDDLE = NUM_IMAGES // BATCH // 2
# Number of different random images.
NUM_DRAWN = 512
WIDTH, HEIGHT = 500, 375
CPU = torch.device("cpu")
# Bytes that the server sends at once.
_PIECE = 2**16


def main() -> None:
    """Measures the loaders, prints the tables and writes the results."""
    parser = make_parser("loader", __doc__)
    parser.add_argument("--data", help="Parquet files with encoded images, instead of drawn ones")
    parser.add_argument("--size", type=int, default=224, help="side of the decoded images, pixels")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each")
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--workers", type=int, default=cores, help="processes or threads of each")
    parser.add_argument("--delay-ms", type=int, default=50, help="before the server's answers")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        images = draw_jpegs(NUM_IMAGES) if options.data is None else read_jpegs(options.data)
        num_bytes = write_images(images, Path(folder))
        shown = f"{NUM_IMAGES:,} JPEGs of {num_bytes / NUM_IMAGES / 1024:.0f} KiB in the mean, to {options.size} px"
        print(shown, flush=True)
        local = measure_local(Path(folder), options.size, options.workers, options.rounds)
        print(format_table([format_row(row) for row in local]), flush=True)
        remote = measure_remote(Path(folder), options.size, options.workers, options.delay_ms / 1000, num_bytes)
        print(f"\n{format_table([format_row(row) for row in remote])}")
    values = {"environment": describe_environment(), "images": shown, "workers": options.workers}
    print(f"\n{save_results('loader', {**values, 'local': local, 'remote': remote})}")


def draw_jpegs(count: int) -> Iterator[bytes]:
    """Draws images with the spectrum of photos, roughly: noise of several resolutions."""
    generator = torch.Generator().manual_seed(0)
    drawn: list[bytes] = []
    for _ in range(min(count, NUM_DRAWN)):
        image = torch.zeros(1, 3, HEIGHT, WIDTH)
        for scale in (2, 8, 32, 128):
            noise = torch.randn(1, 3, -(-HEIGHT // scale), -(-WIDTH // scale), generator=generator)
            image += scale**0.5 * functional.interpolate(noise, size=(HEIGHT, WIDTH), mode="bilinear")
        image = (128 + 10 * image[0]).clamp(0, 255).to(torch.uint8)
        file = io.BytesIO()
        to_pil_image(image).save(file, "JPEG", quality=90)
        drawn.append(file.getvalue())
    return itertools.islice(itertools.cycle(drawn), count)


def read_jpegs(files: str) -> Iterator[bytes]:
    """Reads the first images of Parquet files whose image column is a struct with the encoded bytes."""
    import pyarrow.dataset as ds

    rows = ds.dataset(sorted(map(str, Path().glob(files))) or files).to_batches()
    columns = ((batch, next(name for name in batch.schema.names if name in ("image", "img"))) for batch in rows)
    everything = (row["bytes"] for batch, name in columns for row in batch[name].to_pylist())
    return itertools.islice(everything, NUM_IMAGES)


def write_images(images: Iterator[bytes], folder: Path) -> int:
    """Writes the images as tar shards and as single files; returns the number of their bytes."""
    num_bytes = 0
    (folder / "files").mkdir()
    per_shard = NUM_IMAGES // NUM_SHARDS
    for shard in range(NUM_SHARDS):
        with tarfile.open(folder / f"shard-{shard:03d}.tar", "w") as archive:
            for number, content in enumerate(itertools.islice(images, per_shard)):
                name = f"{shard * per_shard + number:06d}.jpg"
                member = tarfile.TarInfo(name)
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
                (folder / "files" / name).write_bytes(content)
                num_bytes += len(content)
    return num_bytes


class Ours:
    """Our loader on shards that are read by blocks.

    Args:
        shards: paths or URLs of the shards.
        size_px: side of the decoded images.
        workers: number of threads that decode.
        cache: folder for the shards' indices.
    """

    def __init__(self, shards: list[str], size_px: int, workers: int, cache: Path) -> None:
        decoding = Decoding(image_size_px=size_px, resident_limit_mib=0)
        self._open = lambda: open_webdataset(
            "train", shards, decoding=decoding, cache_folder=cache, shuffle_window=WINDOW
        )
        self._workers = workers

    def __call__(self, first_step: int = 0) -> Iterator[Tensor]:
        """The batches of an epoch from a step on, with nothing cached in memory."""
        image_set = self._open()
        sampler = shuffled_batches(image_set, BATCH, seed=0)
        steps = range(first_step, sampler.steps_per_epoch)
        for batch in batches(image_set, (sampler.indices(step) for step in steps), CPU, self._workers):
            yield batch.images


class Webdataset:
    """The webdataset library's loader on the same shards; arguments as for `Ours`."""

    def __init__(self, shards: list[str], size_px: int, workers: int) -> None:
        self._shards, self._workers = shards, workers
        self._crop = square_crop(size_px)

    def __call__(self, first_step: int = 0) -> Iterator[Tensor]:
        """The batches of an epoch; those before the first step are read and skipped."""
        from webdataset import WebDataset, WebLoader  # pyright: ignore[reportAttributeAccessIssue]

        images = WebDataset(self._shards, shardshuffle=NUM_SHARDS, seed=0).shuffle(WINDOW).decode("pil")
        decoded = images.to_tuple("jpg").map_tuple(self._crop).batched(BATCH)
        loader = WebLoader(decoded, batch_size=None, num_workers=self._workers)
        return (images for (images,) in itertools.islice(loader, first_step, None))


class Files(Dataset[Tensor]):
    """Images of a folder, as torchvision's data sets read them."""

    def __init__(self, folder: Path, size_px: int) -> None:
        self._paths = sorted(folder.iterdir())
        self._crop = square_crop(size_px)

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> Tensor:
        return self._crop(Image.open(self._paths[index]).convert("RGB"))


def square_crop(size_px: int) -> Callable[[Image.Image], Tensor]:
    """The peers' transform: the short side resized, the centre cropped."""
    return v2.Compose([v2.Resize(size_px), v2.CenterCrop(size_px), v2.PILToTensor()])


def measure_local(folder: Path, size_px: int, workers: int, rounds: int) -> list[dict[str, Any]]:
    """Measures an epoch of each loader on this machine's disk."""
    shards = sorted(map(str, folder.glob("*.tar")))
    loaders: dict[str, Callable[[], Iterator[Tensor]]] = {}
    for number in sorted({0, workers}):
        loaders[f"ours, {number} threads"] = Ours(shards, size_px, number, folder / "cache")
        if find_spec("webdataset"):
            loaders[f"webdataset, {number} processes"] = Webdataset(shards, size_px, number)
        files = DataLoader(Files(folder / "files", size_px), BATCH, shuffle=True, num_workers=number)
        loaders[f"DataLoader of files, {number} processes"] = files.__iter__
    seconds = time_in_turns({name: lambda each=each: count_images(each()) for name, each in loaders.items()}, rounds)
    ours = seconds[f"ours, {workers} threads"]
    return [
        {"loader": name, "images/s": NUM_IMAGES / median(each), "times ours": 1 / median_ratio(each, ours)}
        for name, each in seconds.items()
    ]


def measure_remote(folder: Path, size_px: int, workers: int, delay_s: float, num_bytes: int) -> list[dict[str, Any]]:
    """Measures an epoch, and the first batch in the middle of one, from a server on this machine."""
    rows: list[dict[str, Any]] = []
    for delay in (0.0, delay_s):
        with serve(folder, delay) as (address, sent):
            shards = [f"{address}/{path.name}" for path in sorted(folder.glob("*.tar"))]
            # The first call makes the index.
            ours = Ours(shards, size_px, workers, folder / f"cache-{delay}")
            loaders: dict[str, Callable[[int], Iterator[Tensor]]] = {"ours": ours}
            if find_spec("webdataset") and shutil.which("curl"):
                loaders["webdataset"] = Webdataset(shards, size_px, workers)
            index_s, index_bytes = measure_bytes(lambda: next(ours(0)), sent)  # noqa: B023  # called at once
            for name, loader in loaders.items():
                epoch_s, epoch_bytes = measure_bytes(lambda: count_images(loader(0)), sent)  # noqa: B023
                middle_s, middle_bytes = measure_bytes(lambda: next(loader(MIDDLE)), sent)  # noqa: B023
                rows.append(
                    {
                        "loader": name,
                        "delay ms": 1000 * delay,
                        "images/s": NUM_IMAGES / epoch_s,
                        "bytes an epoch / all images": epoch_bytes / num_bytes,
                        "s to the middle batch": middle_s,
                        "bytes to it / all images": middle_bytes / num_bytes,
                        **(
                            {"s with the index": index_s, "bytes with the index / all images": index_bytes / num_bytes}
                            if loader is ours
                            else {}
                        ),
                    }
                )
    return rows


def count_images(loaded: Iterator[Tensor]) -> int:
    """Counts the images of all batches."""
    return sum(len(images) for images in loaded)


def measure_bytes(function: Callable[[], object], sent: Any) -> tuple[float, int]:
    """Measures the seconds of a call and the bytes that the server sends meanwhile."""
    start, before = time.perf_counter(), sent.value
    function()
    return time.perf_counter() - start, sent.value - before


def format_row(row: dict[str, Any]) -> dict[str, str]:
    """Formats a measurement for the table."""
    return {key: value if isinstance(value, str) else f"{value:.4g}" for key, value in row.items()}


@contextlib.contextmanager
def serve(folder: Path, delay_s: float) -> Iterator[tuple[str, Any]]:
    """Serves a folder by HTTP in a process of its own; yields its address and the number of bytes sent so far."""
    context = multiprocessing.get_context("spawn")
    sent, ports = context.Value("q", 0), context.SimpleQueue()
    process = context.Process(target=run_server, args=(folder, delay_s, sent, ports), daemon=True)
    process.start()
    try:
        yield f"http://127.0.0.1:{ports.get()}", sent
    finally:
        process.terminate()
        process.join()


def run_server(folder: Path, delay_s: float, sent: Any, ports: Any) -> None:
    """Answers requests for files of a folder, or ranges of them, each after a delay."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self._answer(with_content=False)

        def do_GET(self) -> None:
            self._answer(with_content=True)

        def _answer(self, with_content: bool) -> None:
            time.sleep(delay_s)
            content = (folder / self.path.lstrip("/")).read_bytes()
            first, last = 0, len(content) - 1
            if (wanted := self.headers.get("Range")) is not None:
                begin, _, end = wanted.removeprefix("bytes=").partition("-")
                first, last = int(begin), min(int(end or last), last)
            part = content[first : last + 1]
            self.send_response(200 if wanted is None else 206)
            self.send_header("Content-Length", str(len(part)))
            self.send_header("Accept-Ranges", "bytes")
            self.send_header("ETag", "1")
            if wanted is not None:
                self.send_header("Content-Range", f"bytes {first}-{last}/{len(content)}")
            self.end_headers()
            for start in range(0, len(part) if with_content else 0, _PIECE):
                with contextlib.suppress(ConnectionError):  # the reader has closed the connection
                    self.wfile.write(part[start : start + _PIECE])
                    with sent.get_lock():
                        sent.value += len(part[start : start + _PIECE])
                    continue
                self.close_connection = True
                return

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    ports.put(server.server_address[1])
    server.serve_forever()


if __name__ == "__main__":
    main()
