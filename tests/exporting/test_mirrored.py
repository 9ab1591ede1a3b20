"""The lines of a model card that combine images and mirror images are those of the evaluation of faces."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cosine_similarity

from ssl_sec.exporting import FORMATS
from ssl_sec.exporting.mirrored import combining
from ssl_sec.recipes.face.recipe import _WithFlips
from tests.exporting.test_exporting import exportable_resnet


class Session:
    """A network as ONNX Runtime calls it."""

    def __init__(self, network: nn.Module) -> None:
        self._network = network

    def run(self, names: list[str], given: dict[str, np.ndarray]) -> list[np.ndarray]:
        assert names == ["embeddings"] and all(each.flags.c_contiguous for each in given.values())
        return [self._network(torch.from_numpy(given["images"])).detach().numpy()]


@pytest.mark.parametrize("flips", ["sum_of_directions", "sum_of_embeddings"])
@pytest.mark.parametrize("name", ["torchscript", "onnx", "safetensors"])
def test_the_lines_compute_what_was_measured(name, flips):
    form, exportable = FORMATS[name], exportable_resnet(18, "cifar", 0.125, 3, size=8)
    exportable = replace(exportable, head=nn.Linear(exportable.dim, 5), dim=5)
    network, images = exportable.network, torch.rand(4, 3, 8, 8)
    given = {"encoder": Session(network) if form.takes_numpy else network, "images": images}
    if name == "safetensors":
        mean, std = torch.tensor([exportable.mean, exportable.std])[..., None, None]
        given |= {"mean": mean, "std": std, "encoder": exportable.encoder.backbone, "head": exportable.head}
    given["images"] = images.numpy() if form.takes_numpy else images
    with torch.no_grad():
        exec(combining(form, exportable, flips), given)
        expected = _WithFlips(network, flips)(images)
    found = torch.as_tensor(given["embeddings"])
    torch.testing.assert_close(cosine_similarity(found, expected), torch.ones(4))
    assert (cosine_similarity(found, network(images)) < 0.9999).all()
