"""A device that computes on the CPU and counts what a GPU would do: launches, and waits of the host for a value.

Its tensors are wrappers of tensors of the CPU. Every operation that writes values counts as a launch. Waits are copies
to the CPU and from it that are not `non_blocking`, numbers read out of a tensor, and operations whose result's shape
depends on values.
"""

import sys
from collections import Counter

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map, tree_map_only
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

NAME = "fakegpu"
aten = torch.ops.aten
_SHAPED_BY_VALUES = {
    aten.nonzero.default,
    aten.masked_select.default,
    aten.unique_consecutive.default,
    aten._unique2.default,
}
_NO_LAUNCH = {
    aten.detach.default,
    aten.alias.default,
    aten.lift_fresh.default,
    aten.is_same_size.default,
    *(getattr(aten, name).default for name in ("empty_strided", "empty_like", "new_empty", "new_empty_strided")),
    aten.empty.memory_format,
}


class _Module(_DummyBackendModule):
    """What torch asks of the device's module."""

    def get_amp_supported_dtype(self):
        return [torch.bfloat16]


def _set_up():
    if torch._C._get_privateuse1_backend_name() != NAME:
        _setup_privateuseone_for_python_backend(NAME, _Module())


class Held(torch.Tensor):
    """A tensor of the fake device."""

    @staticmethod
    def __new__(cls, raw):
        wrapper = torch.Tensor._make_wrapper_subclass(
            cls,
            raw.shape,
            strides=raw.stride(),
            storage_offset=raw.storage_offset(),
            dtype=raw.dtype,
            layout=raw.layout,
            device=torch.device(NAME, 0),
            requires_grad=False,
        )
        wrapper.raw = raw
        return wrapper

    def __repr__(self):
        return f"Held({self.raw!r})"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise AssertionError(f"{func} outside of a FakeGPU")


def _by_kornia():
    """Whether kornia copies in a way that does not wait on CUDA, the only device where it knows how."""
    frame = sys._getframe()
    while frame is not None and frame.f_code.co_name not in ("_to_device_nonblocking", "_as_tensor_nonblocking"):
        frame = frame.f_back
    return frame is not None


class FakeGPU(TorchDispatchMode):
    """While it is entered, the device can be used, and is counted.

    Attributes:
        launches: operations on the device, by name.
        waits: of the host for the device, by operation.
    """

    def __init__(self):
        super().__init__()
        _set_up()
        self.device = torch.device(NAME, 0)
        self.reset()

    def reset(self):
        self.launches, self.waits = Counter(), Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        flat = torch.utils._pytree.arg_tree_leaves(*args, **kwargs)
        held = [each for each in flat if isinstance(each, Held)]
        asked = kwargs.get("device")
        to_device = asked is not None and torch.device(asked).type == NAME
        to_host = asked is not None and not to_device
        if to_device:
            kwargs["device"] = torch.device("cpu")
        name = str(func.overloadpacket).removeprefix("aten.")
        if held:
            blocking = not kwargs.get("non_blocking", False)
            if func is aten._local_scalar_dense.default or func in _SHAPED_BY_VALUES:
                self.waits[name] += 1
            elif func is aten._to_copy.default and to_host and blocking:
                self.waits[name] += 1
            elif func in (aten.index.Tensor, aten.index_put_.default) and any(
                each.dtype in (torch.bool, torch.uint8) for each in args[1] if each is not None
            ):
                self.waits[f"{name} by a mask"] += 1
            elif func is aten.copy_.default and not isinstance(args[0], Held):
                self.waits[name] += 1
        elif func is aten._to_copy.default and to_device and not kwargs.get("non_blocking", False) and not _by_kornia():
            self.waits[f"{name} to the device"] += 1
        raw_args = tree_map_only(Held, lambda each: each.raw, (args, kwargs))
        out = func(*raw_args[0], **raw_args[1])
        on_device = to_device or (bool(held) and not to_host)
        if not on_device:
            return out
        if not func.is_view and func not in _NO_LAUNCH and func is not aten._local_scalar_dense.default:
            self.launches[name] += 1
        originals = {id(each.raw): each for each in held}

        def wrapped(value):
            return originals.get(id(value), Held(value)) if isinstance(value, torch.Tensor) else value

        return tree_map(lambda value: wrapped(value) if isinstance(value, torch.Tensor) else value, out)
