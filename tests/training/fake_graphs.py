"""Records launches and replays them, as CUDA graphs do, on a CPU.

A replay runs the recorded operations in their order on the memory that they were recorded with. So a number of Python
that changed since then does not reach it, and an operation that reads a value of a tensor cannot be recorded.
"""

import torch
from pytest import MonkeyPatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ssl_sec.losses import contrastive
from ssl_sec.training import step

aten = torch.ops.aten


def tensors_of(values):
    return [each for each in tree_leaves(values) if isinstance(each, torch.Tensor)]


class _Recording(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.operations = []
        self.before = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is aten._local_scalar_dense.default:
            raise RuntimeError("a value is read while operations are recorded")
        for argument, value in zip(func._schema.arguments, args, strict=False):
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            # Batch norm's schema does not say that it moves its statistics.
            if is_written or argument.name.startswith("running_"):
                for tensor in tensors_of(value):
                    self.before.setdefault(tensor.untyped_storage().data_ptr(), (tensor, tensor.clone()))
        results = func(*args, **kwargs)
        self.operations.append((func, args, kwargs, results))
        return results


class FakeGraphs:
    """What `ssl_sec.training.replaying.Replayed` is given on a CPU.

    Attributes:
        recorded: operations of each recording.
        replays: how many there were.
        fails: whether recording ends in an error, as where memory is missing.
    """

    def __init__(self, fails=False):
        self.recorded = []
        self.replays = 0
        self.fails = fails

    def warm_up(self, function):
        return function()

    def record(self, function):
        if self.fails:
            raise torch.OutOfMemoryError("no memory\nfor a graph")
        recording = _Recording()
        try:
            with recording:
                result = function()
        finally:  # a recording computes nothing: what it wrote is what it was before
            with torch.no_grad():
                for tensor, before in recording.before.values():
                    tensor.copy_(before)
        self.recorded.append(len(recording.operations))

        def replay():
            self.replays += 1
            with torch.no_grad():
                for func, args, kwargs, results in recording.operations:
                    owned = {id(each) for each in tensors_of((args, kwargs))}
                    for old, new in zip(tensors_of(results), tensors_of(func(*args, **kwargs)), strict=True):
                        if not func.is_view and id(old) not in owned:
                            old.copy_(new)

        return result, replay


def use_fake_graphs(monkeypatch: MonkeyPatch) -> FakeGraphs:
    """Lets steps be recorded on a CPU, without reading values, as on a GPU."""
    graphs = FakeGraphs()
    monkeypatch.setattr(step, "CUDAGraphs", lambda device: graphs)
    monkeypatch.setattr(contrastive, "may_read_values", lambda labels: False)
    return graphs
