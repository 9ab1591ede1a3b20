"""The command line of jobs.submit."""

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING

from ssl_sec.edges.composition.config_folders import OPTION, own_configs
from ssl_sec.edges.masking import masked
from ssl_sec.edges.packaging import command
from ssl_sec.edges.run.signals import handled
from ssl_sec.errors import ConfigError, Stopped, nearest
from ssl_sec.recipes.registry import RECIPES

if TYPE_CHECKING:
    from ssl_sec.edges.submit.cluster import Cluster

_VERBS = ("status", "logs", "stop", "list")
_EPILOG = """\
examples:
  python -m jobs.submit pretrain experiment=cifar10_sec_100 runtime.num_workers=8 --then probe --follow
  python -m jobs.submit pretrain experiment=cifar10_sec_100 constraint.eta=0.1,0.25,0.5 seed=0,1,2 --parallel 4
  python -m jobs.submit metric_learning experiment=cars196_triplet_sec data.root=/data/cars196 --follow
  python -m jobs.submit probe run=<id, name or folder>
  python -m jobs.submit list | status <job> | logs <job> [--follow] | stop <job>

Paths are absolute and those of the nodes: output_dir=/shared/runs (or s3://bucket/runs) data.root=/shared/data.
A key with several values, separated by commas, makes a sweep: one MLflow run with a child for each point.
Exit codes: those of the job (0, 2 configuration, 3 data, 4 storage, 1 failed), 130 if it was stopped."""


def submit(arguments: Sequence[str]) -> int:
    """Runs the command; returns the exit code.

    Raises:
        UserError: for mistakes of the user.
    """
    options = _parser().parse_intermixed_args(list(arguments))
    if options.what in RECIPES:
        with own_configs(options.config_dir):
            return _submit(options)
    if options.what not in _VERBS:
        raise ConfigError(f"job: found {options.what!r}; {nearest(options.what, (*RECIPES, *_VERBS))}")
    if options.what != "list" and len(options.overrides) != 1:
        raise ConfigError(f"{options.what}: found {len(options.overrides)} job ids, must be one; `list` shows them")
    with _ended_by_signals():
        from ssl_sec.edges.submit.cluster import Cluster, as_table

    cluster = Cluster(options.address)
    if options.what == "list":
        print(as_table(cluster.jobs()))
        return 0
    (job_id,) = options.overrides
    if options.what == "status":
        details = cluster.details(job_id)
        print(as_table([details]))
        if details.message:
            print(masked(details.message))
        return 0
    if options.what == "stop":
        print(f"{job_id}: asked to save and stop", flush=True)
        print(f"{job_id}: {cluster.stop(job_id).status.value.lower()}")
        return 0
    if options.follow:
        return _follow(cluster, job_id, detach=True)
    print(masked(cluster.logs(job_id)), end="")
    return 0


def _ended_by_signals() -> AbstractContextManager[None]:
    """Ends the process at a signal in a block of imports.

    A library may take a KeyboardInterrupt for the error of a module that it can do without: the job would be sent.
    """
    return handled(lambda *_: os._exit(Stopped.exit_code))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=command("submit"),
        description="Submits a job to a Ray cluster; lists, follows and stops submitted jobs.",
        epilog=_EPILOG.replace("python -m jobs.submit", command("submit")),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("what", help=f"a job to submit: {', '.join(RECIPES)}; or one of {', '.join(_VERBS)}")
    parser.add_argument(
        "overrides",
        nargs="*",
        help=f"group=option and key=value, see {command('<job>')} --help; or a job id",
    )
    parser.add_argument(
        "--address", help="of the cluster's dashboard, http://<head>:8265; default: RAY_ADDRESS, or this machine"
    )
    parser.add_argument("--then", metavar="JOB", help='what follows a pretraining: probe, or "probe probe.epochs=50"')
    parser.add_argument(
        OPTION, metavar="FOLDER", help="your own experiments and options, which are sent too; so are those in ./configs"
    )
    parser.add_argument("--name", help="of the run; default: made of its settings and the time")
    parser.add_argument(
        "--python",
        default="python",
        metavar="PATH",
        help="that runs the job; default: on this machine the Python of this command, else python in the PATH of the "
        "cluster's head; the job prints its path first",
    )
    parser.add_argument(
        "--parallel", type=int, default=1, metavar="N", help="points of a sweep that run at the same time; default: 1"
    )
    parser.add_argument(
        "--follow", action="store_true", help="show the output of the job until it ends; Ctrl-C stops the job"
    )
    parser.add_argument("--detach", action="store_true", help="with --follow: Ctrl-C does not stop the job")
    return parser


def _submit(options: argparse.Namespace) -> int:
    from ssl_sec.edges.submit.orders import Order, check

    order = Order(
        job=options.what,
        overrides=tuple(options.overrides),
        name=options.name,
        then=options.then,
        parallel=options.parallel,
        python=options.python,
    )
    check(order)  # mistakes are reported before Ray and MLflow are imported
    with _ended_by_signals():
        from ssl_sec.edges.submit.cluster import Cluster
        from ssl_sec.edges.submit.submission import submit_order

    cluster = Cluster(options.address)
    sent = submit_order(order, cluster)
    for what, value in sent.items():
        print(f"{what}: {value}", flush=True)
    if options.follow:
        return _follow(cluster, sent["job"], options.detach)
    print(f"follow it: {command('submit')} logs {sent['job']} --follow")
    return 0


def _follow(cluster: "Cluster", job_id: str, detach: bool) -> int:
    from ssl_sec.edges.submit.cluster import exit_code

    try:
        details = cluster.follow(job_id, partial(print, end="", flush=True))
    except KeyboardInterrupt:
        if detach:
            print(f"\n{job_id} continues; follow it: {command('submit')} logs {job_id} --follow", file=sys.stderr)
            return Stopped.exit_code
        print(f"\nstopping {job_id}: a training saves its state first (Ctrl-C again: do not wait)", file=sys.stderr)
        details = cluster.stop(job_id)
    print(f"{job_id}: {details.status.value.lower()}", file=sys.stderr)
    return exit_code(details)
