"""The metrics that runs report: what each is, and its label in tables and plots.

A name may have variable parts: `probe/few_shot_{labels}` stands for `probe/few_shot_5` and `probe/few_shot_20`.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True, slots=True)
class Metric:
    """A metric.

    Attributes:
        meaning: what it is, with its unit.
        label: a shorter form, for the columns of tables and the axes of plots.
        is_result: whether a job prints it at its end.
    """

    meaning: str
    label: str
    is_result: bool = False


def _reported(meaning: str, label: str | None = None) -> Metric:
    return Metric(meaning=meaning, label=label or meaning)


def _result(meaning: str, label: str | None = None) -> Metric:
    return Metric(meaning=meaning, label=label or meaning, is_result=True)


# What the names of metrics begin with that are measured once, after the training.
RESULT_GROUPS = frozenset({"face", "finetune", "probe", "retrieval"})

_NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e-?\d+)?")
_TEST_SET = "face/{test_set}"
_ACCURACIES = {
    "accuracy": "accuracy",
    "accuracy_inner_product": "accuracy by the inner product",
    "accuracy_euclidean": "accuracy by the Euclidean distance",
    "accuracy_inner_product_normalised": "accuracy by the inner product of directions",
    "accuracy_euclidean_normalised": "accuracy by the Euclidean distance of directions",
    "accuracy_max": "accuracy by the greatest cosine of two videos' frames",
    "accuracy_hik": "accuracy by HIK-SVM",
}
_RATES = {
    "tar_at_far_{far}": "TAR at FAR = {far}",
    "dir_at_far_{far}": "DIR at rank 1 and FAR = {far}",
}
_HELD_OUT, _CLASSES, _PEOPLE = "held-out training images", "held-out training classes", "held-out training people"

# Metrics by name, in the order in which they are printed.
METRICS: Mapping[str, Metric] = {
    "train/loss": _result("total loss"),
    "train/metric_loss": _reported("loss without the constraint", "metric loss"),
    "train/constraint": _reported("constraint without its weight", "constraint (squared norm)"),
    "train/eta": _reported("weight η of the constraint", "constraint's weight η"),
    "train/lr": _reported("learning rate"),
    "train/epoch": _reported("epochs trained", "epoch"),
    "train/images_per_s": _reported("throughput (images/s)"),
    "train/norm_mean": _reported("mean norm of the embeddings", "embedding norm (L2)"),
    "train/norm_std": _reported("standard deviation of the embeddings' norms", "deviation of the embedding norm"),
    "train/norm_variance": _reported("variance of the embeddings' norms, in reports", "variance of the embedding norm"),
    "train/turn_mean": _reported(
        "mean turn of an embedding by a step of SGD on itself (tangent, for a learning rate of 1)",
        "turn of an embedding (tangent)",
    ),
    "train/turn_std": _reported("standard deviation of these turns", "deviation of the turns (tangent)"),
    "train/step_angle_mean": _reported(
        "mean angle by which a step of the optimiser turns the embeddings of its views (radians)",
        "turn in a step (radians)",
    ),
    "train/step_angle_std": _reported(
        "standard deviation of these angles (radians)", "deviation of the turns (radians)"
    ),
    "train/gradient_norm_mean": _reported("mean norm of the gradient of an embedding", "gradient of an embedding (L2)"),
    "train/weight_gradient_norm": _reported(
        "norm of the gradient of all weights together, before it is clipped", "gradient of all weights (L2)"
    ),
    "train/generated_loss": _reported("loss of the generated embeddings"),
    "train/generator_loss": _reported("loss of the generator"),
    "train/agent_distortion": _reported("distortion by agents (squared)"),
    "train/agent_distortion_bound": _reported("bound of the distortion by agents (squared)", "bound of the distortion"),
    "train/loss_lower_bound": _reported("least loss at the scale (NormFace, Prop. 2)", "least loss at the scale"),
    "train/scale": _reported("scale of the logits"),
    "val/knn_top1": _result(f"kNN top-1 on {_HELD_OUT} (%)", "held-out kNN top-1 %"),
    "val/probe_top1": _result(f"linear probe top-1 on {_HELD_OUT} (%)", "held-out probe top-1 %"),
    "val/rankme": _result("RankMe", "effective rank (RankMe)"),
    "val/alpha_req": _reported("decay of the spectrum (α-ReQ)"),
    "val/alignment": _reported("alignment (lower is better)"),
    "val/uniformity": _reported("uniformity (lower is better)"),
    "val/recall_at_1": _result(f"Recall@1 on {_CLASSES} (%)", "held-out Recall@1 %"),
    "train/recall_at_1": _result("Recall@1 on training classes (%)", "training Recall@1 %"),
    "test/recall_at_1": _reported("Recall@1 on the test classes, while training (%)", "test Recall@1 %"),
    "val/verification_accuracy": _result(f"verification accuracy on {_PEOPLE} (%)", "held-out verification %"),
    "train/verification_accuracy": _result("verification accuracy on training people (%)", "training verification %"),
    "val/verification_eer": _reported(f"equal error rate on {_PEOPLE} (%)", "held-out EER %"),
    "test/{test_set}_accuracy": _reported("{test_set} accuracy, while training (%)", "{test_set} %"),
    "train/verification_eer": _reported("equal error rate on training people (%)", "training EER %"),
    "retrieval/recall_at_{k}": _result("Recall@{k} on the test classes (%)", "Recall@{k} %"),
    "retrieval/r_precision": _result("R-precision on the test classes (%)", "R-precision %"),
    "retrieval/map_at_r": _result("MAP@R on the test classes (%)", "MAP@R %"),
    "retrieval/nmi": _result("NMI on the test classes (%)", "NMI %"),
    "retrieval/f1": _result("pairwise F1 on the test classes (%)", "F1 %"),
    "retrieval/test_norm_mean": _result("mean norm of the test embeddings"),
    "retrieval/test_norm_variance": _result("variance of the test embeddings' norms"),
    "retrieval/train_norm_mean": _reported("mean norm of the training embeddings, of 100,000 images at most"),
    "retrieval/train_norm_variance": _reported("variance of these norms"),
    "retrieval/rotation_shift_mean": _reported(
        "mean shift of the variation by a rotation between test classes (SFT, Fig. 6b)", "shift by rotation"
    ),
    "retrieval/within_class_energy": _reported(
        "share of the variation in the directions within classes (SFT, Eq. 8, %)", "r_w %"
    ),
    "probe/top1": _result("linear probe top-1 on the test set (%)", "probe top-1 %"),
    "probe/top5": _result("linear probe top-5 on the test set (%)", "probe top-5 %"),
    "probe/knn_top1": _result("kNN top-1 on the test set (%)", "kNN top-1 %"),
    "probe/mean_per_class": _result(
        "linear probe, mean of the classes' accuracies on the test set (%)", "probe mean per class %"
    ),
    "probe/ece": _result("expected calibration error of the linear probe on the test set (%)", "probe ECE %"),
    "probe/logistic_top1": _result("logistic regression top-1 on the test set (%)", "logistic regression top-1 %"),
    "probe/logistic_mean_per_class": _result(
        "logistic regression, mean of the classes' accuracies on the test set (%)",
        "logistic regression, mean per class %",
    ),
    "probe/logistic_penalty": _reported("L2 penalty of the logistic regression, chosen on held-out training images"),
    "probe/few_shot_{labels}": _result(
        "top-1 on the test set with {labels} labels per class (%)", "{labels} labels per class %"
    ),
    "probe/few_shot_{labels}_interval": _reported("half the width of its 95 % interval over the draws (%)"),
    "probe/corruption/mean_top1": _result(
        "linear probe top-1 on corrupted test images, mean over kinds and strengths (%)", "corrupted top-1 %"
    ),
    "probe/corruption/{kind}_{strength}_top1": _reported("linear probe top-1 with {kind} of strength {strength} (%)"),
    "val/top1": _result(f"top-1 on {_HELD_OUT} (%)", "held-out top-1 %"),
    "train/top1": _reported("top-1 on training images (%)", "training top-1 %"),
    "val/mean_per_class": _result(f"mean of the classes' accuracies on {_HELD_OUT} (%)", "held-out mean per class %"),
    "train/mean_per_class": _reported(
        "mean of the classes' accuracies on training images (%)", "training mean per class %"
    ),
    "finetune/top1": _result("top-1 on the test set (%)", "top-1 %"),
    "finetune/top5": _result("top-5 on the test set (%)", "top-5 %"),
    "finetune/mean_per_class": _result("mean of the classes' accuracies on the test set (%)", "mean per class %"),
    "finetune/ece": _result("expected calibration error on the test set (%)", "ECE %"),
    "finetune/epoch": _result("epoch whose network was measured"),
    "finetune/val_top1": _result("top-1 of that network on the held-out training images (%)"),
    "finetune/val_mean_per_class": _result(
        "mean of the classes' accuracies of that network on the held-out training images (%)"
    ),
    "probe/learning_rate": _result("learning rate of the probe, chosen on held-out training images"),
    "probe/held_out_top1_lr_{rate}": _reported("linear probe top-1 on these images with a learning rate of {rate} (%)"),
    "probe/loss": _reported("least loss of the probes at all learning rates", "loss of the probe"),
    "probe/epoch": _reported("epochs of the probe's training", "epoch of the probe"),
    "face/head_classes_accuracy": _result("accuracy on other images of the head classes (%)"),
    "face/tail_classes_accuracy": _result("accuracy on other images of the tail classes (%)"),
    **{f"{_TEST_SET}_{end}": _result(f"{{test_set}} {meaning} (%)") for end, meaning in _ACCURACIES.items()},
    f"{_TEST_SET}_eer": _result("{test_set} EER (%)"),
    **{f"{_TEST_SET}_{end}": _result(f"{{test_set}} {meaning} (%)") for end, meaning in _RATES.items()},
    f"{_TEST_SET}_threshold": _result("cosine above which pairs of {test_set} are most accurately one person"),
    f"{_TEST_SET}_threshold_at_far_{{far}}": _reported("cosine above which a pair is accepted at FAR = {far}"),
    f"{_TEST_SET}_norm_mean": _reported("mean norm of the embeddings of {test_set}"),
    f"{_TEST_SET}_norm_std": _reported("standard deviation of the norms of the embeddings of {test_set}"),
    f"{_TEST_SET}_norm_auc": _reported(
        "probability that a refused pair of one person in {test_set} has a lower norm than an accepted one (%)"
    ),
    f"{_TEST_SET}_{{size}}_rank1": _result("{test_set} rank-1 among {size} distractors (%)"),
    f"{_TEST_SET}_{{measure}}_mean": _reported("mean of such a measure over the trials (%)"),
    f"{_TEST_SET}_{{measure}}_std": _reported("standard deviation of such a measure over the folds or trials (%)"),
}

# The variable parts that are words; the others are numbers.
_WORDS = ("test_set", "kind", "measure")


def _pattern(row: str) -> re.Pattern[str]:
    def part(found: re.Match[str]) -> str:
        return f"(?P<{found[1]}>{'.+' if found[1] in _WORDS else _NUMBER.pattern})"

    return re.compile(re.sub(r"\{(\w+)\}", part, row))


_PATTERNS = {row: _pattern(row) for row in METRICS}


def metric(name: str) -> Metric | None:
    """The metric of a name; None if it is unknown."""
    row, parts = _row_and_parts(name)
    if row is None:
        return None
    found = METRICS[row]
    return replace(found, meaning=found.meaning.format_map(parts), label=found.label.format_map(parts))


def metric_label(name: str) -> str:
    """The label of a metric in tables and plots; its name if it is unknown."""
    found = metric(name)
    return name if found is None else found.label


def known_metrics(names: Iterable[str]) -> list[tuple[str, Metric]]:
    """The known metrics among names, in the order of `METRICS`; those of face test sets stand last, by test set."""
    rows = list(METRICS)

    def place(name: str) -> tuple[str, int, list[float]]:
        row, parts = _row_and_parts(name)
        assert row is not None
        return parts.get("test_set", ""), rows.index(row), [float(number) for number in _NUMBER.findall(name)]

    known = {name: found for name in names if (found := metric(name)) is not None}
    return [(name, known[name]) for name in sorted(known, key=place)]


def chosen_metrics(chosen: Sequence[str], names: Iterable[str]) -> list[str]:
    """The names that are chosen, each itself or by its key of `METRICS`, in order; those of a key by set and number."""
    places: dict[str, tuple[int, str, list[float]]] = {}
    for name in names:
        row, parts = _row_and_parts(name)
        by = name if name in chosen else row
        if by in chosen:
            numbers = [float(number) for number in _NUMBER.findall(name)]
            places[name] = (chosen.index(by), parts.get("test_set", ""), numbers)
    return sorted(places, key=places.__getitem__)


def _row_and_parts(name: str) -> tuple[str | None, Mapping[str, str]]:
    """The key of `METRICS` that fits a name with the shortest variable parts, and these; None if none fits."""
    found = {row: match.groupdict() for row, pattern in _PATTERNS.items() if (match := pattern.fullmatch(name))}
    row = min(found, key=lambda row: sum(map(len, found[row].values())), default=None)
    return row, {} if row is None else found[row]
