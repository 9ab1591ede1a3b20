import pytest
import torch
from torch import nn

from ssl_sec.evaluation.feature_maps import strongest_feature_maps
from ssl_sec.evaluation.features import extract_features
from ssl_sec.losses import TripletLoss
from ssl_sec.losses.generators.hdml import HardnessAwareSynthesis
from ssl_sec.modes import evaluating
from ssl_sec.networks.encoder import why_not_taken
from tests.data.files import noisy_set
from tests.losses.generators.batches import CLASSES, DIM, FEATURES, LABELS, batch


class Partly(nn.Sequential):
    """A network in training with a frozen batch norm, which fails if it is asked to."""

    def __init__(self, *layers):
        super().__init__(*layers, nn.BatchNorm1d(4), nn.BatchNorm1d(4))
        self.fails = False
        self.train()[-1].eval()

    def forward(self, images):
        assert not any(module.training for module in self.modules())
        if self.fails:
            raise RuntimeError("no features")
        return super().forward(images)

    def assert_modes(self):
        assert self.training and self[-2].training and not self[-1].training


@pytest.mark.parametrize("fails", [False, True])
def test_every_module_has_its_own_mode_again(fails):
    network = Partly()
    network.fails = fails
    for mode in (True, False):
        network.training = mode
        try:
            with evaluating(network):
                network(torch.zeros(2, 4))
        except RuntimeError:
            assert fails
        assert network.training == mode and network[0].training and not network[1].training


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("call", ["extract_features", "strongest_feature_maps", "why_not_taken"])
def test_an_encoder_in_training_keeps_its_frozen_layers(call, fails):
    noise = noisy_set(5, bad=())
    height, width = noise.image_shape[1:]
    encoder = Partly(nn.Flatten(), nn.Linear(noise.image_shape[0] * height * width, 4))
    encoder.fails = fails
    try:
        if call == "extract_features":
            extract_features(encoder, noise)
        elif call == "strongest_feature_maps":
            strongest_feature_maps(encoder, noise.read(torch.arange(5)).images, 2)
        else:
            assert why_not_taken(encoder, noise.image_shape[0], height) == ("no features" if fails else None)
    except RuntimeError:
        assert fails
    encoder.assert_modes()


def test_a_head_that_embeds_generated_rows_keeps_its_frozen_layers():
    torch.manual_seed(0)
    head = nn.Sequential(Partly(nn.Linear(FEATURES, 4)), nn.Linear(4, DIM)).double()
    generator = HardnessAwareSynthesis(CLASSES, FEATURES, DIM, steps_per_epoch=2, hidden_dim=6).double()
    generator(batch(), slice(0, len(LABELS)), head, TripletLoss())
    assert head.training
    head[0].assert_modes()
