"""The files that paths, globs, ranges and fsspec URLs name."""

import itertools
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import fsspec
import torch
from fsspec import AbstractFileSystem
from jaxtyping import Bool
from torch import Tensor

from ssl_sec.data.image_set import Locations
from ssl_sec.data.shards.gallery import QueriesAndGallery
from ssl_sec.errors import DataError, MissingDataError, first_line, printable

File = tuple[AbstractFileSystem, str]

# A range of numbers as in the names of shards, {00..41}.
_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")
_KEYS = "set data.train and data.test, or data.query and data.gallery in place of data.test"


def find_files(locations: Locations, kind: str, keys: str = _KEYS) -> list[File]:
    """The files that paths, globs, ranges (`{000..041}`) or fsspec URLs name; those of a glob sorted.

    Args:
        locations: one or more locations.
        kind: kind of files, for errors.
        keys: which settings give them, for errors.

    Raises:
        MissingDataError: a path does not exist, or a glob matches nothing.
        DataError: the file system is unknown or does not answer, a range is empty, or a file is found twice.
    """
    found: list[File] = []
    given = [locations] if isinstance(locations, str | Path) else locations
    for location in itertools.chain.from_iterable(_in_range(str(one)) for one in given):
        _require_one(location)
        with one_line(location, keys=keys):
            file_system, path = fsspec.url_to_fs(location)
            # A file may have the characters of a glob in its name. Asking costs a request.
            is_glob = any(c in path for c in "*?[") and not file_system.exists(path)
            paths = sorted(map(str, file_system.glob(path))) if is_glob else [path]
        if not paths:
            raise MissingDataError(f"no {kind} file matches {location}; {keys}")
        found += [(file_system, path) for path in paths]
    if not found:
        raise MissingDataError(f"the list of {kind} files is empty; {keys}")
    addresses = set[str]()
    for file in found:
        if (address := _address(file)) in addresses:
            raise DataError(f"{printable(file[1])}: found twice in the list of {kind} files; allowed: each file once")
        addresses.add(address)
    return found


def require_apart(test_files: Sequence[File], train: Locations | None, kind: str) -> None:
    """Refuses test files that are training files, too.

    Args:
        test_files: the files of the test split.
        train: the locations of the training files, which need not exist; None if there are none.
        kind: kind of files, for errors.

    Raises:
        DataError: for the first such file.
    """
    trained_on = set[str]()
    if train is not None:
        with suppress(MissingDataError):
            trained_on.update(map(_address, find_files(train, kind)))
    for file in test_files:
        if _address(file) in trained_on:
            raise DataError(
                f"{printable(file[1])}: found in data.train and among the test files; allowed: test images that are "
                "not trained on"
            )


def query_mask(
    locations: Locations | QueriesAndGallery, num_images: Sequence[int], kind: str
) -> Bool[Tensor, " images"] | None:
    """Mask of the queries among the images of all files; None if each image is a query and in the gallery.

    Args:
        locations: where the files are.
        num_images: number of images of each file, those of the queries first.
        kind: kind of files, for errors.

    Raises:
        DataError: there are no queries, or none in the gallery.
    """
    if not isinstance(locations, QueriesAndGallery):
        return None
    num_query_files = len(find_files(locations.query, kind))
    num_queries, total = sum(num_images[:num_query_files]), sum(num_images)
    for key, count in (("data.query", num_queries), ("data.gallery", total - num_queries)):
        if not count:
            raise DataError(f"{key}: found no images in its {kind} files, must be one or more")
    return torch.arange(total) < num_queries


def stamp(file_system: AbstractFileSystem, path: str) -> list[str]:
    """A file's address, size and modification time, which show whether it has changed.

    Raises:
        DataError: it is not there, or its storage does not answer.
    """
    with one_line(path):
        info = file_system.info(path)
    # Each storage has its own name for the modification time; the last keys are for stores that never overwrite.
    times = ("mtime", "LastModified", "last_modified", "updated", "ETag", "etag", "blob_id", "created")
    changed = next((str(info[key]) for key in times if info.get(key)), "")
    return [_address((file_system, path)), str(info.get("size")), changed]


@contextmanager
def one_line(what: str, action: str = "read", keys: str = _KEYS) -> Iterator[None]:
    """Turns any error of the block, which may call only storage libraries, into one line: `what` cannot be `action`.

    Where it is that a file is missing, the line says which settings, `keys`, give the files.
    """
    try:
        yield
    except DataError:
        raise
    except FileNotFoundError as error:
        cause = error.__cause__  # fsspec takes a web server that does not answer for a missing file
        if what.startswith("http") and isinstance(cause, OSError) and not isinstance(cause, FileNotFoundError):
            raise DataError(f"{printable(what)}: cannot be {action}: {first_line(cause)}") from error
        raise MissingDataError(f"{printable(what)}: no such file; {keys}") from None
    # pyarrow, fsspec and its many back ends have no common base class for errors.
    except Exception as error:
        raise DataError(f"{printable(what)}: cannot be {action}: {first_line(error)}") from error


def _require_one(location: str) -> None:
    """Refuses `a.tar::b.tar`, a list as in webdataset, of which fsspec would read the first; its chained URLs pass."""
    *wrapping, last = (part.partition("://")[0] for part in location.split("::"))
    if any(part == last or part not in fsspec.available_protocols() for part in wrapping):
        raise DataError(
            f"{printable(location)}: '::' chains protocols of fsspec, not files; give several files as a list: "
            "[a.tar,b.tar]"
        )


def _address(file: File) -> str:
    """The URL of a file."""
    file_system, path = file
    return file_system.unstrip_protocol(path)


def _in_range(location: str) -> Iterator[str]:
    """The locations of a range of numbers, with leading zeros; the location itself if it has no range.

    Raises:
        DataError: the last number is below the first.
    """
    match = _RANGE.search(location)
    if match is None:
        yield location
        return
    first, last = match.groups()
    if int(first) > int(last):
        raise DataError(f"{printable(location)}: the range {match[0]} is empty; allowed: {{{last}..{first}}}")
    for number in range(int(first), int(last) + 1):
        yield from _in_range(f"{location[: match.start()]}{number:0{len(first)}d}{location[match.end() :]}")
