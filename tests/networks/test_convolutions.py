import copy
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from ssl_sec.networks.convolutions import lay_out

CPU = torch.device("cpu")


@pytest.mark.slow
def test_no_convolution_of_our_encoders_is_wrong_in_channels_last():
    """In its own process: where this fails, oneDNN crashed, or wrote into other tensors."""
    program = Path(__file__).with_name("channels_last_gradients.py")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(program.parents[1]), *sys.path])}
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, env=environment, timeout=600)
    assert done.returncode == 0, f"{done.returncode}: {done.stdout[-2000:]} {done.stderr[-2000:]}"
    assert done.stdout.endswith(" convolutions, 0 wrong\n")


@pytest.mark.parametrize("stride", [2, 3, (1, 2)])
@pytest.mark.parametrize("groups", [1, 2])
def test_the_replaced_convolution_computes_the_same(stride, groups):
    convolution = nn.Conv2d(6, 4, 1, stride, groups=groups)
    network = nn.Sequential(copy.deepcopy(convolution))
    lay_out(network, CPU, channels_last=True)
    assert network[0].stride == (1, 1)
    assert network.state_dict().keys() == nn.Sequential(convolution).state_dict().keys()
    network.double(), convolution.double()
    gradients = []
    for each in (convolution, network):
        images = torch.linspace(-1, 1, 2 * 6 * 9 * 9, dtype=torch.float64).view(2, 6, 9, 9).requires_grad_()
        maps = each(images)
        maps.square().sum().backward()
        gradients.append([maps, images.grad, next(each.parameters()).grad])
    for found, wanted in zip(*gradients, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


def test_other_convolutions_are_unchanged():
    safe = [
        nn.Conv2d(16, 8, 1, 2),
        nn.Conv2d(8, 8, 3, 2, padding=1),
        nn.Conv2d(8, 8, 1),
        nn.Conv2d(8, 8, 1, 2, padding=1),
    ]
    network = nn.Sequential(*copy.deepcopy(safe))
    lay_out(network, CPU, channels_last=True)
    assert [each.stride for each in network] == [each.stride for each in safe]
    assert network[1].weight.is_contiguous(memory_format=torch.channels_last)
    unsafe = nn.Sequential(nn.Conv2d(8, 8, 1, 2))
    lay_out(unsafe, torch.device("meta"), channels_last=False)  # any device but the CPU
    assert unsafe[0].stride == (2, 2)
