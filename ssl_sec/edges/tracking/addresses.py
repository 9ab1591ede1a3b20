"""Addresses of tracking stores that cannot work, whatever happens: refused before a run starts."""

from pathlib import Path

from ssl_sec.edges.masking import masked
from ssl_sec.errors import ConfigError, StorageError

_SCHEMES = ("sqlite", "postgresql", "mysql", "mssql", "http", "https", "databricks", "databricks-uc")
_SQLITE = b"SQLite format 3\0"


def require_store(uri: str, key: str) -> None:
    """Refuses what no store can be at.

    Args:
        uri: of the store.
        key: that it was given for.

    Raises:
        ConfigError: for a scheme that MLflow has no store for; it keeps no runs in plain folders any more.
        StorageError: for a sqlite file that is a folder, or no database.
    """
    scheme, sign, path = uri.partition("://")
    if scheme.partition("+")[0] not in _SCHEMES or not (sign or scheme.startswith("databricks")):
        raise ConfigError(
            f"{key}: found {masked(uri)!r}, must be sqlite:///<file>, http(s)://<server>, postgresql://…, mysql://… or "
            "mssql://…"
        )
    if scheme != "sqlite" or not path.startswith("/"):
        return
    file = Path(path.removeprefix("/").partition("?")[0])
    if file.is_dir():
        raise StorageError(f"{key}: found {uri}, which is a folder; allowed: a file, as {uri.rstrip('/')}/mlflow.db")
    try:
        with file.open("rb") as opened:
            start = opened.read(len(_SQLITE))
    except OSError:  # a new one; or one that may be mended while the run trains
        return
    if start not in (b"", _SQLITE):
        raise StorageError(
            f"{key}: found {uri}, which is no SQLite database; allowed: one, or a file that is not there"
        )
