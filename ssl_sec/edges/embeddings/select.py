"""Images to label first, chosen by their embeddings; then a list and a page that shows them."""

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from io import BytesIO

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
from jaxtyping import Bool

from ssl_sec.edges.config.select import SelectConfig
from ssl_sec.edges.embeddings.opened import embeddings_at, require_own_folder
from ssl_sec.edges.embeddings.page import Pictures, common_folder, document, key_of
from ssl_sec.edges.embeddings.thumbnails import thumbnails
from ssl_sec.edges.embeddings.written import alone_in
from ssl_sec.edges.progress_bar import progress_shown
from ssl_sec.edges.run.signals import interruptible
from ssl_sec.edges.storage.files import place_at
from ssl_sec.embeddings.parts import parquet_of
from ssl_sec.embeddings.reading import EmbeddingSet
from ssl_sec.embeddings.selection import Selection, select_typical
from ssl_sec.errors import ConfigError, DataError, counted, first_line, printable
from ssl_sec.training.config import LocalConfig

logger = logging.getLogger("ssl_sec")

_LIST, _TABLE, _PAGE = "selected.csv", "selected.parquet", "index.html"
# An image of a list: its split, None for any, and row; or its path.
_Entry = tuple[str | None, int] | str
# Rows whose splits and paths are read at once.
_ROWS_AT_ONCE = 65_536


@dataclass(frozen=True, kw_only=True)
class Selected:
    """The chosen images.

    Attributes:
        output: the folder or URL of the files.
        num_images: number of images to choose from, and of those with labels.
        num_labelled: number of images that have labels already.
        table: the chosen images, the first to label first.
        num_classes: number of classes of the images' own labels, and of those of the chosen ones; None without labels.
    """

    output: str
    num_images: int
    num_labelled: int
    table: pa.Table
    num_classes: tuple[int, int] | None

    def lines(self) -> list[str]:
        """The results, one line each."""
        sizes = self.table["cluster_size"].to_numpy()
        labelled = f", {self.num_labelled:,} of which have labels" if self.num_labelled else ""
        clusters = counted(len(set(self.table["cluster"].to_pylist())), "cluster")
        found = [
            f"selected: {counted(len(self.table), 'image')} of {self.num_images:,}{labelled}, from {clusters} of "
            f"{sizes.min():,} to {sizes.max():,} images"
        ]
        if self.num_classes is not None:
            all_classes, chosen = self.num_classes
            found.append(f"classes of the selected images: {chosen:,} of {all_classes:,}")
        return found

    def __str__(self) -> str:
        return "\n".join(
            [
                *self.lines(),
                f"list: {self.output}/{_LIST}, in the order in which to label; the same as {_TABLE}",
                f"page: {self.output}/{_PAGE}",
            ]
        )


def run_select(config: SelectConfig) -> Selected:
    """Chooses the images, and writes the list and the page.

    Raises:
        ConfigError: if there are fewer images without labels, several splits, or the output holds a selection.
        DataError: if the embeddings or the lists cannot be read.
        StorageError: if the output cannot be written.
    """
    require_own_folder(config.output, {"embeddings": config.embeddings})
    device = LocalConfig(device=config.device).resolve_device()
    base, place = embeddings_at(config.embeddings, "embeddings"), place_at(config.output)
    logger.info("embeddings: %s of %d dimensions", f"{len(base):,}", base.dim)
    with alone_in(place, "selected", may_be_whole=False), interruptible("no list was written"):
        if _LIST in place.files():
            raise ConfigError(f"output: {config.output} holds a selection already; allowed: another folder")
        eligible, labelled, classes = _marked(config, base)
        with progress_shown("select", config.count + int(labelled.sum()), "passes") as update:
            chosen = select_typical(
                base.blocks,
                eligible,
                labelled,
                config.count,
                k=config.k,
                seed=config.seed,
                device=device,
                on_pass=lambda: update(1),
            )
        table = _table(base, chosen)
        found = Selected(
            output=config.output,
            num_images=int(eligible.sum()),
            num_labelled=int(labelled.sum()),
            table=table,
            num_classes=None if None in classes else (len(classes), len(set(table["label"].to_pylist()))),
        )
        origin = {"embeddings": base.digest, "count": config.count, "split": config.split, "seed": config.seed}
        place.write(_PAGE, _page(found, base, config).encode())
        place.write(_TABLE, parquet_of(table, origin))
        as_csv = BytesIO()
        pyarrow.csv.write_csv(table, as_csv)
        place.write(_LIST, as_csv.getvalue())
    return found


def _marked(
    config: SelectConfig, base: EmbeddingSet
) -> tuple[Bool[np.ndarray, " images"], Bool[np.ndarray, " images"], set[int | None]]:
    """Which images are of the split, which of these have labels already, and the classes in the embeddings' files."""
    listed = {entry for location in config.labelled for entry in _entries(_read_list(location))}
    found: set[_Entry] = set()
    classes: set[int | None] = set()
    eligible, labelled = np.zeros(len(base), dtype=bool), np.zeros(len(base), dtype=bool)
    splits: dict[str | None, int] = {}
    for start in range(0, len(base), _ROWS_AT_ONCE):
        about = base.about(start, min(start + _ROWS_AT_ONCE, len(base)))
        columns = (about[name].to_pylist() for name in ("split", "row", "path", "label"))
        for place, (split, row, path, label) in enumerate(zip(*columns, strict=True), start):
            splits[split] = splits.get(split, 0) + 1
            if config.split in (None, split):
                eligible[place] = True
                here = listed.intersection([(split, row), (None, row), path])
                found |= here
                labelled[place] = bool(here)
                classes.add(label)
    if config.split is None and len(splits) > 1 or config.split is not None and config.split not in splits:
        counts = ", ".join(f"{split} ({number:,})" for split, number in splits.items() if split)
        allowed = f"one of {counts}" if counts else "null: the embeddings have no splits"
        raise ConfigError(f"split: found {config.split or 'null'}, must be {allowed}")
    if listed and not found:
        raise DataError(f"labelled: found none of the listed images among those in {config.embeddings}")
    if found < listed:
        message = "labelled: %s of %s listed images are not among the images to choose from"
        logger.warning(message, f"{len(listed - found):,}", f"{len(listed):,}")
    return eligible, labelled, classes


def _read_list(location: str) -> pa.Table:
    folder, _, name = location.rpartition("/")
    if not name.endswith((".csv", ".parquet")):
        raise ConfigError(f"labelled: found {printable(location)!r}, must be files, *.csv or *.parquet")
    try:
        with place_at(folder or ("/" if location.startswith("/") else "."), "labelled").open(name) as file:
            table = pyarrow.csv.read_csv(file) if name.endswith(".csv") else pq.read_table(file)
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"labelled: {printable(location)} cannot be read: {first_line(error)}") from error
    if not {"row", "path"} & set(table.column_names):
        found = ", ".join(map(repr, table.column_names))
        raise DataError(f"labelled: {printable(location)}: found the columns {found}, must have 'row' or 'path'")
    return table


def _entries(table: pa.Table) -> Iterator[_Entry]:
    """Each image of a list, by its row, or by its path where it has no row."""
    for image in table.select([name for name in ("split", "row", "path") if name in table.column_names]).to_pylist():
        row, path = image.get("row"), image.get("path")
        if row is not None:
            yield image.get("split") or None, row  # CSV has no null in strings
        elif path:
            yield path


def _table(base: EmbeddingSet, chosen: Selection) -> pa.Table:
    in_order = np.argsort(chosen.positions)
    about = base.about_some(chosen.positions[in_order]).take(np.argsort(in_order))
    return (
        about.append_column("cluster", pa.array(chosen.clusters))
        .append_column("cluster_size", pa.array(chosen.cluster_sizes))
        .append_column("typicality", pa.array(chosen.typicality))
    )


def _page(selected: Selected, base: EmbeddingSet, config: SelectConfig) -> str:
    """The chosen images as HTML, in their order."""
    rows: list[Mapping[str, object]] = selected.table.slice(0, config.images_shown).to_pylist()
    keys = [key_of(row) for row in rows]
    found = thumbnails(keys, base, config.data)
    pictures = Pictures(found, found, base, base, common_folder(keys))
    figures = [
        pictures.figure(row, "", f"{place} (of {row['cluster_size']:,})") for place, row in enumerate(rows, start=1)
    ]
    title = f"Images of {config.embeddings} to label first"
    shown = (
        "<p>In this order; each is the most typical image of its cluster, of as many images as given. All are in "
        f"{_LIST}.</p>"
    )
    return document(
        title, title, selected.lines(), [shown, f'<div class="row">{"".join(figures)}</div>'], missing=found.missing
    )
