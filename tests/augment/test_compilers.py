"""What torch.compile and Triton need on a machine is looked for before it is used."""

import os
import shutil
import sys
import sysconfig
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ssl_sec import compilers
from ssl_sec.compilers import why_no_kernels, why_not_compiled

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine with all that compiling needs; its headers and compilers can be taken away."""
    (tmp_path / "Python.h").touch()
    found = {"gcc", "clang", "g++"}
    for variable in ("CC", "CXX", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TRITON_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(compilers, "find_spec", lambda name: name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 0))
    monkeypatch.setattr(shutil, "which", lambda name: name if name in found else None)
    monkeypatch.setattr(sysconfig, "get_paths", lambda scheme: {"include": str(tmp_path)})
    return found


def test_a_machine_with_everything(machine):
    assert why_no_kernels(GPU) is None
    assert why_not_compiled(GPU) is None
    assert why_not_compiled(CPU) is None


def test_gcc_or_clang_is_enough_but_no_other_compiler(machine):
    machine.remove("gcc")
    assert why_no_kernels(GPU) is None
    machine.remove("clang")
    machine.add("cc")
    assert why_no_kernels(GPU) == "Triton needs gcc or clang"


def test_the_compiler_in_cc_is_the_only_one(machine, monkeypatch):
    monkeypatch.setenv("CC", "icc")
    assert why_no_kernels(GPU) == "Triton needs the C compiler CC=icc, which is not found"
    machine.add("icc")
    assert why_no_kernels(GPU) is None


def test_pythons_headers(machine, tmp_path):
    (tmp_path / "Python.h").unlink()
    assert why_no_kernels(GPU) == f"Triton needs {tmp_path}/Python.h (on Debian: the package python3-dev)"


def test_no_triton(machine, monkeypatch):
    monkeypatch.setattr(compilers, "find_spec", lambda name: None)
    assert why_no_kernels(GPU) == "Triton is not installed"


def test_a_gpu_of_an_early_generation(machine, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (6, 1))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "GTX 1080")
    assert why_no_kernels(GPU) == "GTX 1080 has compute capability 6.1, and Triton needs 7.0"


def test_cpus_need_a_compiler_of_cpp(machine, monkeypatch, tmp_path):
    machine -= {"gcc", "clang"}
    assert why_not_compiled(CPU) is None
    monkeypatch.setenv("CXX", "icpx")
    assert why_not_compiled(CPU) == "torch.compile needs the C++ compiler CXX=icpx, which is not found"
    monkeypatch.delenv("CXX")
    machine.remove("g++")
    assert why_not_compiled(CPU) == "torch.compile needs g++"
    machine.add("g++")
    (tmp_path / "Python.h").unlink()
    assert why_not_compiled(CPU) == f"torch.compile needs {tmp_path}/Python.h (on Debian: the package python3-dev)"


@pytest.mark.parametrize(
    ("variable", "why_not"), [("TORCHINDUCTOR_CACHE_DIR", why_not_compiled), ("TRITON_CACHE_DIR", why_no_kernels)]
)
def test_a_folder_from_which_no_code_is_loaded(variable, why_not, machine, tmp_path: Path, monkeypatch):
    hardened = tmp_path / "hardened"
    hardened.mkdir()

    def statvfs(path):
        return SimpleNamespace(f_flag=os.ST_NOEXEC if path == hardened else 0)

    monkeypatch.setattr(os, "statvfs", statvfs)
    folder = hardened / "a" / "b"
    monkeypatch.setenv(variable, str(folder))
    end = f"(set {variable} to another folder)"
    found = f"{folder}, from which compiled code is loaded, is mounted with noexec {end}"
    assert why_not(GPU) == found

    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)
    monkeypatch.setenv(variable, str(tmp_path / "new"))
    assert why_not(GPU) == f"{tmp_path}/new, from which compiled code is loaded, cannot be written {end}"
    monkeypatch.delenv(variable)
    assert why_not(GPU) is None


def test_triton_compiles_in_the_home_folder(machine, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert why_no_kernels(GPU).startswith(f"{tmp_path}/.triton, from which")
    monkeypatch.setenv("TRITON_HOME", str(tmp_path / "other"))
    assert why_no_kernels(GPU).startswith(f"{tmp_path}/other/.triton, from which")
    assert why_not_compiled(GPU) is None  # TorchInductor has its own folder


def test_a_home_that_may_not_be_entered_is_no_place_for_kernels(machine, tmp_path: Path, monkeypatch):
    def exists(path: Path) -> bool:
        if path.is_relative_to(tmp_path) and path.name != "Python.h":
            raise PermissionError(13, "Permission denied")  # as of Path.exists in the folder of another user
        return True

    monkeypatch.setattr(Path, "exists", exists)
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert why_no_kernels(GPU).startswith(f"{tmp_path}/.triton, from which compiled code is loaded, cannot be written")
