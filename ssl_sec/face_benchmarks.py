"""Benchmarks of face recognition: which images each needs, and what it tells of their embeddings."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from ssl_sec.data.image_set import ImageSet
from ssl_sec.data.verification_sets import VerificationPairs
from ssl_sec.evaluation.arrays import rounded, unit_rows
from ssl_sec.evaluation.roc import equal_error_rate, tar_at_far
from ssl_sec.evaluation.verification import kfold_accuracy
from ssl_sec.losses.geometry import norms

# The embeddings of some images of a set, on the CPU; every worker asks for the same.
Embed = Callable[[ImageSet, Int64[Tensor, " images"]], Float[Tensor, "images dim"]]


@dataclass(frozen=True, kw_only=True)
class Protocols:
    """How benchmarks are measured.

    Attributes:
        pca: to how many components embeddings of pairs are reduced; None for all.
        fars: the false accept rates at which true ones are told.
    """

    pca: int | None = None
    fars: tuple[float, ...] = (1e-3,)


@runtime_checkable
class Benchmark(Protocol):
    """A benchmark whose files were read."""

    @property
    def people(self) -> frozenset[str]:
        """Names of those in it, as training sets name their classes; empty if they are unknown."""
        ...

    def measure(self, embed: Embed, protocols: Protocols, keep: Path | None) -> dict[str, float]:
        """What the papers report, in percent, by the last words of the metrics' names.

        Args:
            embed: embeddings of the images; every worker asks for the same.
            protocols: how it is measured.
            keep: a file for what pictures are drawn from; None on all workers but one.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class PairsBenchmark:
    """Verification of pairs.

    Attributes:
        pairs: with their images.
    """

    pairs: VerificationPairs

    @property
    def people(self) -> frozenset[str]:
        """Names of those in it; empty if they are unknown."""
        return self.pairs.people

    def measure(self, embed: Embed, protocols: Protocols, keep: Path | None) -> dict[str, float]:
        """Accuracy over the folds, equal error rate, TAR at FAR, and the norms of the embeddings."""
        pairs = self.pairs
        embeddings = embed(pairs.images, torch.arange(len(pairs.images)))
        first, second = embeddings[pairs.first], embeddings[pairs.second]
        accuracy = kfold_accuracy(first, second, pairs.same, pairs.folds, protocols.pca)
        scores = cosines(first, second)
        if keep is not None:
            _keep_pairs(keep, pairs, scores, embeddings)
        return {
            "accuracy": 100 * accuracy.mean,
            "accuracy_std": 100 * accuracy.std,
            "eer": 100 * equal_error_rate(scores, pairs.same),
            **accept_rates(tar_at_far(scores, pairs.same, protocols.fars)),
            "norm_mean": float(norms(embeddings).mean()),
            "norm_std": float(norms(embeddings).std(correction=0)),
        }


def cosines(first: Float[Tensor, "pairs dim"], second: Float[Tensor, "pairs dim"]) -> Float[Tensor, " pairs"]:
    """Of embeddings of any norm, rounded so that pairs that are equally alike score the same."""
    return rounded((unit_rows(first.double()) * unit_rows(second.double())).sum(1))


def accept_rates(rates: dict[float, float]) -> dict[str, float]:
    """True accept rates in percent, by the last words of the metrics' names."""
    return {f"tar_at_far_{power_of_ten(far)}": 100 * rate for far, rate in rates.items()}


def power_of_ten(value: float) -> str:
    """A number as metrics name it: 1e-3, 5e-2, 1e6."""
    digits, _, exponent = f"{value:e}".partition("e")
    return f"{float(digits):g}e{int(exponent)}"


def _keep_pairs(path: Path, pairs: VerificationPairs, scores: Tensor, embeddings: Tensor) -> None:
    """Scores, norms and the pairs that the embedding gets most wrong, as pixels."""
    alike = scores.argsort(descending=True)
    hardest = {
        "different": alike[~pairs.same[alike]][:_HARDEST],
        "same": alike.flip(0)[pairs.same[alike.flip(0)]][:_HARDEST],
    }
    kept: dict[str, Tensor] = {"scores": scores, "same": pairs.same, "norms": norms(embeddings)}
    for name, chosen in hardest.items():
        kept[f"{name}_scores"] = scores[chosen]
        for side, positions in (("first", pairs.first), ("second", pairs.second)):
            kept[f"{name}_{side}"] = pairs.images.read(positions[chosen]).images.cpu()
    torch.save(kept, path)


# Of each kind, shown in a picture.
_HARDEST = 6
