"""Where runs are kept: in a folder, or in object storage with a staging folder on each machine."""

import hashlib
import os
import re
import tempfile
from pathlib import Path

from ssl_sec.errors import StorageError, writing
from ssl_sec.files import is_own, replace_text

# The environment variable for the staging folders of this machine, divided by users; by default they are among the
# temporary files.
STAGING_VARIABLE = "SSL_SEC_STAGING"

# File in a staging folder of runs: the URL that it stands for.
_URL_FILE = ".url"
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


def is_remote(output_dir: str) -> bool:
    """Whether runs are kept in object storage, and not in a folder of this machine."""
    return _SCHEME.match(output_dir) is not None and not output_dir.startswith("file://")


def local_folder(output_dir: str, *part: str) -> Path:
    """The absolute folder on this machine with the runs of `output_dir`: itself, or the staging folder of a URL.

    Args:
        output_dir: a path or a URL.
        part: part of the staging folder, for a process that must not use those of others.

    Raises:
        StorageError: if the staging folder cannot be made.
    """
    if not is_remote(output_dir):
        return Path(output_dir.removeprefix("file://")).expanduser().resolve()
    url = output_dir.rstrip("/")
    given = os.environ.get(STAGING_VARIABLE)
    root = Path(f"{given}/{os.getuid()}" if given else f"{tempfile.gettempdir()}/ssl_sec-{os.getuid()}").expanduser()
    folder = root.resolve().joinpath(hashlib.sha256(url.encode()).hexdigest()[:16], *part)
    with writing(STAGING_VARIABLE, folder):
        if not given:
            root.mkdir(exist_ok=True, mode=0o700)
            if not is_own(root):
                raise StorageError(f"{STAGING_VARIABLE}: {root} is not a folder of this user; give another one")
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not (folder / _URL_FILE).exists():
            replace_text(folder / _URL_FILE, url)  # other processes may be reading it
    return folder


def absolute_store(uri: str) -> str:
    """The address of a tracking store; that of a sqlite file with its absolute path."""
    start, path = "sqlite:///", uri.removeprefix("sqlite:///")
    return uri if path == uri or os.path.isabs(path) else f"{start}{os.path.abspath(path)}"


def url_of(run_folder: Path) -> str | None:
    """The URL of a run whose folder on this machine is a staging folder; None if the run is in the folder itself."""
    try:
        output_dir = (run_folder.parent.parent / _URL_FILE).read_text()
    except OSError:
        return None
    return f"{output_dir}/{run_folder.parent.name}/{run_folder.name}"


def is_url_of_run(url: str) -> bool:
    """Whether a URL has an output folder, a recipe and a name."""
    parts = url.rstrip("/").rsplit("/", 2)
    return len(parts) == 3 and is_remote(parts[0])


def split_url(url: str) -> tuple[str, str, str]:
    """The output folder, the recipe and the name of a run from its URL.

    Raises:
        StorageError: if the URL has fewer parts.
    """
    if not is_url_of_run(url):
        raise StorageError(f"found {url!r}, must be the URL of a run: <output_dir>/<recipe>/<name>")
    output_dir, recipe, name = url.rstrip("/").rsplit("/", 2)
    return output_dir, recipe, name
