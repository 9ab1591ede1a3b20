"""Names and tags of runs to which none were given."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from ssl_sec.edges.folder.names import claim_name, run_name_of, training_tags
from ssl_sec.errors import StorageError
from tests.jobs import configured


def config(*overrides):
    return configured("pretrain", overrides)


@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        (["data=cifar10", "constraint=sec"], "cifar10-resnet18-sec-s0"),
        (["experiment=digits", "seed=3"], "digits-resnet18-sec-s3"),
        (["data=folder", "data.root=/data/my flowers/", "constraint=sec_ema"], "my_flowers-resnet18-sec_ema-s0"),
        (["data=cifar10", "epochs=0"], "cifar10-resnet18-random-s0"),
        (["encoder=timm", "encoder.model=vit_tiny_patch16_224.augreg"], "digits-vit_tiny_patch16_224.augreg-none-s0"),
        (["loss=triplet"], "digits-resnet18-triplet-none-s0"),
    ],
)
def test_a_name_has_data_encoder_constraint_and_seed(overrides, name):
    assert run_name_of(config(*overrides)) == name


def test_tags_describe_a_run():
    tags = training_tags(config("experiment=digits", "seed=3"))
    assert tags == {"data": "digits", "encoder": "resnet18x0.25", "loss": "ntxent", "constraint": "sec", "seed": "3"}
    learning = configured("metric_learning", ["experiment=digits_retrieval"])
    assert training_tags(learning)["loss"] == learning.loss.name
    assert training_tags(replace(learning, steps=0))["constraint"] == "random"


def test_a_name_is_free_or_has_a_number(tmp_path: Path):
    names = [claim_name(tmp_path / "digits", "a") for _ in range(3)]
    assert names == ["a", "a-2", "a-3"]
    with ThreadPoolExecutor(8) as threads:
        names = list(threads.map(lambda _: claim_name(tmp_path / "digits", "b"), range(8)))
    assert sorted(names) == ["b", *(f"b-{number}" for number in range(2, 9))]


def test_where_no_folder_can_be_made_is_one_line(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="output_dir: .* cannot be written: Not a directory"):
        claim_name(tmp_path / "file", "a")
