"""Forward and backward pass of each loss, compared with lightly (NT-Xent) and pytorch-metric-learning (the others).

    python -m benchmarks.losses        # under 3 minutes on two CPU cores; uses the GPU where there is one

Both take turns in one process on the same rows, in float32. Some peers average over other terms;
tests/losses/test_peers.py lists the differences. Prints a table and writes benchmarks/results/losses-{cpu,gpu}.json.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from math import sqrt
from statistics import median

import lightly.loss
import torch
from pytorch_metric_learning import distances, miners, reducers
from pytorch_metric_learning import losses as peers
from torch import Tensor, nn

from benchmarks.measure import (
    choose_device,
    describe_environment,
    format_table,
    measure_peak_memory,
    median_ratio,
    print_environment,
    save_results,
    time_in_turns,
)
from ssl_sec import losses

SECONDS_PER_TURN = 0.15
ROUNDS = 7
FACES = 10_575  # the classes of CASIA-WebFace


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One loss and its peer on one batch.

    Attributes:
        name: the loss, as shown in the table.
        batch: the batch, as shown in the table.
        ours: the package's loss.
        peer: the peer's loss, `peer(embeddings, labels)`; None if there is none.
        labels: labels of the rows, one per row.
        dim: the width of the rows.
        shares: number of equal shares of the anchors, of which our loss computes one.
    """

    name: str
    batch: str
    ours: losses.Loss
    peer: Callable[[Tensor, Tensor], Tensor] | None
    labels: Tensor
    dim: int
    shares: int = 1


def main() -> None:
    """Measures every comparison, prints the table and writes the results."""
    warnings.filterwarnings("ignore")
    environment = describe_environment()
    print_environment(environment)
    rows = []
    for comparison in make_comparisons():
        rows.append(measure(comparison, choose_device()))
        print(".", end="", flush=True)
    print("\n\n" + format_table([format_row(row) for row in rows]))
    print(f"\n{save_results('losses', {'environment': environment, 'rows': rows})}")


def make_comparisons() -> list[Comparison]:
    """Makes a comparison for every loss and its peer, at the usual sizes."""
    torch.manual_seed(0)
    return [*_compare_nt_xent(), *_compare_pair_losses(), *_compare_class_losses()]


def _compare_nt_xent() -> list[Comparison]:
    def peer(embeddings: Tensor, labels: Tensor) -> Tensor:
        first, second = embeddings.chunk(2)
        return lightly.loss.NTXentLoss(0.5)(first, second)

    whole = [
        Comparison(
            name="NT-Xent",
            batch=f"2N = {count:,}, D = 128",
            ours=losses.NTXentLoss(0.5),
            peer=peer,
            labels=torch.arange(count // 2).repeat(2),
            dim=128,
        )
        for count in (512, 2048, 16_384)
    ]
    share = Comparison(
        name="NT-Xent, one of 8 workers",
        batch="2N = 16,384, D = 128",
        ours=losses.NTXentLoss(0.5),
        peer=None,
        labels=torch.arange(8192).repeat(2),
        dim=128,
        shares=8,
    )
    return [*whole, share]


def _compare_pair_losses() -> list[Comparison]:
    squared = distances.LpDistance(normalize_embeddings=True, power=2)
    euclidean = distances.LpDistance(normalize_embeddings=True, power=1)
    mean = reducers.MeanReducer()
    products = distances.DotProductSimilarity(normalize_embeddings=False)
    n_pair = peers.NPairsLoss(distance=products)
    triplet = peers.TripletMarginLoss(margin=1.0, distance=squared, reducer=mean)
    near_triplet = peers.TripletMarginLoss(margin=0.2, distance=squared, reducer=mean)
    semihard = miners.TripletMarginMiner(margin=0.2, type_of_triplets="semihard", distance=squared)
    similar = peers.MultiSimilarityLoss(alpha=2, beta=40, base=0.5)
    hard = miners.MultiSimilarityMiner(epsilon=0.1)
    angular = peers.AngularLoss(45, reducer=mean)

    def normalised_n_pair(embeddings: Tensor, labels: Tensor) -> Tensor:
        return n_pair(sqrt(25.0) * nn.functional.normalize(embeddings), labels)

    def n_pair_angular(embeddings: Tensor, labels: Tensor) -> Tensor:
        return n_pair(embeddings, labels) + 2.0 * angular(embeddings, labels)

    def mined_triplet(embeddings: Tensor, labels: Tensor) -> Tensor:
        return near_triplet(embeddings, labels, semihard(embeddings, labels))

    def multi_similarity(embeddings: Tensor, labels: Tensor) -> Tensor:
        return similar(embeddings, labels, hard(embeddings, labels))

    # Classes × images per class as in SEC's experiments: about 120 rows.
    at_120: list[tuple[str, int, int, losses.Loss, Callable[[Tensor, Tensor], Tensor]]] = [
        ("triplet", 40, 3, losses.TripletLoss(), triplet),
        ("semihard triplet", 40, 3, losses.SemihardTripletLoss(), mined_triplet),
        ("normalised N-pair", 60, 2, losses.NormalizedNPairLoss(), normalised_n_pair),
        ("multi-similarity", 24, 5, losses.MultiSimilarityLoss(), multi_similarity),
        ("circle", 24, 5, losses.CircleLoss(), peers.CircleLoss()),
        ("contrastive", 40, 3, losses.ContrastiveLoss(), peers.ContrastiveLoss(0, 1, distance=squared)),
        ("N-pair", 60, 2, losses.NPairLoss(), n_pair),
        ("angular", 60, 2, losses.AngularLoss(), angular),
        ("N-pair & angular", 60, 2, losses.NPairAngularLoss(), n_pair_angular),
        (
            "lifted structure",
            40,
            3,
            losses.LiftedStructureLoss(),
            peers.LiftedStructureLoss(1, distance=euclidean, reducer=mean),
        ),
        ("ranked list", 40, 3, losses.RankedListLoss(), peers.RankedListLoss(0.4, 10.0, alpha=1.2)),
        ("NT-Xent, 2 views", 60, 2, losses.NTXentLoss(0.5), peers.NTXentLoss(0.5)),
    ]
    at_512 = [
        (name, 128, 4, ours, peer)
        for name, _, _, ours, peer in at_120
        if name in {"triplet", "semihard triplet", "multi-similarity", "contrastive", "ranked list"}
    ]
    return [
        Comparison(
            name=name,
            batch=f"{num_classes} × {per_class}, D = 512",
            ours=ours,
            peer=peer,
            labels=torch.arange(num_classes).repeat_interleave(per_class),
            dim=512,
        )
        for name, num_classes, per_class, ours, peer in [*at_120, *at_512]
    ]


def _compare_class_losses() -> list[Comparison]:
    pairs: list[tuple[str, losses.Loss, nn.Module]] = [
        ("NormFace", losses.NormFaceLoss(FACES, 512, 20.0), peers.NormalizedSoftmaxLoss(FACES, 512, 1 / 20.0)),
        ("CosFace", losses.CosFaceLoss(FACES, 512), peers.CosFaceLoss(FACES, 512)),
        ("ArcFace", losses.ArcFaceLoss(FACES, 512), peers.ArcFaceLoss(FACES, 512, margin=25.8)),
        ("Proxy-Anchor", losses.ProxyAnchorLoss(FACES, 512), peers.ProxyAnchorLoss(FACES, 512)),
        ("SphereFace", losses.SphereFaceLoss(FACES, 512), peers.SphereFaceLoss(FACES, 512, margin=3, scale=64)),
    ]
    return [
        Comparison(
            name=name,
            batch=f"256 of {FACES:,} classes, D = 512",
            ours=ours,
            peer=peer,
            labels=torch.randint(0, FACES, (256,)),
            dim=512,
        )
        for name, ours, peer in pairs
    ]


def measure(comparison: Comparison, device: torch.device) -> dict[str, str | float | None]:
    """Measures one comparison."""
    generator = torch.Generator().manual_seed(0)
    # Norms near 1, so that raw inner products are as large as in training.
    embeddings = torch.randn(len(comparison.labels), comparison.dim, generator=generator) / sqrt(comparison.dim)
    embeddings = embeddings.to(device).requires_grad_()
    labels = comparison.labels.to(device)
    share = slice(0, len(labels) // comparison.shares)

    def step(loss: Callable[..., Tensor], **options: slice) -> None:
        embeddings.grad = None
        if isinstance(loss, nn.Module):
            loss.zero_grad(set_to_none=True)
        loss(embeddings, labels, **options).backward()

    ours = comparison.ours.to(device)
    turns: dict[str, Callable[[], object]] = {"ours": lambda: step(ours, anchors=share)}
    if (peer := comparison.peer) is not None:
        peer = peer.to(device) if isinstance(peer, nn.Module) else peer
        turns["peer"] = lambda: step(peer)
    seconds = time_in_turns(turns, rounds=1)
    longest = max(each for (each,) in seconds.values())
    if longest < 1:
        seconds = time_in_turns(turns, ROUNDS, calls=max(1, round(SECONDS_PER_TURN / longest)))
    else:
        second = time_in_turns(turns, rounds=1, warm_up=False)
        seconds = {name: [*first, *second[name]] for name, first in seconds.items()}
    has_peer = comparison.peer is not None
    return {
        "loss": comparison.name,
        "batch": comparison.batch,
        "ours_ms": 1e3 * median(seconds["ours"]),
        "peer_ms": 1e3 * median(seconds["peer"]) if has_peer else None,
        "times_as_fast": median_ratio(seconds["peer"], seconds["ours"]) if has_peer else None,
        "ours_peak_mib": measure_peak_memory(turns["ours"]) / 2**20,
        "peer_peak_mib": measure_peak_memory(turns["peer"]) / 2**20 if has_peer else None,
    }


def format_row(row: dict[str, str | float | None]) -> dict[str, str]:
    """Formats a row of the table."""

    def format_number(key: str, form: str) -> str:
        value = row[key]
        return format(value, form) if isinstance(value, float) else "-"

    ours, peer = row["ours_peak_mib"], row["peer_peak_mib"]
    smaller = f"{peer / ours:.1f}" if isinstance(ours, float) and isinstance(peer, float) else "-"
    return {
        "loss": str(row["loss"]),
        "batch": str(row["batch"]),
        "ours, ms": format_number("ours_ms", ",.2f"),
        "peer, ms": format_number("peer_ms", ",.2f"),
        "times as fast": format_number("times_as_fast", ".1f"),
        "ours, MiB": format_number("ours_peak_mib", ",.1f"),
        "peer, MiB": format_number("peer_peak_mib", ",.1f"),
        "times as small": smaller,
    }


if __name__ == "__main__":
    main()
