"""Draws a table of the papers as a figure."""

import textwrap
from collections.abc import Sequence

from matplotlib.figure import Figure

from ssl_sec.figures.drawing import verbatim

_INCHES_PER_LINE = 0.24
_INCHES_PER_CHARACTER = 0.082
_GAP_INCHES = 0.22
_FONT_SIZE = 9
_PALE = "0.65"
_COLOURS = {"paper": "0.15", "ours": "#0072B2", "difference": "0.45"}

NOT_RUN = "not run"

# A header and rows of cells.
Block = tuple[Sequence[str], Sequence[Sequence[str]]]


def draw_table(title: str, blocks: Sequence[Block], notes: Sequence[str]) -> Figure:
    """Draws the blocks of a table below each other, with our rows in another colour than the paper's.

    Args:
        title: drawn above the table.
        blocks: a header and rows each.
        notes: drawn below the table, wrapped.
    """
    widths = [[_column_inches(block, place) for place in range(len(block[0]))] for block in blocks]
    width = max([sum(block) for block in widths] + [len(title) * _INCHES_PER_CHARACTER, 6.0])
    note_lines = [line for note in notes for line in textwrap.wrap(note, int(width / 0.075))]
    num_lines = 2 + sum(len(lines) + 2 for _, lines in blocks) + len(note_lines)
    height = (num_lines + 0.5) * _INCHES_PER_LINE
    figure = Figure(figsize=(width, height))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    axes.set(xlim=(0, width), ylim=(height, 0))
    depth = _INCHES_PER_LINE
    axes.text(0.08, depth, title, fontsize=_FONT_SIZE + 2, weight="bold", va="center")
    depth += 1.5 * _INCHES_PER_LINE
    for (header, lines), columns in zip(blocks, widths, strict=True):
        starts = [sum(columns[:place]) + 0.08 for place in range(len(columns))]
        for place, heading in enumerate(header):
            axes.text(starts[place], depth, heading, fontsize=_FONT_SIZE, weight="bold", va="center")
        axes.axhline(depth + _INCHES_PER_LINE / 2, color="0.3", linewidth=1)
        depth += _INCHES_PER_LINE
        kind_place = 2 if len(lines[0]) > 2 and lines[0][2] in _COLOURS else 1
        for number, cells in enumerate(lines):
            if number and cells[kind_place] in ("paper", ""):
                axes.axhline(depth - _INCHES_PER_LINE / 2, color="0.85", linewidth=0.6)
            colour = _COLOURS.get(cells[kind_place], "0.15")
            for start, cell in zip(starts, cells, strict=True):
                shade = _PALE if cell == NOT_RUN else colour
                axes.text(start, depth, verbatim(cell), fontsize=_FONT_SIZE, color=shade, va="center")
            depth += _INCHES_PER_LINE
        depth += _INCHES_PER_LINE
    for line in note_lines:
        axes.text(0.08, depth, line, fontsize=_FONT_SIZE - 1, color="0.35", va="center")
        depth += _INCHES_PER_LINE
    return figure


def _column_inches(block: Block, place: int) -> float:
    header, lines = block
    longest = max(len(cells[place]) for cells in [header, *lines])
    return longest * _INCHES_PER_CHARACTER + (_GAP_INCHES if longest else 0)
