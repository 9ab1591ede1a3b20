"""The network of a run and those of its exports are one."""

from dataclasses import replace
from pathlib import Path

import pytest

from ssl_sec.edges.embeddings.network import TravellingNetwork, found_network_and_source
from ssl_sec.edges.folder.encoder import load_network
from ssl_sec.errors import StorageError
from ssl_sec.exporting import FORMATS
from ssl_sec.exporting.record import Record
from ssl_sec.networks.config import TimmConfig
from ssl_sec.networks.weights import save_weights
from ssl_sec.recipes.registry import PRETRAIN
from tests.exporting.test_exporting import exportable_timm, some_images
from tests.jobs import configured


@pytest.mark.parametrize(
    "scale",
    [
        pytest.param({}, marks=pytest.mark.slow),
        pytest.param({"mean": (0.1, 0.2, 0.3)}, marks=pytest.mark.slow),
        {"mean": (0.5, 0.5, 0.5), "std": (0.2,)},
    ],
)
def test_colour_exports_of_every_format_have_the_digest_of_their_run(scale: dict, tmp_path: Path):
    exportable = exportable_timm("test_vit", 3, 32, **scale)
    config = configured("pretrain", [])
    config = replace(config, encoder=TimmConfig(model="test_vit", **scale))
    save_weights(exportable.encoder.backbone, tmp_path / "encoder.safetensors")
    weights = {"encoder.safetensors": (tmp_path / "encoder.safetensors").read_bytes()}
    run = TravellingNetwork(
        run="a",
        weights=weights,
        build=lambda image_shape, files: load_network(PRETRAIN, config, image_shape, files).whole,
    )
    encoder = TimmConfig(model="test_vit", mean=tuple(exportable.mean), std=tuple(exportable.std))
    record = Record(run="a", encoder=encoder, head=None, image_shape=(3, 32, 32))
    for name in ("safetensors", "torchscript", "timm", "hub"):
        folder = tmp_path / name
        folder.mkdir()
        FORMATS[name].write(replace(exportable, record=record), some_images(exportable), folder)
        (folder / "README.md").write_text("an export")
        given = [f"run={folder}", f"output={tmp_path}/none", f"output_dir={tmp_path}", "runtime=local"]
        network, _ = found_network_and_source(configured("embed", given))
        found, expected = (each.digest(each.load((3, 32, 32))) for each in (network, run))
        assert (name, found) == (name, expected)


def test_damaged_weights_are_named_by_their_run_and_not_by_a_temporary_file():
    config = configured("pretrain", [])
    run = TravellingNetwork(
        run="mine",
        weights={"encoder.safetensors": b"\x10" + bytes(7) + b"not a header"},
        build=lambda image_shape, files: load_network(PRETRAIN, config, image_shape, files).whole,
    )
    with pytest.raises(StorageError, match=r"^run: mine: encoder\.safetensors cannot be read as weights: ."):
        run.load((3, 32, 32))
