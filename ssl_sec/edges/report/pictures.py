"""A table as a picture."""

import textwrap
from collections.abc import Sequence

from matplotlib.figure import Figure

_INCHES_A_LINE = 0.24
_INCHES_A_CHARACTER = 0.082
_GAP_INCHES = 0.22
_FONT_SIZE = 9
_PALE = "0.65"
_COLOURS = {"paper": "0.15", "ours": "#0072B2", "difference": "0.45"}

NOT_RUN = "not run"

# A header, and lines of cells.
Block = tuple[Sequence[str], Sequence[Sequence[str]]]


def table_figure(title: str, blocks: Sequence[Block], notes: Sequence[str]) -> Figure:
    """Blocks of a table under each other, ours in another colour than the paper's.

    Args:
        title: written above.
        blocks: each a header and its lines.
        notes: written below, broken into lines.
    """
    widths = [[_inches(block, place) for place in range(len(block[0]))] for block in blocks]
    width = max([sum(block) for block in widths] + [len(title) * _INCHES_A_CHARACTER, 6.0])
    broken = [line for note in notes for line in textwrap.wrap(note, int(width / 0.075))]
    num_lines = 2 + sum(len(lines) + 2 for _, lines in blocks) + len(broken)
    height = (num_lines + 0.5) * _INCHES_A_LINE
    figure = Figure(figsize=(width, height))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    axes.set(xlim=(0, width), ylim=(height, 0))
    depth = _INCHES_A_LINE
    axes.text(0.08, depth, title, fontsize=_FONT_SIZE + 2, weight="bold", va="center")
    depth += 1.5 * _INCHES_A_LINE
    for (header, lines), columns in zip(blocks, widths, strict=True):
        starts = [sum(columns[:place]) + 0.08 for place in range(len(columns))]
        for place, heading in enumerate(header):
            axes.text(starts[place], depth, heading, fontsize=_FONT_SIZE, weight="bold", va="center")
        axes.axhline(depth + _INCHES_A_LINE / 2, color="0.3", linewidth=1)
        depth += _INCHES_A_LINE
        kind_place = 2 if len(lines[0]) > 2 and lines[0][2] in _COLOURS else 1
        for number, cells in enumerate(lines):
            if number and cells[kind_place] in ("paper", ""):
                axes.axhline(depth - _INCHES_A_LINE / 2, color="0.85", linewidth=0.6)
            colour = _COLOURS.get(cells[kind_place], "0.15")
            for start, cell in zip(starts, cells, strict=True):
                shade = _PALE if cell == NOT_RUN else colour
                axes.text(start, depth, cell, fontsize=_FONT_SIZE, color=shade, va="center")
            depth += _INCHES_A_LINE
        depth += _INCHES_A_LINE
    for line in broken:
        axes.text(0.08, depth, line, fontsize=_FONT_SIZE - 1, color="0.35", va="center")
        depth += _INCHES_A_LINE
    return figure


def _inches(block: Block, place: int) -> float:
    header, lines = block
    longest = max(len(cells[place]) for cells in [header, *lines])
    return longest * _INCHES_A_CHARACTER + (_GAP_INCHES if longest else 0)
