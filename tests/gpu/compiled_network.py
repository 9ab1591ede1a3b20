"""Prints, as JSON by precision, how far a compiled network and the eager one are from the eager one in float64.

    python -m tests.gpu.compiled_network <device> <backend>

A separate program, since the checks of shapes in the tests' process cannot be compiled.
"""

import copy
import json
import sys

import torch
from torch import nn

from ssl_sec.losses.geometry import in_full_precision
from ssl_sec.training.step import autocast
from tests.gpu.runs import recipe_on

NAMES = ("embeddings", "gradients", "statistics")


def apart(found, expected):
    """How far tensors are apart together, as a share of their length."""
    pairs = [(one.double(), other.double()) for one, other in zip(found, expected, strict=True)]
    return (sum((a - b).square().sum() for a, b in pairs) / sum(b.square().sum() for _, b in pairs)).sqrt().item()


def taken(model, network, views, precision):
    """Embeddings, gradients and running statistics of a step."""
    with autocast(views.device, precision):
        embeddings = model(views)
    in_full_precision(embeddings).square().mean().backward()
    gradients = [parameter.grad for parameter in network.parameters()]
    return [embeddings.detach()], gradients, [buffer for buffer in network.buffers() if buffer.is_floating_point()]


def compare(device, backend, precision):
    recipe, _ = recipe_on(device, precision=precision)
    eager = nn.Sequential(recipe.encoder, recipe.head).train()
    exact, other = copy.deepcopy(eager).double(), copy.deepcopy(eager)
    generator = torch.Generator().manual_seed(0)
    views = torch.rand(48, 3, 16, 16, generator=generator).to(device).to(memory_format=torch.channels_last)
    expected = taken(exact, exact, views.double(), "float32")  # not by autocast: in the precision of the views
    compiled = torch.compile(other, dynamic=False, backend=backend)
    distances = {}
    for name, model, network in (("eager", eager, eager), ("compiled", compiled, other)):
        found = taken(model, network, views, precision)
        distances[name] = dict(zip(NAMES, map(apart, found, expected), strict=True))
    return distances


def main(device, backend):
    torch.backends.cudnn.allow_tf32 = False  # both in the precision that is compared
    precisions = ("float32", "bfloat16")
    print(json.dumps({precision: compare(torch.device(device), backend, precision) for precision in precisions}))


if __name__ == "__main__":
    main(*sys.argv[1:])
