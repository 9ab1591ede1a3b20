"""What a model card says of data and of measurements."""

import json

import pytest
from mlflow.entities import Dataset, Param, Run, RunData, RunInfo, RunTag

from ssl_sec.edges.export.public import (
    described_data,
    described_measurement,
    described_probe,
    hub_datasets,
    newest_of_each_protocol,
    public_settings,
)


def run_of(run_id: str = "12787654abcd", params: dict[str, str] | None = None, **tags: str) -> Run:
    given = [Param(key, value) for key, value in (params or {}).items()]
    data = RunData(params=given, tags=[RunTag(key.replace("__", "."), value) for key, value in tags.items()])
    return Run(RunInfo(run_id, "0", "", "FINISHED", 0, None, "active"), data)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("mnist by torchvision, official train split", "mnist by torchvision, official train split, "),
        (
            "digits, train split of a stratified 80/20 split, seed 0",
            "digits, train split of a stratified 80/20 split, seed 0, ",
        ),
        ("9 images without labels in /home/me/photos, train split", "train split, "),
        ("9 images of 2 classes in photos, train split", "train split, "),
        ("9 images of 2 classes in /a in b, train split/c; d, train split/e, train split", "train split, "),
        ("9 images of 2 classes in /data/cub, train split of cub200 by class", "train split of cub200 by class, "),
        ("9 images in /home/me/a.parquet and 3 more files, digest 1a2b", "digest 1a2b, "),
        (
            "9 images in /a/b.tar, digest 1a2b; read by blocks, 64 images shuffled at once",
            "digest 1a2b; read by blocks, 64 images shuffled at once, ",
        ),
        ("9 images in /a/b, train split; 4 of 9 images, held out", "train split; 4 of 9 images, held out, "),
        ("9 images of 2 classes in /home/me/train.rec", ""),
        ("9 images in file:///home/me/a.parquet, digest 1a2b", "digest 1a2b, "),
        ("9 images in zip://a.parquet::/home/me/a.zip, digest 1a2b", "digest 1a2b, "),
        (
            "9 images in hf://datasets/me/set/a.parquet, digest 1a2b",
            "9 images in hf://datasets/me/set/a.parquet, digest 1a2b, ",
        ),
        (
            "9 images in https://me:secret@a.org/b.parquet?code=secret, digest 1a2b",
            "9 images in https://***@a.org/b.parquet, digest 1a2b, ",
        ),
        (
            "9 images in https://a.org/b.parquet?code=secret and 3 more files, digest 1a2b",
            "9 images in https://a.org/b.parquet and 3 more files, digest 1a2b, ",
        ),
    ],
)
def test_data_have_their_name_origin_and_counts_without_a_path(source: str, said: str):
    data = Dataset("set/train", "d", "ssl_sec", source, profile=json.dumps({"images": 9, "bad_images": 0}))
    assert described_data(data) == f"set/train: {said}9 images, 0 bad images"


def test_data_without_classes_have_no_labels():
    data = Dataset("set/train", "d", "ssl_sec", "9 images in /a", profile=json.dumps({"images": 9, "classes": 0}))
    assert described_data(data) == "set/train: 9 images, no labels"


def test_a_probe_of_an_old_version_names_its_data_and_labels():
    assert described_probe(run_of(data="cifar10")) == "probe 12787654 on cifar10: all labels"
    few = run_of(params={"probe.labels_per_class": "5"}, data="cifar10")
    assert described_probe(few) == "probe 12787654 on cifar10: 5 labels per class"
    assert described_probe(run_of()) == "probe 12787654 on data that MLflow does not name: all labels"


def test_probes_without_a_protocol_are_all_kept():
    probes = [run_of(name, data="digits") for name in ("b", "a")]
    assert newest_of_each_protocol(probes) == probes


def test_scores_on_another_labelled_set_name_it():
    run = run_of(params={"monitor.data.name": "folder", "monitor.data.root": "/home/me/labelled"}, data="photos")
    assert described_measurement(run, "val/knn_top1") == "training on photos, measured on labelled"
    assert described_measurement(run, "val/rankme") == "training on photos"
    run = run_of(params={"monitor.data.name": "digits"}, data="photos")
    assert described_measurement(run, "val/probe_top1") == "training on photos, measured on digits"
    assert described_measurement(run_of(data="photos"), "val/knn_top1") == "training on photos"


def test_settings_have_the_names_of_files_and_not_their_places():
    given = {"encoder.weights": "/home/me/a.pth", "head.weights": "~/b.pth", "loss.name": "sec", "data.root": "/home"}
    kept = {"encoder.weights": "a.pth", "head.weights": "b.pth", "loss.name": "sec"}
    assert public_settings(given, ("encoder.", "loss.", "head.")) == kept


def test_only_sets_of_the_hub_have_an_id_there():
    sources = [
        "cifar100 by torchvision, official train split; 4 of 9 images, held out",
        "9 images of 2 classes in /data/mnist by torchvision, train split",
        "9 images without labels in /home/me/photos, train split",
        "9 images in hf://datasets/me/set@main/data/a.parquet and 3 more files, digest 1a2b",
        "5 images in hf://datasets/me/set@main/data/b.parquet, digest 1a2b",
        "9 images in s3://bucket/datasets/me/other/a.parquet, digest 1a2b",
        "scikit-learn's digits, train split of a stratified 80/20 split, seed 0",
    ]
    data = [Dataset("set/train", "d", "ssl_sec", source, profile=None) for source in sources]
    assert hub_datasets(data) == ["uoft-cs/cifar100", "me/set"]
