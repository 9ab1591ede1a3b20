"""Face identification: which person of a gallery is shown, if any?

BLUFR (Liao et al. 2014, "A Benchmark Study of Large-scale Unconstrained Face Recognition"; NormFace, Table 3) compares
all pairs of the test images of a trial, and identifies probes whose person may be missing from the gallery. MegaFace
(Kemelmacher-Shlizerman et al. 2016, "The MegaFace Benchmark"; SEC, Table 4) searches for one image of a person among up
to a million distractors.

Similarities are cosines, computed in float64 and rounded to multiples of 2⁻²⁴, so equal directions tie whatever their
norms. A tie counts against the probe, and so does a row that is not finite.
"""

from collections.abc import Iterable

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from ssl_sec.data.faces.lists import OpenSetTrial
from ssl_sec.errors import ConfigError, DataError, counted
from ssl_sec.evaluation.arrays import (
    Embeddings,
    Labels,
    Rows,
    as_labels,
    as_rows,
    as_tensor,
    require_same_dim,
    rounded,
    several,
    tiles,
    unit_rows,
)
from ssl_sec.evaluation.faces.roc import num_decisive, share_accepted
from ssl_sec.seeding import derived_seed


@torch.no_grad()
def all_pairs_tar_at_far(
    embeddings: Embeddings, labels: Labels, fars: Iterable[float], *, tile_size: int = 1024
) -> dict[float, float]:
    """True accept rate at each false accept rate over all pairs of images, exact: the verification rate of BLUFR.

    Besides the rows in float64 it keeps the scores of the genuine pairs and the highest scores of the impostors, about
    4 bytes · FAR · images² / 2, not the scores of all pairs.

    Args:
        embeddings: one row for each image, of any norm.
        labels: person on each image.
        fars: false accept rates, as for `tar_at_far`.
        tile_size: number of images that are compared with as many others at once.

    Raises:
        ConfigError: a FAR is outside [0, 1].
        DataError: the numbers of rows differ, or there are no pairs of one person or none of two.
    """
    fars, (rows, labels) = several("fars", fars, "rates"), _rows(embeddings, labels)
    sizes = labels.unique(return_counts=True)[1]
    num_genuine = int((sizes * (sizes - 1) // 2).sum())
    num_impostors = len(rows) * (len(rows) - 1) // 2 - num_genuine
    if num_genuine == 0 or num_impostors == 0:
        raise DataError(
            f"verification: {counted(num_genuine, 'genuine pair')} and {counted(num_impostors, 'impostor')}; 1 or "
            "more of each"
        )
    decisive = num_decisive(fars, num_impostors)
    genuine: list[Tensor] = []
    highest = rows.new_empty(0, dtype=torch.float32)
    for top in tiles(len(rows), tile_size):
        for left in tiles(len(rows), tile_size):
            if left.start < top.start:
                continue
            similarities = _similarities(rows[top], rows[left])
            is_pair = torch.ones_like(similarities, dtype=torch.bool)
            if left.start == top.start:
                is_pair.triu_(1)
            is_same = labels[top].unsqueeze(1) == labels[left]
            genuine.append(similarities[is_pair & is_same].nan_to_num(nan=-torch.inf))
            impostors = similarities[is_pair & ~is_same].nan_to_num(nan=torch.inf)
            if len(highest) == decisive:
                impostors = impostors[impostors > highest[-1]]
            highest = torch.cat([highest, impostors])
            highest = highest.topk(min(decisive, len(highest))).values
    return share_accepted(torch.cat(genuine), highest, num_impostors, fars)


@torch.no_grad()
def open_set_identification(
    embeddings: Embeddings, labels: Labels, trial: OpenSetTrial, fars: Iterable[float], *, tile_size: int = 1024
) -> dict[float, float]:
    """Detection and identification rate at rank 1 and each false accept rate (DIR@FAR of BLUFR), in [0, 1].

    An impostor, a probe whose person is not in the gallery, is accepted if its best similarity reaches the threshold. A
    genuine probe is identified if its person's image is accepted and is more similar to it than anyone else's.

    Args:
        embeddings: one row for each image, of any norm.
        labels: person on each image.
        trial: images of the gallery and of the probes.
        fars: false accept rates, shares of the impostors, as for `tar_at_far`.
        tile_size: probes compared with the gallery at once.

    Raises:
        ConfigError: a FAR is outside [0, 1].
        DataError: the numbers of rows differ, or the trial has no genuine probes or no impostors.
    """
    fars, (rows, labels) = several("fars", fars, "rates"), _rows(embeddings, labels)
    gallery, people = rows[trial.gallery.to(rows.device)], labels[trial.gallery.to(rows.device)]
    genuine: list[Tensor] = []
    impostors: list[Tensor] = []
    for probes in trial.probes.to(rows.device).split(tile_size):
        similarities = _similarities(rows[probes], gallery)
        is_mate = labels[probes].unsqueeze(1) == people
        is_genuine = is_mate.any(1)
        mate = similarities.masked_fill(~is_mate, -torch.inf).amax(1)
        other = similarities.masked_fill(is_mate, -torch.inf).amax(1)
        # A comparison with NaN is never true.
        genuine.append(mate.masked_fill(~(mate > other), -torch.inf)[is_genuine])
        impostors.append(other[~is_genuine].nan_to_num(nan=torch.inf))
    detected = torch.cat([rows.new_empty(0, dtype=torch.float32), *genuine])
    accepted = torch.cat([rows.new_empty(0, dtype=torch.float32), *impostors])
    if len(detected) == 0 or len(accepted) == 0:
        raise DataError(
            f"identification: {counted(len(detected), 'genuine probe')} and {counted(len(accepted), 'impostor')}; 1 "
            "or more each"
        )
    highest = accepted.topk(num_decisive(fars, len(accepted))).values
    return share_accepted(detected, highest, len(accepted), fars)


def random_open_set_trials(
    labels: Labels, seed: int, *, num_trials: int, num_gallery: int, num_training_people: int
) -> list[OpenSetTrial]:
    """Trials drawn like those of BLUFR, for use without its published lists.

    Each trial excludes some people, on whom BLUFR allows training. Of the others, `num_gallery` with two images or more
    have one in the gallery. Their other images are genuine probes; the images of everyone else are impostors.

    Args:
        labels: person on each image.
        seed: seed of the draws; a trial does not depend on the number of trials.
        num_trials: number of trials to draw.
        num_gallery: number of people in the gallery.
        num_training_people: number of people who are excluded from each trial.

    Raises:
        DataError: there are too few people with two images.
    """
    people, person = as_tensor(labels).cpu().unique(return_inverse=True)
    trials: list[OpenSetTrial] = []
    for number in range(num_trials):
        generator = torch.Generator().manual_seed(derived_seed(seed, "open-set trial", number))
        tested = torch.randperm(len(people), generator=generator)[num_training_people:]
        counts = person.bincount(minlength=len(people))
        known = tested[counts[tested] > 1][:num_gallery]
        if len(known) < num_gallery:
            raise DataError(
                f"open-set trials: found {counted(len(known), 'person')} with two images or more beside the "
                f"{num_training_people} "
                f"of {len(people)} who are left out (num_training_people), must be num_gallery = {num_gallery} or more"
            )
        images = torch.randperm(len(person), generator=generator)
        images = images[person[images].argsort(stable=True)]
        first_of_person = counts.cumsum(0) - counts
        gallery = images[first_of_person[known]].sort().values
        is_probe = torch.isin(person, tested)
        is_probe[gallery] = False
        trials.append(OpenSetTrial(gallery, is_probe.nonzero().squeeze(1)))
    return trials


@torch.no_grad()
def rank_1_identification(
    probes: Embeddings, labels: Labels, distractors: Iterable[Rows], sizes: Iterable[int], *, tile_size: int = 2048
) -> dict[int, float]:
    """Rank-1 identification rates of MegaFace, in [0, 1]: {number of distractors: rate}.

    For every ordered pair of images of one person, the second is put among the distractors and the first searches for
    it: it is found if no distractor is at least as similar. The rate is the share of the pairs that are found.

    The distractors are read once. They are compared in float32, and again in float64 if rounding leaves a comparison
    undecided, as it always does for a collapsed encoder.

    Args:
        probes: one row for each image of the people to identify (FaceScrub), of any norm.
        labels: person on each probe.
        distractors: chunks of embeddings of other people. A size takes that many from the start, so the subsets are
            nested; `shuffled` draws an order.
        sizes: numbers of distractors to report, each ≥ 1.
        tile_size: probes compared with twice as many distractors at once.

    Raises:
        ConfigError: a size is below 1.
        DataError: the numbers of probes or of dimensions differ, no person has two images, or there are too few
            distractors.
    """
    sizes = sorted(set(several("sizes", sizes, "numbers")))
    if not sizes or sizes[0] < 1:
        raise ConfigError(f"identification: found {sizes} distractors, must be one number or more, each ≥ 1")
    rows, labels = _rows(probes, labels)
    if len(labels.unique()) == len(labels):
        raise DataError(f"identification: {counted(len(labels), 'probe')}, no two of one person")
    nearest = rows.new_full((len(rows),), -torch.inf, dtype=torch.float32)
    rates: dict[int, float] = {}
    stream, pending, seen = iter(distractors), rows[:0], 0
    for size in sizes:
        while seen < size:
            while len(pending) == 0:
                chunk = next(stream, None)
                if chunk is None:
                    raise DataError(f"identification: {counted(seen, 'distractor')}, must be {size} or more")
                pending = as_rows(chunk)
                require_same_dim("identification, probes and distractors", rows, pending)
            taken, pending = pending[: size - seen], pending[size - seen :]
            seen += len(taken)
            for columns in taken.split(2 * tile_size):
                _keep_nearest(nearest, rows, unit_rows(columns.to(rows)), tile_size)
        rates[size] = _rate(rows, labels, nearest, tile_size)
    return rates


def shuffled(num_distractors: int, seed: int) -> Int64[Tensor, " distractors"]:
    """An order of the distractors that is a function of `seed`, on the CPU; a subset is its beginning."""
    generator = torch.Generator().manual_seed(derived_seed(seed, "distractors"))
    return torch.randperm(num_distractors, generator=generator)


def _rows(embeddings: Embeddings, labels: Labels) -> tuple[Float[Tensor, "images dim"], Int64[Tensor, " images"]]:
    """Directions in float64, and labels on their device."""
    embeddings, labels = as_rows(embeddings), as_labels("identification", labels)
    if len(labels) != len(embeddings):
        raise DataError(f"identification: {counted(len(labels), 'label')} for {counted(len(embeddings), 'embedding')}")
    return unit_rows(embeddings.double()), labels.to(embeddings.device)


def _similarities(rows: Float[Tensor, "rows dim"], others: Float[Tensor, "others dim"]) -> Float[Tensor, "rows others"]:
    return rounded(rows @ others.T)


def _keep_nearest(
    nearest: Float[Tensor, " probes"],
    rows: Float[Tensor, "probes dim"],
    distractors: Float[Tensor, "distractors dim"],
    tile_size: int,
) -> None:
    """Updates the similarity of each probe's nearest distractor, if one of these is nearer."""
    rough = distractors.float()
    # As in retrieval: the largest error of an inner product in float32 by rounding, including that of its rows.
    margin = (rows.shape[1] + 4) * torch.finfo(torch.float32).eps
    for tile in tiles(len(rows), tile_size):
        closest = (rows[tile].float() @ rough.T).amax(1)
        # NaN is undecided, as no comparison with it holds.
        is_open = (~(closest < nearest[tile] - margin)).nonzero().squeeze(1) + tile.start
        if len(is_open):
            similarities = _similarities(rows[is_open], distractors).nan_to_num(nan=torch.inf)
            nearest[is_open] = nearest[is_open].maximum(similarities.amax(1))


def _rate(
    rows: Float[Tensor, "probes dim"],
    labels: Int64[Tensor, " probes"],
    nearest: Float[Tensor, " probes"],
    tile_size: int,
) -> float:
    num_found, num_pairs = 0, 0
    for tile in tiles(len(rows), tile_size):
        similarities = _similarities(rows[tile], rows)
        is_mate = labels[tile].unsqueeze(1) == labels
        is_mate[:, tile].fill_diagonal_(False)
        num_pairs += int(is_mate.sum())
        num_found += int((is_mate & (similarities > nearest[tile].unsqueeze(1))).sum())
    return num_found / num_pairs
