"""Versions of registered models: the run that a version came from, and its weights."""

import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from mlflow.artifacts import download_artifacts
from mlflow.entities import LoggedModel
from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient
from safetensors.torch import load_file, save_file
from torch import Tensor

from ssl_sec.edges.tracking.store import all_pages, importing_mlflow_pytorch, is_unknown, quoted, store_errors
from ssl_sec.errors import ConfigError, nearest
from ssl_sec.recipes.registry import RecipeRow

_SCHEME = "models:"
_ADDRESS = re.compile(r"models:/(?P<name>[^/@]+)(?:@(?P<alias>[^/@]+)|/(?P<number>\d+|latest))")
_LOGGED = re.compile(r"models:/(?P<id>m-\w+)")
_FORM = "models:/<name>@<alias>, models:/<name>/<version> or models:/<name>/latest"
# File of a network in a run's folder -> prefix of its weights in the exported program.
_IN_PROGRAM: Mapping[tuple[str, ...], Mapping[str, str]] = {
    ("encoder.safetensors",): {"encoder.safetensors": "backbone."},
    ("encoder.safetensors", "head.safetensors"): {"encoder.safetensors": "0.backbone.", "head.safetensors": "1."},
}


@dataclass(frozen=True, kw_only=True, slots=True)
class RegisteredVersion:
    """A version of a registered model.

    Attributes:
        word: the user's input.
        address: the address with the version's number, which stays that of this version.
        run_id: id of the training run that registered it.
        location: URI of its files.
    """

    word: str
    address: str
    run_id: str
    location: str


def is_registered(word: str) -> bool:
    """Whether a word is the address of a registered model."""
    return word.startswith(_SCHEME)


def find_version(client: MlflowClient, word: str) -> RegisteredVersion:
    """The version at an address.

    Args:
        client: client of the store.
        word: `models:/<name>@<alias>`, `models:/<name>/<version>` or `models:/<name>/latest`.

    Raises:
        ConfigError: if there is no such model, alias or version, or the run that made it is not known.
        StorageError: if the store cannot be used.
    """
    address = _ADDRESS.fullmatch(word)
    if address is None:
        raise ConfigError(f"run: found {word!r}, must be {_FORM}")
    with store_errors(client.tracking_uri):
        version = _version(client, word, address["name"], address["alias"], address["number"])
        run_id = source_run_id(client, version)
        model = logged_model(client, version)
        location = (version.source if model is None else model.artifact_location) or ""
    if not run_id or not location:
        raise ConfigError(f"run: found {word!r}, of which MLflow does not know the run; allowed: a version of a run")
    numbered = f"models:/{address['name']}/{version.version}"
    return RegisteredVersion(word=word, address=numbered, run_id=run_id, location=location)


def source_run_id(client: MlflowClient, version: ModelVersion) -> str:
    """The id of the run that made a version; empty if it is not known."""
    if version.run_id:
        return version.run_id
    # A version that was registered from a logged model has no run id of its own.
    model = logged_model(client, version)
    return (None if model is None else model.source_run_id) or ""


def logged_model(client: MlflowClient, version: ModelVersion) -> LoggedModel | None:
    """The model that a version was registered from; None if it was registered from files."""
    # A store in a database keeps only the address of the model.
    found = _LOGGED.fullmatch(version.source or "")
    model_id = version.model_id if found is None else found["id"]
    return client.get_logged_model(model_id) if model_id else None


def take_weights(client: MlflowClient, version: RegisteredVersion, recipe: RecipeRow, folder: Path) -> bool:
    """Replaces the weights of a run in a folder by those of a version, unless they are equal.

    They differ if the run was resumed after registering the version, or if the version is a kept checkpoint.

    Returns:
        Whether they differ.

    Raises:
        ConfigError: if the version holds no network of this package.
        StorageError: if the store cannot be used.
    """
    with tempfile.TemporaryDirectory() as made, store_errors(client.tracking_uri):
        files = Path(download_artifacts(version.location, dst_path=made, tracking_uri=client.tracking_uri))
        own = _weights(files, recipe)
        if own is None:
            raise ConfigError(f"run: found {version.word!r}, which holds no network of jobs.{recipe.name}")
        differs = False
        for name, weights in own.items():
            if not _are_equal(load_file(folder / name), weights):
                save_file(dict(weights), folder / name)
                differs = True
    return differs


def _version(client: MlflowClient, word: str, name: str, alias: str | None, number: str | None) -> ModelVersion:
    condition = f"name = {quoted(name)}"
    try:
        aliases = client.get_registered_model(name).aliases
    except MlflowException as error:
        if not is_unknown(error):
            raise
        known = [each.name for each in all_pages(lambda token: client.search_registered_models(page_token=token))]
        hint = nearest(name, known) if known else "no model is registered"
        raise ConfigError(
            f"run: found {word!r}, but MLflow at {client.tracking_uri} has no such model; {hint}"
        ) from error
    found = all_pages(lambda token: client.search_model_versions(condition, page_token=token))
    versions = {int(version.version): version for version in found}
    wanted = aliases.get(alias) if alias is not None else max(versions, default=None) if number == "latest" else number
    if wanted is not None and int(wanted) in versions:
        return versions[int(wanted)]
    newest = sorted(versions)[-8:]
    latest = ["/latest"] if newest else []
    listed = ", ".join([*(f"@{each}" for each in sorted(aliases)), *latest, *(f"/{each}" for each in newest)])
    raise ConfigError(f"run: found {word!r}, but {name} has no such version; allowed: {listed or 'none, it is empty'}")


def _weights(files: Path, recipe: RecipeRow) -> Mapping[str, Mapping[str, Tensor]] | None:
    """The weights of a version by the file names of a run; None if it holds no such network."""
    if all((files / name).is_file() for name in recipe.network_files):  # a kept checkpoint
        return {name: load_file(files / name) for name in recipe.network_files}
    if not (files / "data" / "model.pt2").is_file():
        return None
    with importing_mlflow_pytorch():
        from mlflow.pytorch import load_model
    whole: Mapping[str, Tensor] = load_model(str(files)).state_dict()
    places = _IN_PROGRAM[recipe.network_files]
    found = {
        name: {key.removeprefix(place): value.contiguous() for key, value in whole.items() if key.startswith(place)}
        for name, place in places.items()
    }
    return found if all(found.values()) else None


def _are_equal(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
