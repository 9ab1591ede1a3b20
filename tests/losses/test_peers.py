"""pytorch-metric-learning as an oracle, where its definitions are ours, and where they differ, how."""

import math

import pytest
import torch

from ssl_sec import losses
from tests.losses.cases import rows

peers = pytest.importorskip("pytorch_metric_learning.losses")
distances, miners, reducers = (
    pytest.importorskip(f"pytorch_metric_learning.{name}") for name in ("distances", "miners", "reducers")
)

LABELS = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 2, 3, 3, 3])
PAIRS = torch.arange(6).repeat(2)

SQUARED = distances.LpDistance(normalize_embeddings=True, power=2)
EUCLIDEAN = distances.LpDistance(normalize_embeddings=True, power=1)
# The peer leaves out zero terms from its means, or weighs by pairs; these count every term.
ALL = reducers.MeanReducer()
SUM = reducers.DoNothingReducer()


def agree(ours, theirs, labels, weight=1.0, dim=16, atol=1e-12):
    """Value and gradient of ours are `weight` times the peer's."""
    first, second = rows(len(labels), dim).requires_grad_(), rows(len(labels), dim).requires_grad_()
    value, oracle = ours(first, labels), weight * theirs(second, labels)
    assert value.item() == pytest.approx(oracle.item(), rel=1e-9)
    assert value.item() > 1e-3
    value.backward()
    oracle.backward()
    torch.testing.assert_close(first.grad, second.grad, rtol=1e-7, atol=atol)


def test_nt_xent():
    agree(losses.NTXentLoss(0.2), peers.NTXentLoss(0.2), PAIRS)


def test_nt_xent_with_several_positives_differs():
    """The peer leaves an anchor's other positives out of the denominator; ours keeps them, as SimCLR's Eq. 1 has it."""
    embeddings = rows(12, 16)
    ours = losses.NTXentLoss(0.2)(embeddings, LABELS).item()
    assert ours > peers.NTXentLoss(0.2)(embeddings, LABELS).item()
    # SupCon's L_out, with the peer's own temperature, keeps them, and is the same mean over positives.
    assert ours == pytest.approx(peers.SupConLoss(0.2)(embeddings, LABELS).item(), rel=1e-12)


@pytest.mark.parametrize("labels", [PAIRS, LABELS])
def test_supcon(labels):
    agree(losses.SupConLoss(0.2), peers.SupConLoss(0.2, reducer=ALL), labels)


def test_supcon_counts_rows_whose_loss_is_0():
    """The peer's default mean leaves them out."""
    embeddings = torch.eye(6, dtype=torch.float64)[PAIRS]
    embeddings[0] += embeddings[1]
    value, alone, default = (
        loss(embeddings, PAIRS).item()
        for loss in (losses.SupConLoss(0.01), peers.SupConLoss(0.01, reducer=ALL), peers.SupConLoss(0.01))
    )
    assert value == pytest.approx(alone, rel=1e-12) and default > 2 * value > 0


def test_supcon_leaves_out_rows_without_a_positive():
    labels = torch.tensor([0, 0, 0, 1, 2, 2, 3, 4, 4, 4, 5, 6])
    agree(losses.SupConLoss(0.2), peers.SupConLoss(0.2, reducer=reducers.AvgNonZeroReducer()), labels)


def test_contrastive():
    """The peer takes the means over positive and over negative pairs apart; ours is one over all pairs."""

    def theirs(embeddings, labels):
        parts = peers.ContrastiveLoss(0, 1.5, distance=SQUARED, reducer=SUM)(embeddings, labels)
        return sum(part["losses"].sum() for part in parts.values()) / (12 * 11)

    agree(losses.ContrastiveLoss(1.5), theirs, LABELS)


@pytest.mark.parametrize("margin", [0.05, 1.0])
def test_triplet(margin):
    agree(
        losses.TripletLoss(margin),
        peers.TripletMarginLoss(margin=margin, distance=SQUARED, reducer=ALL),
        LABELS,
    )


def test_disjoint_triplets():
    """torch's triplet loss on squared distances, and the peer's on the indices of the triplets."""
    labels = torch.tensor([0, 0, 1, 1, 1, 0, 2, 2, 0, 0, 0, 2])

    def torchs(embeddings, labels):
        unit = torch.nn.functional.normalize(embeddings)
        return torch.nn.functional.triplet_margin_with_distance_loss(
            unit[::3], unit[1::3], unit[2::3], distance_function=lambda a, b: (a - b).square().sum(1), margin=0.4
        )

    def theirs(embeddings, labels):
        triplets = tuple(torch.arange(first, 12, 3) for first in range(3))
        return peers.TripletMarginLoss(margin=0.4, distance=SQUARED, reducer=ALL)(embeddings, labels, triplets)

    agree(losses.DisjointTripletLoss(0.4), torchs, labels)
    agree(losses.DisjointTripletLoss(0.4), theirs, labels)


def test_semihard_triplet_with_semihard_negatives_for_all():
    """The peer's batch miner drops pairs without a semihard negative; here every pair has one."""
    angles = torch.tensor([0.0, 0.2, 1.0, 1.2, 2.0, 2.2, 3.0, 3.2], dtype=torch.float64)
    embeddings = torch.stack([angles.cos(), angles.sin()], 1)
    labels = torch.arange(4).repeat_interleave(2)
    loss = peers.TripletMarginLoss(margin=0.9, distance=SQUARED, reducer=ALL)
    squares = SQUARED(embeddings, embeddings)
    triplets = []
    for a in range(8):
        p = a ^ 1
        beyond = [n for n in range(8) if labels[n] != labels[a] and squares[a, n] > squares[a, p]]
        triplets.append((a, p, min(beyond, key=lambda n: squares[a, n].item())))
    mined = tuple(torch.tensor(column) for column in zip(*triplets, strict=True))
    value = losses.SemihardTripletLoss(0.9)(embeddings, labels)
    assert value.item() == pytest.approx(loss(embeddings, labels, mined).item(), rel=1e-12)
    assert value > 0.1


def test_a_negative_as_far_as_the_positive_is_not_semihard():
    """Each row's positive and one negative have d² = 2, the other negative has d² = 4."""
    embeddings = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, -1.0], [-1.0, 0.0]])
    assert losses.SemihardTripletLoss(2.5)(embeddings, torch.tensor([0, 0, 1, 1])) == 0.5


def test_normalised_n_pair():
    """The peer's N-pair loss on unit rows, scaled: with two rows a class the pairs are the same."""

    def theirs(embeddings, labels):
        loss = peers.NPairsLoss(distance=distances.DotProductSimilarity(normalize_embeddings=False))
        return loss(math.sqrt(25.0) * torch.nn.functional.normalize(embeddings), labels)

    agree(losses.NormalizedNPairLoss(25.0), theirs, PAIRS)


def test_n_pair_takes_twice_as_many_anchors_and_negatives():
    """The peer has one anchor a class and one negative of each other class; angular loss's Eq. 10 has all rows."""
    embeddings = rows(12, 4)
    assert losses.NPairLoss()(embeddings, PAIRS).item() > peers.NPairsLoss()(embeddings, PAIRS).item()


def test_multi_similarity_where_no_anchor_loses_a_side():
    """The peer's miner and loss; it lets an anchor that lost one side keep the other, ours lets it go."""
    ours = losses.MultiSimilarityLoss(epsilon=0.5)
    miner = miners.MultiSimilarityMiner(epsilon=0.5)
    theirs = peers.MultiSimilarityLoss(alpha=2.0, beta=40.0, base=0.5)
    embeddings = rows(12, 16)
    a1, _, a2, _ = miner(embeddings, LABELS)
    assert set(a1.tolist()) == set(a2.tolist()) == set(range(12))
    agree(ours, lambda e, labels: theirs(e, labels, miner(e.detach(), labels)), LABELS)


@pytest.mark.parametrize(("scale", "margin"), [(80.0, 0.4), (2.0, 0.25)])
@pytest.mark.parametrize("labels", [LABELS, torch.tensor([0, 0, 0, 1, 2, 2, 3, 4, 4, 4, 5, 6])])
def test_circle(scale, margin, labels):
    """The peer's default mean leaves out rows without a positive, as ours does."""
    agree(losses.CircleLoss(scale, margin), peers.CircleLoss(m=margin, gamma=scale), labels)


def test_lifted_structure():
    """The peer counts each positive pair in both orders too, and divides the square by 2."""
    agree(losses.LiftedStructureLoss(1.0), peers.LiftedStructureLoss(1.0, distance=EUCLIDEAN, reducer=ALL), LABELS)


def test_lifted_structure_leaves_pairs_alone_that_are_near_enough():
    embeddings = torch.tensor([[1.0, 0.0], [1.0, 0.0], [-1.0, 0.0], [-1.0, 0.0]])
    assert losses.LiftedStructureLoss(0.0)(embeddings, torch.tensor([0, 0, 1, 1])) == 0


def test_ranked_list():
    """The peer adds 1e-5 to each weight of a row."""
    ours = losses.RankedListLoss(0.4, 1.2, negative_temperature=4.0, imbalance=0.3)
    theirs = peers.RankedListLoss(0.4, 4.0, imbalance=0.3, alpha=1.2)
    first, second = rows(12, 16).requires_grad_(), rows(12, 16).requires_grad_()
    value, oracle = ours(first, LABELS), theirs(second, LABELS)
    assert value.item() == pytest.approx(oracle.item(), rel=3e-4)
    value.backward()
    oracle.backward()
    torch.testing.assert_close(first.grad, second.grad, rtol=0, atol=1e-3 * first.grad.abs().max().item())


def test_angular():
    """The peer leaves the negatives as they are; given unit rows, and two of a class, it is ours."""

    def theirs(embeddings, labels):
        return peers.AngularLoss(40.0, reducer=ALL)(torch.nn.functional.normalize(embeddings), labels)

    agree(losses.AngularLoss(40.0), theirs, PAIRS)


def class_loss(ours, peer):
    torch.manual_seed(0)
    ours, peer = ours.double(), peer.double()
    ours.weight.data.normal_()
    peer.W.data = ours.weight.detach().T.clone()
    return ours, peer


def agree_and_differentiate(ours, peer):
    """Values and gradients by the rows agree; the templates of both have their gradients afterwards."""
    agree(ours, peer, LABELS, dim=16)
    embeddings = rows(12, 16)
    for loss in (ours, peer):
        loss.zero_grad()
        loss(embeddings, LABELS).backward()


@pytest.mark.parametrize(
    ("ours", "peer"),
    [
        (losses.CosFaceLoss(4, 16, 9.0, 0.35), peers.CosFaceLoss(4, 16, margin=0.35, scale=9.0)),
        (losses.ArcFaceLoss(4, 16, 9.0, 0.45), peers.ArcFaceLoss(4, 16, margin=math.degrees(0.45), scale=9.0)),
        (losses.NormFaceLoss(4, 16, 9.0), peers.CosFaceLoss(4, 16, margin=0.0, scale=9.0)),
    ],
    ids=["cosface", "arcface", "normface"],
)
def test_cosine_softmax(ours, peer):
    ours, peer = class_loss(ours, peer)
    agree_and_differentiate(ours, peer)
    torch.testing.assert_close(ours.weight.grad, peer.W.grad.T, rtol=1e-7, atol=1e-12)


def test_sub_centres():
    ours = losses.ArcFaceLoss(4, 16, 9.0, 0.45, sub_centres=3).double()
    peer = peers.SubCenterArcFaceLoss(
        num_classes=4, embedding_size=16, margin=math.degrees(0.45), scale=9.0, sub_centers=3
    ).double()
    ours.weight.data.normal_(generator=torch.Generator().manual_seed(0))
    peer.W.data = ours.weight.detach().reshape(12, 16).T.clone()
    agree_and_differentiate(ours, peer)
    torch.testing.assert_close(ours.weight.grad, peer.W.grad.T.reshape(4, 48), rtol=1e-7, atol=1e-12)


def test_sphereface():
    """The peer scales the logits by the rows' norms; on unit rows it is ours."""
    ours, peer = class_loss(losses.SphereFaceLoss(4, 16, 9.0, 3), peers.SphereFaceLoss(4, 16, margin=3, scale=9.0))
    unit = torch.nn.functional.normalize(rows(12, 16))
    assert ours(unit, LABELS).item() == pytest.approx(peer(unit, LABELS).item(), rel=1e-9)


def test_proxy_anchor():
    ours, peer = losses.ProxyAnchorLoss(5, 16), peers.ProxyAnchorLoss(5, 16, margin=0.1, alpha=32)
    torch.manual_seed(0)
    ours, peer = ours.double(), peer.double()
    ours.weight.data.normal_()
    peer.proxies.data = ours.weight.detach().clone()
    agree_and_differentiate(ours, peer)
    torch.testing.assert_close(ours.weight.grad, peer.proxies.grad, rtol=1e-7, atol=1e-12)


def test_normalised_softmax_is_normface_with_the_scale_the_other_way_round():
    ours, peer = class_loss(losses.NormFaceLoss(4, 16, 1 / 0.05), peers.NormalizedSoftmaxLoss(4, 16, temperature=0.05))
    agree(ours, peer, LABELS, dim=16)
