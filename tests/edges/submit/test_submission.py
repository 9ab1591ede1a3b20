"""Checks before a job is sent, and which files are sent; no cluster is needed."""

import json
import shlex
import subprocess
from functools import partial
from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient
from ray.job_submission import JobDetails, JobStatus, JobType

from ssl_sec.edges.command_line import run_job
from ssl_sec.edges.composition.compose import compose, composed_yaml
from ssl_sec.edges.composition.config_folders import own_configs
from ssl_sec.edges.folder.folder import RunFolder
from ssl_sec.edges.packaging import JOB_ID_VARIABLE, checkout, packaged
from ssl_sec.edges.run.job_values import values_of
from ssl_sec.edges.submit.cluster import Cluster, as_table, entrypoint, exit_code
from ssl_sec.edges.submit.command import submit
from ssl_sec.edges.submit.orders import Order, check_command, expand_sweep, following_stages, passed_environment
from ssl_sec.edges.submit.pipeline import PipelinePlan, _Pipeline
from ssl_sec.edges.submit.submission import _point_name, make_job_id, submit_order
from ssl_sec.errors import ConfigError
from ssl_sec.recipes.config import TrackingConfig
from ssl_sec.settings import from_values, to_values
from tests.edges.conftest import git
from tests.jobs import configured

DIGITS = ("experiment=digits", "output_dir=/shared/runs")


def details(status: JobStatus, code: int | None = None) -> JobDetails:
    return JobDetails(
        type=JobType.SUBMISSION,
        submission_id="digits-a",
        entrypoint="exec python",
        status=status,
        driver_exit_code=code,
        start_time=1_000,
        end_time=3_726_000,
        metadata={"recipe": "digits"},
    )


@pytest.mark.parametrize(
    ("status", "driver", "expected"),
    [
        ("SUCCEEDED", 0, 0),
        ("FAILED", 3, 3),
        ("FAILED", None, 1),
        ("FAILED", 0, 1),
        ("FAILED", -9, 137),
        ("STOPPED", None, 130),
        ("STOPPED", 0, 130),
    ],
)
def test_every_outcome_has_its_exit_code_and_a_stop_is_no_success(status, driver, expected):
    assert exit_code(details(JobStatus(status), driver)) == expected


def test_a_run_that_is_resumed_on_a_cluster_is_named_by_its_folder(tmp_path, monkeypatch):
    config = configured("pretrain", ["experiment=digits", "seed=3", "run_name=it"])
    folder = RunFolder(tmp_path / "my runs" / "digits" / "it")
    folder.start(to_values(config))
    monkeypatch.chdir(tmp_path)
    for words in (["resume=my runs/digits/it"], ["resume=it", "output_dir='my runs'"]):
        ((point, _),) = expand_sweep([*words, "log_every_steps=5"])
        command = check_command("pretrain", point, None, is_local=False)
        assert (command.name, command.recipe) == ("it", "digits")
        assert f"resume={folder.path}" in command.overrides
        assert not any(override.startswith("run_name=") for override in command.overrides)
        _, _, typed = entrypoint("pretrain", command.overrides).partition("-m ssl_sec pretrain ")
        values = values_of("pretrain", shlex.split(typed))
        assert (values["seed"], values["log_every_steps"]) == (3, 5)
    with pytest.raises(ConfigError, match="resume: found 'none'"):
        check_command("pretrain", ["resume=none"], None, is_local=True)


def test_jobs_are_shown_with_state_and_duration():
    (_, _, row) = as_table([details(JobStatus.FAILED)]).splitlines()
    assert row.split() == ["digits-a", "failed", "1970-01-01", "00:00", "1:02:05", "digits"]
    assert as_table([]) == "no jobs"


def test_a_job_is_checked_before_it_is_sent_and_keeps_its_name():
    command = check_command("pretrain", DIGITS, "mine", is_local=False)
    assert (command.name, command.recipe) == ("mine", "digits")
    assert (
        entrypoint(command.job, command.overrides) == 'echo "python: $(command -v python)"; '
        "exec python -m ssl_sec pretrain experiment=digits output_dir=/shared/runs run_name=mine"
    )
    unnamed = check_command("pretrain", (*DIGITS, "seed=3"), None, is_local=False)
    assert unnamed.name.startswith("digits-resnet18-sec-s3-2") and f"run_name={unnamed.name}" in unnamed.overrides
    odd = check_command("pretrain", (*DIGITS, "recipe='a; rm -rf x'"), "n", is_local=False)
    assert shlex.split(entrypoint(odd.job, odd.overrides))[-2:] == ["recipe='a; rm -rf x'", "run_name=n"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("constraint.etta=1",), "constraint.etta: unknown key; did you mean 'constraint.eta'"),
        (("epochs=-1",), "epochs: found -1, must be ≥ 0"),
        (("tracking.uri=http://ada:geheim@host",), r"tracking.uri=http://\*\*\*@host: found credentials"),
        (("output_dir=runs",), "output_dir: found 'runs', must be an absolute path on storage that all nodes share"),
        (("runtime.num_workers=3",), "3 workers cannot share"),
    ],
)
def test_invalid_requests_are_refused_before_a_cluster_is_asked(overrides, message):
    with pytest.raises(ConfigError, match=message):
        check_command("pretrain", (*DIGITS, *overrides), None, is_local=False)


def test_a_job_names_its_python_before_anything_else(tmp_path):
    python = tmp_path / "a place" / "python"
    python.parent.mkdir()
    python.write_text('#!/bin/sh\necho "$@"\n')
    python.chmod(0o755)

    def printed(path: str, line: str) -> str:
        return subprocess.run(["sh", "-c", line], env={"PATH": path}, capture_output=True, text=True).stdout

    expected = f"python: {python}\n-m ssl_sec pretrain seed=1\n"
    assert printed(f"{python.parent}:/usr/bin:/bin", entrypoint("pretrain", ["seed=1"])) == expected
    assert printed("/usr/bin:/bin", entrypoint("pretrain", ["seed=1"], str(python))) == expected


class SentJobs(Cluster):
    """A cluster that keeps what was sent to it."""

    address = "http://127.0.0.1:8265"

    def __init__(self) -> None:
        self.sent = []

    def submit(self, *job) -> None:
        self.sent.append(job)


def test_a_pipeline_finds_its_plan_in_a_file(tmp_path):
    cluster = SentJobs()
    overrides = ("experiment=digits", f"output_dir={tmp_path}", "constraint.eta=0.1,0.5")
    submit_order(Order(job="pretrain", overrides=overrides, name="eta", then="probe", python="/opt/python"), cluster)
    ((line, job_id, metadata, _, files),) = cluster.sent
    assert line.endswith("exec /opt/python -m ssl_sec pipeline plan.json")
    plan = from_values(PipelinePlan, json.loads(files["plan.json"]))
    assert [point.stages[0].name for point in plan.points] == ["eta-eta0.1", "eta-eta0.5"]
    assert job_id.startswith("digits-eta-") and metadata["job_name"] == "eta"


def test_the_run_of_a_sweep_has_the_tags_that_all_its_runs_have(tmp_path, monkeypatch):
    monkeypatch.delenv(JOB_ID_VARIABLE, raising=False)
    cluster = SentJobs()
    tags = ("+tracking.tags.team=vision", "+tracking.tags.try=1,2", "seed=0,1")
    submit_order(
        Order(job="pretrain", overrides=("experiment=digits", f"output_dir={tmp_path}", *tags), name="n"), cluster
    )
    plan = from_values(PipelinePlan, json.loads(cluster.sent[0][-1]["plan.json"]))
    assert (len(plan.points), plan.tracking.tags) == (4, {"team": "vision"})
    sweep = _Pipeline(plan, cluster, "job")._parent()
    try:
        run = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db").get_run(sweep.run_id)
        assert run.data.tags.items() >= {"team": "vision", "recipe": "digits", "job": "sweep"}.items()
        assert "try" not in run.data.tags
    finally:
        sweep.end("KILLED", None, {}, "")


def test_one_job_has_its_overrides_in_its_command_and_its_name_in_ray(tmp_path):
    cluster = SentJobs()
    submit_order(Order(job="pretrain", overrides=("experiment=digits", f"output_dir={tmp_path}"), name="mine"), cluster)
    ((line, _, metadata, _, files),) = cluster.sent
    assert f"output_dir={tmp_path} run_name=mine" in line
    assert (metadata["job_name"], files) == ("mine", {})


def test_on_this_machine_a_relative_folder_is_that_of_the_user(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert (
        f"output_dir={tmp_path}/runs"
        in check_command("pretrain", ("experiment=digits",), None, is_local=True).overrides
    )


def test_credentials_of_the_environment_are_not_sent(monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://mlflow:5000")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "geheim")
    assert passed_environment(is_local=False)["MLFLOW_TRACKING_URI"] == "http://mlflow:5000"
    assert "geheim" not in passed_environment(is_local=False).values()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://ada:geheim@mlflow:5000")
    with pytest.raises(
        ConfigError, match=r"found credentials in http://\*\*\*@mlflow:5000, which the cluster's dashboard"
    ):
        passed_environment(is_local=False)


def test_ids_are_new_for_a_name_that_was_given():
    assert make_job_id("digits", "seed0-20260101-000000", is_new=True) == "digits-seed0-20260101-000000"
    assert make_job_id("digits", "mine", is_new=False).startswith("digits-mine-2")
    assert make_job_id("digits", "a b/c", is_new=True) == "digits-a-b-c"


def test_a_sweep_is_every_combination():
    overrides = ["experiment=digits", "constraint.eta=0.1,0.5", "seed=0,1", "probe.learning_rates=[0.1,1.0]"]
    points = expand_sweep(overrides)
    assert [swept for _, swept in points] == [
        ("constraint.eta=0.1", "seed=0"),
        ("constraint.eta=0.1", "seed=1"),
        ("constraint.eta=0.5", "seed=0"),
        ("constraint.eta=0.5", "seed=1"),
    ]
    assert points[3][0] == ("experiment=digits", "constraint.eta=0.5", "seed=1", "probe.learning_rates=[0.1,1.0]")
    assert expand_sweep(["seed=3"]) == [(("seed=3",), ())]
    assert _point_name("base", ("constraint.eta=0.1", "experiment=a/b")) == "base-eta0.1-experimenta-b"
    with pytest.raises(ConfigError, match="'seed': not understood"):
        expand_sweep(["seed"])
    with pytest.raises(ConfigError, match=r"^seed: found interval\(0,1\); allowed in a sweep: values with commas, or"):
        expand_sweep(["++seed=interval(0,1)"])
    with pytest.raises(ConfigError, match=r"^seed: found glob\(\*\); allowed in a sweep"):
        expand_sweep(["seed=glob(*)"])


def test_the_probe_after_a_pretraining_is_the_one_that_its_configuration_describes():
    command = check_command(
        "pretrain", (*DIGITS, "runtime.num_workers=2", "tracking.uri=http://mlflow"), "mine", is_local=False
    )
    (stage,) = following_stages("probe probe.epochs=7", command, is_local=False)
    trained = configured("pretrain", command.overrides)
    probed = configured("probe", stage.overrides)
    assert probed.probe.labels_per_class == trained.probe.labels_per_class == 10
    assert (probed.probe.epochs, probed.run_name, probed.output_dir) == (7, "mine-probe", "/shared/runs")
    assert (probed.runtime.num_workers, probed.tracking.uri) == (2, "http://mlflow")
    assert following_stages(None, command, is_local=False) == ()
    with pytest.raises(ConfigError, match="--then: found 'ablate'; allowed: probe"):
        following_stages("ablate", command, is_local=False)
    with pytest.raises(ConfigError, match="probe.epoch: unknown key"):
        following_stages("probe probe.epoch=7", command, is_local=False)


def test_a_plan_round_trips_to_the_cluster():
    command = check_command("pretrain", DIGITS, "mine", is_local=False)
    stages = [to_values(command), {"job": "probe", "overrides": [], "name": "mine-probe", "recipe": "probe"}]
    values = {
        "name": "n",
        "recipe": "digits",
        "output_dir": "/shared/runs",
        "tracking": to_values(TrackingConfig(tags={"team": "vision"})),
        "parallel": 2,
        "points": [{"swept": ["seed=0"], "stages": stages}],
    }
    plan = from_values(PipelinePlan, values)
    assert not plan.is_sweep
    assert json.loads(json.dumps(to_values(plan))) == values


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["lst"], "found 'lst'; did you mean 'list'?"),
        (["pretrain", "experiment=digits", "--parallel", "0"], "--parallel: found 0, must be ≥ 1"),
        (["probe", "run=abc", "--then", "probe"], "--then: found 'probe' after probe"),
        (["pretrain", "experiment=digts"], "experiment: found 'digts'; did you mean 'digits'?"),
        (
            ["list", "--address", "http://127.0.0.1:1"],
            "no Ray cluster at http://127.0.0.1:1 .*; start one with `ray start --head`",
        ),
    ],
)
def test_a_wrong_command_line_is_one_line(arguments, message):
    with pytest.raises(ConfigError, match=message):
        submit(arguments)


@pytest.fixture
def small_checkout(tmp_path):
    root = tmp_path / "checkout"
    for name in ("ssl_sec/a.py", "ssl_sec/__pycache__/a.pyc", "jobs/b.py", "configs/c.yaml", "runs/big", "tests/t.py"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("x" * 100)
    (root / "pyproject.toml").write_text("[project]")
    (root / "configs/ignored.bin").write_bytes(b"0" * 2**20)
    (root / ".gitignore").write_text("*.bin\n")
    return root


def names(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_only_code_and_configs_are_sent(small_checkout):
    expected = ["configs/c.yaml", "jobs/.env.example", "jobs/b.py", "pyproject.toml", "ssl_sec/a.py"]
    for name in (".env", ".env.local", "mlflow.env", ".env.example"):
        (small_checkout / "jobs" / name).write_text("PASSWORD=geheim")
    with packaged(small_checkout) as folder:
        assert names(folder) == sorted([*expected, "configs/ignored.bin"])  # without git nothing is known to be ignored
    git(small_checkout, "init", "-q")
    git(small_checkout, "add", "-A")
    git(small_checkout, "commit", "-qm", "first")
    (small_checkout / "ssl_sec" / "new.py").write_text("x")
    with packaged(small_checkout) as folder:
        assert names(folder) == sorted([*expected, "ssl_sec/new.py"])
    assert not folder.exists()
    with packaged(small_checkout, {"plan.json": "{}"}) as folder:
        assert names(folder) == sorted([*expected, "plan.json", "ssl_sec/new.py"])


def test_a_checkout_that_is_too_large_is_refused_with_its_biggest_folders(small_checkout):
    (small_checkout / "configs/data").mkdir()
    (small_checkout / "configs/data/images").write_bytes(b"0" * 3 * 2**20)
    with (
        pytest.raises(
            ConfigError, match=r"has 4 MiB .*, allowed: 2 MiB; the biggest folders are configs/data \(3 MiB\), configs"
        ),
        packaged(small_checkout, limit_mib=2.0),
    ):
        pass


def test_without_a_checkout_only_the_files_of_the_job_are_sent():
    with packaged(None, {"plan.json": "{}"}) as folder:
        assert names(folder) == ["plan.json"]
    with packaged(None) as folder:
        assert folder is None


def test_this_checkout_is_small_enough_to_send():
    with packaged(checkout(), limit_mib=4.0) as folder:
        assert (folder / "jobs/pipeline.py").is_file()
        assert (folder / "configs/pretrain.yaml").is_file()
        assert not (folder / "tests").exists()


class ClusterOfNobody(Cluster):
    """Keeps what it was sent."""

    def __init__(self) -> None:
        pass

    address = "http://head:8265"

    def submit(self, line, job_id, metadata, environment, files=None) -> None:
        self.words, self.files = shlex.split(line), files or {}

    def lay_out(self, folder: Path) -> Path:
        """The working folder that the job would have."""
        for name, text in self.files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
        return folder


@pytest.fixture
def own(tmp_path) -> Path:
    (tmp_path / "own" / "experiment").mkdir(parents=True)
    (tmp_path / "own" / "experiment" / "mine.yaml").write_text("# Mine.\ndefaults: [digits]\nepochs: 30\n")
    (tmp_path / "there").mkdir()
    return tmp_path / "own"


def test_user_experiments_are_sent_with_the_job(own, tmp_path, monkeypatch, capsys):
    cluster = ClusterOfNobody()
    with own_configs(str(own)):
        submit_order(Order(job="pretrain", overrides=("experiment=mine", "output_dir=/shared/runs"), name="n"), cluster)
    monkeypatch.chdir(cluster.lay_out(tmp_path / "there"))
    arguments = cluster.words[cluster.words.index("pretrain") + 1 :]
    assert run_job("pretrain", lambda overrides: str(compose("pretrain", overrides)["epochs"]), arguments) == 0
    assert capsys.readouterr().out == "30\n"


def test_every_stage_of_a_pipeline_finds_user_experiments(own, tmp_path, monkeypatch, capsys):
    cluster = ClusterOfNobody()
    overrides = ("experiment=mine", "output_dir=/shared/runs", "seed=0,1")
    with own_configs(str(own)):
        submit_order(Order(job="pretrain", overrides=overrides, name="n", then="probe"), cluster)
    plan = from_values(PipelinePlan, json.loads(cluster.files.get("plan.json") or cluster.words[-1]))
    monkeypatch.chdir(cluster.lay_out(tmp_path / "there"))
    for stage in (stage for point in plan.points for stage in point.stages):
        show = composed_yaml if stage.job == "pretrain" else lambda job, overrides: "probed"
        assert run_job(stage.job, partial(show, stage.job), [*stage.overrides]) == 0
    output = capsys.readouterr().out
    assert (output.count("epochs: 30\n"), output.count("probed\n")) == (2, 2)


def test_unused_user_configs_are_not_sent(own):
    cluster = ClusterOfNobody()
    with own_configs(str(own)):
        submit_order(
            Order(job="pretrain", overrides=("experiment=digits", "output_dir=/shared/runs"), name="n"), cluster
        )
    assert not any(name.startswith("own_configs") for name in cluster.files)
    assert not any("config-dir" in word for word in cluster.words)


def test_submit_takes_a_folder_of_user_configs(own, monkeypatch):
    with pytest.raises(ConfigError, match="^experiment: found 'mine'"):
        submit(["pretrain", "experiment=mine"])
    with pytest.raises(ConfigError, match="no Ray cluster"):
        submit(["pretrain", "experiment=mine", "--config-dir", str(own), "--address", "http://127.0.0.1:9"])
