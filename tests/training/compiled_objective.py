"""Compares compiled objectives with eager ones and prints, as JSON, how far they are apart and in how many graphs.

    python -m tests.training.compiled_objective <device> <backend> [<name> ...]

A separate program, started by `test_objective_compiled.py` and `gpu/test_compiled.py`: the checks of shapes in the
tests' process cannot be compiled.
"""

import json
import sys

import torch
from torch._dynamo.utils import counters

from ssl_sec.losses import SphericalConstraint, SphericalFeatureTransform, tiles
from ssl_sec.losses.templates.softmax import draw_classes, sample_classes
from ssl_sec.training.objective import Objective
from ssl_sec.training.schedules import FaceRamp, LinearRamp
from tests.losses.cases import ALL_LOSSES, DIM, NUM_CLASSES, rows

LABELS = torch.tensor([0, 0, 0, 0, 0, 1, 1, 2, 2, 2, 3, 3, 3, 5, 5, 5])
MODES = {
    "rotate": {},
    "translate": {"mode": "translate"},
    "ftl": {"mode": "ftl"},
    "picked centres": {"centres": "picked"},
}
STEPS = 9  # over the face ramp's start and end, and steps in which centres have moved
ETA = LinearRamp(0.7, STEPS)


def compare(case, mode=None, device="cpu", backend="aot_eager", eta=ETA, class_sample_rate=1.0):
    def build():
        options = MODES.get(mode)
        transform = None if options is None else SphericalFeatureTransform(NUM_CLASSES, DIM, **options).double()
        loss = case.build()
        sample_classes(loss, class_sample_rate, seed=0)
        return Objective(loss, SphericalConstraint(rho=0.3), eta, transform).to(device).train()

    torch.compiler.reset()
    counters.clear()
    eager, other = build(), build()
    compiled = torch.compile(other, fullgraph=True, backend=backend)
    labels, apart = case.arrange(LABELS).to(device), 0.0
    for step in range(STEPS):
        ours, theirs = (rows(len(labels), seed=step).to(device).requires_grad_() for _ in range(2))
        draw_classes(other, step)
        draw_classes(eager, step)
        terms, expected = compiled(ours, labels, step), eager(theirs, labels, step)
        terms.total.backward()
        expected.total.backward()
        difference = (ours.grad - theirs.grad).norm() / theirs.grad.norm()
        apart = max(apart, (terms.total / expected.total - 1).abs().item(), difference.item())
    for ours, theirs in zip(other.state_dict().values(), eager.state_dict().values(), strict=True):
        apart = max(apart, (ours.double() - theirs.double()).abs().max().item())
    return {"apart": apart, "graphs": counters["stats"]["unique_graphs"]}


def main(device, backend, *names):
    by_name = {case.name: case for case in ALL_LOSSES}
    compared = {}
    for name in names or (*by_name, *MODES, "face ramp", "ntxent in tiles", "sampled classes"):
        if name in MODES:
            compared[name] = compare(by_name["triplet"], name, device, backend)
        elif name == "face ramp":
            compared[name] = compare(by_name["ntxent"], None, device, backend, FaceRamp(0.7, 2))
        elif name == "sampled classes":
            compared[name] = compare(by_name["arcface"], None, device, backend, class_sample_rate=0.5)
        elif name == "ntxent in tiles":
            tiles.CPU_TILE_ROWS = tiles.GPU_TILE_ROWS = 6
            compared[name] = compare(by_name["ntxent"], None, device, backend)
        else:
            compared[name] = compare(by_name[name], None, device, backend)
    print(json.dumps(compared))


if __name__ == "__main__":
    main(*sys.argv[1:])
