"""Adds what an environment lacks, as in containers and services, and sets variables for a while.

A user id may have no name and no home, a home may not be writable, the limit of open files may be low, and a locale may
lack characters.
"""

import contextlib
import getpass
import io
import os
import resource
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.parse import urlsplit

from ssl_sec.edges.masking import masked
from ssl_sec.edges.packaging import command
from ssl_sec.errors import ConfigError
from ssl_sec.files import is_own

# Ray and its services hung with 256 and worked with 384; more workers need more.
RAY_NEEDS_FILES = 512
# A job in one process hung with 40 and worked with 64.
_JOB_NEEDS_FILES = 64
_ENOUGH_FILES = 65536


# How often a thread of OpenMP (GNU's, as torch's) looks for its next work before it sleeps. By default 300,000 times,
# for which it takes the core from the thread that it waits for if other programs are busy: with three of them on two
# cores, pretraining on digits took twice as long. On idle cores no difference was measured.
SPINS = {"GOMP_SPINCOUNT": "10000"}

# Variables that name a proxy, and the hosts that are never behind one.
_PROXIES = ("http_proxy", "https_proxy", "all_proxy")
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


def complete() -> None:
    """Gives this process and its children a user name, a home and a folder for matplotlib's files.

    They reach servers of this machine without the proxy that the environment names.

    It also limits how long threads of OpenMP spin, unless the environment says how they wait; torch must not have been
    imported before.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        for name, value in SPINS.items():
            os.environ.setdefault(name, value)
    _reach_this_machine_directly()
    try:
        getpass.getuser()
    except (KeyError, OSError):  # which one depends on the version of Python
        os.environ["LOGNAME"] = str(os.getuid())
    home = os.path.expanduser("~")
    if home == "~":  # neither HOME nor the user database has it
        os.environ["HOME"] = str(_own_folder())
    elif not _can_write(home):
        for variable in ("MPLCONFIGDIR", "TRITON_HOME"):
            os.environ.setdefault(variable, str(_own_folder()))


def _reach_this_machine_directly() -> None:
    named = next((value for name in ("no_proxy", "NO_PROXY") if (value := os.environ.get(name))), "")
    hosts = [host.strip() for host in named.split(",") if host.strip()]
    if any(os.environ.get(name) for kind in _PROXIES for name in (kind, kind.upper())) and hosts != ["*"]:
        os.environ["no_proxy"] = ",".join(dict.fromkeys([*hosts, *_LOOPBACK]))  # preferred to NO_PROXY


def through_proxy(address: str) -> str:
    """A clause for an error about an address that is asked through a proxy; nothing for others."""
    from requests.utils import get_environ_proxies, select_proxy  # slow to import

    proxy = select_proxy(address, get_environ_proxies(address, no_proxy=None))
    if proxy is None:
        return ""
    return f"; it was asked through the proxy {masked(proxy)}; no_proxy={urlsplit(address).hostname} asks it directly"


def prepare() -> None:
    """Lets this process print any character and open as many files as it is allowed to.

    Raises:
        ConfigError: if the limit of open files is too low for any job.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")
    if (found := raise_file_limit()) < _JOB_NEEDS_FILES:
        raise ConfigError(
            f"this process may open {found} files (ulimit -n), and a job needs {_JOB_NEEDS_FILES} or more"
        )


def raise_file_limit() -> int:
    """Raises the limit of open files of this process as far as needed and allowed; returns the limit."""
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _ENOUGH_FILES if most == resource.RLIM_INFINITY else min(most, _ENOUGH_FILES)
    if now != resource.RLIM_INFINITY and now < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))
    now, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _ENOUGH_FILES if now == resource.RLIM_INFINITY else now


def require_files_for_ray() -> None:
    """Checks that Ray can open enough files, without which it dies or hangs silently.

    Raises:
        ConfigError: if it cannot.
    """
    if (found := raise_file_limit()) < RAY_NEEDS_FILES:
        raise ConfigError(
            f"runtime: found 'ray', but this process may open {found} files (ulimit -n), and Ray needs "
            f"{RAY_NEEDS_FILES} or more; allowed: a higher limit, or runtime=local"
        )


def find_cluster() -> str | None:
    """Finds the Ray cluster that a job on this machine joins; None if the job would start one."""
    if address := os.environ.get("RAY_ADDRESS"):
        return None if address == "local" else address
    # `ray start` writes the address there; the file remains after a cluster was killed.
    temporary = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
    try:
        address = (Path(temporary) / "ray" / "ray_current_cluster").read_text().strip()
        host, _, port = address.rpartition(":")
        socket.create_connection((host, int(port)), timeout=2).close()
    except (OSError, ValueError):
        return None
    return address


def cluster_address(given: str | None) -> str | None:
    """The address of the Ray cluster that a job joins; None if it starts one.

    Args:
        given: the configuration's address: None for the one that `find_cluster` finds, "local" to start one.

    Raises:
        ConfigError: if it is an address of a cluster's dashboard or of Ray Client, or has no port.
    """
    address = None if given == "local" else given or find_cluster()
    if address is None or address == "auto":
        return address
    if address.startswith(("http://", "https://")):
        found = f"a cluster's dashboard, to which {command('submit')} sends jobs"
    elif "://" in address:
        found = f"of Ray Client, in which no run can train; {command('submit')} sends jobs from outside of a cluster"
    elif not address.rpartition(":")[2].isdigit():
        found = "without a port"
    else:
        return address
    raise ConfigError(
        f"{'runtime.address' if given else 'RAY_ADDRESS'}: found {address!r}, {found}; "
        "allowed here: <head>:6379, or 'local' to start Ray here"
    )


@contextlib.contextmanager
def with_variables(values: Mapping[str, str]) -> Iterator[None]:
    """Sets variables of the environment, and restores them afterwards."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def is_loopback(address: str) -> bool:
    """Whether the host of an address is this machine's loopback, which other machines cannot reach."""
    return urlsplit(address).hostname in ("127.0.0.1", "localhost", "::1")


def _can_write(folder: str) -> bool:
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def _own_folder() -> Path:
    """A folder for temporary files that only this user can use, the same each time."""
    folder = Path(tempfile.gettempdir()) / f"ssl_sec-{os.getuid()}"
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, exist_ok=True)
        if is_own(folder):
            return folder
    return Path(tempfile.mkdtemp(prefix="ssl_sec-"))


def allowed_cpus() -> int:
    """CPUs that this process may use: those of its affinity, as Slurm sets it, and of a container's quota."""
    from joblib import cpu_count  # slow to import

    return cpu_count()


def use_allowed_cpus() -> None:
    """Limits torch to the CPUs that this process may use, unless OMP_NUM_THREADS gives the number of its threads.

    By default torch starts a thread for each core of the machine, also where the quota of a container (`docker --cpus`,
    a limit of Kubernetes) is lower. Threads that wait for each other then use up the quota: if it is one core, a
    step of ResNet-18 takes 1.3 times as long with two threads as with one, and 2.4 times with 16 (on two cores).
    """
    import torch  # slow to import

    if "OMP_NUM_THREADS" not in os.environ and (allowed := allowed_cpus()) < torch.get_num_threads():
        torch.set_num_threads(allowed)
