import re
from collections.abc import Iterator

import pytest
import torch

from ssl_sec.edges.machine import describe_runtime
from ssl_sec.edges.run.train import announced_config
from ssl_sec.errors import ConfigError
from ssl_sec.training.config import LocalConfig, RayConfig


@pytest.mark.parametrize(
    ("runtime", "expected"),
    [
        (LocalConfig(device="cpu"), r"device: cpu \(\d+ threads?\), one process, float32"),
        (
            RayConfig(precision="bfloat16"),
            "workers: one for each GPU, or one on CPUs, on Ray on this machine; device: auto, bfloat16",
        ),
        (
            RayConfig(num_workers=(2, 8), address="head:6379", device="cuda"),
            "workers: 2 to 8, on the Ray cluster at head:6379; device: cuda, bfloat16 on GPUs that have it",
        ),
        (
            RayConfig(num_workers=1, address="local", precision="float32"),
            "workers: 1, on Ray on this machine; device: auto, float32",
        ),
        (
            RayConfig(num_workers=3, device="cpu"),
            "workers: 3, on Ray on this machine; device: cpu, float32",
        ),
    ],
)
def test_a_runtime_is_described_in_words(runtime, expected, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert re.fullmatch(expected, describe_runtime(runtime))


def test_the_address_of_a_dashboard_is_refused_before_a_run_is_made(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "http://head:8265")
    with pytest.raises(ConfigError, match="^RAY_ADDRESS: found 'http://head:8265', a cluster's dashboard, to which"):
        describe_runtime(RayConfig())
    with pytest.raises(ConfigError, match="^runtime.address: found 'https://head'"):
        describe_runtime(RayConfig(address="https://head"))
    with pytest.raises(ConfigError, match="^runtime.address: found 'ray://head:10001', of Ray Client, in which no run"):
        describe_runtime(RayConfig(address="ray://head:10001"))
    with pytest.raises(ConfigError, match="^runtime.address: found 'head', without a port; allowed here: <head>:6379"):
        describe_runtime(RayConfig(address="head"))
    assert "the Ray cluster at auto" in describe_runtime(RayConfig(address="auto"))


def test_the_environments_cluster_and_the_gpus_name_are_described(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "other:6379")
    assert "the Ray cluster at other:6379" in describe_runtime(RayConfig())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU number {device.index}")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert describe_runtime(LocalConfig()) == "device: cuda (GPU number 0), one process, bfloat16"


@pytest.fixture
def four_threads(monkeypatch) -> Iterator[None]:
    """As torch starts them on four cores."""
    before = torch.get_num_threads()
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("given", "expected"), [({}, "2 threads"), ({"OMP_NUM_THREADS": "4"}, "4 threads")])
def test_a_job_uses_the_cpus_of_its_container(given, expected, four_threads, monkeypatch, caplog):
    """Unless the user has chosen; the quota is read by joblib, which a variable replaces here."""
    caplog.set_level("INFO", "ssl_sec")
    for name, value in {"LOKY_MAX_CPU_COUNT": "2", **given}.items():
        monkeypatch.setenv(name, value)
    announced_config("pretrain", ["runtime=local", "runtime.device=cpu"])
    assert f"device: cpu ({expected}), one process" in caplog.text


def test_a_job_without_a_runtime_uses_them_too(four_threads, monkeypatch, tmp_path):
    monkeypatch.setenv("LOKY_MAX_CPU_COUNT", "1")
    announced_config("neighbours", [f"embeddings={tmp_path}", "output=out"])
    assert torch.get_num_threads() == 1
