"""From a command line to a job, and from an error to one line and an exit code."""

import logging
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from ssl_sec.edges.composition import composed_yaml
from ssl_sec.edges.config_folders import own_configs, without_folder
from ssl_sec.edges.help_text import help_text
from ssl_sec.errors import Stopped, UserError
from ssl_sec.masking import masked


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
        folder, rest = without_folder(arguments)
        with own_configs(folder):
            if any(argument in ("--help", "-h") for argument in rest):
                print(help_text(job, [argument for argument in rest if argument not in ("--help", "-h")]))
            elif "--cfg" in rest:
                place = rest.index("--cfg")
                overrides = [*rest[:place], *rest[place + 2 :]]
                print(composed_yaml(job, overrides), end="")
            else:
                print(masked(run(rest)))
        return 0

    return exit_code_of(told)


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
        print(masked(f"error: {error}"), file=sys.stderr)
        return error.exit_code
    except Stopped as stop:
        print(stop, file=sys.stderr)
        return stop.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return Stopped.exit_code
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


class _WithoutSecrets(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return masked(super().format(record))


def in_table(rows: Sequence[Sequence[Any]], header: Sequence[str]) -> str:
    """Rows of cells as a table of aligned columns."""
    cells = [list(header), *[[str(cell) for cell in row] for row in rows]]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])
