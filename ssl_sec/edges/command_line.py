"""From a command line to a job, and from an error to one line and an exit code."""

import contextlib
import logging
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, Literal

from ssl_sec.edges.composition import composed_yaml, experiments, groups, options
from ssl_sec.edges.supervision import supervised
from ssl_sec.errors import Stopped, UserError
from ssl_sec.masking import masked

_Output = Literal["stdout", "stderr"]

_PRIMARY_GROUPS = ("experiment", "data", "runtime")
_MORE_USAGES = {
    "report": (
        "table=5 [paper=angular]       our results beside a table of a paper",
        "figure=6 [recipes=[a,b]]      a figure of a paper, drawn from our runs",
        "compare <run> <run>           two runs side by side, by id, name or the beginning of one",
    )
}


def run_job(
    job: str, run: Callable[[Sequence[str]], str], arguments: Sequence[str] | None = None, supervise: bool = False
) -> int:
    """Runs a job with the overrides of the command line and prints what it says.

    Args:
        job: names the primary config.
        run: does the job and returns what is to be printed.
        arguments: of the command line.
        supervise: whether it runs in a process of its own, whose death by a signal is reported; for jobs that train.

    Returns:
        The exit code: 0, 2 (configuration), 3 (data), 4 (storage), 130 (stopped), 1 (a bug).
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)

    def told() -> int:
        if any(argument in ("--help", "-h") for argument in arguments):
            print(_help(job))
        elif "--cfg" in arguments:
            place = arguments.index("--cfg")
            overrides = [*arguments[:place], *arguments[place + 2 :]]
            print(composed_yaml(job, overrides), end="")
        else:
            say(masked(run(arguments)))
        return 0

    _open_standard_streams()
    return supervised(lambda: exit_code_of(told)) if supervise else exit_code_of(told)


def exit_code_of(run: Callable[[], int]) -> int:
    """Runs a command; what a user can mend becomes one line and an exit code, without secrets."""
    logging.basicConfig(level=logging.INFO)
    for handler in logging.getLogger().handlers:
        handler.setFormatter(_WithoutSecrets("%(levelname)s: %(message)s"))
    logging.getLogger().setLevel(logging.WARNING)
    logging.getLogger("ssl_sec").setLevel(logging.INFO)
    try:
        return run()
    except UserError as error:
        say(masked(f"error: {error}"), "stderr")
        return error.exit_code
    except Stopped as stop:
        say(str(stop), "stderr")
        return stop.exit_code
    except KeyboardInterrupt:
        say("interrupted", "stderr")
        return Stopped.exit_code
    except BrokenPipeError:
        return 1
    finally:
        _flush("stdout")
        _flush("stderr")


def say(text: str, on: _Output = "stdout") -> None:
    """Prints a line; that nobody reads it any more, as after `| head -1`, is no error."""
    with contextlib.suppress(OSError):
        print(text, file=getattr(sys, on))
    _flush(on)


def _flush(output: _Output) -> None:
    """Writes out what is buffered, or drops it where it cannot be written."""
    stream = getattr(sys, output)
    if stream is None:
        return
    try:
        stream.flush()
    except OSError:
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _open_standard_streams() -> None:
    """Has streams that were closed from the start lead nowhere; else the next file would take their place."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number
            setattr(sys, name, open(number, "w" if number else "r", closefd=False))


class _WithoutSecrets(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return masked(super().format(record))


def _help(job: str) -> str:
    lines = [
        f"usage: python -m jobs.{job} [group=option ...] [key=value ...]",
        f"       python -m jobs.{job} [...] --cfg job     print the configuration and stop",
        *(f"       python -m jobs.{job} {usage}" for usage in _MORE_USAGES.get(job, ())),
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
