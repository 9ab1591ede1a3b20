from pathlib import Path

import pytest

from ssl_sec.edges.command_line import run_job
from ssl_sec.edges.tracking.store import require_store
from ssl_sec.errors import ConfigError, StorageError
from tests.jobs import pretrain


@pytest.mark.parametrize(
    "uri",
    [
        "sqlite:///{folder}/new.db",
        "sqlite:///{folder}/none/new.db",
        "sqlite:///{folder}/empty.db?timeout=5",
        "sqlite://",
        "http://127.0.0.1:5000",
        "https://name:word@mlflow.example",
        "postgresql+psycopg2://name:word@host/database",
        "databricks",
    ],
)
def test_an_address_where_a_store_may_be_is_taken(uri, tmp_path: Path):
    (tmp_path / "empty.db").touch()
    require_store(uri.format(folder=tmp_path), "tracking.uri")


@pytest.mark.parametrize(
    "uri", ["./mlruns", "mlruns", "file:///tmp/mlruns", "ftp://x", "/tmp/mlflow.db", "sqlite:x.db"]
)
def test_an_address_that_no_store_has_is_refused(uri):
    with pytest.raises(ConfigError, match=f"^tracking.uri: found '{uri}', must be sqlite:///<file>"):
        require_store(uri, "tracking.uri")


def test_a_file_that_is_no_database_is_refused(tmp_path: Path):
    (tmp_path / "text").write_text("a file with other things in it")
    with pytest.raises(StorageError, match="text, which is not an SQLite database"):
        require_store(f"sqlite:///{tmp_path}/text", "tracking.uri")


def test_a_folder_is_refused_before_the_run_starts(tmp_path: Path, capsys, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}")
    assert run_job("pretrain", pretrain, ["runtime=local", f"output_dir={tmp_path / 'runs'}"]) == 4
    told = capsys.readouterr().err.strip()
    assert told.startswith("error: MLFLOW_TRACKING_URI: found sqlite:") and "which is a folder" in told
    assert "\n" not in told
    assert not (tmp_path / "runs").exists()
