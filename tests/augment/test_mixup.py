import pytest
import torch

from ssl_sec.augment.config import CropConfig
from ssl_sec.augment.mixup import Mixup, partners
from ssl_sec.data.standard_sets import open_digits


def test_mixed_views_are_those_of_the_images_and_their_partners():
    images = open_digits("train").read(torch.arange(8)).images
    views = CropConfig(min_scale=0.4).on_device(8, seed=0)
    plain, mixed = views(images, 5, slice(0, 8), 8), Mixup(views, 0.4, seed=0)(images, 5, slice(0, 8), 8)
    share = Mixup(views, 0.4, seed=0).share(5)
    for row in range(8):
        torch.testing.assert_close(mixed[row], share * plain[row] + (1 - share) * plain[row ^ 1])
    assert partners(torch.arange(6)).tolist() == [1, 0, 3, 2, 5, 4]
    halves = [Mixup(views, 0.4, seed=0)(images[half], 5, half, 8) for half in (slice(0, 4), slice(4, 8))]
    assert torch.equal(torch.cat(halves), mixed)


def test_shares_are_drawn_by_seed_and_step_from_a_beta_distribution():
    mixup = Mixup(lambda *_: torch.zeros(()), 0.2, seed=0)
    shares = torch.tensor([mixup.share(step) for step in range(2000)])
    assert mixup.share(7) == mixup.share(7) != Mixup(mixup.views, 0.2, seed=1).share(7)
    assert float(shares.mean()) == pytest.approx(0.5, abs=0.03)
    # Var of Beta(α, α): 1 / (4 (2 α + 1)).
    assert float(shares.var()) == pytest.approx(1 / (4 * 1.4), abs=0.01)
