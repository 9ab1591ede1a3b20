"""Embeddings and labels as the measures take them: tensors on any device, or NumPy's arrays."""

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

Embeddings = Float[Tensor, "images dim"] | Float[np.ndarray, "images dim"]
# Sizes that must agree are left to the functions, whose errors name what does not.
Labels = Int[Tensor, " _"] | Int[np.ndarray, " _"]
Selection = Bool[Tensor, " _"] | Int[Tensor, " _"] | Bool[np.ndarray, " _"] | Int[np.ndarray, " _"]


def as_tensor(values: Tensor | np.ndarray) -> Tensor:
    """The tensor itself, or a copy of the array."""
    # A copy, as torch warns of sharing an array that may not be written to, such as a memory-mapped one.
    return values.detach() if isinstance(values, Tensor) else torch.tensor(values)
