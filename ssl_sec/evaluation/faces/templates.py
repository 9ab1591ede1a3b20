"""Templates: sets of images and video frames of one person that are compared as one (IJB-C, Maze et al. 2018).

A template's images come from media: photographs, or the frames of a video. So that a long video weighs no more than a
photograph, its faces are averaged first: t = Σ_m mean_{i in m} w_i x_i / ‖x_i‖ over the template's media m, then
t / ‖t‖. The weights w_i are 1, or lower for faces that are hard to see: InsightFace's evaluation takes ‖x_i‖, the
score of the face's detector, or their product.
"""

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from ssl_sec.errors import DataError, counted
from ssl_sec.evaluation.arrays import Embeddings, Labels, Scores, as_tensor, rounded, tiles, unit_rows


@torch.no_grad()
def pool_templates(
    embeddings: Embeddings, templates: Labels, media: Labels, weights: Scores | None = None
) -> tuple[Int64[Tensor, " templates"], Float[Tensor, "templates dim"]]:
    """The templates' numbers, ascending, and their pooled directions in float64.

    Args:
        embeddings: one row for each face, of any norm; a template with a row that is not finite is not finite.
        templates: the template of each face; any whole numbers.
        media: the medium of each face; any whole numbers; other templates may use the same.
        weights: weight of each face, ≥ 0; None: all are equal.

    Raises:
        DataError: the numbers of faces differ.
    """
    embeddings, templates, media = as_tensor(embeddings), as_tensor(templates), as_tensor(media)
    weights = torch.ones(len(embeddings)) if weights is None else as_tensor(weights)
    if not len(embeddings) == len(templates) == len(media):
        raise DataError(
            f"templates: {len(templates)} numbers of templates and {len(media)} of media for "
            f"{counted(len(embeddings), 'embedding')}"
        )
    if len(weights) != len(embeddings):
        raise DataError(f"templates: {counted(len(weights), 'weight')} for {counted(len(embeddings), 'embedding')}")
    ids, template = templates.long().to(embeddings.device).unique(return_inverse=True)
    numbers, medium = media.long().to(embeddings.device).unique(return_inverse=True)
    keys = template * len(numbers) + medium
    _, group, num_faces = keys.unique(return_inverse=True, return_counts=True)
    shares = (weights.to(embeddings.device).double() / num_faces[group]).unsqueeze(1)
    pooled = embeddings.new_zeros(len(ids), embeddings.shape[1], dtype=torch.float64)
    for rows in tiles(len(embeddings), 16384):
        pooled.index_add_(0, template[rows], shares[rows] * unit_rows(embeddings[rows].double()))
    return ids, unit_rows(pooled)


@torch.no_grad()
def template_scores(
    ids: Int64[Tensor, " templates"], pooled: Float[Tensor, "templates dim"], first: Labels, second: Labels
) -> Float[Tensor, " pairs"]:
    """The cosine of each pair of templates, computed in float64 and rounded to a multiple of 2⁻²⁴.

    Args:
        ids: numbers of the templates, ascending.
        pooled: pooled direction of each template.
        first: number of the first template of each pair.
        second: number of the second template of each pair.

    Raises:
        DataError: the numbers differ, or a pair names a template that has no face.
    """
    first, second = _positions(ids, first), _positions(ids, second)
    if len(first) != len(second):
        raise DataError(
            f"templates: {len(first)} first ones and {len(second)} second ones of the pairs; as many of each"
        )
    scores = pooled.new_empty(len(first), dtype=torch.float32)
    for pairs in tiles(len(first), 4096):
        scores[pairs] = rounded(torch.linalg.vecdot(pooled[first[pairs]], pooled[second[pairs]]))
    return scores


def _positions(ids: Int64[Tensor, " templates"], wanted: Labels) -> Int64[Tensor, " pairs"]:
    numbers = as_tensor(wanted).long().to(ids.device)
    positions = torch.searchsorted(ids, numbers)
    is_there = positions < len(ids)
    is_there[is_there.clone()] = ids[positions[is_there]] == numbers[is_there]
    if not is_there.all():
        missing = numbers[~is_there]
        raise DataError(f"templates: {len(missing)} of the pairs name one without a face, such as {int(missing[0])}")
    return positions
