"""Figures as files."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ssl_sec.files import replaced

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def save_picture(path: Path, figure: "Figure", dpi: int = 110, **options: Any) -> None:
    """Saves a figure as PNG, whole or not at all; see `replaced`.

    Args:
        path: the file, in a folder that exists.
        figure: the figure.
        dpi: pixels of an inch.
        options: further options of `Figure.savefig`.
    """
    with replaced(path) as temporary:
        figure.savefig(temporary, format="png", dpi=dpi, **options)
