"""Packs the code and the configs of a checkout for a cluster."""

import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path

from ssl_sec.errors import ConfigError

# The parts of a checkout that a job needs.
TRAVELS = ("ssl_sec", "jobs", "configs", "pyproject.toml")
_NEVER = ("__pycache__", ".git")
# Files with passwords, as in .dockerignore; git may not ignore them, and may not be usable.
_SECRET = (".env*", "*.env")
LIMIT_MIB = 64.0

# The environment variable with the id of a job.
JOB_ID_VARIABLE = "SSL_SEC_JOB_ID"
# The file with the commit and the changes of the checkout; see `ssl_sec.edges.tracking.provenance`.
CODE_STATE = "code_state.json"


def checkout() -> Path | None:
    """The root of the checkout that this package runs from; None if it is installed without one."""
    root = Path(__file__).parents[2]
    return root if (root / "pyproject.toml").is_file() and (root / "jobs").is_dir() else None


def command(job: str) -> str:
    """The command of a job: `ssl-sec <job>` if this process was started so, or if there is no checkout."""
    program = Path(sys.argv[0])
    by_name = program.name == "ssl-sec" or program.parent.name == "ssl_sec"
    return f"ssl-sec {job}" if by_name or checkout() is None else f"python -m jobs.{job}"


def git(root: Path, *arguments: str) -> str | None:
    """The output of git in a folder; None if it fails or is not installed."""
    command = ["git", "-C", str(root), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", timeout=60, check=True)
        return done.stdout
    except (OSError, subprocess.SubprocessError):
        return None


@contextmanager
def packaged(
    root: Path | None, more: Mapping[str, str] | None = None, limit_mib: float = LIMIT_MIB
) -> Iterator[Path | None]:
    """A temporary folder with the files for a job; None if there are none.

    Args:
        root: root of the checkout; None if there is none.
        more: additional files: name -> text.
        limit_mib: largest size of the checkout.

    Raises:
        ConfigError: if the checkout is larger; names the biggest folders.
    """
    if root is None and not more:
        yield None
        return
    files = {} if root is None else {path.relative_to(root): path for name in TRAVELS for path in _files(root / name)}
    sizes = {name: path.stat().st_size for name, path in files.items()}
    total_mib = sum(sizes.values()) / 2**20
    if total_mib > limit_mib:
        folders: Counter[Path] = Counter()
        for path, size in sizes.items():
            folders[path.parent] += size
        biggest = ", ".join(f"{folder} ({size / 2**20:.0f} MiB)" for folder, size in folders.most_common(3))
        raise ConfigError(
            f"the checkout has {total_mib:.0f} MiB of code and configs to send, allowed: {limit_mib:.0f} MiB; "
            f"the biggest folders are {biggest}; keep data elsewhere, or list it in .gitignore"
        )
    with tempfile.TemporaryDirectory(prefix="ssl_sec-") as folder:
        for name, path in files.items():
            target = Path(folder) / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, target)
        for name, text in (more or {}).items():
            target = Path(folder) / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8")
        yield Path(folder)


def _files(path: Path) -> list[Path]:
    """The files below a path that git does not ignore; all files without git. Those with passwords are left out."""
    listed = git(path.parent, "ls-files", "-z", "-co", "--exclude-standard", "--", path.name)
    if listed is not None:
        found = [path.parent / name for name in listed.split("\0") if name]
    else:
        found = [path] if path.is_file() else list(path.rglob("*"))
    return [file for file in found if file.is_file() and _is_sent(file)]


def _is_sent(file: Path) -> bool:
    is_secret = file.name != ".env.example" and any(fnmatch(file.name, pattern) for pattern in _SECRET)
    return not is_secret and not any(part in _NEVER for part in file.parts)
