"""The commands for a run can be copied to a shell, whatever its path is."""

import shlex
from pathlib import Path

import pytest

from ssl_sec.edges.folder.commands import command_line, replay_command, resume_command
from ssl_sec.edges.folder.folder import RunFolder
from ssl_sec.edges.overrides import parsed


@pytest.mark.parametrize("value", ["runs/digits/it", "my runs/it's $HOME", "a=b, [c] ~d", "", "1e5", "s3://bucket/é"])
def test_a_command_has_one_override_with_any_value(value):
    *start, override = shlex.split(command_line("probe", "run", value))
    assert start == ["python", "-m", "jobs.probe"]
    found = parsed(override)
    assert (found.key_or_group, found.value()) == ("run", value)


def test_a_run_below_the_working_folder_is_resumed_by_its_relative_path(tmp_path: Path, monkeypatch):
    folder = RunFolder(tmp_path / "runs" / "digits" / "it")
    assert replay_command(folder) == f"python -m jobs.replay folder={folder.path}"
    monkeypatch.chdir(tmp_path)
    assert resume_command("pretrain", folder) == "python -m jobs.pretrain resume=runs/digits/it"
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert resume_command("pretrain", folder) == f"python -m jobs.pretrain resume={folder.path}"
