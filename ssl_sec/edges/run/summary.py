"""The text that a job prints at its end."""

import os
import re
import shlex
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ssl_sec.edges.folder.folder import RunFolder
from ssl_sec.edges.tracking.pages import run_page, scores_page

# Descriptions of metrics.
METRICS = {
    "train/loss": "last loss",
    "val/knn_top1": "kNN top-1 on held-out training images (%)",
    "val/probe_top1": "linear probe top-1 on held-out training images (%)",
    "val/rankme": "RankMe",
    "val/recall_at_1": "Recall@1 on held-out training classes (%)",
    "train/recall_at_1": "Recall@1 on training classes (%)",
    "val/verification_accuracy": "verification accuracy on held-out training people (%)",
    "train/verification_accuracy": "verification accuracy on training people (%)",
    **{
        f"retrieval/recall_at_{k}": f"Recall@{k} on the test classes (%)"
        for k in (1, 2, 4, 8, 10, 20, 30, 40, 50, 100, 1000)
    },
    "retrieval/nmi": "NMI on the test classes (%)",
    "retrieval/f1": "pairwise F1 on the test classes (%)",
    "retrieval/test_norm_mean": "mean norm of the test embeddings",
    "retrieval/test_norm_variance": "variance of their norms",
    "probe/top1": "linear probe top-1 on the test set (%)",
    "probe/top5": "linear probe top-5 on the test set (%)",
    "probe/knn_top1": "kNN top-1 on the test set (%)",
    "probe/ece": "expected calibration error of the linear probe on the test set (%)",
    "probe/logistic_top1": "logistic regression top-1 on the test set (%)",
    "probe/logistic_mean_per_class": "logistic regression, mean of the classes' accuracies on the test set (%)",
    "probe/corruption/mean_top1": "linear probe top-1 on corrupted test images, mean over kinds and strengths (%)",
    "val/top1": "top-1 on held-out training images (%)",
    "finetune/top1": "top-1 on the test set (%)",
    "finetune/top5": "top-5 on the test set (%)",
    "finetune/mean_per_class": "mean of the classes' accuracies on the test set (%)",
    "finetune/ece": "expected calibration error on the test set (%)",
    "finetune/epoch": "epoch whose network was measured",
    "probe/learning_rate": "learning rate of the probe, chosen on held-out training images",
}

# Descriptions of the metrics of face test sets, by the part of their names that follows the title.
_FACE_METRICS = {
    "accuracy": "accuracy",
    "accuracy_inner_product": "accuracy by the inner product",
    "accuracy_euclidean": "accuracy by the Euclidean distance",
    "accuracy_inner_product_normalised": "accuracy by the inner product of directions",
    "accuracy_euclidean_normalised": "accuracy by the Euclidean distance of directions",
    "accuracy_max": "accuracy by the greatest cosine",
    "accuracy_hik": "accuracy by HIK-SVM",
    "eer": "EER",
    r"tar_at_far_([\d.e-]+)": "TAR at FAR = {}",
    r"dir_at_far_([\d.e-]+)": "DIR at rank 1 and FAR = {}",
    r"([\d.e]+)_rank1": "rank-1 among {} distractors",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Finished:
    """The result of a run.

    Attributes:
        folder: the run's folder.
        uri: address of MLflow's store.
        run_id: id of the run in MLflow; None if MLflow could not be reached.
        experiment_id: id of its experiment, likewise.
        metrics: the last value of each metric.
    """

    folder: RunFolder
    uri: str
    run_id: str | None
    experiment_id: str | None
    metrics: Mapping[str, float]


def summary(finished: Finished) -> str:
    """The metrics, the folder, and how to see the run in MLflow."""
    metrics = finished.metrics
    lines = [f"{label}: {metrics[key]:.4g}" for key, label in METRICS.items() if key in metrics]
    lines += _face_lines(metrics)
    run = [f"MLflow run: {finished.run_id}"] if finished.run_id else ["MLflow run: none; see the warning above"]
    return "\n".join([*lines, f"folder: {finished.folder.location}", *run, ui_instructions(finished)])


def _face_lines(metrics: Mapping[str, float]) -> Iterator[str]:
    """A line for each metric of a face test set, with its spread over folds or trials."""
    for key, value in metrics.items():
        for name, words in _FACE_METRICS.items():
            if found := re.fullmatch(f"face/(.+?)_{name}", key):
                title, *numbers = found.groups()
                shown, mean, std = f"{value:.4g}", metrics.get(f"{key}_mean"), metrics.get(f"{key}_std")
                if std is not None:
                    shown += f" ± {std:.2g}" if mean is None else f" ({mean:.4g} - {std:.2g})"
                yield f"{title} {words.format(*numbers)} (%): {shown}"


def ui_instructions(finished: Finished, *, whole_experiment: bool = False) -> str:
    """The command that starts the MLflow UI, and the address of the run's page, or of its experiment."""
    path = ""
    if finished.experiment_id and finished.run_id:
        number = finished.experiment_id
        path = scores_page(number) if whole_experiment else run_page(number, finished.run_id)
    return ui_command(finished.uri, path)


def ui_command(uri: str, path: str) -> str:
    """The command that starts the MLflow UI, and the address of a page.

    Args:
        uri: address of the store.
        path: path of the page.
    """
    if uri.startswith(("http://", "https://")):
        return f"MLflow UI: {uri}{path}"
    program = Path(sys.executable).parent / "mlflow"
    near = os.path.relpath(program)
    shown = "mlflow" if not program.exists() else str(program) if near.startswith("..") else near
    command = shlex.join([shown, "ui", "--backend-store-uri", uri])
    return f"MLflow UI: {command}\n           then open http://127.0.0.1:5000{path}"
