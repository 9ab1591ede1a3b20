"""The features that an encoder computes for a data set, whose images are divided among the workers."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64, Integer
from torch import Tensor, nn

from ssl_sec.augment.views import unit_range
from ssl_sec.collectives import gather_rows, max_over_workers, rank, world_size
from ssl_sec.data.encoded_images import DecodedImages
from ssl_sec.data.image_set import ImageSet
from ssl_sec.data.loading import batches
from ssl_sec.errors import DataError, counted
from ssl_sec.evaluation.arrays import as_tensor
from ssl_sec.evaluation.feature_table import FeatureTable
from ssl_sec.modes import evaluating
from ssl_sec.progress import logged
from ssl_sec.rules import Range

Indices = Integer[Tensor, " images"] | Integer[np.ndarray, " images"] | Sequence[int]
Corrupt = Callable[[Float[Tensor, "batch channels height width"], Int64[Tensor, " batch"]], Tensor]


def extract_features(
    encoder: nn.Module,
    image_set: ImageSet,
    indices: Indices | None = None,
    device: torch.device | None = None,
    *,
    batch_size: int = 512,
    num_loader_workers: int = 0,
    corrupt: Corrupt | None = None,
) -> tuple[Float[Tensor, "images dim"], Int64[Tensor, " images"]]:
    """Features and labels of the images at `indices`, in that order, on every worker.

    Args:
        encoder: images in [0, 1] -> features; in evaluation mode during the call.
        image_set: the data set.
        indices: indices of the images, at least one; None takes all images.
        device: the encoder's device; None takes the device of its parameters.
        batch_size: images in a forward pass of one worker, ≥ 1.
        num_loader_workers: number of processes that decode a streamed set.
        corrupt: function from images in [0, 1] and their indices to the encoder's input; None changes nothing.

    Returns:
        Features in float32 or the encoder's float64, and labels, both on `device`. An image that cannot be read has
        those of the image that replaces it, which then occurs twice; `readable` tells which images these are.

    Raises:
        ConfigError: `batch_size` is below 1.
        DataError: there are no indices, one is outside the set, or an `Encoder` was built for other channels.
    """
    options = {"batch_size": batch_size, "num_loader_workers": num_loader_workers, "corrupt": corrupt}
    return feature_table(encoder, image_set, indices, device, **options).rows


@torch.no_grad()
def feature_table(
    encoder: nn.Module,
    image_set: ImageSet,
    indices: Indices | None = None,
    device: torch.device | None = None,
    *,
    batch_size: int = 512,
    num_loader_workers: int = 0,
    corrupt: Corrupt | None = None,
    before_batch: Callable[[], object] | None = None,
    limit_mib: int | None = None,
) -> FeatureTable:
    """Features and labels of images, whose features stay divided among the workers if they are large.

    Args:
        encoder: as for `extract_features`, and so are the others.
        image_set: the data set.
        indices: indices of the images.
        device: the encoder's device.
        batch_size: images in a forward pass of one worker.
        num_loader_workers: number of processes that decode a streamed set.
        corrupt: function from images and their indices to the encoder's input.
        before_batch: function that every worker calls before each of its batches, as many times as the others.
        limit_mib: size above which several workers divide the features, MiB; None for no limit.

    Raises:
        ConfigError: as for `extract_features`.
        DataError: as for `extract_features`.
    """
    Range(ge=1).check("batch_size", batch_size)
    indices = _as_indices(image_set, indices)
    device = next((p.device for p in encoder.parameters()), torch.device("cpu")) if device is None else device
    per_worker = -(-len(indices) // world_size())
    # The last worker repeats images from the start so that all workers gather the same number of rows.
    padded = indices.repeat(-(-per_worker * world_size() // len(indices)))[: per_worker * world_size()]
    own = padded[rank() * per_worker : (rank() + 1) * per_worker]
    dtype = next((p.dtype for p in encoder.parameters()), torch.float32)
    # Filled batch by batch: parts that are joined at the end take twice the memory.
    features, labels = torch.empty(0), torch.empty(per_worker, dtype=torch.int64, device=device)
    done = 0
    with evaluating(encoder):
        own_batches = batches(image_set, list(own.split(batch_size)), device, num_loader_workers)
        task, workers = f"computing features of {image_set.name}", world_size()
        for batch in logged(own_batches, task, len(padded), size=lambda batch: len(batch.labels) * workers):
            if before_batch is not None:
                before_batch()
            images = unit_range(batch.images)
            rows = encoder((images if corrupt is None else corrupt(images, batch.indices)).to(dtype))
            rows = rows if rows.dtype == torch.float64 else rows.float()
            if not done:
                features = rows.new_empty((per_worker, *rows.shape[1:]))
            features[done : done + len(rows)], labels[done : done + len(rows)] = rows, batch.labels
            done += len(rows)
    all_labels = gather_rows(labels)[: len(indices)]
    size = len(indices) * features[0].nbytes
    if world_size() == 1 or limit_mib is None or size <= limit_mib * 2**20:
        return FeatureTable(gather_rows(features)[: len(indices)], all_labels)
    first = min(rank() * per_worker, len(indices))
    return FeatureTable(features[: len(indices) - first], all_labels, first, is_divided=True)


def _as_indices(image_set: ImageSet, indices: Indices | None) -> Int64[Tensor, " images"]:
    chosen = torch.arange(len(image_set)) if indices is None else as_tensor(indices).cpu()
    if chosen.ndim != 1 or not len(chosen) or chosen.is_floating_point() or chosen.dtype == torch.bool:
        found = f"{str(chosen.dtype).removeprefix('torch.')}{list(chosen.shape)}"
        raise DataError(f"{image_set.name}: found indices {found}, must be whole numbers, one or more")
    if len(outside := chosen[(chosen < 0) | (chosen >= len(image_set))]):
        raise DataError(f"{image_set.name}: found index {int(outside[0])}, must be in [0, {len(image_set) - 1}]")
    return chosen.long()


def readable(
    image_set: ImageSet, device: torch.device, indices: Int64[Tensor, " images"] | None = None
) -> Bool[Tensor, " images"]:
    """Mask of the images at `indices` that no worker has failed to read so far; every worker calls this function.

    Args:
        image_set: the data set.
        device: device of the mask.
        indices: indices of the images, on the CPU; None takes all images.
    """
    is_bad = torch.zeros(len(image_set), dtype=torch.int32)
    if isinstance(image_set, DecodedImages):
        is_bad[sorted(image_set.bad_indices)] = 1
    return max_over_workers((is_bad if indices is None else is_bad[indices]).to(device)) == 0


def readable_rows(
    extract: Callable[..., FeatureTable],
    device: torch.device,
    image_set: ImageSet,
    indices: Int64[Tensor, " images"] | None = None,
    corrupt: Corrupt | None = None,
) -> FeatureTable:
    """Features and labels of those of the images that can be read; every worker calls this function.

    An image that replaces an unreadable one is counted twice, and may be one that a classifier was trained on.

    Args:
        extract: `feature_table` with an encoder.
        device: device of the features.
        image_set: the data set.
        indices: indices of the images; None takes all images.
        corrupt: as for `extract_features`.

    Raises:
        DataError: none of the images can be read.
    """
    table = extract(image_set, indices, corrupt=corrupt)
    is_read = readable(image_set, device, indices)
    if is_read.all():
        return table
    if not is_read.any():
        raise DataError(f"{image_set.name}: {counted(len(table), 'image')} to measure, and none can be read")
    return table.only(is_read)
