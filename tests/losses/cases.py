"""The losses that the tests of the core run over, each with its slow loop."""

from collections.abc import Callable
from dataclasses import dataclass, field, fields

import torch

from ssl_sec import losses
from ssl_sec.losses.geometry import directions
from tests.losses.slow import classes, pairs

NUM_CLASSES = 6
DIM = 5


@dataclass(frozen=True, kw_only=True)
class Case:
    """A loss, its slow loop, and what holds of it.

    Attributes:
        make: builds it, from what it shares with its slow loop.
        values: what both are given.
        normalised: the rows' norms do not matter.
        reads_norms: the rows' norms matter, but no gradient passes through them.
        weighted: pairs are weighted by their similarities, through which no gradient passes.
        by_order: which row of a class is first matters.
        of_triplets: the batch is one of disjoint triplets.
        of_positives: every row needs a positive.
        of_classes: labels are classes 0 … NUM_CLASSES - 1 of the data.
    """

    name: str
    make: Callable[..., losses.Loss]
    terms: Callable[..., list[float]]
    values: dict = field(default_factory=dict)
    normalised: bool = True
    reads_norms: bool = False
    weighted: bool = False
    by_order: bool = False
    of_triplets: bool = False
    of_positives: bool = False
    of_classes: bool = False

    def build(self) -> losses.Loss:
        torch.manual_seed(0)
        if not self.of_classes:
            return self.make(**self.values)
        loss = self.make(NUM_CLASSES, DIM, **self.values).double()
        for tensor in [*loss.parameters(), *loss.buffers()]:
            if tensor.ndim:
                tensor.data.normal_()
        return loss.eval()

    def fix_weights(self, loss: losses.Loss, embeddings: torch.Tensor) -> None:
        """From now on pairs have the weights of these embeddings."""
        if self.weighted:
            weights = loss._weights(directions(embeddings) @ directions(embeddings).T)
            loss._weights = lambda similarities: weights

    def arrange(self, labels: torch.Tensor) -> torch.Tensor:
        """The labels, or, for disjoint triplets, as many as whole triplets have: anchors of the first, then others."""
        if not self.of_triplets:
            return labels
        anchors = labels[: len(labels) // 3]
        return torch.stack([anchors, anchors, (anchors + 1) % (labels.max() + 1)], 1).flatten()

    def slow_terms(self, loss, embeddings, labels) -> list[float]:
        values = dict(self.values)
        if self.of_classes:
            values["centres" if self.name == "center" else "weight"] = next(
                tensor.tolist() for tensor in [*loss.parameters(), *loss.buffers()] if tensor.ndim
            )
        if self.name == "normface" and "scale" not in values:
            values["scale"] = loss.scale.item()
        return self.terms(embeddings.tolist(), labels.tolist(), **values)

    def __str__(self) -> str:
        return self.name


def _pair(name, make, terms, **given):
    """A case; what is given beside its own fields are the values of the loss."""
    own = given.keys() & {each.name for each in fields(Case)}
    values = {key: value for key, value in given.items() if key not in own}
    return Case(name=name, make=make, terms=terms, values=values, **{key: given[key] for key in own})


def _class(name, make, terms, **given):
    return _pair(name, make, terms, of_classes=True, **given)


PAIR_LOSSES = [
    _pair("ntxent", losses.NTXentLoss, pairs.ntxent, of_positives=True, temperature=0.2),
    _pair("supcon", losses.SupConLoss, pairs.supcon, temperature=0.3),
    _pair("dcl", losses.DCLLoss, pairs.dcl, of_positives=True, temperature=0.3),
    _pair("contrastive", losses.ContrastiveLoss, pairs.contrastive, margin=1.5),
    _pair("triplet", losses.TripletLoss, pairs.triplet, margin=0.4),
    _pair("triplet_disjoint", losses.DisjointTripletLoss, pairs.triplet_disjoint, of_triplets=True, margin=0.4),
    _pair("semihard", losses.SemihardTripletLoss, pairs.semihard, margin=0.3),
    _pair("npair_normalized", losses.NormalizedNPairLoss, pairs.npair_normalized, by_order=True, scale=3.0),
    _pair("npair", losses.NPairLoss, pairs.npair, normalised=False, by_order=True),
    _pair(
        "multi_similarity",
        losses.MultiSimilarityLoss,
        pairs.multi_similarity,
        epsilon=0.1,
        threshold=0.4,
        alpha=2.0,
        beta=10.0,
    ),
    _pair("circle", losses.CircleLoss, pairs.circle, weighted=True, scale=4.0, margin=0.3),
    _pair("lifted_structure", losses.LiftedStructureLoss, pairs.lifted_structure, margin=1.0),
    _pair(
        "ranked_list",
        losses.RankedListLoss,
        pairs.ranked_list,
        margin=0.4,
        alpha=1.2,
        negative_temperature=10.0,
        positive_temperature=2.0,
        imbalance=0.3,
    ),
    _pair("angular", losses.AngularLoss, pairs.angular, by_order=True, alpha_degrees=40.0),
    _pair(
        "angular_hinge",
        losses.AngularHingeLoss,
        pairs.angular_hinge,
        normalised=False,
        of_triplets=True,
        alpha_degrees=22.0,
    ),
    _pair(
        "npair_angular",
        losses.NPairAngularLoss,
        pairs.npair_angular,
        normalised=False,
        by_order=True,
        alpha_degrees=40.0,
        weight=2.0,
    ),
]
CLASS_LOSSES = [
    _class("softmax", losses.SoftmaxLoss, classes.softmax, normalised=False),
    _class("softmax_bias", losses.SoftmaxLoss, classes.softmax_bias, normalised=False, bias=True),
    _class("l2softmax", losses.L2SoftmaxLoss, classes.l2softmax, scale=3.0),
    _class("modified_softmax", losses.ModifiedSoftmaxLoss, classes.modified_softmax, normalised=False),
    _class("normface", losses.NormFaceLoss, classes.normface),
    _class("normface_fixed", losses.NormFaceLoss, classes.normface, scale=9.0),
    _class("sphereface", losses.SphereFaceLoss, classes.sphereface, scale=6.0, margin=3),
    _class("cosface", losses.CosFaceLoss, classes.cosface, scale=6.0, margin=0.35),
    _class("cosface_sub_centres", losses.CosFaceLoss, classes.cosface, scale=6.0, margin=0.35, sub_centres=2),
    _class("arcface", losses.ArcFaceLoss, classes.arcface, scale=6.0, margin_radians=0.6),
    _class("arcface_sub_centres", losses.ArcFaceLoss, classes.arcface, scale=6.0, margin_radians=0.6, sub_centres=3),
    _class(
        "magface",
        losses.MagFaceLoss,
        classes.magface,
        normalised=False,
        scale=6.0,
        least_norm=1.5,
        greatest_norm=3.0,
        least_margin_radians=0.3,
        greatest_margin_radians=0.9,
        norm_weight=2.0,
    ),
    _class(
        "adaface",
        losses.AdaFaceLoss,
        classes.adaface,
        normalised=False,
        reads_norms=True,
        scale=6.0,
        margin=0.5,
        concentration=0.7,
    ),
    _class("c_contrastive", losses.CContrastiveLoss, classes.c_contrastive, margin=1.5),
    _class("c_triplet", losses.CTripletLoss, classes.c_triplet, margin=0.8),
    # With this margin some rows have no hinge.
    _class("c_triplet_center", losses.CTripletLoss, classes.c_triplet_center, margin=0.1, add_center=True),
    _class("proxy_anchor", losses.ProxyAnchorLoss, classes.proxy_anchor, scale=4.0, margin=0.2),
    _class("center", losses.CenterLoss, classes.center, normalised=False),
]
ALL_LOSSES = PAIR_LOSSES + CLASS_LOSSES


def rows(count=12, dim=DIM, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, dim, generator=generator, dtype=torch.float64).to(dtype)
