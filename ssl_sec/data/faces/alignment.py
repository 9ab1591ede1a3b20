"""Alignment of faces by five points: the eyes, the tip of the nose and the corners of the mouth.

The points are turned, scaled and moved to those of a mean face of 112 x 112 pixels (ArcFace, Deng et al., 2019) by the
similarity transform of least squares (Umeyama, 1991), and the image with them: bilinearly, and black beyond its
borders. A point (x, y) is in pixels to the right and down; (0, 0) is the centre of the first pixel. The image is
upright, as its EXIF orientation turns it.
"""

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
from jaxtyping import Float64
from PIL import Image

from ssl_sec.data.decode import decode_image
from ssl_sec.data.faces.lists import COORDINATES, read_detected_faces
from ssl_sec.data.faces.reading import rows_by_name
from ssl_sec.errors import DataError, MissingDataError, StorageError, first_line, printable
from ssl_sec.files import replaced

ALIGNED_SIZE_PX = 112

# Left and right eye as the viewer sees them, nose, left and right corner of the mouth.
REFERENCE_POINTS = np.array(
    [(38.2946, 51.6963), (73.5318, 51.5014), (56.0252, 71.7366), (41.5493, 92.3655), (70.7299, 92.2041)]
)

# Formats of aligned images that keep their names; other names get .png appended.
FORMATS = {".jpg": "JPEG", ".jpeg": "JPEG", ".png": "PNG"}


@dataclass(frozen=True, kw_only=True)
class Landmarks:
    """The five points of many faces.

    Attributes:
        points: x and y of each point of each face, in pixels.
        rows: row in `points` of each image, by its path relative to the folder of the images.
    """

    points: Float64[np.ndarray, "faces 5 2"]
    rows: dict[str, int]


@dataclass(frozen=True, kw_only=True)
class FaceAlignment:
    """Cuts a face out of an image.

    Attributes:
        transform: transform of the image, from `similarity_transform` to the REFERENCE_POINTS.
        name: name of the image in errors.
    """

    transform: Float64[np.ndarray, "2 3"]
    name: str = "image"

    @property
    def size_px(self) -> int:
        """Side of the result."""
        return ALIGNED_SIZE_PX

    def __call__(self, image: Image.Image, draw: int | None = None) -> Image.Image:
        """The aligned face, whatever the draw.

        Raises:
            DataError: the centre of the points is not on the image.
        """
        back = np.linalg.inv(np.vstack([self.transform, (0, 0, 1)]))[:2]
        x, y = back @ (*REFERENCE_POINTS.mean(axis=0), 1)  # the mean of the points
        if not (-0.5 <= x <= image.width - 0.5 and -0.5 <= y <= image.height - 0.5):
            raise DataError(
                f"{printable(self.name)}: the points are around ({x:.0f}, {y:.0f}), but the upright image has "
                f"{image.width} x {image.height} pixels"
            )
        # In Pillow, (0, 0) is a pixel's corner: (x, y) is at (x + 0.5, y + 0.5) in both images.
        back[:, 2] += 0.5 - back[:, :2].sum(axis=1) * 0.5
        # Pillow cuts grey levels off instead of rounding them, so that 1e-14 of a pixel may darken it by one.
        back = back.round(9)
        size = (self.size_px, self.size_px)
        return image.transform(size, Image.Transform.AFFINE, tuple(back.flatten()), Image.Resampling.BILINEAR)


def similarity_transform(
    points: Float64[np.ndarray, "points 2"], targets: Float64[np.ndarray, "points 2"]
) -> Float64[np.ndarray, "2 3"]:
    """The similarity transform that brings points nearest to others in least squares.

    With the centred points X and targets Y and the singular value decomposition YᵀX / n = U diag(d) Vᵀ, the rotation is
    R = U S Vᵀ, the scale c = tr(diag(d) S) / σ²(X) and the translation t = mean(y) − c R mean(x); S = diag(1, ±1) keeps
    R from reflecting (Umeyama, 1991, Eqs. 40-43).

    Args:
        points: x and y of the points to move, two or more.
        targets: x and y of the target of each point.

    Returns:
        [c R, t], to be applied to (x, y, 1).

    Raises:
        DataError: no scale above 0 is best, for example if all points are equal.
    """
    mean, target_mean = points.mean(axis=0), targets.mean(axis=0)
    centred = points - mean
    variance = (centred**2).sum(axis=1).mean()
    left, singular_values, right = np.linalg.svd((targets - target_mean).T @ centred / len(points))
    signs = np.array([1.0, np.sign(np.linalg.det(left) * np.linalg.det(right))])
    scaled = (singular_values * signs).sum()
    if variance <= 0 or scaled <= 1e-9 * variance:
        raise DataError("the points are not those of a face: no rotation brings them close to the template")
    rotation = (left * signs) @ right
    linear = scaled / variance * rotation
    return np.column_stack([linear, target_mean - linear @ mean])


def read_landmarks(path: Path) -> Landmarks:
    """The points of a CSV file with the columns path, x1, y1, …, x5, y5, or of a list of InsightFace.

    The list has no names of columns: path, x and y of each point and the detector's score, separated by spaces.

    Raises:
        MissingDataError: there is no such file.
        DataError: a column is missing, a line is malformed, an image is named twice, or a number is not finite.
    """
    printed = printable(str(path))
    if _is_list(path):
        detected = read_detected_faces(path)
        return Landmarks(points=detected.points.numpy(), rows=rows_by_name(detected.paths, printed))
    types = {"path": pa.string(), **dict.fromkeys(COORDINATES, pa.float64())}
    try:
        table = pyarrow.csv.read_csv(
            path,
            # Errors name their row only with a single thread.
            pyarrow.csv.ReadOptions(use_threads=False),
            convert_options=pyarrow.csv.ConvertOptions(
                column_types=types, include_columns=list(types), null_values=[], strings_can_be_null=False
            ),
        )
    except FileNotFoundError:
        raise MissingDataError(f"{printed}: not there") from None
    except pa.ArrowKeyError as error:
        needed = "path, x1, y1, x2, y2, …, x5, y5"
        raise DataError(f"{printed}: {first_line(error).partition(' in ')[0]} is missing; needed: {needed}") from error
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{printed}: cannot be read: {first_line(error)}") from error
    points = np.stack([table[name].to_numpy() for name in COORDINATES], axis=1).reshape(-1, 5, 2)
    paths = table["path"].to_pylist()
    rows = rows_by_name(paths, printed)
    if not np.isfinite(points).all():
        row = int((~np.isfinite(points)).any(axis=(1, 2)).argmax())
        raise DataError(f"{printed}: {printable(paths[row])} has a point that is not finite")
    return Landmarks(points=points, rows=rows)


def _is_list(path: Path) -> bool:
    """Whether a file begins with a line of twelve fields that spaces separate, not commas."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            first = file.readline(4096)
    except OSError:
        return False
    return "," not in first and len(first.split(" ")) == 12


def aligned_path(path: str) -> str:
    """The path of the aligned image: the same, with .png added unless it is a JPEG or PNG."""
    return path if os.path.splitext(path)[1].lower() in FORMATS else f"{path}.png"


def align_file(source: Path, target: Path, points: Float64[np.ndarray, "5 2"]) -> None:
    """Saves the aligned face of an image; `target` appears when it is whole.

    Args:
        source: an image of any size.
        target: a path whose ending is one of FORMATS; its folder is created.
        points: points of the face in the upright image.

    Raises:
        DataError: the image cannot be read, or the points cannot be those of a face on it.
        StorageError: the result cannot be written.
    """
    name = str(source)
    try:
        alignment = FaceAlignment(transform=similarity_transform(points, REFERENCE_POINTS), name=name)
    except DataError as error:
        raise DataError(f"{printable(name)}: {error}") from error
    pixels = decode_image(source, name, 3, alignment)
    image = Image.fromarray(pixels.permute(1, 2, 0).numpy())
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with replaced(target, sync=False) as temporary:
            # Nearly lossless: decoded pixels are encoded again.
            image.save(temporary, FORMATS[target.suffix.lower()], quality=95, subsampling=0)
    except OSError as error:
        raise StorageError(f"{printable(str(target))}: cannot be written: {first_line(error)}") from error
