"""Micro-batches: the features and gradients of the whole batch, at the memory of a part."""

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ssl_sec.collectives import average_gradients, rank, world_size
from ssl_sec.errors import ConfigError
from ssl_sec.losses import NTXentLoss
from ssl_sec.networks import freeze_batch_norm
from ssl_sec.networks.encoder import Network
from ssl_sec.networks.micro_batches import in_micro_batches, require_separable
from ssl_sec.networks.recomputation import recompute_blocks
from tests.networks.test_recomputation import backbone, some_images
from tests.workers import on_workers

VIEWS = 8


def network(size=None, name="timm test_vit", dtype=torch.float64):
    encoder = backbone(name, dtype)
    with torch.no_grad():
        num_features = encoder(some_images(1, dtype)).shape[1]
    torch.manual_seed(1)
    # Batch norm in the head takes all features at once.
    head = nn.Sequential(nn.Linear(num_features, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4)).to(dtype)
    return Network(encoder, head, size).train()


def gradients(model, images, labels):
    features, embeddings = model(images)
    loss = NTXentLoss(0.5)(embeddings, labels)
    loss.backward()
    module = model.module if isinstance(model, DistributedDataParallel) else model
    return loss.detach(), features.detach(), {name: weight.grad for name, weight in module.named_parameters()}


def of_a_step(size, name="timm test_vit"):
    images = some_images(VIEWS, torch.float64)
    return gradients(network(size, name), images, torch.arange(VIEWS // 2).repeat(2))


@pytest.mark.parametrize("size", [1, 3, 4, 8, 100])
def test_gradients_are_those_of_the_whole_batch(size):
    torch.testing.assert_close(of_a_step(size), of_a_step(None), rtol=1e-10, atol=1e-13)


def test_blocks_may_be_recomputed_within_a_micro_batch():
    images, labels = some_images(VIEWS, torch.float64), torch.arange(VIEWS // 2).repeat(2)
    model = network(3)
    recompute_blocks(model.encoder)
    torch.testing.assert_close(gradients(model, images, labels), of_a_step(None), rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("name", ["timm test_convnext", "sphereface_net", "light_cnn", "published googlenet"])
def test_encoders_without_batch_norm_are_separable(name):
    require_separable(backbone(name), 2)
    torch.testing.assert_close(of_a_step(3, name), of_a_step(None, name), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["resnet18", "ir18", "bn_inception", "timm test_efficientnet"])
def test_batch_norm_is_refused_unless_it_is_frozen(name):
    encoder = backbone(name)
    with pytest.raises(ConfigError, match=r"^runtime\.micro_batch_size: found 2, must be null: .* batch norm"):
        require_separable(encoder, 2)
    require_separable(freeze_batch_norm(encoder), 2)


def test_the_activations_of_no_micro_batch_are_kept():
    """What a step keeps of the encoder does not grow with the batch, apart from the views and the features."""

    def kept(size, count):
        encoder, found = backbone("timm test_vit"), {}

        def note(tensor):
            found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        views = some_images(count)
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            features = encoder(views) if size is None else in_micro_batches(encoder, views, size)
        return sum(found.values()) - views.untyped_storage().nbytes(), features

    assert kept(2, 16)[0] <= 0 < kept(None, 16)[0]


def test_the_encoder_takes_no_more_views_at_once():
    calls = []
    model = network(3)
    model.encoder.register_forward_pre_hook(lambda module, args: calls.append(len(args[0])))
    gradients(model, some_images(VIEWS, torch.float64), torch.arange(VIEWS // 2).repeat(2))
    assert calls == [3, 3, 2] + [2, 3, 3]  # and again in the backward pass, from the end
    calls.clear()
    with torch.no_grad():
        model(some_images(VIEWS, torch.float64), some_images(2, torch.float64)[..., :16, :16])
    assert calls == [3, 3, 2, 2]


@pytest.mark.slow
def test_a_compiled_network_is_compiled_for_a_micro_batch():
    torch._dynamo.reset()
    seen = []

    def note(graph, inputs):
        seen.append({tuple(each.shape) for each in inputs if each.dim() == 4})
        return graph.forward

    images, labels = some_images(VIEWS, torch.float64), torch.arange(VIEWS // 2).repeat(2)
    expected = of_a_step(None)
    model = network(4)
    compiled = torch.compile(model, dynamic=False, backend=note)
    found = gradients(compiled, images, labels)
    torch.testing.assert_close(found[:2], expected[:2], rtol=1e-10, atol=1e-13)
    for name, weight in model.named_parameters():
        torch.testing.assert_close(weight.grad, expected[2][name], rtol=1e-9, atol=1e-12)
    shapes = set().union(*seen)
    assert (4, 3, 32, 32) in shapes and (VIEWS, 3, 32, 32) not in shapes


def on_a_worker(size, compiled=False):
    each = VIEWS // 2 // world_size()
    rows = torch.arange(VIEWS // 2)[rank() * each : (rank() + 1) * each]
    images = some_images(VIEWS, torch.float64).view(2, VIEWS // 2, 3, 32, 32)[:, rows].flatten(0, 1)
    model = average_gradients(network(size), torch.device("cpu"))
    compute = torch.compile(model, dynamic=False, backend="aot_eager") if compiled else model
    gradients(compute, images, rows.repeat(2))
    return [weight.grad for weight in model.parameters()]


@pytest.mark.distributed
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_two_workers_average_the_gradients_of_all_micro_batches(compiled, tmp_path):
    """DDP sends a weight's gradient once, after the last micro-batch."""
    without = on_workers(2, tmp_path, on_a_worker, None)
    for found, expected in zip(on_workers(2, tmp_path, on_a_worker, 1, compiled), without, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-13)
