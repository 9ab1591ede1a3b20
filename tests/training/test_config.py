"""Constraints and devices from their configs."""

import re

import pytest
import torch

from ssl_sec import compilers
from ssl_sec.errors import ConfigError
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
    ],
)
def test_replaying_is_refused_where_it_is_not_possible(options, device, world_size, reason):
    with pytest.raises(
        ConfigError, match=rf"runtime\.graphs: found true, but {reason}.*; allowed here: false, or null"
    ):
        options.replays_steps(torch.device(device), world_size)


def test_the_device_is_the_requested_or_the_available_one(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert LocalConfig().resolve_device() == LocalConfig(device="cpu").resolve_device() == torch.device("cpu")
    with pytest.raises(ConfigError, match="^runtime.device: found 'cuda', but this machine has no usable GPU"):
        LocalConfig(device="cuda").resolve_device()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert LocalConfig().resolve_device() == LocalConfig(device="cuda").resolve_device() == torch.device("cuda", 0)
    assert LocalConfig(device="cpu").resolve_device() == torch.device("cpu")
