import copy

import pytest
import timm
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ssl_sec.collectives import rank
from ssl_sec.networks.batch_norm import GlobalBatchNorm, _GlobalBatchNormFunction, globalise_batch_norm
from tests.workers import on_workers

CHANNELS = 3
STEPS = 3


def rows(count, shape=(4, 5), seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    spread = torch.rand(count, 1, *[1] * len(shape), generator=generator, dtype=torch.float64) * 5
    return (spread + torch.randn(count, CHANNELS, *shape, generator=generator, dtype=torch.float64)).to(dtype)


def with_random_weights(layer):
    generator = torch.Generator().manual_seed(3)
    if layer.affine:
        with torch.no_grad():
            layer.weight.copy_(torch.rand(CHANNELS, generator=generator) + 0.5)
            layer.bias.copy_(torch.randn(CHANNELS, generator=generator))
    return layer


def steps(layer, batches, weights, frozen=False):
    """Outputs, gradients of the inputs and of the parameters over some steps; then the buffers."""
    layer.train(not frozen)
    taken = []
    for images, weight in zip(batches, weights, strict=True):
        images = images.clone().requires_grad_()
        layer.zero_grad()
        outputs = layer(images)
        (outputs.square() * weight).sum().backward()
        taken.append((outputs.detach(), images.grad, [p.grad.clone() for p in layer.parameters()]))
    return taken, dict(layer.state_dict())


def on_a_worker(cuts, options, shape, dtype, frozen):
    own = slice(*cuts[rank() : rank() + 2])
    batches, weights = data(cuts[-1], shape, dtype)
    layer = with_random_weights(GlobalBatchNorm(CHANNELS, **options).to(torch.float64 if dtype.itemsize == 8 else None))
    return steps(layer, [images[own] for images in batches], [weight[own] for weight in weights], frozen)


def data(count, shape, dtype):
    batches = [rows(count, shape, seed, dtype) for seed in range(STEPS)]
    return batches, [rows(count, shape, 10 + seed, dtype) for seed in range(STEPS)]


def in_one_process(count, options, shape, dtype, frozen=False):
    kind = {0: nn.BatchNorm1d, 2: nn.BatchNorm2d}[len(shape)]
    layer = with_random_weights(kind(CHANNELS, **options).to(torch.float64 if dtype.itemsize == 8 else None))
    return steps(layer, *data(count, shape, dtype), frozen)


def assert_the_same(workers, whole, rtol, atol):
    taken, buffers = whole
    for step in range(STEPS):
        outputs, gradients, parameters = taken[step]
        parts = [worker[0][step] for worker in workers]
        torch.testing.assert_close(torch.cat([part[0] for part in parts]), outputs, rtol=rtol, atol=atol)
        torch.testing.assert_close(torch.cat([part[1] for part in parts]), gradients, rtol=rtol, atol=atol)
        for place, gradient in enumerate(parameters):
            torch.testing.assert_close(sum(part[2][place] for part in parts), gradient, rtol=rtol, atol=atol)
    for _, own_buffers in workers:
        assert list(own_buffers) == list(buffers)
        for name, value in buffers.items():
            torch.testing.assert_close(own_buffers[name], value, rtol=rtol, atol=atol)


@pytest.mark.distributed
@pytest.mark.parametrize(
    "cuts",
    [
        *((0, 4, 8), (0, 1, 8)),
        *(pytest.param(cuts, marks=pytest.mark.slow) for cuts in ((0, 2, 4, 6, 8), (0, 1, 5, 6, 8))),  # four workers
    ],
)
@pytest.mark.parametrize(
    ("options", "shape"),
    [({}, (4, 5)), ({"momentum": None}, ()), ({"affine": False, "eps": 1e-2}, (4, 5)), ({"momentum": 0.5}, (1, 1))],
    ids=["images", "rows, running average", "no weights", "one pixel"],
)
def test_workers_equal_one_whatever_their_numbers_of_rows(tmp_path, cuts, options, shape):
    workers = on_workers(len(cuts) - 1, tmp_path, on_a_worker, cuts, options, shape, torch.float64, False)
    assert_the_same(workers, in_one_process(cuts[-1], options, shape, torch.float64), rtol=1e-10, atol=1e-11)


@pytest.mark.distributed
def test_workers_equal_one_in_evaluation(tmp_path):
    cuts = (0, 3, 8)
    workers = on_workers(2, tmp_path, on_a_worker, cuts, {}, (4, 5), torch.float64, True)
    whole = in_one_process(8, {}, (4, 5), torch.float64, frozen=True)
    assert_the_same(workers, whole, rtol=1e-12, atol=1e-13)
    assert whole[1]["num_batches_tracked"] == 0


@pytest.mark.distributed
def test_bfloat16_inputs_are_normalised_in_single_precision(tmp_path):
    cuts = (0, 3, 8)
    workers = on_workers(2, tmp_path, on_a_worker, cuts, {}, (4, 5), torch.bfloat16, False)
    outputs, gradients, _ = workers[0][0][0]
    assert outputs.dtype == gradients.dtype == torch.bfloat16
    assert workers[0][1]["running_mean"].dtype == torch.float32
    assert_the_same(workers, in_one_process(8, {}, (4, 5), torch.bfloat16), rtol=2e-2, atol=2e-2)
    # The statistics never see bfloat16's 8 bits.
    exact = steps(
        with_random_weights(nn.BatchNorm2d(CHANNELS)),
        *[[part.float() for part in parts] for parts in data(8, (4, 5), torch.bfloat16)],
    )
    torch.testing.assert_close(workers[1][1]["running_var"], exact[1]["running_var"], rtol=1e-5, atol=1e-6)


def far_from_zero():
    images = (1e4 + rows(8)).float()
    layer = GlobalBatchNorm(CHANNELS)
    layer(images[4 * rank() : 4 * rank() + 4])
    return layer.running_var


@pytest.mark.distributed
def test_the_variance_is_exact_for_a_mean_far_from_zero(tmp_path):
    expected = 0.9 + 0.1 * (1e4 + rows(8)).float().double().transpose(0, 1).flatten(1).var(1)
    for variance in on_workers(2, tmp_path, far_from_zero):
        torch.testing.assert_close(variance.double(), expected, rtol=1e-4, atol=0)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize(("kind", "shape"), [(nn.BatchNorm1d, ()), (nn.BatchNorm2d, (4, 5))])
def test_one_worker_is_torchs_batch_norm_exactly(kind, shape, frozen):
    batches, weights = data(8, shape, torch.float64)
    theirs = steps(with_random_weights(kind(CHANNELS).double()), batches, weights, frozen)
    ours = steps(with_random_weights(GlobalBatchNorm(CHANNELS).double()), batches, weights, frozen)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


class Backwards(TorchDispatchMode):
    """The arguments of the kernel that sums in the backward pass."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.native_batch_norm_backward.default:
            self.arguments = args
        return func(*args, **(kwargs or {}))


def test_the_backward_kernel_gets_its_statistics_in_cudas_form_too():
    """Without a gradient of the images CUDA's kernel needs the saved statistics; a CPU's does not read them."""
    images, weight, bias = rows(8).requires_grad_(), torch.ones(CHANNELS).double(), torch.zeros(CHANNELS).double()
    outputs, mean, variance, _ = _GlobalBatchNormFunction.apply(images, weight, bias, 1e-5)
    with Backwards() as kernel:
        outputs.square().sum().backward()
    torch.testing.assert_close(kernel.arguments[5:7], (mean, (variance + 1e-5).rsqrt()))


def network():
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4, eps=1e-3, momentum=0.3))
    return nn.Sequential(inner, nn.Flatten(), nn.BatchNorm1d(16, affine=False))


def test_globalising_keeps_names_parameters_buffers_and_settings():
    before = network()
    before(torch.randn(5, 3, 2, 2))
    inner, parameters, state = before[0], list(before.parameters()), copy.deepcopy(before.state_dict())
    inner[1].eval()
    after = globalise_batch_norm(before)
    assert after is before and after[0] is inner
    assert [type(m) for m in after.modules() if "Norm" in type(m).__name__] == [GlobalBatchNorm] * 2
    assert all(a is b for a, b in zip(after.parameters(), parameters, strict=True))
    assert list(after.state_dict()) == list(state)
    torch.testing.assert_close(dict(after.state_dict()), dict(state), rtol=0, atol=0)
    assert (inner[1].eps, inner[1].momentum, inner[1].affine, after[2].affine) == (1e-3, 0.3, True, False)
    assert not inner[1].training and after[2].training
    assert globalise_batch_norm(after)[2] is after[2]


def test_a_single_batch_norm_is_globalised_itself():
    layer = nn.BatchNorm1d(4)
    assert isinstance(globalise_batch_norm(layer), GlobalBatchNorm)


def test_state_dicts_are_torchs():
    plain, globalised = network(), globalise_batch_norm(network())
    plain(torch.randn(5, 3, 2, 2))
    globalised.load_state_dict(plain.state_dict())
    images = torch.randn(5, 3, 2, 2)
    assert torch.equal(globalised.eval()(images), plain.eval()(images))


def test_too_few_dimensions_are_refused():
    with pytest.raises(ValueError, match="found 1 dimensions"):
        GlobalBatchNorm(4)(torch.ones(4))


def features_of_timm(rows):
    """Gradients of a model whose batch norms hold the activation."""
    torch.manual_seed(0)
    backbone = globalise_batch_norm(timm.create_model("test_efficientnet", num_classes=0)).double().train()
    images = torch.randn(8, 3, 32, 32, dtype=torch.float64)[rows[rank()] if rows else slice(None)]
    features = backbone(images)
    features.square().sum().backward()
    return features.detach(), [parameter.grad for parameter in backbone.parameters()]


@pytest.mark.distributed
def test_workers_equal_one_for_batch_norms_with_an_activation(tmp_path):
    parts = on_workers(2, tmp_path, features_of_timm, (slice(0, 3), slice(3, 8)))
    features, gradients = features_of_timm(())
    torch.testing.assert_close(torch.cat([part[0] for part in parts]), features, rtol=1e-9, atol=1e-10)
    for place, gradient in enumerate(gradients):
        torch.testing.assert_close(sum(part[1][place] for part in parts), gradient, rtol=1e-7, atol=1e-9)
    torch.manual_seed(0)
    plain = timm.create_model("test_efficientnet", num_classes=0).double().train()
    with torch.no_grad():
        torch.testing.assert_close(plain(torch.randn(8, 3, 32, 32, dtype=torch.float64)), features)
