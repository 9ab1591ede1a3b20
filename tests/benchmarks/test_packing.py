"""The files of a campaign for a machine without a network."""

from pathlib import Path

import torch

from benchmarks import simclr
from benchmarks.campaign import packing
from benchmarks.campaign.data import prepare_data
from tests.data.files import plain, write_parquet


def test_packed_images_equal_those_of_the_parquet_files(tmp_path):
    for split in ("train", "test"):
        write_parquet(tmp_path / f"{split}.parquet", [plain(number) for number in range(6)], [5, 0, 1, 5, 1, 0])
    packing.pack_images(tmp_path, tmp_path / "images.tar.gz")
    values = prepare_data(tmp_path / "images.tar.gz", tmp_path / "campaign")
    packed = simclr.open_images(values)
    assert packed.labels.tolist() == [0, 0, 1, 1, 2, 2]
    ours = simclr.open_images(simclr.describe_data(tmp_path))
    order = torch.tensor([1, 5, 2, 4, 0, 3])
    assert torch.equal(packed.images, ours.images[order])
    assert prepare_data(tmp_path / "images.tar.gz", tmp_path / "campaign") == values  # extracted once


def test_packed_wheels_have_the_versions_of_constraints_txt():
    pins = {}
    for line in (Path(__file__).parents[2] / "constraints.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            name, version = line.split("==")
            pins[name.lower().replace("_", "-")] = version
    versions = packing.read_pinned_versions(packing.WHEELS)
    assert versions == {name: pins[name.lower().replace("_", "-")] for name in packing.WHEELS}
