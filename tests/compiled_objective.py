"""Compares compiled objectives with eager ones and prints, as JSON, how far they are apart and in how many graphs.

A program of its own, started by `test_objective_compiled.py`: the checks of shapes in the tests' process cannot be
compiled.
"""

import json

import torch
from torch._dynamo.utils import counters

from ssl_sec.losses import SphericalConstraint, SphericalFeatureTransform, tiles
from ssl_sec.objective import Objective
from ssl_sec.schedules import FaceRamp
from tests.losses.cases import ALL_LOSSES, DIM, NUM_CLASSES, rows

LABELS = torch.tensor([0, 0, 0, 0, 0, 1, 1, 2, 2, 2, 3, 3, 3, 5, 5, 5])
MODES = ("rotate", "translate", "ftl")
STEPS = 9  # over the ramp's start and end, and steps in which centres have moved


def compare(case, mode=None):
    def build():
        transform = None if mode is None else SphericalFeatureTransform(NUM_CLASSES, DIM, mode).double()
        return Objective(case.build(), SphericalConstraint(rho=0.3), FaceRamp(0.7, 2), transform).train()

    torch.compiler.reset()
    counters.clear()
    eager, other = build(), build()
    # Not inductor, which needs a C++ compiler; what can be captured and differentiated is decided before it.
    compiled = torch.compile(other, fullgraph=True, backend="aot_eager")
    apart = 0.0
    for step in range(STEPS):
        ours, theirs = rows(16, seed=step).requires_grad_(), rows(16, seed=step).requires_grad_()
        terms, expected = compiled(ours, LABELS, step), eager(theirs, LABELS, step)
        terms.total.backward()
        expected.total.backward()
        difference = (ours.grad - theirs.grad).norm() / theirs.grad.norm()
        apart = max(apart, (terms.total / expected.total - 1).abs().item(), difference.item())
    for ours, theirs in zip(other.state_dict().values(), eager.state_dict().values(), strict=True):
        apart = max(apart, (ours.double() - theirs.double()).abs().max().item())
    return {"apart": apart, "graphs": counters["stats"]["unique_graphs"]}


if __name__ == "__main__":
    by_name = {case.name: case for case in ALL_LOSSES}
    compared = {name: compare(case) for name, case in by_name.items()}
    compared |= {mode: compare(by_name["triplet"], mode) for mode in MODES}
    tiles.CPU_TILE_ROWS = 6
    compared["ntxent in tiles"] = compare(by_name["ntxent"])
    print(json.dumps(compared))
