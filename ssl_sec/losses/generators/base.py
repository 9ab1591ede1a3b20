"""The inputs of a generator of rows, and its output: its share of the objective.

    L = w L_metric(X) + w' L_metric(X_gen) + L_gen + L_cls

with the rows X of the batch, the generated rows X_gen, the weights w and w' of the step, the loss L_gen that trains the
generator, and that of a classifier beside it. Like a loss, a generator never communicates or waits for a device: it is
given the global batch and computes the share of a range of anchors; the shares of all workers add up.
"""

from abc import ABC, abstractmethod
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from ssl_sec.losses.base import Loss
from ssl_sec.seeding import derived_seed


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class GlobalBatch:
    """The output of the network for the batch of all workers in one step.

    Attributes:
        features: features of the backbone, in float32 or float64.
        embeddings: raw output of the head, likewise.
        labels: 0 ≤ label < num_classes.
        step: 0-based global step.
    """

    features: Float[Tensor, "batch features"]
    embeddings: Float[Tensor, "batch dim"]
    labels: Int64[Tensor, " batch"]
    step: int


class Shares(NamedTuple):
    """The contribution of a range of anchors to the objective.

    Attributes:
        generated_loss: metric loss of the generated rows, without its weight.
        generator_loss: L_gen.
        classifier_loss: L_cls; 0 without a classifier.
    """

    generated_loss: Float[Tensor, ""]
    generator_loss: Float[Tensor, ""]
    classifier_loss: Float[Tensor, ""]


class RatedLayers(nn.Sequential):
    """Layers with a learning rate of their own, whose weights do not decay.

    Args:
        layers: layers in their order.
        learning_rate: initial learning rate; it falls as the run's does.
    """

    def __init__(self, *layers: nn.Module, learning_rate: float) -> None:
        super().__init__(*layers)
        self.learning_rate = learning_rate


class RowGenerator(nn.Module, ABC):
    """Makes rows beside those of a batch, perhaps with parameters of its own."""

    @property
    def is_trained(self) -> bool:
        """Whether it has parameters."""
        return next(self.parameters(), None) is not None

    @abstractmethod
    def forward(self, batch: GlobalBatch, anchors: slice, head: nn.Module, loss: Loss) -> Shares:
        """The share that a range of anchors contributes.

        Args:
            batch: the batch of all workers.
            anchors: the range of rows; the shares of a partition add up.
            head: features -> raw embeddings; the head that is trained.
            loss: the metric loss.
        """

    @abstractmethod
    def weights(self, step: int) -> tuple[Tensor | float, Tensor | float]:
        """The weights of the metric loss of the batch and of the generated rows at a 0-based global step."""

    def observe(self, step: int, metric_loss: Float[Tensor, ""], generator_loss: Float[Tensor, ""]) -> None:
        """Receives the losses of a training step, which are the same on every worker."""


@contextmanager
def initialised(seed: int) -> Generator[None, None, None]:
    """A context in which layers get initial weights that are a function of the seed, and no other draw is affected."""
    with torch.random.fork_rng(devices=[]):  # pyright: ignore[reportUnknownMemberType]
        torch.manual_seed(derived_seed(seed, "generator"))  # pyright: ignore[reportUnknownMemberType]
        yield


def frozen(module: nn.Module, rows: Float[Tensor, "rows inputs"]) -> Float[Tensor, "rows outputs"]:
    """module(rows), with gradients for the rows and none for the module's parameters."""
    parameters = {name: parameter.detach() for name, parameter in module.named_parameters()}
    return torch.func.functional_call(module, parameters, (rows,))
