import dataclasses
import math
from pathlib import Path

import pytest
import timm
import torch
from PIL import Image
from torch import nn

from ssl_sec.augment.config import AugmentConfig
from ssl_sec.data import config as data_config
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
from ssl_sec.data.crops import CentreCrop
from ssl_sec.data.faces import config as faces_config
from ssl_sec.data.image_set import EncodedImages, ResidentImages
from ssl_sec.errors import ConfigError, DataError, MissingDataError
from ssl_sec.networks import config as networks_config
from ssl_sec.networks import save_weights
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
from ssl_sec.recipes.pretraining.config import MonitorConfig, PretrainConfig
from ssl_sec.recipes.probing.config import ProbeConfig, ProbeJobConfig
from ssl_sec.settings import from_values, to_values
from ssl_sec.training import config as training_config
from ssl_sec.training.config import LocalConfig, NoConstraintConfig, OptimiserConfig, RayConfig, SphericalConfig
from ssl_sec.training.recipe import Computation
from tests.data.files import plain, write_folder, write_parquet

RUN = {
    "recipe": "digits",
    "data": {"name": "digits"},
    "augment": {},
    "encoder": {"name": "resnet18", "width": 0.1},
    "head": {"name": "mlp"},
    "loss": {"name": "ntxent"},
    "constraint": {"name": "none"},
    "optimiser": {},
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
    found = tuple(value) if isinstance(value, list) else value
    assert message(key, value) == f"{key}: found {found!r}, must be {allowed}"


@pytest.mark.parametrize(
    ("group", "key", "value", "allowed"),
    [
        ({"name": "sec", "eta": 1.0}, "constraint.eta", -0.1, "≥ 0"),
        ({"name": "sec", "eta": 1.0}, "constraint.rho", 0.0, "in (0, 1]"),
        ({"name": "sec_ema", "eta": 1.0}, "constraint.rho", 1.5, "in (0, 1]"),
        ({"name": "fixed_radius", "eta": 1.0}, "constraint.radius", -1.0, "≥ 0"),
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
    assert str(caught.value) == f"{key}: found {value!r}, must be {allowed}"


@pytest.mark.parametrize(
    ("group", "key", "values", "told"),
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
def test_a_wrong_value_in_a_list_is_named_by_its_place(group, key, values, told):
    with pytest.raises(ConfigError) as caught:
        from_values(PretrainConfig, changed(changed(RUN, key.split(".")[0], group), key, values))
    assert str(caught.value) == told


def test_a_misspelled_key_of_a_group_is_answered_with_the_nearest():
    assert "optimiser.momentun: unknown key; did you mean 'momentum'?" in message("optimiser.momentun", 0.9)
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
def test_every_name_finds_its_group_and_survives_the_way_to_values(group, values, kind):
    config = from_values(PretrainConfig, {**RUN, group: values})
    assert isinstance(getattr(config, group), kind)
    assert getattr(config, group).name == values["name"]
    assert from_values(PretrainConfig, to_values(config)) == config


def test_a_run_that_is_resumed_has_a_name():
    config = from_values(PretrainConfig, {**RUN, "resume": True, "run_name": "a"})
    assert config.resume and config.run_name == "a"


def test_decays_that_are_never_reached_are_refused():
    with pytest.raises(ConfigError, match=r"probe.decay_at: .* must be \[\] with probe.epochs=1"):
        ProbeConfig(epochs=1)
    assert ProbeConfig(epochs=1, decay_at=()).decay_at == ()


def test_a_probe_job_has_plain_names():
    job = {"run": "abc", "probe": {}, "runtime": {"name": "local"}}
    assert from_values(ProbeJobConfig, job).data is None
    assert from_values(ProbeJobConfig, {**job, "run_name": "p", "data": {"name": "digits"}}).data == DigitsConfig()
    with pytest.raises(ConfigError, match="^run_name: found 'a/b', must be a plain name without slashes$"):
        from_values(ProbeJobConfig, {**job, "run_name": "a/b"})


def test_configs_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        HEAD_CONFIGS["mlp"]().dim = 3


def test_digits_open_with_a_balanced_subset_of_the_training_split_only():
    assert len(DigitsConfig().open("train")) == 1437
    few = DigitsConfig(max_images=50)
    assert len(few.open("test")) == 360
    assert few.open("train").labels.bincount().tolist() == [5] * 10
    assert len(DigitsConfig(max_images=5000).open("train")) == 1437


CROP = CentreCrop(short_side_px=8, size_px=8)


def test_digits_are_split_by_class():
    data = DigitsConfig(num_train_classes=5)
    train, test = data.open_by_class("train", CROP), data.open_by_class("test", CROP)
    assert (train.class_names, test.class_names) == (tuple("01234"), tuple("56789"))
    assert len(train) + len(test) == 1437 and train.image_shape == (1, 8, 8)
    assert train.labels.unique().tolist() == test.labels.unique().tolist() == [0, 1, 2, 3, 4]
    whole = data.open("train")
    assert len(whole) == 1437 and len(whole.class_names) == 10
    few = DigitsConfig(num_train_classes=5, max_images=50)
    assert few.open_by_class("train", CROP).labels.bincount().tolist() == [10] * 5
    assert len(few.open_by_class("test", CROP)) == len(test)


@pytest.mark.parametrize("data", [DigitsConfig(), CIFARConfig(name="cifar10", root="none")])
def test_splits_of_the_same_classes_need_a_number_of_training_classes(data):
    with pytest.raises(ConfigError, match="^data.num_train_classes: found None, must be given: both splits have"):
        data.open_by_class("train", CROP)


def test_folders_open_by_class(tmp_path):
    write_folder(
        tmp_path, {f"{place}/1.png": plain(1) for place in ("train/a", "train/b", "test/c", "test/d", "test/e")}
    )
    data = FolderConfig(root=str(tmp_path))
    assert [data.open_by_class(split, CROP).class_names for split in ("train", "test")] == [("a", "b"), ("c", "d", "e")]
    data = FolderConfig(root=str(tmp_path), num_train_classes=1)
    assert [data.open_by_class(split, CROP).class_names for split in ("train", "test")] == [("a",), ("b",)]
    with pytest.raises(DataError, match="classes that train does not have: c, d, e"):
        data.open("test")


def test_parquet_opens_by_class(tmp_path):
    names = ["a", "b", "c", "d"]
    train = str(write_parquet(tmp_path / "train.parquet", [plain(1)] * 3, [1, 0, 1], names))
    test = str(write_parquet(tmp_path / "test.parquet", [plain(1)] * 2, [3, 2], names))
    data = ParquetConfig(train=(train,), test=(test,), cache_folder=str(tmp_path))
    opened = [data.open_by_class(split, CROP) for split in ("train", "test")]
    assert [part.labels.tolist() for part in opened] == [[1, 0, 1], [1, 0]]
    assert [part.class_names for part in opened] == [("a", "b"), ("c", "d")]
    assert data.open("test").labels.tolist() == [3, 2]
    data = ParquetConfig(train=(train, test), num_train_classes=3, cache_folder=str(tmp_path))
    opened = [data.open_by_class(split, CROP) for split in ("train", "test")]
    assert [part.class_names for part in opened] == [("a", "b", "c"), ("d",)]
    with pytest.raises(MissingDataError, match="set data.test"):
        data.open("test")
    with pytest.raises(ConfigError, match="^data.test: found None, must be given, unless data.num_train_classes"):
        ParquetConfig(train=(train,)).open_by_class("train", CROP)
    data = ParquetConfig(train=(train,), test=(train, test), cache_folder=str(tmp_path))
    with pytest.raises(DataError, match="^parquet: 2 classes are in both splits: a, b;"):
        data.open_by_class("train", CROP)


@pytest.mark.parametrize(("image_size_px", "kind"), [(4, ResidentImages), (None, EncodedImages)])
def test_images_are_cut_unless_they_have_one_size(tmp_path, image_size_px, kind):
    path = str(write_parquet(tmp_path / "a.parquet", [plain(1)] * 2, [0, 1]))
    write_folder(tmp_path, {f"train/{label}/1.png": plain(1) for label in "ab"})
    folder = FolderConfig(root=str(tmp_path), num_train_classes=1, image_size_px=image_size_px)
    parquet = ParquetConfig(train=(path,), num_train_classes=1, image_size_px=image_size_px, cache_folder=str(tmp_path))
    for data in (folder, parquet):
        image_set = data.open_by_class("test", CROP)
        assert isinstance(image_set, kind) and image_set.image_shape == (3, image_size_px or 8, image_size_px or 8)
        assert isinstance(data.open("train"), ResidentImages)


@pytest.mark.parametrize(
    ("kind", "looked_for"),
    [
        (CUBConfig, "images.txt"),
        (Cars196Config, "cars_annos.mat"),
        (SOPConfig, "Ebay_train.txt"),
        (InShopConfig, "Eval/list_eval_partition.txt"),
    ],
)
def test_retrieval_sets_are_looked_for_in_their_root_and_need_a_crop(tmp_path, kind, looked_for):
    data = kind(root=str(tmp_path))
    for config in (data, dataclasses.replace(data, num_train_classes=3)):
        with pytest.raises(MissingDataError) as caught:
            config.open_by_class("test", CROP)
        assert str(caught.value).startswith(f"{tmp_path / looked_for}: not there")
    with pytest.raises(ConfigError, match=f"^data.name: found '{data.name}', whose images have no common size;"):
        data.open("train")


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_cifar_is_looked_for_in_its_root(tmp_path, name):
    with pytest.raises(MissingDataError, match=str(tmp_path)):
        CIFARConfig(name=name, root=str(tmp_path)).open("train")


def test_a_folder_opens(tmp_path):
    for split in ("train", "test"):
        for place, label in enumerate("ab"):
            path = tmp_path / split / label / "image.png"
            path.parent.mkdir(parents=True)
            Image.new("RGB", (8, 6), (place, 0, 0)).save(path)
    image_set = FolderConfig(root=str(tmp_path), image_size_px=4, num_channels=1).open("train")
    assert image_set.image_shape == (1, 4, 4) and image_set.class_names == ("a", "b")


def test_parquet_is_looked_for(tmp_path):
    data = ParquetConfig(train=(str(tmp_path / "no.parquet"),), test=("x",), cache_folder=str(tmp_path))
    with pytest.raises(MissingDataError, match="no.parquet"):
        data.open("train")


def test_the_augmentation_is_built_with_its_settings():
    views = AugmentConfig(flip_probability=0.0, colour_strength=0.0).build(8, 1, seed=3, num_views=4)
    assert (views.seed, views.num_views, len(list(views.transforms.children()))) == (3, 4, 1)
    assert views(torch.zeros(2, 1, 9, 9, dtype=torch.uint8), 0, slice(0, 2), 2).shape == (8, 1, 8, 8)


def test_encoders_are_built_from_their_weights_with_their_pixels_scaled(tmp_path):
    config = ResNetConfig(name="resnet18", width=0.1, mean=(0.5,), std=(0.25,))
    first = config.build(1, 8)
    path = tmp_path / "w.safetensors"
    save_weights(first.backbone, path)
    second = dataclasses.replace(config, weights=str(path)).build(1, 8)
    images = torch.rand(2, 1, 8, 8)
    assert torch.equal(first.eval()(images), second.eval()(images))
    torch.testing.assert_close(first(images), first.backbone((images - 0.5) / 0.25))


@pytest.mark.parametrize(("name", "num_layers"), [("resnet18", 20), ("resnet34", 36), ("resnet50", 53)])
def test_the_name_decides_the_depth(name, num_layers):
    encoder = ResNetConfig(name=name, width=0.02).build(3, 32)
    assert sum(isinstance(module, nn.Conv2d) for module in encoder.modules()) == num_layers


@pytest.mark.parametrize(
    ("config", "num_layers", "title"),
    [
        (IRConfig(name="ir18", width=0.02), 21, "IR-18 of ArcFace, width 0.02"),
        (IRConfig(name="se_ir50", width=0.02), 101, "SE-IR-50 of ArcFace, width 0.02"),
        (SphereFaceNetConfig(width=0.02), 36, "SphereFace's CNN of [3, 4, 6, 3] residual units, width 0.02"),
        (SphereFaceNetConfig(units=(1, 1, 1, 1)), 12, "SphereFace's CNN of [1, 1, 1, 1] residual units, width 1"),
        (LightCNNConfig(width=0.5), 9, "Light CNN-9, width 0.5"),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_encoders_of_faces_are_built_for_a_size_of_images(config, num_layers, title):
    encoder = config.build(1, 20)
    assert sum(isinstance(module, nn.Conv2d) for module in encoder.modules()) == num_layers
    assert encoder.eval()(torch.rand(2, 1, 20, 20)).shape == (2, encoder.num_features)
    assert encoder.num_features % 4 == 0  # a map of 2 x 2
    assert config.architecture(1, 20).title == title


def test_timm_models_are_built():
    encoder = TimmConfig(model="test_resnet").build(1, 32)
    assert encoder.eval()(torch.rand(2, 1, 32, 32)).shape == (2, encoder.num_features)


@pytest.mark.parametrize(
    ("config", "mean", "std"),
    [
        (ResNetConfig(name="resnet18", width=0.05), [0], [1]),
        (BNInceptionConfig(), [123 / 255, 117 / 255, 104 / 255], [1 / 255]),
        (GoogLeNetConfig(), [0.5], [0.5]),
        (GoogLeNetConfig(mean=(0.1, 0.2, 0.3)), [0.1, 0.2, 0.3], [0.5]),
        (IRConfig(name="ir18", width=0.05), [0.5], [128 / 255]),
        (SphereFaceNetConfig(width=0.05), [0.5], [128 / 255]),
        (LightCNNConfig(width=0.05), [0], [1]),
        (TimmConfig(model="test_resnet"), [0], [1]),
    ],
    ids=lambda config: getattr(config, "name", None),
)
def test_pixels_are_scaled_as_the_published_weights_expect_unless_stated(config, mean, std):
    encoder = config.build(3, 32)
    torch.testing.assert_close(encoder.mean.flatten(), torch.tensor(mean, dtype=torch.float32))
    torch.testing.assert_close(encoder.std.flatten(), torch.tensor(std, dtype=torch.float32))


@pytest.fixture
def without_downloads(monkeypatch):
    """Which models timm was asked for with its weights."""
    create, asked = timm.create_model, []

    def recorded(model, pretrained=False, **arguments):
        asked.extend([model] if pretrained else [])
        return create(model, **arguments)

    monkeypatch.setattr(timm, "create_model", recorded)
    return asked


@pytest.mark.parametrize(
    ("model", "mean", "std"),
    [
        ("resnet18", (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
        ("test_vit.r160_in1k", (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
    ],
)
def test_pretrained_timm_models_get_pixels_as_they_were_trained_on(without_downloads, tmp_path, model, mean, std):
    config = TimmConfig(model=model, pretrained=True)
    first = config.build(3, 32)
    assert set(without_downloads) == {model}
    torch.testing.assert_close(first.mean.flatten(), torch.tensor(mean))
    torch.testing.assert_close(first.std.flatten(), torch.tensor(std))
    assert dataclasses.replace(config, mean=(0.0,), std=(1.0,)).build(3, 32).std.flatten().tolist() == [1]
    without_downloads.clear()
    path = tmp_path / "trained.safetensors"
    save_weights(first.backbone, path)
    again = dataclasses.replace(config, weights=str(path)).build(3, 32)
    assert without_downloads == []
    assert torch.equal(again.mean, first.mean) and torch.equal(again.std, first.std)


def test_a_frozen_backbone_has_its_loaded_statistics_in_training_too(tmp_path):
    torch.manual_seed(0)
    config = ResNetConfig(name="resnet18", width=0.1)
    trained = config.build(3, 8)
    trained(torch.rand(4, 3, 8, 8))
    path = tmp_path / "w.safetensors"
    save_weights(trained.backbone, path)
    frozen = dataclasses.replace(config, weights=str(path), freeze_batch_norm=True).build(3, 8).train()
    images = torch.rand(4, 3, 8, 8)
    torch.testing.assert_close(frozen(images), trained.eval()(images))
    frozen(images).sum().backward()
    trained_names = {name for name, parameter in frozen.backbone.named_parameters() if parameter.requires_grad}
    assert "conv1.weight" in trained_names
    assert not any(".bn" in name or name.startswith("bn") for name in trained_names)
    torch.testing.assert_close(dict(frozen.state_dict()), dict(trained.state_dict()), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("name", "options", "smallest"),
    [("bn_inception", {}, 7), ("googlenet", {}, 15), ("googlenet", {"variant": "published"}, 31)],
)
def test_images_that_are_too_small_for_an_encoder_are_one_line(name, options, smallest):
    config = from_values(PretrainConfig, {**RUN, "encoder": {"name": name, "mean": [0.5], **options}}).encoder
    encoder = config.build(1, smallest).eval()
    assert encoder(torch.rand(2, 1, smallest, smallest)).shape == (2, 1024)
    message = (
        f"^encoder.name: found '{name}', which needs images of {smallest} pixels or more; these have {smallest - 1}$"
    )
    with pytest.raises(ConfigError, match=message):
        config.build(1, smallest - 1)


def test_the_hidden_width_of_the_head_is_that_of_the_features_unless_stated():
    assert HEAD_CONFIGS["mlp"](dim=5).build(7, 0).layers[0].weight.shape == (7, 7)
    assert HEAD_CONFIGS["mlp"](dim=5, hidden_dim=9, num_layers=3).build(7, 0).layers[3].weight.shape == (9, 9)


@pytest.mark.parametrize("name", ["bn_fc", "fc", "fc_bn", "maxout"])
def test_a_linear_heads_dropout_has_its_probability_and_the_runs_seed(name):
    found = HEAD_CONFIGS[name](dim=5, dropout=0.3).build(7, 11).dropout
    assert (found.probability, found.width, found.seed) == (0.3, 7 if name == "fc_bn" else 5, 11)


def test_a_maxout_head_has_two_linear_layers():
    assert HEAD_CONFIGS["maxout"]().build(7, 0).fc.weight.shape == (2 * 256, 7)


def test_a_linear_head_has_batch_norm_before_it_behind_it_or_none():
    assert [name for name, _ in HEAD_CONFIGS["bn_fc"]().build(7, 0).named_children()] == ["bn", "fc", "dropout"]
    assert [name for name, _ in HEAD_CONFIGS["fc"]().build(7, 0).named_children()] == ["fc", "dropout"]
    assert [name for name, _ in HEAD_CONFIGS["fc_bn"]().build(7, 0).named_children()] == [
        "fc",
        "features",
        "dropout",
    ]
    assert HEAD_CONFIGS["fc"]().build(7, 0).fc.weight.shape == (512, 7)


def test_pixels_are_features_and_embeddings_without_a_network():
    encoder = PixelsConfig().build(3, 4)
    images = torch.rand(2, 3, 4, 4)
    embeddings = HEAD_CONFIGS["identity"](dim=48).build(encoder.num_features, 0)(encoder(images))
    torch.testing.assert_close(embeddings, ((255 * images - 127.5) / 128).flatten(1))
    with pytest.raises(ConfigError, match="head.dim: found 47, must be 48, the number of features"):
        HEAD_CONFIGS["identity"](dim=47).build(encoder.num_features, 0)


@pytest.mark.parametrize(
    "config",
    [HEAD_CONFIGS[name](dim=5) for name in ("mlp", "bn_fc", "fc", "fc_bn", "maxout")],
)
def test_heads_are_built_from_their_weights(tmp_path, config):
    torch.manual_seed(0)
    first = config.build(7, 0)
    path = tmp_path / "head.safetensors"
    save_weights(first, path)
    second = dataclasses.replace(config, weights=str(path)).build(7, 0)
    features = torch.rand(3, 7)
    assert torch.equal(second(features), first(features))
    with pytest.raises(MissingDataError, match="^head.weights: no file /nowhere$"):
        dataclasses.replace(config, weights="/nowhere").build(7, 0)


def test_the_constraint_and_its_weight_follow_the_settings():
    assert NoConstraintConfig().build() is None
    assert NoConstraintConfig().weight(5, 10)(5) == 0
    config = SphericalConfig(name="sec_ema", eta=2.0, rho=0.3)
    assert config.build().rho == 0.3 and config.build().radius is None
    assert [config.weight(5, 10)(step) for step in (0, 5)] == [0, 1.0]
    fixed = SphericalConfig(name="fixed_radius", eta=2.0, ramp="constant", radius=8.7)
    assert fixed.build().radius == 8.7
    assert fixed.weight(5, 10)(0) == 2.0
    face = SphericalConfig(name="sec", eta=2.0, ramp="face").weight(4, 100)
    assert [face(step) for step in (0, 12, 14, 16, 99)] == [0, 0, 1, 2, 2]
    capped = SphericalConfig(name="sec_ema", eta=1.0, ramp="capped", rho=0.4).weight(4, 1000)
    assert [capped(step) for step in (0, 1, 2, 3)] == [0, 0.5, 1, 1]


@pytest.mark.parametrize(("name", "kind"), [("sgd", "SGD"), ("lars", "Lars")])
def test_the_optimiser_is_built_over_all_modules(name, kind):
    optimiser = OptimiserConfig(name=name, momentum=0.5, weight_decay=0.1).build(nn.Linear(2, 2), nn.Linear(2, 1))
    assert type(optimiser).__name__ == kind
    assert [len(group["params"]) for group in optimiser.param_groups] == [2, 2]
    assert optimiser.param_groups[0]["momentum"] == 0.5
    assert [group["weight_decay"] for group in optimiser.param_groups] == [0.1, 0.0]


def test_the_rate_warms_up_over_whole_epochs():
    rate = OptimiserConfig(learning_rate=1.0, warmup_epochs=2).schedule(steps_per_epoch=5, total_steps=100)
    assert [rate(0), rate(9), rate(10), rate(55)] == pytest.approx([0.1, 1.0, 1.0, 0.5])


@pytest.fixture
def gpu(monkeypatch):
    """A GPU that computes in bfloat16, on a machine with all that compiles for it."""
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: not including_emulation)
    monkeypatch.setattr(training_config, "find_spec", lambda name: name)
    monkeypatch.setattr(training_config.shutil, "which", lambda name: f"/bin/{name}")
    return torch.device("cuda", 0)


def test_cpus_compute_as_they_always_did():
    asked_for = Computation(precision="float32", channels_last=True, num_loader_workers=3)
    assert LocalConfig(num_loader_workers=3).on(torch.device("cpu")) == asked_for


def test_gpus_compute_in_bfloat16_compiled(gpu):
    fast = Computation(precision="bfloat16", channels_last=True, compiled=True, num_loader_workers=2)
    assert LocalConfig().on(gpu) == RayConfig().on(gpu) == fast


def test_gpus_without_bfloat16_compute_in_float32(gpu, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: including_emulation)
    assert LocalConfig().on(gpu).precision == "float32"


@pytest.mark.parametrize("missing", ["triton", "a compiler"])
def test_nothing_is_compiled_where_what_compiles_is_missing(missing, gpu, monkeypatch):
    if missing == "triton":
        monkeypatch.setattr(training_config, "find_spec", lambda name: None)
    else:
        monkeypatch.setattr(training_config.shutil, "which", lambda name: None)
    assert not LocalConfig().on(gpu).compiled
    assert LocalConfig(compile=True).on(gpu).compiled


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("asked", [True, False])
def test_what_is_asked_for_holds_on_every_device(precision, asked, gpu):
    values = {
        "name": "local",
        "precision": precision,
        "channels_last": asked,
        "compile": asked,
        "num_loader_workers": 0,
    }
    options = from_values(LocalConfig, values)
    asked_for = Computation(precision=precision, channels_last=asked, compiled=asked)
    assert options.on(torch.device("cpu")) == options.on(gpu) == asked_for


def test_steps_are_replayed_on_one_gpu(gpu):
    assert LocalConfig().replays_steps(gpu, world_size=1) and LocalConfig(graphs=True).replays_steps(gpu, world_size=1)
    assert not LocalConfig(graphs=False).replays_steps(gpu, world_size=1)
    assert not RayConfig().replays_steps(gpu, world_size=2)
    assert not LocalConfig().replays_steps(torch.device("cpu"), world_size=1)
    assert not LocalConfig(precision="float64").replays_steps(gpu, world_size=1)


@pytest.mark.parametrize(
    ("options", "device", "world_size", "reason"),
    [
        (LocalConfig(graphs=True), "cpu", 1, "the device is cpu"),
        (RayConfig(graphs=True), "cuda", 2, "there are 2 workers"),
        (LocalConfig(graphs=True, precision="float64"), "cuda", 1, "the precision is float64"),
    ],
)
def test_replaying_is_refused_where_it_is_not_possible(options, device, world_size, reason):
    with pytest.raises(
        ConfigError, match=rf"runtime\.graphs: found True, but {reason}.*; allowed here: false, or null"
    ):
        options.replays_steps(torch.device(device), world_size)


def test_a_gpu_reports_less_often():
    run = from_values(PretrainConfig, RUN)
    assert [run.steps_between_reports(torch.device(kind)) for kind in ("cuda", "cpu")] == [50, 10]
    assert dataclasses.replace(run, log_every_steps=7).steps_between_reports(torch.device("cuda")) == 7


def test_the_device_is_the_one_asked_for_or_found(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert LocalConfig().resolve_device() == LocalConfig(device="cpu").resolve_device() == torch.device("cpu")
    with pytest.raises(ConfigError, match="^runtime.device: found 'cuda', but this machine has no usable GPU"):
        LocalConfig(device="cuda").resolve_device()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert LocalConfig().resolve_device() == LocalConfig(device="cuda").resolve_device() == torch.device("cuda", 0)
    assert LocalConfig(device="cpu").resolve_device() == torch.device("cpu")


def test_the_groups_that_have_defaults_are_valid_by_themselves():
    assert MonitorConfig().every_epochs == 10
    assert CheckpointConfig(keep_last=1).keep_last == 1
    assert ProbeConfig().learning_rates == (1.0, 2.0, 5.0, 10.0)
    assert Path(CIFARConfig(name="cifar10").root) == Path("data")


def test_a_mean_for_each_channel_needs_as_many_channels():
    encoder = ResNetConfig(name="resnet18", width=0.125, mean=(0.5, 0.5, 0.5))
    assert encoder.build(num_channels=3, image_size_px=8).mean.shape == (3, 1, 1)
    with pytest.raises(ConfigError, match="encoder.mean: .* must be one value, or one for each of 1 channels"):
        encoder.build(num_channels=1, image_size_px=8)


@pytest.mark.parametrize(
    ("base", "missing"),
    [
        (networks_config._EncoderConfig, "_backbone, architecture"),
        (data_config._DataConfig, "_open"),
        (faces_config._PairsConfig, "_list"),
        (training_config._SteppedOptimiserConfig, "_build"),
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
        ({"name": "folder", "root": "/data/flowers/images"}, "flowers"),
        ({"name": "folder", "root": "/data"}, "folder"),
        ({"name": "parquet", "train": ["/data/birds/train-00000-of-00002.parquet"]}, "birds"),
        ({"name": "parquet", "train": ["/data/birds_train.parquet"]}, "birds"),
        ({"name": "parquet", "train": ["hf://datasets/ada/birds/data/train-*.parquet"]}, "birds"),
        ({"name": "parquet", "train": ["/train.parquet"]}, "parquet"),
        ({"name": "records", "root": "faces_webface_112x112"}, "faces_webface_112x112"),
    ],
)
def test_without_a_recipe_a_run_is_named_for_its_data(data, title):
    values = {key: value for key, value in RUN.items() if key != "recipe"}
    assert from_values(PretrainConfig, {**values, "data": data}).recipe_name == title
    assert from_values(PretrainConfig, {**values, "data": data, "recipe": "custom"}).recipe_name == "custom"


def test_tags_of_ones_own_have_names_of_their_own():
    assert from_values(PretrainConfig, {**RUN, "tracking": {"tags": {"team": "a", "ticket": 18}}}).tracking.tags
    for name, allowed in (("job", "another name: job, recipe"), ("mlflow.user", "another name"), ("a=b", "letters")):
        with pytest.raises(ConfigError, match=f"^tracking.tags.{name}: found '{name}', must be {allowed}"):
            from_values(PretrainConfig, {**RUN, "tracking": {"tags": {name: "mine"}}})
