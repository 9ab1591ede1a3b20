"""Jobs that die, in their own processes, without slow imports."""

import fcntl
import os
import pty
import signal
import subprocess
import sys
import termios
from pathlib import Path

import pytest

SUPERVISED = """
import os, signal, sys, time
from ssl_sec.edges.run import supervision

supervision._CLOSE_WITHIN_S = 300.0  # on a busy machine, MLflow takes long to make its tables

def job():
    {job}

print(f"supervisor {{os.getpid()}}", flush=True)
sys.exit(supervision.supervised(job))
"""

# Prints that it is ready, and the signals that it gets, until a SIGTERM.
NAMING = """
    def record(number, frame):
        got.append(number)
        os.write(1, signal.Signals(number).name.encode() + b"\\n")
    got = []
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, record)
    print(f"ready {os.getpid()}", flush=True)
    while signal.SIGTERM not in got:
        time.sleep(0.01)
    return 7
"""


def started(job: str, **options) -> subprocess.Popen:
    code = SUPERVISED.format(job=job.strip())
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    # Even if the tests themselves run under nohup.
    signals = {"preexec_fn": lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL)}
    return subprocess.Popen([sys.executable, "-c", code], **{**pipes, **signals, **options})


def line(process: subprocess.Popen, word: str) -> int:
    """The number that follows the word."""
    return int(process.stdout.readline().removeprefix(f"{word} "))


def test_a_jobs_exit_code_and_output_pass_through():
    process = started("print('done'); return 3")
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out.splitlines()[1:], err) == (3, ["done"], "")


@pytest.mark.parametrize(
    ("number", "cause"),
    [
        (signal.SIGSEGV, "a crash in native code"),
        (signal.SIGKILL, "the machine or container may have run out of memory"),
    ],
)
def test_a_job_that_dies_by_a_signal_is_one_line_that_names_it(number, cause):
    process = started(f"os.kill(os.getpid(), {int(number)})")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    (message,) = err.splitlines()
    assert message.startswith("error: the job (process ")
    assert message.endswith(f"was killed by {number.name}, {cause}")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_while_libraries_end_changes_neither_output_nor_exit_code(number):
    wait = 'print("ending", flush=True); time.sleep(60)'
    process = started(f"import atexit; atexit.register(lambda: exec({wait!r})); return 3")
    line(process, "supervisor")
    assert process.stdout.readline() == "ending\n"
    process.send_signal(number)
    assert (process.communicate(timeout=30)[1], process.returncode) == ("", 3)


def test_signals_are_forwarded_and_the_job_decides_how_it_ends():
    process = started(NAMING)
    line(process, "supervisor")
    line(process, "ready")
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        os.kill(process.pid, number)
        assert process.stdout.readline() == f"{number.name}\n"
    _, err = process.communicate(timeout=60)
    assert (err, process.returncode) == ("", 7)


def test_a_ctrl_c_of_the_terminal_reaches_the_job_once():
    terminal, its_end = pty.openpty()

    def take_terminal() -> None:
        fcntl.ioctl(its_end, termios.TIOCSCTTY, 0)

    process = started(NAMING, stdin=its_end, start_new_session=True, preexec_fn=take_terminal)
    line(process, "supervisor")
    line(process, "ready")
    os.write(terminal, b"\x03")
    assert process.stdout.readline() == "SIGINT\n"
    os.kill(process.pid, signal.SIGTERM)
    out, _ = process.communicate(timeout=60)
    os.close(terminal)
    os.close(its_end)
    assert (out.split(), process.returncode) == (["SIGTERM"], 7)


def test_a_ctrl_c_of_the_terminal_reaches_a_job_in_a_group_of_its_own():
    terminal, its_end = pty.openpty()

    def take_terminal() -> None:
        fcntl.ioctl(its_end, termios.TIOCSCTTY, 0)

    process = started(f"os.setpgid(0, 0)\n{NAMING}", stdin=its_end, start_new_session=True, preexec_fn=take_terminal)
    line(process, "supervisor")
    line(process, "ready")
    os.write(terminal, b"\x03")
    assert process.stdout.readline() == "SIGINT\n"
    os.kill(process.pid, signal.SIGTERM)
    assert process.wait(60) == 7
    os.close(terminal)
    os.close(its_end)


LOCKING = """
    import json
    from ssl_sec.edges.run.supervision import register_lock
    with open("{lock}", "w") as file:
        json.dump({{"run_id": "it", "pid": {pid}, "uri": "sqlite:///{lock}.db", **{more!r}}}, file)
    from pathlib import Path
    register_lock(Path("{lock}"))
    {end}
"""


@pytest.mark.parametrize(
    ("pid", "more", "is_closed"),
    [
        pytest.param("os.getpid()", {}, True, marks=pytest.mark.slow),
        pytest.param("os.getpid()", {"status": "FINISHED"}, False, marks=pytest.mark.slow),
        ("1", {}, False),
    ],
)
def test_a_job_that_a_library_ends_is_one_line_and_its_run_is_closed(pid, more, is_closed, tmp_path: Path):
    process = started(LOCKING.format(lock=tmp_path / "lock", pid=pid, more=more, end="os._exit(1)"))
    _, err = process.communicate(timeout=300)
    assert process.returncode == 1
    assert ("ended with exit code 1 before it could end its run" in err) == is_closed
    assert (tmp_path / "lock").exists() != is_closed


@pytest.mark.slow
def test_the_run_of_a_job_that_dies_by_a_signal_is_closed(tmp_path: Path):
    end = "os.kill(os.getpid(), signal.SIGKILL)"
    process = started(LOCKING.format(lock=tmp_path / "lock", pid="os.getpid()", more={}, end=end))
    _, err = process.communicate(timeout=300)
    assert process.returncode == 128 + signal.SIGKILL
    assert "was killed by SIGKILL" in err and not (tmp_path / "lock").exists()


def test_a_job_ends_with_its_supervisor():
    process = started(NAMING)
    line(process, "supervisor")
    job = line(process, "ready")
    process.kill()
    process.wait()
    process.stdout.read()  # until nobody holds the pipe
    assert not Path(f"/proc/{job}/exe").exists()


def test_signals_ignored_by_nohup_stay_ignored():
    process = started(
        "print(signal.getsignal(signal.SIGHUP) is signal.SIG_IGN, flush=True); return 0",
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN),
    )
    out, _ = process.communicate(timeout=60)
    assert out.splitlines()[1:] == ["True"]
