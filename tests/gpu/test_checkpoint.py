"""The state at the time of the call is saved, though the device changes it afterwards."""

import torch

from ssl_sec.training.checkpoint import CheckpointWriter, load_checkpoint
from tests.fakes import assert_identical

CPU = torch.device("cpu")
COUNT = 8


def state_on(device, step, side):
    """Tensors of every kind, some large, that the device has still to compute when this returns."""
    rows = torch.linspace(0, 1, side, device=device).repeat(side, 1)
    large = {f"weight {number}": torch.tril(rows + number + step) * 2 for number in range(COUNT)}
    return {
        "step": step,
        "encoder": large,
        "strided": rows.T[1:] + step,
        "channels_last": torch.ones(2, 3, 4, 4, device=device).to(memory_format=torch.channels_last) * step,
        "objective": {"mean_norm": torch.full((), 0.1 + step, dtype=torch.float64, device=device)},
        "started": torch.tensor(step > 1, device=device),
        "optimiser": {"state": [{"step": torch.tensor(float(step)), "rate": 0.1}], "count": 3},
    }


def tensors_of(state):
    if isinstance(state, torch.Tensor):
        return [state]
    values = state.values() if isinstance(state, dict) else state if isinstance(state, list) else []
    return [tensor for value in values for tensor in tensors_of(value)]


def test_states_are_saved_as_they_were_at_the_call(device, tmp_path):
    """A step overwrites them at once; the next save takes up the memory of the one before."""
    side = 2048 if device.type == "cuda" else 64
    writer = CheckpointWriter(tmp_path, keep_last=3)
    for step in (1, 2, 3):
        state = state_on(device, step, side)
        writer.save(step, state)
        for tensor in tensors_of(state):
            tensor.zero_()
    writer.close()
    for step in (1, 2, 3):
        saved = load_checkpoint(tmp_path / f"step-{step:09d}", CPU)
        assert_identical(saved, state_on(CPU, step, side))
        assert saved["encoder"]["weight 1"].max() > 2
