"""Files in object storage, by fsspec: requests are retried, and errors are one line.

The only assumption is that a file appears whole or not at all: there is no rename, and no lock.
"""

import contextlib
import copy
import errno
import logging
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, cast

import fsspec

from ssl_sec.edges.masking import masked
from ssl_sec.errors import ConfigError, StorageError, first_line
from ssl_sec.files import replaced

logger = logging.getLogger("ssl_sec")

T = TypeVar("T")

# How long a request is retried, and how long by a worker, which cannot start without it.
ANSWER_S = 60.0
OUTAGE_S = 600.0
_LONGEST_PAUSE_S = 10.0

_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs", "az": "azure", "abfs": "azure", "abfss": "azure"}
# Retries of the library itself; ours come on top, and are reported.
_S3_OPTIONS = {
    "config_kwargs": {"connect_timeout": 10, "read_timeout": 60, "retries": {"max_attempts": 3, "mode": "standard"}}
}
# Errors for which a retry is useless, by their classes in the providers' libraries, and by the servers' answers.
_REFUSED = ("credential", "authentication", "profilenotfound", "paramvalidation")
_FULL = ("quotaexceeded", "insufficientstorage", "insufficient storage", "storagefull")
# Statuses of answers: not authenticated, not allowed, no such bucket; and full.
_REFUSED_STATUSES, _FULL_STATUS = (401, 403, 404), 507


class RefusedError(StorageError):
    """A request that is not retried: it is not allowed, or the storage is full."""


class Bucket:
    """A folder in object storage; files are named relative to it, with `/`.

    Args:
        url: address of the folder, such as s3://bucket/runs.
        key: configuration key that it was given for, for messages.

    Raises:
        ConfigError: if the package for this kind of storage is missing, or the URL cannot be used.
    """

    def __init__(self, url: str, key: str = "output_dir") -> None:
        self.url = url.rstrip("/")
        self._key = key
        scheme = self.url.partition("://")[0]
        try:
            options = _S3_OPTIONS if _EXTRAS.get(scheme) == "s3" else {}
            file_system, path = fsspec.url_to_fs(self.url, use_listings_cache=False, **options)
        except ImportError as error:
            extra = _EXTRAS.get(scheme)
            install = f"pip install 'ssl_sec[{extra}]'" if extra else f"the package that fsspec needs for {scheme}://"
            raise ConfigError(f"{key}: found {masked(url)!r}, which needs {install}") from error
        except Exception as error:  # each kind of storage has its own errors
            raise ConfigError(f"{key}: found {masked(url)!r}, which cannot be used: {first_line(error)}") from error
        for library in ("aiobotocore", "botocore"):  # these libraries log where they found the credentials
            logging.getLogger(library).setLevel(logging.WARNING)
        self._fs: Any = file_system
        self._path = path.rstrip("/")
        self._is_patient = False
        self._log: Callable[[int, str], object] = logger.log

    def __str__(self) -> str:
        return masked(self.url)

    def folder(self, name: str) -> "Bucket":
        """A folder below this one, of the usual patience."""
        return Bucket(f"{self.url}/{name}", self._key)

    def patient(self, log: Callable[[int, str], object]) -> "Bucket":
        """This folder, with requests that are retried for `OUTAGE_S`.

        Args:
            log: takes the level and the text of messages.
        """
        patient = copy.copy(self)
        patient._is_patient, patient._log = True, log
        return patient

    def write(self, name: str, content: bytes) -> None:
        """Replaces a file.

        Raises:
            StorageError: if that is refused, or fails for `ANSWER_S`; the file is as before.
        """
        self._try("written", name, lambda: self._fs.pipe_file(self._full(name), content))

    def create(self, name: str, content: bytes) -> bool:
        """Writes a file unless it exists; returns whether it was written.

        Storage without conditional writes may let two writers believe that they have written it.

        Raises:
            StorageError: see `write`.
        """

        def create() -> bool:
            try:
                self._fs.pipe_file(self._full(name), content, mode="create")
            except Exception as error:  # not all servers call it FileExistsError
                try:
                    present = self._fs.cat_file(self._full(name))
                except FileNotFoundError:
                    raise error from None
                # A request that is retried may find the file that it has itself written.
                return present == content
            return True

        return self._try("written", name, create)

    def upload(self, path: Path, name: str) -> None:
        """Uploads a file of this machine.

        Raises:
            FileNotFoundError: if there is no such file on this machine.
            StorageError: see `write`.
        """
        path.stat()
        self._try("written", name, lambda: self._fs.put_file(str(path), self._full(name)))

    def read(self, name: str) -> bytes | None:
        """The content of a file; None if it does not exist.

        Raises:
            StorageError: if it cannot be read for `ANSWER_S`, or that is refused.
        """
        with contextlib.suppress(FileNotFoundError):
            return self._try("read", name, lambda: self._fs.cat_file(self._full(name)))
        return None

    def open(self, name: str) -> BinaryIO:
        """Opens a file, to read parts of it.

        Raises:
            OSError: if it cannot be opened; later, if a part cannot be read.
        """
        return self._fs.open(self._full(name), "rb")

    def download(self, name: str, path: Path) -> None:
        """Downloads a file, which appears whole.

        Raises:
            FileNotFoundError: if it does not exist.
            StorageError: see `read`; or if `path` cannot be written.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        with replaced(path, sync=False) as temporary:
            self._try("read", name, lambda: self._fs.get_file(self._full(name), str(temporary)))

    def files(self, folder: str = "") -> dict[str, int]:
        """Name -> size in bytes of all files below a folder of this one.

        Raises:
            StorageError: see `read`.
        """
        return {name: int(about["size"] or 0) for name, about in self._listed(folder).items()}

    def versions(self) -> dict[str, str]:
        """Name -> what the storage says about a file, such as the time of its last change, of all files below this one.

        Raises:
            StorageError: see `read`.
        """
        return {name: str(about) for name, about in self._listed().items()}

    def _listed(self, folder: str = "") -> dict[str, dict[str, Any]]:
        def find() -> dict[str, dict[str, Any]]:
            self._fs.invalidate_cache()
            return self._fs.find(self._full(folder), detail=True)

        try:
            found = self._try("listed", folder, find)
        except FileNotFoundError:
            return {}
        # Some servers list the folder itself, as an empty file.
        start = f"{self._path}/"
        names = {about["name"].lstrip("/"): about for about in found.values()}
        return {
            name.removeprefix(start.lstrip("/")): about
            for name, about in names.items()
            if name.startswith(start.lstrip("/")) and not name.endswith("/")
        }

    def folders(self) -> list[str]:
        """The names of the folders in this one, sorted.

        Raises:
            StorageError: see `read`.
        """

        def find() -> list[dict[str, Any]]:
            self._fs.invalidate_cache()
            return self._fs.ls(self._path, detail=True)

        try:
            found = self._try("listed", "", find)
        except FileNotFoundError:
            return []
        return sorted(about["name"].rstrip("/").rpartition("/")[2] for about in found if about["type"] == "directory")

    def remove(self, names: Collection[str]) -> None:
        """Removes files; those that do not exist are ignored.

        Raises:
            StorageError: see `write`.
        """
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                self._try("removed", name, lambda name=name: self._fs.rm_file(self._full(name)))

    def clean(self) -> None:
        """Removes interrupted uploads below this folder, whose parts would be kept and paid for; S3 only."""
        if self.url.partition("://")[0] not in ("s3", "s3a"):
            return  # other storage removes them itself
        container, _, prefix = self._path.partition("/")
        # A bucket may have more of them than the server lists in one answer, most below other folders.
        listed: dict[str, str] = {"Bucket": container, "Prefix": f"{prefix}/"}
        try:
            while True:
                answer = self._fs.call_s3("list_multipart_uploads", **listed)
                for upload in answer.get("Uploads", []):
                    if upload["Key"].startswith(f"{prefix}/"):  # a server may ignore the prefix
                        which = {"Bucket": container, "Key": upload["Key"], "UploadId": upload["UploadId"]}
                        self._fs.call_s3("abort_multipart_upload", **which)
                if not answer.get("IsTruncated"):
                    break
                listed |= {"KeyMarker": answer["NextKeyMarker"], "UploadIdMarker": answer["NextUploadIdMarker"]}
        except Exception:  # optional: not all servers and policies allow it
            logger.debug("interrupted uploads below %s are kept", self.url, exc_info=True)

    def _full(self, name: str) -> str:
        return f"{self._path}/{name}" if name else self._path

    def _try(self, what: str, name: str, request: Callable[[], T]) -> T:
        """Retries a request until it succeeds, is refused, or the time for it has passed."""
        limit_s = OUTAGE_S if self._is_patient else ANSWER_S
        deadline = time.monotonic() + limit_s
        count = 0
        while True:
            try:
                return request()
            except Exception as error:  # each kind of storage has its own errors
                if isinstance(error, FileNotFoundError) and what != "written":
                    raise
                failed = f"{self._key}: {self.url}/{name} cannot be {what}: {_reason(error)}"
                if isinstance(error, FileNotFoundError) or _is_final(error):
                    raise RefusedError(failed) from error
                if time.monotonic() > deadline:
                    raise StorageError(failed) from error
                if count == 1:  # a single failure is ordinary
                    self._log(logging.WARNING, f"{failed}; it is retried for up to {limit_s:g} s")
                time.sleep(min(0.25 * 2**count, _LONGEST_PAUSE_S))
                count += 1


def _is_final(error: BaseException) -> bool:
    """Whether a retry of a request is useless."""
    if isinstance(error, PermissionError | ImportError | IsADirectoryError | NotADirectoryError | TypeError):
        return True
    if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
        return True
    kinds = " ".join(kind.__name__ for kind in type(error).__mro__).lower()
    return any(word in kinds for word in _REFUSED) or _status_of(error) in _REFUSED_STATUSES or _is_full(error)


def _is_full(error: BaseException) -> bool:
    """Whether the storage is full, by a server's message or status; fsspec may hide it in the cause."""
    found = (error, *([] if error.__cause__ is None else [error.__cause__]))
    return any(_status_of(each) == _FULL_STATUS for each in found) or any(word in str(error).lower() for word in _FULL)


def _status_of(error: BaseException) -> Any:
    """The HTTP status of an answer, as the libraries of the providers have it; None if there is none."""
    answer = getattr(error, "response", None)  # botocore
    if isinstance(answer, Mapping):
        return cast("Mapping[str, Any]", answer).get("ResponseMetadata", {}).get("HTTPStatusCode")
    return next((found for name in ("status", "status_code", "code") if (found := getattr(error, name, None))), None)


def _reason(error: BaseException) -> str:
    """Why a request failed, in a line without secrets."""
    if isinstance(error, FileNotFoundError) and "://" in str(error):  # gcsfs gives the address of the request alone
        return "not found; there may be no such bucket"
    # If a server gives no message, only the error of the provider's library has its error code.
    found = error.__cause__ if first_line(error).endswith("None") else error
    return masked(first_line(found or error)).removesuffix(": None")
