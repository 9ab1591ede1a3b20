"""What the runs gave, beside what the papers report: tables, figures, two runs side by side."""

from collections.abc import Sequence
from pathlib import Path

from ssl_sec import papers
from ssl_sec.edges.composition.compose import compose
from ssl_sec.edges.config import ReportConfig
from ssl_sec.edges.overrides import in_quotes
from ssl_sec.edges.report.compare import comparison_report
from ssl_sec.edges.report.figures import figure_report
from ssl_sec.edges.report.files import Report
from ssl_sec.edges.report.table import table_report
from ssl_sec.edges.tracking.runs import RunArchive, beside
from ssl_sec.errors import StorageError
from ssl_sec.settings import from_values


def run_report(arguments: Sequence[str]) -> str:
    """Makes a report, writes its files and returns what is to be printed.

    Args:
        arguments: overrides of the report; `compare <run> <run>` stands for `compare=[<run>,<run>]`.

    Raises:
        ConfigError: for a table, a figure, a paper or a run that does not exist.
        StorageError: for a store that cannot be used, or an output folder that cannot be written.
    """
    config = from_values(ReportConfig, compose("report", _overrides(arguments)))
    report = make_report(config)
    folder = Path(config.output).expanduser()
    try:
        paths = report.write(folder)
    except OSError as error:
        raise StorageError(f"output: {folder} cannot be written: {error.strerror}") from error
    return "\n".join([report.text, "", *map(str, paths)])


def make_report(config: ReportConfig) -> Report:
    """A report that is not yet written.

    Raises:
        ConfigError: for a table, a figure, a paper or a run that does not exist.
        StorageError: for a store that cannot be used.
    """
    paper = papers.load(config.paper)

    def archive() -> RunArchive:
        return RunArchive.open(config.tracking, Path(config.output_dir).expanduser().resolve())

    if config.table is not None:
        table = paper.table(config.table)
        # A table of settings has nothing of ours.
        return table_report(config.paper, table, archive() if table.recipes() else None)
    if config.figure is not None:
        return figure_report(config.paper, str(config.figure), archive, config.recipes)
    assert config.compare is not None
    first, second = config.compare
    store = RunArchive.open(beside(first, config.tracking), Path(config.output_dir).expanduser().resolve())
    return comparison_report(store, first, second, shows_all=config.all)


def _overrides(arguments: Sequence[str]) -> list[str]:
    """The arguments in Hydra's grammar; the words after `compare` that are no overrides are its runs."""
    if "compare" not in arguments:
        return list(arguments)
    runs = [word for word in arguments if "=" not in word and word != "compare"]
    # Quoted, since an id may read as a number.
    quoted = ",".join(map(in_quotes, runs))
    return [*(word for word in arguments if "=" in word), f"compare=[{quoted}]"]
