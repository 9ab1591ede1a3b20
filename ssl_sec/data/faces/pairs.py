"""Pairs of images of one person or of two, for measuring face verification.

They come as LFW's list (Huang et al., 2007; NormFace, section 4.2), as a file in which InsightFace packs them, or as a
table. An image that cannot be read is always an error, as a pair without it would be another test set.
"""

import csv
import itertools
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from ssl_sec.data.decode import AS_THEY_ARE, Decoding
from ssl_sec.data.encoded_images import ImageStore
from ssl_sec.data.faces.bins import read_bin
from ssl_sec.data.faces.reading import is_number, read_text
from ssl_sec.data.folders.listing import display, image_paths, top_folder
from ssl_sec.data.image_set import ImageSet
from ssl_sec.data.parquet.columns import NAMED_AS_USUAL, Columns
from ssl_sec.data.stores import FileStore, MemoryStore, from_store
from ssl_sec.errors import DataError, counted, first_line, printable

BIN_FOLDS = 10
UNKNOWN = "unknown"


@dataclass(frozen=True, kw_only=True)
class VerificationPairs:
    """Pairs of images.

    Attributes:
        name: name of the set in metrics and plots.
        images: images that the pairs name, each once.
        first: position in `images` of each pair's first image, on the CPU.
        second: position in `images` of each pair's second image, on the CPU.
        same: whether both images of a pair show one person.
        folds: fold of the cross-validation that each pair belongs to, 0, 1, ….
        people: names of all people in the pairs; empty if they are unknown.
    """

    name: str
    images: ImageSet
    first: Int64[Tensor, " pairs"]
    second: Int64[Tensor, " pairs"]
    same: Bool[Tensor, " pairs"]
    folds: Int64[Tensor, " pairs"]
    people: frozenset[str]


class NamedPair(NamedTuple):
    """A pair in a list.

    Attributes:
        first: path or base name of the first image.
        second: path or base name of the second image.
        same: whether both images show one person.
        fold: number of the fold, ≥ 0.
        where: list and line of the pair, for errors.
    """

    first: str
    second: str
    same: bool
    fold: int
    where: str


@dataclass(frozen=True, kw_only=True)
class _Listed:
    """Images that pairs may name.

    Attributes:
        store: encoded images.
        paths: path of each image in lists; its last part is enough if it is unique.
        people: person on each image; None if unknown.
        where: place of the images, for errors.
    """

    store: ImageStore
    paths: list[str]
    people: list[str | None]
    where: str


def open_bin(path: str | Path, name: str | None = None, decoding: Decoding = AS_THEY_ARE) -> VerificationPairs:
    """A .bin of InsightFace: lfw, cfp_fp, agedb_30 and others, with 10 folds of consecutive pairs.

    The file is a pickle. Reading it never calls the functions that it names: see `read_bin`.

    Args:
        path: the file.
        name: name of the set in metrics and plots; None takes that of the file.
        decoding: how images become pixels.

    Raises:
        MissingDataError: there is no such file.
        DataError: it is damaged or holds other objects, or an image cannot be read.
    """
    path = Path(path)
    encoded, same = read_bin_pairs(path)
    # The file repeats an image for each pair that has it.
    rows: dict[bytes, int] = {}
    positions = torch.tensor([rows.setdefault(image, len(rows)) for image in encoded])
    firsts = {row: place for place, row in reversed(list(enumerate(positions.tolist())))}
    names = [f"{printable(str(path))} image {firsts[row]}" for row in range(len(rows))]
    parts = torch.arange(len(same)).tensor_split(BIN_FOLDS)
    name = name or path.stem
    return VerificationPairs(
        name=name,
        images=from_store(
            MemoryStore.of(names, rows),
            torch.zeros(len(rows), dtype=torch.int64),
            (UNKNOWN,),
            name=f"{name}/pairs",
            description=f"{len(rows)} images of {len(same)} pairs in {path}",
            decoding=decoding,
        ),
        first=positions[::2],
        second=positions[1::2],
        same=same,
        folds=torch.cat([torch.full_like(part, fold) for fold, part in enumerate(parts)]),
        people=frozenset(),
    )


def open_lfw_pairs(
    pairs: str | Path, root: str | Path, name: str | None = None, decoding: Decoding = AS_THEY_ARE
) -> VerificationPairs:
    """LFW's pairs.txt, or pairsDevTrain.txt and pairsDevTest.txt, which are one fold each.

    Args:
        pairs: path of the list.
        root: folder of LFW's images, <name>/<name>_0001.jpg or .png.
        name: name of the set in metrics and plots; None takes that of the list.
        decoding: how images become pixels.

    Raises:
        MissingDataError: the list or the folder does not exist.
        DataError: a line is malformed or names an image that is missing, or an image cannot be read.
    """
    pairs, listed = Path(pairs), _in_folder(Path(root))
    # The list names images without endings.
    listed = replace(listed, paths=[os.path.splitext(path)[0] for path in listed.paths])
    return _open_named(name or pairs.stem, read_lfw_pairs(pairs), pairs, listed, decoding)


def open_pair_table(
    table: str | Path,
    images: str | Path | Sequence[str | Path],
    name: str | None = None,
    decoding: Decoding = AS_THEY_ARE,
    columns: Columns = NAMED_AS_USUAL,
) -> VerificationPairs:
    """A CSV file with the columns first, second, same (0 or 1) and, if there are several folds, fold.

    Args:
        table: path of the file. An image is named by its path, or by the last part of its path if that is unique.
        images: a folder with images at any depth, whose paths are relative to it; the folders directly below it are the
            people. Or Parquet files, in the Hugging Face layout, with the paths of the images.
        name: name of the set in metrics and plots; None takes that of the table.
        decoding: how images become pixels.
        columns: columns of Parquet files; the labels are the people.

    Raises:
        MissingDataError: a file or the folder does not exist.
        DataError: a line is malformed or names an image that is missing, or an image cannot be read.
    """
    table = Path(table)
    pairs = read_pair_table(table)
    if isinstance(images, str | Path):
        listed = _in_folder(Path(images))
    else:
        wanted = {image for pair in pairs for image in (pair.first, pair.second)}
        listed = _in_parquet(images, columns, wanted)
    return _open_named(name or table.stem, pairs, table, listed, decoding)


def read_bin_pairs(path: Path) -> tuple[list[bytes], Bool[Tensor, " pairs"]]:
    """The encoded images of a .bin, two for each pair, and whether those of a pair show one person.

    Raises:
        MissingDataError: there is no such file.
        DataError: it is damaged or holds other objects, or too few pairs or those of one kind.
    """
    printed = printable(str(path))
    encoded, same = read_bin(path)
    if len(encoded) != 2 * len(same) or len(same) < BIN_FOLDS:
        raise DataError(
            f"{printed}: {counted(len(encoded), 'image')} and {counted(len(same), 'pair')}; needed: two for each, "
            f"{BIN_FOLDS} pairs or more"
        )
    require_both_kinds(torch.tensor(same), printed)
    return encoded, torch.tensor(same)


def read_lfw_pairs(path: Path) -> list[NamedPair]:
    """The pairs of a list of LFW, without the endings of the images' names.

    The first line has the number of folds, if there are several, and the number of pairs of each kind in one. Then each
    fold has that many lines `name number number`, of one person, and as many `name number name number`, of two. Tabs
    separate them, or any spaces if no name has one.

    Raises:
        MissingDataError: there is no such list.
        DataError: a line is malformed, or there are too few or too many lines.
    """
    printed = printable(str(path))
    header, *lines = read_text(path).rstrip().split("\n")
    numbers = header.split()
    if len(numbers) not in (1, 2) or not all(map(is_number, numbers)) or "0" in numbers:
        raise DataError(
            f"{printed} line 1: found {printable(header[:40].strip())!r}; allowed: the numbers of folds and of their "
            "pairs of a kind"
        )
    of_a_kind, num_folds = int(numbers[-1]), int(numbers[0]) if len(numbers) == 2 else 1
    pairs: list[NamedPair] = []
    for place, line in enumerate(lines):
        where = f"{printed} line {place + 2}"
        fold, same = place // (2 * of_a_kind), place // of_a_kind % 2 == 0
        form = "name number number" if same else "name number name number"
        fields = [field.strip() for field in line.strip().split("\t")]
        fields = fields if len(fields) == len(form.split()) else line.split()
        if len(fields) != len(form.split()) or not all(map(is_number, (fields[1], fields[-1]))):
            found = printable(" ".join(fields)[:60])
            raise DataError(f"{where}: found {found!r}; allowed: {form}, with tabs between them if names have spaces")
        shown = ((fields[0], fields[1]), (fields[0] if same else fields[2], fields[-1]))
        first, second = (f"{person}/{person}_{int(number):04d}" for person, number in shown)
        pairs.append(NamedPair(first, second, same, fold, where))
    if len(pairs) != (announced := 2 * of_a_kind * num_folds):
        raise DataError(f"{printed}: {counted(len(pairs), 'pair')} found, {announced} announced in line 1")
    return pairs


def read_pair_table(path: Path) -> list[NamedPair]:
    """The pairs of a table; without a column `fold` all are in fold 0.

    Raises:
        MissingDataError: there is no such table.
        DataError: a column is missing, a line is malformed, or there are no pairs or those of one kind.
    """
    printed = printable(str(path))
    rows = csv.reader(read_text(path).rstrip().splitlines(), strict=True)
    pairs: list[NamedPair] = []
    try:
        columns = next(rows, [])
        if not {"first", "second", "same"} <= set(columns):
            raise DataError(
                f"{printed} line 1: columns {printable(', '.join(columns)[:60])!r}; needed: first, second, same and, "
                "of several folds, fold"
            )
        for fields in rows:
            where = f"{printed} line {rows.line_num}"
            if len(fields) != len(columns):
                raise DataError(f"{where}: {counted(len(fields), 'field')} found, {len(columns)} expected")
            values = dict(zip(columns, fields, strict=True))
            for column, allowed in (("same", "0, 1"), ("fold", "integers, 0 or more")):
                value = values.setdefault(column, "0")
                if not is_number(value) or (column == "same" and value not in ("0", "1")):
                    raise DataError(f"{where}: {column} {printable(value[:40])!r}; allowed: {allowed}")
            pairs.append(
                NamedPair(values["first"], values["second"], values["same"] == "1", int(values["fold"]), where)
            )
    except csv.Error as error:
        raise DataError(f"{printed} line {rows.line_num}: {first_line(error)}") from error
    if not pairs:
        raise DataError(f"{printed}: no pairs")
    require_both_kinds(torch.tensor([pair.same for pair in pairs]), printed)
    return pairs


def _in_folder(root: Path) -> _Listed:
    """All images in a folder and below it; the folders in it are the people."""
    paths = image_paths(root)
    return _Listed(
        store=FileStore.of(root, paths),
        paths=paths,
        people=[display(top_folder(path)) or None for path in paths],
        where=printable(str(root)),
    )


def _in_parquet(locations: Sequence[str | Path], columns: Columns, wanted: set[str]) -> _Listed:
    """The images in Parquet files that are wanted."""
    from ssl_sec.data.parquet import reading  # Arrow, which no other list needs

    files = reading.inspect(locations, columns)
    names: list[str] = []
    paths: list[str] = []
    people: list[str | None] = []
    encoded: list[bytes] = []
    for rows in reading.iterate_rows(files):
        for place, path in enumerate(rows.paths):
            if path in wanted or path.rpartition("/")[2] in wanted:
                label = int(rows.labels[place])
                known = files.class_names is not None and 0 <= label < len(files.class_names)
                names.append(rows.names[place])
                paths.append(path)
                people.append(files.class_names[label] if files.class_names and known else None)
                encoded.append(rows.encoded[place].as_py())
    where, *more = [path for _, path in files.files]
    return _Listed(
        store=MemoryStore.of(names, encoded),
        paths=paths,
        people=people,
        where=f"{printable(where)}{f' and {len(more)} more' if more else ''}",
    )


def _require_agreement(pairs: Sequence[NamedPair], rows: Int64[Tensor, "pairs 2"]) -> None:
    """Refuses two images that are of one person in one line and of two people in another."""
    earlier: dict[tuple[int, ...], NamedPair] = {}
    for pair, found in zip(pairs, rows.sort(dim=1).values.tolist(), strict=True):
        before = earlier.setdefault(tuple(found), pair)
        if before.same != pair.same:
            people, other = ("one person", "two people")[:: 1 if pair.same else -1]
            images = f"{printable(pair.first)} and {printable(pair.second)}"
            raise DataError(f"{pair.where}: {images} are of {people}, but of {other} in {before.where}")


def _open_named(
    name: str, pairs: list[NamedPair], path: Path, listed: _Listed, decoding: Decoding
) -> VerificationPairs:
    """The pairs with the images that they name."""
    rows = _by_name([path.rpartition("/")[2] for path in listed.paths]) | _by_name(listed.paths)
    named = torch.tensor(
        [[_row(image, rows, pair.where, listed.where) for image in (pair.first, pair.second)] for pair in pairs]
    )
    for pair in itertools.compress(pairs, named[:, 0] == named[:, 1]):
        raise DataError(f"{pair.where}: {printable(pair.first)} is compared with itself")
    _require_agreement(pairs, named)
    used, positions = named.unique(return_inverse=True)
    shown = [listed.people[row] for row in used.tolist()]
    same = torch.tensor([pair.same for pair in pairs])
    # Folders that hold everyone are not people: then both images of every pair, even of two people, are in one.
    are_people = any(shown[first] != shown[second] for first, second in positions[~same].tolist())
    # If only some names are known, people cannot be left out of a training set reliably.
    known = are_people and None not in shown
    people = sorted({person for person in shown if person is not None}) if known else []
    labels = {person: label for label, person in enumerate(people)}
    return VerificationPairs(
        name=name,
        images=from_store(
            listed.store,
            torch.tensor([labels.get(person or "", 0) for person in shown]),
            tuple(people) or (UNKNOWN,),
            name=f"{name}/pairs",
            description=f"{len(used)} images of {len(pairs)} pairs in {path}, from {listed.where}",
            decoding=decoding,
            rows=used,
        ),
        first=positions[:, 0],
        second=positions[:, 1],
        same=same,
        folds=torch.tensor([pair.fold for pair in pairs]).unique(return_inverse=True)[1],
        people=frozenset(people),
    )


def _by_name(names: list[str]) -> dict[str, int]:
    """Name -> row; -1 if several rows have the name."""
    rows: dict[str, int] = {}
    for row, name in enumerate(names):
        rows[name] = -1 if name in rows else row
    return rows


def _row(image: str, rows: dict[str, int], where: str, images: str) -> int:
    row = rows.get(image)
    if row is None:
        raise DataError(f"{where}: no image {printable(image)!r} in {images}")
    if row < 0:
        raise DataError(f"{where}: several images {printable(image)!r} in {images}; name it by its path")
    return row


def require_folds(folds: Iterable[int], where: str) -> None:
    """Refuses pairs that are all in one fold; `where` is their list.

    Raises:
        DataError: there is one fold, and no other to choose its threshold on.
    """
    if len(set(folds)) < 2:
        raise DataError(f"{where}: all pairs are in one fold; needed: two or more, as the others choose a threshold")


def require_both_kinds(same: Bool[Tensor, " pairs"], where: str) -> None:
    """Refuses pairs that all show one person, or that all show two; `where` is their list.

    Raises:
        DataError: all pairs are of one kind.
    """
    if bool(same.all()) or not bool(same.any()):
        shown = "the only pair shows" if len(same) == 1 else f"all {len(same):,} pairs show"
        raise DataError(f"{where}: {shown} {'one person' if same[0] else 'two'}; both are needed")
