"""The folder of a run: its configuration, metrics, checkpoints and results.

All workers and the driver see the same folder, so on a cluster it must be on shared storage.
"""

import contextlib
import json
import logging
import os
import shlex
import shutil
import socket
import uuid
from collections.abc import Collection, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import yaml

from ssl_sec.collectives import rank
from ssl_sec.data.image_set import ImageSet
from ssl_sec.edges.folder.descriptions import DataDescription, RunIdentity, user_error
from ssl_sec.edges.folder.logs import RunLogs
from ssl_sec.edges.folder.stored_config import probed_run
from ssl_sec.edges.folder.text import text_of
from ssl_sec.edges.masking import masked, masked_values
from ssl_sec.edges.storage.checkpoints import CheckpointUpload
from ssl_sec.errors import ConfigError, StorageError, UserError, printable, writing
from ssl_sec.files import replace_text
from ssl_sec.training.checkpoint import MANIFEST, load_checkpoint, step_of
from ssl_sec.training.resuming import Found, agreed_checkpoint
from ssl_sec.training.visibility import wait_until_visible

if TYPE_CHECKING:
    from ssl_sec.recipes.probing.config import ProbedRun

logger = logging.getLogger(__name__)

_VISIBLE_WITHIN_S = 5.0  # for the driver's token
# How workers end without an error -> status of MLflow.
_STATUSES = {"finished": "FINISHED", "stopped": "KILLED", "unsaved": "KILLED"}


class RunFolder(RunLogs):
    """The files of a run.

    Args:
        path: path of the folder, absolute.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.name = path.name  # name of the run
        self.config_path = path / "config.yaml"  # the resolved configuration
        self.checkpoints_path = path / "checkpoints"
        self.identity_path = path / "mlflow.json"  # the RunIdentity
        self.run_id_path = path / "mlflow_run_id"  # the run's id in MLflow, once it is known
        self.stop_path = path / "stop"  # exists while a stop is requested
        self.save_path = path / "save"  # exists while a checkpoint is requested
        self._training_path = path / ".training"  # exists while workers train, on which a stop has to wait
        self.check_path = path / "check.json"  # how many images are duplicates or unreadable
        self._launch_path = path / "launch"
        self.data_path = path / "data.json"  # the DataDescription
        self.test_data_path = path / "test_data.json"  # that of the test images of a training that measures itself
        self._outcome_path = path / "outcome"
        self._error_path = path / "error.json"
        self._unclosed_path = path / "unclosed"  # exists until the driver has ended
        self.not_uploaded_path = path / "not_uploaded"  # exists until MLflow has all results
        self.initial_path = path / "initial.safetensors"  # of a fine-tuning: the encoder that it starts from

        # Results of a training run, once it has ended.
        self.encoder_path = path / "encoder.safetensors"
        self.head_path = path / "head.safetensors"
        self.features_path = path / "features.pt"  # features of some training images, or embeddings of all test images
        self.views_path = path / "views.pt"  # of some images of the first step, before it
        self.examples_path = path / "examples.pt"  # some images, their neighbours and their feature maps
        self.norms_path = path / "norms.json"  # histograms of the embeddings' norms
        self._test_sets_folder = path / "test_sets"
        self._watched_folder = path / "watched"
        self.confusion_path = path / "confusion.json"  # of a probe or a fine-tuning
        self.probed_config_path = path / "pretrain.yaml"  # of a probe: configuration of the run that is probed

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.location!r})"

    def test_set_path(self, title: str) -> Path:
        """The file with the results of a face test set, from which its plots are drawn; creates its folder."""
        self._test_sets_folder.mkdir(exist_ok=True)
        return self._test_sets_folder / f"{title}.pt"

    def test_set_paths(self) -> list[Path]:
        """The files with the results of face test sets, sorted by title."""
        return sorted([*self._test_sets_folder.glob("*.pt"), *self.path.glob("benchmarks/*.pt")])  # of version 0.1

    def watched_path(self, steps_taken: int) -> Path:
        """The file with the embeddings of the watched images after that many steps."""
        return self._watched_folder / f"{steps_taken:08d}.safetensors"

    def watched_paths(self) -> list[Path]:
        """The files with embeddings of the watched images, sorted by step."""
        return sorted(self._watched_folder.glob("*.safetensors"))

    def probed(self) -> "ProbedRun":
        """The configuration of the run whose encoder is probed, as far as the probe needs it.

        Raises:
            StorageError: if the configuration cannot be read.
        """
        return probed_run(self.probed_config_path)

    @property
    def location(self) -> str:
        """Where users find the run."""
        return str(self.path)

    @property
    def holds_run(self) -> bool:
        """Whether a run was started here."""
        return self.config_path.is_file()

    @property
    def is_probe(self) -> bool:
        """Whether the run is a probe, which cannot be resumed."""
        return self.probed_config_path.exists()

    def start(self, values: Mapping[str, Any], copied: Mapping[Path, Path] | None = None) -> None:
        """Creates the folder for a new run.

        Args:
            values: configuration of the run.
            copied: path in the folder -> file that is copied to it; the folder holds the run once all are whole.

        Raises:
            ConfigError: if it already holds a run, or files of something else.
            StorageError: if it cannot be created.
        """
        copied = copied or {}
        if self.holds_run:
            resumes = "" if self.is_probe else f", or {shlex.quote(f'resume={self.location}')} to resume it"
            raise ConfigError(f"run_name: {self.location} already holds a run; allowed: another run_name{resumes}")
        with writing("output_dir", self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            left = (self._unclosed_path, self.not_uploaded_path, *copied)
            self._require_unused({path.name for path in left})
            for path, source in copied.items():
                shutil.copyfile(source, path)
            self._write_config(values)

    def _require_unused(self, unfinished: Collection[str]) -> None:
        """Refuses a folder of something else, which `discard_unstarted` would remove with the run.

        Args:
            unfinished: names of the files that a start may have left when its process was killed.
        """
        for name in sorted(self._names()):
            if name not in unfinished and not name.startswith("."):
                raise ConfigError(
                    f"run_name: {self.location} holds {printable(name)}, but no run; allowed: the name of a new or "
                    "empty folder, or another output_dir"
                )

    def _names(self) -> set[str]:
        """Names of the files and folders that are here."""
        return set(os.listdir(self.path))

    def resume(self, values: Mapping[str, Any]) -> None:
        """Prepares the folder for a resume with these settings.

        Raises:
            StorageError: if it cannot be written.
        """
        with writing("output_dir", self.path):
            self._write_config(values)
            for left_over in (self._outcome_path, self._error_path):
                left_over.unlink(missing_ok=True)

    def restore_end(self) -> None:
        """Makes the folder that of a complete run again, after a resume that was refused.

        Raises:
            StorageError: if it cannot be written.
        """
        with writing("output_dir", self.path):
            self._error_path.unlink(missing_ok=True)
        self.write_outcome("finished")
        self.close()

    def _write_config(self, values: Mapping[str, Any]) -> None:
        self._unclosed_path.touch()
        self.not_uploaded_path.touch()
        replace_text(self.config_path, yaml.safe_dump(masked_values(values), sort_keys=False))

    @property
    def identity(self) -> RunIdentity:
        """The run in MLflow; empty if the folder does not hold it."""
        with contextlib.suppress(OSError, ValueError, TypeError):
            return RunIdentity(**json.loads(self.identity_path.read_text()))
        return RunIdentity()

    def write_identity(self, identity: RunIdentity) -> None:
        """Writes the run's identity in MLflow, without the credentials of the store."""
        self.identity_path.write_text(json.dumps(asdict(replace(identity, uri=masked(identity.uri)))))

    @property
    def run_id(self) -> str | None:
        """The run's id in MLflow; None if it is not known."""
        return text_of(self.run_id_path).strip() or None

    @property
    def is_complete(self) -> bool:
        """Whether the workers have finished, and then the driver, which uploads the results where MLflow answers."""
        return self.outcome() == "finished" and not self._unclosed_path.exists()

    def close(self) -> None:
        """Marks the run as complete."""
        self._unclosed_path.unlink(missing_ok=True)

    def refresh(self) -> None:
        """Fetches the files that other machines have written."""

    def remove(self) -> None:
        """Removes the run."""
        shutil.rmtree(self.path, ignore_errors=True)

    def discard_unstarted(self) -> None:
        """Removes the folder of a run that ended without metrics or warnings, so that its name is free again."""
        warned = any(not message.startswith("INFO: ") for _, message in self.messages())
        kept = warned or self.records() or (self.encoder_path.exists() and not self.is_probe)  # a probe's is a copy
        if self.newest_step() is None and not kept:
            self.remove()
            with contextlib.suppress(OSError):  # the recipe has other runs
                self.path.parent.rmdir()

    def restored_state(self, device: torch.device, held: slice | None = None) -> Mapping[str, Any] | None:
        """The state of the newest whole checkpoint, or None at the start of a run; see `load_checkpoint`.

        Worker 0 logs which newer checkpoints are skipped, and why.

        Raises:
            StorageError: if there are checkpoints but none is whole: a run never starts over silently.
        """
        found = self.find_checkpoint()
        if found.path is None:
            if found.skipped:
                raise StorageError(f"no whole checkpoint in {self.location}/checkpoints: {'; '.join(found.skipped)}")
            return None
        if rank() == 0:
            for defect in found.skipped:
                logger.warning("skipped an incomplete checkpoint: %s", defect)
        return load_checkpoint(found.path, device, held, is_whole=True)

    def find_checkpoint(self) -> Found:
        """The newest whole checkpoint, the same on all workers, and why newer ones are skipped."""
        return agreed_checkpoint(self.checkpoints_path)

    def checkpoint_names(self) -> list[str]:
        """The names of the checkpoints, whole or not, oldest first."""
        return sorted(path.name for path in self.checkpoints_path.glob("step-*"))

    def read_manifest(self, name: str) -> bytes | None:
        """The manifest of a checkpoint; None if it has none."""
        with contextlib.suppress(OSError):
            return (self.checkpoints_path / name / MANIFEST).read_bytes()
        return None

    def fetch_checkpoint(self, name: str) -> Path:
        """The folder of a checkpoint on this machine; the loader checks it."""
        return self.checkpoints_path / name

    def newest_step(self) -> int | None:
        """The step of the newest checkpoint, whole or not; None if there is none."""
        return max((step_of(name) for name in self.checkpoint_names()), default=None)

    def upload_checkpoints(self, rank: int, world_size: int, keep_last: int) -> CheckpointUpload | None:
        """Starts uploading this worker's files of checkpoints; None if the folder itself keeps them."""
        return None

    def describe_data(self, image_set: ImageSet, *, is_resumed: bool = False) -> None:
        """Writes the description of the training set, or of the test set of a probe.

        Raises:
            DataError: if a resumed run began with other images.
        """
        now = DataDescription.of(image_set)
        if is_resumed:
            with contextlib.suppress(StorageError):  # a crash has damaged the earlier description, or left none
                now.require_images_of(self.data())
        replace_text(self.data_path, json.dumps(asdict(now)))

    def describe_test_data(self, image_sets: Mapping[str, ImageSet]) -> None:
        """Writes the descriptions of the test images of a training, by their names in MLflow."""
        described = {name: asdict(DataDescription.of(image_set)) for name, image_set in image_sets.items()}
        replace_text(self.test_data_path, json.dumps(described))

    @property
    def holds_data(self) -> bool:
        """Whether the workers have described their data."""
        return self.data_path.is_file()

    def data(self) -> DataDescription:
        """The description of the data; a StorageError if it cannot be read."""
        return DataDescription.read(self.data_path, self.check_path)

    def test_data(self) -> Mapping[str, DataDescription]:
        """The descriptions of the test images, by their names in MLflow; none if the training has described none."""
        return DataDescription.read_all(self.test_data_path) if self.test_data_path.is_file() else {}

    def write_launch_token(self) -> str:
        """Writes a random token, by which workers recognise this folder, and returns it."""
        token = uuid.uuid4().hex
        self._launch_path.write_text(token)
        return token

    def require_launch_token(self, token: str) -> None:
        """Checks that this folder is the driver's, and not another one of the same name.

        Raises:
            StorageError: if it does not hold the token.
        """
        wait_until_visible(
            lambda: self._launch_path.is_file() and self._launch_path.read_text() == token,
            lambda: (
                f"output_dir: {self.path} on {socket.gethostname()} is not the folder that the driver writes to; "
                "allowed: a folder on storage that all nodes of the cluster share"
            ),
            _VISIBLE_WITHIN_S,
        )

    def crash_path(self, rank: int) -> Path:
        """The file where a worker process that a signal kills dumps its stack, if the signal allows it."""
        return self.path / f"crash-{rank}.txt"

    def mark_training(self) -> None:
        """Marks that workers train."""
        with contextlib.suppress(OSError):  # the folder was removed
            self._training_path.touch()

    def unmark_training(self) -> None:
        """Marks that no worker trains; an earlier process, which was killed, may have left the mark."""
        with contextlib.suppress(OSError):
            self._training_path.unlink(missing_ok=True)

    @property
    def is_training(self) -> bool:
        """Whether workers train; not while they are started, or the cluster has no room for them."""
        return self._training_path.exists()

    def is_stop_requested(self) -> bool:
        """Whether a stop is requested."""
        return self.stop_path.exists()

    def take_save_request(self) -> bool:
        """Whether a checkpoint is requested; this call clears the request."""
        with contextlib.suppress(FileNotFoundError):
            self.save_path.unlink()
            return True
        return False

    def write_outcome(self, outcome: str) -> None:
        """Writes how the workers ended: "finished", "stopped", or "unsaved": stopped without saving.

        Raises:
            StorageError: if it cannot be written.
        """
        with writing("output_dir", self.path):
            replace_text(self._outcome_path, outcome)

    def outcome(self) -> str | None:
        """How the workers ended; None if the file is missing or cannot be read."""
        outcome = text_of(self._outcome_path)
        return outcome if outcome in _STATUSES else None

    @property
    def status(self) -> str:
        """How the workers ended, as a status of MLflow."""
        if self.error() is not None:
            return "FAILED"
        return _STATUSES.get(self.outcome() or "", "FAILED")

    def write_error(self, error: UserError) -> None:
        """Writes a user error, which the driver reports.

        Raises:
            StorageError: if it cannot be written.
        """
        with writing("output_dir", self.path):
            replace_text(self._error_path, json.dumps({"message": masked(str(error)), "exit_code": error.exit_code}))

    def error(self) -> UserError | None:
        """The user error that a worker wrote, if any."""
        if not self._error_path.exists():
            return None
        unknown = StorageError(f"{self._error_path} cannot be read: why the run failed is unknown")
        return user_error(text_of(self._error_path)) or unknown
