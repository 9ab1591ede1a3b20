import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

from ssl_sec.__main__ import main
from ssl_sec.edges.commands import run_command
from ssl_sec.edges.packaging import JOB_ID_VARIABLE
from tests.edges.conftest import WHOLE
from tests.jobs import pretrain

ROOT = Path(__file__).parents[2]
SHOWN = [
    "pretrain",
    "probe",
    "finetune",
    "metric_learning",
    "face",
    "preview",
    "ablate",
    "study",
    "tune",
    "transfer",
    "export",
    "embed",
    "neighbours",
    "select",
    "align",
    "report",
    "replay",
    "submit",
]


def test_a_run_prints_its_settings_and_progress(quick, caplog):
    caplog.set_level("INFO", logger="ssl_sec")
    output = pretrain([*quick, *WHOLE, "runtime=local", "run_name=it", "probe.enabled=true"])
    said = [record.getMessage() for record in caplog.records if record.name.startswith("ssl_sec")]
    # Training does not wait for MLflow, whose page is named when there is one.
    pages = [line for line in said if line.startswith(("MLflow UI: ", "then open http"))]
    assert [page.partition(" ")[0] for page in pages] == ["MLflow", "then"] * 2
    expected = [
        *("device: cpu (", "importing ", "folder: ", "connecting to MLflow at sqlite:"),
        *("loading digits", "data: digits/train, 1,437 images of 1 x 8 x 8, 10 classes"),
        *("computing in ", "training 10 steps of 256 "),
        *("measuring kNN and RankMe on 1,437 ", "drawing the plots"),
        *("uploading plots and weights to MLflow", "folder: ", "connecting to MLflow"),
        *("loading digits and the encoder", "computing the features", "training a linear probe", "measuring the probe"),
        *("drawing the plots", "uploading plots"),
    ]
    others = [line for line in said if line not in pages]
    assert len(others) == len(expected), said
    for line, start in zip(others, expected, strict=True):
        assert line.startswith(start)
    run_id = (Path(output.split("folder: ")[1].split("\n")[0]).parent / "it/mlflow_run_id").read_text()
    assert run_id in pages[1]


def test_a_command_exits_quickly_but_in_order():
    """Exit handlers run and output is flushed, but no object is destroyed."""
    code = (
        "import atexit, sys\nfrom ssl_sec.edges import commands\n"
        "class Large:\n    def __del__(self): print('taken apart')\n"
        "def run(arguments, supervise):\n"
        "    global large; large = Large()\n"
        "    atexit.register(print, 'registered')\n"
        "    print(*arguments)\n"
        "    return 3\n"
        "commands.run_command = run\n"
        "commands.main('given')"
    )
    done = subprocess.run([sys.executable, "-c", code, "more"], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout, done.stderr) == (3, "given more\nregistered\n", "")


def test_windows_is_refused_in_one_line(monkeypatch, capsys):
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(SystemExit) as refused:
        main("pretrain")
    assert refused.value.code == 2
    assert capsys.readouterr().err == "error: Windows is not supported; allowed: Linux, also in WSL 2 on Windows\n"


@pytest.mark.parametrize("module", ["ssl_sec", "jobs.report"])
def test_a_ctrl_c_during_the_imports_ends_a_command_without_a_traceback(tmp_path, module):
    (tmp_path / "hydra.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    environment = {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    # A process that a shell has started in the background ignores SIGINT, and those that it starts do, too.
    code = "import runpy, signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    code += f"runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env=environment)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.parametrize("arguments", [["pretrain", "experiment=digits"], ["stop", "a"]])
def test_a_ctrl_c_that_a_library_would_catch_keeps_a_job_from_being_sent_or_stopped(tmp_path, arguments):
    interrupted = "import os, signal\ntry:\n    os.kill(os.getpid(), signal.SIGINT)\nexcept BaseException:\n    pass\n"
    (tmp_path / "requests.py").write_text(interrupted)
    given = ["--address", "http://127.0.0.1:9", *arguments]
    code = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    code += f"from ssl_sec.edges import commands; commands.main('submit', *{given})"
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env=environment)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]])
def test_the_help_has_a_line_for_each_command(arguments, capsys):
    assert run_command(arguments) == 0
    output = capsys.readouterr().out
    listed = re.findall(r"^    (\w+) +(\S.*\.)$", output, re.M)
    assert [name for name, _ in listed] == SHOWN
    assert max(map(len, output.splitlines())) <= 100


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("pretran", "command: found 'pretran'; did you mean 'pretrain'?"),
        ("metric-lerning", "command: found 'metric-lerning'; did you mean 'metric_learning'?"),
        ("experiment=digits", "command: found 'experiment=digits'; "),
    ],
)
def test_an_unknown_command_is_one_line_with_the_nearest(command, message, capsys):
    assert run_command([command]) == 2
    output = capsys.readouterr().err
    assert output.startswith(f"error: {message}")
    assert output.count("\n") == 1


def test_the_pipeline_command_has_help(capsys):
    with pytest.raises(SystemExit) as ended:
        run_command(["pipeline", "--help"])
    assert ended.value.code == 0
    output = capsys.readouterr().out
    assert output.startswith(
        "usage: python -m jobs.pipeline [-h] PLAN\n\nJobs of a Ray cluster that wait for one another"
    )
    assert "python -m jobs.submit writes the plan" in output


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (None, "PLAN: {path} cannot be read: "),
        ("{", "PLAN: {path} cannot be read: "),
        ("{}", "only a job of a Ray cluster can start others; send them with: ssl-sec submit"),
    ],
)
def test_a_plan_that_cannot_be_carried_out_is_one_line(plan, message, tmp_path: Path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["/usr/bin/ssl-sec"])
    monkeypatch.delenv(JOB_ID_VARIABLE, raising=False)
    path = tmp_path / "plan.json"
    if plan is not None:
        path.write_text(plan)
    assert run_command(["pipeline", str(path)]) == 2
    output = capsys.readouterr().err
    assert output.startswith(f"error: {message.format(path=path)}")
    assert output.endswith("ssl-sec submit writes one\n") or plan == "{}"
    assert output.count("\n") == 1


def test_a_command_may_be_written_with_a_hyphen(capsys):
    assert run_command(["metric-learning", "experiment=digits_retrieval", "--cfg", "job"]) == 0
    assert "recipe: digits_retrieval" in capsys.readouterr().out


def test_every_command_is_a_module_of_a_checkout_and_both_do_the_same():
    modules = {path.stem for path in (ROOT / "jobs").glob("*.py")} - {"__init__"}
    assert modules == {*SHOWN, "pipeline"}
    results = [
        subprocess.run([sys.executable, "-m", *command, "epoch=3"], capture_output=True, text=True, cwd=ROOT)
        for command in (["jobs.pretrain"], ["ssl_sec", "pretrain"])
    ]
    assert [each.returncode for each in results] == [2, 2]
    assert results[0].stderr == results[1].stderr == "error: epoch: unknown key; did you mean 'epochs'?\n"


def test_the_wheel_has_one_package_its_configs_and_the_command(tmp_path: Path):
    (wheel,) = WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    installed = tmp_path / "installed"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(installed)
    tops = {path.name for path in installed.iterdir()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"ssl_sec"}
    assert (installed / "ssl_sec" / "py.typed").is_file()
    (about,) = installed.glob("*.dist-info/entry_points.txt")
    assert "ssl-sec = ssl_sec.__main__:main" in about.read_text()
    # The script that pip makes of the entry point.
    program = tmp_path / "ssl-sec"
    program.write_text("import sys; from ssl_sec.__main__ import main; sys.exit(main())")
    command = [sys.executable, str(program), "pretrain", "experiment=digits", "--cfg", "job"]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=tmp_path, env={"PYTHONPATH": str(installed)}, timeout=300
    )
    assert "recipe: digits" in done.stdout, done.stderr
    output = subprocess.run(
        [*command[:3], "--help"], capture_output=True, text=True, cwd=tmp_path, env={"PYTHONPATH": str(installed)}
    ).stdout
    assert output.startswith("usage: ssl-sec pretrain ")
