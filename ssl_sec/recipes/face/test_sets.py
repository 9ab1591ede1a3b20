"""Test sets of face recognition: the images that each needs, and the measures of their embeddings."""

import statistics
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from ssl_sec.data.faces.lists import OpenSetTrial, TemplateFaces, TemplatePairs, VideoPairs
from ssl_sec.data.faces.pairs import VerificationPairs
from ssl_sec.data.image_set import ImageSet
from ssl_sec.errors import DataError
from ssl_sec.evaluation.arrays import unit_rows
from ssl_sec.evaluation.faces.components import fit_components
from ssl_sec.evaluation.faces.identification import (
    all_pairs_tar_at_far,
    open_set_identification,
    rank_1_identification,
    shuffled,
)
from ssl_sec.evaluation.faces.quality import pair_quality, quality_auc
from ssl_sec.evaluation.faces.roc import accepted_at_far, equal_error_rate, tar_at_far, thresholds_at_far
from ssl_sec.evaluation.faces.templates import pool_templates, template_scores
from ssl_sec.evaluation.faces.verification import (
    FoldedAccuracy,
    best_threshold,
    closeness,
    cosines,
    inner_products,
    kfold_accuracy,
    kfold_accuracy_of_scores,
)
from ssl_sec.evaluation.faces.videos import compare_videos, videos_kfold_accuracy
from ssl_sec.losses.geometry import norms

# Computes the embeddings of some images of a set, on the CPU; every worker calls it with the same images.
Embed = Callable[[ImageSet, Int64[Tensor, " images"]], Float[Tensor, "images dim"]]


@dataclass(frozen=True, kw_only=True)
class Protocols:
    """How test sets are measured.

    Attributes:
        pca: number of principal components in test sets of pairs, of videos and of BLUFR; None for all.
        fars: the false accept rates at which true accept rates are reported.
        similarities: whether pairs are also verified by inner products and Euclidean distances (NormFace, Table 1).
    """

    pca: int | None = None
    fars: tuple[float, ...] = (1e-3,)
    similarities: bool = False


@runtime_checkable
class FaceTestSet(Protocol):
    """A test set whose files were read."""

    @property
    def people(self) -> frozenset[str]:
        """Names of the people in it, as training sets name their classes; empty if they are unknown."""
        ...

    @property
    def image_sets(self) -> tuple[ImageSet, ...]:
        """The images that are measured."""
        ...

    def measure(self, embed: Embed, protocols: Protocols, keep: Path | None) -> dict[str, float]:
        """The metrics that the papers report, in percent, by the ends of the metrics' names.

        Args:
            embed: computes the embeddings of images; every worker calls it with the same images.
            protocols: how the test set is measured.
            keep: file for the data of the figures; None on all workers but one.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class PairsTestSet:
    """Verification of pairs.

    Attributes:
        pairs: the pairs, with their images.
    """

    pairs: VerificationPairs

    @property
    def people(self) -> frozenset[str]:
        """Names of the people in it; empty if they are unknown."""
        return self.pairs.people

    @property
    def image_sets(self) -> tuple[ImageSet, ...]:
        """The images that are measured."""
        return (self.pairs.images,)

    def measure(self, embed: Embed, protocols: Protocols, keep: Path | None) -> dict[str, float]:
        """Accuracy over the folds, error rates, thresholds on the cosine, norms, and what they tell of refusals."""
        pairs = self.pairs
        embeddings = embed(pairs.images, torch.arange(len(pairs.images)))
        first, second = embeddings[pairs.first], embeddings[pairs.second]
        accuracy = kfold_accuracy(first, second, pairs.same, pairs.folds, protocols.pca)
        scores = cosines(first, second)
        discards: dict[str, Tensor] = {}
        auc = None
        if protocols.fars:
            far = max(protocols.fars)
            quality, refused = pair_quality(first, second)[pairs.same], ~accepted_at_far(scores, pairs.same, far)
            discards = {"quality": quality, "refused": refused, "far": torch.tensor(far, dtype=torch.float64)}
            auc = quality_auc(quality, refused)
        if keep is not None:
            _keep_scores(keep, scores, pairs.same, embeddings, {**_hardest(pairs, scores), **discards})
        return {
            **_accuracies("accuracy", accuracy),
            **(self._accuracies_by_similarity(first, second) if protocols.similarities else {}),
            "eer": 100 * equal_error_rate(scores, pairs.same),
            **accept_rates(tar_at_far(scores, pairs.same, protocols.fars)),
            **_thresholds(scores, pairs.same, protocols.fars),
            "norm_mean": float(norms(embeddings).mean()),
            "norm_std": float(norms(embeddings).std(correction=0)),
            **({} if auc is None else {"norm_auc": 100 * auc}),
        }

    def _accuracies_by_similarity(
        self, first: Float[Tensor, "pairs dim"], second: Float[Tensor, "pairs dim"]
    ) -> dict[str, float]:
        """Accuracy by each similarity, before and after the embeddings are normalised (NormFace, Table 1)."""
        directions = unit_rows(first.double()), unit_rows(second.double())
        scores = {
            "accuracy_inner_product": inner_products(first, second),
            "accuracy_euclidean": closeness(first, second),
            "accuracy_inner_product_normalised": inner_products(*directions),
            "accuracy_euclidean_normalised": closeness(*directions),
        }
        return {
            name: value
            for title, values in scores.items()
            for name, value in _accuracies(
                title, kfold_accuracy_of_scores(values, self.pairs.same, self.pairs.folds)
            ).items()
        }


@dataclass(frozen=True, kw_only=True)
class OpenSetTestSet:
    """BLUFR: all pairs of a trial's images, and probes whose person may not be in the gallery (Liao et al. 2014).

    Attributes:
        images: the images; their labels are the people.
        trials: the gallery and the probes of each trial.
        people: names of the people on the images.
    """

    images: ImageSet
    trials: tuple[OpenSetTrial, ...]
    people: frozenset[str]

    @property
    def image_sets(self) -> tuple[ImageSet, ...]:
        """The images that are measured."""
        return (self.images,)

    def require_components(self, protocols: Protocols) -> None:
        """Checks, before any training, that each trial leaves people on whom components can be fitted.

        Raises:
            DataError: a trial tests everyone.
        """
        labels = self.images.labels
        for number, trial in enumerate(self.trials if protocols.pca is not None else (), start=1):
            if torch.isin(labels, labels[torch.cat([trial.gallery, trial.probes])]).all():
                raise DataError(
                    f"evaluation.pca: found {protocols.pca}, but trial {number} of {self.images.name} tests everyone; "
                    "needed: people on whom the components are fitted, or evaluation.pca=null"
                )

    def measure(self, embed: Embed, protocols: Protocols, keep: Path | None) -> dict[str, float]:
        """TAR at FAR = 0.1 %, and DIR at rank 1 and FAR = 1 %: the mean minus the standard deviation over trials."""
        self.require_components(protocols)
        embeddings = embed(self.images, torch.arange(len(self.images)))
        labels = self.images.labels
        rates: defaultdict[str, list[float]] = defaultdict(list)
        for trial in self.trials:
            tested = torch.cat([trial.gallery, trial.probes])
            rows = embeddings
            if protocols.pca is not None:
                # BLUFR trains on all images of the people whom a trial does not test.
                others = embeddings[~torch.isin(labels, labels[tested])]
                rows = fit_components([others], protocols.pca).reduce(embeddings)
            for far, rate in all_pairs_tar_at_far(rows[tested], labels[tested], _VERIFICATION_FARS).items():
                rates[f"tar_at_far_{power_of_ten(far)}"].append(100 * rate)
            for far, rate in open_set_identification(rows, labels, trial, _IDENTIFICATION_FARS).items():
                rates[f"dir_at_far_{power_of_ten(far)}"].append(100 * rate)
        metrics: dict[str, float] = {}
        for name, values in rates.items():
            # The sample standard deviation, as in BLUFR's own code.
            mean, std = statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0
            metrics |= {name: mean - std, f"{name}_mean": mean, f"{name}_std": std}
        return metrics


@dataclass(frozen=True, kw_only=True)
class MegaFaceTestSet:
    """Identification among distractors (Kemelmacher-Shlizerman et al. 2016; SEC, Table 4).

    Attributes:
        probes: the images to identify; their labels are the people.
        distractors: images of other people.
        sizes: numbers of distractors.
        seed: seed of the choice of distractors; a smaller choice is part of every larger one.
    """

    probes: ImageSet
    distractors: ImageSet
    sizes: tuple[int, ...]
    seed: int

    @property
    def people(self) -> frozenset[str]:
        """Names of the people to identify."""
        return frozenset(self.probes.class_names)

    @property
    def image_sets(self) -> tuple[ImageSet, ...]:
        """The images that are measured."""
        return self.probes, self.distractors

    def measure(self, embed: Embed, protocols: Protocols, keep: Path | None) -> dict[str, float]:
        """Rank-1 identification rate among each number of distractors."""
        probes = embed(self.probes, torch.arange(len(self.probes)))
        chosen = shuffled(len(self.distractors), self.seed)[: max(self.sizes)]
        chunks = (embed(self.distractors, indices) for indices in chosen.split(_DISTRACTORS_AT_ONCE))
        rates = rank_1_identification(probes, self.probes.labels, chunks, self.sizes)
        return {f"{power_of_ten(size)}_rank1": 100 * rate for size, rate in rates.items()}


@dataclass(frozen=True, kw_only=True)
class TemplatesTestSet:
    """Verification of templates, sets of images of one person (IJB-C, Maze et al. 2018; SFT, Table 4).

    Attributes:
        images: the faces.
        faces: the template and the medium of each image, in the same order.
        pairs: pairs of templates.
        by_norm: whether a face is weighted by the norm of its embedding.
        scores: further weight of each face, ≥ 0; None: all are equal.
        fars: the false accept rates at which true accept rates are reported; much smaller than for other test sets.
    """

    images: ImageSet
    faces: TemplateFaces
    pairs: TemplatePairs
    by_norm: bool = False
    scores: Float[Tensor, " images"] | None = None
    fars: tuple[float, ...]

    @property
    def people(self) -> frozenset[str]:
        """Unknown: templates have numbers only."""
        return frozenset()

    @property
    def image_sets(self) -> tuple[ImageSet, ...]:
        """The images that are measured."""
        return (self.images,)

    def measure(self, embed: Embed, protocols: Protocols, keep: Path | None) -> dict[str, float]:
        """TAR at FAR."""
        embeddings = embed(self.images, torch.arange(len(self.images)))
        weights = self.scores
        if self.by_norm:
            weights = norms(embeddings) if weights is None else weights * norms(embeddings)
        ids, pooled = pool_templates(embeddings, self.faces.templates, self.faces.media, weights)
        scores = template_scores(ids, pooled, self.pairs.first, self.pairs.second)
        if keep is not None:
            _keep_scores(keep, scores, self.pairs.same, embeddings)
        return accept_rates(tar_at_far(scores, self.pairs.same, self.fars))


@dataclass(frozen=True, kw_only=True)
class VideosTestSet:
    """Verification of videos (YouTube Faces, Wolf et al. 2011; NormFace, Table 5).

    Attributes:
        frames: the frames of all videos, video by video; their labels are the videos.
        pairs: pairs of videos.
    """

    frames: ImageSet
    pairs: VideoPairs

    @property
    def people(self) -> frozenset[str]:
        """Names of the people in the videos."""
        return self.pairs.people

    @property
    def image_sets(self) -> tuple[ImageSet, ...]:
        """The images that are measured."""
        return (self.frames,)

    def measure(self, embed: Embed, protocols: Protocols, keep: Path | None) -> dict[str, float]:
        """Accuracy by the mean and greatest cosine of two videos' frames and by HIK-SVM; EER and TAR by the mean."""
        embeddings = embed(self.frames, torch.arange(len(self.frames)))
        videos = embeddings.split(self.frames.labels.bincount().tolist())
        first, second, same, folds = self.pairs[1:]
        compared = compare_videos(videos, first, second)
        means = compared.means
        if keep is not None:
            _keep_scores(keep, means, same, embeddings, _some_histograms(compared.histograms, same))
        accuracies = videos_kfold_accuracy(videos, first, second, same, folds, protocols.pca)
        return {
            **_accuracies("accuracy", accuracies.mean),
            **_accuracies("accuracy_max", accuracies.greatest),
            **_accuracies("accuracy_hik", accuracies.hik),
            "eer": 100 * equal_error_rate(means, same),
            **accept_rates(tar_at_far(means, same, protocols.fars)),
        }


def accept_rates(rates: dict[float, float]) -> dict[str, float]:
    """True accept rates in percent, by the ends of the metrics' names."""
    return {f"tar_at_far_{power_of_ten(far)}": 100 * rate for far, rate in rates.items()}


def power_of_ten(value: float | int) -> str:
    """A number as written in the names of metrics: 1e-3, 5e-2, 1e6."""
    digits, _, exponent = f"{value:e}".partition("e")
    return f"{float(digits):g}e{int(exponent)}"


def _thresholds(
    scores: Float[Tensor, " pairs"], same: Bool[Tensor, " pairs"], fars: tuple[float, ...]
) -> dict[str, float]:
    """The cosines above which a pair is accepted, in [-1, 1], by the ends of the metrics' names."""
    is_finite = scores.isfinite()
    found = {"threshold": best_threshold(scores[is_finite], same[is_finite])}
    for far, threshold in thresholds_at_far(scores, same, fars).items():
        found[f"threshold_at_far_{power_of_ten(far)}"] = threshold
    return {name: min(max(threshold, -1.0), 1.0) for name, threshold in found.items()}


def _accuracies(name: str, accuracy: FoldedAccuracy) -> dict[str, float]:
    return {name: 100 * accuracy.mean, f"{name}_std": 100 * accuracy.std}


def _keep_scores(
    path: Path,
    scores: Float[Tensor, " pairs"],
    same: Bool[Tensor, " pairs"],
    embeddings: Float[Tensor, "images dim"],
    shown: dict[str, Tensor] | None = None,
) -> None:
    torch.save({"scores": scores, "same": same, "norms": norms(embeddings), **(shown or {})}, path)


def _some_histograms(histograms: Float[Tensor, "pairs bins"], same: Bool[Tensor, " pairs"]) -> dict[str, Tensor]:
    """Histograms of as many pairs as in NormFace's Fig. 9b, half of either kind, spread over the whole list."""
    chosen = {"same": same.nonzero().flatten(), "different": (~same).nonzero().flatten()}
    return {
        f"{kind}_histograms": histograms[
            places[torch.linspace(0, len(places) - 1, min(len(places), _HISTOGRAMS)).long()]
        ]
        for kind, places in chosen.items()
    }


def _hardest(pairs: VerificationPairs, scores: Float[Tensor, " pairs"]) -> dict[str, Tensor]:
    """The pairs that the embedding gets most wrong, as pixels, with their scores."""
    order = scores.argsort(descending=True)
    hardest = {
        "different": order[~pairs.same[order]][:_HARDEST],
        "same": order.flip(0)[pairs.same[order.flip(0)]][:_HARDEST],
    }
    shown: dict[str, Tensor] = {}
    for name, chosen in hardest.items():
        shown[f"{name}_scores"] = scores[chosen]
        for side, positions in (("first", pairs.first), ("second", pairs.second)):
            shown[f"{name}_{side}"] = pairs.images.read(positions[chosen]).images.cpu()
    return shown


# Number of pairs of each kind in a figure.
_HARDEST = 6
_HISTOGRAMS = 100

# The rates that BLUFR reports.
_VERIFICATION_FARS = (1e-3,)
_IDENTIFICATION_FARS = (1e-2,)

# Number of distractors that are embedded before they are compared: 64 MiB at 512 dimensions.
_DISTRACTORS_AT_ONCE = 32_768
