"""The job server of a Ray cluster: submits, follows and stops jobs.

It imports only Ray's client, so that listing jobs is quick.
"""

import asyncio
import contextlib
import logging
import os
import shlex
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from urllib.parse import urlparse

import requests
from ray._private.services import canonicalize_bootstrap_address_or_die, find_gcs_addresses  # as the client does
from ray.exceptions import AuthenticationError, RayError
from ray.job_submission import JobDetails, JobStatus, JobSubmissionClient

from ssl_sec.edges.environment import is_loopback, through_proxy, with_variables
from ssl_sec.edges.masking import masked
from ssl_sec.edges.packaging import JOB_ID_VARIABLE, checkout, command, packaged
from ssl_sec.edges.run.on_ray.joining import answer_of, gets_token
from ssl_sec.edges.tables import in_table
from ssl_sec.edges.tracking.provenance import write_code_state
from ssl_sec.errors import ConfigError, Stopped, StorageError, UserError, first_line

logger = logging.getLogger("ssl_sec")

# How long a driver may take to save before it is killed; Ray's default is 3 s. The last checkpoint may be uploaded for
# ten minutes to storage that cannot be reached, and then MLflow waited for; a test compares all times.
_STOP_WITHIN_S = 900
_POLL_S = 1.0
# How long a cluster may take to answer the first request; Ray's client would wait for a minute, or forever.
_ANSWER_WITHIN_S = 5.0
# How long the connection may be lost while a job is followed.
_LOST_FOR_S = 60.0
_START_ONE = "start one with `ray start --head`, or name one: --address http://<head>:8265"
_ENDED = (JobStatus.SUCCEEDED, JobStatus.FAILED, JobStatus.STOPPED)


def entrypoint(job: str, arguments: Sequence[str], python: str = "python") -> str:
    """The shell command that prints the path of its Python, and runs a job with it.

    The job is from the checkout that was sent, or from the installed package.
    """
    prints_path = f'echo "python: $(command -v {shlex.quote(python)})"'
    return f"{prints_path}; {shlex.join(['exec', python, '-m', 'ssl_sec', job, *arguments])}"


class ConnectionLost(StorageError):
    """A cluster that answered before no longer does."""


class Cluster:
    """The job server of a Ray cluster.

    Args:
        address: the dashboard's, http://host:8265; None takes RAY_API_SERVER_ADDRESS, RAY_ADDRESS or a cluster here.

    Raises:
        ConfigError: if there is none.
    """

    def __init__(self, address: str | None) -> None:
        for name in ("ray", "ray.dashboard.modules.job.sdk", "ray.dashboard.modules.dashboard_sdk"):
            logging.getLogger(name).setLevel(logging.ERROR)
        address = address or os.environ.get("RAY_API_SERVER_ADDRESS") or os.environ.get("RAY_ADDRESS")
        if not address:
            address = _find_local_cluster()
            gets_token(answer_of(address), is_found=True)
        try:
            _require_answer(address)
            with with_variables({"RAY_API_SERVER_ADDRESS": address}):  # Ray's client prefers it to the argument
                self._client = JobSubmissionClient(address)
        except AuthenticationError as error:
            raise ConfigError(
                f"the Ray cluster at {address} needs another token; give the one it was started "
                "with: RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=<file>"
            ) from error
        except (OSError, RuntimeError, ValueError, KeyError, RayError) as error:
            what = f"no Ray cluster at {address} ({_reason(error)}){through_proxy(address)}"
            raise ConfigError(f"{what}; {_START_ONE}") from error

    @contextlib.contextmanager
    def _connected(self) -> Iterator[None]:
        """Turns a lost connection into an error of one line."""
        try:
            yield
        except requests.RequestException as error:
            raise self._lost(_reason(error)) from error

    @contextlib.contextmanager
    def _asked(self) -> Iterator[None]:
        """Raises a RuntimeError where the cluster does not know the job, and a ConnectionLost for other errors."""
        with self._connected():
            try:
                yield
            except RuntimeError as error:  # raised by Ray's client for any answer but 200
                if "status code 404" in str(error):
                    raise
                raise self._lost(first_line(error)) from error

    def _lost(self, reason: str) -> ConnectionLost:
        return ConnectionLost(
            f"the Ray cluster at {self.address} no longer answers ({reason}); a job may still run: "
            f"`{command('submit')} list`"
        )

    @property
    def address(self) -> str:
        """The address of the dashboard."""
        return self._client.get_address()

    def submit(
        self,
        entrypoint: str,
        job_id: str,
        metadata: Mapping[str, str],
        environment: Mapping[str, str],
        files: Mapping[str, str] | None = None,
    ) -> None:
        """Sends the checkout, if there is one, and starts a command on the cluster.

        Args:
            entrypoint: the command.
            job_id: id of the new job.
            metadata: metadata for the dashboard, which shows `job_name` in its column "Name".
            environment: environment variables of the job.
            files: further files for the job's working folder: name -> text.

        Raises:
            ConfigError: if the checkout is too large, or the cluster cannot be reached.
            UserError: if the cluster refuses the job.
        """
        root = checkout()
        variables = {"RAY_JOB_STOP_WAIT_TIME_S": str(_STOP_WITHIN_S), JOB_ID_VARIABLE: job_id, **environment}
        if is_this_machine(self.address):
            # As if this Python's environment were activated there.
            variables["PATH"] = f"{Path(sys.executable).parent}:${{PATH}}"
        with packaged(root, files or {}) as folder:
            if root is not None and folder is not None:
                write_code_state(root, folder)
            working_dir = {} if folder is None else {"working_dir": str(folder)}
            self._submit(entrypoint, job_id, metadata, {**working_dir, "env_vars": variables})

    def submit_beside(self, entrypoint: str, job_id: str, metadata: Mapping[str, str], parent: str) -> None:
        """Starts a command with the code and the environment of another job."""
        runtime_env = dict(self.details(parent).runtime_env or {})
        runtime_env["env_vars"] = {**runtime_env.get("env_vars", {}), JOB_ID_VARIABLE: job_id}
        self._submit(entrypoint, job_id, metadata, runtime_env)

    def _submit(
        self, entrypoint: str, job_id: str, metadata: Mapping[str, str], runtime_env: dict[str, object]
    ) -> None:
        try:
            with self._connected():
                self._client.submit_job(
                    entrypoint=entrypoint, submission_id=job_id, metadata=dict(metadata), runtime_env=runtime_env
                )
        except RuntimeError as error:
            raise UserError(f"the cluster at {self.address} refused the job: {first_line(error)}") from error

    def details(self, job_id: str) -> JobDetails:
        """The details of a job.

        Raises:
            ConfigError: if the cluster does not know the job.
        """
        try:
            with self._asked():
                return self._client.get_job_info(job_id)
        except RuntimeError as error:
            known = ", ".join(str(job.submission_id) for job in self.jobs()[:10]) or "there are none"
            raise ConfigError(
                f"job: found {job_id!r}, which {self.address} does not know; newest jobs: {known}"
            ) from error

    def jobs(self) -> list[JobDetails]:
        """All submitted jobs, newest first."""
        with self._asked():
            listed = [job for job in self._client.list_jobs() if job.submission_id is not None]
        return sorted(listed, key=lambda job: job.start_time or 0, reverse=True)

    def logs(self, job_id: str) -> str:
        """The output of a job."""
        self.details(job_id)
        with self._asked():
            return self._client.get_job_logs(job_id)

    def stop(self, job_id: str) -> JobDetails:
        """Stops a job, which saves first; returns its details at its end."""
        self.details(job_id)
        self.request_stop(job_id)
        while (details := self.details(job_id)).status not in _ENDED:
            time.sleep(_POLL_S)
        return details

    def request_stop(self, job_id: str) -> None:
        """Requests a job to save and stop.

        Raises:
            RuntimeError: if the cluster does not know the job.
            ConnectionLost: for other errors.
        """
        with self._asked():
            self._client.stop_job(job_id)

    def follow(self, job_id: str, write: Callable[[str], object]) -> JobDetails:
        """Passes on the output of a job until it ends; reconnects if the connection breaks."""
        num_written = 0

        async def tail() -> None:
            nonlocal num_written
            position = 0  # each connection starts with the first line
            async for text in self._client.tail_job_logs(job_id):
                new = text[max(0, num_written - position) :]
                position += len(text)
                num_written += len(new)
                write(masked(new))

        lost_since: float | None = None
        while True:
            try:
                asyncio.run(tail())
            except Exception:  # however the stream ends, the details say whether the job continues
                logger.debug("the output of %s broke off", job_id, exc_info=True)
            try:
                details = self.details(job_id)
                lost_since = None
                if details.status in _ENDED:
                    write(masked(self.logs(job_id)[num_written:]))
                    return details
            except ConnectionLost:
                lost_since = lost_since or time.monotonic()
                if time.monotonic() > lost_since + _LOST_FOR_S:
                    raise
            except ConfigError as error:
                if not num_written:
                    raise
                raise ConnectionLost(
                    f"the Ray cluster at {self.address} was started again and no longer knows {job_id}; its run can be "
                    "resumed: the same settings with run_name=<name> resume=auto"
                ) from error
            time.sleep(_POLL_S)


def _find_local_cluster() -> str:
    """Finds the address of the cluster on this machine, or of the last one that was started here.

    Raises:
        ConfigError: if there is none.
    """
    try:
        return canonicalize_bootstrap_address_or_die("auto")
    except ConnectionError as error:
        raise ConfigError(f"no Ray cluster was found on this machine; {_START_ONE}") from error


def _require_answer(address: str) -> None:
    """Checks that a server answers at an address.

    Raises:
        OSError: if nothing answers in time.
    """
    url = urlparse(address if "://" in address else f"ray://{address}")
    if url.scheme in ("http", "https"):
        requests.get(f"{address.rstrip('/')}/api/version", timeout=_ANSWER_WITHIN_S)
    elif url.hostname and url.port:
        socket.create_connection((url.hostname, url.port), timeout=_ANSWER_WITHIN_S).close()


def _reason(error: BaseException) -> str:
    """The reason why a connection failed, in a few words."""
    if isinstance(error, requests.Timeout | TimeoutError):
        return f"no answer within {_ANSWER_WITHIN_S:g} s"
    if isinstance(error, requests.JSONDecodeError | KeyError):
        return "what answers is not Ray"
    causes = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None:
        causes.append(cause)
    system = [cause.strerror for cause in causes if isinstance(cause, OSError) and cause.strerror]
    return system[-1] if system else first_line(error)


def exit_code(details: JobDetails) -> int:
    """The exit code of a job: that of its driver; 130 if it was stopped."""
    if details.status == JobStatus.SUCCEEDED:
        return 0
    if details.status == JobStatus.STOPPED:
        return Stopped.exit_code
    code = details.driver_exit_code or 1
    return code if code > 0 else 128 - code  # as a shell has it for the signal that killed the driver


def is_this_machine(address: str) -> bool:
    """Whether the cluster of a dashboard runs here; behind a forwarded port, or in containers, it is elsewhere."""
    return is_loopback(address) and any(_is_own(gcs.rpartition(":")[0]) for gcs in find_gcs_addresses())


def _is_own(host: str) -> bool:
    """Whether a host is this machine: that of a Ray in a container has an address of the container's network."""
    try:
        family, kind, _, _, place = socket.getaddrinfo(host.strip("[]"), 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as own:
            own.bind(place)
    except OSError:
        return False
    return True


def as_table(jobs: Sequence[JobDetails]) -> str:
    """A table of jobs with their states."""
    rows = [
        [
            job.submission_id,
            job.status.value.lower(),
            time.strftime("%Y-%m-%d %H:%M", time.localtime((job.start_time or 0) / 1000)),
            timedelta(seconds=round(((job.end_time or time.time() * 1000) - (job.start_time or 0)) / 1000)),
            (job.metadata or {}).get("recipe", ""),
            (job.metadata or {}).get("parent", ""),
        ]
        for job in jobs
    ]
    return in_table(["job", "state", "started", "took", "recipe", "part of"], *rows) if rows else "no jobs"
