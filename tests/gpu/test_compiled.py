"""Compiled networks and objectives equal the eager ones on a GPU; on the CPU only the capture is rehearsed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu.conftest import needs_gpu

# How far what is compiled may be from float64, where the eager network is not half as far. Gradients differ more: an
# activation near 0 that rounding moves to the other side of ReLU changes them by its whole share.
BOUNDS = {"embeddings": 1e-4, "gradients": 1e-2, "statistics": 1e-5}
# One of pairs in tiles, with the ramp of faces, one that sorts, one with centres that move, a transform, Partial FC.
OBJECTIVES = ("ntxent", "face ramp", "triplet", "center", "rotate", "sampled classes")


def printed(program, device, *arguments):
    """What a program prints of a device; inductor needs a compiler of the machine, which a CPU may lack."""
    backend = "inductor" if device.type == "cuda" else "aot_eager"
    command = [sys.executable, "-W", "ignore", "-m", program, device.type, backend, *arguments]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=240)
    errors = [line.strip() for line in done.stderr.splitlines() if "Error" in line]
    assert done.returncode == 0, "\n".join([*errors[-1:], done.stderr])  # a campaign keeps the first line
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    "device",
    [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("cuda", marks=[pytest.mark.gpu, needs_gpu])],
    indirect=True,
)
def test_a_compiled_network_is_the_eager_one(device):
    found = printed("tests.gpu.compiled_network", device)
    assert set(found) == {"float32", "bfloat16"}
    for precision, distances in found.items():
        for name, bound in BOUNDS.items():
            compiled, eager = distances["compiled"][name], distances["eager"][name]
            assert compiled <= max(bound, 2 * eager), (precision, name, eager)


@pytest.mark.gpu
def test_a_compiled_objective_is_the_eager_one(gpu):
    """Its capture is tested for every loss in `test_objective_compiled.py`."""
    compared = printed("tests.training.compiled_objective", gpu, *OBJECTIVES)
    assert set(compared) == set(OBJECTIVES)
    for name, found in compared.items():
        assert found["apart"] < 1e-10, name
        assert found["graphs"] == (4 if name == "face ramp" else 2), name
