"""A process with torch imported in advance that reads exports back, which the check of an export does in a new one.

Each command runs in a fork of it, which knows neither this package nor the tests. `tests/exporting/test_exporting.py`
has checks in processes of their own.
"""

import pickle
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_PROGRAM = """
import os, pickle, sys, tempfile, traceback
import numpy, safetensors.torch, timm, torch, torchvision
requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
while True:
    try:
        arguments, folder, environment = pickle.load(requests)
    except EOFError:
        break
    with tempfile.TemporaryFile() as output:
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                os.dup2(output.fileno(), 1), os.dup2(output.fileno(), 2)
                os.environ.update(environment)
                os.chdir(folder)
                sys.argv = ["-c", *arguments[1:]]
                exec(compile(arguments[0], "<string>", "exec"), {"__name__": "__main__"})
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush(), sys.stderr.flush()
                os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        output.seek(0)
        pickle.dump((code, output.read().decode()), answers)
        answers.flush()
"""


class WarmReader:
    """Stands for the module `subprocess` where an export is checked; the process starts at the first command."""

    TimeoutExpired = subprocess.TimeoutExpired

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def run(
        self, command: Sequence[str], *, cwd: Path, env: dict[str, str], **options: Any
    ) -> subprocess.CompletedProcess[str]:
        """Runs `python -P -c <script> <arguments>`."""
        assert list(command[:3]) == [sys.executable, "-P", "-c"]
        if self._process is None:
            program = [sys.executable, "-P", "-W", "ignore", "-c", _PROGRAM]
            environment = {**env, "OMP_NUM_THREADS": "1"}
            self._process = subprocess.Popen(
                program, cwd="/", env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
        assert self._process.stdin is not None and self._process.stdout is not None
        pickle.dump((list(command[3:]), str(cwd), env), self._process.stdin)
        self._process.stdin.flush()
        code, output = pickle.load(self._process.stdout)
        return subprocess.CompletedProcess(command, code, stdout=output, stderr=output)

    def close(self) -> None:
        """Ends the process."""
        if self._process is not None:
            self._process.communicate()
