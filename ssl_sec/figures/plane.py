"""Embeddings of two dimensions as they are, and what a softmax makes of their plane (NormFace, Figs. 2 and 3)."""

from collections.abc import Sequence

from jaxtyping import Float, Int64
from matplotlib.figure import Figure
from torch import Tensor

from ssl_sec.errors import counted
from ssl_sec.evaluation.plane import plane_reach
from ssl_sec.figures.drawing import add_grid, message, plain
from ssl_sec.figures.training import scatter_classes


def plane_figure(
    embeddings: Float[Tensor, "images 2"],
    labels: Int64[Tensor, " images"],
    class_names: Sequence[str],
    probabilities: Float[Tensor, " points"] | None,
) -> Figure:
    """The embeddings in the colours of their classes and, next to them, the probability of class 0 over the plane.

    Args:
        embeddings: raw embeddings.
        labels: class of each image.
        class_names: name of each class.
        probabilities: probability of class 0 at each point of `ssl_sec.evaluation.plane.plane_grid`; None if the loss
            is no softmax.
    """
    is_finite = embeddings.isfinite().all(1)
    if not is_finite.any():
        return message("no embedding is finite")
    embeddings, labels = embeddings[is_finite], labels[is_finite]
    reach = plane_reach(embeddings)
    figure = Figure(figsize=(7 if probabilities is None else 12.5, 5.6), layout="constrained")
    axes = figure.subplots(1, 1 if probabilities is None else 2, squeeze=False)[0]
    scatter_classes(figure, axes[0], embeddings.numpy(), labels.numpy(), class_names)
    axes[0].set_title(f"embeddings of {counted(len(labels), 'training image')}")
    add_grid(axes[0])
    if probabilities is not None:
        side = round(len(probabilities) ** 0.5)
        shown = axes[1].imshow(
            probabilities.view(side, side).numpy(),
            origin="lower",
            extent=(-reach, reach, -reach, reach),
            cmap="viridis",
            vmin=0,
            vmax=1,
        )
        axes[1].set_title(f"probability of class {plain(class_names[0])}")
        figure.colorbar(shown, ax=axes[1], label="probability", shrink=0.85)
    for each in axes:
        each.axhline(0, color="0.5", linewidth=0.8)
        each.axvline(0, color="0.5", linewidth=0.8)
        limits = (-reach, reach)
        each.set(xlim=limits, ylim=limits, xlabel="embedding 1 (no unit)", aspect="equal")
    axes[0].set_ylabel("embedding 2 (no unit)")
    return figure
