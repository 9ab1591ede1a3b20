"""The script for Slurm, with a fake Slurm."""

import os
import re
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ssl_sec.edges.folder.folder import RunFolder
from tests.cluster.test_manifests import CLUSTER, ROOT, with_tools
from tests.jobs import configured


def test_the_script_is_clean():
    result = subprocess.run(["shellcheck", str(CLUSTER / "slurm.sh")], capture_output=True, text=True, env=with_tools())
    assert result.returncode == 0, result.stdout


@pytest.mark.filterwarnings("ignore::DeprecationWarning:ray")  # Ray's command line imports Ray Serve
def test_ray_symmetric_run_has_the_options_of_the_script():
    from ray.scripts.scripts import start
    from ray.scripts.symmetric_run import symmetric_run

    text = (CLUSTER / "slurm.sh").read_text().replace("\\\n", " ")
    (command,) = re.findall(r"ray symmetric-run (.*?) -- bash", text)
    known = {option for each in (start, symmetric_run) for parameter in each.params for option in parameter.opts}
    used = set(re.findall(r"--[\w-]+", command))
    assert {"--address", "--min-nodes"} <= used <= known - {"--head", "--node-ip-address", "--port", "--block"}


def test_a_job_on_whole_machines_has_all_their_memory():
    options = re.findall(r"^#SBATCH (\S+)", (CLUSTER / "slurm.sh").read_text(), re.MULTILINE)
    assert {"--exclusive", "--mem=0"} <= set(options)


class Slurm:
    """A fake queue with one job on one node, whose run ends by a stop file or with the exit code OUTCOME.

    Args:
        folder: for everything.
        starts: whether Ray starts; `ray symmetric-run` ends with 0 where it does not.
        name: of the folder with the stop file.
        late_s: how late the run makes its folder.
    """

    def __init__(self, folder: Path, *, starts: bool = True, name: str = "slurm-7", late_s: float = 0) -> None:
        self.folder = folder
        self.run = RunFolder(folder / "runs" / "digits" / name)
        self.requeued = folder / "requeued"
        self.started = folder / "started"
        programs = {
            # `python -m ssl_sec pretrain` without a run; the script also makes a token with it.
            "python": (
                f'[ "$1" = -m ] || exec {sys.executable} "$@"\n'
                f'printf "%s\\n" "$@" >{self.started}; sleep {late_s}; mkdir -p {self.run.path}\n'
                f'[ -z "$OUTCOME" ] || exit "$OUTCOME"\n'
                f"for _ in $(seq 600); do [ ! -f {self.run.stop_path} ] || exit 130; sleep 0.1; done"
            ),
            "scontrol": f'if [ "$1" = show ]; then echo node1; echo node2; else echo "$2" >{self.requeued}; fi',
            "srun": 'while [ "$1" != -- ]; do shift; done; shift; ' + ('exec "$@"' if starts else "exit 0"),
        }
        (folder / "bin").mkdir()
        for program, script in programs.items():
            path = folder / "bin" / program
            path.write_text(f"#!/bin/sh\n{script}\n")
            path.chmod(0o755)

    def start(self, outcome: str = "", output_dir: str | None = None) -> subprocess.Popen:
        job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_JOB_NUM_NODES": "2"}
        environment = {
            **os.environ,
            **job,
            "PATH": f"{self.folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "OUTPUT_DIR": output_dir or str(self.folder / "runs"),
            "RAY_AUTH_TOKEN_PATH": str(self.folder / "ray" / "token"),
            "OUTCOME": outcome,
        }
        command = ["bash", str(CLUSTER / "slurm.sh"), "experiment=digits"]
        return subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)

    def command(self) -> list[str]:
        return self.started.read_text().splitlines()

    def end_by_the_time_limit(self) -> int:
        """Starts the job, and signals it as soon as its run has started; returns its exit code."""
        job = self.start()
        while not self.started.exists():
            assert job.poll() is None
            time.sleep(0.05)
        job.send_signal(signal.SIGUSR1)
        return job.wait(timeout=60)


def test_a_job_is_stopped_before_its_time_limit_requeued_and_resumed(tmp_path):
    slurm = Slurm(tmp_path)
    assert slurm.end_by_the_time_limit() == 130
    assert slurm.requeued.read_text() == "7\n"
    first = slurm.command()
    assert first[:4] == ["-m", "ssl_sec", "pretrain", "experiment=digits"]
    config = configured("pretrain", first[3:])
    assert config.resume == "auto"
    assert Path(config.output_dir) / config.recipe / str(config.run_name) == slurm.run.path

    slurm.requeued.unlink()
    assert slurm.start(outcome="0").wait(timeout=60) == 0
    assert slurm.command() == first
    assert not slurm.requeued.exists()


@pytest.mark.parametrize(("name", "late_s"), [("slurm-7-probe", 0), ("slurm-7", 3)])
def test_a_probe_and_a_starting_run_are_stopped_too(tmp_path, name, late_s):
    slurm = Slurm(tmp_path, name=name, late_s=late_s)
    assert slurm.end_by_the_time_limit() == 130
    assert slurm.requeued.exists()


def test_a_failed_job_is_not_requeued(tmp_path):
    slurm = Slurm(tmp_path)
    assert slurm.start(outcome="3").wait(timeout=60) == 3
    assert not slurm.requeued.exists()


def test_a_bucket_is_refused(tmp_path):
    slurm = Slurm(tmp_path)
    job = slurm.start(output_dir="s3://bucket/runs")
    line = "error: OUTPUT_DIR: found s3://bucket/runs, must be a folder that all nodes share\n"
    assert (job.communicate(timeout=60)[1], job.returncode) == (line, 2)
    assert not slurm.started.exists() and not (ROOT / "s3:").exists()


def test_a_job_fails_if_ray_does_not_start(tmp_path):
    assert Slurm(tmp_path, starts=False).start().wait(timeout=60) == 1


def test_the_first_job_makes_a_token_that_ray_takes(tmp_path):
    slurm = Slurm(tmp_path)
    assert slurm.start(outcome="0").wait(timeout=60) == 0
    token = tmp_path / "ray" / "token"
    assert re.fullmatch("[0-9a-f]{64}\n", token.read_text())
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
    environment = with_tools(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH=str(token))
    shown = subprocess.run(["ray", "get-auth-token"], env=environment, capture_output=True, text=True, check=True)
    assert token.read_text().strip() in shown.stdout
