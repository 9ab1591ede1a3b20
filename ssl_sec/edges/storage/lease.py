"""A lease of a folder in object storage, as of a run: two processes cannot have it at once, wherever they are.

Object storage has no locks that end with their process. So a process writes a file that says until when the folder is
its own, and writes it again while it is active; a lease that has expired may be taken over.
"""

import contextlib
import json
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ssl_sec.edges.storage.bucket import Bucket
from ssl_sec.errors import ConfigError, StorageError

logger = logging.getLogger("ssl_sec")

# How long a lease lasts: longer than outages of the storage, and than differences between the clocks of two machines.
_LASTS_S = 300.0
_RENEWED_EVERY_S = 30.0
# Two processes that take over a lease at once, or whose storage has no conditional writes, see each other after this.
_SETTLES_S = 2.0
# Time between two checks whether a lease is renewed.
_LOOKS_EVERY_S = 5.0


class Lease:
    """The lease of a folder, renewed in a thread until it is released.

    Args:
        bucket: the folder.
        on_loss: called if another process has taken over the lease.
        waits: whether to wait until a lease expires that is not renewed: its process may have been killed.
        name: name of the file, which others may have leases beside.
        key: key that the refusal names.
        other: what it allows.

    Raises:
        ConfigError: if another process has it.
        StorageError: if it cannot be written.
    """

    def __init__(
        self,
        bucket: Bucket,
        on_loss: Callable[[], object],
        *,
        waits: bool = False,
        name: str = ".lease",
        key: str = "run_name",
        other: str = "another run_name",
    ) -> None:
        self._bucket = bucket
        self._name, self._key, self._other = name, key, other
        self._on_loss = on_loss
        self._waits = waits
        self._token = uuid.uuid4().hex
        self._released = threading.Event()
        self._take()
        self._thread = threading.Thread(target=self._renew, name="lease", daemon=True)
        self._thread.start()

    def release(self) -> None:
        """Lets other processes have the folder."""
        self._released.set()
        self._thread.join()
        with contextlib.suppress(StorageError):  # otherwise the lease expires
            if self._holder().get("token") == self._token:
                self._bucket.remove([self._name])

    def _take(self) -> None:
        old = self._require_free()  # first, as storage without conditional writes would replace a live process's file
        if not self._bucket.create(self._name, self._content()):
            if self._holder() != old:
                self._require_free()
            self._bucket.write(self._name, self._content())
            time.sleep(_SETTLES_S)
        if self._holder().get("token") != self._token:
            raise ConfigError(f"{self._key}: {self._bucket.url} was taken by another process at the same time")

    def _require_free(self) -> dict[str, Any]:
        """Raises a ConfigError if another process has the lease; returns the lease that may be taken over."""
        first, begun = self._holder(), time.monotonic()
        holder = first
        while holder and holder["expires"] > time.time() and not _has_died(holder):
            if time.monotonic() > begun + _LASTS_S:  # the clock of its machine is ahead
                return holder
            if not self._waits or (holder["token"], holder["expires"]) != (first["token"], first["expires"]):
                raise ConfigError(
                    f"{self._key}: {self._bucket.url} is in use: process {holder['pid']} on {holder['host']} runs it "
                    f"(since {holder['since']}); allowed: {self._other}, or waiting for its end (a process that "
                    f"was killed keeps it for at most {_LASTS_S / 60:g} minutes)"
                )
            if holder is first:
                logger.info(
                    "%s is in use by process %s on %s; if that was killed, the run resumes in at most %d s",
                    *(self._bucket.url, holder["pid"], holder["host"], round(holder["expires"] - time.time())),
                )
            time.sleep(_LOOKS_EVERY_S)
            holder = self._holder()
        return holder

    def _content(self) -> bytes:
        about = {
            "token": self._token,
            "host": socket.gethostname(),
            "machine": this_machine(),
            "pid": os.getpid(),
            "since": time.strftime("%Y-%m-%d %H:%M:%S"),
            "expires": time.time() + _LASTS_S,
        }
        return json.dumps(about).encode()

    def _holder(self) -> dict[str, Any]:
        content = self._bucket.read(self._name)
        with contextlib.suppress(ValueError, TypeError):
            holder = json.loads(content or b"")
            return {"token": "", "expires": 0.0, "host": "?", "machine": None, "pid": 0, "since": "?", **holder}
        return {}

    def _renew(self) -> None:
        while not self._released.wait(_RENEWED_EVERY_S):
            try:
                token = self._holder().get("token")
                if token == self._token:
                    self._bucket.write(self._name, self._content())
                    continue
            except StorageError:  # the error has been logged, and it is tried again
                continue
            logger.error("%s: another process has taken it over; this one stops", self._bucket.url)
            self._on_loss()
            return


def _has_died(holder: dict[str, Any]) -> bool:
    """Whether the holder was a process that no longer exists, if its number is one of this machine."""
    if holder["machine"] is None or holder["machine"] != this_machine():
        return False
    try:
        os.kill(int(holder["pid"]), 0)
    except OSError as error:
        return isinstance(error, ProcessLookupError)
    return False


def this_machine() -> str | None:
    """An id shared by processes whose numbers are of one machine or container; None if it is not known.

    Containers may share a host's name, and have their own process numbers.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return None
