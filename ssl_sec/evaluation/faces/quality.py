"""Whether norms tell which genuine pairs will be refused, as they do if they measure the quality of an image.

The quality of a pair is the lesser of its two norms. If it says something about the images, discarding the pairs of
lowest quality lowers the share of genuine pairs that are refused: the error versus discard characteristic of Grother
and Tabassi (2007), which MagFace (Meng et al. 2021) draws.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ssl_sec.losses.geometry import norms


def pair_quality(first: Float[Tensor, "pairs dim"], second: Float[Tensor, "pairs dim"]) -> Float[Tensor, " pairs"]:
    """The lesser norm of each pair's embeddings, the lowest quality if one of them is not finite.

    Args:
        first: raw embedding of the first image of each pair.
        second: that of the second.
    """
    both = torch.stack([norms(first), norms(second)])
    return both.amin(0).masked_fill(~both.isfinite().all(0), -torch.inf)


def refused_after_discards(
    quality: Float[Tensor, " genuine"], refused: Bool[Tensor, " genuine"]
) -> Float[Tensor, " genuine"]:
    """Share of the remaining genuine pairs that are refused after 0, 1, 2, … of the lowest quality are discarded.

    The threshold stays. Of pairs of one quality, accepted ones are discarded first, so that no tie counts in favour.

    Args:
        quality: quality of each genuine pair, one pair or more.
        refused: whether it is refused.

    Returns:
        Shares in [0, 1], as many as there are pairs: the last one has a single pair left.
    """
    accepted_first = refused.long().argsort(stable=True)
    order = accepted_first[quality[accepted_first].argsort(stable=True)]
    left = torch.arange(1, len(refused) + 1, device=refused.device)
    return (refused[order].flip(0).cumsum(0).double() / left).flip(0)


def quality_auc(quality: Float[Tensor, " genuine"], refused: Bool[Tensor, " genuine"]) -> float | None:
    """The probability that a refused genuine pair has a lower quality than an accepted one; a tie counts half.

    0.5 if quality says nothing about refusals, 1 if it foretells all of them (the area under the ROC curve).

    Args:
        quality: quality of each genuine pair.
        refused: whether it is refused.

    Returns:
        The probability; None if all pairs are refused, or none.
    """
    accepted, low = quality[~refused].sort().values, quality[refused].contiguous()
    if len(accepted) == 0 or len(low) == 0:
        return None
    below, not_above = (torch.searchsorted(accepted, low, right=right) for right in (False, True))
    return 1 - float((below + not_above).double().mean()) / (2 * len(accepted))
