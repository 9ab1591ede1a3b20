"""Every number of every config is refused in one line that names its key, or accepted and works."""

import dataclasses
import math
import types
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest
import torch
from PIL import Image
from torch import nn

from ssl_sec.augment.config import AugmentConfig, CropConfig
from ssl_sec.data.samplers import permute
from ssl_sec.edges.config import AblateConfig, AlignConfig, PreviewConfig, ReplayConfig, ReportConfig
from ssl_sec.edges.config.embed import EmbedConfig
from ssl_sec.edges.config.export import ExportConfig
from ssl_sec.edges.config.neighbours import NeighboursConfig
from ssl_sec.edges.config.study import StudyConfig
from ssl_sec.edges.config.tune import TuneConfig
from ssl_sec.errors import ConfigError
from ssl_sec.evaluation.classification.linear_probe import train_linear_probes
from ssl_sec.losses.config import ClassLossConfig, FeatureTransformConfig, GeneratorConfig, PairLossConfig, Transformed
from ssl_sec.networks import Encoder
from ssl_sec.recipes.face.config import FaceConfig
from ssl_sec.recipes.finetuning.config import FinetuneConfig
from ssl_sec.recipes.metric_learning.config import MetricLearningConfig
from ssl_sec.recipes.pretraining.config import PretrainConfig
from ssl_sec.recipes.probing.config import ProbeConfig, ProbeJobConfig, TransferConfig
from ssl_sec.seeding import derived_seed
from ssl_sec.settings import from_values
from ssl_sec.training.config import SphericalConfig
from ssl_sec.training.optimisers.config import CosineOptimiserConfig, FaceOptimiserConfig, SteppedOptimiserConfig
from ssl_sec.training.optimisers.groups import set_learning_rate
from ssl_sec.training.optimisers.layer_rates import LayeredOptimiserConfig

JOBS = (
    PretrainConfig,
    FinetuneConfig,
    MetricLearningConfig,
    FaceConfig,
    ProbeJobConfig,
    ExportConfig,
    AlignConfig,
    ReplayConfig,
    ReportConfig,
    AblateConfig,
    PreviewConfig,
    EmbedConfig,
    NeighboursConfig,
    StudyConfig,
    TuneConfig,
    TransferConfig,
)
NOT_FINITE = (math.nan, math.inf, -math.inf)
NUMBERS = (
    *NOT_FINITE,
    *(0, -1, 10**9, 1e300, -1e300, 1e-300, 2**32, 2**63 - 1, 2**63, 2**64, -(2**64), 10**400),
)
# Their values are refused by the key of another setting that they do not fit.
OF_OTHERS = ("alpha", "least_norm")


def kinds_in(hint: Any) -> list[Any]:
    """The types that an annotation consists of."""
    if get_origin(hint) in (Union, types.UnionType, tuple):
        return [kind for option in get_args(hint) for kind in kinds_in(option)]
    return [hint]


def configs_in(kind: type) -> set[type]:
    """A dataclass and those in it."""
    inner = {
        each for hint in get_type_hints(kind).values() for each in kinds_in(hint) if dataclasses.is_dataclass(each)
    }
    return {kind}.union(*map(configs_in, inner))


def least(hint: Any) -> Any:
    """The simplest allowed value."""
    origin, options = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return least(options[0])
    if origin is tuple:
        return [least(options[0])]
    if origin is Literal:
        return options[0]
    if dataclasses.is_dataclass(hint):
        hints = get_type_hints(hint)
        needed = [f for f in dataclasses.fields(hint) if f.default is f.default_factory is dataclasses.MISSING]
        named = {"name": least(hints["name"])} if "name" in hints else {}
        return {**named, **{field.name: least(hints[field.name]) for field in needed}}
    return {str: "word", int: 2, float: 1.0, bool: True}[hint]


CONFIGS = sorted(set().union(*map(configs_in, JOBS)), key=lambda kind: kind.__name__)
FIELDS = [
    (kind, field, get_origin(hint))
    for kind in CONFIGS
    for field, hint in get_type_hints(kind).items()
    if {int, float} & set(kinds_in(hint))
]


@pytest.mark.parametrize(("kind", "field", "origin"), FIELDS, ids=lambda value: getattr(value, "__name__", str(value)))
def test_every_number_is_accepted_or_refused_by_its_key(kind, field, origin):
    values = least(kind)
    for number in NUMBERS:
        given = [number] if origin is tuple else number
        try:
            config = from_values(kind, {**values, field: given}, kind.key)
        except ConfigError as error:
            message = str(error)
            assert "\n" not in message and (not kind.key or message.startswith(f"{kind.key}."))
            assert field in message or field in OF_OTHERS, message
        else:
            assert number not in NOT_FINITE
            use(config)


@pytest.mark.parametrize(
    ("kind", "field"),
    [(kind, field) for kind, field, _ in FIELDS if get_type_hints(kind)[field] is float],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_a_config_made_in_python_keeps_to_the_same_ranges(kind, field):
    config = from_values(kind, least(kind))
    for number in NOT_FINITE:
        with pytest.raises(ConfigError, match=f"{field}: found {number}, must be "):
            dataclasses.replace(config, **{field: number})


def use(config: Any) -> None:
    """Builds the cheap components, and takes a step with them."""
    if isinstance(config, AugmentConfig):
        images = torch.zeros(2, 3, 8, 8, dtype=torch.uint8)
        assert config.build(8, 3, seed=0)(images, 0, slice(0, 2), 2).isfinite().all()
    if isinstance(config, CropConfig):
        images = torch.zeros(2, 3, 8, 8, dtype=torch.uint8)
        assert config.on_device(8, seed=0)(images, 0, slice(0, 2), 2).isfinite().all()
        crop = dataclasses.replace(config, short_side_px=9, size_px=8).random_crop()
        assert crop(Image.new("RGB", (12, 9)), 7).size == (8, 8)
    if isinstance(config, SphericalConfig):
        config.build()(torch.rand(3, 2))
        assert math.isfinite(config.weight(5, 20)(10))
    if isinstance(config, CosineOptimiserConfig | FaceOptimiserConfig | SteppedOptimiserConfig):
        layer = nn.Linear(2, 2)
        optimiser = config.build(layer)
        set_learning_rate(optimiser, config.schedule(5, 20)(10))
        layer(torch.rand(3, 2)).sum().backward()
        optimiser.step()
    if isinstance(config, LayeredOptimiserConfig):
        encoder = Encoder(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), 2)
        optimiser = config.build(encoder, nn.Linear(2, 2))
        set_learning_rate(optimiser, config.schedule(5, 20)(10))
        encoder.backbone(torch.rand(3, 2)).sum().backward()
        optimiser.step()
    if isinstance(config, ProbeConfig):
        train_linear_probes(
            lambda epoch: [(torch.rand(3, 2), torch.tensor([0, 1, 1]))],
            dataclasses.replace(config, epochs=2),
            config.learning_rates,
            num_classes=2,
            dim=2,
        )
    if isinstance(config, PairLossConfig):
        config.build()
    if isinstance(config, ClassLossConfig):
        config.build(2, 3)
    if isinstance(config, GeneratorConfig) or (
        isinstance(config, FeatureTransformConfig) and config.tail_below is None
    ):
        sizes = torch.tensor([2, 2])
        config.build(Transformed(class_sizes=sizes, num_features=2, dim=3, steps_per_epoch=4, seed=0))
    seed = getattr(config, "seed", 0)
    torch.Generator().manual_seed(seed), torch.Generator().manual_seed(derived_seed(seed, "weights"))
    permute(torch.arange(3), 5, seed, 0)
