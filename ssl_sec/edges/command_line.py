"""Runs a job from its command line; errors become one line and an exit code."""

import contextlib
import logging
import os
import sys
from collections.abc import Callable, Sequence
from typing import Literal, TextIO

from tqdm import tqdm

from ssl_sec.edges.composition.config_folders import own_configs, without_folder
from ssl_sec.edges.composition.help_text import help_text
from ssl_sec.edges.environment import prepare
from ssl_sec.edges.masking import masked
from ssl_sec.edges.run.signals import handled, interrupt
from ssl_sec.edges.run.supervision import supervised
from ssl_sec.errors import Stopped, UserError, lost_loader, out_of_memory, out_of_space
from ssl_sec.rules import check

_Output = Literal["stdout", "stderr"]


def run_job(job: str, run: Callable[[Sequence[str]], str], arguments: Sequence[str], supervise: bool = False) -> int:
    """Runs a job with the overrides of the command line and prints its result.

    Args:
        job: name of the primary config.
        run: runs the job and returns the text to print.
        arguments: the arguments of the command line.
        supervise: whether it runs in a child process, whose death by a signal is reported; for jobs that train.

    Returns:
        The exit code: 0, 2 (configuration), 3 (data), 4 (storage), 130 (stopped), 1 (a failed run, or a bug).
    """

    def run_and_print() -> int:
        folder, rest = without_folder(arguments)
        with own_configs(folder), handled(interrupt):  # what saves its state first handles signals itself
            if any(argument in ("--help", "-h") for argument in rest):
                say(help_text(job, [argument for argument in rest if argument not in ("--help", "-h")]))
            elif "--cfg" in rest:
                place = rest.index("--cfg")
                found = " ".join(rest[place : place + 2])
                check(found == "--cfg job", "--cfg", found, "--cfg job")
                from ssl_sec.edges.run.job_values import format_values  # may import MLflow

                say(format_values(job, [*rest[:place], *rest[place + 2 :]]).rstrip("\n"))
            else:
                say(masked(run(rest)))
        return 0

    _open_standard_streams()
    return supervised(lambda: exit_code_of(run_and_print)) if supervise else exit_code_of(run_and_print)


def exit_code_of(run: Callable[[], int]) -> int:
    """Runs a command; a mistake of the user becomes one line without secrets, and an exit code."""
    logging.basicConfig(level=logging.INFO, handlers=[_AboveTheBar()])
    for handler in logging.getLogger().handlers:
        handler.setFormatter(_WithoutSecrets("%(levelname)s: %(message)s"))
    logging.getLogger().setLevel(logging.WARNING)
    logging.getLogger("ssl_sec").setLevel(logging.INFO)
    try:
        prepare()
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
    except Exception as error:
        known = out_of_memory(error) or out_of_space(error) or lost_loader(error)
        if known is None:
            raise
        say(masked(f"error: {known}"), "stderr")
        return known.exit_code
    finally:
        _flush("stdout")
        _flush("stderr")


def say(text: str, on: _Output = "stdout") -> None:
    """Prints a line; a closed pipe, as after `| head -1`, is not an error."""
    with contextlib.suppress(OSError):
        print(text, file=getattr(sys, on))
    _flush(on)


def _flush(output: _Output) -> None:
    """Flushes a stream; output that cannot be written is dropped."""
    stream = getattr(sys, output)
    if stream is None:
        return
    try:
        stream.flush()
    except OSError:
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _open_standard_streams() -> None:
    """Opens standard streams that were closed at the start on /dev/null, so that no other file takes their number."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number
            setattr(sys, name, open(number, "w" if number else "r", closefd=False))


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
