"""Batches for the tests of the generators: features and embeddings of a few rows, a head, and all parts of a share."""

import torch
from torch import nn

from ssl_sec.losses.generators.base import GlobalBatch
from tests.losses.cases import ALL_LOSSES, DIM, rows

FEATURES, CLASSES = 7, 4
LABELS = torch.tensor([0, 0, 1, 1, 2, 2, 3, 3, 3, 0])
TAKEN = ("triplet", "npair_normalized", "multi_similarity", "ranked_list")
CASES = {case.name: case for case in ALL_LOSSES if case.name in TAKEN}


def batch(labels=LABELS, step=3, seed=0):
    """Features and embeddings with gradients."""
    features = rows(len(labels), FEATURES, seed=seed).requires_grad_()
    embeddings = rows(len(labels), DIM, seed=seed + 1).requires_grad_()
    return GlobalBatch(features=features, embeddings=embeddings, labels=labels, step=step)


def head():
    torch.manual_seed(5)
    return nn.Linear(FEATURES, DIM).double()


def under_autocast(generator, loss):
    """The shares of all anchors in float32, without and with autocast."""
    double, embed = batch(), head().float()
    given = GlobalBatch(
        features=double.features.float(), embeddings=double.embeddings.float(), labels=LABELS, step=double.step
    )
    shares = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            shares.append(torch.stack(generator.float()(given, slice(0, len(LABELS)), embed, loss)))
    return shares


def moved(total, named):
    """The names of the tensors that a sum has gradients for other than 0."""
    gradients = torch.autograd.grad(total, list(named.values()), retain_graph=True, allow_unused=True)
    return {
        name
        for name, gradient in zip(named, gradients, strict=True)
        if gradient is not None and gradient.abs().max() > 0
    }
