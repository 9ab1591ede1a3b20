"""Copies of runs end with their process."""

import subprocess
import sys

import pytest

from ssl_sec.edges.storage.copies import new_copy
from ssl_sec.edges.storage.places import local_folder

PROCESS = """
import sys
from ssl_sec.edges.storage.copies import new_copy
print(new_copy(sys.argv[1]), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def started(monkeypatch, tmp_path):
    """Starts processes that each make a copy, and returns them with its folder."""
    monkeypatch.setenv("SSL_SEC_STAGING", str(tmp_path))
    processes: list[subprocess.Popen[str]] = []

    def start(output_dir: str):
        command = [sys.executable, "-c", PROCESS, output_dir]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        processes.append(process)
        return process, local_folder(output_dir, "copies") / process.stdout.readline().strip()

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def test_a_copy_is_removed_with_its_process(started):
    process, copy = started("s3://bucket/runs")
    assert copy.is_dir()
    process.communicate()
    assert process.returncode == 0
    assert not copy.exists()


def test_the_copies_of_killed_processes_are_removed_by_the_next_and_those_of_others_stay(started):
    _, active = started("s3://bucket/runs")
    killed = [started(url) for url in ("s3://bucket/runs", "s3://other/runs")]
    for process, copy in killed:
        (copy / "state.pt").write_bytes(b"large")
        process.kill()
        process.wait()
    own = new_copy("s3://bucket/runs")
    assert not any(copy.exists() for _, copy in killed)
    assert new_copy("s3://bucket/runs") != own
    assert active.is_dir() and own.is_dir()
