"""From a command line to a job, and from an error to one line and an exit code."""

import logging
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, TextIO

from tqdm import tqdm

from ssl_sec.edges.composition import composed_yaml, experiments, groups, options
from ssl_sec.edges.environment import prepare
from ssl_sec.edges.packaging import command
from ssl_sec.errors import Stopped, UserError, out_of_memory
from ssl_sec.masking import masked
from ssl_sec.settings import check

_PRIMARY_GROUPS = ("experiment", "data", "runtime")
_MORE_USAGES = {
    "report": (
        "table=5 [paper=angular]       our results beside a table of a paper",
        "figure=6 [recipes=[a,b]]      a figure of a paper, drawn from our runs",
        "compare <run> <run>           two runs side by side, by id, name or the beginning of one",
    )
}


def run_job(job: str, run: Callable[[Sequence[str]], str], arguments: Sequence[str] | None = None) -> int:
    """Runs a job with the overrides of the command line and prints what it says.

    Args:
        job: names the primary config.
        run: does the job and returns what is to be printed.
        arguments: of the command line.

    Returns:
        The exit code: 0, 2 (configuration), 3 (data), 4 (storage), 130 (stopped), 1 (a bug).
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)

    def told() -> int:
        if any(argument in ("--help", "-h") for argument in arguments):
            print(_help(job))
        elif "--cfg" in arguments:
            place = arguments.index("--cfg")
            found = " ".join(arguments[place : place + 2])
            check(found == "--cfg job", "--cfg", found, "--cfg job")
            overrides = [*arguments[:place], *arguments[place + 2 :]]
            from ssl_sec.edges.job_values import shown_values  # a run may have to be looked up, with MLflow

            print(shown_values(job, overrides), end="")
        else:
            print(masked(run(arguments)))
        return 0

    return exit_code_of(told)


def exit_code_of(run: Callable[[], int]) -> int:
    """Runs a command; what a user can mend becomes one line and an exit code, without secrets."""
    logging.basicConfig(level=logging.INFO, handlers=[_AboveTheBar()])
    for handler in logging.getLogger().handlers:
        handler.setFormatter(_WithoutSecrets("%(levelname)s: %(message)s"))
    logging.getLogger().setLevel(logging.WARNING)
    logging.getLogger("ssl_sec").setLevel(logging.INFO)
    try:
        prepare()
        return run()
    except UserError as error:
        print(masked(f"error: {error}"), file=sys.stderr)
        return error.exit_code
    except Stopped as stop:
        print(stop, file=sys.stderr)
        return stop.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return Stopped.exit_code
    except (MemoryError, RuntimeError) as error:
        needs_more = out_of_memory(error)
        if needs_more is None:
            raise
        print(f"error: {needs_more}", file=sys.stderr)
        return needs_more.exit_code
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


class _AboveTheBar(logging.StreamHandler[TextIO]):
    """Writes messages above a progress bar, if there is one."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            tqdm.write(self.format(record), file=self.stream)
        except Exception:
            self.handleError(record)


class _WithoutSecrets(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return masked(super().format(record))


def _help(job: str) -> str:
    lines = [
        f"usage: {command(job)} [group=option ...] [key=value ...]",
        f"       {command(job)} [...] --cfg job     print the configuration and stop",
        *(f"       {command(job)} {usage}" for usage in _MORE_USAGES.get(job, ())),
        "",
    ]
    primary = composed_yaml(job, [])
    known = {**options(), "experiment": experiments(job)}
    for group in sorted(groups(job), key=lambda name: (name not in _PRIMARY_GROUPS, name)):
        lines.append(f"{group}=")
        width = max(map(len, known[group]))
        lines += [f"    {option:<{width}}  {explanation}".rstrip() for option, explanation in known[group].items()]
    return "\n".join([*lines, "", "keys and their defaults:", "", *(f"    {line}" for line in primary.splitlines())])


def in_table(rows: Sequence[Sequence[Any]], header: Sequence[str]) -> str:
    """Rows of cells as a table of aligned columns."""
    cells = [list(header), *[[str(cell) for cell in row] for row in rows]]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])
