"""Labels of metrics on the axes of figures."""

# The labels of common metrics on an axis; other metrics are labelled by their names.
_AXIS_LABELS = {
    "train/loss": "total loss",
    "train/metric_loss": "metric loss",
    "train/constraint": "constraint (squared norm)",
    "train/eta": "constraint's weight η",
    "train/lr": "learning rate",
    "train/norm_mean": "embedding norm (L2)",
    "train/norm_std": "deviation of the embedding norm",
    "train/norm_variance": "variance of the embedding norm",
    "train/turn_mean": "turn of an embedding (tangent)",
    "train/step_angle_mean": "turn of an embedding in a step (radians)",
    "train/gradient_norm_mean": "gradient of an embedding (L2)",
    "train/images_per_s": "throughput (images/s)",
    "train/recall_at_1": "training Recall@1 (%)",
    "train/verification_accuracy": "training verification accuracy (%)",
    "train/verification_eer": "training equal error rate (%)",
    "val/verification_accuracy": "validation verification accuracy (%)",
    "val/verification_eer": "validation equal error rate (%)",
    "train/loss_lower_bound": "least loss at the scale",
    "train/scale": "scale of the logits",
    "train/agent_distortion": "distortion by agents (squared)",
    "train/agent_distortion_bound": "bound of the distortion (squared)",
    "val/knn_top1": "kNN top-1 accuracy (%)",
    "val/probe_top1": "linear probe top-1 accuracy (%)",
    "val/recall_at_1": "validation Recall@1 (%)",
    "test/recall_at_1": "test Recall@1 (%)",
    "val/rankme": "effective rank (RankMe)",
    "val/alpha_req": "decay of the spectrum (α-ReQ)",
    "val/alignment": "alignment (lower is better)",
    "val/uniformity": "uniformity (lower is better)",
    "retrieval/recall_at_1": "test Recall@1 (%)",
    "retrieval/nmi": "test NMI (%)",
    "retrieval/f1": "test F1 (%)",
}


def metric_label(name: str) -> str:
    """The label of a metric on an axis; its name if it has none."""
    return _AXIS_LABELS.get(name, name)
