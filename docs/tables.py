"""The tables of these pages that the code knows: `python -m docs.tables` writes them, and a test compares them.

Only the text between `<!-- generated: <name> -->` and `<!-- end -->` is replaced. The plots of the studies are drawn
beside their figures.
"""

import contextlib
import io
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from ssl_sec import losses, papers
from ssl_sec.edges.commands import run_command
from ssl_sec.edges.composition import options
from ssl_sec.edges.composition.compose import experiments, job_of, training_of
from ssl_sec.edges.composition.experiments import Experiment, load, value_text
from ssl_sec.edges.study.cells import KeptCells
from ssl_sec.edges.study.comparison import Comparison, deciding_metric
from ssl_sec.edges.study.plan import load_file, num_comparisons, points_of
from ssl_sec.edges.study.searches import KeptSearches
from ssl_sec.edges.study.uploaded import searches_path
from ssl_sec.edges.tables import in_markdown
from ssl_sec.errors import ConfigError, DataError, Stopped, StorageError
from ssl_sec.exporting import FORMATS
from ssl_sec.metrics import METRICS
from ssl_sec.recipes.registry import RECIPES, trainings

PAGES = Path(__file__).parent
# The figures of each study's runs and searches, as jobs.study keeps them.
STUDIES = PAGES / "studies"
CPU_STUDIES = (
    "sec_cpu",
    "why_cpu",
    "when_cpu",
    "head_cpu",
    "head_long_cpu",
    "head_temperature_cpu",
    "long_cpu",
    "confirm",
    "confirm_rates",
    "temperature_cpu",
    "retrieval_cpu",
)
# Groups that have a table of their own.
_APART = ("experiment", "loss")
_TITLES = ["option", "what it is"]


def filled(page: str) -> str:
    """A page with its generated tables made anew."""

    def made(found: re.Match[str]) -> str:
        return f"{found[1]}\n\n{TABLES[found[2]]()}\n\n<!-- end -->"

    return re.sub(r"(<!-- generated: ([\w-]+) -->).*?<!-- end -->", made, page, flags=re.DOTALL)


def commands() -> str:
    """What `ssl-sec --help` prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        run_command(["--help"])
    return f"```text\n{printed.getvalue().rstrip()}\n```"


def metrics() -> str:
    """The metrics that runs report."""
    return in_markdown(["metric", "what it is"], *([f"`{name}`", row.meaning] for name, row in METRICS.items()))


def groups() -> str:
    """The options of each group with their explanations."""
    tables = [
        f"### {group}\n\n"
        + in_markdown(_TITLES, *([f"`{name}`", _text(explained)] for name, explained in sorted(names.items())))
        for group in sorted(options.groups().difference(_APART))
        if (names := _options_of(group))
    ]
    return "\n\n".join(tables)


def _options_of(group: str) -> dict[str, str]:
    """The options of a group with their explanations; where recipes differ in an option, with all of them."""
    found: dict[str, list[str]] = {}
    for job in RECIPES:
        for name, explained in options.options(group, job).items():
            known = found.setdefault(name, [])
            known.extend([] if explained in known else [explained])
    return {name: "; ".join([*(one.rstrip(".") for one in known[:-1]), known[-1]]) for name, known in found.items()}


def pair_losses() -> str:
    """The losses that need no classes of their own."""
    return _losses(losses.PAIR_LOSSES)


def class_losses() -> str:
    """The losses with something for each class."""
    return _losses({**losses.CLASS_LOSSES, "combined": losses.CombinedLoss})


def _losses(listed: Mapping[str, type[losses.Loss]]) -> str:
    def row(name: str, loss: type[losses.Loss]) -> list[str]:
        link = f"[`{loss.__name__}`](reference.md#{loss.__module__}.{loss.__name__})"
        return [f"`{name}`", link, _first(loss)]

    return in_markdown(["`loss=`", "class", "what it is"], *(row(name, loss) for name, loss in listed.items()))


def all_experiments() -> str:
    """All experiments: those with a file of their own, then the rows of each table of a paper."""
    found = [experiment for job in trainings() for name in experiments(job) if (experiment := load(name)) is not None]
    alone = [each for each in found if not each.is_row]
    parts = [
        in_markdown(
            ["experiment", "command", "what it is"],
            *([f"`{each.name}`", f"`{job_of(each.name)}`", _text(each.file.explanation)] for each in alone),
        )
    ]
    for path in dict.fromkeys(each.file.path for each in found if each.is_row):
        parts.append(_of_table([each for each in found if each.file.path == path]))
    return "\n\n".join(parts)


def _of_table(rows: Sequence[Experiment]) -> str:
    file = rows[0].file
    shown = [[f"`{each.name}`", _reported(each.name)] for each in rows]
    return (
        f"### `{file.path.stem}`\n\n{file.explanation} Command: `{job_of(rows[0].name)}`. "
        f"Settings: `configs/table/{file.path.name}`.\n\n" + in_markdown(["experiment", "the paper reports, %"], *shown)
    )


def _reported(recipe: str) -> str:
    figures = papers.find_reported(recipe).items()
    return ", ".join(f"{metric.rpartition('/')[2]} {value_text(value)}" for metric, value in figures)


def exit_codes() -> str:
    """The exit codes with what they mean."""
    kinds = (ConfigError, DataError, StorageError, Stopped)
    rows = [[str(kind.exit_code), f"`{kind.__name__}`", _first(kind)] for kind in kinds]
    return in_markdown(["exit code", "error", "what is wrong"], *rows)


def formats() -> str:
    """The formats of an exported encoder."""
    rows = [
        [f"`{name}`", _first(form), ", ".join(form.packages), f"{form.tolerance:.0e}".replace("e-0", "e-")]
        for name, form in FORMATS.items()
    ]
    return in_markdown(["`format=`", "what it is", "needs", "allowed difference"], *rows)


def paper_tables() -> str:
    """The papers whose tables are kept as data."""
    found = {name: papers.load(name) for name in papers.list_papers()}
    rows = [
        [f"`{name}`", paper.title, paper.reference, ", ".join(str(table.number) for table in paper.tables)]
        for name, paper in found.items()
    ]
    return in_markdown(["`paper=`", "title", "authors and venue", "tables"], *rows)


def paper_items() -> str:
    """Each paper's equations and figures, from `docs/papers/<paper>.yaml`, and its tables: where they are here."""
    header = ["in the paper", "what it is", "here", "command", "state"]
    return "\n\n".join(
        f"## {papers.load(name).title}\n\n" + in_markdown(header, *map(_item_row, items_of(name)), *_table_rows(name))
        for name in papers.list_papers()
    )


def items_of(paper: str) -> list[dict[str, Any]]:
    """The equations and figures of a paper as they are listed in its file."""
    return yaml.safe_load((PAGES / "papers" / f"{paper}.yaml").read_text(encoding="utf-8"))


def study_runs(name: str) -> str:
    """The arms of a study beside each other, from the figures of its runs."""
    _, file = load_file(name)
    planned = len(points_of(file)) * len(file.arms) * len(file.seeds)
    compared = study_comparison(name)
    if not compared.rows:
        return f"Not yet run: {planned} runs."
    num_runs = sum(len(row.metrics) for row in compared.rows)
    return f"{in_markdown(*compared.table())}\n\n{num_runs} of {planned} runs."


def study_comparison(name: str) -> Comparison:
    """The runs of a study that are kept, compared."""
    _, file = load_file(name)
    points, arms = [point.name for point in points_of(file)], list(file.arms)
    kept = [cell for cell in KeptCells(STUDIES / f"{name}.csv") if cell.point in points and cell.arm in arms]
    kept.sort(key=lambda cell: (points.index(cell.point), arms.index(cell.arm), cell.seed))
    metric = file.metric or deciding_metric(RECIPES[training_of(file.shared, file.job)], kept)
    return Comparison.of(kept, metric, file.baseline or arms[0], num_comparisons(file))


def study_searches(name: str) -> str:
    """The best trial of each search of a study, and how many of its trials ended; the others failed."""
    trials = list(KeptSearches(searches_path(STUDIES / f"{name}.csv")))
    groups = {
        (one.point, one.arm): [two for two in trials if (two.point, two.arm) == (one.point, one.arm)] for one in trials
    }
    rows: list[list[str]] = []
    for (point, arm), of_arm in groups.items():
        best = max(of_arm, key=lambda one: (one.at, one.metric))  # `Search.rank`
        values = ", ".join(f"`{override}`" for override in best.overrides)
        rows.append([point, arm, f"{len(of_arm)} of {best.num_planned}", values, f"{best.metric:.2f}"])
    return in_markdown(["at", "arm", "trials that ended", "best values", "held-out kNN, %"], *rows)


def _item_row(item: Mapping[str, Any]) -> list[str]:
    names = ", ".join(f"`{name.removeprefix('ssl_sec.')}`" for name in item["names"])
    command = f"`python -m jobs.{item['command']}`" if "command" in item else ""
    return [item["item"], item["what"], names, command, item["state"]]


def _table_rows(name: str) -> list[list[str]]:
    """The tables of a paper: how many of their figures a recipe of ours measures."""
    rows: list[list[str]] = []
    listed = {item["item"] for item in items_of(name)}
    for table in papers.load(name).tables:
        if f"Table {table.number}" in listed:
            continue
        recipes = table.recipes()
        cells = sum(value is not None for row in table.rows for value in row.values)
        ours = sum(value is not None for _, _, value in table.cells())
        state = f"runs, not measured: recipes for {ours} of its {cells} values" if ours else "as data, without recipes"
        command = f"`python -m jobs.report paper={name} table={table.number}`"
        here = ", ".join(f"`{recipe}`" for recipe in list(recipes)[:1]) + (", …" if len(recipes) > 1 else "")
        rows.append([f"Table {table.number}", _text(table.title), here, command, state])
    return rows


def _first(documented: object) -> str:
    return _text((documented.__doc__ or "").partition("\n")[0])


def _text(plain: str) -> str:
    """Plain text as Markdown, in which `<class>` would be HTML."""
    return plain.replace("<", "&lt;")


TABLES: Mapping[str, Callable[[], str]] = {
    "commands": commands,
    "groups": groups,
    "metrics": metrics,
    "pair-losses": pair_losses,
    "class-losses": class_losses,
    "experiments": all_experiments,
    "exit-codes": exit_codes,
    "formats": formats,
    "papers": paper_tables,
    "paper-items": paper_items,
    **{f"study-{name}": partial(study_runs, name) for name in CPU_STUDIES},
    "searches-sec_cpu": partial(study_searches, "sec_cpu"),
    "searches-temperature_cpu": partial(study_searches, "temperature_cpu"),
}


if __name__ == "__main__":
    for path in sorted(PAGES.glob("*.md")):
        path.write_text(filled(path.read_text(encoding="utf-8")), encoding="utf-8")
    for name in CPU_STUDIES:
        for plot, figure in study_comparison(name).figures().items():
            figure.savefig(STUDIES / f"{name}-{plot}.png", dpi=110)
