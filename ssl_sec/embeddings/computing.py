"""The embeddings that a network computes for some images of a set."""

from collections.abc import Callable
from itertools import pairwise

import torch
from jaxtyping import Int64
from torch import Tensor, nn

from ssl_sec.augment.views import unit_range
from ssl_sec.data.encoded_images import DecodedImages
from ssl_sec.data.image_set import ImageSet
from ssl_sec.data.loading import batches
from ssl_sec.embeddings.parts import Rows
from ssl_sec.training.recipe import Computation


@torch.no_grad()
def embed(
    network: nn.Module,
    image_set: ImageSet,
    rows: range,
    device: torch.device,
    computation: Computation,
    batch_size: int,
    on_images: Callable[[int], object] = lambda count: None,
) -> Rows:
    """The embeddings of consecutive images; those that cannot be read, and may be skipped, are left out.

    Args:
        network: images in [0, 1] -> embeddings, in evaluation mode, on the device.
        image_set: the set.
        rows: rows of the images; at least one.
        device: where it is computed.
        computation: how.
        batch_size: images of a forward pass.
        on_images: called with the number of images after each forward pass.

    Raises:
        DataError: an image cannot be read and may not be skipped.
    """
    bounds = [*range(rows.start, rows.stop, batch_size), rows.stop]
    indices = [torch.arange(start, end) for start, end in pairwise(bounds)]
    is_read: list[Tensor] = []
    found: list[Tensor] = []
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=computation.precision == "bfloat16")
    flow = batches(image_set, indices, device, computation.num_loader_workers)
    for wanted, batch in zip(indices, flow, strict=True):
        # An image that cannot be read has been replaced by another one. Nothing here waits for a GPU.
        is_read.append(batch.indices == wanted.to(device, non_blocking=True))
        images = unit_range(batch.images).to(computation.dtype, memory_format=computation.layout)
        with autocast:
            embeddings = network(images).float()
        found.append(embeddings)
        on_images(len(wanted))
    mask = torch.cat(is_read)
    chosen = torch.arange(rows.start, rows.stop)[mask.cpu()]
    return Rows(
        rows=chosen.numpy(),
        paths=paths(image_set, chosen),
        labels=image_set.labels[chosen].numpy(),
        embeddings=torch.cat(found)[mask].cpu().numpy(),
    )


def paths(image_set: ImageSet, chosen: Int64[Tensor, " images"]) -> list[str | None]:
    """The path of each image, or the file and row that it is in; None where the set has none."""
    if isinstance(image_set, DecodedImages):
        return [image_set.image_name(index) for index in chosen.tolist()]
    return [None] * len(chosen)
