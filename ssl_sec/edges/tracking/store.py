"""The tracking store of MLflow: its address, connections, queries, and one-line errors."""

import errno
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit
from urllib.request import url2pathname

os.environ.setdefault("GIT_PYTHON_REFRESH", "quiet")  # a machine without git is fine
# We retry a server that cannot be reached ourselves; MLflow would block a call for minutes.
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "30")
os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
# MLflow would print the address of each run that ends, with the password in it.
os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")

from mlflow.entities import Run
from mlflow.environment_variables import MLFLOW_HTTP_REQUEST_TIMEOUT
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import PERMISSION_DENIED, RESOURCE_DOES_NOT_EXIST, ErrorCode
from mlflow.store.entities import PagedList
from mlflow.tracking import MlflowClient

from ssl_sec.edges.environment import through_proxy
from ssl_sec.edges.masking import masked
from ssl_sec.edges.packaging import JOB_ID_VARIABLE
from ssl_sec.edges.storage.places import absolute_store, is_remote, local_folder
from ssl_sec.errors import ConfigError, StorageError, UserError, first_line
from ssl_sec.files import locked, replaced
from ssl_sec.recipes.tracking import TrackingConfig

# MLflow logs the tables of each new database.
logging.getLogger("mlflow").setLevel(logging.ERROR)
logging.getLogger("alembic").setLevel(logging.ERROR)
logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)  # it logs tracebacks of errors that it raises
logging.getLogger("mlflow.system_metrics").setLevel(logging.CRITICAL)  # lost metrics of the machine do not matter

T = TypeVar("T")

# How long MLflow's server may take to store a file, as a large one that it passes on to object storage.
_UPLOAD_S = 600

_SCHEMES = ("sqlite", "postgresql", "mysql", "mssql", "http", "https", "databricks", "databricks-uc")
_SQLITE = b"SQLite format 3\0"
_WRONG_HOST = "Invalid Host header"  # the server's answer, with status 403, to another name than its --allowed-hosts
_UNKNOWN_USER = "failed with error code 401 "
_NOT_PERMITTED = (errno.EACCES, errno.EPERM, errno.EROFS)


def tracking_uri(config: TrackingConfig, output_dir: str) -> str:
    """The store's address: the configured one, the environment's, or sqlite in the output folder; paths are absolute.

    For a URL, sqlite is in `runs`, or, in a job that was submitted to a cluster, in the staging folder.

    Raises:
        ConfigError: for a scheme that MLflow does not support.
        StorageError: for a sqlite file that is a folder, or no database.
    """
    if config.uri:
        uri, key = config.uri, "tracking.uri"
    elif from_environment := os.environ.get("MLFLOW_TRACKING_URI"):
        uri, key = from_environment, "MLFLOW_TRACKING_URI"
    else:
        # Object storage can hold no database, and Ray removes the folder in which a submitted job starts.
        near = "runs" if is_remote(output_dir) and JOB_ID_VARIABLE not in os.environ else output_dir
        uri, key = f"sqlite:///{local_folder(near)}/mlflow.db", "output_dir"
        _require_literal(uri, uri, "output_dir", "a folder without it, or tracking.uri=<address of another store>")
    require_store(uri, key)
    return absolute_store(uri)


def workspace_of(uri: str) -> str | None:
    """The workspace in which MLflow is used: that of MLFLOW_WORKSPACE on a server; None for its default one."""
    return (os.environ.get("MLFLOW_WORKSPACE") or None) if uri.startswith(("http://", "https://")) else None


def require_store(uri: str, key: str) -> None:
    """Refuses an address that cannot be a store.

    Raises:
        ConfigError: for a scheme that MLflow does not support; plain folders are not supported.
        StorageError: for a sqlite file that is a folder, or no database.
    """
    scheme, sign, _ = uri.partition("://")
    if scheme.partition("+")[0] not in _SCHEMES or not (sign or scheme.startswith("databricks")):
        raise ConfigError(
            f"{key}: found {masked(uri)!r}, must be sqlite:///<file>, http(s)://<server>, postgresql://…, mysql://… or "
            "mssql://…"
        )
    if scheme in ("http", "https"):
        _require_address(uri, key)
    file = sqlite_file(uri)
    if file is None:
        return
    _require_literal(uri.partition("?")[0], uri, key, "a path without it")
    if file.is_dir():
        raise StorageError(f"{key}: found {uri}, which is a folder; allowed: a file, as {uri.rstrip('/')}/mlflow.db")
    try:
        with file.open("rb") as opened:
            start = opened.read(len(_SQLITE))
    except OSError:  # it does not exist yet, or may be repaired while the run trains
        return
    if start not in (b"", _SQLITE):
        raise StorageError(f"{key}: found {uri}, which is not an SQLite database; allowed: a database, or a new file")


def _require_literal(path: str, uri: str, key: str, allowed: str) -> None:
    """Refuses a path in the address of a sqlite file that would be read as another path."""
    if (sign := re.search(r"\?|%[0-9A-Fa-f]{2}", path)) is not None:
        raise ConfigError(
            f"{key}: MLflow's database would be at {uri}, where {sign[0]!r} does not stand for itself; "
            f"allowed: {allowed}"
        )


def _require_address(uri: str, key: str) -> None:
    """Refuses an address of a server that cannot be divided into its parts, without showing it."""
    try:
        _ = urlsplit(uri).port
    except ValueError:
        raise ConfigError(
            f"{key}: found an address with a port that is no number; allowed: http(s)://<server>:<port>, with /, ?, # "
            "and @ in a user name or password written as %2F, %3F, %23 and %40"
        ) from None


def sqlite_file(uri: str) -> Path | None:
    """The file of a sqlite store; None for another store."""
    return Path(uri.removeprefix("sqlite:///").partition("?")[0]) if uri.startswith("sqlite:///") else None


def artifacts_beside(file: Path) -> Path:
    """The folder of the files of runs in a sqlite store."""
    return file.resolve().parent / "mlartifacts"


def moved_store(uri: str, location: str | None) -> str | None:
    """That a sqlite store is in another folder than where it was made, as a clause; None if it is not.

    MLflow stores the addresses of files as absolute paths, and makes a folder that is not there again.

    Args:
        uri: address of the store.
        location: MLflow's address of the files of a run or of an experiment.
    """
    file, parts = sqlite_file(uri), urlsplit(location or "")
    if file is None or parts.scheme != "file":
        return None
    here, kept = artifacts_beside(file), Path(url2pathname(parts.path))
    made = next((path for path in (kept, *kept.parents) if path.name == here.name), None)
    if made is None or made.resolve() == here:
        return None
    return (
        f"the store was made in {made.parent} and is now in {here.parent}, but MLflow looks for its files, and keeps "
        f"new ones, in {made}: move the store back, or make {made.parent} a link to its new place"
    )


def connect_to_store(uri: str) -> MlflowClient:
    """Makes a client of the store; only one process at a time creates the tables of a sqlite file.

    Raises:
        StorageError: if its file is in a folder that cannot be written.
    """
    file = sqlite_file(uri)
    if file is None:
        return MlflowClient(uri)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with locked(file.with_name(file.name + ".lock")):
            if not file.exists() and "?" not in uri:
                _create(file.resolve())
            client = MlflowClient(uri)
            client.search_experiments(max_results=1)
    except OSError as error:
        if error.errno not in _NOT_PERMITTED:
            raise
        raise StorageError(
            f"tracking.uri: MLflow at {uri} cannot be used, as {file.parent} cannot be written: {error.strerror}; "
            "allowed: output_dir=<folder that can be written>; a run in another folder is given by run=<its folder>"
        ) from error
    return client


def _create(file: Path) -> None:
    """Creates a sqlite file with its tables, which MLflow does in many transactions; the file is whole or absent."""
    for left in file.parent.glob(f".{file.name}.{'[0-9a-f]' * 32}*"):  # of `replaced`, by a process that was killed
        left.unlink(missing_ok=True)
    with replaced(file) as new:
        MlflowClient(f"sqlite:///{new}").search_experiments(max_results=1)


@contextmanager
def store_errors(uri: str) -> Iterator[None]:
    """Turns errors of the store into a StorageError with one line."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if _WRONG_HOST in str(error):
            allowed = "a name, with its port, of the server's --allowed-hosts"
            raise StorageError(f"tracking.uri: MLflow refuses the host of {masked(uri)}; allowed: {allowed}") from error
        if _UNKNOWN_USER in str(error):
            given = "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN"
            raise StorageError(
                f"tracking.uri: MLflow at {masked(uri)} does not know the user; allowed: one that it knows, in {given}"
            ) from error
        where = f"{uri} cannot be used{through_proxy(uri)}"
        raise StorageError(f"tracking.uri: MLflow at {where}: {first_line(error)}") from error


@contextmanager
def long_requests() -> Iterator[None]:
    """Lets requests to MLflow's server take as long as an upload may; for calls that `Patience` limits."""
    before = MLFLOW_HTTP_REQUEST_TIMEOUT.get()
    MLFLOW_HTTP_REQUEST_TIMEOUT.set(max(before, _UPLOAD_S))
    try:
        yield
    finally:
        MLFLOW_HTTP_REQUEST_TIMEOUT.set(before)


@contextmanager
def importing_mlflow_pytorch() -> Iterator[None]:
    """Keeps the import of `mlflow.pytorch` from two side effects.

    It imports Lightning, if that is installed, which takes seconds and is not needed. And it calls
    `logging.basicConfig(level=ERROR)`, after which the caller of `train` would see no warnings of other libraries.
    """
    handlers, level = list(logging.root.handlers), logging.root.level
    is_imported = "pytorch_lightning" in sys.modules
    if not is_imported:
        sys.modules["pytorch_lightning"] = None  # pyright: ignore[reportArgumentType]  # makes its import fail
    try:
        yield
    finally:
        if not is_imported:
            del sys.modules["pytorch_lightning"]
        logging.root.handlers[:] = handlers
        logging.root.setLevel(level)


def find_run(client: MlflowClient, run_id: str) -> Run | None:
    """A run, also a deleted one; None if the store does not have it.

    Raises:
        MlflowException: if the store cannot be used.
    """
    try:
        return client.get_run(run_id)
    except MlflowException as error:
        if is_unknown(error):
            return None
        raise


def is_unknown(error: MlflowException) -> bool:
    """Whether the error says that the requested object is not in the store."""
    return error.error_code == ErrorCode.Name(RESOURCE_DOES_NOT_EXIST)


def is_answer(error: BaseException) -> bool:
    """Whether MLflow has answered with this error, so that it can be reached: a status from 400 to 499."""
    if isinstance(error, UserError) and error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, MlflowException):
        status = error.get_http_status_code()
    else:
        status = getattr(getattr(error, "response", None), "status_code", 0)  # of an upload
    return 400 <= status < 500


@contextmanager
def refusals(message: str) -> Iterator[None]:
    """Turns MLflow's answer that this user has no permission into a StorageError with this message."""
    try:
        yield
    except MlflowException as error:
        if error.error_code != ErrorCode.Name(PERMISSION_DENIED) or _WRONG_HOST in str(error):
            raise
        raise StorageError(message) from error


def all_pages(search: Callable[[str | None], PagedList[T]]) -> Iterator[T]:
    """All results of a search.

    Args:
        search: returns the page of a token; None is the token of the first page.
    """
    token = None
    while True:
        page = search(token)
        yield from page
        token = page.token
        if not token:
            return


def experiment_names(client: MlflowClient) -> dict[str, str]:
    """Id -> name of all experiments of a store that are not deleted."""
    pages = all_pages(lambda token: client.search_experiments(page_token=token))
    return {str(each.experiment_id): each.name for each in pages}


def quoted(word: str) -> str:
    """A string literal of MLflow's filter language, which has no escapes.

    Raises:
        ConfigError: if the word has both kinds of quotation marks.
    """
    for quote in ("'", '"'):
        if quote not in word:
            return f"{quote}{word}{quote}"
    raise ConfigError(f"found {word!r}, which MLflow cannot search for: it has both kinds of quotation marks")
