"""The arguments of every loss: their names, defaults and ranges."""

import inspect
import math

import pytest

from ssl_sec import losses
from ssl_sec.losses.generators.hdml import HardnessAwareSynthesis

# Names and defaults of the papers, which experiments rely on.
DEFAULTS = {
    losses.NTXentLoss: {"temperature": 0.5},
    losses.SupConLoss: {"temperature": 0.1},
    losses.DCLLoss: {"temperature": 0.1},
    losses.BYOLLoss: {},
    losses.MoCoV3Loss: {"temperature": 0.2},
    losses.ContrastiveLoss: {"margin": 1.0},
    losses.TripletLoss: {"margin": 1.0},
    losses.SemihardTripletLoss: {"margin": 0.2},
    losses.NormalizedNPairLoss: {"scale": 25.0},
    losses.NPairLoss: {},
    losses.MultiSimilarityLoss: {"epsilon": 0.1, "threshold": 0.5, "alpha": 2.0, "beta": 40.0},
    losses.CircleLoss: {"scale": 80.0, "margin": 0.4},
    losses.LiftedStructureLoss: {"margin": 1.0},
    losses.RankedListLoss: {
        "margin": 0.4,
        "alpha": 1.2,
        "negative_temperature": 10.0,
        "positive_temperature": 0.0,
        "imbalance": 0.5,
    },
    losses.DisjointTripletLoss: {"margin": 1.0},
    losses.AngularLoss: {"alpha_degrees": 45.0},
    losses.AngularHingeLoss: {"alpha_degrees": 45.0},
    losses.NPairAngularLoss: {"alpha_degrees": 45.0, "weight": 2.0},
    losses.SoftmaxLoss: {"bias": False},
    losses.NormFaceLoss: {"scale": None, "reachable_loss": 0.001},
    losses.SphereFaceLoss: {"scale": 64.0, "margin": 3},
    losses.CosFaceLoss: {"scale": 64.0, "margin": 0.35, "sub_centres": 1},
    losses.ArcFaceLoss: {"scale": 64.0, "margin_radians": 0.45, "sub_centres": 1},
    losses.MagFaceLoss: {
        "scale": 64.0,
        "least_norm": 10.0,
        "greatest_norm": 110.0,
        "least_margin_radians": 0.45,
        "greatest_margin_radians": 0.8,
        "norm_weight": 35.0,
    },
    losses.AdaFaceLoss: {"scale": 64.0, "margin": 0.4, "concentration": 0.333, "rho": 0.01},
    losses.CContrastiveLoss: {"margin": 1.0},
    losses.CTripletLoss: {"margin": 0.8, "add_center": False},
    losses.ProxyAnchorLoss: {"scale": 32.0, "margin": 0.1},
    losses.SphericalConstraint: {"rho": 1.0, "radius": None},
    losses.SphericalFeatureTransform: {
        "mode": "rotate",
        "tail_classes": None,
        "weight": 0.2,
        "energy": 0.95,
        "seed": 0,
        "centres": "mean",
    },
    HardnessAwareSynthesis: {
        "alpha": 90.0,
        "beta": 1e4,
        "reconstruction_weight": 0.5,
        "softmax_weight": 5000.0,
        "hidden_dim": 512,
        "generator_learning_rate": 1e-2,
        "classifier_learning_rate": 1e-3,
        "seed": 0,
    },
}


@pytest.mark.parametrize("loss", DEFAULTS, ids=lambda loss: loss.__name__)
def test_the_defaults_are_the_papers(loss):
    parameters = inspect.signature(loss).parameters.values()
    defaults = {p.name: p.default for p in parameters if p.default is not inspect.Parameter.empty}
    assert defaults == DEFAULTS[loss]


@pytest.mark.usefixtures("unchecked_types")
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: losses.NTXentLoss(0.0), "temperature: found 0.0, must be > 0"),
        (lambda: losses.NTXentLoss(math.nan), "temperature: found nan, must be > 0"),
        (lambda: losses.MoCoV3Loss(0.0), "temperature: found 0.0, must be > 0"),
        (lambda: losses.NTXentLoss("0.5"), "temperature: found '0.5', must be a number"),
        (lambda: losses.SphericalConstraint(None), "rho: found null, must be a number"),
        (
            lambda: losses.CombinedLoss(losses.TripletLoss, losses.NTXentLoss(), 1.0),
            f"first: found {losses.TripletLoss}, must be a Loss of ssl_sec",
        ),
        (lambda: losses.ContrastiveLoss(-0.1), "margin: found -0.1, must be ≥ 0"),
        (lambda: losses.TripletLoss(-0.1), "margin: found -0.1, must be ≥ 0"),
        (lambda: losses.SemihardTripletLoss(-0.1), "margin: found -0.1, must be ≥ 0"),
        (lambda: losses.NormalizedNPairLoss(0.0), "scale: found 0.0, must be > 0"),
        (lambda: losses.MultiSimilarityLoss(epsilon=-0.1), "epsilon: found -0.1, must be ≥ 0"),
        (lambda: losses.MultiSimilarityLoss(threshold=1.5), "threshold: found 1.5, must be in [-1, 1]"),
        (lambda: losses.MultiSimilarityLoss(alpha=0.0), "alpha: found 0.0, must be > 0"),
        (lambda: losses.MultiSimilarityLoss(beta=0.0), "beta: found 0.0, must be > 0"),
        (lambda: losses.CircleLoss(scale=0.0), "scale: found 0.0, must be > 0"),
        (lambda: losses.CircleLoss(margin=1.5), "margin: found 1.5, must be in [0, 1]"),
        (lambda: losses.LiftedStructureLoss(-0.1), "margin: found -0.1, must be ≥ 0"),
        (lambda: losses.RankedListLoss(alpha=0.0), "alpha: found 0.0, must be > 0"),
        (lambda: losses.RankedListLoss(margin=1.5), "margin: found 1.5, must be in [0, 1.2]"),
        (lambda: losses.RankedListLoss(negative_temperature=-1.0), "negative_temperature: found -1.0, must be ≥ 0"),
        (lambda: losses.RankedListLoss(positive_temperature=-1.0), "positive_temperature: found -1.0, must be ≥ 0"),
        (lambda: losses.RankedListLoss(imbalance=1.1), "imbalance: found 1.1, must be in [0, 1]"),
        (lambda: losses.AngularLoss(90.0), "alpha_degrees: found 90.0, must be in (0, 90)"),
        (lambda: losses.AngularLoss(0.0), "alpha_degrees: found 0.0, must be in (0, 90)"),
        (lambda: losses.DisjointTripletLoss(-0.1), "margin: found -0.1, must be ≥ 0"),
        (lambda: losses.AngularHingeLoss(90.0), "alpha_degrees: found 90.0, must be in (0, 90)"),
        (lambda: losses.NPairAngularLoss(weight=-1.0), "weight: found -1.0, must be ≥ 0"),
        (lambda: losses.SoftmaxLoss(1, 5), "num_classes: found 1, must be ≥ 2"),
        (lambda: losses.SoftmaxLoss(5, 0), "dim: found 0, must be ≥ 1"),
        (lambda: losses.L2SoftmaxLoss(5, 5, scale=0.0), "scale: found 0.0, must be > 0"),
        (lambda: losses.NormFaceLoss(5, 5, scale=-1.0), "scale: found -1.0, must be > 0, or None to learn it"),
        (lambda: losses.NormFaceLoss(5, 5, reachable_loss=2.0), "reachable_loss: found 2.0, must be in (0, 1.609)"),
        (lambda: losses.SphereFaceLoss(5, 5, margin=0), "margin: found 0, must be in [1, 64]"),
        (lambda: losses.CosFaceLoss(5, 5, scale=0.0), "scale: found 0.0, must be > 0"),
        (lambda: losses.CosFaceLoss(5, 5, margin=-0.1), "margin: found -0.1, must be ≥ 0"),
        (lambda: losses.ArcFaceLoss(5, 5, margin_radians=4.0), "margin_radians: found 4.0, must be in [0, π)"),
        (lambda: losses.ArcFaceLoss(5, 5, sub_centres=0), "sub_centres: found 0, must be in [1, 64]"),
        (lambda: losses.MagFaceLoss(5, 5, least_norm=0.0), "least_norm: found 0.0, must be > 0"),
        (lambda: losses.MagFaceLoss(5, 5, greatest_norm=9.0), "greatest_norm: found 9.0, must be > 10, the least norm"),
        (
            lambda: losses.MagFaceLoss(5, 5, least_margin_radians=-0.1),
            "least_margin_radians: found -0.1, must be in [0, π)",
        ),
        (
            lambda: losses.MagFaceLoss(5, 5, greatest_margin_radians=0.4),
            "greatest_margin_radians: found 0.4, must be in [0.45, π), the least margin or more",
        ),
        (lambda: losses.MagFaceLoss(5, 5, norm_weight=-1.0), "norm_weight: found -1.0, must be ≥ 0"),
        (lambda: losses.AdaFaceLoss(5, 5, margin=2.0), "margin: found 2.0, must be in [0, π/2]"),
        (lambda: losses.AdaFaceLoss(5, 5, concentration=0.0), "concentration: found 0.0, must be > 0"),
        (lambda: losses.AdaFaceLoss(5, 5, rho=0.0), "rho: found 0.0, must be in (0, 1]"),
        (lambda: losses.CContrastiveLoss(5, 5, margin=-0.1), "margin: found -0.1, must be ≥ 0"),
        (lambda: losses.CTripletLoss(5, 5, margin=-0.1), "margin: found -0.1, must be ≥ 0"),
        (lambda: losses.ProxyAnchorLoss(5, 5, scale=0.0), "scale: found 0.0, must be > 0"),
        (lambda: losses.ProxyAnchorLoss(5, 5, margin=-0.1), "margin: found -0.1, must be ≥ 0"),
        (lambda: losses.ProxyAnchorLoss(0, 5), "num_classes: found 0, must be ≥ 2"),
    ],
)
def test_a_value_outside_its_range_is_refused(make, message):
    with pytest.raises(ValueError) as caught:
        make()
    assert str(caught.value) == message


def test_the_repr_shows_the_settings_of_a_loss():
    assert repr(losses.NTXentLoss()) == "NTXentLoss(temperature=0.5)"
    shown = "MultiSimilarityLoss(epsilon=0.1, threshold=0.5, alpha=2.0, beta=40.0)"
    assert repr(losses.MultiSimilarityLoss()) == shown
    assert repr(losses.NormFaceLoss(10, 5)) == "NormFaceLoss(num_classes=10, dim=5, scale=learned)"
    assert repr(losses.NormFaceLoss(10, 5, scale=30.0)) == "NormFaceLoss(num_classes=10, dim=5, scale=30.0)"
    shown = "ArcFaceLoss(num_classes=10, dim=5, scale=64.0, margin_radians=0.45, sub_centres=1)"
    assert repr(losses.ArcFaceLoss(10, 5)) == shown
