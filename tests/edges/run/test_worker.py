import errno
from importlib.metadata import version

import pytest
import torch

from ssl_sec.edges.composition.compose import compose
from ssl_sec.edges.folder.folder import RunFolder
from ssl_sec.edges.run.worker import FolderRuntime, Worker, work
from ssl_sec.errors import ConfigError, Stopped, StorageError
from ssl_sec.recipes.registry import RECIPES
from ssl_sec.training.checkpoint import MANIFEST, score_of

CPU = torch.device("cpu")


@pytest.mark.parametrize(("device", "is_tried"), [("cuda", True), ("cpu", False)])
def test_cudnn_tries_its_algorithms_where_there_is_a_gpu(device, is_tried, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    with pytest.raises(ConfigError):  # before anything is computed
        work("pretrain", {"nosuch": 1}, RunFolder(tmp_path), Worker(rank=0, world_size=1, device=torch.device(device)))
    assert torch.backends.cudnn.benchmark == is_tried


@pytest.mark.skipif(torch.cuda.is_available(), reason="PyTorch finds a GPU here")
def test_a_device_that_cannot_be_used_ends_the_run_in_one_line(tmp_path):
    folder = RunFolder(tmp_path)
    with pytest.raises(ConfigError, match="^runtime.device: found a GPU that PyTorch .* cannot use"):
        work("pretrain", {}, folder, Worker(rank=0, world_size=1, device=torch.device("cuda", 0)))
    assert "runtime.device=cpu trains on the CPU" in str(folder.error())


@pytest.mark.parametrize(("began_with", "warnings"), [("0.1", 1), (version("torch"), 0)])
def test_a_worker_warns_if_the_run_began_with_other_versions(began_with, warnings, tmp_path, caplog):
    folder = RunFolder(tmp_path)
    folder.add_worker({"versions": {"torch": began_with}})
    with pytest.raises(ConfigError):
        work("pretrain", {"nosuch": 1}, folder, Worker(rank=0, world_size=1, device=CPU))
    found = f"versions have changed since the run began: torch was 0.1 and is {version('torch')}"
    assert sum(found in each.getMessage() for each in caplog.records) == warnings == len(caplog.records)


def test_results_that_cannot_be_written_end_the_run_for_all_workers(tmp_path, monkeypatch):
    def failing(*_):
        raise OSError(errno.ENOSPC, "No space left on device", "features.pt")

    folder = RunFolder(tmp_path)
    monkeypatch.setattr(RECIPES["pretrain"].__class__, "run", failing)
    values = compose("pretrain", ["experiment=digits", "runtime=local"])
    with pytest.raises(StorageError, match="features.pt cannot be written: No space left on device"):
        work("pretrain", values, folder, Worker(rank=0, world_size=1, device=CPU))
    assert str(folder.error()) == "features.pt cannot be written: No space left on device"


def test_a_checkpoint_has_the_score_of_its_own_state_and_none_of_one_before(tmp_path):
    folder = RunFolder(tmp_path)
    runtime = FolderRuntime(Worker(rank=0, world_size=1, device=CPU), folder, keep_last=3)
    runtime.report(0, {"val/recall_at_1": 80.0})  # of the network before the first step
    for step, score in enumerate([None, 72.0, None]):
        runtime.report(step, {"train/loss": 1.0})
        if score is not None:
            runtime.report(step, {"val/recall_at_1": score})
        runtime.save(step + 1, {"step": step + 1})
    runtime.close()
    manifests = [path / MANIFEST for path in sorted(folder.checkpoints_path.iterdir())]
    assert [score_of(manifest.read_bytes()) for manifest in manifests] == [None, 72.0, None]


def test_a_checkpoint_that_could_not_be_written_ends_the_training_before_the_next_one(tmp_path, monkeypatch):
    def failing(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    runtime = FolderRuntime(Worker(rank=0, world_size=1, device=CPU), RunFolder(tmp_path))
    runtime.request()
    monkeypatch.setattr(torch, "save", failing)
    runtime.save(1, {"step": 1})
    runtime._writer._thread.join()
    with pytest.raises(StorageError, match="^checkpoint of step 1: cannot be written"):
        runtime.request()


def ending(*_):
    """A recipe that ends at once."""


def stopping(*_):
    raise Stopped("stopped")


@pytest.mark.parametrize(("recipe", "outcome"), [(ending, "finished"), (stopping, "stopped")])
def test_worker_0_alone_writes_how_the_run_ended(recipe, outcome, tmp_path, monkeypatch):
    """The others may have ended while it still saves, and it may fail."""
    monkeypatch.setattr(RECIPES["pretrain"].__class__, "run", recipe)
    values = compose("pretrain", ["experiment=digits", "runtime=local"])
    folder = RunFolder(tmp_path)
    work("pretrain", values, folder, Worker(rank=1, world_size=2, device=CPU))
    assert folder.outcome() is None
    work("pretrain", values, folder, Worker(rank=0, world_size=2, device=CPU))
    assert folder.outcome() == outcome


def test_a_run_with_an_error_has_failed_whatever_its_first_worker_has_written(tmp_path):
    folder = RunFolder(tmp_path)
    folder.write_outcome("finished")
    assert folder.status == "FINISHED"
    folder.write_error(StorageError("the part of worker 1 cannot be uploaded"))
    assert folder.status == "FAILED"
