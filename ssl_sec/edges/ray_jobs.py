"""The job server of a Ray cluster: jobs are sent, followed and stopped.

It imports no more than Ray's client, so that a look at the jobs is quick.
"""

import asyncio
import contextlib
import logging
import os
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from urllib.parse import urlparse

import requests
from ray.exceptions import AuthenticationError
from ray.job_submission import JobDetails, JobStatus, JobSubmissionClient

from ssl_sec.edges.command_line import in_table
from ssl_sec.edges.packaging import COMMIT_VARIABLE, JOB_ID_VARIABLE, checkout, commit, packaged
from ssl_sec.edges.provenance import write_code_state
from ssl_sec.errors import ConfigError, Stopped, UserError, first_line
from ssl_sec.masking import masked

# How long a driver has to save after it was told to stop; Ray's own is 3 s.
_STOP_WITHIN_S = 300
_POLL_S = 1.0
_ENDED = (JobStatus.SUCCEEDED, JobStatus.FAILED, JobStatus.STOPPED)


def entrypoint(job: str, arguments: Sequence[str]) -> str:
    """The command line that runs a job."""
    return shlex.join(["exec", "python", "-m", f"jobs.{job}", *arguments])


class Cluster:
    """The job server of a Ray cluster.

    Args:
        address: of the dashboard, http://host:8265; None takes RAY_API_SERVER_ADDRESS, RAY_ADDRESS or a cluster here.

    Raises:
        ConfigError: if there is none.
    """

    def __init__(self, address: str | None) -> None:
        for name in ("ray", "ray.dashboard.modules.job.sdk", "ray.dashboard.modules.dashboard_sdk"):
            logging.getLogger(name).setLevel(logging.ERROR)
        try:
            self._client = JobSubmissionClient(address)
        except AuthenticationError as error:
            raise ConfigError(
                f"the Ray cluster at {address or 'this machine'} asks for another token; give the one it was started "
                "with: RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=<file>"
            ) from error
        except (ConnectionError, RuntimeError, ValueError) as error:
            where = address or os.environ.get("RAY_API_SERVER_ADDRESS") or os.environ.get("RAY_ADDRESS")
            raise ConfigError(
                f"no Ray cluster at {where or 'this machine'} ({first_line(error)}); start one with "
                "`ray start --head`, or name one: --address http://<head>:8265"
            ) from error

    @property
    def address(self) -> str:
        """Of the dashboard."""
        return self._client.get_address()

    def submit(self, entrypoint: str, job_id: str, metadata: Mapping[str, str], environment: Mapping[str, str]) -> None:
        """Sends the checkout, where there is one, and starts a command on the cluster.

        Raises:
            ConfigError: if the checkout is too large.
            UserError: if the cluster refuses the job.
        """
        root = checkout()
        variables = {"RAY_JOB_STOP_WAIT_TIME_S": str(_STOP_WITHIN_S), JOB_ID_VARIABLE: job_id, **environment}
        if root is None:
            self._submit(entrypoint, job_id, metadata, {"env_vars": variables})
            return
        if (found := commit(root)) is not None:
            variables[COMMIT_VARIABLE] = found
        with packaged(root) as folder:
            write_code_state(root, folder)
            self._submit(entrypoint, job_id, metadata, {"working_dir": str(folder), "env_vars": variables})

    def submit_beside(self, entrypoint: str, job_id: str, metadata: Mapping[str, str], parent: str) -> None:
        """Starts a command with the code and the environment of another job."""
        runtime_env = dict(self.details(parent).runtime_env or {})
        runtime_env["env_vars"] = {**runtime_env.get("env_vars", {}), JOB_ID_VARIABLE: job_id}
        self._submit(entrypoint, job_id, metadata, runtime_env)

    def _submit(
        self, entrypoint: str, job_id: str, metadata: Mapping[str, str], runtime_env: dict[str, object]
    ) -> None:
        try:
            self._client.submit_job(
                entrypoint=entrypoint, submission_id=job_id, metadata=dict(metadata), runtime_env=runtime_env
            )
        except (RuntimeError, ConnectionError) as error:
            raise UserError(f"the cluster at {self.address} refused the job: {first_line(error)}") from error

    def details(self, job_id: str) -> JobDetails:
        """What the cluster knows of a job.

        Raises:
            ConfigError: if it knows none of that id.
        """
        try:
            return self._client.get_job_info(job_id)
        except RuntimeError as error:
            known = ", ".join(str(job.submission_id) for job in self.jobs()[:10]) or "there are none"
            raise ConfigError(
                f"job: found {job_id!r}, which {self.address} does not know; newest jobs: {known}"
            ) from error

    def jobs(self) -> list[JobDetails]:
        """All jobs that were submitted, newest first."""
        listed = [job for job in self._client.list_jobs() if job.submission_id is not None]
        return sorted(listed, key=lambda job: job.start_time or 0, reverse=True)

    def logs(self, job_id: str) -> str:
        """What a job printed so far."""
        self.details(job_id)
        return self._client.get_job_logs(job_id)

    def stop(self, job_id: str) -> JobDetails:
        """Asks a job to save and stop; its details at its end."""
        self.details(job_id)
        self.ask_to_stop(job_id)
        while (details := self.details(job_id)).status not in _ENDED:
            time.sleep(_POLL_S)
        return details

    def ask_to_stop(self, job_id: str) -> None:
        """Asks a job to save and stop."""
        self._client.stop_job(job_id)

    def follow(self, job_id: str, write: Callable[[str], object]) -> JobDetails:
        """Hands on what a job prints until it ends; a connection that breaks is taken up again."""
        num_written = 0

        async def tail() -> None:
            nonlocal num_written
            position = 0  # each connection begins at the beginning
            async for text in self._client.tail_job_logs(job_id):
                new = text[max(0, num_written - position) :]
                position += len(text)
                num_written += len(new)
                write(masked(new))

        while True:
            with contextlib.suppress(RuntimeError, OSError, requests.RequestException):
                asyncio.run(tail())
            details = self.details(job_id)
            if details.status in _ENDED:
                whole = self._client.get_job_logs(job_id)
                write(masked(whole[num_written:]))
                return details
            time.sleep(_POLL_S)


def exit_code(details: JobDetails) -> int:
    """A job's end as an exit code: its driver's; 130 if it was stopped, which is no success."""
    if details.status == JobStatus.SUCCEEDED:
        return 0
    if details.status == JobStatus.STOPPED:
        return Stopped.exit_code
    return details.driver_exit_code or 1


def is_this_machine(address: str) -> bool:
    """Whether a dashboard's address is on this machine's loopback."""
    return urlparse(address).hostname in ("127.0.0.1", "localhost", "::1")


def as_table(jobs: Sequence[JobDetails]) -> str:
    """Jobs with their states."""
    rows = [
        [
            job.submission_id,
            job.status.value.lower(),
            time.strftime("%Y-%m-%d %H:%M", time.localtime((job.start_time or 0) / 1000)),
            _duration(job),
            (job.metadata or {}).get("recipe", ""),
            (job.metadata or {}).get("parent", ""),
        ]
        for job in jobs
    ]
    return in_table(rows, ["job", "state", "started", "took", "recipe", "part of"]) if rows else "no jobs"


def _duration(job: JobDetails) -> str:
    seconds = ((job.end_time or time.time() * 1000) - (job.start_time or 0)) / 1000
    minutes, seconds_left = divmod(round(seconds), 60)
    hours, minutes_left = divmod(minutes, 60)
    return f"{hours}:{minutes_left:02d}:{seconds_left:02d}"
