"""Two networks of faces in another layout and precision, and compiled."""

from functools import partial

import jaxtyping
import pytest
import torch
import torch.nn.functional as F

from ssl_sec.networks import light_cnn, sphereface_net

# With the shape of their images.
NETWORKS = {"light_cnn": (light_cnn, (1, 30, 30)), "sphereface": (partial(sphereface_net, (1, 1, 1, 1)), (3, 32, 32))}

every_network = pytest.mark.parametrize(("build", "shape"), NETWORKS.values(), ids=NETWORKS.keys())


def taken(model, images):
    features = model(images)
    features.square().sum().backward()
    return features.detach(), [parameter.grad for parameter in model.parameters()]


def small(build, shape):
    torch.manual_seed(0)
    return build(0.05, image_size_px=shape[1])[0].double()


@every_network
def test_channels_last_changes_no_step(build, shape):
    images = torch.rand(4, *shape, dtype=torch.float64)
    other = small(build, shape).to(memory_format=torch.channels_last)
    torch.testing.assert_close(taken(other, images), taken(small(build, shape), images), rtol=1e-9, atol=1e-10)


@every_network
def test_the_network_is_one_graph(monkeypatch, build, shape):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # checks of shapes cannot be compiled
    images = torch.rand(4, *shape, dtype=torch.float64)
    other = torch.compile(small(build, shape), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(taken(other, images), taken(small(build, shape), images), rtol=1e-9, atol=1e-10)


@every_network
def test_autocast_computes_in_bfloat16(build, shape):
    torch.manual_seed(0)
    backbone, _ = build(0.25, image_size_px=16)
    images = torch.rand(4, shape[0], 16, 16)
    with torch.autocast("cpu", torch.bfloat16):
        features = backbone(images)
    assert features.dtype == torch.bfloat16
    assert F.cosine_similarity(features.float(), backbone(images)).min() > 0.99
    features.float().sum().backward()
    assert all(parameter.grad.dtype == torch.float32 for parameter in backbone.parameters())
