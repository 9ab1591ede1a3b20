import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import kornia
import pytest
import torch
import yaml

from ssl_sec import load_encoder
from ssl_sec.data.standard_sets import open_digits
from ssl_sec.edges.folder.folder import RunFolder
from ssl_sec.edges.run.supervision import dumped_signal
from ssl_sec.errors import ConfigError, DataError, StorageError
from ssl_sec.training.checkpoint import save_checkpoint

VALUES = {"epochs": 3, "data": {"name": "digits"}, "runtime": {"name": "local"}}
CPU = torch.device("cpu")
FULL = Path("/dev/full")


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "recipe" / "run")
    folder.start(VALUES)
    return folder


def test_a_folder_with_a_run_is_refused(folder: RunFolder):
    with pytest.raises(ConfigError, match="already holds a run; allowed: another run_name, or resume=.*/run"):
        folder.start(VALUES)


def test_a_folder_with_a_probe_is_refused_without_the_hint_to_resume_it(tmp_path: Path):
    (tmp_path / "config.yaml").write_text("{}")
    probe = RunFolder(tmp_path / "probe")
    probe.start(VALUES, {probe.probed_config_path: tmp_path / "config.yaml"})
    with pytest.raises(ConfigError, match="already holds a run; allowed: another run_name$"):
        probe.start(VALUES)


def test_a_folder_holds_no_run_until_all_its_files_are_copied(tmp_path: Path):
    folder = RunFolder(tmp_path / "run")
    with pytest.raises(StorageError, match="output_dir: .*/run cannot be written: No such file"):
        folder.start(VALUES, {folder.initial_path: tmp_path / "missing"})
    assert not folder.holds_run


def test_a_folder_of_something_else_is_refused_and_stays(tmp_path: Path):
    (tmp_path / "run" / "cats").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"^run_name: .*/run holds cats, but no run; allowed: the name of a"):
        RunFolder(tmp_path / "run").start(VALUES)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["cats"]


def test_a_start_that_was_killed_is_begun_again(folder: RunFolder):
    folder.config_path.unlink()  # the last file of a start
    folder.initial_path.touch()
    (folder.path / ".config.yaml.tmp").touch()
    folder.start(VALUES, {folder.initial_path: FULL.parent / "null"})
    assert folder.holds_run


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="output_dir: .* cannot be written"):
        RunFolder(tmp_path / "file" / "run").start(VALUES)


def test_a_run_is_complete_once_the_driver_has_closed_it_until_it_is_resumed(folder: RunFolder):
    folder.write_outcome("finished")
    assert not folder.is_complete  # the driver may have died before it sent all
    folder.close()
    assert folder.is_complete
    folder.resume({**VALUES, "epochs": 4})
    assert not folder.is_complete
    assert yaml.safe_load(folder.config_path.read_text())["epochs"] == 4


def test_an_unstarted_run_leaves_nothing(folder: RunFolder):
    folder.discard_unstarted()
    assert not folder.path.parent.exists()


def test_a_run_with_a_checkpoint_is_never_discarded(folder: RunFolder):
    save_checkpoint(folder.checkpoints_path, 5, {"step": 5}, keep_last=1)
    folder.discard_unstarted()
    assert folder.restored_state(CPU) == {"step": 5}


@pytest.mark.parametrize(
    "leave",
    [
        lambda folder: folder.append_record({"step": 0, "metrics": {"train/loss": 1.0}}),
        lambda folder: folder.log_message("ERROR", "worker 1: its process died"),
        lambda folder: folder.encoder_path.write_bytes(b"weights"),
    ],
    ids=["record", "error", "encoder"],
)
def test_a_run_with_a_record_an_error_or_an_encoder_is_never_discarded(folder: RunFolder, leave):
    leave(folder)
    folder.discard_unstarted()
    assert folder.config_path.exists()


def test_a_probe_that_only_has_a_copy_of_the_encoder_leaves_nothing(folder: RunFolder):
    folder.encoder_path.write_bytes(b"weights of another run")
    folder.probed_config_path.write_text("{}")
    folder.discard_unstarted()
    assert not folder.path.exists()


def test_a_failure_keeps_its_traceback_and_a_truncated_line_is_ignored(folder: RunFolder):
    assert folder.failures() == []
    try:
        raise RuntimeError("lost\nthe others")
    except RuntimeError as error:
        folder.log_failure(3, error)
    with folder.failures_path.open("a") as file:
        file.write('{"rank": 4')
    (failure,) = folder.failures()
    assert (failure["rank"], failure["error"]) == (3, "lost")
    assert 'raise RuntimeError("lost' in failure["traceback"]


def test_a_folder_without_the_drivers_mark_is_not_the_runs(folder: RunFolder, tmp_path: Path, monkeypatch):
    monkeypatch.setattr("ssl_sec.edges.folder.folder._VISIBLE_WITHIN_S", 0.0)
    word = folder.write_launch_token()
    folder.require_launch_token(word)
    with pytest.raises(StorageError, match="is not the folder that the driver writes to; allowed: a folder on storage"):
        RunFolder(tmp_path / "elsewhere").require_launch_token(word)
    folder.write_launch_token()
    with pytest.raises(StorageError):
        folder.require_launch_token(word)


def test_the_newest_step_is_that_of_the_newest_checkpoint_whole_or_not(folder: RunFolder):
    assert folder.newest_step() is None
    for step in (5, 10):
        (folder.checkpoints_path / f"step-{step:09d}").mkdir(parents=True)
    assert folder.newest_step() == 10


def test_a_damaged_checkpoint_is_skipped_and_named(folder: RunFolder, caplog):
    for step in (5, 10):
        save_checkpoint(folder.checkpoints_path, step, {"step": step}, keep_last=2)
    (folder.checkpoints_path / "step-000000010" / "state.pt").unlink()
    folder.resume(VALUES)
    assert folder.restored_state(CPU) == {"step": 5}
    assert caplog.messages == ["skipped an incomplete checkpoint: step-000000010: state.pt is missing"]


def test_damage_to_all_checkpoints_is_an_error_and_no_new_start(folder: RunFolder):
    assert folder.restored_state(CPU) is None
    (folder.checkpoints_path / "step-000000005").mkdir(parents=True)
    with pytest.raises(StorageError, match="no whole checkpoint .* step-000000005: no manifest"):
        folder.restored_state(CPU)


def test_records_are_kept_up_to_the_resumed_step(folder: RunFolder):
    for step in range(4):
        folder.append_record({"step": step, "metrics": {"a": float(step)}})
    folder.log_message("INFO", "hello")
    folder.forget_records_from(2)
    assert [record["step"] for record in folder.records()] == [0, 1]
    assert '"message": "INFO: hello"' in folder.metrics_path.read_text()
    with folder.metrics_path.open("a") as file:
        file.write('{"step": 2, "metr')
    assert [record["step"] for record in folder.records()] == [0, 1]


def test_a_run_with_only_status_messages_leaves_its_name_free(folder: RunFolder):
    folder.log_message("INFO", "worker 0: loading digits")
    assert [message for _, message in folder.messages()] == ["INFO: worker 0: loading digits"]
    folder.discard_unstarted()
    assert not folder.path.exists()


def test_an_error_keeps_its_message_and_exit_code(folder: RunFolder):
    assert folder.error() is None
    folder.write_error(DataError("x.png: not an image"))
    error = folder.error()
    assert (str(error), error.exit_code) == ("x.png: not an image", 3)
    assert json.loads((folder.path / "error.json").read_text())["exit_code"] == 3


LEFT = {
    "torn": b'{"step": 1, "metr',
    "empty": b"",
    "binary": bytes(range(256)),
    "not ours": b'[1]\n7\nnull\n{"a": 1}\n',
}


@pytest.mark.parametrize("left", LEFT)
def test_damaged_records_are_dropped_and_the_rest_kept(folder: RunFolder, left):
    folder.append_record({"step": 0, "metrics": {"a": 1.0}})
    with folder.metrics_path.open("ab") as file:
        file.write(LEFT[left])
    assert [record["step"] for record in folder.records()] == [0]
    folder.resume(VALUES)
    folder.forget_records_from(1)
    folder.append_record({"step": 1, "metrics": {"a": 2.0}})
    assert [record["metrics"]["a"] for record in folder.records()] == [1.0, 2.0]
    for line in folder.metrics_path.read_text().splitlines():
        json.loads(line)


def test_a_missing_metrics_file_has_no_records(folder: RunFolder):
    folder.forget_records_from(3)
    assert folder.records() == []


@pytest.mark.parametrize("left", LEFT)
def test_a_resume_ignores_damaged_outcome_and_error_files(folder: RunFolder, left):
    for name in ("outcome", "error.json"):
        (folder.path / name).write_bytes(LEFT[left])
    assert folder.outcome() is None
    assert isinstance(folder.error(), StorageError)
    assert "error.json cannot be read" in str(folder.error())
    folder.resume(VALUES)
    assert (folder.outcome(), folder.error()) == (None, None)


def test_a_folder_that_was_removed_is_named(folder: RunFolder):
    shutil.rmtree(folder.path)
    with pytest.raises(StorageError, match="output_dir: .*/recipe/run was removed during the run"):
        folder.append_record({"step": 0, "metrics": {}})
    assert not folder.path.exists()


def test_versions_that_have_changed_since_the_run_began_are_named(folder: RunFolder):
    folder.path.mkdir(parents=True, exist_ok=True)
    assert folder.changed_versions() == []
    folder.add_worker({"rank": 0})  # of a version that did not note them
    folder.log_worker(0, 1, "node")
    assert folder.changed_versions() == []
    first, *_ = [each for each in folder.workers() if "versions" in each]
    folder.workers_path.unlink()
    folder.add_worker({**first, "versions": {**first["versions"], "kornia": "0.1", "gone": "1"}})
    folder.log_worker(0, 1, "node")
    assert folder.changed_versions() == [f"kornia was 0.1 and is {kornia.__version__}"]


@pytest.mark.skipif(not FULL.exists(), reason="only Linux has a device that is always full")
def test_a_full_disk_is_one_line_and_log_records_are_dropped(folder: RunFolder):
    for path in (folder.metrics_path, folder.workers_path, folder.failures_path):
        path.symlink_to(FULL)
    folder.log_worker(0, 1, "node")
    folder.log_failure(0, RuntimeError("lost"))
    folder.log_message("INFO", "hello")
    with pytest.raises(StorageError, match="output_dir: .*/recipe/run cannot be written: No space left on device"):
        folder.append_record({"step": 0, "metrics": {}})


def test_an_outcome_that_cannot_be_written_is_one_line(folder: RunFolder):
    for name in ("outcome", "error.json"):
        (folder.path / name).mkdir()
    with pytest.raises(StorageError, match="output_dir: .*/recipe/run cannot be written: "):
        folder.write_outcome("finished")
    with pytest.raises(StorageError, match="output_dir: .*/recipe/run cannot be written: "):
        folder.write_error(DataError("x.png: not an image"))


@pytest.mark.parametrize("name", ["SIGSEGV", "SIGABRT", "SIGBUS", "SIGILL", "SIGFPE"])
def test_the_signal_of_a_crash_is_read_from_faulthandlers_output(folder: RunFolder, name):
    number = signal.Signals[name]
    report = f"import faulthandler, os; faulthandler.enable(open({str(folder.crash_path(1))!r}, 'w'))"
    code = f"{report}; os.kill(os.getpid(), {int(number)})"
    assert subprocess.run([sys.executable, "-S", "-c", code]).returncode == -number
    assert dumped_signal(folder.crash_path(1)) is number
    assert dumped_signal(folder.crash_path(0)) is None


@pytest.mark.parametrize("name", ["data.json", "check.json"])
def test_a_damaged_description_of_the_data_is_one_line(name, folder: RunFolder):
    folder.describe_data(open_digits("test"))
    assert folder.data().image_shape == (1, 8, 8)
    (folder.path / name).write_text('{"na')
    with pytest.raises(StorageError, match=r"/run/data.json or check.json cannot be read: Unterminated string"):
        folder.data()


@pytest.mark.parametrize("content", ["[1]", "null", '{"digits/test": 3}', "{"])
def test_a_damaged_description_of_the_test_images_is_one_line(content, folder: RunFolder):
    folder.test_data_path.write_text(content)
    with pytest.raises(StorageError, match=r"/run/test_data.json cannot be read: "):
        folder.test_data()


def test_the_folder_of_a_probe_or_with_a_damaged_configuration_has_no_encoder_to_load(folder: RunFolder):
    folder.encoder_path.write_bytes(b"weights of another run")
    with pytest.raises(ConfigError, match="/run, which holds no trained encoder; allowed: the folder of a run"):
        load_encoder(folder.path)
    folder.config_path.write_text("encoder: [")
    with pytest.raises(StorageError, match=r"config.yaml cannot be read: not YAML in line 1"):
        load_encoder(folder.path)


def test_a_mounted_bucket_takes_a_folder_with_copied_files(tmp_path, mounted_bucket):
    (tmp_path / "weights").write_text("trained")
    folder = RunFolder(tmp_path / "recipe" / "run")
    folder.start({"epochs": 3}, {folder.encoder_path: tmp_path / "weights"})
    assert folder.holds_run and folder.encoder_path.read_text() == "trained"


def test_copied_files_are_readable_as_other_new_ones(tmp_path):
    (tmp_path / "weights").touch(mode=0o600)
    folder = RunFolder(tmp_path / "recipe" / "run")
    folder.start({"epochs": 3}, {folder.encoder_path: tmp_path / "weights"})
    assert folder.encoder_path.stat().st_mode == folder.config_path.stat().st_mode
