"""The command: its files, its mistakes, its help, and the report of a real run."""

import csv
import json
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from mlflow.tracking import MlflowClient

from ssl_sec.edges.command_line import run_job
from ssl_sec.edges.config import ReportConfig
from ssl_sec.edges.report.report import make_report, run_report
from ssl_sec.edges.run.driver import run_training
from ssl_sec.errors import StorageError
from ssl_sec.recipes.registry import PRETRAIN
from ssl_sec.recipes.tracking import TrackingConfig
from ssl_sec.settings import from_values, to_values
from tests.edges.conftest import half_a_picture
from tests.jobs import configured

DRAWS_PICTURES = True


def test_the_files_of_a_table(store):
    store.result("cifar10_sec_100", 0, 86.0)
    text = store.write("table=12")
    folder = store.folder / "report"
    paths = [folder / f"sec-table-12.{ending}" for ending in ("md", "csv", "png")]
    assert text.splitlines()[-3:] == list(map(str, paths))
    markdown = paths[0].read_text()
    assert "| 100 epochs | NT-Xent | paper | 84.76 | 99.36 | 58.43 | 85.26 |" in markdown
    assert "|  |  | ours | 86.00 (1) | not run | not run | not run |" in markdown
    with paths[1].open() as file:
        assert len(list(csv.DictReader(file))) == 8 * 4
    assert paths[2].read_bytes().startswith(b"\x89PNG")


def test_a_full_disk_keeps_the_earlier_picture_whole(store, monkeypatch):
    store.write("table=12")
    files = {path: path.read_bytes() for path in (store.folder / "report").iterdir()}
    monkeypatch.setattr(Figure, "savefig", half_a_picture)
    with pytest.raises(StorageError, match="report cannot be written: No space left"):
        store.write("table=12")
    assert {path: path.read_bytes() for path in (store.folder / "report").iterdir()} == files


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["table=13"], 2, "table: found 13, but"),
        (["paper=sef", "table=1"], 2, "paper: found 'sef'; did you mean"),
        (["figure=2"], 2, "figure: found 2; of 'Deep Metric Learning with Spherical Embedding', allowed: 1, 4, 5a, 5b"),
        (["paper=normface", "figure=4"], 2, "Face Verification', allowed: 5, 8"),
        (["paper=normface", "figure=2"], 2, "figure: found 2, which runs draw themselves as plane.png; of 'NormFace"),
        (["paper=sft", "figure=6a"], 2, "figure: found 6a, which runs draw themselves as rotation_shifts.png; of 'S"),
        ([], 2, "give one of table=<number>, figure=<number> or compare=[<run>,<run>]"),
        (["table=1", "figure=1"], 2, "compare=[<run>,<run>], not table and figure"),
        (["tabel=1"], 2, "tabel: unknown key; did you mean 'table'"),
        (["compare", "a"], 2, "compare: found ['a'], must be two runs"),
        (["table=5"], 4, "which does not exist"),
        (["table=5", "tracking.uri=sqlite:///{folder}/text"], 4, "is not an SQLite database"),
        (["table=1", "output=/proc/none"], 4, "output: /proc/none cannot be written"),
    ],
)
def test_a_mistake_is_one_line(arguments, code, message, tmp_path: Path, capsys):
    (tmp_path / "text").write_text("no database")
    given = [argument.format(folder=tmp_path) for argument in arguments]
    defaults = [f"output={tmp_path / 'report'}"] if not any("output=" in argument for argument in given) else []
    assert run_job("report", run_report, [*given, *defaults, f"output_dir={tmp_path / 'none'}"]) == code
    printed = capsys.readouterr().err.strip()
    assert message in printed
    assert printed.startswith("error: ")
    assert "\n" not in printed
    assert not (tmp_path / "none").exists()


def test_a_table_before_the_first_run(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.chdir(tmp_path)
    assert run_job("report", run_report, ["table=5"]) == 0
    assert "not run" in capsys.readouterr().out
    assert not (tmp_path / "runs").exists()
    for named in ("tracking.uri=sqlite:///none.db", "tracking.experiment=mine", "output_dir=runs2"):
        assert run_job("report", run_report, ["table=5", named]) == 4
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:///none.db")
    assert run_job("report", run_report, ["table=5"]) == 4
    assert not list(tmp_path.glob("**/*.db"))


def test_help_and_keys(capsys):
    assert run_job("report", run_report, ["--help"]) == 0
    printed = capsys.readouterr().out
    assert "compare <run> <run>" in printed
    assert "paper" in printed
    config = configured("report", ["table=5"])
    assert config.table == 5
    assert from_values(ReportConfig, to_values(config)) == config


def test_a_store_that_fails_during_a_report_is_an_error(store, monkeypatch):
    def failing(*arguments, **options):
        raise OSError("no route")

    monkeypatch.setattr(MlflowClient, "search_runs", failing)
    with pytest.raises(StorageError, match="cannot be used: no route"):
        store.report(table=5)


def test_a_real_run_is_read(quick, tmp_path: Path):
    """The reports read what the driver logs."""
    given = [*quick, "runtime=local", "run_name=whole", "probe.enabled=true", "monitor.every_epochs=1"]
    finished = run_training(PRETRAIN, configured("pretrain", given))
    keys = {"output_dir": str(tmp_path / "runs"), "tracking": TrackingConfig()}
    for figure in (1, 4, 6):
        report = make_report(ReportConfig(figure=figure, **keys))
        assert "sec (1 seed)" in report.text
        assert report.rows
    assert len(json.loads(finished.folder.norms_path.read_text())) == 3
    text = make_report(ReportConfig(compare=("whole-probe", "whole"), **keys)).text
    assert f"{finished.metrics['probe/top1']:.4g}" in text
    assert "settings that differ:" in text
