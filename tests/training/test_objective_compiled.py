"""The whole objective as one graph: no synchronisation, no shape that depends on values, no break."""

import json
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from tests.losses.cases import ALL_LOSSES

# Those whose operations are also in others are compiled among the slow tests alone.
VARIANTS = {
    *("triplet_disjoint", "angular_hinge", "softmax_bias", "l2softmax", "modified_softmax", "normface_fixed"),
    *("npair_normalized", "c_contrastive", "translate", "picked centres", "dcl", "softmax", "sphereface"),
    *("semihard", "lifted_structure", "angular"),
    *("contrastive", "triplet", "circle", "npair", "normface", "cosface_sub_centres", "cosface", "c_triplet"),
    *("supcon", "npair_angular", "arcface_sub_centres", "magface", "c_triplet_center", "ftl"),
}
NAMES = [
    *(case.name for case in ALL_LOSSES),
    "rotate",
    "translate",
    "ftl",
    "picked centres",
    "face ramp",
    "ntxent in tiles",
    "sampled classes",
]


# Seldom inductor, which is slow and needs a C++ compiler: "eager" captures, "aot_eager" differentiates.
@cache
def compared(backend, names):
    program = [sys.executable, "-W", "ignore", "-m", "tests.training.compiled_objective", "cpu", backend, *names]
    done = subprocess.run(program, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def check(name, backend, names):
    """Values, gradients, the running radius and the centres are the eager ones over some steps."""
    found = compared(backend, tuple(names))[name]
    assert found["apart"] < 1e-10
    # One graph for the first step, and one for any other; before, in and after a face's ramp one each.
    assert found["graphs"] == (4 if name == "face ramp" else 2)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in VARIANTS])
def test_the_objective_is_one_graph_for_every_loss_and_transform(name):
    check(name, "eager", [each for each in NAMES if each not in VARIANTS])


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(VARIANTS))
def test_the_objective_is_one_graph_for_every_variant_of_a_loss(name):
    check(name, "eager", sorted(VARIANTS))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_differentiated_objective_is_one_graph(name):
    check(name, "aot_eager", NAMES)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("name", ["ntxent", "rotate"])
def test_inductors_code_computes_the_objective(name):
    """Inductor bounds whole numbers, which failed for random numbers of a step with an upper bound alone."""
    check(name, "inductor", ["ntxent", "rotate"])
