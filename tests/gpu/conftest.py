"""Tests of what a GPU computes; they need neither Ray, MLflow, Hydra, OmegaConf nor the peers.

Most are tests of a device: on CUDA they are marked `gpu`, and on the CPU, where little can differ, they are rehearsed.
"""

import os

import pytest
import torch

# cuBLAS is deterministic with a workspace of its own; it looks at the variable when it is first used.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, needs_gpu])])
def device(request):
    return torch.device(request.param)


@pytest.fixture
def gpu():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return torch.device("cuda")
