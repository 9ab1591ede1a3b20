"""Pushes an export to the Hugging Face Hub."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path

from ssl_sec.edges.config.export import HUB_SCHEME
from ssl_sec.errors import ConfigError, StorageError, UserError, first_line
from ssl_sec.exporting import FILE_NAMES

os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")

from huggingface_hub import HfApi, get_token
from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError


def has_token() -> bool:
    """Whether this user has a token of the Hub, in HF_TOKEN or from `hf auth login`."""
    return get_token() is not None


class HubRepository:
    """A repository of a model on the Hugging Face Hub, in which this user may write.

    Args:
        output: `hf://<owner>/<name>`, or `hf://<name>` for one of the user's own.
        private: whether a new repository is private.
    """

    folder: None = None

    def __init__(self, output: str, private: bool) -> None:
        self._output = output
        self._private = private
        self._api = HfApi()

    @property
    def url(self) -> str:
        """The address of the repository's page."""
        return f"{self._api.endpoint}/{self.hub_name}"

    @cached_property
    def hub_name(self) -> str:
        """Owner and name of the repository."""
        name = self._output.removeprefix(HUB_SCHEME)
        if "/" in name:
            return name
        with self._errors():
            return f"{self._api.whoami()['name']}/{name}"

    def require_replaceable(self, overwrite: bool) -> bool:
        """Refuses an existing repository, unless its files may be replaced; returns whether there is one.

        One without files, as a push that failed leaves it, counts as new if it is private or public as asked for.

        Raises:
            ConfigError: if the repository must not be replaced.
            StorageError: if the Hub cannot be used.
        """
        with self._errors():
            exists = self._api.repo_exists(self.hub_name)
            may_be_filled = overwrite or not exists or self._is_new()
        if not may_be_filled:
            raise ConfigError(f"output: {self._output} already exists; allowed: a new name, or overwrite=true")
        return exists

    def _is_new(self) -> bool:
        about = self._api.model_info(self.hub_name)
        files = {file.rfilename for file in about.siblings or []}
        return files <= {".gitattributes"} and about.private == self._private  # the Hub itself adds this file

    @contextmanager
    def filled(self, overwrite: bool) -> Iterator[Path]:
        """A temporary folder whose files become those of the repository, in one commit, if the block succeeds.

        Args:
            overwrite: whether an existing repository may be written to; other files of an earlier export are removed.

        Raises:
            ConfigError: if the repository must not be replaced.
            StorageError: if the Hub cannot be used.
        """
        with tempfile.TemporaryDirectory() as folder:
            yield Path(folder)
            exists = self.require_replaceable(overwrite)
            with self._errors():
                self._api.create_repo(self.hub_name, private=self._private, exist_ok=True)
                self._api.upload_folder(
                    repo_id=self.hub_name,
                    folder_path=folder,
                    commit_message="Export of ssl_sec",
                    delete_patterns=sorted(FILE_NAMES) if exists else None,
                )

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Turns errors of the Hub into a StorageError with one line."""
        try:
            yield
        except UserError:
            raise
        except (HfHubHTTPError, RepositoryNotFoundError, OSError, ValueError) as error:
            reason = getattr(error, "server_message", None) or first_line(error)
            raise StorageError(f"output: {self._output} cannot be written: {reason}") from error
