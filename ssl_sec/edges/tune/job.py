"""Searches the best values of some keys: trainings as trials of Ray Tune, in one run of MLflow."""

import logging
import os
import shlex
import signal
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray import tune
from ray.tune import Callback
from ray.tune.schedulers import AsyncHyperBandScheduler, FIFOScheduler, TrialScheduler
from ray.tune.search import BasicVariantGenerator, SearchAlgorithm, Searcher

from ssl_sec.edges.config.tune import TuneConfig
from ssl_sec.edges.environment import cluster_address
from ssl_sec.edges.folder.folder import RunFolder
from ssl_sec.edges.folder.names import new_name
from ssl_sec.edges.overrides import key_of, parsed
from ssl_sec.edges.packaging import command
from ssl_sec.edges.run.on_ray.joining import connect
from ssl_sec.edges.run.on_ray.scaling import Nodes, node_resources
from ssl_sec.edges.run.running import running
from ssl_sec.edges.run.signals import announce_stop, stop_requests
from ssl_sec.edges.run.sweeps import Sweep
from ssl_sec.edges.storage.places import is_remote, local_folder
from ssl_sec.edges.tables import in_markdown
from ssl_sec.edges.tracking.tracker import TrackedRun
from ssl_sec.edges.tune.claims import claimed
from ssl_sec.edges.tune.space import Choices, Interval, Search, chosen_overrides
from ssl_sec.edges.tune.trial import TrainingTrial, TrialPlan, lacks_metric, last_line, log_of, stop_path, trial_name
from ssl_sec.edges.tune.trials import Trial, best_first, files_of, records_of, rows_of, table_of
from ssl_sec.errors import ConfigError, Stopped, UserError, counted, writing

logger = logging.getLogger("ssl_sec")

# The groups of keys that decide what is measured.
_MEASURING = ("data", "monitor")

# Number of trials in the printed table.
_SHOWN = 10

# Whether a signal has asked this process to stop its search. Ray pickles the callback, which looks at it.
_stop_asked = threading.Event()
# Whether the first trial that ended lacks the metric, as all others would.
_unmeasured = threading.Event()


def run_tune(search: Search) -> str:
    """Runs the trials that have not ended yet; returns a table of the best, and the command that trains with them.

    Raises:
        ConfigError: if the folder holds another search, another process runs it, or the searcher is not installed.
        UserError: if all trials failed, with the reason of the last; a ConfigError if they lack the metric.
        Stopped: if the job was interrupted; the trials are kept.
    """
    trials, num_failed, made = run_search(search)
    train = " ".join(map(shlex.quote, [*_without_measurements(search), *trials[0].overrides]))
    return "\n".join(
        [
            "",
            table_of(trials[:_SHOWN], search),
            f"({counted(len(trials), 'trial')}{f', {num_failed} failed' if num_failed else ''}; no test image was "
            "looked at)",
            "",
            f"trials: {made}",
            f"train with the best: {command(search.recipe.name)} {train}",
        ]
    )


def run_search(search: Search) -> tuple[list[Trial], int, Path]:
    """Runs the trials that have not ended yet; raises the errors of `run_tune`.

    Returns:
        The measured trials, the best first; the number of failed trials; the folder of their tables and logs.
    """
    config = search.config
    cluster_address(None)  # refuses an address that Ray cannot join
    if is_remote(config.output_dir):
        raise ConfigError(f"output_dir: found {config.output_dir!r}, must be a folder, which all nodes share")
    name = config.run_name or new_name(f"{config.recipe_name}-tune")
    folder = local_folder(config.output_dir) / config.recipe_name
    # The folder of Ray's state: two processes that write to it would spoil the search for both.
    with running(RunFolder(_state_path(folder, name))):
        return _run_as(name, folder, search)


def _run_as(name: str, folder: Path, search: Search) -> tuple[list[Trial], int, Path]:
    """Runs the search of a name, which this process has locked."""
    config = search.config
    described = _described(search)
    is_new = claimed(folder, name, described)
    known = folder / f"{name}.tune.mlflow_run_id"
    sweep = Sweep.of_trainings(config, described, known, job="tune", name=name)
    earlier = sorted(folder.glob(f"{name}-[0-9][0-9][0-9]*/mlflow_run_id"))
    sweep.adopt([path.read_text().strip() for path in earlier])
    parent = [] if sweep.run_id is None else [f"tracking.parent_run={sweep.run_id}"]
    plan = TrialPlan(
        name=name,
        folder=str(folder),
        cwd=os.getcwd(),
        metric=search.metric,
        job=search.recipe.name,
        every=search.every,
        length=search.length,
        overrides=[*_without_name(search.of_trials), f"recipe={config.recipe_name}", *parent],
    )
    trials: list[Trial] = []
    failures: list[str] = []
    made = folder / f"{name}-logs"
    logger.info("search %s: the output of its trials is in %s", name, made)
    sweep.log_where()

    def upload(run: TrackedRun) -> None:
        if trials:
            run.log_latest(records_of(search, trials))
            run.describe_results(in_markdown(*rows_of(best_first(search, trials)[:_SHOWN], search)))
            run.client.log_text(run.run_id, table_of(trials, search) + "\n", "sweep.txt")
            for path in files_of(search, trials, made):
                run.log_file(path)

    with sweep.ended_with(upload), _interruptible():
        stop_path(plan).unlink(missing_ok=True)  # left for an earlier process
        _run(search, plan, is_new, trials, failures)
        if not trials:
            again = "the same command" if config.run_name else f"the same command with run_name={name}"
            if _unmeasured.is_set():
                raise ConfigError(f"{failures[-1]}; no further trial was started")
            raise UserError(f"all trials failed; the last: {failures[-1]}; {again} runs them again")
    return best_first(search, trials), len(failures), made


def _run(search: Search, plan: TrialPlan, is_new: bool, trials: list[Trial], failures: list[str]) -> None:
    """Runs the trials; adds those that were measured, and the reasons why others failed."""
    logging.getLogger("ray.tune").setLevel(logging.CRITICAL)  # our own lines report the trials
    os.environ["RAY_AIR_NEW_OUTPUT"] = "0"  # the new output prints each error in ten lines
    connect(None, "tune")
    tuner = _tuner(search, plan, is_new)
    logger.info("searching %s in %s", ", ".join(search.space), counted(search.tune.trials, "trial"))
    results = tuner.fit()
    stop_path(plan).unlink(missing_ok=True)  # all trials have ended
    for result in results:
        if result.error is not None:
            failures.append(_reason(result.error))
        elif result.metrics is not None and search.metric in result.metrics:
            trials.append(_trial(search, Path(result.path).name, result.config or {}, result.metrics))
    trials.sort(key=lambda trial: trial.name)
    if _stop_asked.is_set():
        raise Stopped(f"stopped; the same command with run_name={plan['name']} continues the search")


def _tuner(search: Search, plan: TrialPlan, is_new: bool) -> tune.Tuner:
    """The search in Ray Tune: a new one, or that of an earlier process with the trials that have not ended."""
    tuning, state = search.tune, _state_path(Path(plan["folder"]), plan["name"])
    trainable = tune.with_resources(
        tune.with_parameters(TrainingTrial, plan=plan, space=search.space), _resources(tuning, node_resources())
    )
    if not is_new and tune.Tuner.can_restore(str(state)):
        logger.info("the search in %s continues", state)
        # A trial that resumes reports its measurements again, which Optuna knows already.
        warnings.filterwarnings("ignore", message="The reported value is ignored")
        # What made a trial fail may have passed; it continues from what it has saved, and may fail once more.
        return tune.Tuner.restore(str(state), trainable, resume_unfinished=True, resume_errored=True)
    # Ray counts the trials of a searcher from 1, and those that it samples itself from 0.
    name_of = partial(trial_name, plan["name"], 0 if tuning.searcher == "random" else 1)
    return tune.Tuner(
        trainable,
        param_space={key: _sampled(dimension) for key, dimension in search.space.items()},
        tune_config=tune.TuneConfig(
            metric=search.metric,
            mode=tuning.mode,
            search_alg=_searcher(search),
            scheduler=_scheduler(search),
            num_samples=tuning.trials,
            max_concurrent_trials=tuning.max_concurrent,
            trial_name_creator=name_of,
            trial_dirname_creator=name_of,
        ),
        run_config=tune.RunConfig(
            name=state.name,
            storage_path=plan["folder"],
            verbose=0,
            callbacks=[_Progress(search, plan)],
            checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False),
        ),
    )


def _trial(search: Search, name: str, config: Mapping[str, Any], metrics: Mapping[str, Any]) -> Trial:
    """A trial with its values and its last measurement, as Ray Tune has them."""
    values = {key: config[key] for key in search.space}
    return Trial(
        name=name,
        overrides=chosen_overrides(search.space, values),
        values=values,
        metric=float(metrics[search.metric]),
        at=int(metrics["at"]),
    )


def _state_path(folder: Path, search: str) -> Path:
    return folder / f"{search}-ray"


@contextmanager
def _interruptible() -> Iterator[None]:
    """Lets SIGINT, SIGTERM and SIGHUP end Ray Tune after the trials have saved their states; a later SIGINT interrupts.

    `_Progress` ends it.
    """

    def ask() -> None:
        _stop_asked.set()
        announce_stop("the trials save their states first")

    os.environ["TUNE_DISABLE_SIGINT_HANDLER"] = "1"
    _stop_asked.clear()
    _unmeasured.clear()
    with stop_requests(ask):
        yield


class _Progress(Callback):
    """Logs when trials begin and end, and ends the search when a stop was asked or no trial has the metric."""

    def __init__(self, search: Search, plan: TrialPlan) -> None:
        self._search, self._plan = search, plan

    def on_step_end(self, iteration: int, trials: list[Any], **info: Any) -> None:
        """Stops the trials if that was asked or is due, waits until they have saved, and ends Ray Tune.

        Only here: no result of a trial that stops is read any more, so Ray Tune stores that the trial is unfinished.

        Raises:
            StorageError: if the request cannot be written.
        """
        if not (_stop_asked.is_set() or _unmeasured.is_set()):
            return
        path = stop_path(self._plan)
        with writing("output_dir", path):
            path.touch()
        actors = [actor for trial in trials if (actor := trial.temporary_state.ray_actor) is not None]
        stopping = [actor.cleanup.remote() for actor in actors]
        while stopping:  # an actor that was lost counts as stopped
            _, stopping = ray.wait(stopping, num_returns=len(stopping), timeout=0.5)
        signal.raise_signal(signal.SIGUSR1)  # Ray Tune handles this signal

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Logs the values of a trial, which may train for hours before it ends."""
        logger.info("%s begins with %s", trial, ", ".join(chosen_overrides(self._search.space, trial.config)))

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Logs the metric of a trial, and the best so far."""
        metric, tuning = self._search.metric, self._search.tune
        ended = [each for each in trials if each.is_finished() or each is trial]
        measured = [each.last_result for each in ended if metric in (each.last_result or {})]
        if metric not in (trial.last_result or {}):
            return
        value, at = trial.last_result[metric], trial.last_result["at"]
        logger.info(
            "%s (%d of %d): %s %.4g%s with %s; best %.4g",
            *(trial, len(ended), tuning.trials, metric, value),
            "" if at == self._search.length else f" when it was stopped after {self._length(at)}",
            ", ".join(chosen_overrides(self._search.space, trial.config)),
            max(measured, key=lambda last: self._search.rank(last[metric], last["at"]))[metric],
        )

    def _length(self, at: int) -> str:
        return counted(at, self._search.recipe.length.removesuffix("s"))

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Logs why a trial failed; without the metric, the others are stopped unless their measurements may differ."""
        reason = last_line(log_of(self._plan, str(trial)))
        logger.warning("%s failed: %s", trial, reason or "see Ray's logs")
        metric, searched = self._search.metric, {key.partition(".")[0] for key in self._search.space}
        is_measured = any(metric in (each.last_result or {}) for each in trials)
        if lacks_metric(reason, metric) and not is_measured and searched.isdisjoint(_MEASURING):
            _unmeasured.set()


def _reason(error: BaseException) -> str:
    """The last line of a trial's error, which Ray wraps."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines or [repr(error)])[-1].removeprefix("RuntimeError: ")


def _resources(tuning: TuneConfig, nodes: Nodes) -> dict[str, float]:
    """The share of the cluster that a trial gets, on one of the nodes.

    Raises:
        ConfigError: if no node has so much.
    """
    most_gpus = max(node.get("GPU", 0.0) for node in nodes)
    gpus = float(most_gpus > 0) if tuning.gpus_per_trial is None else tuning.gpus_per_trial
    if gpus > most_gpus:
        raise ConfigError(
            f"gpus_per_trial: found {gpus:g}, must be at most {most_gpus:g}, the number of GPUs of the largest node"
        )
    fit = [node for node in nodes if node.get("GPU", 0.0) >= gpus]
    # Of the node with the fewest CPUs for each GPU.
    share = max(1.0, min(node.get("CPU", 0.0) * gpus // node["GPU"] for node in fit)) if gpus else 1.0
    cpus = share if tuning.cpus_per_trial is None else tuning.cpus_per_trial
    most_cpus = max(node.get("CPU", 0.0) for node in fit)
    if cpus > most_cpus:
        with_gpus = f" with {gpus:g} GPU{'s' if gpus > 1 else ''}" if gpus else ""
        raise ConfigError(
            f"cpus_per_trial: found {cpus:g}, must be at most {most_cpus:g}, the number of CPUs of the largest node"
            f"{with_gpus}"
        )
    return {"cpu": cpus, "gpu": gpus}


def _sampled(dimension: Choices | Interval) -> Any:
    """The distribution of a key's values for Ray Tune."""
    if isinstance(dimension, Choices):
        return tune.choice(list(dimension.values))
    low, high = dimension.low, dimension.high
    if dimension.is_integer:
        return (tune.lograndint if dimension.is_log else tune.randint)(int(low), int(high) + 1)
    return (tune.loguniform if dimension.is_log else tune.uniform)(low, high)


def _searcher(search: Search) -> Searcher | SearchAlgorithm:
    if search.tune.searcher == "random":
        # Ray applies `max_concurrent_trials` to searchers that suggest values only.
        return BasicVariantGenerator(random_state=search.config.seed, max_concurrent=search.tune.max_concurrent or 0)
    try:
        import optuna
        from ray.tune.search.optuna import OptunaSearch
    except ImportError as error:
        raise ConfigError(
            "searcher: found 'optuna', which needs pip install 'ssl_sec[tune]'; or searcher=random"
        ) from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return OptunaSearch(seed=search.config.seed % 2**32)


def _scheduler(search: Search) -> TrialScheduler:
    tuning, length = search.tune, search.length
    if tuning.scheduler == "none":
        return FIFOScheduler()
    grace = tuning.grace_epochs or tuning.grace_steps
    grace = max(1, length // 8) if grace is None else min(grace, length)
    return AsyncHyperBandScheduler(
        time_attr="at", max_t=max(length, 1), grace_period=grace, reduction_factor=tuning.reduction_factor
    )


def _described(search: Search) -> dict[str, Any]:
    """The settings that affect a search, by key."""
    space = {f"search.{key}": str(dimension) for key, dimension in search.space.items()}
    shared = [one for one in _without_name(search.shared) if not parsed(one).key_or_group.endswith(".enabled")]
    return {**asdict(search.tune), **space, "overrides": " ".join(sorted(shared))}


def _without_name(overrides: Sequence[str]) -> list[str]:
    return [one for one in overrides if key_of(one) not in ("run_name", "resume", "recipe")]


def _without_measurements(search: Search) -> list[str]:
    """The shared overrides without those for measurements and tracking, for a training with a trial's values."""
    return [one for one in _without_name(search.shared) if not key_of(one).startswith(("monitor.every_", "tracking."))]
