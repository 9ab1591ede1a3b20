"""Jobs about a run that was stopped: they say so, and what goes on from there."""

import re
import shlex

import pytest

from ssl_sec.edges.command_line import run_job
from ssl_sec.edges.folder.folder import RunFolder
from ssl_sec.edges.run import worker
from ssl_sec.errors import ConfigError, Stopped
from ssl_sec.training.step import Request
from tests.edges.conftest import QUICK
from tests.jobs import embed, export, finetune, pretrain, probe, transfer


@pytest.fixture(scope="module")
def stopped(tmp_path_factory) -> RunFolder:
    """A run that was stopped after one of two epochs."""
    runs = tmp_path_factory.mktemp("stopped") / "runs"
    folder = RunFolder(runs / "digits" / "it")
    given = [*QUICK, "runtime=local", "run_name=it", "probe.enabled=false", f"output_dir={runs}"]
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Stopped):
        patch.setattr(worker.FolderRuntime, "request", lambda self: Request.STOP)
        pretrain([*given, "checkpoint.every_epochs=1", "log_every_steps=1"])
    return folder


@pytest.mark.parametrize(
    ("job", "run", "more", "key"),
    [
        ("export", export, ["format=safetensors"], "checkpoint"),
        ("probe", probe, [], "checkpoint"),
        ("transfer", transfer, ["sets=[digits]"], "checkpoint"),
        ("embed", embed, ["output=x"], "checkpoint"),
        ("finetune", finetune, [], "run_checkpoint"),
    ],
)
def test_a_stopped_run_is_refused_as_typed_with_what_goes_on(job, run, more, key, stopped, capsys, monkeypatch):
    monkeypatch.chdir(stopped.path.parent)
    assert run_job(job, run, ["run=./it", *more, *([] if job == "export" else ["runtime=local"])]) == 2
    step = stopped.newest_step()
    assert capsys.readouterr().err.strip().splitlines()[-1] == (
        f"error: run: found './it', which was stopped; allowed: a finished run, or {key}=<steps> with one that it has "
        f"kept: {step}; finish it with: python -m jobs.pretrain resume={stopped.path}"
    )


@pytest.mark.parametrize("by", ["name", "id"])
def test_the_checkpoints_of_a_stopped_run_are_found_by_its_name_or_id(by, stopped, tmp_path):
    word, step = {"name": "it", "id": stopped.run_id}[by], stopped.newest_step()
    given = [f"run={word}", f"output_dir={stopped.path.parents[1]}"]
    message = (
        f"run: found {word!r}, which was stopped; allowed: a finished run, or checkpoint=<steps> with one that it has "
        f"kept: {step}; finish it with: python -m jobs.pretrain resume={stopped.path}"
    )
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        export([*given, "format=safetensors"])
    export([*given, "format=safetensors", f"checkpoint={step}", f"output={tmp_path / 'early'}"])
    assert (tmp_path / "early" / "encoder.safetensors").is_file()
    quick = ["runtime=local", "probe.epochs=1", "tracking.system_metrics=false"]
    assert "probe top-1" in probe([*given, *quick, f"checkpoint={step}", f"run_name=probed-by-{by}"])


@pytest.mark.parametrize("checkpoint", ["last", "1"])
def test_a_stopped_run_whose_folder_is_elsewhere_says_where_its_checkpoints_are(checkpoint, stopped):
    given = ["run=it", "format=safetensors", f"output_dir={stopped.path.parents[1]}", f"checkpoint={checkpoint}"]
    away = stopped.path.rename(stopped.path.with_name("away"))
    message = (
        f"run: found 'it', which was stopped and keeps its checkpoints only in its folder, {stopped.path}; allowed: a "
        "finished run, or run=<that folder> checkpoint=<steps> on a machine that can read it; finish it with: "
        f"python -m jobs.pretrain resume={stopped.path}"
    )
    try:
        with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
            export(given)
    finally:
        away.rename(stopped.path)


def test_a_killed_run_has_not_finished(stopped):
    outcome = stopped.path / "outcome"
    before = outcome.read_text()
    outcome.unlink()
    try:
        with pytest.raises(ConfigError) as refused:
            export([f"run={stopped.path}", "format=safetensors"])
        step = stopped.newest_step()
        assert str(refused.value) == (  # another process may train it
            f"run: found '{stopped.path}', which has not finished; allowed: a finished run, or checkpoint=<steps> with "
            f"one that it has kept: {step}; unless a process still trains it, finish it with: python -m jobs.pretrain "
            f"resume={stopped.path}"
        )
    finally:
        outcome.write_text(before)


def test_both_ways_to_go_on_work(stopped, tmp_path):
    given = [f"run={stopped.path}", "format=safetensors"]
    export([*given, f"checkpoint={stopped.newest_step()}", f"output={tmp_path / 'early'}"])
    with pytest.raises(ConfigError) as refused:
        export(given)
    command = shlex.split(str(refused.value).partition("finish it with: ")[2])
    assert command == ["python", "-m", "jobs.pretrain", f"resume={stopped.path}"]
    pretrain(command[3:])
    export([*given, f"output={tmp_path / 'last'}"])
    assert all((tmp_path / name / "encoder.safetensors").is_file() for name in ("early", "last"))
