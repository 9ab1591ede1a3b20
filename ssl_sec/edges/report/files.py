"""A report in all its formats: text, Markdown, CSV and PNG."""

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

Cells = Sequence[Sequence[str]]


@dataclass(frozen=True, kw_only=True)
class Report:
    """A report.

    Attributes:
        name: the name of its files, without extension.
        text: the text to print.
        markdown: the same in Markdown; None if the report is only a figure.
        rows: its data, for the CSV file.
        figure: the figure, for the PNG file.
    """

    name: str
    text: str
    markdown: str | None
    rows: Sequence[Mapping[str, Any]]
    figure: Figure

    def write(self, folder: Path) -> list[Path]:
        """Writes the files and returns their paths.

        Raises:
            OSError: if they cannot be written.
        """
        folder.mkdir(parents=True, exist_ok=True)
        paths: list[Path] = []
        if self.markdown is not None:
            paths.append(folder / f"{self.name}.md")
            paths[-1].write_text(self.markdown + "\n", encoding="utf-8")
        paths.append(folder / f"{self.name}.csv")
        paths[-1].write_text(_format_csv(self.rows), encoding="utf-8")
        paths.append(folder / f"{self.name}.png")
        self.figure.savefig(paths[-1], dpi=130, bbox_inches="tight")
        return paths


def format_markdown(rows: Cells, header: Sequence[str]) -> str:
    """Formats rows of cells as a table in GitHub's Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _format_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
