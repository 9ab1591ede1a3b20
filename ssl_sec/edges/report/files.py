"""A report in all its formats: text, Markdown, CSV and PNG."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from ssl_sec.edges.pictures import save_picture
from ssl_sec.edges.tables import in_csv
from ssl_sec.files import replace_text


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
        """Writes the files, each whole or not at all, and returns their paths.

        Raises:
            OSError: if they cannot be written.
        """
        folder.mkdir(parents=True, exist_ok=True)
        paths: list[Path] = []
        if self.markdown is not None:
            paths.append(folder / f"{self.name}.md")
            replace_text(paths[-1], self.markdown + "\n")
        paths.append(folder / f"{self.name}.csv")
        columns = list(self.rows[0]) if self.rows else []
        replace_text(paths[-1], in_csv(columns, *([row.get(name, "") for name in columns] for row in self.rows)))
        paths.append(folder / f"{self.name}.png")
        save_picture(paths[-1], self.figure, dpi=130, bbox_inches="tight")
        return paths
