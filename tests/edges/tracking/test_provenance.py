"""What a run keeps of its code."""

import json
import os
import subprocess
import sys

import pytest

from ssl_sec.edges.packaging import CODE_STATE
from ssl_sec.edges.tracking import provenance
from ssl_sec.edges.tracking.provenance import (
    CodeState,
    code_files,
    code_state,
    keep_code,
    process_tags,
    write_code_state,
)
from tests.edges.conftest import git


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    root = tmp_path / "checkout"
    (root / "ssl_sec").mkdir(parents=True)
    (root / "ssl_sec" / "a.py").write_text("margin = 1\n")
    git(root, "init", "-q")
    git(root, "add", "-A")
    git(root, "commit", "-qm", "first")
    monkeypatch.setattr(provenance, "checkout", lambda: root)
    return root


def test_a_clean_checkout_is_its_commit(checkout, tmp_path):
    state = code_state()
    assert (state.commit, state.is_dirty) == (git(checkout, "rev-parse", "HEAD").strip(), False)
    tags = keep_code(tmp_path)
    assert (tags["mlflow.source.git.commit"], tags["git.dirty"]) == (state.commit, "false")
    assert [path.name for path in code_files(tmp_path)] == ["packages.txt"]


def test_changed_and_new_code_is_kept_as_a_patch_without_secrets(checkout, tmp_path):
    (checkout / "ssl_sec" / "a.py").write_text("margin = 2\napi_key = 'geheim'\n")
    (checkout / "ssl_sec" / "new.py").write_text("uri = 'http://ada:geheim@host'\n")
    (checkout / "ssl_sec" / "notes.txt").write_text("geheim")
    tags = keep_code(tmp_path)
    assert (tags["mlflow.source.git.commit"], tags["git.dirty"]) == (git(checkout, "rev-parse", "HEAD").strip(), "true")
    diff = (tmp_path / "code.diff").read_text()
    assert "-margin = 1" in diff and "+margin = 2" in diff and "+uri = 'http://***@host'" in diff
    assert "geheim" not in diff
    git(checkout, "stash", "-uq")
    git(checkout, "apply", "--check", str(tmp_path / "code.diff"))


def test_a_patch_is_kept_in_any_locale(checkout, tmp_path):
    (checkout / "ssl_sec" / "a.py").write_text("margin = 'größer'\n", encoding="utf-8")
    code = (
        "import pathlib, sys; from ssl_sec.edges.tracking import provenance\n"
        "folder, root = map(pathlib.Path, sys.argv[1:])\n"
        "provenance.checkout = lambda: root; provenance.keep_code(folder)"
    )
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    subprocess.run([sys.executable, "-c", code, str(tmp_path), str(checkout)], env=environment, check=True)
    assert "+margin = 'größer'" in (tmp_path / "code.diff").read_text(encoding="utf-8")


def test_a_resume_with_other_code_keeps_both_patches(checkout, tmp_path):
    for margin in (2, 2, 3):
        (checkout / "ssl_sec" / "a.py").write_text(f"margin = {margin}\n")
        keep_code(tmp_path)
    assert sorted(path.name for path in tmp_path.glob("code*.diff")) == ["code-2.diff", "code.diff"]
    assert "+margin = 3" in (tmp_path / "code-2.diff").read_text()


def test_a_very_long_patch_is_cut_off(checkout, monkeypatch):
    monkeypatch.setattr(provenance, "_DIFF_LIMIT", 100)
    (checkout / "ssl_sec" / "a.py").write_text("margin = 2\n" * 100)
    assert len(code_state().diff) < 200 and "cut off here" in code_state().diff


def test_the_commit_of_an_enclosing_repository_is_ignored(checkout, monkeypatch):
    monkeypatch.setattr(provenance, "checkout", lambda: checkout / "ssl_sec")
    assert code_state() is None
    assert "mlflow.source.git.commit" not in process_tags(code_state())


def test_a_job_on_a_cluster_records_the_code_that_was_sent(checkout, tmp_path, monkeypatch):
    (checkout / "ssl_sec" / "a.py").write_text("margin = 2\n")
    sent = tmp_path / "sent"
    sent.mkdir()
    write_code_state(checkout, sent)
    expected = code_state()
    assert json.loads((sent / CODE_STATE).read_text())["commit"] == expected.commit
    monkeypatch.setattr(provenance, "checkout", lambda: sent)
    assert code_state() == expected and process_tags(code_state())["git.dirty"] == "true"


def test_a_run_in_an_image_has_the_commit_that_the_image_was_built_from(checkout, tmp_path, monkeypatch):
    commit = git(checkout, "rev-parse", "HEAD").strip()
    monkeypatch.setenv("SSL_SEC_COMMIT", commit)
    (checkout / "ssl_sec" / "a.py").write_text("margin = 2\n")
    assert code_state().is_dirty  # a checkout that is mounted in the image has its own
    monkeypatch.setattr(provenance, "checkout", lambda: None)
    assert code_state() == CodeState(commit=commit, diff="")
    monkeypatch.setenv("SSL_SEC_COMMIT", f"{commit}-dirty")
    tags = keep_code(tmp_path)
    assert (tags["mlflow.source.git.commit"], tags["git.dirty"]) == (commit, "true")
    for unknown in ("unknown", ""):
        monkeypatch.setenv("SSL_SEC_COMMIT", unknown)
        assert code_state() is None


def test_the_command_line_is_kept_without_secrets(checkout, monkeypatch):
    words = [
        "/usr/bin/python",
        "-m",
        "jobs.pretrain",
        "seeds=[0, 1]",
        "my.token=geheim",
        "tracking.uri=http://a:b@host",
    ]
    monkeypatch.setattr(sys, "orig_argv", words)
    command = process_tags(code_state())["command"]
    assert command == "python -m jobs.pretrain 'seeds=[0, 1]' 'my.token=***' 'tracking.uri=http://***@host'"


def test_the_packages_are_listed_with_their_versions(checkout, tmp_path):
    import torch

    keep_code(tmp_path)
    lines = (tmp_path / "packages.txt").read_text().splitlines()
    assert f"torch=={torch.__version__}".split("+")[0] in {line.split("+")[0] for line in lines}
    assert lines == sorted(lines, key=lambda line: line.partition("==")[0].lower())
