import copy
from collections import Counter

import pytest
import torch
from torch import nn

from ssl_sec.collectives import average_gradients, rank, world_size
from ssl_sec.errors import ConfigError
from ssl_sec.networks import (
    bn_inception,
    freeze_batch_norm,
    googlenet,
    ir,
    light_cnn,
    published_googlenet,
    resnet,
    sphereface_net,
    timm_backbone,
)
from ssl_sec.networks.batch_norm import globalise_batch_norm
from ssl_sec.networks.recomputation import recompute_blocks
from tests.workers import on_workers

SIZE_PX = 32
BACKBONES = {
    "resnet18": lambda: resnet(18, "cifar", 0.125),
    "resnet50": lambda: resnet(50, "imagenet", 0.125),
    "ir18": lambda: ir("ir18", 0.0625, 3, SIZE_PX),
    "se_ir50": lambda: ir("se_ir50", 0.0625, 3, SIZE_PX),
    "bn_inception": lambda: bn_inception(3, SIZE_PX),
    "googlenet": lambda: googlenet(3, SIZE_PX),
    "published googlenet": lambda: published_googlenet(3, SIZE_PX),
    "sphereface_net": lambda: sphereface_net((1, 1, 1, 1), 0.0625, 3, SIZE_PX),
    "light_cnn": lambda: light_cnn(0.125, 3, SIZE_PX),
    **{
        f"timm {model}": lambda model=model: timm_backbone(model, False, 3, SIZE_PX)
        for model in ("test_vit", "test_resnet", "test_efficientnet", "test_convnext", "regnetx_002")
    },
}


def backbone(name, dtype=torch.float32):
    torch.manual_seed(0)
    return BACKBONES[name]()[0].to(dtype)


def with_recomputation(network):
    again = copy.deepcopy(network)
    recompute_blocks(again)
    return again


def some_images(count=4, dtype=torch.float32):
    return torch.rand(count, 3, SIZE_PX, SIZE_PX, generator=torch.Generator().manual_seed(1), dtype=dtype)


def steps(network, images, count=2, compute=None, **autocast):
    """The last step's features, gradients, buffers, and bytes of the activations that it kept."""
    compute, kept = network if compute is None else compute, {}

    def note(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    torch.manual_seed(2)
    network.train()
    for _ in range(count):
        network.zero_grad()
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bool(autocast)):
                features = compute(images)
        features.float().square().mean().backward()
    gradients = {name: weight.grad for name, weight in network.named_parameters() if weight.grad is not None}
    return (features.detach(), gradients, dict(network.state_dict())), sum(kept.values())


def assert_bit_equal(one, other):
    torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize("name", BACKBONES)
def test_features_gradients_and_statistics_are_those_without(name):
    plain, images = backbone(name), some_images()
    expected, kept = steps(plain, images)
    found, kept_less = steps(with_recomputation(backbone(name)), images)
    assert_bit_equal(found, expected)
    assert list(found[2]) == list(expected[2])
    assert kept_less < 0.7 * kept
    for key, value in found[2].items():
        if key.endswith("num_batches_tracked"):
            assert value == 2


def test_only_the_input_of_each_block_is_kept():
    plain, images = backbone("resnet18"), some_images()
    weights = sum(weight.numel() * 4 for weight in plain.parameters())
    _, kept = steps(with_recomputation(plain), images)
    # Maps of 8 x 32 x 32 of each image: three in the stem, and the inputs of the eight blocks add up to another 3.5.
    assert kept < weights + 4 * 8 * 32 * 32 * 4 * 7.5


@pytest.mark.parametrize("name", ["resnet18", "timm test_vit"])
def test_bfloat16_results_are_those_without(name):
    images = some_images()
    expected, _ = steps(backbone(name), images, bfloat16=True)
    found, _ = steps(with_recomputation(backbone(name)), images, bfloat16=True)
    assert expected[0].dtype == torch.bfloat16 or name != "resnet18"
    assert_bit_equal(found, expected)


def test_dropout_draws_the_same_entries():
    network, images = backbone("timm test_vit"), some_images()
    without, _ = steps(network, images)
    for block in network.blocks:
        block.mlp.drop1.p = block.mlp.drop2.p = 0.5
    expected, _ = steps(network, images)
    found, _ = steps(with_recomputation(network), images)
    assert_bit_equal(found, expected)
    assert not torch.equal(without[0], expected[0])


def test_frozen_batch_norms_stay_frozen():
    plain = freeze_batch_norm(backbone("resnet18"))
    before = {name: value.clone() for name, value in plain.named_buffers()}
    expected, _ = steps(plain, some_images())
    found, _ = steps(with_recomputation(plain), some_images())
    assert_bit_equal(found, expected)
    assert_bit_equal(dict(plain.named_buffers()), before)


def test_evaluation_computes_once():
    calls = Counter()
    network = with_recomputation(backbone("resnet18"))
    network.layer1[0].conv1.register_forward_hook(lambda *_: calls.update(["forward"]))
    network.eval()(some_images()).sum().backward()
    assert calls["forward"] == 1
    network.train()(some_images()).sum().backward()
    assert calls["forward"] == 3


def test_an_encoder_without_blocks_is_refused():
    with pytest.raises(ConfigError, match="^runtime.recompute: found true, .* no blocks$"):
        recompute_blocks(nn.Flatten())


# Its partitioner decides what is recomputed, as that of the usual backend does.
@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet18", "timm test_vit"])
def test_a_compiled_network_computes_the_same(name):
    images, found, kept = some_images(), [], []
    for network in (backbone(name), with_recomputation(backbone(name))):
        torch._dynamo.reset()
        compiled = torch.compile(network, dynamic=False, backend="aot_eager_decomp_partition")
        results, num_bytes = steps(network, images, compute=compiled)
        found.append(results)
        kept.append(num_bytes)
    assert_bit_equal(*found)
    assert kept[1] < 0.8 * kept[0]


def on_a_worker(name, recomputed, compiled):
    network = globalise_batch_norm(backbone(name, torch.float64))
    if recomputed:
        recompute_blocks(network)
    each = 8 // world_size()
    images = some_images(8, torch.float64)[rank() * each : (rank() + 1) * each]
    model = average_gradients(network, torch.device("cpu"))
    if compiled:
        model = torch.compile(model, dynamic=False, backend="aot_eager_decomp_partition")
    return steps(network, images, compute=model)[0]


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("name", "compiled"),
    [
        ("resnet18", False),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("ir18", False), ("resnet18", True))),
    ],
)
def test_two_workers_equal_one(name, compiled, tmp_path):
    (_, alone, buffers), _ = steps(backbone(name, torch.float64), some_images(8, torch.float64))
    without = on_workers(2, tmp_path, on_a_worker, name, False, compiled)
    recomputed = on_workers(2, tmp_path, on_a_worker, name, True, compiled)
    for (_, gradients, state), plain in zip(recomputed, without, strict=True):
        torch.testing.assert_close(gradients, alone, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(state, buffers, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(gradients, plain[1], rtol=0 if not compiled else 1e-9, atol=1e-13)
