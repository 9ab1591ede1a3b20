import errno
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ssl_sec.edges.command_line import run_job
from ssl_sec.edges.run.signals import handled
from ssl_sec.edges.tables import in_table
from ssl_sec.errors import ConfigError, DataError, Stopped, StorageError
from tests.jobs import pretrain


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("a: found 1, must be 2"), 2),
        (DataError("x.png: not an image"), 3),
        (StorageError("disk full"), 4),
        (Stopped("stopped after step 3"), 130),
        (KeyboardInterrupt(), 130),
    ],
)
def test_an_error_is_one_line_and_its_exit_code(error, code, capsys):
    def failing(overrides):
        raise error

    assert run_job("pretrain", failing, []) == code
    output = capsys.readouterr().err.strip()
    assert str(error) in output
    assert "\n" not in output


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_job_that_is_asked_to_stop_cleans_up(number, capsys):
    cleaned = []

    def stopped(overrides):
        try:
            os.kill(os.getpid(), number)
            return "not stopped"
        finally:
            cleaned.append(overrides)

    before = signal.signal(number, signal.SIG_DFL)  # under nohup, SIGHUP is ignored
    try:
        with handled(lambda *_: pytest.fail("the job did not handle the signal")):
            assert run_job("export", stopped, ["a=1"]) == 130
    finally:
        signal.signal(number, before)
    assert cleaned == [["a=1"]]
    assert capsys.readouterr().err == "interrupted\n"


def test_a_full_disk_is_one_line_wherever_it_is_met(capsys):
    def failing(overrides):
        raise OSError(errno.ENOSPC, "No space left on device", "/reports/table.csv")

    assert run_job("report", failing, []) == 4
    assert capsys.readouterr().err == "error: /reports/table.csv cannot be written: No space left on device\n"


def test_a_job_prints_its_result(capsys):
    assert run_job("pretrain", lambda overrides: f"given {list(overrides)}", ["a=1"]) == 0
    assert capsys.readouterr().out == "given ['a=1']\n"


def test_help_explains_groups_experiments_and_keys(capsys):
    assert run_job("pretrain", pretrain, ["--help"]) == 0
    output = capsys.readouterr().out
    assert "usage: python -m jobs.pretrain" in output
    assert "sec_ema       SEC-EMA (Eq. 31)" in output
    assert "cifar10_sec_100 86.87" in output
    assert "optimiser.learning_rate=0.5 " in output


@pytest.mark.parametrize("given", [["--config-dir", "{own}"], ["--config-dir={own}"]])
def test_user_configs_are_found_in_the_given_folder(given, tmp_path, capsys):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text("# Mine.\ndefaults: [digits]\nepochs: 30\n")
    folder = [argument.format(own=tmp_path) for argument in given]
    assert run_job("pretrain", pretrain, ["experiment=mine", *folder, "--cfg", "job"]) == 0
    assert "epochs: 30\n" in capsys.readouterr().out
    assert run_job("pretrain", pretrain, [*folder, "--help"]) == 0
    assert re.search(r" mine yours, \S+/mine.yaml: Mine\. ", " ".join(capsys.readouterr().out.split()))
    assert run_job("pretrain", pretrain, ["experiment=mine"]) == 2
    assert run_job("pretrain", pretrain, ["--config-dir"]) == 2
    assert capsys.readouterr().err.endswith("error: --config-dir: found nothing, must be a folder that exists\n")


def test_cfg_prints_the_configuration_and_runs_nothing(capsys):
    assert run_job("pretrain", pretrain, ["experiment=cifar10_sec_100", "--cfg", "job"]) == 0
    assert "recipe: cifar10_sec_100" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("overrides", "code", "message"),
    [
        (["loss.temperature=0"], 2, "loss.temperature: found 0.0, must be > 0"),
        (["constraint=sec", "constraint.eta=-1"], 2, "constraint.eta: found -1.0, must be ≥ 0"),
        (["encoder=resnet51"], 2, "did you mean 'resnet50'"),
        (["global_batch_size=255", "runtime=ray", "runtime.num_workers=2"], 2, "allowed: 1, 3, 5, 15, 17, 51, 85, 255"),
        (["data=cifar10", "data.root={tmp_path}"], 3, "set data.download=true"),
        (["data=folder", "data.root={tmp_path}"], 3, "data.root must hold"),
        (["data=parquet", "data.train=[x.parquet]", "data.test=[x.parquet]"], 3, "no such file"),
        (["resume=true", "run_name=never"], 2, "holds no run"),
        (["output_dir=/proc/none"], 4, "cannot be written"),
    ],
)
def test_bad_input_is_one_line(overrides, code, message, tmp_path: Path, capsys):
    given = [override.format(tmp_path=tmp_path) for override in overrides]
    assert run_job("pretrain", pretrain, ["runtime=local", f"output_dir={tmp_path}", *given]) == code
    output = capsys.readouterr().err.strip()
    assert message in output
    assert output.startswith("error: ")
    assert "\n" not in output


@pytest.mark.slow
def test_the_local_runtime_imports_neither_ray_nor_lightning(tmp_path: Path):
    code = (
        "import sys; from functools import partial; from tests.jobs import pretrain\n"
        "from ssl_sec.recipes.pretraining import figures\n"  # t-SNE of all digits would take most of the time
        "figures.features_figure = partial(figures.features_figure, max_points=60)\n"
        "pretrain(['experiment=digits', 'epochs=1', 'data.max_images=256', 'encoder.width=0.125', 'runtime=local', "
        "'tracking.system_metrics=false', "
        f"'output_dir={tmp_path}'])\n"
        "sys.exit(', '.join({'ray', 'pytorch_lightning', 'lightning'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_a_table_is_aligned():
    table = in_table(["constraint", "top-1"], ["sec", "86.87"], ["none", "84.76"])
    assert table.splitlines() == [
        "constraint  top-1",
        "-----------------",
        "sec         86.87",
        "none        84.76",
    ]
