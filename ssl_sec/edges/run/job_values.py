"""The configuration of a job: the overrides, applied to the configuration of the run that the job refers to.

A resumed run has its own configuration, a probe has the probe settings of its pretraining, and a fine-tuning has the
encoder of its run, and the run's data set unless another is given. The files of another set are read at the
size and with the channels that the run was trained on.
"""

import logging
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import yaml
from hydra.core.override_parser.types import Override
from omegaconf import OmegaConf

from ssl_sec.edges.composition.compose import compose, composed_yaml, config_of, resolved
from ssl_sec.edges.composition.options import primary
from ssl_sec.edges.environment import find_cluster
from ssl_sec.edges.folder.stored_config import require_whole_data, stored_values, with_credentials
from ssl_sec.edges.masking import HIDDEN
from ssl_sec.edges.overrides import assigned, key_of, parsed, understood
from ssl_sec.edges.storage.places import is_remote, local_folder
from ssl_sec.errors import ConfigError, shown
from ssl_sec.recipes.registry import FINETUNE, PROBE, RECIPES, probed, trainings
from ssl_sec.recipes.tracking import Checkpoint, TrackingConfig
from ssl_sec.rules import check
from ssl_sec.settings import flattened, from_values, to_values

if TYPE_CHECKING:
    from ssl_sec.data.config import DataConfig
    from ssl_sec.recipes.config import TrainingConfig

logger = logging.getLogger("ssl_sec")

# Keys whose value names a run: its id may look like a number, and its path may contain characters of Hydra's grammar.
_RUN_KEYS = ("run", "resume", "folder")
# Jobs about a run, which keep what they make in its output folder if it is given by its folder.
_BESIDE_A_RUN = ("probe", "transfer", "finetune", "embed", "export")
_RESUME = ("true", "false", "auto", "null")


def values_of(job: str, overrides: Sequence[str]) -> dict[str, Any]:
    """The values of a job's configuration.

    Args:
        job: name of the primary config.
        overrides: overrides in Hydra's grammar; `resume=<folder, name or id>` takes the configuration of that run.

    Raises:
        UserError: for a key, a value or a run that does not exist.
    """
    overrides = quoted(overrides)
    resumed = resumed_run(job, overrides)
    if resumed is not None:
        return _resumed_values(job, resumed, [each for each in overrides if key_of(each) != "resume"])
    values = _new_values(job, overrides)
    if job in _BESIDE_A_RUN and "output_dir" not in map(key_of, overrides):
        _choose_output_dir(values)
    return values


def _new_values(job: str, overrides: Sequence[str]) -> dict[str, Any]:
    """The values of a job that resumes no run."""
    if job == PROBE.name and _value_of("run", overrides) is not None:
        return _probe_values(overrides)
    if job == FINETUNE.name:
        return _finetune_values(overrides)
    if job in ("embed", "neighbours", "transfer"):
        overrides = _with_runtime(job, overrides)
    return compose(job, overrides)


def _choose_output_dir(values: dict[str, Any]) -> None:
    """Takes the output folder of the run that is given as a folder; a folder outside of one is a copy of a run."""
    from ssl_sec.edges.folder.finding import folder_at  # with torch

    folder = folder_at(_run_of(values) or "") if values["output_dir"] == "runs" else None  # else a config names another
    if folder is None or folder.path.parent.name != folder.identity.tags.get("recipe"):
        return
    output_dir = folder.location.rsplit("/", 2)[0]
    if output_dir != str(local_folder(values["output_dir"])):
        values["output_dir"] = output_dir
        logger.info("output_dir=%s: that of the run", output_dir)


def _run_of(values: Mapping[str, Any]) -> str | None:
    run = values["run"]
    if run is None or isinstance(run, str):
        return run
    raise ConfigError(f"run: found {shown(run)}, must be a string")


def resumed_run(job: str, overrides: Sequence[str]) -> str | None:
    """The folder, name or id given for `resume`; None if it is true, false or auto."""
    word = _value_of("resume", quoted(overrides))
    return word if job in trainings() and word is not None and word.lower() not in _RESUME else None


def format_values(job: str, overrides: Sequence[str]) -> str:
    """The configuration as YAML; required keys that are missing are `???`."""
    overrides = quoted(overrides)
    has_run = job in (PROBE.name, FINETUNE.name) and _value_of("run", overrides) is not None
    if has_run or resumed_run(job, overrides) is not None:
        return yaml.safe_dump(values_of(job, overrides), sort_keys=False)
    return composed_yaml(config_of(job, overrides), overrides)


def quoted(overrides: Sequence[str]) -> list[str]:
    """The overrides, with values that name a run quoted for Hydra."""
    return [_quoted(override) for override in overrides]


def _quoted(override: str) -> str:
    key, sign, word = override.partition("=")
    if key_of(override) not in _RUN_KEYS or not sign or not word or word[0] in "'\"" or word.lower() in _RESUME:
        return override
    return assigned(key, word)


def _value_of(key: str, overrides: Sequence[str]) -> str | None:
    """The last value given for a top-level key."""
    given = [override for override in overrides if key_of(override) == key]
    value = _parsed(given[-1]).value() if given else None
    return None if value is None else str(value)


def _parsed(text: str) -> Override:
    override = parsed(understood(text))
    if override.is_sweep_override() or override.is_delete():
        raise ConfigError(f"{text!r}: found several values or none, must be one: key=value")
    return override


def _resumed_values(job: str, word: str, typed: Sequence[str]) -> dict[str, Any]:
    """The configuration of the run to resume, with the overrides."""
    from ssl_sec.edges.folder.finding import find_folder  # with torch

    output_dir = resolved(OmegaConf.create({"output_dir": _value_of("output_dir", typed) or "runs"}))["output_dir"]
    folder = find_folder("resume", word, output_dir, job)
    found = folder.identity.job
    if found not in (None, job):
        raise ConfigError(f"resume: {folder.location} holds a run of jobs.{found}; allowed: a run of jobs.{job}")
    stored = stored_values(folder.config_path)
    output_dir, recipe, name = folder.location.rsplit("/", 2)
    place = {"output_dir": output_dir, "recipe": recipe, "run_name": name}
    if (stored.get("recipe"), stored.get("run_name")) != (place["recipe"], place["run_name"]):
        raise ConfigError(
            f"resume: {folder.location} was renamed: its run is {stored.get('recipe')}/{stored.get('run_name')}; "
            "allowed: the folder under its old name, in any output_dir"
        )
    values = _with_typed(job, {**stored, **place, "resume": True}, typed)
    if not is_remote(values["output_dir"]):
        values["output_dir"] = str(local_folder(values["output_dir"]))
    for key, known in place.items():
        if values[key] != known:
            raise ConfigError(f"{key}: found {shown(values[key])}, but the run to resume has {shown(known)}")
    _refuse_hidden(values)
    return to_values(from_values(RECIPES[job].config, values))


def _refuse_hidden(values: dict[str, Any]) -> None:
    """Takes the store's credentials from the environment, and refuses other hidden values."""
    for key, value in flattened(values).items():
        if key == "tracking.uri" and value is not None and HIDDEN in value:
            values["tracking"] = {**values["tracking"], "uri": with_credentials(value, "tracking.uri")}
        elif HIDDEN in str(value):
            raise ConfigError(f"{key}: its credentials were not kept with the run; give the value again: {key}=...")


def _with_typed(job: str, stored: Mapping[str, Any], typed: Sequence[str]) -> dict[str, Any]:
    """Stored values with the overrides: an option replaces its whole group, a key only itself.

    A runtime keeps what others have, too, and a probe whether it follows the training.
    """
    known = primary(job).options
    overrides = {text: _parsed(text) for text in typed}
    for text in typed:
        if key_of(text) == "experiment":
            raise ConfigError(
                f"{text}: a resumed run has its own configuration; allowed: resume=... without experiment"
            )
    chosen = [key for key in map(key_of, typed) if key in known]
    values = dict(stored)
    for group in chosen:
        of_group = [text for text in typed if key_of(text).partition(".")[0] == group]
        values[group] = compose(job, of_group)[group]
        kept = {"enabled"} if group == "probe" else set[str]()  # whether a probe follows
        if group == "runtime":
            from ssl_sec.training.config import LocalConfig  # with torch

            # Another runtime computes as before: a resume in another precision would leave the run's curve.
            kept = {field.name for field in fields(LocalConfig)} - {"name"}
        kept -= {key.partition(".")[2] for key in map(key_of, typed) if key.startswith(f"{group}.")}
        values[group] |= {key: value for key, value in (stored[group] or {}).items() if key in kept}
    for text, override in overrides.items():
        path = key_of(text).split(".")
        if path[0] not in chosen:
            _put(values, path, override.value())
    return resolved(OmegaConf.create(values)) if any("${" in text for text in typed) else values


def _put(values: dict[str, Any], path: Sequence[str], value: Any) -> None:
    key, *rest = path
    if not rest:
        values[key] = value
        return
    inner = values.get(key)
    values[key] = dict(inner) if isinstance(inner, Mapping) else {}
    _put(values[key], rest, value)


@dataclass(frozen=True, kw_only=True, slots=True)
class _StoredRun:
    """The run that a job is about.

    Attributes:
        word: its folder or its id, or the address of the registered version whose weights are taken.
        job: job that made it.
        values: values of its configuration; none for a run of a job that the new job does not take, which it reports
            later.
        image_shape: channels, height and width of the images that it was trained on; None if that is not known.
    """

    word: str
    job: str
    values: Mapping[str, Any]
    image_shape: tuple[int, ...] | None

    @property
    def config(self) -> "TrainingConfig":
        """The typed configuration."""
        return cast("TrainingConfig", from_values(RECIPES[self.job].config, self.values))

    @property
    def channels(self) -> int:
        """Of the images that it was trained on."""
        return self.config.data.channels

    @property
    def side_px(self) -> int | None:
        """The shorter side of these images; None if that is not known."""
        size_px = self.config.data.read_size_px
        return min(self.image_shape[1:]) if size_px is None and self.image_shape is not None else size_px


def _probe_values(overrides: Sequence[str]) -> dict[str, Any]:
    """A probe with the settings of its pretraining, except for those that are given."""
    overrides = _with_runtime("probe", overrides)
    values = compose("probe", overrides)
    config: Any = from_values(PROBE.config, values)  # mistakes are found before the run is searched
    typed = [override for override in overrides if key_of(override).partition(".")[0] == "probe"]
    is_whole = "probe" in map(key_of, typed)
    if config.data is not None:
        found = config.data.max_images
        check(found is None, "data.max_images", found, "null: all images; probe.labels_per_class=<n> trains on fewer")
    elif is_whole:
        return values
    run = _stored(values, config.tracking, values["checkpoint"], probed())
    if not is_whole and "probe" in run.values:
        values["probe"] = _with_typed("probe", {**values, "probe": run.values["probe"]}, typed)["probe"]
    if config.data is not None and run.values:
        values["data"] = to_values(_probed_data(config.data, values["probe"], run, overrides))
    return values


def _probed_data(
    data: "DataConfig", probe: Mapping[str, Any], run: _StoredRun, overrides: Sequence[str]
) -> "DataConfig":
    """Images as the encoder takes them, unless the probe converts them to another size or other channels."""
    channels, size_px = probe.get("num_channels"), probe.get("image_size_px")
    data = _read_as(data, size_px or run.side_px, channels or run.channels, run, overrides)
    if channels is None:
        _require_channels(data, run, f"; probe.num_channels={run.channels} converts the images")
    else:
        check(channels == run.channels, "probe.num_channels", channels, f"{run.channels}, as the encoder was trained")
    found = data.read_size_px
    if size_px is None and run.side_px is not None and found is not None:
        needed = f"{run.side_px}, as the encoder was trained; probe.image_size_px={found} takes it at another size"
        check(found == run.side_px, "data.image_size_px", found, needed)
    return data


def _finetune_values(overrides: Sequence[str]) -> dict[str, Any]:
    """A fine-tuning with the encoder of the run that it starts from, and its data set unless another is given."""
    overrides = _with_runtime(FINETUNE.name, overrides)
    values = compose(FINETUNE.name, overrides)
    typed_run = _run_of(values)
    if typed_run is None:
        if values.get("data") is None:
            raise ConfigError("data: found null, must be given without run=<id>: data=<name>")
        return values
    typed = [override for override in overrides if key_of(override).startswith("encoder.")]
    for key in ("encoder", "encoder.weights"):
        if (found := _value_of(key, overrides)) is not None:
            raise ConfigError(
                f"{key}: found {shown(found)}, must be left out with run=<id>: the encoder is that of the run"
            )
    tracking = from_values(TrackingConfig, values["tracking"], "tracking")
    from ssl_sec.edges.folder.finding import joined_jobs
    from ssl_sec.edges.folder.unfinished import named_run_checkpoint

    with named_run_checkpoint():
        run = _stored(values, tracking, values["run_checkpoint"], trainings())
    values["run"], stored = run.word, run.values
    if not {"encoder", "data"} <= stored.keys():
        raise ConfigError(
            f"run: found {typed_run!r}, which has no encoder; allowed: a finished run of {joined_jobs(trainings())}"
        )
    # The weights are those that the run has trained, not those that it started from.
    encoder = {**stored["encoder"], "weights": None}
    values["encoder"] = _with_typed(FINETUNE.name, {**values, "encoder": encoder}, typed)["encoder"]
    if values.get("data") is None:
        require_whole_data(stored["data"])
        values["data"] = {**stored["data"], "max_images": None}
    config: Any = from_values(FINETUNE.config, values)
    values["data"] = to_values(_finetuned_data(config.data, run, overrides))
    return values


def _finetuned_data(data: "DataConfig", run: _StoredRun, overrides: Sequence[str]) -> "DataConfig":
    """Images as the encoder takes them."""
    # A run on crops of photos has no size of its own; the crop of `augment` is then the job's.
    is_cropped = any(key_of(text) in ("augment", "augment.size_px", "augment.short_side_px") for text in overrides)
    data = _read_as(data, None if is_cropped else run.config.size_px_of(run.image_shape), run.channels, run, overrides)
    _require_channels(data, run)
    return data


def _read_as(
    data: "DataConfig", size_px: int | None, channels: int, run: _StoredRun, overrides: Sequence[str]
) -> "DataConfig":
    """The set with its files read at a size and with the channels that a run was trained on, unless they are given."""
    is_given = _value_of("data.num_channels", overrides) is not None
    taken = data.read_as(size_px, None if is_given else channels, run.config.data.ranges)
    before = to_values(data)
    for key, value in to_values(taken).items():
        if value != before[key]:
            logger.info("data.%s=%s: as the run was trained", key, value)
    return taken


def _require_channels(data: "DataConfig", run: _StoredRun, hint: str = "") -> None:
    """Refuses images of other channels than those that a run was trained on."""
    as_trained = f"{run.channels}, as the encoder was trained{hint}"
    if hasattr(data, "num_channels"):
        check(data.channels == run.channels, "data.num_channels", data.channels, as_trained)
    elif data.channels != run.channels:
        raise ConfigError(f"data.name: found {data.name!r}, with channels = {data.channels}, must be with {as_trained}")


def _stored(
    values: Mapping[str, Any], tracking: TrackingConfig, checkpoint: Checkpoint, jobs: Sequence[str]
) -> _StoredRun:
    """The run; the shape of its images is looked up where the job has a data set of its own."""
    from ssl_sec.edges.folder.folder import RunFolder  # with torch
    from ssl_sec.edges.tracking.networks import located_run, recorded_shape  # with MLflow

    located = located_run(values["run"], checkpoint, tracking, values["output_dir"], jobs)
    if isinstance(folder := located, RunFolder):
        job, stored = str(folder.identity.job), stored_values(folder.config_path)
        return _StoredRun(word=folder.location, job=job, values=stored, image_shape=folder.data().image_shape)
    store, run = located
    with tempfile.TemporaryDirectory() as downloads:
        path = store.download(run, "config.yaml", Path(downloads)) if run.job in jobs else None
        stored = {} if path is None else stored_values(path)
    shape = recorded_shape(store.client, run.run_id) if stored and values.get("data") is not None else None
    word = run.run_id if run.version is None else run.version.address
    return _StoredRun(word=word, job=run.job, values=stored, image_shape=shape)


def _with_runtime(job: str, overrides: Sequence[str]) -> list[str]:
    """Chooses one process if there is no cluster and at most one GPU, which is faster; unless a runtime is given."""
    compose(job, overrides)  # a misspelled key is found before the imports
    import torch

    from ssl_sec.training.config import LocalConfig, RayConfig

    only_ray = {field.name for field in fields(RayConfig)} - {field.name for field in fields(LocalConfig)}
    typed = [key_of(override) for override in overrides]
    if "runtime" in typed or any(key.removeprefix("runtime.") in only_ray for key in typed if "." in key):
        return list(overrides)
    if (cluster := find_cluster()) is not None:
        why, runtime = f"there is a Ray cluster at {cluster}", "ray"
    elif (num_gpus := torch.cuda.device_count()) > 1:
        why, runtime = f"this machine has {num_gpus} GPUs", "ray"
    else:
        why, runtime = "there is no Ray cluster and at most one GPU", "local"
    logger.info("runtime=%s: %s", runtime, why)
    return [f"runtime={runtime}", *overrides]
