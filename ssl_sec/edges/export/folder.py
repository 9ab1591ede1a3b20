"""The folder of an export, which is whole or absent."""

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ssl_sec.errors import ConfigError, writing
from ssl_sec.exporting import FILE_NAMES
from ssl_sec.files import rename_folder


class ExportFolder:
    """A folder for the files of an export.

    Args:
        folder: path of the folder, absolute.
        hub_name: owner and name of the Hub's repository for the files, for the model card; None for none.
    """

    url: None = None

    def __init__(self, folder: Path, hub_name: str | None = None) -> None:
        self.folder = folder
        self.hub_name = hub_name

    def require_replaceable(self, overwrite: bool) -> None:
        """Refuses an existing folder, unless it is an export and may be replaced.

        Raises:
            ConfigError: if it must not be replaced.
        """
        output = self.folder
        if not os.path.lexists(output):
            return
        if not overwrite:
            raise ConfigError(f"output: {output} already exists; allowed: a new folder, or overwrite=true")
        others = ["it is not a folder"] if not output.is_dir() or output.is_symlink() else []
        others = others or sorted(f"it holds {item.name!r}" for item in output.iterdir() if item.name not in FILE_NAMES)
        if others:
            raise ConfigError(f"overwrite: {output} is not an export, {others[0]}; allowed: the folder of an export")

    @contextmanager
    def filled(self, overwrite: bool) -> Iterator[Path]:
        """A temporary folder that becomes this one if the block succeeds; otherwise nothing is left of it.

        Raises:
            ConfigError: if it exists and must not be replaced.
            StorageError: if it cannot be written.
        """
        output = self.folder
        self.require_replaceable(overwrite)
        own = uuid.uuid4().hex[:8]  # processes of two containers may have one id
        temporary, replaced = (output.with_name(f".{output.name}.{own}.{kind}") for kind in ("tmp", "old"))
        missing = [parent for parent in output.parents if not parent.exists()]
        try:
            with writing("output", output):
                temporary.mkdir(parents=True)
                yield temporary
                self.require_replaceable(overwrite)  # another export may have created it
                if output.exists():
                    rename_folder(output, replaced)
                rename_folder(temporary, output)
        finally:
            if replaced.exists() and not output.exists():
                rename_folder(replaced, output)
            shutil.rmtree(temporary, ignore_errors=True)
            shutil.rmtree(replaced, ignore_errors=True)
            for parent in missing:
                with suppress(OSError):  # it has the export
                    parent.rmdir()
