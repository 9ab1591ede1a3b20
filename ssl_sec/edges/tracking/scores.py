"""By what trained encoders are compared: one figure of one protocol, of encoders of one data set.

A probe's figures also stand on the run whose encoder it probed, and the alias `best` of a registered model points to
the version with the highest of the figures that can be compared.
"""

import contextlib
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mlflow.entities import Dataset, Metric, Run, RunTag
from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient
from mlflow.utils.mlflow_tags import MLFLOW_PARENT_RUN_ID

from ssl_sec.data.config import DataConfig
from ssl_sec.edges.folder.descriptions import DataDescription
from ssl_sec.edges.folder.folder import SCORES
from ssl_sec.edges.tracking.store import all_pages, quoted
from ssl_sec.recipes.config import TrainingConfig
from ssl_sec.recipes.probing.config import ProbeConfig, ProbeJobConfig
from ssl_sec.settings import to_values

# The alias of the best encoder; MLflow itself knows the newest as `latest`.
BEST = "best"
PROTOCOL_TAG = "probe.protocol"

_ALIAS_TRIES = 5
# Where a data set lies, and how it is read, which changes none of its images.
_PLACES = ("root", "download", "cache_folder", "resident_limit_mib")


def model_name(recipe: str) -> str:
    """The registered model that holds a recipe's encoders."""
    return f"{recipe}-encoder"


def child_probes(client: MlflowClient, recipe: str) -> dict[str, list[Run]]:
    """The finished probes of a recipe's encoders, newest first, by the id of the run that they belong to."""
    experiments = [str(experiment.experiment_id) for experiment in client.search_experiments()]
    finished = f"tags.job = 'probe' AND tags.recipe = {quoted(recipe)} AND attributes.status = 'FINISHED'"
    probes: dict[str, list[Run]] = {}
    for run in all_pages(lambda token: client.search_runs(experiments, finished, page_token=token)):
        if MLFLOW_PARENT_RUN_ID in run.data.tags:
            probes.setdefault(run.data.tags[MLFLOW_PARENT_RUN_ID], []).append(run)
    return probes


def probe_protocol(probe: ProbeConfig, data: str, test_set: DataDescription) -> str:
    """How a probe was made, in words; the number at the end stands for all of its settings and the test images."""
    exact = json.dumps([_settings(probe), test_set.digest, test_set.num_images], sort_keys=True)
    labels = "all labels" if probe.labels_per_class is None else f"{probe.labels_per_class} labels per class"
    features = "augmented images" if probe.augment else "cached features"
    number = hashlib.sha256(exact.encode()).hexdigest()[:8]
    return f"{data}, {labels}, {probe.epochs} epochs, {features} ({number})"


def copy_probe_figures(
    client: MlflowClient, run_id: str, trained: TrainingConfig, config: ProbeJobConfig, probe: Run
) -> None:
    """Puts a probe's figures on the run whose encoder it probed.

    They are called as on the probe's run if its protocol is the run's own, its `probe` settings on its data; those of
    another protocol have the number of the protocol in their names.

    Args:
        client: of the store.
        run_id: of the pretraining.
        trained: the pretraining's configuration.
        config: the probe's.
        probe: the probe's run.
    """
    protocol = probe.data.tags[PROTOCOL_TAG]
    own_data = config.data is None or _same_set(config.data, trained.data)
    is_own = (
        own_data and trained.linear_probe is not None and _settings(config.probe) == _settings(trained.linear_probe)
    )
    run = client.get_run(run_id)
    before = run.data.tags.get(PROTOCOL_TAG, protocol)
    group = "probe" if is_own and before == protocol else f"probe_{protocol[-9:-1]}"
    figures = {
        name.removeprefix("probe/"): value
        for name, value in probe.data.metrics.items()
        if name in ("probe/top1", "probe/top5", "probe/knn_top1", "probe/learning_rate")
    }
    step = max((point.step for point in client.get_metric_history(run_id, "val/knn_top1")), default=0)
    points = [Metric(f"{group}/{name}", value, probe.info.start_time, step) for name, value in figures.items()]
    client.log_batch(run_id, metrics=points, tags=[RunTag(f"{group}.protocol", protocol)])


def _settings(probe: ProbeConfig) -> Mapping[str, object]:
    return {key: value for key, value in to_values(probe).items() if key != "enabled"}


def _same_set(first: DataConfig, second: DataConfig) -> bool:
    """Whether two configs name one data set, wherever it lies; a probe has no use for max_images."""
    one, other = (
        {key: value for key, value in to_values(data).items() if key not in (*_PLACES, "max_images")}
        for data in (first, second)
    )
    return one == other and first.title == second.title


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """What an encoder may be judged by.

    Attributes:
        name: of the metric.
        protocol: figures of different protocols are not compared.
        value: in percent; more is better.
    """

    name: str
    protocol: str
    value: float

    @property
    def is_probe(self) -> bool:
        """Whether a probe gave it."""
        return self.name.startswith("probe/")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Version:
    number: str
    run: Run
    figures: Sequence[Figure]

    @property
    def digest(self) -> str | None:
        data = _data_of(self.run)
        return None if data is None else data.digest


def mark_best(client: MlflowClient, recipe: str) -> None:
    """Points the alias `best` of the recipe's registered model to its best version, if one can be told.

    Only versions with the data of the newest one (by its digest) are compared, by one figure of one protocol: the
    probes' top-1 of the protocol that most versions have, if two have one; else the last held-out score of the training
    (kNN top-1, or Recall@1 or verification of held-out classes). Figures of fewer than two classes do not count, nor do
    those that are not finite. Of equals the earliest version stays.

    Two runs may do so at once. Each looks again after it has set the alias, until what it set is what it finds; so
    whoever sets it last has seen the versions of all that set it before.
    """
    name = model_name(recipe)
    for _ in range(_ALIAS_TRIES):
        best = _best(_versions(client, recipe))
        if best is None:
            return
        aliases = client.get_registered_model(name).aliases
        if str(aliases.get(BEST)) == best:
            return
        client.set_registered_model_alias(name, BEST, best)


def describe_versions(client: MlflowClient, recipe: str, run_id: str) -> None:
    """Writes on a run's registered versions what its encoder is: data, the newest probe's score or its own, the run."""
    name = model_name(recipe)
    mine = [version for version in _versions(client, recipe) if version.run.info.run_id == run_id]
    for version in mine:
        run = version.run
        told = {
            key: run.data.tags[key] for key in ("data", "encoder", "loss", "constraint", "seed") if key in run.data.tags
        }
        told |= {"run": run.info.run_name or "", "run_id": run_id}
        lines = [f"Run: {run.info.run_name} ({run_id})"]
        data = _data_of(run)
        if data is not None:
            told["data.digest"] = data.digest
            lines.insert(0, f"Data: {data.name}, digest {data.digest}: {data.source}")
        if version.figures:
            score = version.figures[0]
            told |= {"score": f"{score.value:.4g}", "score.name": score.name, "score.protocol": score.protocol}
            lines.insert(0, f"Score: {score.name} {score.value:.4g} ({score.protocol})")
        for key, value in told.items():
            client.set_model_version_tag(name, version.number, key, value)
        client.update_model_version(name, version.number, "\n\n".join(lines))


def _best(versions: Sequence[_Version]) -> str | None:
    known = [version for version in versions if version.digest is not None]
    if not known:
        return None
    newest = max(known, key=lambda version: int(version.number))
    scores: dict[tuple[bool, str], dict[str, float]] = {}
    # Newest last, so that of the protocols that as many versions have the newest is found last.
    for version in sorted(known, key=lambda version: int(version.number)):
        if version.digest != newest.digest:
            continue
        for figure in reversed(version.figures):
            of_protocol = scores.pop((figure.is_probe, figure.protocol), {})
            scores[figure.is_probe, figure.protocol] = {**of_protocol, version.number: figure.value}
    if not scores:
        return None
    places = list(scores)
    chosen = max(places, key=lambda one: (len(scores[one]) > 1, one[0], len(scores[one]), places.index(one)))
    return max(scores[chosen], key=lambda number: (scores[chosen][number], -int(number)))


def _versions(client: MlflowClient, recipe: str) -> list[_Version]:
    """The registered versions whose runs are still there, with their figures: those of the newest probe first."""
    found = client.search_model_versions(f"name = {quoted(model_name(recipe))}")
    if not found:
        return []
    probes = child_probes(client, recipe)
    versions: list[_Version] = []
    for version in found:
        with contextlib.suppress(MlflowException):  # a run that is gone is no candidate
            run = client.get_run(_run_id(client, version))
            figures = _figures(run, probes.get(run.info.run_id, []))
            versions.append(_Version(number=str(version.version), run=run, figures=figures))
    return versions


def _run_id(client: MlflowClient, version: ModelVersion) -> str:
    if version.run_id:
        return version.run_id
    # Of versions that were registered from a logged model.
    return (client.get_logged_model(version.model_id).source_run_id if version.model_id else None) or ""


def _figures(run: Run, probes: Sequence[Run]) -> list[Figure]:
    found = [
        Figure(name="probe/top1", protocol=probe.data.tags[PROTOCOL_TAG], value=probe.data.metrics["probe/top1"])
        for probe in probes
        if "probe/top1" in probe.data.metrics and PROTOCOL_TAG in probe.data.tags and _can_rank(probe)
    ]
    monitor = ", ".join(
        f"{key} {value}"
        for key, value in sorted(run.data.params.items())
        if key.startswith("monitor.") and not key.startswith("monitor.every_")
    )
    found += [
        Figure(name=score, protocol=f"{score}, {monitor}", value=run.data.metrics[score])
        for score in SCORES
        if score in run.data.metrics and _can_rank(run)
    ]
    # A percentage; MLflow keeps infinity as a very large number.
    return [figure for figure in found if 0 <= figure.value <= 100]


def _can_rank(run: Run) -> bool:
    """Whether the images that a run was judged on have two classes or more."""
    data = _data_of(run)
    return data is not None and json.loads(data.profile or "{}").get("classes", 0) >= 2


def _data_of(run: Run) -> Dataset | None:
    """The set that a run was trained on, or for a probe the one that it was tested on."""
    inputs = run.inputs.dataset_inputs if run.inputs is not None else []
    return inputs[0].dataset if inputs else None
