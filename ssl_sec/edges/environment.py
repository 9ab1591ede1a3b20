"""What a job does where its environment lacks something, as in containers and services.

A user id may have no name and no home, a home may not be writable, a process may open few files, and a locale may
not know every character.
"""

import contextlib
import getpass
import io
import os
import resource
import sys
import tempfile
from pathlib import Path

from ssl_sec.errors import ConfigError

# Ray and its services were seen to hang with 256 and to work with 384; more workers take more.
RAY_NEEDS_FILES = 512
# A job in one process was seen to hang with 40 and to work with 64.
_JOB_NEEDS_FILES = 64
_ENOUGH_FILES = 65536


def complete() -> None:
    """Gives this process, and those that it starts, a user's name, a home and a place for matplotlib's files."""
    try:
        getpass.getuser()
    except (KeyError, OSError):  # Python 3.13 changed which
        os.environ["LOGNAME"] = str(os.getuid())
    home = os.path.expanduser("~")
    if home == "~":  # neither HOME nor the system's list of users has it
        os.environ["HOME"] = str(_own_folder())
    elif not _can_write(home):
        os.environ.setdefault("MPLCONFIGDIR", str(_own_folder()))


def prepare() -> None:
    """Lets this process print any character and open as many files as it may.

    Raises:
        ConfigError: if those are too few for any job.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")
    if (found := allow_open_files()) < _JOB_NEEDS_FILES:
        raise ConfigError(
            f"this process may open {found} files (ulimit -n), and a job needs {_JOB_NEEDS_FILES} or more"
        )


def allow_open_files() -> int:
    """Lets this process open as many files as it may, up to what anybody needs; returns how many."""
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _ENOUGH_FILES if most == resource.RLIM_INFINITY else min(most, _ENOUGH_FILES)
    if now != resource.RLIM_INFINITY and now < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))
    now, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _ENOUGH_FILES if now == resource.RLIM_INFINITY else now


def require_files_for_ray() -> None:
    """Refuses to start Ray where it could not open enough files: it dies or hangs then, without a word.

    Raises:
        ConfigError: if it could not.
    """
    if (found := allow_open_files()) < RAY_NEEDS_FILES:
        raise ConfigError(
            f"runtime: found 'ray', but this process may open {found} files (ulimit -n), and Ray needs "
            f"{RAY_NEEDS_FILES} or more; allowed: a higher limit, or runtime=local"
        )


def _can_write(folder: str) -> bool:
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def _own_folder() -> Path:
    """A folder for temporary files that is this user's alone, the same each time."""
    folder = Path(tempfile.gettempdir()) / f"ssl_sec-{os.getuid()}"
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, exist_ok=True)
        if folder.is_dir() and not folder.is_symlink() and folder.stat().st_uid == os.getuid():
            return folder
    return Path(tempfile.mkdtemp(prefix="ssl_sec-"))
