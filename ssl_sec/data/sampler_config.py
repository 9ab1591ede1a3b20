"""The samplers as values of a run; see `ssl_sec.settings`."""

from dataclasses import dataclass
from typing import Annotated, Literal

from torch import Tensor

from ssl_sec.data.class_batches import ClassBatches, TripletBatches
from ssl_sec.data.samplers import Sampler, ShuffledBatches
from ssl_sec.settings import Range, Settings


@dataclass(frozen=True, kw_only=True)
class ClassSamplerConfig(Settings, key="sampler"):
    """C classes and K images of each in every batch.

    Attributes:
        images_per_class: images of each class in a batch, ≥ 2; it has global_batch_size / images_per_class classes.
    """

    name: Literal["classes"] = "classes"
    images_per_class: Annotated[int, Range(ge=2)] = 3

    def build(self, labels: Tensor, global_batch_size: int, seed: int) -> ClassBatches:
        """The sampler over the images of these classes."""
        return ClassBatches(
            labels=labels, images_per_class=self.images_per_class, global_batch_size=global_batch_size, seed=seed
        )


@dataclass(frozen=True, kw_only=True)
class TripletSamplerConfig:
    """Disjoint triplets of an anchor, a positive and a negative (angular loss, Fig. 4a)."""

    name: Literal["triplets"] = "triplets"

    def build(self, labels: Tensor, global_batch_size: int, seed: int) -> TripletBatches:
        """The sampler over the images of these classes."""
        return TripletBatches(labels=labels, global_batch_size=global_batch_size, seed=seed)


@dataclass(frozen=True, kw_only=True)
class ShuffledSamplerConfig:
    """Every image once per epoch, in an order that the seed determines."""

    name: Literal["shuffled"] = "shuffled"

    def build(self, labels: Tensor, global_batch_size: int, seed: int) -> Sampler:
        """The sampler over the images of these classes."""
        return ShuffledBatches(num_images=len(labels), global_batch_size=global_batch_size, seed=seed)


SamplerConfig = ClassSamplerConfig | TripletSamplerConfig
