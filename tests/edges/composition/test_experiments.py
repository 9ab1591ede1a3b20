"""An experiment's values hold only for its own options; experiments and options of users."""

import logging
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from ssl_sec.edges.composition.compose import (
    _say,
    chooses_own,
    chosen_options,
    compose,
    composed,
    experiments,
    options_of,
)
from ssl_sec.edges.composition.config_folders import CONFIG_FOLDER, ConfigFile, own_configs
from ssl_sec.edges.composition.experiments import load
from ssl_sec.edges.composition.options import groups, options, own_texts, primary
from ssl_sec.errors import ConfigError
from ssl_sec.settings import flattened, to_values
from ssl_sec.training.optimisers.config import CosineAdamWConfig, PolynomialAdamWConfig, SteppedAdamWConfig
from ssl_sec.training.optimisers.layer_rates import AdamWConfig
from tests.jobs import configured

JOBS = ("pretrain", "finetune", "metric_learning", "face")


def swaps() -> Iterator[tuple[str, str, str, str]]:
    """A job, an experiment, a group that it has values for, and another option of it.

    Experiments with the same keys for the same option of a group count once.
    """
    seen = set()
    for job in JOBS:
        defaults = chosen_options(job, [])
        for name in experiments(job):
            experiment = load(name)
            for group in sorted(experiment.values.keys() & primary(job).options.keys()):
                own = {**defaults, **experiment.choices}[group]
                keys = (job, group, own, *sorted(flattened({group: experiment.values[group]})))
                if keys not in seen:
                    seen.add(keys)
                    yield from ((job, name, group, option) for option in options_of(job)[group] if option != own)


@cache
def alone(job: str, group: str, option: str) -> dict[str, object]:
    """The values of an option without any experiment."""
    return flattened(composed(job, [f"{group}={option}"])[group])


def check_swap(job: str, name: str, group: str, option: str) -> None:
    overrides = [f"experiment={name}", f"{group}={option}"]
    assert flattened(composed(job, overrides)[group]) == alone(job, group, option)


def test_the_values_of_every_experiment_hold_for_its_own_options_alone():
    for job in JOBS:
        defaults = chosen_options(job, [])
        for name in experiments(job):
            experiment = load(name)
            for group in defaults.keys() - {"experiment"}:
                own = {**defaults, **experiment.choices}[group]
                kept, dropped = experiment.replacing(defaults, {group: own})
                assert (kept.values, dropped) == (experiment.values, {})
                other, dropped = experiment.replacing(defaults, {group: "another"})
                assert other.values.keys() == experiment.values.keys() - {group}
                assert other.choices.keys() == experiment.choices.keys() - {group}
                assert dropped.keys() == experiment.values.keys() & {group}


@pytest.mark.parametrize(
    "swap",
    [
        ("pretrain", "digits", "encoder", "timm"),
        ("pretrain", "digits", "head", "identity"),
        ("pretrain", "cifar10_l2reg_100", "constraint", "none"),
        ("pretrain", "cifar10_cpu", "data", "folder"),
        ("metric_learning", "cars196_triplet_sec", "optimiser", "sgd_steps"),
        ("metric_learning", "cars196_triplet_sec", "sampler", "triplets"),
        ("metric_learning", "cub_npair_angular_googlenet", "encoder", "ir18"),
        ("face", "casia_normface_c_contrastive_wen", "loss", "softmax"),
        ("face", "ms1m_cosface_sft", "transform", "none"),
    ],
    ids="-".join,
)
def test_another_option_has_its_own_values(swap):
    check_swap(*swap)


@pytest.mark.slow
def test_every_other_option_has_its_own_values():
    for swap in swaps():
        check_swap(*swap)


def test_dropped_values_are_logged_once(caplog):
    _say.cache_clear()
    overrides = ["experiment=digits", "encoder=timm", "encoder.model=resnet18", "optimiser=lars"]
    with caplog.at_level(logging.INFO, "ssl_sec"):
        config = configured("pretrain", overrides)
        compose("pretrain", overrides)
    assert (config.encoder.model, config.optimiser.learning_rate) == ("resnet18", 4.8)
    assert sorted(caplog.messages) == [
        "experiment=digits sets encoder.width=0.25 for encoder=resnet18: left out, as encoder=timm is chosen",
        "experiment=digits sets optimiser.learning_rate=0.3 for optimiser=sgd: left out, as optimiser=lars is chosen",
    ]


def test_the_same_option_keeps_the_experiments_values():
    assert compose("pretrain", ["experiment=digits", "encoder=resnet18"])["encoder"]["width"] == 0.25
    assert compose("pretrain", ["experiment=digits", "encoder=resnet34"])["encoder"]["width"] == 1.0
    typed = ["experiment=digits", "encoder=resnet34", "encoder.width=0.5"]
    assert compose("pretrain", typed)["encoder"]["width"] == 0.5


def test_an_option_of_another_job_is_refused_by_name():
    message = (
        "^optimiser: found 'adam', which jobs.pretrain cannot use; did you mean 'adamw'\\? allowed: adamw, lars, sgd$"
    )
    with pytest.raises(ConfigError, match=message):
        compose("pretrain", ["experiment=digits", "optimiser=adam"])
    with pytest.raises(ConfigError, match="^optimiser: found 'sgd_steps', which jobs.pretrain cannot use"):
        compose("pretrain", ["optimiser=sgd_steps"])
    with pytest.raises(
        ConfigError, match="^augment: found 'flip', which jobs.pretrain cannot use; allowed: byol, digits, s"
    ):
        compose("pretrain", ["augment=flip"])


MINE = """\
# Digits, a little longer.
defaults:
  - digits
  - override /optimiser: lars
epochs: 30
constraint: {eta: 0.5}
"""
MY_DATA = "# My photos.\ndefaults: [folder]\nroot: /data/photos\nimage_size_px: 64\n"


@pytest.fixture
def own(tmp_path, monkeypatch) -> Path:
    """A folder of user configs in the working directory."""
    for name, text in {"experiment/mine": MINE, "data/photos": MY_DATA}.items():
        path = tmp_path / "configs" / f"{name}.yaml"
        path.parent.mkdir(parents=True)
        path.write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "configs"


def test_a_user_experiment_is_built_on_another(own):
    config = configured("pretrain", ["experiment=mine", "data=photos"])
    assert (config.recipe, config.epochs, config.log_every_steps) == ("mine", 30, 5)
    assert (config.constraint.name, config.constraint.eta, config.encoder.width) == ("sec", 0.5, 0.25)
    # Those of digits were for another optimiser.
    assert (config.optimiser.name, config.optimiser.learning_rate) == ("lars", 4.8)
    assert (config.data.name, config.data.root, config.data.image_size_px) == ("folder", "/data/photos", 64)


def test_a_row_of_a_table_can_be_built_on(own):
    (own / "experiment" / "row.yaml").write_text("defaults: [cifar10_sec_100]\nepochs: 5\n")
    values = compose("pretrain", ["experiment=row"])
    assert (values["recipe"], values["epochs"], values["encoder"]["name"]) == ("row", 5, "resnet50")


def test_a_changed_file_is_read_again_and_values_stay_as_yaml_has_them(own):
    tags = "tags: {1: 2026-11-30, raw: !!binary aGVsbG8=}"
    for epochs in (5, 6):
        (own / "experiment" / "mine.yaml").write_text(f"defaults: [digits]\nepochs: {epochs}\ntracking: {{{tags}}}\n")
        values = compose("pretrain", ["experiment=mine"])
        assert (values["epochs"], values["tracking"]["tags"]) == (epochs, {1: "2026-11-30", "raw": b"hello"})


def test_user_experiments_are_listed_and_suggested(own):
    assert experiments("pretrain")["mine"] == "yours, configs/experiment/mine.yaml: Digits, a little longer."
    assert "mine" not in experiments("face")
    assert options("data", "pretrain")["photos"] == "yours, configs/data/photos.yaml: My photos."
    with pytest.raises(ConfigError, match="^experiment: found 'mime'; did you mean 'mine'"):
        compose("pretrain", ["experiment=mime"])
    with pytest.raises(ConfigError, match="^data: found 'photo'; did you mean 'photos'"):
        compose("pretrain", ["data=photo"])


def test_a_given_folder_counts_only_within_its_context(own, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path.parent)
    with pytest.raises(ConfigError, match="^experiment: found 'mine'"):
        compose("pretrain", ["experiment=mine"])
    with own_configs(str(own)):
        assert compose("pretrain", ["experiment=mine"])["epochs"] == 30
    assert "mine" not in experiments("pretrain")
    with pytest.raises(ConfigError, match="^--config-dir: found 'nothing', must be a folder that exists$"):
        own_configs("nothing").__enter__()


def test_the_packages_own_folder_adds_no_duplicates(monkeypatch):
    before = {group: options(group, "pretrain") for group in groups()}
    monkeypatch.chdir(CONFIG_FOLDER.parent)
    assert {group: options(group, "pretrain") for group in groups()} == before
    assert own_texts() == {}


def test_the_packages_files_are_read_as_omegaconf_reads_them():
    for path in CONFIG_FOLDER.rglob("*.yaml"):
        read = ConfigFile(path=path, is_own=False).read()
        assert repr(read) == repr(ConfigFile(path=path, is_own=True).read()), path


def test_a_copy_of_the_packages_files_adds_no_duplicates(own):
    (own / "head").mkdir()
    (own / "head" / "mlp3.yaml").write_bytes((CONFIG_FOLDER / "head" / "mlp3.yaml").read_bytes())
    assert "yours" not in options("head", "pretrain")["mlp3"]
    assert compose("pretrain", ["head=mlp3"])["head"]["num_layers"] == 3


def test_an_option_of_one_name_is_that_of_the_job(own):
    """AdamW of each training, and of a file made from it."""
    (own / "optimiser").mkdir()
    (own / "optimiser" / "mine.yaml").write_text("# Mine.\ndefaults: [adamw]\nweight_decay: 0.2\n")
    kinds = {
        "ablate": CosineAdamWConfig,
        "finetune": AdamWConfig,
        "metric_learning": SteppedAdamWConfig,
        "face": PolynomialAdamWConfig,
    }
    for job, declared in ((job, kind()) for job, kind in kinds.items()):
        given, mine = ([f"optimiser={name}", "data=digits"] for name in ("adamw", "mine"))
        assert compose(job, given)["optimiser"] == to_values(declared)
        assert compose(job, mine)["optimiser"] == {**to_values(declared), "weight_decay": 0.2}
    of_each = [options("optimiser", job)["adamw"] for job in kinds]
    assert ["MoCo v3" in text for text in of_each] == [True, False, False, False]
    with pytest.raises(ConfigError, match=r"^optimiser\.layer_decay: unknown key; did you mean"):
        compose("pretrain", ["optimiser=adamw", "optimiser.layer_decay=0.5"])


@pytest.mark.parametrize("more", ["", "leave_out: []\n"], ids=["an earlier version's", "whole"])
def test_a_file_equal_to_a_dataclass_adds_no_duplicate(own, more):
    (own / "data" / "digits.yaml").write_text(f"name: digits\nmax_images: null  # all\nnum_train_classes: null\n{more}")
    assert "yours" not in options("data", "pretrain")["digits"]
    assert compose("pretrain", ["data=digits"])["data"]["name"] == "digits"
    assert not chooses_own("pretrain", ["data=digits"])


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("experiment/bad", "epochs: [1", "configs/experiment/bad.yaml: not YAML in line 1"),
        ("experiment/bad", "- 1", "configs/experiment/bad.yaml: found a list, must be keys"),
        ("experiment/bad", "epoch: 3", "configs/experiment/bad.yaml: epoch: unknown key; did you mean 'epochs'"),
        (
            "experiment/bad",
            "encoder: {widht: 3}",
            "configs/experiment/bad.yaml: encoder.widht: unknown key; did you mean 'encoder.width'",
        ),
        (
            "experiment/bad",
            "defaults:\n  - override /encoder: resnet51",
            "configs/experiment/bad.yaml: encoder: found 'resnet51'; did you mean 'resnet50'",
        ),
        (
            "experiment/bad",
            "defaults:\n  - override /encodr: resnet50",
            "configs/experiment/bad.yaml: defaults: found 'encodr'; did you mean 'encoder'",
        ),
        (
            "experiment/bad",
            "defaults: [digit]",
            "configs/experiment/bad.yaml: defaults: found 'digit'; did you mean 'digits'",
        ),
        ("experiment/bad", "defaults: [bad]", "found 'bad', which is made from this experiment"),
        ("experiment/bad", "defaults: digits", "defaults: found 'digits', must be a list"),
        (
            "experiment/cifar10_sec_100",
            "epochs: 3",
            "experiment: found 'cifar10_sec_100' in the package and in configs/experiment/cifar10_sec_100.yaml",
        ),
        ("data/bad", "root: x", "configs/data/bad.yaml: name: missing; allowed: cars196"),
        ("data/bad", "name: foldr", "configs/data/bad.yaml: name: found 'foldr'; did you mean 'folder'"),
        ("data/bad", "defaults: [folder]\nrooot: x", "configs/data/bad.yaml: rooot: unknown key; did you mean 'root'"),
        (
            "data/cifar10",
            "name: cifar10\nroot: elsewhere",
            "data: found 'cifar10' in the package and in configs/data/cifar10.yaml; give your file another name",
        ),
    ],
)
def test_a_wrong_user_file_is_named(own, name, text, message):
    (own / f"{name}.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        compose("pretrain", [name.replace("/", "=")])
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_unused_file_may_be_wrong(own):
    for name in ("experiment/bad", "data/bad"):
        (own / f"{name}.yaml").write_text("a: [1")
    assert compose("pretrain", ["experiment=mine", "data=photos"])["recipe"] == "mine"
    assert "mine" in experiments("pretrain") and "bad" not in experiments("pretrain")
    assert "photos" in options_of("pretrain")["data"] and "bad" not in options_of("pretrain")["data"]


def test_only_user_files_are_sent_to_a_cluster(own):
    assert own_texts() == {"data/photos.yaml": MY_DATA, "experiment/mine.yaml": MINE}
    assert chooses_own("pretrain", ["experiment=mine"])
    assert chooses_own("pretrain", ["experiment=digits", "data=photos"])
    assert not chooses_own("pretrain", ["experiment=digits"])


def test_photos_simclr_is_simclrs_imagenet_recipe():
    """Chen et al. 2020, section 2.1 and appendix A."""
    config = configured("pretrain", ["experiment=photos_simclr", "data.root=x"])
    optimiser, augment = config.optimiser, config.augment
    assert (config.epochs, config.global_batch_size) == (100, 4096)
    assert (optimiser.name, optimiser.learning_rate) == ("lars", pytest.approx(0.3 * 4096 / 256))
    assert (optimiser.warmup_epochs, optimiser.weight_decay, optimiser.momentum) == (10, 1e-6, 0.9)
    assert (config.encoder.name, config.encoder.stem, config.encoder.width) == ("resnet50", "imagenet", 1.0)
    assert (config.loss.name, config.loss.temperature) == ("ntxent", 0.1)
    assert (config.head.name, config.head.dim, config.head.num_layers) == ("mlp", 128, 2)
    assert (augment.num_views, augment.view_size_px, augment.min_scale) == (2, 224, 0.08)
    assert (augment.colour_strength, augment.grey_probability, augment.blur_probability) == (1.0, 0.2, 0.5)
    assert config.constraint.name == "none"


def test_the_views_of_byol_are_those_of_its_table():
    """Grill et al. 2020, appendix B: brightness and contrast 0.4, saturation 0.2, hue 0.1."""
    augment = configured("pretrain", ["augment=byol", "loss=byol"]).augment
    strengths = (0.8 * augment.colour_strength, 0.8 * augment.saturation_strength, 0.2 * augment.colour_strength)
    assert strengths == pytest.approx((0.4, 0.2, 0.1))
    assert (augment.num_views, augment.min_scale, augment.flip_probability, augment.grey_probability) == (
        2,
        0.08,
        0.5,
        0.2,
    )
    assert (augment.blur_probability, augment.second_blur_probability) == (1.0, 0.1)
    assert (augment.solarise_probability, augment.second_solarise_probability) == (0.0, 0.2)
