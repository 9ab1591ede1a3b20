"""Softmax over the classes without a margin: cross-entropies against one template for each class.

With the template w_k of class k, cos θ_k = ⟨f̂, ŵ_k⟩ and the row's class y:

    softmax          −log softmax of ⟨f, w_k⟩ at y, or of ⟨f, w_k⟩ + b_k                      (NormFace, Eq. 1)
    L2-softmax       −log softmax of s ⟨f̂, w_k⟩ at y                                       (Ranjan et al. 2017)
    modified softmax −log softmax of ⟨f, ŵ_k⟩ at y                                            (Liu et al. 2017)
    NormFace         −log softmax of s cos θ_k at y                                           (NormFace, Eq. 6)

All are means over the rows. Cross-entropy itself, of logits that the network computes, is here too.
"""

import math
from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional

from ssl_sec.errors import counted
from ssl_sec.losses.base import Embeddings, Labels, Loss, Scalar, require_classes
from ssl_sec.losses.classes import classes_of, take_rows
from ssl_sec.losses.templates.base import TEMPLATE_STD, Compared, RowTemplateLoss, similarities
from ssl_sec.losses.templates.sampling import ClassSample
from ssl_sec.losses.tiles import Places, Rows, RowValues, Templates, over_tiles, without_own
from ssl_sec.rules import Range, check


def normalized_softmax_lower_bound(num_classes: int, squared_norm: float) -> float:
    """The least softmax loss of features and templates of one norm ℓ (NormFace, Proposition 2).

    log(1 + (n − 1) exp(−ℓ² n / (n − 1))), reached when every feature is its class's template and the templates
    are spread evenly.

    Args:
        num_classes: n ≥ 2.
        squared_norm: ℓ², the scale s of normalised features and templates.
    """
    check(num_classes >= 2, "num_classes", num_classes, "≥ 2")
    return math.log1p((num_classes - 1) * math.exp(-squared_norm * num_classes / (num_classes - 1)))


@torch.no_grad()
def class_probabilities(loss: nn.Module, embeddings: Float[Tensor, "rows dim"]) -> Float[Tensor, "rows classes"] | None:
    """The class probabilities that a softmax gives embeddings, without a margin (P_i of NormFace, Proposition 1).

    Args:
        loss: the first softmax in it that holds all its templates is used.
        embeddings: raw rows.

    Returns:
        The probability of each class; None if there is no such softmax.
    """
    for module in loss.modules():
        if isinstance(module, TemplateSoftmaxLoss) and module.holds_all:
            return module.logits(embeddings).softmax(1)
    return None


def sample_classes(loss: nn.Module, rate: float, seed: int) -> None:
    """Lets the softmaxes in a loss compare with a part of the classes; see `TemplateSoftmaxLoss.sample_classes`."""
    for module in loss.modules():
        if isinstance(module, TemplateSoftmaxLoss):
            module.sample_classes(rate, seed)


def draw_classes(loss: nn.Module, step: int) -> None:
    """Draws the classes of a step for the softmaxes in a loss; see `TemplateSoftmaxLoss.draw_classes`."""
    for module in loss.modules():
        if isinstance(module, TemplateSoftmaxLoss):
            module.draw_classes(step)


class TemplateSoftmaxLoss(RowTemplateLoss):
    """−log softmax of logits at the own class, log(1 + Σ_{k ≠ y} exp(z_k − z_y)), with z = s · similarity.

    Attributes:
        sample: the classes k of a step, in training; None for all classes in each.
    """

    scale: float | nn.Parameter
    sample: ClassSample | None

    def __init__(self, num_classes: int, dim: int, scale: float = 1.0, sub_centres: int = 1) -> None:
        super().__init__(num_classes, dim, sub_centres=sub_centres)
        Range(gt=0).check("scale", scale)
        self.scale = scale
        self.sample = None

    def sample_classes(self, rate: float, seed: int) -> None:
        """From now on compares the rows of a step with a part of the classes in training (An et al. 2022).

        Args:
            rate: share of the classes that `draw_classes` draws, which is called before each step; in (0, 1].
            seed: the run's seed.
        """
        Range(gt=0, le=1).check("rate", rate)
        self.sample = None if rate == 1 else ClassSample(self.num_classes, rate, seed)

    def draw_classes(self, step: int) -> None:
        """Draws the classes that the rows of a step are compared with; without `sample_classes` it does nothing.

        Args:
            step: 0-based global step.
        """
        if self.sample is not None:
            held = range(self.first_class, self.first_class + len(self.weight))
            self.sample.draw(step, held, self.weight.device)

    def _terms(self, embeddings: Embeddings, labels: Labels, chosen: slice) -> Float[Tensor, " rows"]:
        compared = self._compare(embeddings[chosen], labels[chosen])
        return self._cross_entropy(compared, self._harder(compared.own), labels)

    def _cross_entropy(
        self, compared: Compared, harder: Float[Tensor, " rows"], labels: Labels
    ) -> Float[Tensor, " rows"]:
        """The term of each row.

        Args:
            compared: the rows and their similarities.
            harder: the similarity of each row to its own template, reduced by the margin.
            labels: the classes of the whole batch.
        """
        scaled = compared._replace(rows=self.scale * compared.rows)
        if self.sample is not None and self.training:
            scaled = self._sampled(scaled, self.sample, labels)
            others = over_tiles(_log_sum_exp, *scaled).logsumexp(1)
        else:
            others = over_tiles(self._log_sum_exp, *scaled).logsumexp(1)
        if self._parts is not None:
            highest = self._parts.highest(others)
            others = self._parts.sum((others - highest).exp()).log() + highest
        excess = others - self.scale * harder
        return torch.logaddexp(excess, torch.zeros_like(excess))

    def logits(self, embeddings: Float[Tensor, "rows dim"]) -> Float[Tensor, "rows held"]:
        """The logits without a margin, one for each template held here."""
        templates = self.weight.to(embeddings.dtype)
        return self.scale * similarities(self._of_rows(embeddings), self._of_templates(templates))

    def _harder(self, similarities: Float[Tensor, " rows"]) -> Float[Tensor, " rows"]:
        """The similarity to the own template, reduced by the margin."""
        return similarities

    def _log_sum_exp(self, rows: Rows, templates: Templates, places: Places, own: RowValues) -> RowValues:
        return _log_sum_exp(rows, self._of_templates(templates), places, own)

    def _sampled(self, compared: Compared, sample: ClassSample, labels: Labels) -> Compared:
        """The rows with the templates of the drawn classes and of the batch's, each once.

        Their number depends on the batch's size alone, so that nothing waits for a device: a column that multiplies 1
        takes the templates out that another worker holds or that occur a second time.
        """
        if sample.places is None:
            name = type(self).__name__
            raise RuntimeError(f"{name}: no classes were drawn; before each step call draw_classes(step)")
        templates, num_held = compared.templates, len(compared.templates)
        of_batch, is_held = self._places(labels)
        is_first = is_held & (classes_of(labels).occurrence == 0)
        # The column of each held class that is in the batch, and −1 at the others and at the end.
        rows = torch.arange(len(labels), device=labels.device)
        column = rows.new_full((num_held + 1,), -1)
        column = column.scatter(0, torch.where(is_first, of_batch, num_held), torch.where(is_first, rows, -1))
        is_drawn = (sample.places >= 0) & (column[sample.places] < 0)
        places = torch.cat([torch.where(is_first, of_batch, 0), sample.places.clamp(min=0)])
        chosen = self._of_templates(take_rows(templates, places))
        chosen = chosen.reshape(-1, self.sub_centres, compared.rows.shape[1])
        left_out = ~torch.cat([is_first, is_drawn]).unsqueeze(1).unsqueeze(2)
        bias = torch.zeros_like(chosen[:, :, :1]).masked_fill(left_out, _lowest(chosen))
        return compared._replace(
            rows=torch.cat([compared.rows, torch.ones_like(compared.rows[:, :1])], 1),
            templates=torch.cat([chosen, bias], 2).flatten(1),
            places=column[compared.places.clamp(-1, num_held)],
        )


def _log_sum_exp(rows: Rows, templates: Templates, places: Places, own: RowValues) -> RowValues:
    """The log Σ_{k ≠ y} exp(z_k) over the templates of a tile, which are as similarities use them."""
    logits = similarities(rows, templates)
    return without_own(logits, places, _lowest(logits)).logsumexp(1)


def _lowest(logits: Tensor) -> float:
    """A logit that counts as none; not −∞: a tile that holds only the own class would have no gradient."""
    return torch.finfo(logits.dtype).min / 2


class SoftmaxLoss(TemplateSoftmaxLoss):
    """Softmax on raw rows (NormFace, Eq. 1).

    Cross-entropy of the inner products with the templates, plus an optional bias for each class.

    The bias is a last column of the templates, which multiplies 1: it is drawn, decayed and sharded like them.

    Args:
        num_classes: n ≥ 2.
        dim: dimensions of the embeddings.
        bias: whether each class has a bias; with one, a longer row may make its own class less probable.
    """

    def __init__(self, num_classes: int, dim: int, bias: bool = False) -> None:
        super().__init__(num_classes, dim)
        self.bias = bias
        if bias:
            self.weight = nn.Parameter(torch.empty(num_classes, dim + 1).normal_(std=TEMPLATE_STD))

    def _of_rows(self, embeddings: Float[Tensor, "rows dim"]) -> Float[Tensor, "rows more"]:
        return torch.cat([embeddings, torch.ones_like(embeddings[:, :1])], 1) if self.bias else embeddings

    def _of_templates(self, templates: Float[Tensor, "some columns"]) -> Float[Tensor, "some columns"]:
        return templates


class L2SoftmaxLoss(TemplateSoftmaxLoss):
    """L2-softmax (Ranjan et al. 2017).

    Cross-entropy of s ⟨f̂, w_k⟩: features on a sphere of radius s, free templates.

    Args:
        num_classes: n ≥ 2.
        dim: dimensions of the embeddings.
        scale: s > 0, the radius that the features are scaled to.
    """

    def __init__(self, num_classes: int, dim: int, scale: float) -> None:
        super().__init__(num_classes, dim, scale)

    def _of_templates(self, templates: Float[Tensor, "some columns"]) -> Float[Tensor, "some columns"]:
        return templates


class ModifiedSoftmaxLoss(TemplateSoftmaxLoss):
    """Modified softmax (Liu et al. 2017).

    Cross-entropy of ⟨f, ŵ_k⟩: templates of length 1, free features (SphereFace's modified softmax).

    A row's own norm is its scale.

    Args:
        num_classes: n ≥ 2.
        dim: dimensions of the embeddings.
    """

    def __init__(self, num_classes: int, dim: int) -> None:
        super().__init__(num_classes, dim)

    def _of_rows(self, embeddings: Float[Tensor, "rows dim"]) -> Float[Tensor, "rows dim"]:
        return embeddings


class NormFaceLoss(TemplateSoftmaxLoss):
    """NormFace (Eq. 6).

    Cross-entropy of s cos θ_k.

    A learned scale starts at the least s for which Proposition 2's bound is no more than `reachable_loss`, so that
    the loss is not trapped above it.

    Args:
        num_classes: n ≥ 2.
        dim: dimensions of the embeddings.
        scale: s > 0, the factor on the cosines; None learns it.
        reachable_loss: the bound of Prop. 2 at which a learned s starts, > 0.
    """

    def __init__(self, num_classes: int, dim: int, scale: float | None = None, reachable_loss: float = 1e-3) -> None:
        check(scale is None or scale > 0, "scale", scale, "> 0, or None to learn it")
        super().__init__(num_classes, dim, 1.0 if scale is None else scale)
        largest = math.log(num_classes)
        check(0 < reachable_loss < largest, "reachable_loss", reachable_loss, f"in (0, {largest:.4g})")
        if scale is None:
            # The bound, solved for s.
            start = (num_classes - 1) / num_classes * math.log((num_classes - 1) / math.expm1(reachable_loss))
            self.scale = nn.Parameter(torch.tensor(start, device="cpu"))

    def lower_bound(self) -> float:
        """The lower bound of the loss at its scale (Proposition 2)."""
        return normalized_softmax_lower_bound(self.num_classes, self.current_scale)

    @property
    def current_scale(self) -> float:
        """s, learned or not; it waits for a GPU."""
        return self.scale.detach().item() if isinstance(self.scale, Tensor) else self.scale


class CrossEntropyLoss(Loss):
    """Cross-entropy of the embeddings as logits, with label smoothing.

    −Σ_k q_k log softmax(f)_k with q_k = (1 − ε) [k = y] + ε / n for n classes (Szegedy et al. 2016, section 7): the
    network has a classifier of its own.

    With the sizes of the classes it is the balanced softmax (Ren et al. 2020, Eq. 4): f + log π in place of f, with the
    shares π of the classes among the rows that are trained on. The logits f alone then classify rows of classes that
    are equally frequent, whatever π is.

    Args:
        label_smoothing: ε in [0, 1), the share of a label that is spread evenly over all classes.
        class_sizes: number of rows of each class that are trained on, ≥ 1; None takes the logits as they are.
    """

    _log_shares: Tensor | None

    def __init__(self, label_smoothing: float = 0.0, class_sizes: Sequence[int] | None = None) -> None:
        super().__init__()
        Range(ge=0, lt=1).check("label_smoothing", label_smoothing)
        self.label_smoothing = label_smoothing
        log_shares = None
        if class_sizes is not None:
            check(min(class_sizes, default=0) > 0, "class_sizes", list(class_sizes), "one row or more of each class")
            sizes = torch.tensor(class_sizes, dtype=torch.float64, device="cpu")
            log_shares = (sizes / sizes.sum()).log()
        self.register_buffer("_log_shares", log_shares, persistent=False)

    def compares(self, labels: Labels) -> Bool[Tensor, ""]:
        """Whether there is any row."""
        return labels.new_full((), len(labels) > 0, dtype=torch.bool)

    def _share(self, embeddings: Embeddings, labels: Labels, anchors: slice) -> Scalar:
        if len(labels) == 0:
            raise ValueError(f"CrossEntropyLoss needs one row or more: the batch is {list(embeddings.shape)}")
        require_classes("CrossEntropyLoss", labels, embeddings.shape[1])
        logits = embeddings[anchors]
        if self._log_shares is not None:
            if len(self._log_shares) != logits.shape[1]:
                sized = counted(len(self._log_shares), "class")
                raise ValueError(f"CrossEntropyLoss has the sizes of {sized}: the batch is {list(embeddings.shape)}")
            logits = logits + self._log_shares.to(logits.dtype)
        terms = functional.cross_entropy(logits, labels[anchors], label_smoothing=self.label_smoothing, reduction="sum")
        return terms / len(labels)
