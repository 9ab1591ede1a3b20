"""Training images that a list leaves out: near-duplicates, images with a wrong label, and others that one has found.

A list is a Parquet or CSV table with the column `row`, the number of an image among those that `jobs.embed` embeds, and
perhaps `split`, `path` and `label`, as the tables of `jobs.embed` and `jobs.neighbours` have them.
"""

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from jaxtyping import Int64

from ssl_sec.collectives import rank
from ssl_sec.data.encoded_images import DecodedImages
from ssl_sec.data.image_set import ImageSet, ResidentImages, subset
from ssl_sec.errors import DataError, counted, printable

if TYPE_CHECKING:
    import pyarrow as pa

    from ssl_sec.data.shards.locations import File

logger = logging.getLogger("ssl_sec.data")

_COLUMNS = ("row", "split", "path", "label", "neighbour_row")
# Listed images whose names are compared with those of the set.
_NAMES_COMPARED = 10_000
_KEYS = "data.leave_out gives the lists"


def without_listed(image_set: ImageSet, locations: Sequence[str]) -> ImageSet:
    """A view of a training set without the listed images.

    Listed images of another split than `train` are ignored; without a column `split`, all are training images.

    Args:
        image_set: all training images.
        locations: paths, globs or fsspec URLs of the lists; the set itself is returned if there are none.

    Raises:
        MissingDataError: a list does not exist.
        DataError: a list cannot be read, is not of these images, or leaves none.
    """
    if not locations:
        return image_set
    from ssl_sec.data.shards.locations import find_files  # fsspec, which few sets need

    is_kept, places = torch.ones(len(image_set), dtype=torch.bool), _places(image_set)
    for file in find_files(locations, "list", _KEYS):
        is_kept[torch.from_numpy(_listed_places(file, image_set, places))] = False
    num_left_out = int((~is_kept).sum())
    if num_left_out == len(image_set):
        raise DataError(f"data.leave_out: the whole of {image_set.name} is listed, {counted(len(image_set), 'image')}")
    if rank() == 0:
        logger.info("%s: data.leave_out leaves out %d of %d images", image_set.name, num_left_out, len(image_set))
    if not num_left_out:
        return image_set
    return subset(image_set, is_kept.nonzero().flatten(), f"without {num_left_out:,} listed in data.leave_out")


def require_lists(locations: Sequence[str]) -> None:
    """Checks that lists can be read and have rows, as far as that is known without the images.

    Raises:
        DataError: one cannot be read, or lists no images.
    """
    if not locations:
        return
    from ssl_sec.data.shards.locations import find_files

    for file in find_files(locations, "list", _KEYS):
        _listed(file)


def _places(image_set: ImageSet) -> Int64[np.ndarray, " rows"]:
    """The index of each image in the set by its row in lists, which count unreadable ones; -1 for those.

    Raises:
        DataError: unreadable images were left out of a set that was then divided, so that the rows are not known.
    """
    if not isinstance(image_set, ResidentImages) or image_set.numbers is None:
        return np.arange(len(image_set))
    if image_set.rows is not None:
        raise DataError(
            f"data.leave_out: found {counted(image_set.num_bad_images, 'unreadable image')} in {image_set.name}, by "
            "which the rows of the others have changed; with data.resident_limit_mib=0 they are as listed"
        )
    places = np.full(len(image_set) + image_set.num_bad_images, -1)
    places[image_set.numbers.numpy()] = np.arange(len(image_set))
    return places


def _listed_places(
    file: "File", image_set: ImageSet, places: Int64[np.ndarray, " rows"]
) -> Int64[np.ndarray, " listed"]:
    """The indices of the training images in a list, without unreadable ones.

    Raises:
        DataError: it cannot be read, or is not of these images.
    """
    where = _where(file)
    table = _listed(file)
    rows = table["row"].to_numpy().astype(np.int64)
    wrong = (rows < 0) | (rows >= len(places))
    if wrong.any():
        raise DataError(
            f"{where}: found row {rows[wrong][0]}; {image_set.name} has the rows 0 to {len(places) - 1}: "
            "the list is of other images"
        )
    found = places[rows]
    table, found = table.filter(found >= 0), found[found >= 0]
    _require_same(table, found, "label", lambda place: int(image_set.labels[place]), where, image_set)
    if isinstance(image_set, DecodedImages):
        _require_same(table, found, "path", lambda place: _last(image_set.image_name(place)), where, image_set)
    return found


def _where(file: "File") -> str:
    return f"data.leave_out: {printable(file[1])}"


def _listed(file: "File") -> "pa.Table":
    """The training images in a list, each with its row."""
    import pyarrow as pa

    where = _where(file)
    table = _read(file)
    if "row" not in table.column_names:
        raise DataError(f"{where}: found no column 'row', the numbers of the images, as jobs.embed writes it")
    if "neighbour_row" in table.column_names:
        raise DataError(
            f"{where}: found pairs of images, must be a list of images; jobs.neighbours lists those that others make "
            "redundant in redundant.parquet"
        )
    if "split" in table.column_names:
        splits = table["split"].cast(pa.string()).fill_null("").to_numpy()  # CSV has no null in strings
        table = table.filter(pa.array((splits == "train") | (splits == "")))
    column = table["row"]
    if column.null_count or (len(column) and not pa.types.is_integer(column.type)):
        found = "empty entries" if column.null_count else column.type
        raise DataError(f"{where}: found {found} in the column 'row', must be whole numbers")
    return table


def _read(file: "File") -> "pa.Table":
    import pyarrow.csv
    import pyarrow.parquet

    from ssl_sec.data.shards.locations import one_line

    file_system, path = file
    with one_line(f"data.leave_out: {path}", keys=_KEYS), file_system.open(path) as opened:
        if path.endswith(".csv"):
            table = pyarrow.csv.read_csv(cast(Any, opened))
            return table.select([name for name in _COLUMNS if name in table.column_names])
        parquet = pyarrow.parquet.ParquetFile(cast(Any, opened))
        return parquet.read([name for name in _COLUMNS if name in parquet.schema_arrow.names])


def _require_same(
    table: "pa.Table",
    places: Int64[np.ndarray, " listed"],
    column: str,
    of_set: Callable[[int], object],
    where: str,
    image_set: ImageSet,
) -> None:
    """Refuses a list whose images have other labels or file names than those of the set; some of them are compared."""
    if column not in table.column_names or not len(places):
        return
    for number in range(0, len(places), -(-len(places) // _NAMES_COMPARED)):
        listed, found = table[column][number].as_py(), of_set(int(places[number]))
        if listed in (None, "") or isinstance(listed, str) != isinstance(found, str):
            continue
        listed = _last(listed) if isinstance(listed, str) else listed
        if listed != found:
            raise DataError(
                f"{where}: found {column} {listed!r} at row {table['row'][number]}, where {image_set.name} has "
                f"{found!r}: the list is of other images"
            )


def _last(path: str) -> str:
    return path.rpartition("/")[2]
