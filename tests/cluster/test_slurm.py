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

from tests.cluster.test_manifests import CLUSTER, with_tools
from tests.jobs import configured


def test_the_script_is_clean():
    result = subprocess.run(["shellcheck", str(CLUSTER / "slurm.sh")], capture_output=True, text=True, env=with_tools())
    assert result.returncode == 0, result.stdout


@pytest.mark.filterwarnings("ignore::DeprecationWarning:ray")  # Ray's command line imports Ray Serve
def test_ray_start_has_the_options_of_the_script():
    from ray.scripts.scripts import start

    text = (CLUSTER / "slurm.sh").read_text()
    (script,) = re.findall(r"^start_ray='(.*?)'$", text, re.MULTILINE | re.DOTALL)
    used = set(re.findall(r"--[\w-]+", script))
    assert {"--head", "--address"} <= used <= {option for parameter in start.params for option in parameter.opts}


def test_a_job_on_whole_machines_has_all_their_memory():
    options = re.findall(r"^#SBATCH (\S+)", (CLUSTER / "slurm.sh").read_text(), re.MULTILINE)
    assert {"--exclusive", "--mem=0"} <= set(options)


class Slurm:
    """A fake queue with one job, whose run waits for a signal, or ends with the exit code OUTCOME.

    Args:
        folder: for everything.
        ray: what Ray does on a node; it has joined when it has written how it was started.
    """

    def __init__(self, folder: Path, ray: str = 'echo "$@" >ray-started; exec sleep 60') -> None:
        self.folder = folder
        self.requeued = folder / "requeued"
        self.waiting = folder / "waiting"
        self.started = folder / "started"
        programs = {
            # The wait for Ray, `python -m ssl_sec pretrain` without a run, and what makes a token.
            "python": (
                f'case "$1 $2" in *ray.init*) touch {self.waiting}\n'
                "while [ ! -e ray-started ]; do sleep 0.1; done; exit 0;;\n"
                f'-c*) exec {sys.executable} "$@";; esac\n'
                "trap 'exit 130' TERM\n"
                f'printf "%s\\n" "$RAY_ADDRESS" "$@" >{self.started}\n'
                '[ -z "$OUTCOME" ] || exit "$OUTCOME"\n'
                "for _ in $(seq 600); do sleep 0.1; done"
            ),
            "scontrol": f'if [ "$1" = show ]; then echo node1; echo node2; else echo "$2" >{self.requeued}; fi',
            "srun": 'while [ "$1" != bash ]; do shift; done; exec "$@"',
            "scancel": f"echo $@ >{folder / 'cancelled'}",
            "ray": ray,
        }
        (folder / "bin").mkdir()
        for program, script in programs.items():
            path = folder / "bin" / program
            path.write_text(f"#!/bin/sh\n{script}\n")
            path.chmod(0o755)

    def start(self, *overrides: str, outcome: str = "", **variables: str) -> subprocess.Popen:
        job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "ssl-sec", "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_NODEID": "0"}
        job["SLURM_STEP_ID"] = "0"
        environment = {
            **os.environ,
            **job,
            "SLURM_JOB_NUM_NODES": "2",
            "PATH": f"{self.folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "OUTPUT_DIR": str(self.folder / "runs"),
            "RAY_AUTH_TOKEN_PATH": str(self.folder / "ray" / "token"),
            "OUTCOME": outcome,
            "SECONDS": "60",  # since the job's start, for bash
            **variables,
        }
        command = ["bash", str(CLUSTER / "slurm.sh"), "experiment=digits", "tracking.experiment=two words", *overrides]
        return subprocess.Popen(command, cwd=self.folder, env=environment, stderr=subprocess.PIPE, text=True)

    def command(self) -> list[str]:
        address, *command = self.started.read_text().splitlines()
        assert address == "node1:6379"
        return command

    def end_by_the_time_limit(self, after: Path, **variables: str) -> tuple[int, str]:
        """Starts the job, and signals it as soon as a file exists; returns its exit code and errors."""
        job = self.start(**variables)
        while not after.exists():
            assert job.poll() is None
            time.sleep(0.05)
        job.send_signal(signal.SIGUSR1)
        errors = job.communicate(timeout=60)[1]
        return job.returncode, errors


def test_a_job_is_stopped_before_its_time_limit_requeued_and_resumed(tmp_path):
    slurm = Slurm(tmp_path)
    assert slurm.end_by_the_time_limit(slurm.started)[0] == 130
    assert slurm.requeued.read_text() == "7\n"
    first = slurm.command()
    assert first[:3] == ["-m", "ssl_sec", "pretrain"]
    config = configured("pretrain", first[3:])
    assert config.recipe == "digits" and config.tracking.experiment == "two words"
    assert (config.resume, config.output_dir, config.run_name) == ("auto", str(tmp_path / "runs"), "slurm-7")
    assert (tmp_path / "ray-started").read_text().startswith("start --head --port 6379 ")

    slurm.requeued.unlink()
    assert slurm.start(outcome="0").wait(timeout=60) == 0
    assert slurm.command() == first
    assert not slurm.requeued.exists()


@pytest.mark.slow
def test_a_job_is_requeued_if_its_nodes_are_still_starting(tmp_path):
    slurm = Slurm(tmp_path, ray="exec sleep 60")
    assert slurm.end_by_the_time_limit(slurm.waiting)[0] != 0
    assert slurm.requeued.exists() and not slurm.started.exists()


@pytest.mark.slow
def test_a_time_limit_shorter_than_the_time_to_save_is_not_requeued_forever(tmp_path):
    slurm = Slurm(tmp_path)
    code, errors = slurm.end_by_the_time_limit(slurm.started, SECONDS="0")
    assert code == 2 and errors.startswith("error: --time: must be longer")
    assert not slurm.requeued.exists()


def test_a_failed_job_is_not_requeued(tmp_path):
    slurm = Slurm(tmp_path)
    assert slurm.start(outcome="3").wait(timeout=60) == 3
    assert not slurm.requeued.exists()


def test_a_job_may_continue_the_run_of_another(tmp_path):
    slurm = Slurm(tmp_path)
    assert slurm.start("run_name=slurm-3", outcome="0").wait(timeout=60) == 0
    config = configured("pretrain", slurm.command()[3:])
    assert (config.run_name, config.resume) == ("slurm-3", "auto")


def test_runs_may_be_in_a_bucket(tmp_path):
    slurm = Slurm(tmp_path)
    assert slurm.start(outcome="0", OUTPUT_DIR="s3://bucket/runs").wait(timeout=60) == 0
    assert configured("pretrain", slurm.command()[3:]).output_dir == "s3://bucket/runs"
    assert not (tmp_path / "s3:").exists()


def test_the_run_waits_for_all_nodes(tmp_path):
    (script,) = re.findall(r"^wait_for_nodes='(.*?)'$", (CLUSTER / "slurm.sh").read_text(), re.MULTILINE | re.DOTALL)
    (tmp_path / "ray.py").write_text(
        "tries = []\n"
        "def init(*_, **__):\n"
        "    tries.append(0)\n"
        "    if len(tries) == 1: raise ConnectionError\n"
        "def nodes():\n"
        "    print(len(tries))\n"
        "    return [{'Alive': True}, {'Alive': len(tries) > 2}]\n"
    )
    command = [sys.executable, "-c", script, "node1:6379", "2"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60)
    assert result.stdout == "2\n3\n"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"TMPDIR": "/scratch/7"}, ""),
        ({"TMPDIR": f"/scratch/{'7' * 40}"}, "/tmp"),
        ({"TMPDIR": f"/scratch/{'7' * 40}", "RAY_TMPDIR": "/scratch"}, "/scratch"),
    ],
)
def test_the_paths_of_rays_sockets_are_short(tmp_path, given, expected):
    slurm = Slurm(tmp_path, ray='echo "$RAY_TMPDIR" >ray-started.tmp; mv ray-started.tmp ray-started; exec sleep 60')
    assert slurm.start(outcome="0", **{"RAY_TMPDIR": "", **given}).wait(timeout=60) == 0
    assert (tmp_path / "ray-started").read_text() == f"{expected}\n"


def test_a_job_fails_if_ray_does_not_start(tmp_path):
    job = Slurm(tmp_path, ray="exit 1").start()
    line = "error: Ray did not start on 2 nodes, see ssl-sec-7-ray.out\n"
    assert (job.communicate(timeout=60)[1], job.returncode) == (line, 1)
    assert (tmp_path / "cancelled").read_text() == "7.0\n"


@pytest.mark.slow
def test_the_first_job_makes_a_token_that_ray_takes(tmp_path):
    slurm = Slurm(tmp_path)
    assert slurm.start(outcome="0").wait(timeout=60) == 0
    token = tmp_path / "ray" / "token"
    assert re.fullmatch("[0-9a-f]{64}\n", token.read_text())
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
    environment = with_tools(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH=str(token))
    shown = subprocess.run(["ray", "get-auth-token"], env=environment, capture_output=True, text=True, check=True)
    assert token.read_text().strip() in shown.stdout
