"""The images that a run trains on, and its batches, as values of the run; see `ssl_sec.settings`."""

from dataclasses import dataclass
from typing import Annotated, Literal

from torch import Tensor

from ssl_sec.data.class_batches import ClassBatches, TripletBatches
from ssl_sec.data.image_set import ImageSet
from ssl_sec.data.samplers import Sampler, ShuffledBatches
from ssl_sec.data.selection.class_splits import HeadAndTail, head_and_tail
from ssl_sec.rules import Count, Range, Seed, check
from ssl_sec.settings import Settings


@dataclass(frozen=True, kw_only=True)
class ClassSamplerConfig(Settings, key="sampler"):
    """C classes and K images of each in every batch.

    Attributes:
        images_per_class: images of each class in a batch of global_batch_size / images_per_class classes, ≥ 2.
    """

    name: Literal["classes"] = "classes"
    images_per_class: Annotated[int, Range(ge=2)] = 3

    def build(self, labels: Tensor, global_batch_size: int, seed: int) -> ClassBatches:
        """The sampler over images with these labels."""
        return ClassBatches(
            labels=labels, images_per_class=self.images_per_class, global_batch_size=global_batch_size, seed=seed
        )


@dataclass(frozen=True, kw_only=True)
class TripletSamplerConfig:
    """Disjoint triplets of an anchor, a positive and a negative (angular loss, Fig. 4a)."""

    name: Literal["triplets"] = "triplets"

    def build(self, labels: Tensor, global_batch_size: int, seed: int) -> TripletBatches:
        """The sampler over images with these labels."""
        return TripletBatches(labels=labels, global_batch_size=global_batch_size, seed=seed)


@dataclass(frozen=True, kw_only=True)
class ShuffledSamplerConfig:
    """Every image once per epoch, in an order that the seed determines."""

    name: Literal["shuffled"] = "shuffled"

    def build(self, labels: Tensor, global_batch_size: int, seed: int) -> Sampler:
        """The sampler over images with these labels."""
        return ShuffledBatches(num_images=len(labels), global_batch_size=global_batch_size, seed=seed)


SamplerConfig = ClassSamplerConfig | TripletSamplerConfig


@dataclass(frozen=True, kw_only=True)
class NoSplitConfig:
    """All training images, however many a class has."""

    name: Literal["none"] = "none"


@dataclass(frozen=True, kw_only=True)
class HeadAndTailConfig(Settings, key="split"):
    """Classes with many and with few training images, drawn among the large ones of a set (SFT, Section 4.2).

    Attributes:
        more_than: number of images above which a class is large; only large classes are drawn.
        num_head: number of classes with many training images, the heads.
        num_tail: number of classes with few, the tails; None for all large classes that are not heads.
        head_images: training images of each head class, at most more_than; the others are test images.
        tail_images: training images of each tail class, fewer than head_images; the others are test images.
        seed: seed of the draws of the classes and of their training images.
    """

    name: Literal["head_and_tail"] = "head_and_tail"
    more_than: Count = 100
    num_head: Count = 1500
    num_tail: Count | None = None
    head_images: Count = 50
    tail_images: Count = 5
    seed: Seed = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        most, fewer = self.more_than, self.head_images - 1
        check(self.head_images <= most, "split.head_images", self.head_images, f"at most split.more_than, {most}")
        check(self.tail_images <= fewer, "split.tail_images", self.tail_images, f"below split.head_images, {fewer + 1}")

    def divide(self, image_set: ImageSet) -> HeadAndTail:
        """The training and the test images of the drawn classes."""
        return head_and_tail(
            image_set,
            more_than=self.more_than,
            num_head=self.num_head,
            num_tail=self.num_tail,
            head_images=self.head_images,
            tail_images=self.tail_images,
            seed=self.seed,
        )


SplitConfig = NoSplitConfig | HeadAndTailConfig
