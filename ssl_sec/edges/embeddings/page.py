"""A page that shows near-duplicates, outliers and neighbours as pictures; one file, which opens from disk."""

import os
from collections.abc import Iterable, Mapping
from html import escape
from typing import Any

import pyarrow as pa

from ssl_sec.edges.config.neighbours import NeighboursConfig
from ssl_sec.edges.embeddings.findings import Findings
from ssl_sec.edges.embeddings.thumbnails import Key, Thumbnails, thumbnails
from ssl_sec.embeddings.labels import same_label
from ssl_sec.embeddings.reading import EmbeddingSet

# Characters of a file's path below its picture, in two lines.
_LONGEST_NAME = 32

_STYLE = """
body { font: 14px/1.4 system-ui, sans-serif; margin: 2em auto; max-width: 1200px; padding: 0 1em; color: #222; }
h2 { margin: 2em 0 .3em; } p { margin: .3em 0 1em; max-width: 80ch; }
.row { display: flex; flex-wrap: wrap; gap: 8px; margin: 0 0 12px; padding: 8px; background: #f6f6f6; }
.pairs { display: grid; grid-template-columns: repeat(auto-fill, minmax(240px, 1fr)); gap: 12px; }
.pairs .row { margin: 0; }
figure { margin: 0; width: 104px; font-size: 11px; overflow-wrap: anywhere; }
figure img, .none { width: 96px; height: 96px; object-fit: contain; image-rendering: pixelated; background: #e4e4e4; }
figure.query img { outline: 3px solid #333; } figure.other img { outline: 3px solid #c0392b; }
.none { display: flex; align-items: center; justify-content: center; color: #888; }
.value { font-weight: 600; }
"""


def page_of(findings: Findings, base: EmbeddingSet, queries: EmbeddingSet, config: NeighboursConfig) -> str:
    """The page as HTML.

    Args:
        findings: results of the search.
        base: the embeddings that were searched.
        queries: the images whose neighbours were searched.
        config: the job's configuration.
    """
    duplicates = {title: table.slice(0, config.images_shown) for title, table in _by_kind(findings.duplicates).items()}
    by = findings.outliers["by"].to_pylist()
    outliers = {
        kind: findings.outliers.filter(pa.array([each == kind for each in by], pa.bool_())).slice(
            0, config.images_shown
        )
        for kind in ("norm", "distance")
    }
    of_queries = [*duplicates.values(), findings.examples, *outliers.values()]
    keys = list(_keys(of_queries, "")), list(_keys([*duplicates.values(), findings.examples], "neighbour_"))
    if queries is base:
        first = second = thumbnails([*keys[0], *keys[1]], base, config.data)
    else:
        first, second = thumbnails(keys[0], queries, config.data), thumbnails(keys[1], base, config.data)
    pictures = Pictures(first, second, queries, base, common_folder([*keys[0], *keys[1]]))
    missing = first.missing or second.missing
    return document(
        f"Neighbours of {config.embeddings}",
        f"Neighbours of {config.queries or config.embeddings}",
        findings.lines(),
        [
            f"<p>Near-duplicates are pairs of cosine {findings.duplicates_above:g} or more; all that are listed are in "
            "duplicates.parquet. A red border: the labels differ.</p>",
            *(line for title, table in duplicates.items() for line in _duplicates(title, table, pictures)),
            *_outliers(outliers["distance"], pictures, "Far from all others", "mean_cosine", "mean cosine"),
            *_outliers(outliers["norm"], pictures, "Unusual norm", "norm", "norm"),
            *_examples(findings, pictures),
        ],
        doubt=findings.doubt,
        missing=missing,
    )


def document(
    title: str,
    heading: str,
    lines: Iterable[str],
    content: Iterable[str],
    *,
    doubt: str | None = None,
    missing: str | None = None,
) -> str:
    """A page as HTML.

    Args:
        title: the page's title.
        heading: its heading.
        lines: results, below the heading.
        content: the rest, in HTML.
        doubt: a warning about the results; None for none.
        missing: why pictures are missing; None if none are.
    """
    return "\n".join(
        [
            "<!doctype html>",
            f'<html lang="en"><meta charset="utf-8"><title>{escape(title)}</title>',
            f"<style>{_STYLE}</style>",
            f"<h1>{escape(heading)}</h1>",
            *(f"<div>{escape(line)}</div>" for line in lines),
            f"<p><b>Warning:</b> {escape(doubt)}</p>" if doubt else "",
            f"<p><b>Pictures are missing:</b> {escape(missing)}</p>" if missing else "",
            *content,
            "</html>",
        ]
    )


class Pictures:
    """Images as HTML figures.

    Args:
        first: pictures of the queries.
        second: pictures of their neighbours.
        queries: embeddings of the queries.
        base: embeddings of the neighbours, the same object if the queries are among them.
        common: the folder of all images.
    """

    def __init__(
        self, first: Thumbnails, second: Thumbnails, queries: EmbeddingSet, base: EmbeddingSet, common: str
    ) -> None:
        self._of = {"": first, "neighbour_": second}
        self._embeddings = {"": queries, "neighbour_": base}
        self._common = common
        self._sets = {"": "", "neighbour_": ""} if queries is base else {"": "query, ", "neighbour_": "searched, "}

    def kinds(self, pairs: pa.Table) -> list[str]:
        """How the figures of each pair are drawn: as `other` if the labels of its images differ."""
        same = same_label(pairs, self._embeddings[""], self._embeddings["neighbour_"])
        return ["other" if each is False else "" for each in same.to_pylist()]

    def figure(self, row: Mapping[str, Any], prefix: str, caption: str, kind: str = "") -> str:
        """An image with the path of its file, split, row and label, a caption, and the whole path as its title."""
        address = self._of[prefix].pictures.get(key_of(row, prefix))
        image = f'<img src="{address}" alt="">' if address else '<div class="none">no picture</div>'
        split, number, path = key_of(row, prefix)
        label = row[f"{prefix}label"]
        names = self._embeddings[prefix].class_names(split) or ()
        name = None if label is None else names[label] if 0 <= label < len(names) else f"label {label}"
        place = f"{self._sets[prefix]}{split or 'row'} {number}"
        parts = [
            *([_shown(path.removeprefix(self._common))] if path else []),
            place,
            *([name] if name is not None else []),
        ]
        title = f' title="{escape(path)}"' if path else ""
        caption = f'<br><span class="value">{escape(caption)}</span>' if caption else ""
        text = "<br>".join(map(escape, parts))
        return f'<figure class="{kind}"{title}>{image}<figcaption>{text}{caption}</figcaption></figure>'


def common_folder(keys: Iterable[Key]) -> str:
    """The folder of all shown images: the paths below it tell them apart."""
    return os.path.commonprefix([path for _, _, path in keys if path]).rpartition("/")[0]


def _shown(path: str) -> str:
    """A path, without its middle if it is long."""
    path = path.strip("/")
    if len(path) <= _LONGEST_NAME:
        return path
    return f"{path[: _LONGEST_NAME // 2]}…{path[1 - _LONGEST_NAME // 2 :]}"


def _by_kind(pairs: pa.Table) -> dict[str, pa.Table]:
    """The pairs between splits and those within one, by title."""
    splits = zip(pairs["split"].to_pylist(), pairs["neighbour_split"].to_pylist(), strict=True)
    between = [first != second for first, second in splits]
    if not any(between):
        return {"Near-duplicates": pairs}
    within = pa.array([not each for each in between], pa.bool_())
    return {
        "Near-duplicates between splits": pairs.filter(pa.array(between, pa.bool_())),
        "Near-duplicates within a split": pairs.filter(within),
    }


def _duplicates(title: str, table: pa.Table, pictures: Pictures) -> Iterable[str]:
    yield f"<h2>{title}</h2>"
    yield f"<p>The {len(table):,} most similar pairs, each with its cosine.</p>"
    yield '<div class="pairs">'
    for row, kind in zip(table.to_pylist(), pictures.kinds(table), strict=True):
        first = pictures.figure(row, "", f"group {row['group']}", kind)
        second = pictures.figure(row, "neighbour_", f"cosine {row['cosine']:.4f}", kind)
        yield f'<div class="row">{first}{second}</div>'
    yield "</div>"


def _outliers(table: pa.Table, pictures: Pictures, title: str, column: str, name: str) -> Iterable[str]:
    yield f"<h2>{title}</h2>"
    more = " and its distance from the mean in standard deviations" if column == "norm" else " with its neighbours"
    yield (
        f"<p>The images with the most unusual {name}{more}, in this order. Whether they are errors is for you to see. "
        "All that are listed are in outliers.parquet.</p>"
    )
    yield '<div class="row">'
    for row in table.to_pylist():
        value = f"{row[column]:.4g} ({row['norm_z']:+.1f})" if column == "norm" else f"{row[column]:.3f}"
        yield pictures.figure(row, "", value)
    yield "</div>"


def _examples(findings: Findings, pictures: Pictures) -> Iterable[str]:
    yield "<h2>Neighbours</h2>"
    yield (
        "<p>Some images, chosen at random, each with its nearest neighbours and their cosines. A red border: another "
        "label than that of the image.</p>"
    )
    rows = list(zip(findings.examples.to_pylist(), pictures.kinds(findings.examples), strict=True))
    for start in range(0, len(rows), findings.k):
        found = rows[start : start + min(findings.k, 10)]
        figures = [pictures.figure(row, "neighbour_", f"{row['cosine']:.3f}", kind) for row, kind in found]
        yield f'<div class="row">{pictures.figure(found[0][0], "", "", "query")}{"".join(figures)}</div>'


def _keys(tables: Iterable[pa.Table], prefix: str) -> Iterable[Key]:
    for table in tables:
        yield from (key_of(row, prefix) for row in table.to_pylist())


def key_of(row: Mapping[str, Any], prefix: str = "") -> Key:
    """The key of the image in a row, or with the prefix `neighbour_` of its neighbour."""
    return row[f"{prefix}split"], row[f"{prefix}row"], row[f"{prefix}path"]
