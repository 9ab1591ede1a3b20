"""Constraints and devices from their configs."""

import re

import pytest
import torch

from ssl_sec import compilers, gpus
from ssl_sec.data import log
from ssl_sec.errors import ConfigError
from ssl_sec.gpus import require_usable, why_no_gpu
from ssl_sec.settings import from_values
from ssl_sec.training.config import LocalConfig, NoConstraintConfig, RayConfig, SphericalConfig
from ssl_sec.training.recipe import Computation


def test_the_constraint_and_its_weight_follow_the_settings():
    assert NoConstraintConfig().build() is None
    assert NoConstraintConfig().weight(5, 10)(5) == 0
    config = SphericalConfig(name="sec_ema", eta=2.0, rho=0.3)
    assert config.build().rho == 0.3 and config.build().radius is None
    assert [config.weight(5, 10)(step) for step in (0, 5)] == [0, 1.0]
    fixed = SphericalConfig(name="fixed_radius", eta=2.0, ramp="constant", radius=8.7)
    assert fixed.build().radius == 8.7
    assert fixed.weight(5, 10)(0) == 2.0
    face = SphericalConfig(name="sec", eta=2.0, ramp="face").weight(4, 100)
    assert [face(step) for step in (0, 12, 14, 16, 99)] == [0, 0, 1, 2, 2]
    capped = SphericalConfig(name="sec_ema", eta=1.0, ramp="capped", rho=0.4).weight(4, 1000)
    assert [capped(step) for step in (0, 1, 2, 3)] == [0, 0.5, 1, 1]


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("sec", {"rho": 0.2}, "constraint.rho: found 0.2, must be 1 with constraint=sec"),
        ("sec", {"radius": 0.0}, "constraint.radius: found 0.0, must be null with constraint=sec"),
        ("sec_ema", {"rho": 0.2, "radius": 3.0}, "constraint.radius: found 3.0, must be null with constraint=sec_ema"),
        ("l2reg", {}, "constraint.radius: found null, must be 0 with constraint=l2reg"),
        ("l2reg", {"radius": 1.0}, "constraint.radius: found 1.0, must be 0 with constraint=l2reg"),
        ("fixed_radius", {}, "constraint.radius: found null, must be a number with constraint=fixed_radius"),
        ("fixed_radius", {"radius": 1.0, "rho": 0.5}, "constraint.rho: found 0.5, must be 1"),
    ],
)
def test_a_constraint_is_what_its_name_says(name, changes, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        SphericalConfig(name=name, eta=1.0, **changes)


@pytest.fixture
def gpu(monkeypatch):
    """A GPU that computes in bfloat16, on a machine with all that compiles for it."""
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: not including_emulation)
    monkeypatch.setattr(compilers, "why_not_compiled", lambda device: None)
    return torch.device("cuda", 0)


def test_cpus_compute_in_float32_uncompiled():
    asked_for = Computation(precision="float32", channels_last=True, num_loader_workers=3)
    assert LocalConfig(num_loader_workers=3).on(torch.device("cpu")) == asked_for


def test_gpus_compute_in_bfloat16_compiled(gpu):
    fast = Computation(precision="bfloat16", channels_last=True, compiled=True, num_loader_workers=2)
    assert LocalConfig().on(gpu) == RayConfig().on(gpu) == fast


def test_gpus_without_bfloat16_compute_in_float32(gpu, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: including_emulation)
    assert LocalConfig().on(gpu).precision == "float32"


def test_nothing_is_compiled_where_that_is_not_possible(gpu, monkeypatch):
    cpu = torch.device("cpu")
    assert LocalConfig().why_not_compiled(gpu) is None
    monkeypatch.setattr(compilers, "why_not_compiled", lambda device: f"no compiler for {device.type}")
    assert not LocalConfig().on(gpu).compiled
    assert LocalConfig().why_not_compiled(gpu) == "no compiler for cuda"
    assert LocalConfig(compile=False).why_not_compiled(gpu) is None
    assert LocalConfig().why_not_compiled(cpu) is None  # it would not be compiled there by default
    for device in (cpu, gpu):
        assert not LocalConfig(compile=False).on(device).compiled
        message = f"^runtime.compile: found true, but no compiler for {device.type}; allowed here: false, or null$"
        with pytest.raises(ConfigError, match=message):
            LocalConfig(compile=True).on(device)


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("asked", [True, False])
def test_explicit_settings_hold_on_every_device(precision, asked, gpu):
    values = {
        "name": "local",
        "precision": precision,
        "channels_last": asked,
        "compile": asked,
        "num_loader_workers": 0,
    }
    options = from_values(LocalConfig, values)
    asked_for = Computation(precision=precision, channels_last=asked, compiled=asked)
    assert options.on(torch.device("cpu")) == options.on(gpu) == asked_for


def test_steps_are_replayed_on_one_gpu(gpu):
    assert LocalConfig().replays_steps(gpu, world_size=1) and LocalConfig(graphs=True).replays_steps(gpu, world_size=1)
    assert not LocalConfig(graphs=False).replays_steps(gpu, world_size=1)
    assert not RayConfig().replays_steps(gpu, world_size=2)
    assert not LocalConfig().replays_steps(torch.device("cpu"), world_size=1)
    assert not LocalConfig(precision="float64").replays_steps(gpu, world_size=1)


@pytest.mark.parametrize(
    ("options", "device", "world_size", "reason"),
    [
        (LocalConfig(graphs=True), "cpu", 1, "the device is cpu"),
        (RayConfig(graphs=True), "cuda", 2, "there are 2 workers"),
        (LocalConfig(graphs=True, precision="float64"), "cuda", 1, "the precision is float64"),
        (LocalConfig(graphs=True, recompute=True), "cuda", 1, "runtime.recompute is true"),
        (LocalConfig(graphs=True, micro_batch_size=64), "cuda", 1, "runtime.micro_batch_size is set"),
    ],
)
def test_replaying_is_refused_where_it_is_not_possible(options, device, world_size, reason):
    with pytest.raises(
        ConfigError, match=rf"runtime\.graphs: found true, but {reason}.*; allowed here: false, or null"
    ):
        options.replays_steps(torch.device(device), world_size)


NO_CUDA = AssertionError("Torch not compiled with CUDA enabled")
TOO_OLD = RuntimeError("The NVIDIA driver on your system is too old (found version 11040).\nPlease update it.")
NO_KERNEL = RuntimeError("CUDA error: no kernel image is available for execution on the device\nSearch for it in ...")


def failing(error):
    def fail(*_, **__):
        raise error

    return fail


def test_the_device_is_the_requested_or_the_available_one(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", failing(TOO_OLD))
    assert LocalConfig().resolve_device() == LocalConfig(device="cpu").resolve_device() == torch.device("cpu")
    found = "found 'cuda', but PyTorch finds no GPU on this machine (The NVIDIA driver on your system is too old "
    with pytest.raises(ConfigError, match=f"^runtime.device: {re.escape(found)}.*11040\\)\\); allowed here: cpu$"):
        LocalConfig(device="cuda").resolve_device()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert LocalConfig().resolve_device() == LocalConfig(device="cuda").resolve_device() == torch.device("cuda", 0)
    assert LocalConfig(device="cpu").resolve_device() == torch.device("cpu")


@pytest.mark.parametrize(
    ("device", "visible", "listed", "is_warned"),
    [
        ("auto", None, ["0000:01:00.0"], True),
        ("auto", "0", ["0000:01:00.0"], True),
        ("auto", "", ["0000:01:00.0"], False),
        ("auto", "-1", ["0000:01:00.0"], False),
        ("cpu", None, ["0000:01:00.0"], False),
        ("auto", None, [], False),
        ("auto", None, None, False),
    ],
)
def test_a_gpu_that_pytorch_does_not_find_is_named_once(
    device, visible, listed, is_warned, monkeypatch, tmp_path, caplog
):
    """It has no driver for PyTorch, or the build of PyTorch has no CUDA, or a container was started without it."""
    caplog.set_level("WARNING", "ssl_sec")
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    for name in [] if listed is None else [".", *listed]:
        (tmp_path / "gpus" / name).mkdir(parents=True, exist_ok=True)
    monkeypatch.setattr(gpus, "_LISTED_BY_DRIVER", str(tmp_path / "gpus"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", failing(NO_CUDA))
    log._log.cache_clear()
    assert [LocalConfig(device=device).resolve_device().type for _ in range(2)] == ["cpu", "cpu"]
    expected = (
        "runtime.device: the CPU is used, since PyTorch finds no GPU, though this machine has one (Torch not compiled "
        "with CUDA enabled); runtime.device=cpu uses it without this warning"
    )
    assert caplog.messages == ([expected] if is_warned else [])


@pytest.mark.parametrize("error", [NO_CUDA, TOO_OLD, NO_KERNEL])
def test_a_gpu_that_does_not_compute_is_refused_in_one_line(error, monkeypatch):
    require_usable(torch.device("cpu"))
    monkeypatch.setattr(torch, "ones", failing(error))
    reason = str(error).splitlines()[0].rstrip(".")
    found = rf"found a GPU that PyTorch \S+ cannot use \({re.escape(reason)}\); runtime.device=cpu trains on the CPU"
    with pytest.raises(ConfigError, match=f"^runtime.device: {found}$"):
        require_usable(torch.device("cuda", 0))


def test_a_gpu_without_free_memory_is_not_taken_for_an_unusable_one(monkeypatch):
    monkeypatch.setattr(torch, "ones", failing(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 MiB")))
    with pytest.raises(torch.OutOfMemoryError):
        require_usable(torch.device("cuda", 0))


def test_a_gpu_that_pytorch_counts_none_of_has_a_reason(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    assert why_no_gpu() == "PyTorch counts no GPUs"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert why_no_gpu() is None
