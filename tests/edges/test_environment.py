"""Jobs in environments that lack something: a user's name, a home, open files, a locale, plain paths."""

import getpass
import io
import os
import re
import resource
import shlex
import socket
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from mlflow.tracking import MlflowClient
from PIL import Image

from ssl_sec.edges.command_line import exit_code_of
from ssl_sec.edges.environment import (
    RAY_NEEDS_FILES,
    complete,
    find_cluster,
    prepare,
    require_files_for_ray,
    through_proxy,
)
from ssl_sec.errors import ConfigError
from tests.edges.conftest import QUICK, WHOLE


def limits(monkeypatch, now: int, most: int) -> list[tuple[int, int]]:
    """Fakes the system's limits; the returned list has the limits that are set."""
    held = [(now, most)]
    monkeypatch.setattr(resource, "getrlimit", lambda kind: held[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda kind, both: held.append(both))
    return held


@pytest.fixture
def environment(monkeypatch, tmp_path):
    """Restores what `complete` may set."""
    for name in ("HOME", "LOGNAME", "MPLCONFIGDIR", "TRITON_HOME"):
        monkeypatch.setenv(name, os.environ.get(name, str(tmp_path)))
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name.upper(), raising=False)
    return monkeypatch


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, ""),
        ({"https_proxy": "http://proxy:3128"}, "localhost,127.0.0.1,::1"),
        ({"HTTP_PROXY": "http://proxy:3128", "NO_PROXY": "head, .lab"}, "head,.lab,localhost,127.0.0.1,::1"),
        ({"http_proxy": "http://proxy:3128", "no_proxy": "127.0.0.1"}, "127.0.0.1,localhost,::1"),
        ({"http_proxy": "http://proxy:3128", "no_proxy": "*"}, "*"),
    ],
)
def test_this_machine_is_not_asked_through_a_proxy(given, expected, environment):
    for name, value in given.items():
        environment.setenv(name, value)
    complete()
    assert os.environ["no_proxy"] == expected
    assert through_proxy("http://127.0.0.1:8265") == ""


def test_an_error_names_the_proxy_without_its_password(environment):
    environment.setenv("http_proxy", "http://ada:secret@proxy:3128")
    environment.setenv("no_proxy", ".lab,mlflow")
    assert through_proxy("http://head:8265").startswith("; it was asked through the proxy http://")
    assert through_proxy("http://head:8265").endswith("@proxy:3128; no_proxy=head asks it directly")
    assert "secret" not in through_proxy("http://head:8265")
    direct = ("http://head.lab:8265", "http://mlflow", "https://head:8265", "sqlite:///runs/mlflow.db", "head:6379")
    assert {through_proxy(address) for address in direct} == {""}


def test_the_limit_of_open_files_is_raised_as_far_as_it_goes(environment):
    assert limits(environment, 256, 4096) and (prepare() or resource.getrlimit(0)) == (4096, 4096)
    endless = limits(environment, 1024, resource.RLIM_INFINITY)
    prepare()
    assert endless[-1] == (65536, resource.RLIM_INFINITY)
    high = limits(environment, 100_000, 200_000)
    prepare()
    assert high == [(100_000, 200_000)]


def test_too_few_open_files_are_one_line(environment, capsys):
    limits(environment, 40, 40)
    assert exit_code_of(lambda: 0) == 2
    message = "error: this process may open 40 files (ulimit -n), and a job needs 64 or more\n"
    assert capsys.readouterr().err == message
    limits(environment, RAY_NEEDS_FILES - 1, RAY_NEEDS_FILES - 1)
    with pytest.raises(ConfigError, match="may open 511 files .* Ray needs 512 or more; .* runtime=local"):
        require_files_for_ray()
    limits(environment, 64, RAY_NEEDS_FILES)
    require_files_for_ray()


def test_a_user_without_a_name_has_a_number(environment, monkeypatch):
    def nameless(number):
        raise KeyError(f"getpwuid(): uid not found: {number}")

    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        environment.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", nameless)
    with pytest.raises((KeyError, OSError)):
        getpass.getuser()
    complete()
    assert getpass.getuser() == str(os.getuid())


def test_without_a_home_a_temporary_folder_is_used(environment, monkeypatch, tmp_path):
    def nameless(number):
        raise KeyError(f"getpwuid(): uid not found: {number}")

    monkeypatch.setattr("pwd.getpwuid", nameless)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    environment.delenv("HOME")
    complete()
    home = Path("~").expanduser()
    assert home.parent == tmp_path
    assert stat.S_IMODE(home.stat().st_mode) == 0o700
    home.rmdir()
    home.write_text("someone else's")
    environment.delenv("HOME")
    complete()
    assert Path("~").expanduser().is_dir()


def test_threads_that_wait_spin_briefly_unless_the_user_has_chosen(environment):
    for given, found in (
        ({}, "10000"),
        ({"GOMP_SPINCOUNT": "7"}, "7"),
        ({"OMP_WAIT_POLICY": "active"}, None),
    ):
        for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
            environment.delenv(name, raising=False)
        for name, value in given.items():
            environment.setenv(name, value)
        complete()
        assert os.environ.get("GOMP_SPINCOUNT") == found


def test_threads_are_told_so_before_torch_starts_them():
    code = "import os, sys, ssl_sec.edges; print(os.environ['GOMP_SPINCOUNT'], 'torch' in sys.modules)"
    without = {key: value for key, value in os.environ.items() if key not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=without)
    assert done.stdout.split() == ["10000", "False"], done.stderr


@pytest.mark.parametrize("variable", ["MPLCONFIGDIR", "TRITON_HOME"])
def test_an_unwritable_home_does_not_affect_drawing_or_kernels(variable, environment):
    environment.delenv(variable)
    environment.setenv("HOME", "/proc")
    complete()
    assert os.access(os.environ[variable], os.W_OK)


def test_a_stream_with_a_small_charset_takes_all_characters(environment, monkeypatch):
    bytes_written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(bytes_written, encoding="ascii"))
    assert exit_code_of(lambda: print("84.63 ± 4.67, η") or 0) == 0
    sys.stdout.flush()
    assert bytes_written.getvalue() == b"84.63 \\xb1 4.67, \\u03b7\n"


ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


def test_the_options_are_explained_in_any_locale():
    code = "from ssl_sec.edges.composition.options import options; print(ascii(options('constraint', 'pretrain')))"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env={**os.environ, **ASCII}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def job(*overrides: str, prefix: str = "", **changes: str | None) -> subprocess.CompletedProcess:
    """A job in a shell of its own, after a command that changes the shell's environment."""
    changed = {
        key: value for key, value in {**os.environ, "OMP_NUM_THREADS": "1", **changes}.items() if value is not None
    }
    line = shlex.join([sys.executable, "-m", "jobs.pretrain", *overrides])
    return subprocess.run(["bash", "-c", f"{prefix}{line}"], env=changed, capture_output=True, text=True)


def finished(done: subprocess.CompletedProcess, runs: Path, also_usual: str = "INFO: ") -> None:
    """Asserts that a job succeeded without unusual output, and is FINISHED in MLflow."""
    assert done.returncode == 0, done.stderr
    usual = rf".*: epoch |INFO: |Successfully|Created version|{also_usual}"
    odd = [line for line in done.stderr.splitlines() if not re.match(usual, line)]
    assert odd == []
    client = MlflowClient(f"sqlite:///{runs}/mlflow.db")
    (run,) = client.search_runs([client.get_experiment_by_name("digits").experiment_id])
    assert run.info.status == "FINISHED"
    assert "encoder.safetensors" in {artifact.path for artifact in client.list_artifacts(run.info.run_id)}


LOCAL = (*QUICK, *WHOLE, "tracking.register_model=true", "runtime=local")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("prefix", "changes"),
    [
        ("ulimit -n 64; ", {}),
        ("", {"HOME": None, "USER": None, "LOGNAME": None}),
        ("unshare --user --map-user=12345 ", {"HOME": None, "USER": None, "LOGNAME": None}),
        ("", {"HOME": "/proc"}),
        ("", {"LC_ALL": "C", "LANG": None, "PYTHONUTF8": None}),
        ("", ASCII),
    ],
    ids=["ulimit", "no home", "no user", "read-only home", "LANG=C", "ascii"],
)
def test_a_job_runs_with_few_files_no_home_and_an_ascii_locale(prefix, changes, tmp_path):
    if prefix.startswith("unshare") and subprocess.run([*prefix.split(), "true"], capture_output=True).returncode:
        pytest.skip("this system lets no process have another user id")
    finished(job(*LOCAL, f"output_dir={tmp_path}", prefix=prefix, **changes), tmp_path)


@pytest.fixture
def parquet(tmp_path) -> list[str]:
    """Overrides of a streamed set in a folder with a space and accents."""
    folder = tmp_path / "données à moi"
    folder.mkdir()
    for split, count in (("train", 300), ("test", 60)):
        cells = []
        for number in range(count):
            buffer = io.BytesIO()
            pixels = np.random.default_rng(number).integers(0, 255, (8, 8, 3), np.uint8)
            Image.fromarray(pixels).save(buffer, "png")
            cells.append({"bytes": buffer.getvalue(), "path": f"{number}.png"})
        labels = pa.array([number % 10 for number in range(count)])
        pyarrow.parquet.write_table(pa.table({"image": cells, "label": labels}), folder / f"{split} é.parquet")
    return [
        "data=parquet",
        f"data.train=[{folder}/train é.parquet]",
        f"data.test=[{folder}/test é.parquet]",
        "data.resident_limit_mib=0",
        "global_batch_size=64",
    ]


@pytest.mark.slow
def test_a_streamed_set_with_few_open_files_and_accents_in_its_path(parquet, tmp_path):
    runs = tmp_path / "mes essais é (1)"
    overrides = [*LOCAL, *parquet, f"data.cache_folder={tmp_path}/un cache", f"output_dir={runs}"]
    done = job(*overrides, prefix="ulimit -n 64; ")
    of_few = "WARNING: (kNN is measured on 30 images of |the embeddings of 256 images have almost one direction )"
    finished(done, runs, also_usual=of_few)
    (command,) = re.findall("MLflow UI: (.*)", done.stdout)
    assert shlex.split(command)[-1] == f"sqlite:///{runs}/mlflow.db"


@pytest.mark.slow
def test_a_cache_in_a_read_only_home_is_one_line(parquet, tmp_path):
    done = job(*LOCAL, *parquet, f"output_dir={tmp_path}/runs", HOME="/proc")
    assert done.returncode == 3
    assert "error: cache folder /proc/.cache/ssl_sec" in done.stderr and "Traceback" not in done.stderr


def test_the_environments_cluster_comes_first(environment, tmp_path):
    environment.setenv("RAY_TMPDIR", str(tmp_path))
    (tmp_path / "ray").mkdir()
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        (tmp_path / "ray" / "ray_current_cluster").write_text(address)
        found = {}
        for name in ("head:6379", "local", ""):
            environment.setenv("RAY_ADDRESS", name)
            found[name] = find_cluster()
        assert found == {"head:6379": "head:6379", "local": None, "": address}
    assert find_cluster() is None  # the cluster was killed


@pytest.mark.slow
@pytest.mark.distributed
def test_ray_with_few_open_files_is_one_line(tmp_path):
    done = job(*QUICK, "runtime=ray", f"output_dir={tmp_path}", prefix="ulimit -n 64; ", RAY_ADDRESS=None)
    assert done.returncode == 2
    assert "may open 64 files (ulimit -n), and Ray needs 512 or more; allowed:" in done.stderr.splitlines()[-1]
    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    (run,) = client.search_runs([client.get_experiment_by_name("digits").experiment_id])
    assert run.info.status == "FAILED"
