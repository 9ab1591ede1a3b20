"""Compares trained encoders of one data set by one score with one protocol.

The metrics of a probe are copied to the run whose encoder it probed, and the alias `best` of a registered model points
to the version with the best score.
"""

import contextlib
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mlflow.entities import Metric, Run, RunTag
from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient
from mlflow.utils.mlflow_tags import MLFLOW_PARENT_RUN_ID

from ssl_sec.data.base_config import DataSetConfig
from ssl_sec.data.config import same_set
from ssl_sec.edges.folder.descriptions import DataDescription
from ssl_sec.edges.folder.names import CHECKPOINT_TAG
from ssl_sec.edges.folder.record import data_of
from ssl_sec.edges.tracking.checkpoints import is_checkpoint
from ssl_sec.edges.tracking.registry import logged_model, source_run_id
from ssl_sec.edges.tracking.store import all_pages, experiment_names, quoted
from ssl_sec.edges.tracking.tracker import current_parameters
from ssl_sec.effects import without_effect
from ssl_sec.recipes.probing.config import ProbeConfig, ProbedRun, ProbeJobConfig
from ssl_sec.recipes.registry import LABEL_FREE_SCORES, RECIPES, SCORES
from ssl_sec.recipes.tracking import Checkpoint
from ssl_sec.settings import to_values

# The alias of the best encoder; MLflow itself provides `latest`.
BEST = "best"
PROTOCOL_TAG = "probe.protocol"

_ALIAS_TRIES = 5
_HIGHEST_SCORE = 1e6
# Settings of a probe that add other measurements, or decide whether it follows the pretraining.
_NOT_OF_THE_PROBE = ("enabled", "corruptions", "logistic", "few_shot", "few_shot_draws", "mean_per_class")
# Settings of later versions, which are part of a protocol only if they are not at their defaults.
_ADDED_LATER = ("test_share", "image_size_px", "num_channels", "min_scale")
# Settings of a data set that probes ignore.
_IGNORED_BY_PROBES = frozenset(("max_images",))
# Score at the end of a training -> that of the weights that were saved, where these may be of an earlier epoch.
_OF_CHOSEN_WEIGHTS = {"val/top1": "finetune/val_top1"}
# Key of the labelled set that rates encoders of other images.
_OTHER_DATA = "monitor.data"


def model_name(recipe: str) -> str:
    """The registered model that holds a recipe's encoders."""
    return f"{recipe}-encoder"


def child_probes(client: MlflowClient, recipe: str, checkpoint: Checkpoint = "last") -> dict[str, list[Run]]:
    """The finished probes of a recipe's encoders, newest first, by the id of the run that they probed."""
    experiments = list(experiment_names(client))
    finished = f"tags.job = 'probe' AND tags.recipe = {quoted(recipe)} AND attributes.status = 'FINISHED'"
    probes: dict[str, list[Run]] = {}
    for run in all_pages(lambda token: client.search_runs(experiments, finished, page_token=token)):
        of_checkpoint = run.data.tags.get(CHECKPOINT_TAG, "last")
        if MLFLOW_PARENT_RUN_ID in run.data.tags and of_checkpoint == str(checkpoint):
            probes.setdefault(run.data.tags[MLFLOW_PARENT_RUN_ID], []).append(run)
    return probes


def probe_protocol(probe: ProbeConfig, data: DataSetConfig, test_set: DataDescription) -> str:
    """The protocol of a probe; its hash covers the settings, the lists of images left out, and the test images."""
    left_out = [data.leave_out] if data.leave_out else []
    exact = json.dumps([_settings(probe), test_set.digest, test_set.num_images, *left_out], sort_keys=True)
    labels = "all labels" if probe.labels_per_class is None else f"{probe.labels_per_class} labels per class"
    features = "augmented images" if probe.augment else "cached features"
    number = hashlib.sha256(exact.encode()).hexdigest()[:8]
    without = f" without {', '.join(place.rpartition('/')[2] for place in data.leave_out)}" if left_out else ""
    return f"{data.title}{without}, {labels}, {probe.epochs} epochs, {features} ({number})"


def copy_probe_metrics(
    client: MlflowClient, run_id: str, trained: ProbedRun, config: ProbeJobConfig, probe: Run
) -> None:
    """Copies the metrics of a probe to the run whose encoder it probed.

    A metric keeps its name if the protocol is the run's own, its `probe` settings on its data; for another protocol the
    hash of the protocol is added to the name.
    """
    protocol = probe.data.tags[PROTOCOL_TAG]
    own_data = config.data is None or same_set(config.data, trained.data, _IGNORED_BY_PROBES)
    is_own = own_data and trained.probe is not None and _settings(config.probe) == _settings(trained.probe)
    run = client.get_run(run_id)
    before = run.data.tags.get(PROTOCOL_TAG, protocol)
    group = "probe" if is_own and before == protocol else f"probe_{protocol[-9:-1]}"
    metrics = {
        name.removeprefix("probe/"): value
        for name, value in probe.data.metrics.items()
        if name in ("probe/top1", "probe/top5", "probe/knn_top1", "probe/learning_rate")
    }
    step = max((point.step for point in client.get_metric_history(run_id, "val/knn_top1")), default=0)
    points = [Metric(f"{group}/{name}", value, probe.info.start_time, step) for name, value in metrics.items()]
    client.log_batch(run_id, metrics=points, tags=[RunTag(f"{group}.protocol", protocol)])


def _settings(probe: ProbeConfig) -> Mapping[str, object]:
    defaults = to_values(ProbeConfig())
    ignored = without_effect(ProbeConfig).union(_NOT_OF_THE_PROBE)
    return {
        key: value
        for key, value in to_values(probe).items()
        if key not in ignored and not (key in _ADDED_LATER and value == defaults[key])
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """A score of an encoder.

    Attributes:
        name: name of the metric.
        protocol: protocol of the score; only scores with the same protocol are compared.
        value: a percentage, or a label-free score; higher is better.
    """

    name: str
    protocol: str
    value: float

    @property
    def is_probe(self) -> bool:
        """Whether the score is from a probe."""
        return self.name.startswith("probe/")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Version:
    number: str
    run: Run
    scores: Sequence[Score]
    is_newest: bool  # of its run

    @property
    def digest(self) -> str | None:
        data = data_of(self.run)
        return None if data is None else data.digest


def mark_best(client: MlflowClient, recipe: str) -> None:
    """Points the alias `best` of the recipe's registered model to its best version, if versions can be compared.

    Only versions trained on the data of the newest one (by its digest) are compared, by one score of one protocol: the
    probes' top-1 of the protocol that most versions have, if two or more versions share one; else the held-out score
    of their weights in the training (kNN top-1, or Recall@1 or verification of held-out classes; of images without
    labels their RankMe). Scores on fewer than two classes and scores that are not finite are ignored. Of equal versions
    the oldest is the best.

    Two runs may do this at the same time. Each checks again after setting the alias, until it finds the version that it
    has set; so the last one has seen the versions of all others.
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
    """Describes the newest registered version of a run: data, score (of the newest probe, or its own) and run.

    Earlier versions, of a run that was trained further, keep their descriptions.
    """
    name = model_name(recipe)
    for version in _versions(client, recipe, run_id):
        if not version.is_newest:
            continue
        run = version.run
        tags = {
            key: run.data.tags[key] for key in ("data", "encoder", "loss", "constraint", "seed") if key in run.data.tags
        }
        tags |= {"run": run.info.run_name or "", "run_id": run_id}
        lines = [f"Run: {run.info.run_name} ({run_id})"]
        data = data_of(run)
        if data is not None:
            tags["data.digest"] = data.digest
            lines.insert(0, f"Data: {data.name}, digest {data.digest}: {data.source}")
        if version.scores:
            score = version.scores[0]
            # With all digits, since an earlier version is compared by its tags.
            shown = str(score.value).removesuffix(".0")
            tags |= {"score": shown, "score.name": score.name, "score.protocol": score.protocol}
            lines.insert(0, f"Score: {score.name} {score.value:.4g} ({score.protocol})")
        for key, value in tags.items():
            client.set_model_version_tag(name, version.number, key, value)
        client.update_model_version(name, version.number, "\n\n".join(lines))


def _best(versions: Sequence[_Version]) -> str | None:
    known = [version for version in versions if version.digest is not None]
    if not known:
        return None
    newest = max(known, key=lambda version: int(version.number))
    scores: dict[tuple[bool, str], dict[str, float]] = {}
    # Newest last: of two protocols shared by equally many versions, the newer one is found last.
    for version in sorted(known, key=lambda version: int(version.number)):
        if version.digest != newest.digest:
            continue
        for score in reversed(version.scores):
            of_protocol = scores.pop((score.is_probe, score.protocol), {})
            scores[score.is_probe, score.protocol] = {**of_protocol, version.number: score.value}
    if not scores:
        return None
    places = list(scores)
    chosen = max(places, key=lambda one: (len(scores[one]) > 1, one[0], len(scores[one]), places.index(one)))
    return max(scores[chosen], key=lambda number: (scores[chosen][number], -int(number)))


def _versions(client: MlflowClient, recipe: str, run_id: str | None = None) -> list[_Version]:
    """The registered versions whose runs still exist, each with its scores: those of the newest probe first.

    Of several versions of a run, the newest has the run's last weights. The others have the score of their description.

    Args:
        client: client of the store.
        recipe: name of the recipe.
        run_id: the run whose versions are returned; None for all runs.
    """
    condition = f"name = {quoted(model_name(recipe))}"
    found = all_pages(lambda token: client.search_model_versions(condition, page_token=token))
    if not found:
        return []
    probes = child_probes(client, recipe)
    by_run: dict[str, list[ModelVersion]] = {}
    for version in found:
        with contextlib.suppress(MlflowException):
            by_run.setdefault(source_run_id(client, version), []).append(version)
    versions: list[_Version] = []
    for made_by, of_run in by_run.items():
        with contextlib.suppress(MlflowException):  # versions of deleted runs are ignored
            if run_id not in (None, made_by):
                continue
            run = client.get_run(made_by)
            newest = _newest(client, of_run)
            for version in of_run:
                if version is newest:
                    # An earlier probe is of earlier weights.
                    since = version.creation_timestamp if len(of_run) > 1 else 0
                    of_version = [each for each in probes.get(made_by, []) if each.info.start_time >= since]
                    scores = _scores(run, of_version)
                else:
                    scores = _described_score(version)
                versions.append(
                    _Version(number=str(version.version), run=run, scores=scores, is_newest=version is newest)
                )
    return versions


def _newest(client: MlflowClient, versions: Sequence[ModelVersion]) -> ModelVersion | None:
    """The newest of a run's versions that is not one of its kept checkpoints."""
    for version in sorted(versions, key=lambda version: int(version.version), reverse=True):
        model = logged_model(client, version)
        if model is None or not is_checkpoint(model):
            return version
    return None


def _described_score(version: ModelVersion) -> list[Score]:
    tags = version.tags
    if not {"score", "score.name", "score.protocol"} <= tags.keys():
        return []
    return [Score(name=tags["score.name"], protocol=tags["score.protocol"], value=float(tags["score"]))]


def _scores(run: Run, probes: Sequence[Run]) -> list[Score]:
    found = [
        Score(name="probe/top1", protocol=probe.data.tags[PROTOCOL_TAG], value=probe.data.metrics["probe/top1"])
        for probe in probes
        if "probe/top1" in probe.data.metrics and PROTOCOL_TAG in probe.data.tags and _can_rank(probe)
    ]
    parameters = current_parameters(run)
    # The monitor has no effect on the network, but its settings decide what the scores mean, unless they have none on
    # these either. Without other images, their key is a parameter of its own.
    recipe = RECIPES.get(run.data.tags.get("job", ""))
    free = {_OTHER_DATA, *(() if recipe is None else without_effect(recipe.config))}
    monitor = [
        f"{key} {value}" for key, value in sorted(parameters.items()) if key.startswith("monitor.") and key not in free
    ]
    has_other_labels = f"{_OTHER_DATA}.name" in parameters
    is_labelled = has_other_labels or _num_classes(run) != 0
    found += [
        Score(
            name=name,
            protocol=", ".join([name, *monitor]),
            value=run.data.metrics.get(_OF_CHOSEN_WEIGHTS.get(name, name), run.data.metrics[name]),
        )
        for name in (SCORES if is_labelled else LABEL_FREE_SCORES)
        if name in run.data.metrics
        and (not is_labelled or (name not in LABEL_FREE_SCORES and (has_other_labels or _can_rank(run))))
    ]
    # MLflow stores infinity as a very large number.
    return [score for score in found if 0 <= score.value <= _HIGHEST_SCORE]


def _can_rank(run: Run) -> bool:
    """Whether the images on which a run was scored have two or more classes."""
    return (_num_classes(run) or 0) >= 2


def _num_classes(run: Run) -> int | None:
    """The number of classes of the images on which a run was scored, 0 without labels; None if it is not known."""
    data = data_of(run)
    return None if data is None else json.loads(data.profile or "{}").get("classes")
