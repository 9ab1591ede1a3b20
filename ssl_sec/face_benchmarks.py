"""Benchmarks of face recognition: which images each needs, and what it tells of their embeddings."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from jaxtyping import Float, Int64
from torch import Tensor

from ssl_sec.config import PairsConfig
from ssl_sec.data.image_set import ImageSet
from ssl_sec.data.verification_sets import VerificationPairs
from ssl_sec.evaluation.roc import equal_error_rate, tar_at_far
from ssl_sec.evaluation.verification import kfold_accuracy, pair_cosines

# The embeddings of some images of a set; every worker asks for the same.
Embed = Callable[[ImageSet, Int64[Tensor, " images"]], Float[Tensor, "images dim"]]


@dataclass(frozen=True, kw_only=True)
class Protocols:
    """How benchmarks are measured; see `ssl_sec.face_config.FaceEvaluationConfig`."""

    pca: int | None
    fars: tuple[float, ...]


@runtime_checkable
class Benchmark(Protocol):
    """A benchmark that is open."""

    @property
    def people(self) -> frozenset[str]:
        """Names of those in it; empty if they are unknown."""
        ...

    def figures(self, embed: Embed, protocols: Protocols) -> dict[str, float]:
        """What the papers report, in percent, by the ends of the metrics' names."""
        ...


@dataclass(frozen=True, kw_only=True)
class PairsBenchmark:
    """Verification of pairs."""

    pairs: VerificationPairs

    @property
    def people(self) -> frozenset[str]:
        """Names of those in it; empty if they are unknown."""
        return self.pairs.people
