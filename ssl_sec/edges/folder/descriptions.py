"""The JSON files of a run's folder: its identity in MLflow and the description of its data."""

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from ssl_sec.data.fingerprint import fingerprint
from ssl_sec.data.image_set import ImageSet
from ssl_sec.edges.folder.text import text_of
from ssl_sec.edges.masking import HIDDEN, masked
from ssl_sec.errors import ConfigError, DataError, StorageError, UserError, counted, first_line
from ssl_sec.settings import from_values

# Packages that draw the views, decode the images and compute.
_DECIDING_PACKAGES = ("torch", "torchvision", "kornia", "numpy", "pillow")


@dataclass(frozen=True, kw_only=True)
class RunIdentity:
    """A run in MLflow, without its parameters and metrics.

    Attributes:
        uri: address of the store; in the folder, without credentials.
        workspace: workspace of a server that divides its experiments among several; None for its default.
        experiment: name of the experiment.
        name: name of the run.
        tags: tags of the run, `job` among them.
        parent_run_id: id of the parent run, if there is one.
    """

    uri: str = ""
    workspace: str | None = None
    experiment: str = ""
    name: str = ""
    tags: Mapping[str, str] = field(default_factory=dict)
    parent_run_id: str | None = None

    @property
    def job(self) -> str | None:
        """The job that made the run; None if it is not known."""
        return self.tags.get("job")

    @property
    def known_uri(self) -> str | None:
        """The store's address; None if it was not kept, or lacks its credentials."""
        return None if not self.uri or HIDDEN in self.uri else self.uri


@dataclass(frozen=True, kw_only=True, slots=True)
class DataDescription:
    """A data set in numbers.

    Attributes:
        name: name of the set.
        description: origin of the images, without secrets.
        num_images: number of images that are trained or tested on.
        num_bad_images: number of images that could not be read.
        image_shape: channels, height, width.
        class_names: names of the classes, by label.
        digest: fingerprint of the images; None in folders of old runs.
        num_checked: number of images checked for duplicates and unreadable ones before the training.
        num_duplicates: number of these that repeat the bytes of another one.
        num_unreadable: number of images that cannot be decoded.
    """

    name: str
    description: str
    num_images: int
    num_bad_images: int
    image_shape: tuple[int, ...]
    class_names: tuple[str, ...]
    digest: str | None = None
    num_checked: int = 0
    num_duplicates: int = 0
    num_unreadable: int = 0

    @classmethod
    def of(cls, image_set: ImageSet, digest: str | None = None) -> "DataDescription":
        """The description of an image set.

        Args:
            image_set: the set.
            digest: its fingerprint if that is known; None computes it.
        """
        return cls(
            name=image_set.name,
            description=masked(image_set.description),
            num_images=len(image_set),
            num_bad_images=image_set.num_bad_images,
            image_shape=image_set.image_shape,
            class_names=image_set.class_names,
            digest=digest or fingerprint(image_set),
        )

    def require_images_of(self, before: "DataDescription") -> None:
        """Refuses other images than those that a run began with: its batches would be others.

        Raises:
            DataError: if the images, their labels or the names of their files differ.
        """
        if before.digest in (None, self.digest):
            return
        found = counted(self.num_images, "image")
        if self.num_images == before.num_images:
            found += ", but they, their labels or names of files have changed since the run began"
        else:
            found += f", but the run to resume began with {before.num_images:,}"
        raise DataError(
            f"{self.name}: found {found}; allowed: the same images as then, or a new run (another run_name)"
        )

    @classmethod
    def read(cls, path: Path, check_path: Path) -> "DataDescription":
        """The description of a run's data.

        Args:
            path: file of the description.
            check_path: file with the numbers of the check, missing if there was none.

        Raises:
            StorageError: if a file cannot be read.
        """
        try:
            numbers = json.loads(text_of(check_path) or "{}")
            own = {key: numbers[key] for key in ("num_checked", "num_duplicates", "num_unreadable") if key in numbers}
            return from_values(cls, {**json.loads(path.read_text()), **own})
        except (OSError, ValueError, TypeError) as error:
            raise StorageError(f"{path} or {check_path.name} cannot be read: {first_line(error)}") from error

    @classmethod
    def read_all(cls, path: Path) -> dict[str, "DataDescription"]:
        """The descriptions of a run's test data, by their names in MLflow.

        Raises:
            StorageError: if the file cannot be read.
        """
        try:
            return {name: from_values(cls, each) for name, each in json.loads(path.read_text()).items()}
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise StorageError(f"{path} cannot be read: {first_line(error)}") from error


def installed_versions() -> dict[str, str]:
    """The versions of the packages that decide the curve of a run."""
    found: dict[str, str] = {}
    for name in _DECIDING_PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def user_error(described: str) -> UserError | None:
    """The user error that a run has stored as JSON; None if it cannot be read."""
    kinds = {kind.exit_code: kind for kind in (ConfigError, DataError, StorageError)}
    with contextlib.suppress(ValueError, KeyError, TypeError):
        written = json.loads(described)
        return kinds.get(written["exit_code"], UserError)(written["message"])
    return None
