"""The commands: `ssl-sec <command> ...`, and in a checkout `python -m jobs.<command> ...`.

A command reads its configuration before slow imports, so that help and mistakes are shown at once.
"""

import argparse
import atexit
import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NoReturn

from ssl_sec import __version__
from ssl_sec.edges.command_line import exit_code_of, run_job
from ssl_sec.edges.composition.compose import compose, config_of
from ssl_sec.edges.packaging import JOB_ID_VARIABLE, command
from ssl_sec.edges.run.train import announced_config, train
from ssl_sec.errors import ConfigError, first_line, nearest
from ssl_sec.recipes.registry import RECIPES
from ssl_sec.settings import from_values


def run_recipe(job: str, overrides: Sequence[str]) -> str:
    """Trains or measures as a recipe of `recipes/registry.py` does.

    Returns:
        The text to print.
    """
    return str(train(job, *overrides))


def ablate(overrides: Sequence[str]) -> str:
    """One recipe under several constraints and seeds, in one table."""
    compose(config_of("ablate", overrides), overrides)  # a misspelled key is found before the imports
    from ssl_sec.edges.study.arms import read_arms

    cells = read_arms(overrides)
    from ssl_sec.edges.study.ablation import run_ablation

    return run_ablation(cells)


def study(overrides: Sequence[str]) -> str:
    """Arms of one recipe compared pair by pair over seeds, each with its own search."""
    from ssl_sec.edges.study.plan import read_study

    found = read_study(overrides)
    from ssl_sec.edges.study.job import run_study

    return run_study(found)


def tune(overrides: Sequence[str]) -> str:
    """The best values of some keys of a pretraining, searched by Ray Tune."""
    from ssl_sec.edges.tune.space import read_search

    search = read_search(overrides)
    from ssl_sec.edges.tune.job import run_tune

    return run_tune(search)


def transfer(overrides: Sequence[str]) -> str:
    """Several evaluations of one encoder on several data sets, in one table."""
    config = announced_config("transfer", overrides)
    from ssl_sec.edges.transfer import run_transfer

    return run_transfer(config)


def preview(overrides: Sequence[str]) -> str:
    """Some images with their augmented views as one picture, without training."""
    values = compose("preview", overrides)
    from ssl_sec.edges.config import PreviewConfig

    picture = from_values(PreviewConfig, {key: values.pop(key) for key in ("output", "num_images")})
    config = from_values(RECIPES["pretrain"].config, values)
    from ssl_sec.edges.preview import run_preview

    return run_preview(picture, config)


def report(overrides: Sequence[str]) -> str:
    """Results beside a paper's tables and figures, or two runs side by side."""
    from ssl_sec.edges.report.report import run_report

    return run_report(overrides)


def export(overrides: Sequence[str]) -> str:
    """The encoder of a run in a format that other programs load."""
    config = announced_config("export", overrides)
    from ssl_sec.edges.export.export import run_export

    return str(run_export(config))


def embed(overrides: Sequence[str]) -> str:
    """Embeddings of a data set by a trained encoder, as Parquet."""
    config = announced_config("embed", overrides)
    from ssl_sec.edges.embeddings.embed import run_embed

    return str(run_embed(config))


def neighbours(overrides: Sequence[str]) -> str:
    """Nearest neighbours, near-duplicates and outliers of embedded images."""
    config = announced_config("neighbours", overrides)
    from ssl_sec.edges.embeddings.neighbours import run_neighbours

    return str(run_neighbours(config))


def select(overrides: Sequence[str]) -> str:
    """Images to label first, typical ones of all clusters of embedded images."""
    config = announced_config("select", overrides)
    from ssl_sec.edges.embeddings.select import run_select

    return str(run_select(config))


def align(overrides: Sequence[str]) -> str:
    """Cuts faces out of images, aligned by five points each."""
    config = announced_config("align", overrides)
    from ssl_sec.edges.align import run_align

    return str(run_align(config))


def replay(overrides: Sequence[str]) -> str:
    """Sends MLflow what it missed of a run during an outage."""
    config = announced_config("replay", overrides)
    from ssl_sec.edges.run.driver import run_replay

    return str(run_replay(config))


def submit(arguments: Sequence[str]) -> int:
    """Sends a job to a Ray cluster, lists jobs, shows their logs, stops them."""
    from ssl_sec.edges.submit.command import submit

    return submit(arguments)


def pipeline(arguments: Sequence[str]) -> int:
    """Jobs that wait for one another, on the cluster; `submit` starts it there with --then or for a sweep."""
    parser = argparse.ArgumentParser(
        prog=command("pipeline"),
        description="Jobs of a Ray cluster that wait for one another: a pretraining and its probe, or a sweep of them.",
        epilog=f"{command('submit')} writes the plan and starts this on the cluster, with --then or for a sweep.",
    )
    parser.add_argument("plan", metavar="PLAN", help="the JSON file with the plan")
    path = Path(parser.parse_args(list(arguments)).plan)
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"PLAN: {path} cannot be read: {first_line(error)}; {command('submit')} writes one"
        ) from error
    if JOB_ID_VARIABLE not in os.environ:
        raise ConfigError(f"only a job of a Ray cluster can start others; send them with: {command('submit')}")
    from ssl_sec.edges.submit.pipeline import PipelinePlan, run_pipeline

    return run_pipeline(from_values(PipelinePlan, values))


# Commands that are configured by `configs/<name>.yaml` and return the text to print.
_JOBS: dict[str, Callable[[Sequence[str]], str]] = {
    job.__name__: job
    for job in (preview, ablate, study, tune, transfer, export, embed, neighbours, select, align, report, replay)
}
# Commands with a command line of their own, which return the exit code.
_OTHERS: dict[str, Callable[[Sequence[str]], int]] = {"submit": submit}
# Only the cluster calls them.
_HIDDEN: dict[str, Callable[[Sequence[str]], int]] = {"pipeline": pipeline}


def run_command(arguments: Sequence[str], supervise: bool = False) -> int:
    """Runs the command that the first argument names, with the other arguments; returns the exit code.

    Args:
        arguments: the command and its arguments.
        supervise: whether commands that train run in a child process, whose death by a signal is reported.
    """
    name, *rest = arguments or ["--help"]
    job = name.replace("-", "_")
    if job in RECIPES:
        return run_job(job, partial(run_recipe, job), rest, supervise=supervise)
    if job in _JOBS:
        return run_job(job, _JOBS[job], rest, supervise=supervise and _JOBS[job] in (ablate, transfer))
    return exit_code_of(lambda: _run_other(name, job, rest))


def _run_other(name: str, job: str, arguments: Sequence[str]) -> int:
    if name in ("--help", "-h"):
        print(_help())
    elif name == "--version":
        print(f"ssl_sec {__version__}")
    elif job in (others := {**_OTHERS, **_HIDDEN}):
        return others[job](arguments)
    else:
        raise ConfigError(f"command: found {name!r}; {nearest(job, [*RECIPES, *_JOBS, *_OTHERS])}")
    return 0


def _help() -> str:
    shown = {name: recipe.about for name, recipe in RECIPES.items()}
    shown |= {name: (run.__doc__ or "").splitlines()[0] for name, run in {**_JOBS, **_OTHERS}.items()}
    width = max(map(len, shown))
    return "\n".join(
        [
            "usage: ssl-sec <command> [group=option ...] [key=value ...]",
            "       ssl-sec <command> --help     explain the command's groups and keys",
            "       ssl-sec --version",
            "",
            "commands:",
            *(f"    {name:<{width}}  {about}" for name, about in shown.items()),
        ]
    )


def main(*before: str) -> NoReturn:
    """Runs the command of this process's command line and ends the process.

    Args:
        before: arguments to put before those of the command line.
    """
    codes: list[int] = []
    # Registered before anything large is imported, so that it is called after everything else that waits for the end.
    atexit.register(_leave, codes)
    codes.append(run_command([*before, *sys.argv[1:]], supervise=True))
    sys.exit(codes[0])


def _leave(codes: Sequence[int]) -> None:
    """Exits without Python's clean-up of imported modules: with torch, MLflow and Ray that takes seconds."""
    if codes:
        with suppress(OSError, ValueError):  # nobody reads the output any more
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(codes[0])
