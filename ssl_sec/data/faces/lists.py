"""The lists of face test sets in their published layouts: which images are compared.

They name images, videos or templates and hold indices; no image is opened.
"""

import csv
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float64, Int64
from torch import Tensor

from ssl_sec.data.faces.reading import is_number, read_matlab, read_text
from ssl_sec.data.folders.listing import display
from ssl_sec.errors import DataError, MissingDataError, counted, first_line, printable

# x and y of five points.
COORDINATES = tuple(f"{axis}{point}" for point in range(1, 6) for axis in "xy")


class TemplateFaces(NamedTuple):
    """The faces of IJB-C's templates.

    Attributes:
        paths: names of the images.
        templates: number of the template of each image.
        media: number of the medium of each image, a photograph or a video.
    """

    paths: tuple[str, ...]
    templates: Int64[Tensor, " faces"]
    media: Int64[Tensor, " faces"]


class DetectedFaces(NamedTuple):
    """Faces that a detector found.

    Attributes:
        paths: names of the images, one face in each.
        points: x and y of the eyes, the nose and the corners of the mouth, in pixels.
        scores: how sure the detector is of each face, ≥ 0.
    """

    paths: tuple[str, ...]
    points: Float64[Tensor, "faces 5 2"]
    scores: Float64[Tensor, " faces"]


class TemplatePairs(NamedTuple):
    """Pairs of templates, by number, and whether they are of one person."""

    first: Int64[Tensor, " pairs"]
    second: Int64[Tensor, " pairs"]
    same: Bool[Tensor, " pairs"]


class VideoPairs(NamedTuple):
    """Pairs of videos.

    Attributes:
        videos: names of the videos, in the order in which pairs name them.
        first: position in `videos` of the first video of each pair.
        second: position in `videos` of the second video of each pair.
        same: whether both videos of a pair show one person.
        folds: number of the fold of each pair.
    """

    videos: tuple[str, ...]
    first: Int64[Tensor, " pairs"]
    second: Int64[Tensor, " pairs"]
    same: Bool[Tensor, " pairs"]
    folds: Int64[Tensor, " pairs"]

    @property
    def people(self) -> frozenset[str]:
        """Names of the folders that hold the videos, as training sets name their classes."""
        return frozenset(display(video.rpartition("/")[0]) for video in self.videos) - {""}


class MegaFaceList(NamedTuple):
    """Images of MegaFace.

    Attributes:
        paths: names of the images.
        ids: names of the people, one for each image; empty if the list has none, as lists of distractors may.
    """

    paths: tuple[str, ...]
    ids: tuple[str, ...]


class OpenSetTrial(NamedTuple):
    """Indices of the images of a trial of open-set identification.

    Attributes:
        gallery: indices of images of known people.
        probes: indices of images to look up, of people in the gallery (genuine) and of others (impostors).
    """

    gallery: Int64[Tensor, " gallery"]
    probes: Int64[Tensor, " probes"]


class OpenSetProtocol(NamedTuple):
    """BLUFR's lists.

    Attributes:
        images: names of all images.
        labels: number of the person on each image.
        trials: the ten trials.
    """

    images: tuple[str, ...]
    labels: Int64[Tensor, " images"]
    trials: tuple[OpenSetTrial, ...]


def read_template_faces(path: str | Path) -> TemplateFaces:
    """IJB-C's `ijbc_face_tid_mid.txt`, or IJB-B's: image, template and medium in each line, separated by spaces.

    Raises:
        MissingDataError: there is no such file.
        DataError: a line is malformed; the message names it.
    """
    names, templates, media = _columns(path, {"image": str, "template": int, "medium": int})
    return TemplateFaces(tuple(names.to_pylist()), _tensor(templates), _tensor(media))


def read_detected_faces(path: str | Path) -> DetectedFaces:
    """InsightFace's `ijbc_name_5pts_score.txt`: image, x and y of five points, and score, separated by spaces.

    Raises:
        MissingDataError: there is no such file.
        DataError: a line is malformed, or has a number that is not finite or a negative score.
    """
    names, *columns = _columns(path, {"image": str, **dict.fromkeys([*COORDINATES, "score"], float)})
    numbers = torch.stack([_tensor(column) for column in columns], dim=1)
    is_wrong = ~numbers.isfinite().all(1) | (numbers[:, -1] < 0)
    if is_wrong.any():
        row = int(is_wrong.nonzero()[0])
        found = "a negative score" if numbers[row].isfinite().all() else "a number that is not finite"
        raise DataError(f"{printable(str(path))} line {row + 1}: {found}")
    return DetectedFaces(tuple(names.to_pylist()), numbers[:, :10].reshape(-1, 5, 2), numbers[:, 10])


def read_template_pairs(path: str | Path) -> TemplatePairs:
    """IJB-C's `ijbc_template_pair_label.txt`, or IJB-B's: two templates in each line, and 1 for one person or 0.

    Raises:
        MissingDataError: there is no such file.
        DataError: a line is malformed; the message names it.
    """
    columns = _columns(path, {"first": int, "second": int, "label": int})
    first, second, label = (_tensor(column) for column in columns)
    is_wrong = (label != 0) & (label != 1)
    if is_wrong.any():
        number = int(is_wrong.nonzero()[0])
        raise DataError(f"{printable(str(path))} line {number + 1}: label {int(label[number])}; allowed: 0, 1")
    return TemplatePairs(first, second, label == 1)


def read_video_pairs(path: str | Path) -> VideoPairs:
    """YouTube Faces' `splits.txt`: a header, then lines of split, number in it, two videos, and 1 for one person or 0.

    Raises:
        MissingDataError: there is no such file.
        DataError: a line is malformed; the message names it.
    """
    printed = printable(str(path))
    positions: dict[str, int] = {}
    pairs: list[tuple[int, int, int, int]] = []
    rows = csv.reader(read_text(Path(path)).rstrip().splitlines(), skipinitialspace=True, quoting=csv.QUOTE_NONE)
    for number, row in enumerate(rows, start=1):
        fields = [field.strip() for field in row]
        if number == 1:
            if fields and is_number(fields[0]):
                raise DataError(f"{printed} line 1: found a pair, must be a header: split, number, first, second, same")
            continue
        if len(fields) != 5:
            raise DataError(f"{printed} line {number}: {counted(len(fields), 'field')} found, 5 expected")
        split, _, first, second, same = fields
        if not is_number(split):
            raise DataError(f"{printed} line {number}: split {printable(split)!r}; allowed: whole numbers")
        if same not in ("0", "1"):
            raise DataError(f"{printed} line {number}: same is {printable(same)!r}; allowed: 0, 1")
        if first == second:
            raise DataError(f"{printed} line {number}: {printable(first)} is compared with itself")
        first, second = (positions.setdefault(video, len(positions)) for video in (first, second))
        pairs.append((first, second, int(same), int(split)))
    if not pairs:
        raise DataError(f"{printed}: no pairs")
    first, second, same, folds = torch.tensor(pairs).unbind(1)
    return VideoPairs(tuple(positions), first, second, same == 1, folds)


def read_megaface_list(path: str | Path) -> MegaFaceList:
    """A list of MegaFace's development kit, JSON: {"path": [images], "id": [their people]}.

    Raises:
        MissingDataError: there is no such file.
        DataError: the file is not such a list.
    """
    printed = printable(str(path))
    try:
        content = json.loads(read_text(Path(path)))
    except (json.JSONDecodeError, RecursionError) as error:
        raise DataError(f"{printed}: no JSON: {first_line(error)}") from error
    if not isinstance(content, dict) or not _are_names(content.get("path")) or not _are_names(content.get("id", [])):
        raise DataError(f'{printed}: not a list of images; expected {{"path": [names], "id": [names]}}')
    paths, ids = content["path"], content.get("id", [])
    if ids and len(ids) != len(paths):
        raise DataError(f"{printed}: {counted(len(paths), 'image')} and the people of {len(ids)}")
    return MegaFaceList(tuple(paths), tuple(ids))


def read_blufr(path: str | Path) -> OpenSetProtocol:
    """BLUFR's `blufr_lfw_config.mat`: the images of LFW and ten trials, the indices of each in a cell.

    Raises:
        MissingDataError: there is no such file.
        DataError: the file is damaged, or an index is outside the list of images.
    """
    printed = printable(str(path))
    names = ("imageList", "labels", "galIndex", "probIndex")
    content = read_matlab(Path(path), names)
    missing = [name for name in names if name not in content]
    if missing:
        raise DataError(f"{printed}: no {', '.join(missing)}; needed is blufr_lfw_config.mat")
    images = tuple(str(name) for name in np.atleast_1d(content["imageList"]))
    labels = _whole_numbers(content["labels"], printed, "labels")
    if len(labels) != len(images):
        raise DataError(f"{printed}: {counted(len(labels), 'label')} for {counted(len(images), 'image')}")
    galleries, probes = (np.atleast_1d(content[name]) for name in names[2:])
    if len(galleries) != len(probes):
        raise DataError(f"{printed}: galIndex has {counted(len(galleries), 'trial')} and probIndex {len(probes)}")
    trials: list[OpenSetTrial] = []
    for cells in zip(galleries, probes, strict=True):
        # MATLAB counts from 1.
        indices = [_whole_numbers(cell, printed, name) - 1 for cell, name in zip(cells, names[2:], strict=True)]
        for chosen, name in zip(indices, names[2:], strict=True):
            outside = chosen[(chosen < 0) | (chosen >= len(images))]
            if len(outside):
                raise DataError(f"{printed}: {name} has {int(outside[0]) + 1}; allowed: 1 to {len(images)}")
        trials.append(OpenSetTrial(*indices))
    return OpenSetProtocol(images, labels, tuple(trials))


def _columns(path: str | Path, types: dict[str, type[str] | type[int] | type[float]]) -> list[Any]:
    """The columns of a table without a header whose fields are separated by single spaces, as Arrow arrays."""
    import pyarrow as pa
    from pyarrow import csv as table

    if not Path(path).is_file():
        raise MissingDataError(f"{printable(str(path))}: not there")
    arrow = {str: pa.string(), int: pa.int64(), float: pa.float64()}
    arrow_types = {name: arrow[kind] for name, kind in types.items()}
    try:
        found = table.read_csv(
            path,
            # Errors give the number of a malformed line only with a single thread.
            table.ReadOptions(column_names=list(types), use_threads=False),
            table.ParseOptions(delimiter=" ", quote_char=False, ignore_empty_lines=False),
            table.ConvertOptions(column_types=arrow_types, null_values=[]),
        )
    except (OSError, pa.ArrowInvalid) as error:
        where, problem = printable(str(path)), first_line(error)
        if row := re.search(r"Row #(\d+): ", problem):
            where, problem = f"{where} line {row[1]}", problem[row.end() :]
        raise DataError(f"{where}: {problem}") from error
    return found.columns


def _tensor(column: Any) -> Int64[Tensor, " rows"] | Float64[Tensor, " rows"]:
    return torch.from_numpy(column.to_numpy().copy())


def _are_names(values: object) -> bool:
    return isinstance(values, Sequence) and not isinstance(values, str) and all(isinstance(v, str) for v in values)


def _whole_numbers(values: object, printed: str, name: str) -> Int64[Tensor, " _"]:
    numbers = np.atleast_1d(np.asarray(values))
    if numbers.dtype.kind not in "iuf" or numbers.ndim != 1 or not np.array_equal(numbers, np.rint(numbers)):
        raise DataError(f"{printed}: {name} are not whole numbers")
    return torch.from_numpy(numbers.astype(np.int64))
