"""The command line of jobs.submit."""

import argparse
import itertools
import json
import shlex
import sys
from collections.abc import Sequence
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from ssl_sec.config import PretrainConfig, TrackingConfig
from ssl_sec.edges.composition import compose
from ssl_sec.edges.driver import new_name
from ssl_sec.edges.pipeline import Plan, Stage, chain_of
from ssl_sec.edges.submission import (
    Cluster,
    Command,
    as_table,
    checked,
    exit_code,
    is_this_machine,
    job_id_for,
    mlflow_page,
    passed_on,
)
from ssl_sec.errors import ConfigError, nearest
from ssl_sec.settings import flattened, from_values, to_values

_JOBS = ("pretrain", "probe")
_VERBS = ("status", "logs", "stop", "list")
_EPILOG = """\
examples:
  python -m jobs.submit pretrain experiment=cifar10_sec_100 runtime.num_workers=8 --then probe --follow
  python -m jobs.submit pretrain experiment=cifar10_sec_100 constraint.eta=0.1,0.25,0.5 seed=0,1,2 --parallel 4
  python -m jobs.submit probe run=<MLflow run id>
  python -m jobs.submit list | status <job> | logs <job> [--follow] | stop <job>

A key with several values, separated by commas, makes a sweep: one MLflow run with a child for each point.
Exit codes: those of the job (0, 2 configuration, 3 data, 4 storage, 1 a bug), 130 if it was stopped."""


def submit(arguments: Sequence[str]) -> int:
    """Does what the command line says; returns the exit code.

    Raises:
        UserError: for what the user can mend.
    """
    options = _parser().parse_intermixed_args(list(arguments))
    if options.what in _JOBS:
        return _submit(options)
    if options.what not in _VERBS:
        raise ConfigError(f"found {options.what!r}; {nearest(options.what, (*_JOBS, *_VERBS))}")
    cluster = Cluster(options.address)
    if options.what == "list":
        print(as_table(cluster.jobs()))
        return 0
    if len(options.overrides) != 1:
        raise ConfigError(f"{options.what}: found {len(options.overrides)} job ids, must be one; `list` shows them")
    (job_id,) = options.overrides
    if options.what == "status":
        details = cluster.details(job_id)
        print(as_table([details]))
        if details.message:
            print(details.message)
        return 0
    if options.what == "stop":
        print(f"{job_id}: asked to save and stop", flush=True)
        print(f"{job_id}: {cluster.stop(job_id).status.value.lower()}")
        return 0
    if options.follow:
        return _follow(cluster, job_id, detach=True)
    print(cluster.logs(job_id), end="")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m jobs.submit",
        description="Sends a job to a Ray cluster, and looks after those that were sent.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("what", help="pretrain or probe; or status, logs, stop, list")
    parser.add_argument(
        "overrides", nargs="*", help="of the job's configuration, as for python -m jobs.<job>; or a job id"
    )
    parser.add_argument(
        "--address", help="of the cluster's dashboard, http://<head>:8265; default: RAY_ADDRESS, or this machine"
    )
    parser.add_argument("--then", metavar="JOB", help='what follows a pretraining: probe, or "probe probe.epochs=50"')
    parser.add_argument("--name", help="of the run; default: made from the time and the seed")
    parser.add_argument(
        "--parallel", type=int, default=1, metavar="N", help="points of a sweep that run at once; default: 1"
    )
    parser.add_argument(
        "--follow", action="store_true", help="show what the job prints until it ends; Ctrl-C stops the job"
    )
    parser.add_argument("--detach", action="store_true", help="with --follow: Ctrl-C leaves the job running")
    return parser


def _submit(options: argparse.Namespace) -> int:
    environment = passed_on()
    if options.parallel < 1:
        raise ConfigError(f"--parallel: found {options.parallel}, must be ≥ 1")
    if options.then is not None and options.what != "pretrain":
        raise ConfigError(f"--then: found {options.then!r} after {options.what}; allowed after pretrain")
    for overrides, _ in points_of(options.overrides):  # what is wrong is told before a cluster is looked for
        checked(options.what, overrides, options.name, is_local=True)
    cluster = Cluster(options.address)
    is_local = is_this_machine(cluster.address)
    points: list[tuple[Command, tuple[str, ...]]] = []
    base = options.name or new_name("sweep")
    for overrides, swept in points_of(options.overrides):
        command = checked(options.what, overrides, _point_name(base, swept) if swept else options.name, is_local)
        points.append((command, swept))
    first = points[0][0]
    name = base if len(points) > 1 else first.name
    was_given = options.name is not None or any(o.startswith("run_name=") for o in options.overrides)
    job_id = job_id_for(first.recipe, name, is_new=not was_given)
    values = compose(first.job, first.overrides)
    tracking = from_values(TrackingConfig, values["tracking"])
    metadata = {"recipe": first.recipe, "job": first.job, "name": name}
    if len(points) == 1 and options.then is None:
        entrypoint = first.entrypoint
    else:
        plan = Plan(
            name=name,
            recipe=first.recipe,
            output_dir=str(values["output_dir"]),
            uri=tracking.uri,
            experiment=tracking.experiment,
            parallel=options.parallel,
            points=tuple(chain_of(command, _then(options.then, command), swept) for command, swept in points),
        )
        entrypoint = shlex.join(["exec", "python", "-m", "jobs.pipeline", json.dumps(to_values(plan))])
    cluster.submit(entrypoint, job_id, metadata, environment)
    print(f"job: {job_id}")
    print(f"dashboard: {cluster.address}/#/jobs/{job_id}")
    uri = tracking.uri or environment.get("MLFLOW_TRACKING_URI") or f"sqlite:///{values['output_dir']}/mlflow.db"
    print(f"MLflow: {mlflow_page(uri, tracking.experiment or first.recipe, job_id)}", flush=True)
    if options.follow:
        return _follow(cluster, job_id, options.detach)
    print(f"follow it: python -m jobs.submit logs {job_id} --follow")
    return 0


def points_of(overrides: Sequence[str]) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
    """The points of a sweep: all overrides of each, and among them those that the sweep varies.

    Raises:
        ConfigError: for an override that is none.
    """
    parser = OverridesParser.create()
    choices: list[list[str]] = []
    for text in overrides:
        try:
            override = parser.parse_override(text)
        except HydraException as error:
            raise ConfigError(f"{text!r}: not understood; give key=value") from error
        if override.is_sweep_override():
            choices.append([f"{override.get_key_element()}={value}" for value in override.sweep_string_iterator()])
        else:
            choices.append([text])
    return [
        (point, tuple(value for value, among in zip(point, choices, strict=True) if len(among) > 1))
        for point in itertools.product(*choices)
    ]


def _point_name(name: str, swept: Sequence[str]) -> str:
    values = [override.partition("=") for override in swept]
    return "-".join([name, *(f"{key.rpartition('.')[2]}{value}".replace("/", "-") for key, _, value in values)])


def _then(then: str | None, command: Command) -> tuple[Stage, ...]:
    """The probe after a pretraining: as the pretraining's configuration describes it, unless it is said otherwise."""
    if then is None:
        return ()
    job, *changes = shlex.split(then)
    if job != "probe":
        raise ConfigError(f"--then: found {job!r}; allowed: probe")
    config = from_values(PretrainConfig, compose("pretrain", command.overrides))
    settings = {f"probe.{key}": value for key, value in flattened(to_values(config.probe)).items() if key != "enabled"}
    settings |= {"output_dir": config.output_dir, "run_name": f"{command.name}-probe"}
    carried = [o for o in command.overrides if o.startswith(("runtime", "tracking.uri=", "tracking.experiment="))]
    overrides = (*(f"{key}={_in_hydra(value)}" for key, value in settings.items()), *carried, *changes)
    checked("probe", (*overrides, "run=the-one-before"), None, is_local=False)
    return (Stage(job="probe", overrides=overrides),)


def _in_hydra(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _follow(cluster: Cluster, job_id: str, detach: bool) -> int:
    try:
        details = cluster.follow(job_id, _print)
    except KeyboardInterrupt:
        if detach:
            print(f"\n{job_id} goes on; follow it: python -m jobs.submit logs {job_id} --follow", file=sys.stderr)
            return 130
        print(f"\nstopping {job_id}: its state is saved first (Ctrl-C again leaves it to itself)", file=sys.stderr)
        details = cluster.stop(job_id)
    print(f"{job_id}: {details.status.value.lower()}", file=sys.stderr)
    return exit_code(details)


def _print(text: str) -> None:
    print(text, end="", flush=True)
