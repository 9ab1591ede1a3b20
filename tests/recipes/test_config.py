import dataclasses
import math
from pathlib import Path

import pytest
import torch
from PIL import Image

from ssl_sec.data.base_config import DataSetConfig
from ssl_sec.data.config import (
    Cars196Config,
    CIFARConfig,
    CUBConfig,
    DigitsConfig,
    FolderConfig,
    InShopConfig,
    ParquetConfig,
    RecordsConfig,
    SOPConfig,
)
from ssl_sec.data.faces import config as faces_config
from ssl_sec.edges.composition.compose import compose
from ssl_sec.errors import ConfigError, shown
from ssl_sec.networks import config as networks_config
from ssl_sec.networks.config import (
    HEAD_CONFIGS,
    BNInceptionConfig,
    GoogLeNetConfig,
    IRConfig,
    LightCNNConfig,
    PixelsConfig,
    ResNetConfig,
    SphereFaceNetConfig,
    TimmConfig,
)
from ssl_sec.recipes.config import CheckpointConfig
from ssl_sec.recipes.finetuning.config import FinetuneConfig
from ssl_sec.recipes.pretraining.config import MonitorConfig, PretrainConfig
from ssl_sec.recipes.probing.config import ProbeConfig, ProbeJobConfig
from ssl_sec.settings import from_values, to_values
from ssl_sec.training.config import RayConfig, SphericalConfig
from ssl_sec.training.optimisers import config as optimisers_config

RUN = {
    "recipe": "digits",
    "data": {"name": "digits"},
    "augment": {},
    "encoder": {"name": "resnet18", "width": 0.1},
    "head": {"name": "mlp"},
    "loss": {"name": "ntxent"},
    "constraint": {"name": "none"},
    "optimiser": {"name": "sgd"},
    "runtime": {"name": "local"},
    "epochs": 1,
    "global_batch_size": 64,
}


def changed(values, key, value):
    """The values with one dotted key changed."""
    first, _, rest = key.partition(".")
    return {**values, first: changed(values.get(first, {}), rest, value) if rest else value}


def message(key, value) -> str:
    with pytest.raises(ConfigError) as caught:
        from_values(PretrainConfig, changed(RUN, key, value))
    return str(caught.value)


WRONG = [
    ("epochs", -1, "≥ 0"),
    ("global_batch_size", 1, "in [2, 1048576]"),
    ("global_batch_size", 0, "in [2, 1048576]"),
    ("log_every_steps", 0, "≥ 1"),
    ("seed", -1, "≥ 0"),
    ("recipe", "", "a plain name without slashes"),
    ("recipe", "a/b", "a plain name without slashes"),
    ("recipe", "..", "a plain name without slashes"),
    ("recipe", ".", "a plain name without slashes"),
    ("run_name", "../elsewhere", "a plain name without slashes"),
    ("run_name", "a\0b", "a plain name without slashes"),
    ("resume", True, "given together with the run_name to resume"),
    ("resume", "auto", "given together with the run_name to resume"),
    ("resume", "always", "true or false or 'auto'"),
    ("data.max_images", 0, "≥ 1"),
    ("data.num_train_classes", 0, "≥ 1"),
    ("augment.min_scale", 0.0, "in (0, 1]"),
    ("augment.min_scale", 1.1, "in (0, 1]"),
    ("augment.flip_probability", -0.1, "in [0, 1]"),
    ("augment.flip_probability", 1.1, "in [0, 1]"),
    ("augment.colour_strength", -0.1, "in [0, 2.5]"),
    ("encoder.width", 0.0, "in (0, 64]"),
    ("encoder.mean", [], "one value or more"),
    ("encoder.std", [], "one value or more"),
    ("head.hidden_dim", 0, "in [1, 1048576]"),
    ("head.dim", 0, "in [1, 1048576]"),
    ("loss.temperature", 0.0, "> 0"),
    ("loss.temperature", -0.5, "> 0"),
    ("loss.temperature", math.nan, "a finite number"),
    ("optimiser.learning_rate", -0.1, "in [0, 1000000]"),
    ("optimiser.momentum", 1.0, "in [0, 1)"),
    ("optimiser.momentum", -0.1, "in [0, 1)"),
    ("optimiser.weight_decay", -1e-4, "in [0, 1000000]"),
    ("optimiser.warmup_epochs", -1, "≥ 0"),
    ("runtime.num_loader_workers", -1, "in [0, 1024]"),
    ("monitor.every_epochs", 0, "≥ 1"),
    ("monitor.max_images", 19, "≥ 20"),
    ("monitor.neighbours", 0, "≥ 1"),
    ("checkpoint.every_epochs", 0, "≥ 1"),
    ("checkpoint.keep_last", 0, "≥ 1"),
    ("probe.epochs", 0, "≥ 1"),
    ("probe.batch_size", 0, "≥ 1"),
    ("probe.learning_rates", [], "one value or more"),
    ("probe.momentum", 1.0, "in [0, 1)"),
    ("probe.decay_factor", 0.0, "in [1, 1000]"),
    ("probe.labels_per_class", 0, "≥ 1"),
]


@pytest.mark.parametrize(("key", "value", "allowed"), WRONG)
def test_a_wrong_value_is_named_with_its_key_and_what_is_allowed(key, value, allowed):
    assert message(key, value) == f"{key}: found {shown(value)}, must be {allowed}"


@pytest.mark.parametrize(
    ("group", "key", "value", "allowed"),
    [
        ({"name": "sec", "eta": 1.0}, "constraint.eta", -0.1, "≥ 0"),
        ({"name": "sec", "eta": 1.0}, "constraint.rho", 0.0, "in (0, 1]"),
        ({"name": "sec_ema", "eta": 1.0}, "constraint.rho", 1.5, "in (0, 1]"),
        ({"name": "fixed_radius", "eta": 1.0, "radius": 2.0}, "constraint.radius", -1.0, "≥ 0"),
        ({"name": "fc"}, "head.dim", 0, "in [1, 1048576]"),
        ({"name": "maxout"}, "head.dropout", 1.0, "in [0, 1)"),
        ({"name": "ir18"}, "encoder.width", 0.0, "in (0, 64]"),
        ({"name": "sphereface_net"}, "encoder.width", -1.0, "in (0, 64]"),
        ({"name": "sphereface_net"}, "encoder.units", [1, 2, 3], "four numbers ≥ 0"),
        ({"name": "sphereface_net"}, "encoder.freeze_batch_norm", True, "false: sphereface_net has no batch norm"),
        ({"name": "light_cnn"}, "encoder.width", 0.0, "in (0, 64]"),
        ({"name": "light_cnn"}, "encoder.freeze_batch_norm", True, "false: light_cnn has no batch norm"),
        ({"name": "folder", "root": "r"}, "data.image_size_px", 0, "in [1, 16384]"),
        ({"name": "folder", "root": "r"}, "data.resident_limit_mib", -1, "≥ 0"),
        ({"name": "parquet", "train": ["a"], "test": ["b"]}, "data.max_images", -1, "≥ 1"),
        ({"name": "ray"}, "runtime.num_workers", 0, "≥ 1"),
        ({"name": "ray"}, "runtime.cpus_per_worker", 0, "≥ 1"),
        ({"name": "ray"}, "runtime.max_failures", -2, "in [-1, 1000000], -1 for no limit"),
        ({"name": "ray"}, "runtime.num_workers", [3, 2], "[least, most] with 1 ≤ least ≤ most"),
        ({"name": "ray"}, "runtime.num_workers", [2], "[least, most] with 1 ≤ least ≤ most"),
        ({"name": "ray"}, "runtime.num_workers", "2", "an integer or a list"),
        ({"name": "ray"}, "runtime.timeout_s", 0, "in [1, 10000000]"),
        ({"name": "ray"}, "runtime.start_timeout_s", 0.0, "in (0, 10000000]"),
        ({"name": "ray"}, "runtime.resize_interval_s", 0.0, "in (0, 10000000]"),
        ({"name": "ray"}, "runtime.num_loader_workers", -1, "in [0, 1024]"),
    ],
)
def test_a_wrong_value_of_another_group_is_named(group, key, value, allowed):
    start = changed(RUN, key.split(".")[0], group)
    from_values(PretrainConfig, start)
    with pytest.raises(ConfigError) as caught:
        from_values(PretrainConfig, changed(start, key, value))
    assert str(caught.value) == f"{key}: found {shown(value)}, must be {allowed}"


@pytest.mark.parametrize(
    ("group", "key", "values", "message"),
    [
        ({"name": "resnet18"}, "encoder.std", [0.5, 0.0], "encoder.std[1]: found 0.0, must be in [1e-06, 1000]"),
        ({"name": "resnet18"}, "encoder.std", [math.inf], "encoder.std[0]: found inf, must be in [1e-06, 1000]"),
        ({"name": "resnet18"}, "encoder.mean", [math.nan], "encoder.mean[0]: found nan, must be in [-1000, 1000]"),
        ({}, "probe.learning_rates", [1.0, 0.0], "probe.learning_rates[1]: found 0.0, must be in [1e-12, 1000000]"),
        ({}, "probe.decay_at", [60, 75, 90], "probe.decay_at[0]: found 60.0, must be in (0, 1)"),
        ({}, "probe.decay_at", [0.0], "probe.decay_at[0]: found 0.0, must be in (0, 1)"),
        ({}, "probe.learning_rates", [math.inf], "probe.learning_rates[0]: found inf, must be in [1e-12, 1000000]"),
        (
            {"name": "sphereface_net"},
            "encoder.units",
            [1, 2, 3, -1],
            "encoder.units[3]: found -1, must be in [0, 1000]",
        ),
        ({"name": "ray"}, "runtime.num_workers", [0, 2], "runtime.num_workers[0]: found 0, must be ≥ 1"),
    ],
)
def test_a_wrong_value_in_a_list_is_named_by_its_place(group, key, values, message):
    with pytest.raises(ConfigError) as caught:
        from_values(PretrainConfig, changed(changed(RUN, key.split(".")[0], group), key, values))
    assert str(caught.value) == message


def test_a_misspelled_key_of_a_group_suggests_the_nearest():
    assert "optimiser.momentun: unknown key for 'sgd'; did you mean 'momentum'?" in message("optimiser.momentun", 0.9)
    assert "did you mean 'global_batch_size'?" in message("global_batchsize", 3)
    assert message("constraint", {"name": "sce", "eta": 1.0}).startswith("constraint.name: found 'sce'; did you mean")


@pytest.mark.parametrize(
    ("group", "values", "kind"),
    [
        ("data", {"name": "cifar100"}, CIFARConfig),
        ("data", {"name": "folder", "root": "r"}, FolderConfig),
        ("data", {"name": "parquet", "train": ["a"], "test": ["b"]}, ParquetConfig),
        ("data", {"name": "parquet", "train": ["a"], "num_train_classes": 3}, ParquetConfig),
        ("data", {"name": "records", "root": "r"}, RecordsConfig),
        ("data", {"name": "cub", "num_train_classes": 90}, CUBConfig),
        ("data", {"name": "cars196", "root": "r"}, Cars196Config),
        ("data", {"name": "sop", "on_bad_image": "skip"}, SOPConfig),
        ("data", {"name": "inshop"}, InShopConfig),
        ("encoder", {"name": "resnet50"}, ResNetConfig),
        ("encoder", {"name": "bn_inception", "freeze_batch_norm": True}, BNInceptionConfig),
        ("encoder", {"name": "googlenet", "mean": [0.1, 0.2, 0.3]}, GoogLeNetConfig),
        ("encoder", {"name": "ir50", "width": 0.25}, IRConfig),
        ("encoder", {"name": "se_ir50", "weights": "w", "freeze_batch_norm": True}, IRConfig),
        ("encoder", {"name": "sphereface_net", "units": [1, 1, 1, 1]}, SphereFaceNetConfig),
        ("encoder", {"name": "light_cnn", "width": 0.5}, LightCNNConfig),
        ("encoder", {"name": "pixels"}, PixelsConfig),
        ("encoder", {"name": "timm", "model": "test_vit"}, TimmConfig),
        ("head", {"name": "mlp", "num_layers": 3}, HEAD_CONFIGS["mlp"]),
        ("head", {"name": "bn_fc"}, HEAD_CONFIGS["bn_fc"]),
        ("head", {"name": "fc", "dim": 64}, HEAD_CONFIGS["fc"]),
        ("head", {"name": "fc_bn", "weights": "w"}, HEAD_CONFIGS["fc_bn"]),
        ("head", {"name": "maxout", "dim": 512}, HEAD_CONFIGS["maxout"]),
        ("head", {"name": "identity", "dim": 64}, HEAD_CONFIGS["identity"]),
        ("constraint", {"name": "sec", "eta": 1.0}, SphericalConfig),
        ("constraint", {"name": "sec_ema", "eta": 1.0, "rho": 0.1}, SphericalConfig),
        ("constraint", {"name": "l2reg", "eta": 1.0, "radius": 0.0}, SphericalConfig),
        ("constraint", {"name": "fixed_radius", "eta": 1.0, "radius": 8.7}, SphericalConfig),
        ("runtime", {"name": "ray", "num_workers": 2}, RayConfig),
        ("runtime", {"name": "ray", "num_workers": [1, 2]}, RayConfig),
    ],
)
def test_every_name_finds_its_group_and_survives_a_round_trip(group, values, kind):
    config = from_values(PretrainConfig, {**RUN, group: values})
    assert isinstance(getattr(config, group), kind)
    assert getattr(config, group).name == values["name"]
    assert from_values(PretrainConfig, to_values(config)) == config


def test_a_run_that_is_resumed_has_a_name():
    config = from_values(PretrainConfig, {**RUN, "resume": True, "run_name": "a"})
    assert config.resume and config.run_name == "a"


def test_a_probe_job_has_plain_names():
    job = {"run": "abc", "probe": {}, "runtime": {"name": "local"}}
    assert from_values(ProbeJobConfig, job).data is None
    assert from_values(ProbeJobConfig, {**job, "run_name": "p", "data": {"name": "digits"}}).data == DigitsConfig()
    with pytest.raises(ConfigError, match="^run_name: found 'a/b', must be a plain name without slashes$"):
        from_values(ProbeJobConfig, {**job, "run_name": "a/b"})


def test_configs_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        HEAD_CONFIGS["mlp"]().dim = 3


def test_a_gpu_reports_less_often():
    run = from_values(PretrainConfig, RUN)
    assert [run.steps_between_reports(torch.device(kind)) for kind in ("cuda", "cpu")] == [50, 10]
    assert dataclasses.replace(run, log_every_steps=7).steps_between_reports(torch.device("cuda")) == 7


def test_the_groups_that_have_defaults_are_valid_by_themselves():
    assert MonitorConfig().every_epochs == 10
    assert CheckpointConfig(keep_last=1).keep_last == 1
    assert ProbeConfig().learning_rates == (0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 2.0, 5.0, 10.0)
    assert Path(CIFARConfig(name="cifar10").root) == Path("data")


@pytest.mark.parametrize(
    ("base", "missing"),
    [
        (networks_config._EncoderConfig, "_backbone, architecture"),
        (DataSetConfig, "_open"),
        (faces_config._PairsConfig, "_list"),
        (optimisers_config._SteppedOptimiserConfig, "_build"),
    ],
)
def test_a_class_that_lacks_a_method_of_its_kind_fails_where_it_is_defined(base, missing):
    with pytest.raises(TypeError, match=f"class MineConfig must define {missing}"):

        class MineConfig(base):
            pass


@pytest.mark.parametrize(
    ("data", "title"),
    [
        ({"name": "digits"}, "digits"),
        ({"name": "cifar10", "root": "/elsewhere"}, "cifar10"),
        ({"name": "folder", "root": "/data/my flowers/"}, "my-flowers"),
        ({"name": "folder", "root": "/data/(flowers)/images"}, "flowers"),
        ({"name": "folder", "root": "/data"}, "folder"),
        ({"name": "parquet", "train": ["/data/birds/train-00000-of-00002.parquet"]}, "birds"),
        ({"name": "parquet", "train": ["/data/birds_train.parquet"]}, "birds"),
        ({"name": "parquet", "train": ["hf://datasets/ada/birds/data/train-*.parquet"]}, "birds"),
        ({"name": "parquet", "train": ["/train.parquet"]}, "parquet"),
        ({"name": "webdataset", "train": ["/data/birds/tr-{000..002}.tar"]}, "tr"),
        ({"name": "webdataset", "train": ["/data/birds/birds_train.000017.tar"]}, "birds"),
        ({"name": "webdataset", "train": ["/data/birds2/train-*.tar"]}, "birds2"),
        ({"name": "webdataset", "train": ["https://host/birds/{000000..000146}.tar?key=1"]}, "birds"),
        ({"name": "webdataset", "train": ["/data/birds2024.tar"]}, "birds2024"),
        ({"name": "folder", "root": "/data/birds-2024"}, "birds-2024"),
        ({"name": "records", "root": "faces_webface_112x112"}, "faces_webface_112x112"),
    ],
)
def test_without_a_recipe_a_run_is_named_for_its_data(data, title):
    values = {key: value for key, value in RUN.items() if key != "recipe"}
    assert from_values(PretrainConfig, {**values, "data": data}).recipe_name == title
    assert from_values(PretrainConfig, {**values, "data": data, "recipe": "custom"}).recipe_name == "custom"


def test_user_tags_must_not_clash_with_ours():
    assert from_values(PretrainConfig, {**RUN, "tracking": {"tags": {"team": "a", "ticket": 18}}}).tracking.tags
    for name, allowed in (("job", "another name: job, recipe"), ("mlflow.user", "another name"), ("a=b", "letters")):
        with pytest.raises(ConfigError, match=f"^tracking.tags.{name}: found '{name}', must be {allowed}"):
            from_values(PretrainConfig, {**RUN, "tracking": {"tags": {name: "mine"}}})


def test_examples_are_training_images_where_there_are_no_test_images(tmp_path):
    image = Image.new("L", (12, 10))
    image.save(tmp_path / "photo.png")
    run, data = from_values(PretrainConfig, RUN), FolderConfig(root=str(tmp_path), image_size_px=8)
    examples = run.open_examples(data)
    assert examples.image_shape == (3, 8, 8) and len(examples) == 1
    for split in ("train", "test"):
        (tmp_path / split / "a").mkdir(parents=True)
        image.save(tmp_path / split / "a" / "photo.png")
    assert "test" in run.open_examples(data).name


def test_a_run_on_crops_has_no_size_for_images_of_other_sets():
    values = compose("finetune", ["data=folder", "data.root=x", "augment.size_px=64"])
    config = from_values(FinetuneConfig, values)
    assert (config.size_px_of((3, 64, 64)), config.crop_of((3, 64, 64))) == (None, config.evaluated_crop)
    assert (config.size_px_of((3, 8, 10)), config.crop_of((3, 8, 10))) == (8, None)
    assert (config.size_px_of(None), config.crop_of(None)) == (None, config.evaluated_crop)
    sized = dataclasses.replace(config, data=FolderConfig(root="x", image_size_px=32))
    assert sized.size_px_of(None) == sized.size_px_of((3, 32, 32)) == 32


PHOTOS = FolderConfig(root="/data/photos")


def finetuning(**changes):
    values = compose("finetune", ["data=folder", "data.root=/data/photos", "runtime=local"])
    return from_values(FinetuneConfig, {**values, **changes})


def supervised():
    return from_values(PretrainConfig, {**RUN, "data": to_values(PHOTOS), "positives": "classes"})


def test_an_encoder_learns_from_the_labels_of_its_own_set():
    elsewhere, others = FolderConfig(root="/elsewhere/photos", image_size_px=32), FolderConfig(root="/data/scans")
    for learned in (supervised(), finetuning()):
        assert learned.has_learned(PHOTOS, 0.2, seed=0) and learned.has_learned(elsewhere, 0.2, seed=0)
        assert not learned.has_learned(others, 0.2, seed=0) and not learned.has_learned(PHOTOS, None, seed=0)
    assert not dataclasses.replace(supervised(), positives="views").has_learned(PHOTOS, 0.2, seed=0)


@pytest.mark.parametrize(
    ("changes", "share", "seed", "expected"),
    [
        ({}, 0.2, 0, False),
        ({}, 0.1, 0, False),  # among those of 0.2
        ({}, 0.3, 0, True),
        ({}, 0.2, 1, True),
        ({"image_size_px": 32, "num_channels": 1}, 0.2, 0, False),
        ({"labels": True}, 0.2, 0, True),  # maybe other classes, of which other images are held out
        ({"max_images": 100}, 0.2, 0, True),
        ({"leave_out": ("out.csv",)}, 0.2, 0, True),
    ],
)
def test_a_fine_tuning_does_not_learn_from_its_test_images(changes, share, seed, expected):
    tuned = finetuning(test_share=0.2)
    assert tuned.has_learned(dataclasses.replace(PHOTOS, **changes), share, seed) is expected
    assert dataclasses.replace(tuned, start_labels=("photos",), test_share=None).has_learned(PHOTOS, share, seed)
    assert dataclasses.replace(tuned, data=dataclasses.replace(PHOTOS, max_images=100)).has_learned(PHOTOS, share, seed)


def test_a_fine_tuning_knows_what_its_start_has_learned():
    message = "^test_share: found 0.2, must be null: the encoder has learned from the labels of images of 'photos'$"
    for start in (supervised(), finetuning(), finetuning(test_share=0.1), finetuning(start_labels=["photos"])):
        with pytest.raises(ConfigError, match=message):
            finetuning(test_share=0.2).started_from(start)
    with pytest.raises(ConfigError, match=message):
        finetuning(test_share=0.2, start_labels=["scans", "photos"])
    second = finetuning(test_share=0.2).started_from(finetuning(test_share=0.2))
    assert (second.start_labels, finetuning(test_share=0.2).started_from(second)) == ((), second)
    digits = finetuning(data={"name": "digits"}).started_from(supervised())
    assert digits.learned_sets == ("photos", "digits")
    assert digits.has_learned(PHOTOS, 0.2, 0) and digits.has_learned(DigitsConfig(), 0.2, 0)
    assert finetuning().started_from(digits).learned_sets == ("photos", "digits")
    with pytest.raises(ConfigError, match=message):
        finetuning(test_share=0.2).started_from(digits)
