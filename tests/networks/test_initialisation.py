import pytest
import torch
from torch import nn

from ssl_sec.errors import ConfigError
from ssl_sec.networks import resnet
from ssl_sec.networks.encoder import Encoder, Network
from ssl_sec.networks.heads import ProjectionHead
from ssl_sec.networks.initialisation import cut_


def network():
    torch.manual_seed(0)
    backbone, num_features = resnet(18, "cifar", 0.0625)
    return Network(Encoder(backbone, num_features), ProjectionHead(num_features, dim=8)).double()


def test_a_cut_divides_the_weights_of_convolutions_and_linear_layers_alone():
    plain, cut = network(), network()
    cut_(cut, 3.0)
    divided = 0
    for before, after in zip(plain.modules(), cut.modules(), strict=True):
        is_cut = isinstance(before, nn.Conv2d | nn.Linear)
        for one, other in zip(before.parameters(recurse=False), after.parameters(recurse=False), strict=True):
            torch.testing.assert_close(other, one / 3 if is_cut else one, rtol=1e-15, atol=0)
            divided += is_cut
    assert divided == 20 + 3  # the last linear layer has a bias


def test_a_cut_divides_the_norms_of_the_embeddings():
    """Batch norm undoes the cuts of the layers before it: what is left is that of the last layer."""
    plain, cut = network(), network()
    cut_(cut, 3.0)
    images = torch.rand(8, 3, 16, 16, dtype=torch.float64)
    lengths = [each(images).embeddings.norm(dim=1).mean().item() for each in (plain, cut)]
    assert lengths[1] == pytest.approx(lengths[0] / 3, rel=0.02)


def test_layers_of_every_kind_are_cut_once():
    first, tied = nn.Linear(4, 4), nn.Linear(4, 4)
    tied.weight = first.weight
    attention, separate = nn.MultiheadAttention(4, 2), nn.MultiheadAttention(4, 2, kdim=3, vdim=5)
    convolutions = (nn.Conv1d(2, 4, 1), nn.Conv3d(2, 4, 1), nn.ConvTranspose2d(2, 4, 2))
    layers = nn.ModuleList([first, tied, attention, separate, *convolutions])
    plain = [weight.detach().clone() for weight in layers.parameters()]
    cut_(layers, 4.0)
    for before, after in zip(plain, layers.parameters(), strict=True):
        assert torch.equal(after, before / 4)


@pytest.mark.parametrize("cut", [0.0, -1.0])
def test_a_cut_outside_its_range_is_refused(cut):
    with pytest.raises(ConfigError, match=f"^cut: found {cut}, must be > 0"):
        cut_(nn.Linear(1, 1), cut)
