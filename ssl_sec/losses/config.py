"""The options of the losses: each is declared by the constructor of its class, and checked by calling it."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Union

import torch
from jaxtyping import Int64
from torch import Tensor

from ssl_sec import losses
from ssl_sec.errors import ConfigError
from ssl_sec.losses.generators.base import RowGenerator
from ssl_sec.losses.generators.dvml import VariationalSynthesis
from ssl_sec.losses.generators.hdml import HardnessAwareSynthesis
from ssl_sec.losses.generators.memory import WITH_MEMORY, CrossBatchMemory
from ssl_sec.losses.templates.base import TemplateLoss
from ssl_sec.losses.templates.softmax import TemplateSoftmaxLoss
from ssl_sec.losses.transform import Centres
from ssl_sec.rules import BelowOne, Count, Positive, Range, check
from ssl_sec.settings import Declared, Settings, declare_settings

# Losses by name in which every row needs a positive; classes that are drawn at random seldom give one to each.
_OF_POSITIVES = ("ntxent", "dcl")
# The parameters that the data and the network determine.
_SIZES = ("num_classes", "dim")


def _default(component: type[Any], parameter: str) -> Any:
    """The default of a parameter of a constructor."""
    return inspect.signature(component).parameters[parameter].default


class _LossConfig(Declared, key="loss"):
    """A loss that needs no classes: rows of one label are positives of each other."""

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            self.build()
        except ValueError as error:
            raise ConfigError(f"loss.{error}") from None

    def build(self) -> losses.Loss:
        """The loss."""
        return self._construct()


class _LogitsLossConfig(_LossConfig, key="loss"):
    """A loss of logits."""

    def build(self, class_sizes: Sequence[int] | None = None) -> losses.Loss:
        """The loss; with the number of rows of each class, the one that is balanced by them."""
        return self._construct(class_sizes=class_sizes)


class _ClassLossConfig(Declared, key="loss"):
    """A loss with parameters or centres for each class of the data."""

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            # Not on the meta device, whose first use imports sympy for two seconds.
            with torch.random.fork_rng(devices=[]):  # pyright: ignore[reportUnknownMemberType]
                self.build(num_classes=1000, dim=1)
        except ValueError as error:
            raise ConfigError(f"loss.{error}") from None

    def build(self, num_classes: int, dim: int) -> losses.Loss:
        """The loss for `num_classes` classes and embeddings of `dim` dimensions."""
        return self._construct(num_classes=num_classes, dim=dim)

    @property
    def has_templates(self) -> bool:
        """Whether the loss learns a template for each class."""
        return self.is_made_of(TemplateLoss)

    def is_made_of(self, kind: type[losses.Loss]) -> bool:
        """Whether the loss, or one of those that it combines, is of a kind."""
        return issubclass(losses.CLASS_LOSSES[self.name], kind)


CONFIGS: Mapping[str, type[Any]] = {
    **{name: declare_settings(loss, name, _LossConfig, _SIZES) for name, loss in losses.PAIR_LOSSES.items()},
    **{name: declare_settings(loss, name, _ClassLossConfig, _SIZES) for name, loss in losses.CLASS_LOSSES.items()},
}


@dataclass(frozen=True, kw_only=True)
class BYOLConfig(Settings, key="loss"):
    """BYOL (Grill et al. 2020): distances to a teacher that follows the network.

    Attributes:
        momentum: m of the teacher's first step, in [0, 1); it rises to 1 along half a cosine.
        predictor_dim: width of the hidden layer of the predictor, ≥ 1.
    """

    name: Literal["byol"] = "byol"
    momentum: BelowOne = 0.99
    predictor_dim: Annotated[int, Range(ge=1, le=2**20)] = 512

    def build(self) -> losses.TeacherLoss:
        """The loss."""
        return losses.BYOLLoss()


@dataclass(frozen=True, kw_only=True)
class MoCoV3Config(Settings, key="loss"):
    """MoCo v3 (Chen et al. 2021): a softmax over the rows of a teacher that follows the network.

    Attributes:
        temperature: T > 0, the divisor of the similarities.
        momentum: m of the teacher's first step, in [0, 1); it rises to 1 along half a cosine.
        predictor_dim: width of the hidden layer of the predictor, ≥ 1.
    """

    name: Literal["mocov3"] = "mocov3"
    temperature: Positive = _default(losses.MoCoV3Loss, "temperature")
    momentum: BelowOne = 0.99
    predictor_dim: Annotated[int, Range(ge=1, le=2**20)] = 512

    def build(self) -> losses.TeacherLoss:
        """The loss."""
        return losses.MoCoV3Loss(self.temperature)


TeacherLossConfig = BYOLConfig | MoCoV3Config
if TYPE_CHECKING:
    PairLossConfig = _LossConfig
    CrossEntropyConfig = _LogitsLossConfig
    _OneClassLossConfig = _ClassLossConfig
    _OneLossConfig = _ClassLossConfig
else:
    CrossEntropyConfig = declare_settings(losses.CrossEntropyLoss, "cross_entropy", _LogitsLossConfig, ("class_sizes",))
    PairLossConfig = Union[tuple(CONFIGS[name] for name in losses.PAIR_LOSSES)]  # noqa: UP007
    _OneClassLossConfig = Union[tuple(CONFIGS[name] for name in losses.CLASS_LOSSES)]  # noqa: UP007
    # A loss without classes is refused for what it is, not as a misspelt name.
    _OneLossConfig = _OneClassLossConfig | PairLossConfig


@dataclass(frozen=True, kw_only=True)
class CombinedConfig(_ClassLossConfig):
    """Two class losses; see `ssl_sec.losses.CombinedLoss`.

    Attributes:
        first: a loss by its name; with other values than its own as loss.first={name: cosface, scale: 32}.
        second: the other loss, likewise.
        weight: weight of the second loss, ≥ 0.
    """

    name: Literal["combined"] = "combined"  # pyright: ignore[reportIncompatibleVariableOverride]
    first: _OneLossConfig
    second: _OneLossConfig
    weight: float

    def __post_init__(self) -> None:
        allowed = f"one with a template or centre for each class: {', '.join(sorted(losses.CLASS_LOSSES))}"
        for key, loss in (("first", self.first), ("second", self.second)):
            check(loss.name in losses.CLASS_LOSSES, f"loss.{key}", loss.name, allowed)
        super().__post_init__()

    def build(self, num_classes: int, dim: int) -> losses.Loss:
        """The loss for `num_classes` classes and embeddings of `dim` dimensions."""
        return losses.CombinedLoss(
            self.first.build(num_classes, dim), self.second.build(num_classes, dim), weight=self.weight
        )

    def is_made_of(self, kind: type[losses.Loss]) -> bool:
        """Whether one of the losses is of a kind."""
        return self.first.is_made_of(kind) or self.second.is_made_of(kind)


if TYPE_CHECKING:
    ClassLossConfig = _ClassLossConfig
else:
    ClassLossConfig = _OneClassLossConfig | CombinedConfig


def check_class_sample_rate(rate: float, loss: PairLossConfig | ClassLossConfig) -> None:
    """Refuses to sample the classes of a loss that is no softmax over them."""
    is_softmax = not isinstance(loss, PairLossConfig) and loss.is_made_of(TemplateSoftmaxLoss)
    check(rate == 1 or is_softmax, "class_sample_rate", rate, f"1 with loss={loss.name}, which is no softmax")


@dataclass(frozen=True, kw_only=True, slots=True)
class Transformed:
    """The data and the network that a transform is built for.

    Attributes:
        class_sizes: number of training samples of each class.
        num_features: width of the backbone's features.
        dim: dimensions of the embeddings.
        steps_per_epoch: steps of an epoch, ≥ 1.
        seed: seed of the draws and the initial weights.
    """

    class_sizes: Int64[Tensor, " classes"]
    num_features: int
    dim: int
    steps_per_epoch: int
    seed: int


@dataclass(frozen=True, kw_only=True)
class NoTransformConfig:
    """The rows of the batch alone."""

    name: Literal["none"] = "none"

    def build(self, transformed: Transformed) -> None:
        """Nothing to build."""


@dataclass(frozen=True, kw_only=True)
class FeatureTransformConfig(Settings, key="transform"):
    """Rows of other classes, generated from the batch; see `ssl_sec.losses.SphericalFeatureTransform`.

    Attributes:
        weight: weight λ ≥ 0 of the loss of the generated rows (SFT, Eq. 10).
        energy: share of the batch's variance that ftl transfers, in (0, 1]; the others have no such share.
        tail_below: classes with fewer samples than this are tail classes, generated from rows of the others (unbalanced
            scheme); None for the balanced one.
        centres: mean follows the batches (SFT, Eq. 9); random and picked are the alternatives of SFT's Table 6.
    """

    mode: ClassVar[Literal["rotate", "translate", "ftl"]]
    name: str
    weight: float = _default(losses.SphericalFeatureTransform, "weight")
    energy: float = _default(losses.SphericalFeatureTransform, "energy")
    tail_below: Count | None = None
    centres: Centres = _default(losses.SphericalFeatureTransform, "centres")

    def __post_init__(self) -> None:
        super().__post_init__()
        # A key of all modes, since the configurations of earlier runs have it.
        is_read = self.mode == "ftl" or self.energy == type(self).energy
        check(is_read, "transform.energy", self.energy, f"left out: {self.name} does not read it")
        try:
            self._of(2, 1, 0, None)
        except ValueError as error:
            raise ConfigError(f"transform.{error}") from None

    def build(self, transformed: Transformed) -> losses.SphericalFeatureTransform:
        """The transform.

        Raises:
            ConfigError: all classes have fewer samples than `tail_below`, or none has.
        """
        class_sizes, dim, seed = transformed.class_sizes, transformed.dim, transformed.seed
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
        return losses.SphericalFeatureTransform(
            num_classes,
            dim,
            mode=self.mode,
            tail_classes=tail,
            weight=self.weight,
            energy=self.energy,
            seed=seed,
            centres=self.centres,
        )


@dataclass(frozen=True, kw_only=True)
class SFTConfig(FeatureTransformConfig):
    """Spherical feature transform (SFT, Eq. 4)."""

    mode = "rotate"
    name: Literal["sft"] = "sft"


@dataclass(frozen=True, kw_only=True)
class SFTDConfig(FeatureTransformConfig):
    """SFT-d: the translation before normalisation, projected back (SFT, Eq. 2)."""

    mode = "translate"
    name: Literal["sftd"] = "sftd"


@dataclass(frozen=True, kw_only=True)
class FTLConfig(FeatureTransformConfig):
    """Feature transfer learning along the principal axes (Yin et al. 2019, as SFT reproduces it)."""

    mode = "ftl"
    name: Literal["ftl"] = "ftl"


class _GeneratorConfig(Declared, key="transform"):
    """A generator of rows with parameters of its own."""

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            self._construct(num_classes=1, num_features=1, dim=1, steps_per_epoch=1)
        except ValueError as error:
            raise ConfigError(f"transform.{error}") from None

    def build(self, transformed: Transformed) -> RowGenerator:
        """The generator."""
        return self._construct(
            num_classes=len(transformed.class_sizes),
            num_features=transformed.num_features,
            dim=transformed.dim,
            steps_per_epoch=transformed.steps_per_epoch,
            seed=transformed.seed,
        )


_DETERMINED = ("num_classes", "num_features", "dim", "steps_per_epoch", "seed")
TransformConfig = NoTransformConfig | SFTConfig | SFTDConfig | FTLConfig
if TYPE_CHECKING:
    GeneratorConfig = _GeneratorConfig
else:
    _GENERATORS = {"hdml": HardnessAwareSynthesis, "dvml": VariationalSynthesis, "memory": CrossBatchMemory}
    GeneratorConfig = Union[  # noqa: UP007
        tuple(declare_settings(made, name, _GeneratorConfig, _DETERMINED) for name, made in _GENERATORS.items())
    ]


def check_transform(transform: TransformConfig | GeneratorConfig, loss: PairLossConfig | ClassLossConfig) -> None:
    """Refuses a loss that cannot compare the rows which a transform adds: remembered ones, or ones of drawn classes."""
    if isinstance(transform, FeatureTransformConfig):
        allowed = f"one that leaves out rows without a positive, with transform={transform.name}, such as 'supcon'"
        check(loss.name not in _OF_POSITIVES, "loss", loss.name, allowed)
    elif transform.name == "memory":
        names = [name for name, kind in losses.PAIR_LOSSES.items() if issubclass(kind, WITH_MEMORY)]
        allowed = f"one that compares with remembered rows, with transform=memory: {', '.join(sorted(names))}"
        check(loss.name in names, "loss", loss.name, allowed)
