"""The whole objective as one graph: no synchronisation, no shape that depends on values, no break."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.losses.cases import ALL_LOSSES


# Not inductor, which needs a C++ compiler: "eager" captures, "aot_eager" differentiates.
@pytest.fixture(scope="module", params=["eager", pytest.param("aot_eager", marks=pytest.mark.slow)])
def compared(request):
    program = [sys.executable, "-W", "ignore", "-m", "tests.training.compiled_objective", "cpu", request.param]
    done = subprocess.run(program, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    "name", [*(case.name for case in ALL_LOSSES), "rotate", "translate", "ftl", "picked centres", "ntxent in tiles"]
)
def test_the_objective_is_one_graph_for_every_loss_and_transform(compared, name):
    """Values, gradients, the running radius and the centres are the eager ones over some steps."""
    assert compared[name]["apart"] < 1e-10
    # One graph for the first step, one for any other.
    assert compared[name]["graphs"] == 2
