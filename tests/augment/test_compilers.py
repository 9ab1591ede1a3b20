"""What Triton needs on a machine is looked for before it is used."""

import shutil
import sysconfig

import pytest
import torch

from ssl_sec import compilers
from ssl_sec.compilers import why_no_triton

GPU = torch.device("cuda")


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine with all that Triton needs; its headers and compilers can be taken away."""
    (tmp_path / "Python.h").touch()
    found = {"gcc", "clang"}
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(compilers, "find_spec", lambda name: name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 0))
    monkeypatch.setattr(shutil, "which", lambda name: name if name in found else None)
    monkeypatch.setattr(sysconfig, "get_paths", lambda scheme: {"include": str(tmp_path)})
    return found


def test_a_machine_with_everything(machine):
    assert why_no_triton(GPU) is None


def test_gcc_or_clang_is_enough_but_no_other_compiler(machine):
    machine.remove("gcc")
    assert why_no_triton(GPU) is None
    machine.remove("clang")
    machine.add("cc")
    assert why_no_triton(GPU) == "Triton needs gcc or clang"


def test_the_compiler_in_cc_is_the_only_one(machine, monkeypatch):
    monkeypatch.setenv("CC", "icc")
    assert why_no_triton(GPU) == "Triton needs the C compiler CC=icc, which is not found"
    machine.add("icc")
    assert why_no_triton(GPU) is None


def test_pythons_headers(machine, tmp_path):
    (tmp_path / "Python.h").unlink()
    assert why_no_triton(GPU) == f"Triton needs {tmp_path}/Python.h (on Debian: the package python3-dev)"


def test_no_triton(machine, monkeypatch):
    monkeypatch.setattr(compilers, "find_spec", lambda name: None)
    assert why_no_triton(GPU) == "Triton is not installed"


def test_a_gpu_of_an_early_generation(machine, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (6, 1))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "GTX 1080")
    assert why_no_triton(GPU) == "GTX 1080 has compute capability 6.1, and Triton needs 7.0"
