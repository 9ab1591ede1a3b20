import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from ssl_sec.errors import (
    ConfigError,
    StorageError,
    counted,
    lost_loader,
    out_of_memory,
    out_of_space,
    printable,
    shown,
    writing,
)

TOO_MANY = 2**46  # more bytes than an address has bits for


@pytest.mark.parametrize(
    ("allocate", "asked"),
    [
        (lambda: torch.empty(TOO_MANY), " for 281474976710656 bytes at once"),
        (lambda: np.empty(TOO_MANY), " for 512. TiB at once"),
        (lambda: bytearray(8 * TOO_MANY), ""),
    ],
)
def test_a_failed_allocation_is_one_line(allocate, asked):
    with pytest.raises((RuntimeError, MemoryError)) as caught:
        allocate()
    error = out_of_memory(caught.value)
    assert isinstance(error, ConfigError)
    assert str(error).startswith(f"not enough memory{asked}; less is needed with a smaller global_batch_size, ")
    assert "\n" not in str(error)


def test_a_gpu_out_of_memory_is_one_line():
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of")
    assert str(out_of_memory(error)).startswith("not enough memory for 20.00 GiB at once; ")
    assert "runtime.recompute=true, or runtime.micro_batch_size for an encoder without batch norm" in str(
        out_of_memory(error)
    )


@pytest.mark.parametrize(
    "error", [RuntimeError("shapes do not match"), ValueError("out of memory"), KeyError("memory")]
)
def test_other_errors_are_unchanged(error):
    assert out_of_memory(error) is None


class Dying(Dataset[int]):
    """Its reader is killed, as by a system without memory."""

    def __getitem__(self, index: int) -> int:
        os.kill(os.getpid(), signal.SIGKILL)
        return index

    def __len__(self) -> int:
        return 1


def test_a_lost_process_of_a_data_loader_is_one_line():
    with pytest.raises(RuntimeError) as caught:
        list(DataLoader(Dying(), batch_size=None, num_workers=1, multiprocessing_context="fork"))
    message = str(lost_loader(caught.value))
    assert message.startswith("DataLoader worker (pid")
    assert message.endswith("; if memory ran out, a lower runtime.num_loader_workers needs less")
    assert lost_loader(RuntimeError("another")) is None


def full_disk() -> None:
    with open("/dev/full", "w") as file:
        file.write("x")


def features_on_a_full_disk() -> None:
    torch.save({"features": torch.zeros(100_000)}, "/dev/full")


def wrapped() -> None:
    try:
        full_disk()
    except OSError as error:
        raise RuntimeError("a library's own words") from error


@pytest.mark.parametrize("write", [full_disk, features_on_a_full_disk, wrapped])
def test_a_file_that_cannot_be_written_is_one_line(write):
    with pytest.raises((OSError, RuntimeError)) as caught:
        write()
    error = out_of_space(caught.value)
    assert isinstance(error, StorageError)
    assert "cannot be written: " in str(error) and "\n" not in str(error)


@pytest.mark.parametrize(
    ("error", "reason"),
    [(PermissionError(13, "Permission denied", "/other"), "Permission denied"), (OSError("a\nb"), "a")],
)
def test_a_file_that_a_key_gives_and_that_cannot_be_written_is_one_line(error, reason):
    with pytest.raises(StorageError, match=f"^output: /a/b.png cannot be written: {reason}$"):
        with writing("output", Path("/a/b.png")):
            raise error


@pytest.mark.parametrize("error", [FileNotFoundError(2, "No such file", "x"), ValueError("No space left on device")])
def test_other_errors_are_not_of_the_disk(error):
    assert out_of_space(error) is None


def test_printed_errors_are_one_line_of_limited_length():
    assert printable("a\nb") == "a\\nb"
    assert printable("x" * 400) == "x" * 400
    assert printable("a" * 5000 + "b" * 5000) == "a" * 200 + "…" + "b" * 200


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "null"),
        (True, "true"),
        (False, "false"),
        (1, "1"),
        (0.5, "0.5"),
        ("null", "'null'"),
        ((), "[]"),
        ((0.5, None, [True, "a"]), "[0.5, null, [true, 'a']]"),
        ("a\nb", r"'a\nb'"),
    ],
)
def test_a_value_is_shown_as_a_configuration_has_it(value, text):
    assert shown(value) == text


def test_one_thing_is_not_in_the_plural():
    assert [counted(number, "run") for number in (0, 1, 2)] == ["0 runs", "1 run", "2 runs"]
    assert [counted(number, "person") for number in (1, 2)] == ["1 person", "2 people"]
    assert [counted(number, "class") for number in (1, 1437)] == ["1 class", "1,437 classes"]
