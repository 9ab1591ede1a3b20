"""Embeddings and labels, the inputs of the measures: tensors on any device, or NumPy arrays."""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Int64, Integer
from torch import Tensor
from torch.nn import functional

from ssl_sec.errors import ConfigError, DataError, counted
from ssl_sec.rules import Range

T = TypeVar("T")

Embeddings = Float[Tensor, "images dim"] | Float[np.ndarray, "images dim"]
# The functions check that sizes agree, with errors that name the arguments that do not.
Rows = Float[Tensor, "_ dim"] | Float[np.ndarray, "_ dim"]
Labels = Integer[Tensor, " _"] | Integer[np.ndarray, " _"]
Scores = Float[Tensor, " _"] | Float[np.ndarray, " _"]
Same = Bool[Tensor, " _"] | Integer[Tensor, " _"] | Bool[np.ndarray, " _"] | Integer[np.ndarray, " _"]
Selection = Bool[Tensor, " _"] | Int[Tensor, " _"] | Bool[np.ndarray, " _"] | Int[np.ndarray, " _"]


def as_tensor(values: Tensor | np.ndarray | Sequence[int]) -> Tensor:
    """The tensor itself, or a copy of the array or list."""
    if isinstance(values, Tensor):
        return values.detach()
    if not isinstance(values, np.ndarray):
        return torch.tensor(values)
    # A copy, as torch warns if it shares a read-only array, such as a memory-mapped one, and takes neither a reversed
    # one nor one in the byte order of other processors, as of MNIST's files.
    return torch.from_numpy(values.astype(values.dtype.newbyteorder("="), order="C"))


def as_rows(embeddings: Rows) -> Float[Tensor, "images dim"]:
    """Embeddings as a tensor.

    Raises:
        DataError: they are not one row for each image.
    """
    rows = as_tensor(embeddings)
    if rows.ndim != 2:
        raise DataError(f"embeddings: found the shape {list(rows.shape)}, must be [images, dim]")
    return rows


def as_same(same: Same) -> Bool[Tensor, " pairs"]:
    """Whether both images of each pair show one person, of booleans or of 0 and 1.

    Raises:
        DataError: a value is neither, or they are not one value for each pair.
    """
    values = as_tensor(same)
    if values.ndim != 1:
        raise DataError(f"verification: found same of shape {list(values.shape)}, must be [pairs]")
    if values.dtype == torch.bool:
        return values
    if len(outside := values[(values != 0) & (values != 1)]):
        raise DataError(f"verification: found {outside[0].item():g} in same, must be booleans, or 0 and 1")
    return values == 1


def as_scores(scores: Scores, same: Same) -> tuple[Float[Tensor, " pairs"], Bool[Tensor, " pairs"]]:
    """The scores of pairs as floats, and which pairs are genuine, on the device of the scores.

    Raises:
        DataError: they are not one for each pair.
    """
    values, is_genuine = as_tensor(scores), as_same(same)
    if values.ndim != 1:
        raise DataError(f"verification: found scores of shape {list(values.shape)}, must be [pairs]")
    if len(values) != len(is_genuine):
        raise DataError(f"verification: {counted(len(values), 'score')} for {counted(len(is_genuine), 'pair')}")
    return values if values.is_floating_point() else values.double(), is_genuine.to(values.device)


def several(key: str, values: Iterable[T], what: str) -> list[T]:
    """The values as a list, those of a tensor or an array as numbers.

    Args:
        key: name of the argument, for the message.
        values: the values.
        what: what they are, in the plural.

    Raises:
        ConfigError: they are a single value.
    """
    if isinstance(values, Tensor | np.ndarray):
        values = values.tolist()
    if not isinstance(values, Iterable):
        raise ConfigError(f"{key}: found {values}, must be several {what}, such as [{values}]")
    return list(values)


def as_labels(what: str, labels: Labels) -> Int64[Tensor, " images"]:
    """Labels as a tensor of int64.

    Args:
        what: their name in messages.
        labels: class of each image, any type of whole numbers.

    Raises:
        DataError: they are of another type, or not one number for each image.
    """
    if not isinstance(labels, Tensor) and (given := np.asarray(labels)).dtype.kind in "OSU":
        found = f"the label {given.flat[0]!s}" if given.size else f"no labels, of type {given.dtype}"
        raise DataError(
            f"{what}: found {found}, must be whole numbers, as of numpy.unique(labels, return_inverse=True)[1]"
        )
    classes = as_tensor(labels)
    if classes.ndim != 1:
        raise DataError(f"{what}: found labels of shape {list(classes.shape)}, must be [images]")
    if classes.is_floating_point() or classes.is_complex() or classes.dtype == torch.bool:
        found = str(classes.dtype).removeprefix("torch.")
        raise DataError(f"{what}: found labels of type {found}, must be whole numbers")
    return classes.long()


def as_labelled(
    what: str, features: Rows, labels: Labels, num_classes: int | None = None
) -> tuple[Float[Tensor, "images dim"], Int64[Tensor, " images"]]:
    """Features and labels as tensors, which may stay on different devices.

    Args:
        what: their name in messages.
        features: one row for each image.
        labels: class of each image, any type of whole numbers.
        num_classes: labels must be below it; None for no limit.

    Raises:
        DataError: there are no images, their numbers differ, or a label is outside its range.
    """
    rows, classes = as_tensor(features), as_labels(what, labels)
    if rows.ndim != 2 or len(rows) != len(classes) or not len(rows):
        raise DataError(
            f"{what}: found features of shape {list(rows.shape)} and labels of shape {list(classes.shape)}, must be "
            "[images, dim] and [images], one image or more"
        )
    lowest, highest = (int(end) for end in classes.aminmax())
    if lowest < 0 or (num_classes is not None and highest >= num_classes):
        allowed = "≥ 0" if num_classes is None else f"in [0, {num_classes - 1}] (num_classes)"
        raise DataError(f"{what}: found label {lowest if lowest < 0 else highest}, must be {allowed}")
    return rows, classes


def require_same_dim(what: str, one: Tensor, other: Tensor) -> None:
    """Raises a DataError unless the rows of both have one number of dimensions."""
    if one.shape[1] != other.shape[1]:
        raise DataError(f"{what}: found rows of {one.shape[1]} and of {other.shape[1]} dimensions, must be one number")


def unit_rows(embeddings: Float[Tensor, "images dim"]) -> Float[Tensor, "images dim"]:
    """The rows' directions, of length 1, or 0 where a row is 0; NaN where it is not finite.

    Rows are first divided by a power of two, which is exact, so that their squares neither overflow nor vanish.
    """
    limits = torch.finfo(embeddings.dtype)
    exponents = torch.frexp(embeddings.abs().amax(1, keepdim=True)).exponent
    largest = math.frexp(limits.max)[1] - 2
    scaled = torch.ldexp(embeddings, -exponents.clamp(-largest, largest))
    return functional.normalize(scaled, dim=1, eps=limits.tiny)


def rounded(cosines: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Cosines in float64, rounded to multiples of 2⁻²⁴, in float32, which holds these exactly.

    Equally similar rows then tie, as they should, whatever their norms and the order of a sum.
    """
    return torch.round(cosines * 2**24).mul_(2**-24).float()


def tiles(count: int, size: int) -> Iterator[slice]:
    """Consecutive slices of `size`, ≥ 1; the last one has the rest.

    Raises:
        ConfigError: `size` is outside its range.
    """
    Range(ge=1).check("size of a part", size)
    return (slice(start, min(start + size, count)) for start in range(0, count, size))
