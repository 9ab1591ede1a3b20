"""Images of the given indices, in order, on the device."""

import itertools
import logging
import multiprocessing.util
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Int64
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from ssl_sec.batch import Batch
from ssl_sec.data.encoded_images import EncodedImages, record_bad
from ssl_sec.data.image_set import ImageSet
from ssl_sec.data.log import log_once
from ssl_sec.data.shards.streamed import StreamedImages
from ssl_sec.errors import UserError

# How a data loader starts its processes; None for Python's own way. On Linux, that is a server from Python 3.14 on: its
# processes import torch anew, for seconds and 300 MB each, and outlive a run that is killed, since it is their parent.
START_METHOD = "fork" if sys.platform == "linux" else None
# Longest path of the folder for temporary files: the names of sockets there, by which the processes send images, add 32
# bytes (`/pymp-…/listener-…`), and Linux allows 107.
_LONGEST_FOLDER = 75


def batches(
    image_set: ImageSet,
    index_batches: Iterable[Int64[Tensor, " _batch"]],
    device: torch.device,
    num_loader_workers: int,
    prefetch: int = 2,
    draws: Iterable[Int64[Tensor, " _batch"]] | None = None,
) -> Iterator[Batch]:
    """One batch for each element of `index_batches`, in that order.

    Resident images are indexed on their device. Encoded ones are decoded in worker processes, those of a set that is
    read by blocks in threads, which end with the iterator: when it is exhausted, closed or deleted.

    Args:
        image_set: the images.
        index_batches: positions in `image_set`, on the CPU; may be endless. It is read ahead by
            num_loader_workers · prefetch batches.
        device: device of the batches.
        num_loader_workers: processes or threads that decode, no more than there are batches; 0 decodes in this one. No
            effect on resident images.
        prefetch: batches that each process keeps ready, ≥ 1.
        draws: for each batch, random numbers for the crops of its rows. No effect on resident images.

    Raises:
        DataError: an image cannot be read and may not be replaced; raised at its batch's turn.
        ConfigError: the package that reads it is not installed; likewise.
    """
    rows = zip(index_batches, itertools.repeat(None)) if draws is None else zip(index_batches, draws, strict=True)
    if isinstance(image_set, EncodedImages) and num_loader_workers > 0:
        yield from _decode_in_workers(image_set, rows, device, num_loader_workers, prefetch)
    elif isinstance(image_set, StreamedImages):
        yield from image_set.stream(rows, device, num_loader_workers, prefetch)
    else:
        for indices, drawn in rows:
            yield image_set.read(indices, drawn).to(device)


@dataclass(frozen=True, slots=True)
class _Arrays:
    """A batch as arrays, which are sent through a pipe; the data loader would make tensors of those in a tuple."""

    images: NDArray[np.uint8]
    labels: NDArray[np.int64]
    indices: NDArray[np.int64]


_Sent = Batch | _Arrays


class _Decoding(Dataset[tuple[_Sent, dict[int, str]] | UserError]):
    """The worker's part: decodes a batch from lists of indices and of draws."""

    def __init__(self, image_set: EncodedImages) -> None:
        self.image_set = image_set

    def __getitem__(self, index: tuple[list[int], list[int] | None]) -> tuple[_Sent, dict[int, str]] | UserError:
        # Returned rather than raised: the data loader would wrap it in a traceback of many lines.
        try:
            indices, draws = index
            batch, bad = self.image_set.decode(torch.tensor(indices), None if draws is None else torch.tensor(draws))
        except UserError as error:
            return error
        return _sent(batch), bad


def _sent(batch: Batch) -> _Sent:
    """The batch as it is sent to the process that trains: through shared memory, if that has room for it.

    The data loader itself would move the tensors there after this, in a thread whose errors nobody sees: it would wait
    for the batch forever. Containers of Docker have 64 MiB of shared memory by default.
    """
    try:
        for tensor in (batch.images, batch.labels, batch.indices):
            tensor.share_memory_()
    except RuntimeError:  # no space left on the device, or too many open files
        return _Arrays(batch.images.numpy(), batch.labels.numpy(), batch.indices.numpy())
    return batch


def _received(sent: _Sent) -> Batch:
    if isinstance(sent, Batch):
        return sent
    log_once(
        logging.WARNING,
        "batches of %s MiB do not fit into the shared memory (/dev/shm): they are sent through pipes, which is slower; "
        "`docker run --shm-size 8g` gives a container more",
        f"{sent.images.nbytes / 2**20:.3g}",
    )
    return Batch(
        images=torch.from_numpy(sent.images),
        labels=torch.from_numpy(sent.labels),
        indices=torch.from_numpy(sent.indices),
    )


def _decode_in_workers(
    image_set: EncodedImages,
    rows: Iterable[tuple[Tensor, Tensor | None]],
    device: torch.device,
    num_loader_workers: int,
    prefetch: int,
) -> Iterator[Batch]:
    rows = iter(rows)
    first = list(itertools.islice(rows, num_loader_workers))  # as many as the processes, if there are no fewer
    if not first:
        return
    _shorten_paths_of_sockets()
    loader = DataLoader(
        _Decoding(image_set),
        # An element of `sampler` is one index to the loader; ours is a whole batch, so it collates nothing.
        sampler=(
            (indices.tolist(), None if drawn is None else drawn.tolist())
            for indices, drawn in itertools.chain(first, rows)
        ),
        batch_size=None,
        num_workers=len(first),
        multiprocessing_context=START_METHOD,
        prefetch_factor=prefetch,
        pin_memory=device.type == "cuda",
        # The loader draws a seed for its workers: from its own generator, not from the global one.
        generator=torch.Generator(),
    )
    loaded = iter(loader)
    try:
        for result in loaded:
            if isinstance(result, UserError):
                raise result
            sent, bad = result
            record_bad(image_set, bad)
            yield _received(sent).to(device)
    finally:
        # The last reference: the loader's iterator ends and joins its processes when it is collected.
        del loaded


def _shorten_paths_of_sockets() -> None:
    """Puts the sockets of processes that this one starts below /tmp, where the path in TMPDIR is too long for them."""
    if len(os.fsencode(tempfile.gettempdir())) > _LONGEST_FOLDER:
        before, tempfile.tempdir = tempfile.tempdir, "/tmp"
        try:
            multiprocessing.util.get_temp_dir()  # makes a folder at the first call, and removes it at the end
        finally:
            tempfile.tempdir = before
