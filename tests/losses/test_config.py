import dataclasses
from typing import get_args

import pytest
import torch

from ssl_sec import losses
from ssl_sec.edges.composition.options import options, values_of_option
from ssl_sec.errors import ConfigError
from ssl_sec.losses import config as loss_config
from ssl_sec.losses.angular import DisjointLoss
from ssl_sec.recipes.pretraining.config import PretrainConfig
from ssl_sec.settings import from_values
from tests.losses.cases import ALL_LOSSES, rows
from tests.recipes.test_config import RUN

PAIR = {kind.name: kind for kind in get_args(loss_config.PairLossConfig)}
CLASS = {kind.name: kind for kind in get_args(loss_config.ClassLossConfig)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Transforming:
    transform: loss_config.TransformConfig


def values_of(name):
    return values_of_option("loss", name, "pretrain")


def built(config):
    return config.build() if config.name in PAIR else config.build(num_classes=7, dim=3)


def test_every_loss_is_an_option_and_every_option_a_loss():
    of_logits = {"cross_entropy": losses.CrossEntropyLoss}
    of_teachers = {"byol": losses.BYOLLoss, "mocov3": losses.MoCoV3Loss}
    assert options("loss", "pretrain").keys() == set(PAIR) | set(CLASS) | set(of_logits) | set(of_teachers)
    kinds = {type(built(from_values(kind, values_of(name)))) for name, kind in (PAIR | CLASS).items()}
    bases = {"Loss", "TeacherLoss"}
    exported = [getattr(losses, name) for name in losses.__all__ if name.endswith("Loss") and name not in bases]
    assert {
        type(from_values(PretrainConfig, {**RUN, "loss": values_of(name)}).loss.build()) for name in of_teachers
    } == set(of_teachers.values())
    assert kinds | set(of_logits.values()) | set(of_teachers.values()) == set(exported)
    exported = set(exported) - set(of_teachers.values())  # compared with their slow loops in test_contrastive
    assert {case.make for case in ALL_LOSSES} == set(exported) - {losses.CombinedLoss, *of_logits.values()}


@pytest.mark.parametrize("name", sorted((PAIR | CLASS).keys() - {"combined"}))
def test_an_option_states_the_losss_own_defaults(name):
    config = from_values((PAIR | CLASS)[name], values_of(name))
    values = values_of(name)
    assert set(values) == {field.name for field in dataclasses.fields(config)}
    sizes = [] if name in PAIR else [7, 3]
    bare = type(built(config))(*sizes, **({"scale": 24.0} if name == "l2softmax" else {}))
    assert repr(built(config)) == repr(bare)


@pytest.mark.parametrize("name", sorted((PAIR | CLASS).keys() - {"combined"}))
def test_settings_of_an_option_reach_the_loss(name):
    values = values_of(name)
    whole = {"sub_centres", "margin"} if name == "sphereface" else {"sub_centres"}
    changed = {key: 3 if key in whole else 0.25 for key in values if key != "name"}
    changed |= {key: not value for key, value in values.items() if isinstance(value, bool)}
    changed |= {"greatest_norm": 0.5} if "greatest_norm" in values else {}
    loss = built(from_values((PAIR | CLASS)[name], {**values, **changed, "name": name}))
    if name == "npair_angular":
        assert loss.angular.alpha_degrees == changed.pop("alpha_degrees")
    changed.pop("reachable_loss", None)
    assert {key: getattr(loss, key) for key in changed} == changed


def test_combined_losses_have_their_own_values():
    values = {"name": "combined", "first": {"name": "arcface", "scale": 9.0}, "second": {"name": "center"}}
    loss = built(from_values(CLASS["combined"], {**values, "weight": 0.5}))
    assert isinstance(loss.first, losses.ArcFaceLoss) and isinstance(loss.second, losses.CenterLoss)
    assert (loss.first.scale, loss.weight) == (9.0, 0.5)
    embeddings, labels = rows(6, 3), torch.tensor([0, 6, 2, 2, 1, 0])
    loss = loss.double().eval()
    loss.second.centres.normal_()
    expected = loss.first(embeddings, labels) + 0.5 * loss.second(embeddings, labels)
    assert loss(embeddings, labels).item() == pytest.approx(expected.item(), rel=1e-12)
    shares = [loss(embeddings, labels, part).item() for part in (slice(0, 2), slice(2, 6))]
    assert sum(shares) == pytest.approx(expected.item(), rel=1e-12)
    with pytest.raises(ConfigError, match="loss.weight: found -1.0, must be ≥ 0"):
        from_values(CLASS["combined"], {**values, "weight": -1.0})
    allowed = "one with a template or centre for each class: adaface, arcface, c_contrastive, .*, sphereface$"
    for key in ("first", "second"):
        with pytest.raises(ConfigError, match=f"^loss.{key}: found 'triplet', must be {allowed}"):
            from_values(CLASS["combined"], {**values, "weight": 1.0, key: {"name": "triplet"}})


def test_a_loss_or_one_of_two_has_templates_or_is_a_softmax():
    """Only of a softmax are the classes sampled."""
    of = {
        "arcface": (True, True),
        "c_triplet": (True, False),
        "center": (False, False),
        ("arcface", "center"): (True, True),
        ("center", "arcface"): (True, True),
        ("c_triplet", "center"): (True, False),
        ("center", "center"): (False, False),
    }
    for name, (has_templates, is_softmax) in of.items():
        if isinstance(name, str):
            config = CLASS[name]()
        else:
            config = CLASS["combined"](first=CLASS[name[0]](), second=CLASS[name[1]](), weight=1.0)
        assert config.has_templates == has_templates, name
        loss_config.check_class_sample_rate(1.0, config)
        if is_softmax:
            loss_config.check_class_sample_rate(0.5, config)
        else:
            found = rf"^class_sample_rate: found 0.5, must be 1 with loss={config.name}, which is no softmax$"
            with pytest.raises(ConfigError, match=found):
                loss_config.check_class_sample_rate(0.5, config)
    loss_config.check_class_sample_rate(1.0, PAIR["triplet"]())
    with pytest.raises(ConfigError, match=r"must be 1 with loss=triplet, which is no softmax$"):
        loss_config.check_class_sample_rate(0.5, PAIR["triplet"]())


def test_checking_a_loss_draws_nothing_and_knows_no_number_of_classes():
    before = torch.get_rng_state()
    assert CLASS["normface"](reachable_loss=3.0).reachable_loss == 3.0  # more than that of a few classes
    assert torch.equal(torch.get_rng_state(), before)


def test_a_cross_entropy_takes_the_sizes_of_the_classes():
    config, sizes = loss_config.CrossEntropyConfig(label_smoothing=0.1), [1, 2, 6]
    logits, labels = rows(4, 3), torch.tensor([0, 1, 2, 2])
    for given in (None, sizes):
        expected = losses.CrossEntropyLoss(0.1, given)(logits, labels)
        assert config.build(given)(logits, labels).item() == expected.item()
    assert config.build()(logits, labels).item() != config.build(sizes)(logits, labels).item()


@pytest.mark.parametrize("first_is_pickier", [True, False])
def test_combined_losses_compare_what_both_compare(first_is_pickier):
    """Of rows of one class each, only one of the two has something to compare."""
    both = losses.TripletLoss(), losses.ContrastiveLoss()
    loss = losses.CombinedLoss(*(both if first_is_pickier else both[::-1]), 1.0)
    assert [bool(loss.compares(torch.tensor(labels))) for labels in ([0, 0, 1], [0, 1, 2])] == [True, False]


@pytest.mark.parametrize(
    ("name", "key", "value", "message"),
    [
        ("ntxent", "temperature", 0.0, "loss.temperature: found 0.0, must be > 0"),
        ("ranked_list", "margin", 2.0, "loss.margin: found 2.0, must be in [0, 1.2]"),
        ("arcface", "margin_radians", 4.0, "loss.margin_radians: found 4.0, must be in [0, π)"),
        ("normface", "scale", -1.0, "loss.scale: found -1.0, must be > 0, or None to learn it"),
    ],
)
def test_a_wrong_value_is_named_with_its_key(name, key, value, message):
    with pytest.raises(ConfigError) as caught:
        from_values((PAIR | CLASS)[name], {**values_of(name), key: value})
    assert str(caught.value) == message


def test_self_supervision_has_neither_classes_nor_triplets():
    of_triplets = {name for name in PAIR if issubclass(losses.PAIR_LOSSES[name], DisjointLoss)}
    assert of_triplets == {"angular_hinge", "triplet_disjoint"}
    for name in PAIR.keys() - of_triplets:
        assert from_values(PretrainConfig, {**RUN, "loss": values_of(name)}).loss.name == name
    for name in of_triplets:
        with pytest.raises(ConfigError, match=f"^loss: found '{name}', must be another; only metric learning"):
            from_values(PretrainConfig, {**RUN, "loss": values_of(name)})
    with pytest.raises(
        ConfigError, match="^loss.name: found 'arcface'; allowed: .*angular, angular_hinge, byol, circle"
    ):
        from_values(PretrainConfig, {**RUN, "loss": values_of("arcface")})


@pytest.mark.parametrize("name", ["sft", "sftd"])
def test_only_ftl_takes_the_share_of_energy_that_it_transfers(name):
    config = {"transform": {"name": name, "energy": 0.5}}
    with pytest.raises(ConfigError, match=f"^transform.energy: found 0.5, must be left out: {name} does not read it$"):
        from_values(Transforming, config)
    assert from_values(Transforming, {"transform": {"name": name, "energy": 0.95}}).transform.energy == 0.95
    assert from_values(Transforming, {"transform": {"name": "ftl", "energy": 0.5}}).transform.energy == 0.5


def test_a_transform_and_a_teacher_have_the_defaults_of_their_classes():
    sizes = {"class_sizes": torch.ones(3).long(), "num_features": 4, "dim": 5, "steps_per_epoch": 6}
    built = loss_config.SFTConfig().build(loss_config.Transformed(**sizes, seed=0))
    bare = losses.SphericalFeatureTransform(3, 5)
    names = ("mode", "weight", "energy", "kind_of_centres")
    assert [getattr(built, name) for name in names] == [getattr(bare, name) for name in names]
    assert loss_config.MoCoV3Config().build().temperature == losses.MoCoV3Loss().temperature


def test_the_values_of_a_teachers_losses():
    for kind in (loss_config.BYOLConfig, loss_config.MoCoV3Config):
        assert (kind().momentum, kind().predictor_dim) == (0.99, 512)
        for key, wrong in (("momentum", 1.0), ("predictor_dim", 0)):
            with pytest.raises(ConfigError, match=rf"^loss.{key}: found {wrong}, must be in"):
                kind(**{key: wrong})
    assert loss_config.MoCoV3Config(temperature=0.7).build().temperature == 0.7


def transformed(seed=0, **given):
    values = {"class_sizes": torch.tensor([9, 2, 5, 1]), "num_features": 4, "dim": 5, "steps_per_epoch": 6} | given
    return loss_config.Transformed(**values, seed=seed)


def test_the_values_of_a_feature_transform_reach_it():
    values = {"weight": 0.7, "centres": "random"}
    for config, mode in (
        (loss_config.SFTConfig(**values), "rotate"),
        (loss_config.SFTDConfig(**values), "translate"),
        (loss_config.FTLConfig(**values, energy=0.5), "ftl"),
    ):
        for tail_below, tail in ((None, None), (2, [3]), (5, [1, 3])):
            built = dataclasses.replace(config, tail_below=tail_below).build(transformed(seed=8))
            assert (built.mode, built.weight, built.kind_of_centres, built.seed) == (mode, 0.7, "random", 8)
            assert built.energy == config.energy
            assert built.centres.shape == (4, 5)
            assert (None if built.tail_classes is None else built.tail_classes.tolist()) == tail
    for tail_below in (1, 10):
        found = f"^transform.tail_below: found {tail_below}, must part the classes; they have 1 to 9 samples$"
        with pytest.raises(ConfigError, match=found):
            loss_config.SFTConfig(tail_below=tail_below).build(transformed())
    with pytest.raises(ConfigError, match="^transform.weight: found -1.0, must be ≥ 0$"):
        loss_config.SFTConfig(weight=-1.0)


GENERATORS = {kind.name: kind for kind in get_args(loss_config.GeneratorConfig)}


def test_the_sizes_of_the_data_and_the_network_reach_a_generator():
    built = {name: kind().build(transformed(seed=8)) for name, kind in GENERATORS.items()}
    assert (built["hdml"].steps_per_epoch, built["memory"].rows.shape[1]) == (6, 5)
    shapes = {name: [tuple(p.shape) for p in built[name].parameters() if p.ndim == 2] for name in ("hdml", "dvml")}
    assert shapes["hdml"] == [(512, 5), (4, 512), (4, 4)]
    assert shapes["dvml"] == [(5, 4), (5, 4), (512, 5), (4, 512)]
    for name in ("hdml", "dvml"):
        weights = [next(GENERATORS[name]().build(transformed(seed=seed)).parameters()) for seed in (8, 8, 9)]
        assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[1], weights[2])


@pytest.mark.usefixtures("unchecked_types")
@pytest.mark.parametrize(("name", "key"), [("hdml", "alpha"), ("dvml", "first_phase_steps"), ("memory", "from_step")])
def test_a_wrong_value_of_a_generator_is_named_with_its_key(name, key):
    with pytest.raises(ConfigError, match=rf"^transform.{key}: found -1, must be ≥ 0$"):
        GENERATORS[name](**{key: -1})


def test_only_some_losses_compare_with_remembered_rows():
    memory, allowed = GENERATORS["memory"](), set()
    for name, kind in PAIR.items():
        loss_config.check_transform(loss_config.NoTransformConfig(), kind())
        try:
            loss_config.check_transform(memory, kind())
            allowed.add(name)
        except ConfigError as error:
            assert str(error).startswith(f"loss: found '{name}', must be one that compares with remembered rows")
    # Those that the docstring of the memory lists.
    assert allowed == {
        "circle", "contrastive", "multi_similarity", "ranked_list", "semihard", "supcon", "triplet",
    }  # fmt: skip


@pytest.mark.parametrize("name", ["sft", "sftd", "ftl"])
def test_losses_that_need_a_positive_for_every_row_take_no_rows_of_drawn_classes(name):
    generated, refused = from_values(Transforming, {"transform": {"name": name}}).transform, set()
    for loss in (*(kind() for kind in PAIR.values()), CLASS["arcface"]()):
        try:
            loss_config.check_transform(generated, loss)
        except ConfigError as error:
            refused.add(loss.name)
            allowed = f"one that leaves out rows without a positive, with transform={name}, such as 'supcon'"
            assert str(error) == f"loss: found '{loss.name}', must be {allowed}"
    assert refused == {case.name for case in ALL_LOSSES if case.of_positives}
