import pytest
import torch
from torch import nn

from ssl_sec.errors import ConfigError
from ssl_sec.losses import SphericalConstraint
from ssl_sec.losses.geometry import norms
from ssl_sec.networks.batch_norm import GlobalBatchNorm, globalise_batch_norm
from ssl_sec.networks.heads import (
    BatchNormLinearHead,
    LinearBatchNormHead,
    LinearClassifier,
    LinearHead,
    MaxoutHead,
    ProjectionHead,
)
from ssl_sec.training.optimisers.groups import parameter_groups


@pytest.mark.parametrize(
    ("num_layers", "shapes"),
    [(2, [(12, 7), (5, 12)]), (3, [(12, 7), (12, 12), (5, 12)])],
)
def test_there_are_as_many_linear_layers_as_asked_for(num_layers, shapes):
    head = ProjectionHead(7, hidden_dim=12, dim=5, num_layers=num_layers)
    linear = [module for module in head.modules() if isinstance(module, nn.Linear)]
    assert [tuple(layer.weight.shape) for layer in linear] == shapes
    assert [layer.bias is not None for layer in linear] == [False] * (num_layers - 1) + [True]
    assert head(torch.randn(4, 7)).shape == (4, 5)


def test_each_hidden_layer_is_normalised_and_rectified():
    torch.manual_seed(0)
    head = ProjectionHead(7, hidden_dim=12, dim=5)
    features = torch.randn(6, 7)
    hidden = features @ head.layers[0].weight.T
    hidden = (hidden - hidden.mean(0)) / (hidden.var(0, correction=0) + 1e-5).sqrt()
    expected = hidden.relu() @ head.layers[-1].weight.T + head.layers[-1].bias
    torch.testing.assert_close(head(features), expected, rtol=1e-4, atol=1e-5)


def test_hidden_layers_without_batch_norm_have_a_bias():
    torch.manual_seed(0)
    head = ProjectionHead(7, hidden_dim=12, dim=5, batch_norm=False)
    features = torch.randn(6, 7)
    hidden = (features @ head.layers[0].weight.T + head.layers[0].bias).relu()
    torch.testing.assert_close(head(features), hidden @ head.layers[-1].weight.T + head.layers[-1].bias)
    assert head.layers[0].bias.abs().max() > 0
    assert not any(isinstance(module, nn.BatchNorm1d) for module in head.modules())


def test_norms_of_embeddings_are_free():
    torch.manual_seed(0)
    head = ProjectionHead(7, hidden_dim=12)
    features = torch.randn(6, 7)
    with torch.no_grad():
        before = norms(head(features))
        head.layers[-1].weight *= 3
        head.layers[-1].bias *= 3
        torch.testing.assert_close(norms(head(features)), 3 * before)
    assert head(features).shape == (6, 128)


def test_a_linear_head_is_one_layer():
    torch.manual_seed(0)
    head = LinearHead(7)
    features = torch.randn(6, 7)
    torch.testing.assert_close(head(features), features @ head.fc.weight.T + head.fc.bias)
    assert head(features).shape == (6, 512)
    assert set(head.state_dict()) == {"fc.weight", "fc.bias"}


def test_batch_norm_can_precede_the_linear_layer():
    torch.manual_seed(0)
    head = BatchNormLinearHead(7, dim=5)
    with torch.no_grad():
        head.bn.weight.uniform_(0.5, 2)
        head.bn.bias.normal_()
    features = 3 + 2 * torch.randn(6, 7)
    normalised = (features - features.mean(0)) / (features.var(0, correction=0) + 1e-5).sqrt()
    expected = (normalised * head.bn.weight + head.bn.bias) @ head.fc.weight.T + head.fc.bias
    torch.testing.assert_close(head(features), expected, rtol=1e-4, atol=1e-5)
    assert isinstance(globalise_batch_norm(head).bn, GlobalBatchNorm)


def test_a_maxout_head_is_the_greater_of_two_linear_layers():
    torch.manual_seed(0)
    head = MaxoutHead(7, dim=5)
    features = torch.randn(6, 7)
    first, second = (features @ weight.T + 0.1 for weight in head.fc.weight.split(5))
    torch.testing.assert_close(head(features), torch.where(first > second, first, second))
    assert (head(features) == first).any() and (head(features) == second).any()
    assert head.fc.bias.tolist() == pytest.approx([0.1] * 10)
    assert head.fc.weight.abs().max() <= (3 / 7) ** 0.5


@pytest.mark.parametrize("kind", [LinearHead, BatchNormLinearHead])
def test_norms_of_a_linear_heads_embeddings_are_free(kind):
    torch.manual_seed(0)
    head = kind(7, 12)
    features = torch.randn(6, 7)
    with torch.no_grad():
        before = norms(head(features))
        head.fc.weight *= 3
        head.fc.bias *= 3
        torch.testing.assert_close(norms(head(features)), 3 * before)


def test_batch_norm_can_follow_the_linear_layer():
    torch.manual_seed(0)
    head = LinearBatchNormHead(7, dim=5)
    with torch.no_grad():
        head.features.bias.normal_()
    features = torch.randn(6, 7)
    linear = features @ head.fc.weight.T + head.fc.bias
    expected = (linear - linear.mean(0)) / (linear.var(0, correction=0) + 1e-5).sqrt() + head.features.bias
    torch.testing.assert_close(head(features), expected, rtol=1e-4, atol=1e-5)
    assert isinstance(globalise_batch_norm(head).features, GlobalBatchNorm)


def test_the_scale_of_batch_norm_after_a_linear_layer_stays_1():
    head = LinearBatchNormHead(7, dim=5)
    head(torch.randn(6, 7)).square().sum().backward()
    trained = {id(parameter) for group in parameter_groups([head], 0.1) for parameter in group["params"]}
    assert trained == {id(parameter) for parameter in (head.fc.weight, head.fc.bias, head.features.bias)}
    assert head.features.weight.tolist() == [1] * 5 and head.features.weight.grad is None


def test_batch_norm_after_a_linear_layer_fixes_the_mean_square_norm_only():
    torch.manual_seed(0)
    head = LinearBatchNormHead(7, dim=5).double()
    with torch.no_grad():
        head.features.bias.normal_()
        head.fc.weight *= 30  # so that the batch norm's ε is small beside the variances
    features = torch.randn(64, 7, dtype=torch.float64)
    embeddings = head(features)
    expected = 5 + head.features.bias.square().sum()
    torch.testing.assert_close(norms(embeddings).square().mean(), expected, rtol=1e-4, atol=0)
    assert norms(embeddings).std() > 0.5


def test_the_spherical_constraint_acts_through_batch_norm_after_a_linear_layer():
    torch.manual_seed(0)
    head, features = LinearBatchNormHead(7, dim=5).double(), torch.randn(64, 7, dtype=torch.float64)
    optimiser = torch.optim.SGD((p for p in head.parameters() if p.requires_grad), lr=0.02)
    before = SphericalConstraint()(head(features)).item()
    for _ in range(20):
        optimiser.zero_grad()
        SphericalConstraint()(head(features)).backward()
        optimiser.step()
    assert SphericalConstraint()(head(features)).item() < 0.9 * before


def test_the_initial_weights_of_a_classifier_are_0_or_simclrs():
    torch.manual_seed(0)
    zeros, normal = LinearClassifier(400, 50), LinearClassifier(400, 50, initial="normal")
    assert not any(parameter.any() for parameter in (*zeros.parameters(), normal.fc.bias))
    assert (normal.fc.weight.mean().item(), normal.fc.weight.std().item()) == pytest.approx((0, 0.01), abs=2e-4)


@pytest.mark.usefixtures("unchecked_types")
def test_unknown_initial_weights_of_a_classifier_are_refused():
    with pytest.raises(ConfigError, match="^initial: found 'zero'; did you mean 'zeros'?"):
        LinearClassifier(4, 2, initial="zero")
