"""Embeddings and labels, the inputs of the measures: tensors on any device, or NumPy arrays."""

from collections.abc import Iterator

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Integer
from torch import Tensor
from torch.nn import functional

from ssl_sec.errors import DataError

Embeddings = Float[Tensor, "images dim"] | Float[np.ndarray, "images dim"]
# The functions check that sizes agree, with errors that name the arguments that do not.
Rows = Float[Tensor, "_ dim"] | Float[np.ndarray, "_ dim"]
Labels = Int[Tensor, " _"] | Int[np.ndarray, " _"]
Scores = Float[Tensor, " _"] | Float[np.ndarray, " _"]
Same = Bool[Tensor, " _"] | Integer[Tensor, " _"] | Bool[np.ndarray, " _"] | Integer[np.ndarray, " _"]
Selection = Bool[Tensor, " _"] | Int[Tensor, " _"] | Bool[np.ndarray, " _"] | Int[np.ndarray, " _"]


def as_tensor(values: Tensor | np.ndarray) -> Tensor:
    """The tensor itself, or a copy of the array."""
    # A copy, as torch warns if it shares a read-only array, such as a memory-mapped one.
    return values.detach() if isinstance(values, Tensor) else torch.tensor(values)


def as_same(same: Same) -> Bool[Tensor, " pairs"]:
    """Whether both images of each pair show one person, of booleans or of 0 and 1.

    Raises:
        DataError: a value is neither.
    """
    values = as_tensor(same)
    if values.dtype == torch.bool:
        return values
    if len(outside := values[(values != 0) & (values != 1)]):
        raise DataError(f"verification: found {outside[0].item():g} in same, must be booleans, or 0 and 1")
    return values == 1


def unit_rows(embeddings: Float[Tensor, "images dim"]) -> Float[Tensor, "images dim"]:
    """The rows' directions, of length 1, or 0 where a row is 0; NaN where it is not finite."""
    return functional.normalize(embeddings, dim=1, eps=torch.finfo(embeddings.dtype).tiny)


def rounded(cosines: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Cosines in float64, rounded to multiples of 2⁻²⁴, in float32, which holds these exactly.

    Equally similar rows then tie, as they should, whatever their norms and the order of a sum.
    """
    return torch.round(cosines * 2**24).mul_(2**-24).float()


def tiles(count: int, size: int) -> Iterator[slice]:
    """Consecutive slices of `size`; the last one has the rest."""
    return (slice(start, min(start + size, count)) for start in range(0, count, size))
