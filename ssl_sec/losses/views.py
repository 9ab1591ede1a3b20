"""From views of images to what every loss takes."""

import torch
from jaxtyping import Float, Int64
from torch import Tensor


def from_views(*views: Float[Tensor, "images dim"]) -> tuple[Float[Tensor, "batch dim"], Int64[Tensor, " batch"]]:
    """The embeddings of several views of the same images as one batch: `loss(*from_views(z1, z2))`.

    Args:
        views: two or more, each with one row for each image, in one order.

    Returns:
        The rows of the views, one view after the other, and for each row the number of its image: views of one image
        are positives of each other.

    Raises:
        ValueError: there are fewer than two views, or they have not one shape.
    """
    if len(views) < 2:
        raise ValueError(f"from_views: found {len(views)} views, must be two or more: from_views(z1, z2)")
    shapes = [tuple(view.shape) for view in views]
    if len(shapes[0]) != 2 or len(set(shapes)) > 1:
        raise ValueError(f"from_views: found views of shapes {shapes}, must be [images, dim], the same for all")
    images = torch.arange(len(views[0]), device=views[0].device)
    return torch.cat(views), images.repeat(len(views))
