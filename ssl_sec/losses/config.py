"""The losses as values of a run; each checks itself by building what it describes."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Int64
from torch import Tensor

from ssl_sec import losses
from ssl_sec.errors import ConfigError
from ssl_sec.settings import Count, Settings


@dataclass(frozen=True, kw_only=True)
class _LossConfig(Settings, key="loss"):
    """A loss that needs no classes: rows of one label are positives of each other."""

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            self.build()
        except ValueError as error:
            raise ConfigError(f"loss.{error}") from None

    @abstractmethod
    def build(self) -> losses.Loss:
        """The loss."""


@dataclass(frozen=True, kw_only=True)
class _ClassLossConfig(Settings, key="loss"):
    """A loss with something for each class of the data."""

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            # Not the meta device, whose first use imports sympy for two seconds.
            with torch.random.fork_rng(devices=[]):  # pyright: ignore[reportUnknownMemberType]
                self.build(num_classes=1000, dim=1)
        except ValueError as error:
            raise ConfigError(f"loss.{error}") from None

    @abstractmethod
    def build(self, num_classes: int, dim: int) -> losses.Loss:
        """The loss for so many classes and embeddings of `dim`."""


@dataclass(frozen=True, kw_only=True)
class NTXentConfig(_LossConfig):
    """NT-Xent (SimCLR, Eq. 1); see `ssl_sec.losses.NTXentLoss`.

    Attributes:
        temperature: T, which the similarities are divided by, > 0.
    """

    name: Literal["ntxent"] = "ntxent"
    temperature: float = 0.5

    def build(self) -> losses.Loss:
        """The loss."""
        return losses.NTXentLoss(temperature=self.temperature)


@dataclass(frozen=True, kw_only=True)
class ContrastiveConfig(_LossConfig):
    """Contrastive loss (NormFace, Eq. 7); see `ssl_sec.losses.ContrastiveLoss`.

    Attributes:
        margin: m ≥ 0, a squared distance beyond which negatives are left alone.
    """

    name: Literal["contrastive"] = "contrastive"
    margin: float = 1.0

    def build(self) -> losses.Loss:
        """The loss."""
        return losses.ContrastiveLoss(margin=self.margin)


@dataclass(frozen=True, kw_only=True)
class TripletConfig(_LossConfig):
    """All triplets of the batch (SEC, Eq. 2); see `ssl_sec.losses.TripletLoss`.

    Attributes:
        margin: m ≥ 0, by which negatives must be farther than positives, in squared distances.
    """

    name: Literal["triplet"] = "triplet"
    margin: float = 1.0

    def build(self) -> losses.Loss:
        """The loss."""
        return losses.TripletLoss(margin=self.margin)


@dataclass(frozen=True, kw_only=True)
class SemihardConfig(_LossConfig):
    """Semihard triplets (FaceNet; SEC, Eq. 2); see `ssl_sec.losses.SemihardTripletLoss`.

    Attributes:
        margin: m ≥ 0, by which negatives must be farther than positives, in squared distances.
    """

    name: Literal["semihard"] = "semihard"
    margin: float = 0.2

    def build(self) -> losses.Loss:
        """The loss."""
        return losses.SemihardTripletLoss(margin=self.margin)


@dataclass(frozen=True, kw_only=True)
class NormalizedNPairConfig(_LossConfig):
    """Normalised N-pair (SEC, Eq. 3); see `ssl_sec.losses.NormalizedNPairLoss`.

    Attributes:
        scale: s, which multiplies the cosines, > 0.
    """

    name: Literal["npair_normalized"] = "npair_normalized"
    scale: float = 25.0

    def build(self) -> losses.Loss:
        """The loss."""
        return losses.NormalizedNPairLoss(scale=self.scale)


@dataclass(frozen=True, kw_only=True)
class NPairConfig(_LossConfig):
    """N-pair on raw rows (angular loss, Eq. 10); see `ssl_sec.losses.NPairLoss`."""

    name: Literal["npair"] = "npair"

    def build(self) -> losses.Loss:
        """The loss."""
        return losses.NPairLoss()


@dataclass(frozen=True, kw_only=True)
class MultiSimilarityConfig(_LossConfig):
    """Multi-similarity (Wang et al. 2019); see `ssl_sec.losses.MultiSimilarityLoss`.

    Attributes:
        epsilon: ε ≥ 0, the slack with which pairs are mined.
        threshold: λ in [-1, 1], the similarity that both weights are measured from.
        alpha: α > 0, how steep the weight of positives is.
        beta: β > 0, how steep the weight of negatives is.
    """

    name: Literal["multi_similarity"] = "multi_similarity"
    epsilon: float = 0.1
    threshold: float = 0.5
    alpha: float = 2.0
    beta: float = 40.0

    def build(self) -> losses.Loss:
        """The loss."""
        return losses.MultiSimilarityLoss(
            epsilon=self.epsilon, threshold=self.threshold, alpha=self.alpha, beta=self.beta
        )


@dataclass(frozen=True, kw_only=True)
class LiftedStructureConfig(_LossConfig):
    """Lifted structure (Oh Song et al. 2016); see `ssl_sec.losses.LiftedStructureLoss`.

    Attributes:
        margin: m ≥ 0, a distance beyond which negatives are left alone.
    """

    name: Literal["lifted_structure"] = "lifted_structure"
    margin: float = 1.0

    def build(self) -> losses.Loss:
        """The loss."""
        return losses.LiftedStructureLoss(margin=self.margin)


@dataclass(frozen=True, kw_only=True)
class RankedListConfig(_LossConfig):
    """Ranked list (Wang et al. 2019b); see `ssl_sec.losses.RankedListLoss`.

    Attributes:
        margin: m in [0, alpha]: positives are drawn to within alpha - m.
        alpha: > 0, the distance beyond which negatives are left alone.
        negative_temperature: T_n ≥ 0, by which near negatives weigh more; 0 weighs all alike.
        positive_temperature: T_p ≥ 0, by which far positives weigh more; 0 weighs all alike.
        imbalance: weight of the negatives, in [0, 1]; the positives have the rest.
    """

    name: Literal["ranked_list"] = "ranked_list"
    margin: float = 0.4
    alpha: float = 1.2
    negative_temperature: float = 10.0
    positive_temperature: float = 0.0
    imbalance: float = 0.5

    def build(self) -> losses.Loss:
        """The loss."""
        return losses.RankedListLoss(
            margin=self.margin,
            alpha=self.alpha,
            negative_temperature=self.negative_temperature,
            positive_temperature=self.positive_temperature,
            imbalance=self.imbalance,
        )


@dataclass(frozen=True, kw_only=True)
class AngularConfig(_LossConfig):
    """Angular loss (Eq. 8); see `ssl_sec.losses.AngularLoss`.

    Attributes:
        alpha_degrees: α in (0, 90), the largest angle at the negative.
    """

    name: Literal["angular"] = "angular"
    alpha_degrees: float = 45.0

    def build(self) -> losses.Loss:
        """The loss."""
        return losses.AngularLoss(alpha_degrees=self.alpha_degrees)


@dataclass(frozen=True, kw_only=True)
class NPairAngularConfig(_LossConfig):
    """N-pair + angular loss (angular loss, Eq. 9); see `ssl_sec.losses.NPairAngularLoss`.

    Attributes:
        alpha_degrees: α in (0, 90), the largest angle at the negative.
        weight: λ ≥ 0, of the angular loss beside N-pair.
    """

    name: Literal["npair_angular"] = "npair_angular"
    alpha_degrees: float = 45.0
    weight: float = 2.0

    def build(self) -> losses.Loss:
        """The loss."""
        return losses.NPairAngularLoss(alpha_degrees=self.alpha_degrees, weight=self.weight)


PairLossConfig = (
    NTXentConfig
    | ContrastiveConfig
    | TripletConfig
    | SemihardConfig
    | NormalizedNPairConfig
    | NPairConfig
    | MultiSimilarityConfig
    | LiftedStructureConfig
    | RankedListConfig
    | AngularConfig
    | NPairAngularConfig
)


@dataclass(frozen=True, kw_only=True)
class SoftmaxConfig(_ClassLossConfig):
    """Softmax on raw rows; see `ssl_sec.losses.SoftmaxLoss`."""

    name: Literal["softmax"] = "softmax"

    def build(self, num_classes: int, dim: int) -> losses.Loss:
        """The loss for so many classes and embeddings of `dim`."""
        return losses.SoftmaxLoss(num_classes, dim)


@dataclass(frozen=True, kw_only=True)
class L2SoftmaxConfig(_ClassLossConfig):
    """L2-softmax (Ranjan et al. 2017); see `ssl_sec.losses.L2SoftmaxLoss`.

    Attributes:
        scale: s > 0, the radius that the features are scaled to.
    """

    name: Literal["l2softmax"] = "l2softmax"
    scale: float

    def build(self, num_classes: int, dim: int) -> losses.Loss:
        """The loss for so many classes and embeddings of `dim`."""
        return losses.L2SoftmaxLoss(num_classes, dim, scale=self.scale)


@dataclass(frozen=True, kw_only=True)
class ModifiedSoftmaxConfig(_ClassLossConfig):
    """Modified softmax (Liu et al. 2017); see `ssl_sec.losses.ModifiedSoftmaxLoss`."""

    name: Literal["modified_softmax"] = "modified_softmax"

    def build(self, num_classes: int, dim: int) -> losses.Loss:
        """The loss for so many classes and embeddings of `dim`."""
        return losses.ModifiedSoftmaxLoss(num_classes, dim)


@dataclass(frozen=True, kw_only=True)
class NormFaceConfig(_ClassLossConfig):
    """NormFace (Eq. 6); see `ssl_sec.losses.NormFaceLoss`.

    Attributes:
        scale: s > 0, which multiplies the cosines; None learns it.
        reachable_loss: a learned s starts where the bound of Prop. 2 is this, > 0.
    """

    name: Literal["normface"] = "normface"
    scale: float | None = None
    reachable_loss: float = 1e-3

    def build(self, num_classes: int, dim: int) -> losses.Loss:
        """The loss for so many classes and embeddings of `dim`."""
        return losses.NormFaceLoss(num_classes, dim, scale=self.scale, reachable_loss=self.reachable_loss)


@dataclass(frozen=True, kw_only=True)
class SphereFaceConfig(_ClassLossConfig):
    """SphereFace (Liu et al. 2017); see `ssl_sec.losses.SphereFaceLoss`.

    Attributes:
        scale: s > 0, which multiplies the cosines.
        margin: m ≥ 1, a whole number that multiplies the angle to the own class.
    """

    name: Literal["sphereface"] = "sphereface"
    scale: float = 64.0
    margin: int = 3

    def build(self, num_classes: int, dim: int) -> losses.Loss:
        """The loss for so many classes and embeddings of `dim`."""
        return losses.SphereFaceLoss(num_classes, dim, scale=self.scale, margin=self.margin)


@dataclass(frozen=True, kw_only=True)
class CosFaceConfig(_ClassLossConfig):
    """CosFace (SEC, Eq. 19); see `ssl_sec.losses.CosFaceLoss`.

    Attributes:
        scale: s > 0, which multiplies the cosines.
        margin: m ≥ 0, taken from the cosine of the own class.
    """

    name: Literal["cosface"] = "cosface"
    scale: float = 64.0
    margin: float = 0.35

    def build(self, num_classes: int, dim: int) -> losses.Loss:
        """The loss for so many classes and embeddings of `dim`."""
        return losses.CosFaceLoss(num_classes, dim, scale=self.scale, margin=self.margin)


@dataclass(frozen=True, kw_only=True)
class ArcFaceConfig(_ClassLossConfig):
    """ArcFace (Deng et al. 2019); see `ssl_sec.losses.ArcFaceLoss`.

    Attributes:
        scale: s > 0, which multiplies the cosines.
        margin_radians: m in [0, π), added to the angle to the own class.
    """

    name: Literal["arcface"] = "arcface"
    scale: float = 64.0
    margin_radians: float = 0.45

    def build(self, num_classes: int, dim: int) -> losses.Loss:
        """The loss for so many classes and embeddings of `dim`."""
        return losses.ArcFaceLoss(num_classes, dim, scale=self.scale, margin_radians=self.margin_radians)


@dataclass(frozen=True, kw_only=True)
class CContrastiveConfig(_ClassLossConfig):
    """C-contrastive (NormFace, Eq. 10); see `ssl_sec.losses.CContrastiveLoss`.

    Attributes:
        margin: m ≥ 0, a squared distance beyond which other classes are left alone.
    """

    name: Literal["c_contrastive"] = "c_contrastive"
    margin: float = 1.0

    def build(self, num_classes: int, dim: int) -> losses.Loss:
        """The loss for so many classes and embeddings of `dim`."""
        return losses.CContrastiveLoss(num_classes, dim, margin=self.margin)


@dataclass(frozen=True, kw_only=True)
class CTripletConfig(_ClassLossConfig):
    """C-triplet (NormFace, Eq. 11); see `ssl_sec.losses.CTripletLoss`.

    Attributes:
        margin: m ≥ 0, by which other classes must be farther than the own one, in squared distances.
    """

    name: Literal["c_triplet"] = "c_triplet"
    margin: float = 0.8

    def build(self, num_classes: int, dim: int) -> losses.Loss:
        """The loss for so many classes and embeddings of `dim`."""
        return losses.CTripletLoss(num_classes, dim, margin=self.margin)


@dataclass(frozen=True, kw_only=True)
class CenterConfig(_ClassLossConfig):
    """Center loss (Wen et al. 2016), the centres moved by SFT's Eq. 9; see `ssl_sec.losses.CenterLoss`."""

    name: Literal["center"] = "center"

    def build(self, num_classes: int, dim: int) -> losses.Loss:
        """The loss for so many classes and embeddings of `dim`."""
        return losses.CenterLoss(num_classes, dim)


_OneClassLossConfig = (
    SoftmaxConfig
    | L2SoftmaxConfig
    | ModifiedSoftmaxConfig
    | NormFaceConfig
    | SphereFaceConfig
    | CosFaceConfig
    | ArcFaceConfig
    | CContrastiveConfig
    | CTripletConfig
    | CenterConfig
)


@dataclass(frozen=True, kw_only=True)
class CombinedConfig(_ClassLossConfig):
    """Two class losses; see `ssl_sec.losses.CombinedLoss`.

    Attributes:
        first: a loss by its name; with other values than its own as loss.first={name: cosface, scale: 32}.
        second: the other loss, likewise.
        weight: weight of the second loss, ≥ 0.
    """

    name: Literal["combined"] = "combined"
    first: _OneClassLossConfig
    second: _OneClassLossConfig
    weight: float

    def build(self, num_classes: int, dim: int) -> losses.Loss:
        """The loss for so many classes and embeddings of `dim`."""
        return losses.CombinedLoss(
            self.first.build(num_classes, dim), self.second.build(num_classes, dim), weight=self.weight
        )


ClassLossConfig = _OneClassLossConfig | CombinedConfig


@dataclass(frozen=True, kw_only=True)
class NoTransformConfig:
    """The rows of the batch alone."""

    name: Literal["none"] = "none"

    def build(self, class_sizes: Int64[Tensor, " classes"], dim: int, seed: int) -> None:
        """Nothing to build."""


@dataclass(frozen=True, kw_only=True)
class FeatureTransformConfig(Settings, key="transform"):
    """Rows of other classes, generated from the batch; see `ssl_sec.losses.SphericalFeatureTransform`.

    Attributes:
        name: SFT, its translation SFT-d, or feature transfer learning.
        weight: λ ≥ 0, the weight of the loss of the generated rows (SFT, Eq. 10).
        energy: share of the batch's variance that "ftl" transfers, in (0, 1].
        tail_below: classes with fewer samples than so many are generated, from rows of the others (the unbalanced
            scheme); None for the balanced one.
    """

    name: Literal["sft", "sftd", "ftl"]
    weight: float = 0.2
    energy: float = 0.95
    tail_below: Count | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            self._of(2, 1, 0, None)
        except ValueError as error:
            raise ConfigError(f"transform.{error}") from None

    def build(self, class_sizes: Int64[Tensor, " classes"], dim: int, seed: int) -> losses.SphericalFeatureTransform:
        """The transform for classes of so many samples and embeddings of `dim`.

        Raises:
            ConfigError: all classes have fewer samples than `tail_below`, or none has.
        """
        if self.tail_below is None:
            return self._of(len(class_sizes), dim, seed, None)
        tail = (class_sizes < self.tail_below).nonzero().flatten()
        if not 0 < len(tail) < len(class_sizes):
            raise ConfigError(
                f"transform.tail_below: found {self.tail_below}, must part the classes; "
                f"they have {int(class_sizes.min())} to {int(class_sizes.max())} samples"
            )
        return self._of(len(class_sizes), dim, seed, tail)

    def _of(
        self, num_classes: int, dim: int, seed: int, tail: Int64[Tensor, " tail"] | None
    ) -> losses.SphericalFeatureTransform:
        mode: Literal["rotate", "translate", "ftl"]
        match self.name:
            case "sft":
                mode = "rotate"
            case "sftd":
                mode = "translate"
            case "ftl":
                mode = "ftl"
        return losses.SphericalFeatureTransform(
            num_classes, dim, mode=mode, tail_classes=tail, weight=self.weight, energy=self.energy, seed=seed
        )


TransformConfig = NoTransformConfig | FeatureTransformConfig
