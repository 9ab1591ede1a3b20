"""What the formats of an export refuse, and what they suggest instead."""

from dataclasses import replace

import pytest
import torch

from ssl_sec.errors import ConfigError
from ssl_sec.exporting import FORMATS
from ssl_sec.exporting.record import load_script
from ssl_sec.networks.heads import LinearHead
from tests.exporting.test_exporting import (
    exportable_googlenet,
    exportable_ir,
    exportable_resnet,
    exportable_timm,
    some_images,
)


def with_head(exportable):
    return replace(exportable, head=LinearHead(exportable.dim, 5).eval(), dim=5)


REFUSALS = {
    "stem": ("timm", lambda: exportable_resnet(18, "cifar", 0.125, 1)),
    "head": ("timm", lambda: with_head(exportable_timm("test_vit", 1, 16))),
    "head of a network of faces": ("timm", lambda: with_head(exportable_ir())),
    "network of faces": ("safetensors", exportable_ir),
    "googlenet": ("timm", lambda: exportable_googlenet(1)),
}
SLOW = {"stem", "head of a network of faces", "network of faces", "googlenet"}


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.slow if case in SLOW else ()) for case in REFUSALS]
)
def test_every_format_that_a_refusal_lists_is_possible(case, tmp_path):
    name, made = REFUSALS[case]
    exportable = made()
    images = some_images(exportable)
    with pytest.raises(ConfigError, match=f"format: found '{name}', .*; allowed for this [a-z]+: ") as raised:
        FORMATS[name].write(exportable, images, tmp_path)
        FORMATS[name].loading(exportable)
    listed = str(raised.value).rpartition(": ")[2].split(", ")
    assert set(listed) <= FORMATS.keys() - {name} and "hub" in listed
    for other in listed:
        (tmp_path / other).mkdir()
        FORMATS[other].write(exportable, images, tmp_path / other)
        assert FORMATS[other].loading(exportable)


@pytest.mark.parametrize("has_head", [False, True])
@pytest.mark.parametrize("name", ["torchscript", "pt2"])
def test_a_recorded_encoder_refuses_pixels_that_are_whole_numbers(name, has_head, tmp_path):
    """Scaled by a mean for [0, 1], they would give embeddings without a meaning."""
    exportable = exportable_resnet(18, "cifar", 0.125, 3, mean=(0.5,), std=(0.5,))
    exportable = with_head(exportable) if has_head else exportable
    images = some_images(exportable)
    FORMATS[name].write(exportable, images, tmp_path)
    if name == "pt2":
        encoder = torch.export.load(tmp_path / "encoder.pt2").module()
    else:
        encoder = load_script(str(tmp_path / "encoder.pt"))
    torch.testing.assert_close(encoder(images), exportable.network(images))
    with pytest.raises((NotImplementedError, RuntimeError), match="must be either a floating point .* Got: Byte"):
        encoder((255 * images).byte())
