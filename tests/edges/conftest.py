import errno
import logging
import os
import sqlite3
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import closing, suppress
from functools import partial
from pathlib import Path

import fsspec
import pytest
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from mlflow.store.db import utils
from mlflow.store.model_registry import sqlalchemy_store
from moto.server import ThreadedMotoServer
from PIL import Image
from sqlalchemy import Engine, create_engine, event

from ssl_sec.exporting import checking
from ssl_sec.figures import runs as runs_figures
from ssl_sec.recipes.face import figures as face_figures
from ssl_sec.recipes.finetuning import figures as finetuning_figures
from ssl_sec.recipes.metric_learning import figures as metric_learning_figures
from ssl_sec.recipes.pretraining import figures as pretraining_figures
from ssl_sec.recipes.probing import figures as probing_figures
from tests.data.files import write_digit_pairs
from tests.exporting.warm_reader import WarmReader

# A narrow encoder and few steps: these test the flow of a recipe, not its result.
QUICK = (
    "experiment=digits",
    "encoder.width=0.125",
    "data.max_images=320",
    "global_batch_size=64",
    "epochs=2",
    "probe.epochs=5",
    "probe.decay_at=[0.6]",
    "tracking.register_model=false",
    "tracking.system_metrics=false",
)

# With it, QUICK has all digits, in as many steps.
WHOLE = ("data.max_images=null", "global_batch_size=256")

# The same for faces: eight steps, four per epoch; SEC-EMA, whose μ a resume must restore.
QUICK_FACE = (
    "recipe=digits",
    "encoder=ir18",
    "encoder.width=0.0625",
    "head.dim=16",
    "loss.scale=16",
    "constraint=sec_ema",
    "optimiser.decay_at_epochs=[1.5]",
    "data.max_images=320",
    "epochs=2",
    "global_batch_size=80",
    "log_every_steps=1",
    "monitor.max_pairs=40",
    "tracking.register_model=false",
    "tracking.system_metrics=false",
)
WHOLE_FACE = ("data.max_images=null", "global_batch_size=300")

# Where the figures of a run are made.
FIGURES = (
    *(runs_figures, pretraining_figures, metric_learning_figures),
    *(face_figures, finetuning_figures, probing_figures),
)


def half_a_picture(figure: Figure, path: Path, **options: object) -> None:
    """Stands for `Figure.savefig` on a disk that becomes full.

    Raises:
        OSError: always.
    """
    path.write_bytes(b"half")
    raise OSError(errno.ENOSPC, "No space left on device")


def git(folder: Path, *arguments: str) -> str:
    """Runs git with some author; returns its output."""
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    return subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def quick(tmp_path: Path) -> list[str]:
    """Overrides of a digits run that takes a second or two."""
    return [*QUICK, f"output_dir={tmp_path / 'runs'}"]


@pytest.fixture(scope="session")
def digit_pairs(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A test set of pairs of test digits, as the command line has it."""
    table, images = write_digit_pairs(tmp_path_factory.mktemp("people"))
    return f"test_sets=[{{name:pairs,title:digits,pairs:{table},images:{images}}}]"


@pytest.fixture(scope="session", autouse=True)
def tables_are_copied(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """MLflow makes the tables of one database; the others are copies of it, in a thirtieth of the time."""
    make = utils._initialize_tables
    template = tmp_path_factory.mktemp("store") / "mlflow.db"

    def copy(engine: Engine) -> None:
        if engine.dialect.name != "sqlite" or not utils._is_empty_database(engine):
            make(engine)
            return
        if not template.exists():
            first = create_engine(f"sqlite:///{template}")
            make(first)
            first.dispose()
        with closing(sqlite3.connect(template)) as source, closing(sqlite3.connect(engine.url.database)) as target:
            source.backup(target)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(utils, "_initialize_tables", copy)
        patch.setattr(sqlalchemy_store, "_initialize_tables", copy)
        yield


@pytest.fixture(scope="session", autouse=True)
def stores_are_not_synchronised() -> Iterator[None]:
    """No test cuts the power: SQLite leaves it to the system when its files reach the disk."""

    def leave(connection: object, _: object) -> None:
        if isinstance(connection, sqlite3.Connection):
            with suppress(sqlite3.Error):  # of a file that is no database, which the code is to find
                connection.execute("PRAGMA synchronous=OFF")

    event.listen(Engine, "connect", leave)
    yield
    event.remove(Engine, "connect", leave)


@pytest.fixture(scope="module", autouse=True)
def pictures_are_quick(request: pytest.FixtureRequest) -> Iterator[None]:
    """Pictures take most of the time of a small run: they are blank except in modules with `DRAWS_PICTURES`.

    t-SNE of all digits and layouts have their tests elsewhere.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ConstrainedLayoutEngine, "execute", lambda self, figure: None)
        for module in (pretraining_figures, metric_learning_figures):
            patch.setattr(module, "features_figure", partial(module.features_figure, max_points=60))
        if not getattr(request.module, "DRAWS_PICTURES", False):
            patch.setattr(Figure, "savefig", lambda self, path, **options: Image.new("L", (1, 1)).save(path, "PNG"))
            for module in FIGURES:
                for name in [name for name in vars(module) if name.endswith("_figure")]:
                    patch.setattr(module, name, lambda *given, **options: Figure())
        yield


@pytest.fixture(scope="package", autouse=True)
def exports_are_read_back_by_a_warm_process(warm_reader: WarmReader) -> Iterator[None]:
    """The imports of a process that reads an export back take longer than the rest of a small export."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checking, "subprocess", warm_reader)
        yield


@pytest.fixture(autouse=True)
def own_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """No run of the tests goes to the store that the environment names."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


@pytest.fixture(autouse=True)
def a_store_that_is_away_is_tried_at_once(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """MLflow pauses for seconds between retries; only the slow tests, with servers, keep that."""
    if request.node.get_closest_marker("slow") is None:
        monkeypatch.setenv("MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR", "0")
        monkeypatch.setenv("MLFLOW_HTTP_REQUEST_BACKOFF_JITTER", "0")


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    """The address of an S3 server in this process."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    yield "http://{}:{}".format(*server.get_host_and_port())
    server.stop()


@pytest.fixture
def s3(request, tmp_path: Path, monkeypatch) -> str:
    """The URL of an empty folder in object storage; the staging folders of this machine are in `tmp_path`.

    SSL_SEC_TEST_STORAGE gives a bucket or container in place of that of a server in this process.
    """
    monkeypatch.setenv("SSL_SEC_STAGING", str(tmp_path / "staging"))
    name = f"test-{uuid.uuid4().hex[:12]}"
    if place := os.environ.get("SSL_SEC_TEST_STORAGE"):
        return f"{place}/{name}/runs"
    for variable, value in {
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": request.getfixturevalue("s3_server"),
    }.items():
        monkeypatch.setenv(variable, value)
    fsspec.filesystem("s3").mkdir(name)
    return f"s3://{name}/runs"
