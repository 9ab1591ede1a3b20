"""Steps that compute activations a second time have the same gradients, and need less of a GPU's memory."""

import pytest
import torch
from torch import nn

from ssl_sec.losses import NTXentLoss
from ssl_sec.networks import resnet, sphereface_net
from ssl_sec.networks.encoder import Network
from ssl_sec.networks.recomputation import recompute_blocks
from ssl_sec.training.step import autocast

SIZE_PX = 32


@pytest.fixture(autouse=True)
def in_full_precision():
    """Convolutions of float32 without TF32."""
    allowed = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32 = allowed


def step(device, encoder, num_features, micro_batch_size=None, precision="float32"):
    """The gradients of a step's weights, and the highest memory that it needed on a GPU, bytes."""
    num_images = 1024 if device.type == "cuda" else 32  # activations that exceed the workspaces of cuDNN
    torch.manual_seed(1)
    head = nn.Sequential(nn.Linear(num_features, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 16))
    network = Network(encoder, head, micro_batch_size).to(device).train()
    views = torch.rand(2 * num_images, 3, SIZE_PX, SIZE_PX, generator=torch.Generator().manual_seed(2)).to(device)
    labels = torch.arange(num_images, device=device).repeat(2)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    with autocast(device, precision):
        embeddings = network(views).embeddings
    NTXentLoss(0.5)(embeddings.float(), labels).backward()
    needed = torch.cuda.max_memory_allocated(device) - before if device.type == "cuda" else 0
    return [weight.grad.cpu() for weight in network.parameters()], needed


def without_batch_norm():
    torch.manual_seed(0)
    return sphereface_net((1, 1, 1, 1), 0.25, 3, SIZE_PX)


def with_blocks(recomputed):
    torch.manual_seed(0)
    backbone, num_features = resnet(18, "cifar", 0.25)
    if recomputed:
        recompute_blocks(backbone)
    return backbone, num_features


def assert_close(found, expected, bound):
    """Together, as a share of the length of all gradients."""
    apart = sum((one - other).square().sum() for one, other in zip(found, expected, strict=True))
    assert (apart / sum(each.square().sum() for each in expected)).sqrt() < bound


@pytest.mark.parametrize(("precision", "bound"), [("float32", 1e-4), ("bfloat16", 0.05)])
def test_micro_batches_have_the_gradient_of_the_batch(device, precision, bound):
    expected, whole = step(device, *without_batch_norm(), precision=precision)
    found, needed = step(
        device, *without_batch_norm(), micro_batch_size=12 if device.type == "cpu" else 300, precision=precision
    )
    assert_close(found, expected, bound)
    if device.type == "cuda":
        assert needed < 0.7 * whole


@pytest.mark.parametrize(("precision", "bound"), [("float32", 1e-4), ("bfloat16", 0.05)])
def test_recomputed_blocks_have_the_same_gradient(device, precision, bound):
    expected, whole = step(device, *with_blocks(False), precision=precision)
    found, needed = step(device, *with_blocks(True), precision=precision)
    assert_close(found, expected, bound)
    if device.type == "cuda":
        assert needed < 0.8 * whole
