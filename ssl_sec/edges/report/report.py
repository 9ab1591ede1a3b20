"""The command that makes reports: tables and figures of the papers with our results, comparisons of two runs."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ssl_sec import papers
from ssl_sec.edges.composition.compose import compose
from ssl_sec.edges.config import ReportConfig
from ssl_sec.edges.overrides import in_quotes
from ssl_sec.errors import writing
from ssl_sec.settings import from_values

# Figures that are not drawn from a recipe's comparisons: a formula, and runs with several weights.
NORMFACE_FIGURES = ("bound", "weights")
SWEEP = "sweep"

if TYPE_CHECKING:
    from ssl_sec.edges.report.files import Report
    from ssl_sec.edges.tracking.runs import RunArchive


def run_report(arguments: Sequence[str]) -> str:
    """Makes a report, writes its files and returns the text to print.

    Args:
        arguments: overrides of the report; `compare <run> <run>` means `compare=[<run>,<run>]`.

    Raises:
        ConfigError: for a table, a figure, a paper or a run that does not exist.
        StorageError: for a store that cannot be used, or an output folder that cannot be written.
    """
    config = from_values(ReportConfig, compose("report", _make_overrides(arguments)))
    report = make_report(config)
    folder = Path(config.output).expanduser()
    with writing("output", folder):
        paths = report.write(folder)
    return "\n".join([report.text, "", *map(str, paths)])


def make_report(config: ReportConfig) -> "Report":
    """Makes a report without writing it.

    Raises:
        ConfigError: for a table, a figure, a paper or a run that does not exist.
        StorageError: for a store that cannot be used.
    """
    paper = papers.load(config.paper)
    table = None if config.table is None else paper.table(config.table)
    figure = None if config.figure is None else paper.figure(str(config.figure))
    # Mistakes up to here are found before MLflow and matplotlib are imported.
    from ssl_sec.edges.tracking.runs import RunArchive, beside

    def open_archive() -> "RunArchive":
        return RunArchive.open(config.tracking, config.output_dir)

    if table is not None:
        from ssl_sec.edges.report.table import make_table_report

        # A table of settings has no results of ours.
        has_results = table.recipes() and not _is_without_runs(config)
        return make_table_report(config.paper, table, open_archive() if has_results else None)
    if figure is not None and figure.shows[0] in NORMFACE_FIGURES:
        from ssl_sec.edges.report.normface_figures import make_normface_figure

        return make_normface_figure(figure.number, open_archive, config.recipes)
    if figure is not None and figure.shows[0] == SWEEP:
        from ssl_sec.edges.report.sweeps import make_sweep_report

        return make_sweep_report(open_archive(), figure.number, config.recipes)
    if figure is not None:
        from ssl_sec.edges.report.figures import make_figure_report

        return make_figure_report(config.paper, figure, paper, open_archive(), config.recipes)
    assert config.compare is not None
    from ssl_sec.edges.report.compare import compare_runs

    first, second = config.compare
    store = RunArchive.open(beside(first, config.tracking), config.output_dir)
    return compare_runs(store, first, second, shows_all=config.all)


def _is_without_runs(config: ReportConfig) -> bool:
    """Whether no store or folder of runs is named, and the default one does not exist: nothing was run yet."""
    from ssl_sec.edges.tracking.store import sqlite_file, tracking_uri

    is_named = config.tracking.experiment is not None or config.output_dir != ReportConfig.output_dir
    if is_named or config.tracking.uri or os.environ.get("MLFLOW_TRACKING_URI"):
        return False
    file = sqlite_file(tracking_uri(config.tracking, config.output_dir))
    return file is not None and not file.exists()


def _make_overrides(arguments: Sequence[str]) -> list[str]:
    """Translates the arguments to Hydra's grammar; with `compare`, words without "=" are its runs."""
    if "compare" not in arguments:
        return list(arguments)
    runs = [word for word in arguments if "=" not in word and word != "compare"]
    # Quoted, since an id may look like a number.
    quoted = ",".join(map(in_quotes, runs))
    return [*(word for word in arguments if "=" in word), f"compare=[{quoted}]"]
