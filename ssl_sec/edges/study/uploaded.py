"""The metrics of a study, as stored by its newest run in MLflow."""

import logging
import tempfile
from pathlib import Path

from ssl_sec.edges.tracking.runs import RunArchive
from ssl_sec.errors import StorageError, writing
from ssl_sec.files import replace_text
from ssl_sec.recipes.config import TrainingConfig

logger = logging.getLogger("ssl_sec")

JOB = "study"
# The end of the name of the file with a study's searches, which is next to the file of its cells.
SEARCHES = "-searches"


def searches_path(cells: Path) -> Path:
    """The file of a study's searches."""
    return cells.with_name(f"{cells.stem}{SEARCHES}.csv")


def download_metrics(config: TrainingConfig, cells: Path) -> None:
    """Downloads the metrics of a study's runs and searches from MLflow, if its store has some.

    Args:
        config: configuration of one of its runs.
        cells: path for the metrics of the runs; those of the searches are written next to it.

    Raises:
        StorageError: if a file cannot be written.
    """
    try:
        archive = RunArchive.open(config.tracking, config.output_dir)
    except StorageError:
        return  # the metrics may not be tracked
    for run in archive.of_job(JOB, config.recipe_name):
        files = [name for name in archive.artifacts(run) if name.endswith(".csv")]
        if not files:
            continue
        with tempfile.TemporaryDirectory() as folder:
            for name in files:
                found = archive.download(run, name, Path(folder))
                if found is not None:
                    _keep(found, searches_path(cells) if name.endswith(f"{SEARCHES}.csv") else cells)
        logger.info("taking the metrics of run %s in MLflow at %s", run.name, archive.client.tracking_uri)
        return


def _keep(found: Path, path: Path) -> None:
    with writing("cells", path):
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, found.read_text(encoding="utf-8"))
