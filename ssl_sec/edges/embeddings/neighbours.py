"""Neighbours, near-duplicates and outliers of embedded images, part by part; then a page that shows them."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from jaxtyping import Float32
from torch import Tensor

from ssl_sec.edges.config.neighbours import NeighboursConfig
from ssl_sec.edges.embeddings.findings import LARGE_SHARE, Findings
from ssl_sec.edges.embeddings.opened import embeddings_at, require_own_folder
from ssl_sec.edges.embeddings.page import page_of
from ssl_sec.edges.embeddings.workers import done_on
from ssl_sec.edges.embeddings.written import alone_in, whole_files
from ssl_sec.edges.progress_bar import progress_shown
from ssl_sec.edges.run.signals import interruptible
from ssl_sec.edges.storage.files import Place, place_at
from ssl_sec.embeddings.labels import same_label
from ssl_sec.embeddings.parts import PartPlan, parquet_of
from ssl_sec.embeddings.reading import EmbeddingSet, require_alike
from ssl_sec.embeddings.search import search
from ssl_sec.embeddings.tables import (
    Outliers,
    grouped,
    image_table,
    most_similar,
    neighbour_table,
    pair_table,
    redundant,
)
from ssl_sec.errors import DataError, StorageError, first_line
from ssl_sec.rules import check

logger = logging.getLogger("ssl_sec")

# The files of each part; the part is done when all are written, the pairs until they are in the file of duplicates.
_PAIRS, _IMAGES, _NEIGHBOURS = "pairs", "images", "neighbours"
_DUPLICATES, _REDUNDANT = "duplicates.parquet", "redundant.parquet"
_OUTLIERS, _PAGE = "outliers.parquet", "index.html"

# The columns of neighbours that say which labels both images have.
_LABELS = ["split", "label", "neighbour_split", "neighbour_label"]

# In the metadata of pairs: the number of pairs found, of which the file may list fewer.
_NUM_FOUND = b"num_found"


def run_neighbours(config: NeighboursConfig) -> Findings:
    """Searches the missing parts, and writes the tables and the page.

    Raises:
        ConfigError: if there are fewer images than neighbours, or the output holds another search or the embeddings.
        DataError: if the embeddings cannot be read, or are of one image that has no others.
        StorageError: if the output cannot be written.
        Stopped: if the job was interrupted; whole parts are kept.
    """
    require_own_folder(config.output, {"embeddings": config.embeddings, "queries": config.queries})
    work = SearchWork(config=config)
    base, queries = work.open()
    num_others = len(base) - (queries is base)
    if not num_others:
        raise DataError(f"embeddings: found 1 image in {config.embeddings}, must be two or more, or give queries")
    check(config.k <= num_others, "k", config.k, f"1 to {num_others:,}, the number of other images")
    logger.info("embeddings: %s of %d dimensions", f"{len(base):,}", base.dim)
    known = {file.metadata_digest for file in base.files}
    if common := [file.name for file in queries.files if queries is not base and file.metadata_digest in known]:
        logger.warning("queries: %s is among the embeddings, too: each of its images is found itself", common[0])
    centre = base.mean() if config.centred else None
    work = replace(work, origin=_origin(config, base, queries), centre=centre)
    with alone_in(place_at(config.output), _NEIGHBOURS):
        return _find(work, base, queries)


def _find(work: "SearchWork", base: EmbeddingSet, queries: EmbeddingSet) -> Findings:
    """The findings of a search whose folder this process alone writes to."""
    config = work.config
    outcome = _Outcome(config=config, origin=work.origin, plan=work.plan(queries))
    present = outcome.present()
    waiting = [part for part in range(outcome.plan.num_parts) if part not in present]
    if present:
        logger.info("%d of %d parts already exist", len(present), outcome.plan.num_parts)
    num_waiting, start = sum(len(outcome.plan.rows(part)) for part in waiting), time.perf_counter()
    with (
        progress_shown("search", num_waiting) as update,
        interruptible(f"whole parts are kept in {config.output}"),
    ):
        for _ in done_on(config.runtime, work.start, waiting, update, "neighbours"):
            pass
    seconds = time.perf_counter() - start
    duplicates, num_pairs = outcome.write_duplicates(queries is base)
    num_redundant, num_redundant_train = outcome.write_redundant(duplicates) if queries is base else (0, 0)
    usual, separating, outliers = outcome.write_outliers(queries, base)
    alike = same_label(duplicates, queries, base).drop_null()
    findings = Findings(
        output=config.output,
        num_images=len(queries),
        num_searched=len(base),
        k=config.k,
        images_per_s=num_waiting / seconds if waiting else None,
        nearest_of_same_label=usual,
        is_one_set=queries is base,
        is_centred=config.centred,
        duplicates_above=config.duplicates_above,
        separating=separating,
        num_pairs=num_pairs,
        num_conflicts=len(alike) - alike.true_count if len(alike) else None,
        num_redundant=num_redundant,
        num_redundant_train=num_redundant_train,
        duplicates=duplicates,
        outliers=outliers,
        examples=outcome.examples(),
    )
    if doubt := findings.doubt:
        logger.warning("%s", doubt)
    logger.info("drawing the page")
    outcome.place.write(_PAGE, page_of(findings, base, queries, config).encode())
    return findings


@dataclass(frozen=True, kw_only=True)
class SearchWork:
    """Searches parts of the queries, on any machine.

    Attributes:
        config: the job's configuration.
        origin: the settings and files that determine the neighbours and their division into files.
        centre: the mean of the embeddings, which is subtracted from them and the queries; None leaves them as they are.
    """

    config: NeighboursConfig
    origin: Mapping[str, Any] = field(default_factory=dict)
    centre: Float32[Tensor, " dim"] | None = None

    def open(self) -> tuple[EmbeddingSet, EmbeddingSet]:
        """The embeddings that are searched, and the queries; one object if each is searched among the others.

        Raises:
            DataError: if the embeddings cannot be read, or cannot be compared.
        """
        base = embeddings_at(self.config.embeddings, "embeddings")
        if self.config.queries is None:
            return base, base
        queries = embeddings_at(self.config.queries, "queries")
        require_alike([*base.files, *queries.files])
        return base, queries

    def plan(self, queries: EmbeddingSet) -> PartPlan:
        """The division of the queries into parts."""
        return PartPlan(split=_NEIGHBOURS, num_images=len(queries), rows_per_part=self.config.queries_per_part)

    def start(self, device: torch.device, on_images: Callable[[int], object]) -> Callable[[int], int]:
        """A function that searches a part on a device, and returns for how many images it searched.

        Args:
            device: device of this process.
            on_images: called with the number of searched images to which the comparisons since the last call amount.
        """
        config, (base, queries) = self.config, self.open()
        outcome = _Outcome(config=config, origin=self.origin, plan=self.plan(queries))

        def do(part: int) -> int:
            rows = outcome.plan.rows(part)
            embeddings = torch.cat([block for _, block in queries.blocks(rows.start, rows.stop)])
            found, pairs = search(
                self._centred(embeddings),
                ((at, self._centred(block)) for at, block in _counted(base, len(rows), on_images)),
                k=config.k,
                start=rows.start,
                are_among=queries is base,
                pairs_above=config.duplicates_above,
                max_pairs=config.max_duplicates,
                device=device,
            )
            norms = np.linalg.norm(embeddings.double().numpy(), axis=1)
            about = queries.about(rows.start, rows.stop)
            neighbours = neighbour_table(about, base, found)
            outcome.write(_PAIRS, part, pair_table(queries, base, pairs), pairs.num_found)
            outcome.write(_IMAGES, part, image_table(norms, about, neighbours))
            outcome.write(_NEIGHBOURS, part, neighbours)
            return len(rows)

        return do

    def _centred(self, embeddings: Float32[Tensor, "rows dim"]) -> Float32[Tensor, "rows dim"]:
        return embeddings if self.centre is None else embeddings - self.centre


def _origin(config: NeighboursConfig, base: EmbeddingSet, queries: EmbeddingSet) -> dict[str, Any]:
    """The settings and files that determine the neighbours and their division into files."""
    return {
        "embeddings": base.digest,
        "queries": None if queries is base else queries.digest,
        "k": config.k,
        "centred": config.centred,
        "duplicates_above": config.duplicates_above,
        "max_duplicates": config.max_duplicates,
        "queries_per_part": config.queries_per_part,
    }


@dataclass(frozen=True, kw_only=True)
class _Outcome:
    """The files of a search.

    Attributes:
        config: the job's configuration.
        origin: the settings and files that determine the search.
        plan: the division into parts.
    """

    config: NeighboursConfig
    origin: Mapping[str, Any]
    plan: PartPlan

    @cached_property
    def place(self) -> Place:
        """The place of the files."""
        return place_at(self.config.output)

    def present(self) -> set[int]:
        """The parts that are done; files that are not whole are removed.

        Raises:
            ConfigError: if the output holds another search.
            StorageError: if it cannot be read.
        """
        parts, kinds = range(self.plan.num_parts), [_NEIGHBOURS, _IMAGES, _PAIRS]
        own = {_DUPLICATES, *(self._name(kind, part) for kind in kinds for part in parts)}
        names = [name for name in sorted(self.place.files()) if name in own or name.startswith(f"{_NEIGHBOURS}-")]
        whole = whole_files(self.place, names, self.origin, "another search")
        self.place.remove([name for name in names if name not in whole])
        if _DUPLICATES in whole:  # which has the pairs of all parts
            kinds.remove(_PAIRS)
        return {part for part in parts if all(self._name(kind, part) in whole for kind in kinds)}

    def write(self, kind: str, part: int, table: pa.Table, num_found: int = 0) -> None:
        """Writes a file of a part."""
        self._write(self._name(kind, part), table, num_found)

    def write_duplicates(self, is_one_set: bool) -> tuple[pa.Table, int]:
        """The pairs of all parts in one file; returns them, and how many were found."""
        names = [self._name(_PAIRS, part) for part in range(self.plan.num_parts)]
        if _DUPLICATES not in self.place.files():
            num_found = 0

            def tables() -> Iterator[pa.Table]:
                nonlocal num_found
                for name in names:
                    table = self._read(name)
                    num_found += _num_found(table)
                    yield table

            pairs = most_similar(tables(), self.config.max_duplicates)
            self._write(_DUPLICATES, grouped(pairs, is_one_set), num_found)
        self.place.remove(names)
        duplicates = self._read(_DUPLICATES)
        return duplicates, _num_found(duplicates)

    def write_redundant(self, duplicates: pa.Table) -> tuple[int, int]:
        """The images that the others of their group make redundant in a file; returns their number, also in training.

        Training images are, as for `data.leave_out`, those of the split `train` or of none.
        """
        table = redundant(duplicates)
        self._write(_REDUNDANT, table)
        return len(table), sum(split in (None, "train") for split in table["split"].to_pylist())

    def write_outliers(self, queries: EmbeddingSet, base: EmbeddingSet) -> tuple[float | None, float, pa.Table]:
        """All parts' outliers in one file; returns two numbers about the nearest neighbours, and the outliers.

        The numbers are the share of images whose nearest has their label, None if no two have labels that can be
        compared, and the cosine with their nearest that `LARGE_SHARE` of the images have or exceed.
        """
        parts, num_same, num_labelled = range(self.plan.num_parts), 0, 0
        norms: list[np.ndarray] = []
        cosines: list[np.ndarray] = []
        for part in parts:
            images = self._read(self._name(_IMAGES, part), columns=["norm", "nearest_cosine"])
            norms.append(images["norm"].to_numpy())
            cosines.append(images["nearest_cosine"].to_numpy())
            pairs = self._read(self._name(_NEIGHBOURS, part), columns=_LABELS)
            same = same_label(pairs.take(np.arange(0, len(pairs), self.config.k)), queries, base).drop_null()
            num_same, num_labelled = num_same + same.true_count, num_labelled + len(same)
        all_norms = np.concatenate(norms).astype(np.float64)
        num_outliers = self.config.outliers_among(self.plan.num_images)
        outliers = Outliers(num_outliers, float(all_norms.mean()), float(all_norms.std()))
        for part in parts:
            outliers.add(self._read(self._name(_IMAGES, part)))
        table = outliers.table()
        self._write(_OUTLIERS, table)
        separating = float(np.quantile(np.concatenate(cosines), 1 - LARGE_SHARE))
        return num_same / num_labelled if num_labelled else None, separating, table

    def examples(self) -> pa.Table:
        """The neighbours of some images, chosen at random with a fixed seed."""
        count = min(self.config.images_shown, self.plan.num_images)
        chosen = np.sort(np.random.default_rng(0).choice(self.plan.num_images, count, replace=False))
        found: list[pa.Table] = []
        for part in range(self.plan.num_parts):
            rows = self.plan.rows(part)
            if len(here := chosen[(chosen >= rows.start) & (chosen < rows.stop)]):
                table = self._read(self._name(_NEIGHBOURS, part))
                k = self.config.k
                found.extend(table.slice(int(row - rows.start) * k, k) for row in here)
        return pa.concat_tables(found) if found else self._read(self._name(_NEIGHBOURS, 0)).slice(0, 0)

    def _name(self, kind: str, part: int) -> str:
        return self.plan.name(part).replace(_NEIGHBOURS, kind)

    def _read(self, name: str, columns: list[str] | None = None) -> pa.Table:
        try:
            with self.place.open(name) as file:
                return pq.read_table(file, columns=columns)
        except (OSError, ValueError) as error:
            raise StorageError(
                f"output: {self.config.output}/{name} cannot be read: {first_line(error)}; if it is damaged, the same "
                "command computes it again once it is deleted"
            ) from error

    def _write(self, name: str, table: pa.Table, num_found: int = 0) -> None:
        self.place.write(name, parquet_of(table, self.origin, {_NUM_FOUND: str(num_found)}))


def _counted(
    base: EmbeddingSet, num_queries: int, on_images: Callable[[int], object]
) -> Iterator[tuple[int, Float32[Tensor, "rows dim"]]]:
    """The blocks of a set; after each, reports the comparisons so far as a number of finished queries."""
    counted = 0
    for start, block in base.blocks():
        yield start, block
        done = (start + len(block)) * num_queries // len(base)
        on_images(done - counted)
        counted = done


def _num_found(table: pa.Table) -> int:
    return int((table.schema.metadata or {})[_NUM_FOUND])
