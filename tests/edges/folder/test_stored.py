"""The checkpoint that the workers of a run in object storage resume from."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ssl_sec.edges.folder.stored import StoredFolder
from ssl_sec.edges.storage.bucket import Bucket
from ssl_sec.edges.storage.places import local_folder, split_url
from ssl_sec.errors import StorageError
from ssl_sec.training.checkpoint import save_checkpoint
from tests.workers import on_workers

NEWEST = "step-000000020"


def resumed_step(url: str, staging: str, num_damaged: int) -> int | str:
    """The step that this worker resumes from, or its error; the first downloads of worker 1 are damaged."""
    rank, left = dist.get_rank(), [num_damaged]
    download = Bucket.download

    def damaging(self: Bucket, name: str, path: Path) -> None:
        download(self, name, path)
        if rank == 1 and name.startswith(NEWEST) and left[0] > 0:
            left[0] -= 1
            path.write_bytes(path.read_bytes()[:-10])

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSL_SEC_STAGING", f"{staging}/{rank}")
        patch.setattr(Bucket, "download", damaging)
        output_dir, recipe, name = split_url(url)
        folder = StoredFolder(local_folder(output_dir) / recipe / name, Bucket(url))
        try:
            return folder.restored_state(torch.device("cpu"))["step"]
        except StorageError as error:
            return str(error)


@pytest.fixture
def url(tmp_path: Path) -> str:
    """A run in object storage with two checkpoints."""
    checkpoints = tmp_path / "bucket" / "runs" / "digits" / "run" / "checkpoints"
    checkpoints.mkdir(parents=True)
    for step in (10, 20):
        save_checkpoint(checkpoints, step, {"step": step, "weights": torch.zeros(3)}, keep_last=2)
    return f"local://{checkpoints.parent}"


def test_a_damaged_download_is_repeated_so_that_all_workers_resume_from_one_step(url, tmp_path):
    assert on_workers(2, tmp_path, resumed_step, url, str(tmp_path / "staging"), 1) == [20, 20]


def test_a_checkpoint_that_one_worker_cannot_download_stops_all(url, tmp_path):
    first, second = on_workers(2, tmp_path, resumed_step, url, str(tmp_path / "staging"), 9)
    assert first == second
    assert first.startswith(f"checkpoint {NEWEST}: state.pt has ")
    assert first.endswith(" on worker 1, but whole on another one")


def test_a_checkpoint_that_is_damaged_in_the_storage_is_skipped_by_all(url, tmp_path):
    state = Path(url.removeprefix("local://")) / "checkpoints" / NEWEST / "state.pt"
    state.write_bytes(state.read_bytes()[:-10])
    assert on_workers(2, tmp_path, resumed_step, url, str(tmp_path / "staging"), 0) == [10, 10]
