"""The embeddings that a job is given: a folder of Parquet files, or one such file, here or in object storage."""

from collections.abc import Mapping
from pathlib import Path

from ssl_sec.edges.storage.files import Place, place_at
from ssl_sec.edges.storage.places import is_remote
from ssl_sec.embeddings.reading import EmbeddingSet, read_set, require_all_parts
from ssl_sec.errors import ConfigError, DataError, MissingDataError


def embeddings_at(location: str, key: str) -> EmbeddingSet:
    """The embeddings in a folder, or in a file.

    Args:
        location: the folder or the file.
        key: key that gives it.

    Raises:
        DataError: if there are none, some of a folder are missing, or they cannot be read.
    """
    if not is_remote(location):
        path = Path(location).expanduser()
        if not path.exists():
            raise MissingDataError(f"{key}: found {location}: no such file or folder")
        if path.is_file() and path.suffix != ".parquet":
            raise DataError(f"{key}: found {location}, must be a folder of Parquet files, or one such file, *.parquet")
    place, last = place_of(location, key)
    names = sorted(
        name for name in place.files() if name.endswith(".parquet") and "/" not in name and last in ("", name)
    )
    if not names:
        raise DataError(f"{key}: found no Parquet files in {location}; python -m jobs.embed writes such files")
    if not last:
        require_all_parts(names)
    root = location if not last else (location.rpartition("/")[0] or ".")
    return read_set((f"{root}/{name}", lambda name=name: place.open(name)) for name in names)


def require_own_folder(output: str, given: Mapping[str, str | None]) -> None:
    """Refuses an output whose tables would be taken for embeddings later.

    Args:
        output: the folder or URL of the output.
        given: key -> the embeddings that it gives.

    Raises:
        ConfigError: they are in that folder.
    """
    folder = place_at(output)
    for key, location in given.items():
        if location is not None and str(place_of(location, key)[0]) == str(folder):
            raise ConfigError(f"output: found {folder}, the folder of the {key}; must be another")


def place_of(location: str, key: str) -> tuple[Place, str]:
    """The folder of embeddings, and the name of the one file if one is given; Spark gives folders names of files."""
    is_file = location.endswith(".parquet") and not Path(location).expanduser().is_dir()
    folder, _, last = location.rpartition("/") if is_file else (location, "", "")
    return place_at(folder or ("/" if location.startswith("/") else "."), key), last
