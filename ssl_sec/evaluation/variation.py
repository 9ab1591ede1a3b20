"""The variation within classes: its covariances, and how far a rotation from one class to another moves it.

A row of class i is x = μ_i + σ with the class mean μ_i (SFT, Eq. 1); rows are unit rows, as SFT's are.
"""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from ssl_sec.evaluation.directions import (
    Distribution,
    checked_directions,
    class_means,
    distribution,
    within_class_energy,
)
from ssl_sec.losses.transform import rotation
from ssl_sec.seeding import derived_seed

# Shares of the means' energy at which r_w is measured; the paper names only the last.
ENERGIES = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)


@dataclass(frozen=True)
class ClassCovariances:
    """The covariances of some classes, in plain numbers for JSON (SFT, Fig. 2b and c).

    Attributes:
        classes: labels of the classes.
        sizes: number of rows of each class.
        diagonals: variance of each coordinate, ≥ 0, for each class.
        eigenvalues: eigenvalues of each class, descending; as many as all classes can have: the least size less one, or
            the dimension.
    """

    classes: list[int]
    sizes: list[int]
    diagonals: list[list[float]]
    eigenvalues: list[list[float]]


@dataclass(frozen=True)
class RotationShifts:
    """How far rotations between classes move the variation, and how far that lies in the span of the means.

    Attributes:
        shifts: ‖Aσ − σ‖ for drawn rows and other classes, in equal bins over [0, 2] (SFT, Fig. 6a).
        energies: shares of the means' energy.
        within_class_energies: r_w at each of them, in [0, 1] (SFT, Eq. 8 and Fig. 6c).
    """

    shifts: Distribution
    energies: list[float]
    within_class_energies: list[float]


def class_covariances(
    embeddings: Float[Tensor, "images dim"], labels: Int64[Tensor, " images"], num_classes: int = 4
) -> ClassCovariances:
    """The covariances of the largest classes, of the directions of their rows (SFT, Fig. 2).

    Args:
        embeddings: one row for each image, of any norm.
        labels: class of each image.
        num_classes: largest number of classes; only those with two rows or more, the first of equally large ones.

    Raises:
        DataError: for a row without a direction.
    """
    unit, labels = checked_directions(embeddings).double(), labels.cpu()
    classes, sizes = labels.unique(return_counts=True)
    chosen = sizes.argsort(descending=True, stable=True)[:num_classes]
    chosen = chosen[sizes[chosen] > 1]
    residuals = [unit[labels == classes[each]] - unit[labels == classes[each]].mean(0) for each in chosen]
    count = min([unit.shape[1], *(len(each) - 1 for each in residuals)])
    # The squared singular values of the residuals are the eigenvalues of their covariance, but for the number of rows.
    eigenvalues = [(torch.linalg.svdvals(each).square() / len(each))[:count] for each in residuals]
    return ClassCovariances(
        classes=classes[chosen].tolist(),
        sizes=sizes[chosen].tolist(),
        diagonals=[each.square().mean(0).tolist() for each in residuals],
        eigenvalues=[each.tolist() for each in eigenvalues],
    )


def relative_deviation(values: list[list[float]]) -> float:
    """The relative deviation of values at the same position: standard deviation over mean, averaged over positions.

    The paper calls eigenvalues of four classes different by "about 8 %" without saying how it measures that.

    Args:
        values: a list for each class, all of the same length.

    Returns:
        The deviation, ≥ 0; 0 if no position has a mean above 0.
    """
    columns = np.array(values)
    means = columns.mean(0)
    shares = columns.std(0)[means > 0] / means[means > 0]
    return float(shares.mean()) if len(shares) else 0.0


def rotation_shifts(
    embeddings: Float[Tensor, "images dim"], labels: Int64[Tensor, " images"], seed: int, num_draws: int = 10_000
) -> RotationShifts:
    """‖Aσ − σ‖ for drawn rows and classes, and r_w over the energy of the means (SFT, Section 4.2).

    A rotates the mean of the row's class to that of another (Eq. 4). Where the shift is 0, rotation and translation
    generate the same row (Prop. 2).

    Args:
        embeddings: one row for each image, of any norm.
        labels: class of each image.
        seed: seed of the draws.
        num_draws: number of draws of a row and another class, uniformly with replacement; the paper takes 10,000.

    Raises:
        DataError: for a row without a direction.
    """
    unit, labels = checked_directions(embeddings), labels.cpu()
    classes, means, numbers, _ = class_means(unit, labels)
    generator = torch.Generator().manual_seed(derived_seed(seed, "rotation shifts"))
    num_draws = num_draws if len(classes) > 1 else 0
    rows = torch.randint(max(len(unit), 1), (num_draws,), generator=generator)
    steps = torch.randint(1, max(len(classes), 2), (num_draws,), generator=generator)
    sources = numbers[rows]
    variations = unit[rows] - means[sources]
    turned = rotation(means[sources], means[(sources + steps) % max(len(classes), 1)])(variations)
    shifts = (turned - variations).norm(dim=1)
    return RotationShifts(
        shifts=distribution(shifts, 0.0, 2.0, 200),
        energies=list(ENERGIES),
        within_class_energies=[within_class_energy(unit, labels, energy) for energy in ENERGIES],
    )
