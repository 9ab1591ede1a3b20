"""The values of jobs that depend on a run; with a real run of digits in MLflow on sqlite."""

import dataclasses
import json
import re
import shutil
import socket
from pathlib import Path

import pytest
import yaml
from mlflow.tracking import MlflowClient

from ssl_sec.edges.command_line import run_job
from ssl_sec.edges.composition.compose import compose
from ssl_sec.edges.composition.keys import kind_of
from ssl_sec.edges.folder.folder import RunFolder
from ssl_sec.edges.folder.stored_config import stored_values
from ssl_sec.edges.run.driver import run_training
from ssl_sec.edges.run.job_values import quoted, values_of
from ssl_sec.errors import ConfigError
from ssl_sec.recipes.pretraining.config import PretrainConfig
from ssl_sec.recipes.probing.config import ProbeJobConfig
from ssl_sec.recipes.registry import PRETRAIN
from ssl_sec.settings import from_values, to_values
from tests.edges.conftest import QUICK
from tests.jobs import configured, pretrain, probe

SETTINGS = ("probe.learning_rates=[0.01,0.1]", "probe.epochs=8", "probe.labels_per_class=5")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory):
    """A run whose probe has settings of its own."""
    given = [*QUICK, *SETTINGS, "runtime=local", "run_name=whole", f"output_dir={tmp_path_factory.mktemp('runs')}"]
    return run_training(PRETRAIN, configured("pretrain", given))


@pytest.fixture
def output_dir(finished) -> Path:
    return finished.folder.path.parents[1]


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch, tmp_path):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))


def test_a_probe_takes_its_runs_settings_and_overrides(finished, output_dir):
    for word in ("whole", finished.run_id, finished.run_id[:6], str(finished.folder.path)):
        settings = values_of("probe", [f"run={word}", f"output_dir={output_dir}"])["probe"]
        assert settings["learning_rates"] == [0.01, 0.1]
        assert (settings["epochs"], settings["labels_per_class"], settings["decay_at"]) == (8, 5, [0.6])
    typed = values_of("probe", ["run=whole", f"output_dir={output_dir}", "probe.epochs=6", "probe.momentum=0.5"])
    assert typed["probe"] == {**settings, "epochs": 6, "momentum": 0.5}


@pytest.mark.parametrize("job", ["probe", "transfer", "finetune", "embed", "export"])
def test_a_job_about_the_folder_of_a_run_has_its_output_folder(job, finished, output_dir, tmp_path, monkeypatch):
    more = {"transfer": ["sets=[digits]"], "embed": ["output=x"], "export": ["format=safetensors"]}.get(job, [])
    monkeypatch.chdir(tmp_path)
    here = finished.folder.path
    assert values_of(job, [f"run={here}", *more])["output_dir"] == str(output_dir)
    assert values_of(job, [f"run={here}", "output_dir=mine", *more])["output_dir"] == "mine"
    shutil.copytree(here, tmp_path / "copied")  # alone, so the folder above it is none of runs
    assert values_of(job, [f"run={tmp_path / 'copied'}", *more])["output_dir"] == "runs"


@pytest.mark.parametrize("job", ["probe", "transfer", "finetune", "embed", "export"])
@pytest.mark.parametrize(("typed", "found"), [("run=true", "true"), ("+run.seed=0", "{'seed': 0}")])
def test_a_run_that_is_no_text_is_one_line(job, typed, found):
    more = {"transfer": ["sets=[digits]"], "embed": ["output=x"], "export": ["format=safetensors"]}.get(job, [])
    with pytest.raises(ConfigError, match=re.escape(f"run: found {found}, must be a string")):
        from_values(kind_of(job), values_of(job, [typed, *more]))


def test_the_probe_of_a_folder_is_next_to_it_in_folders_and_in_mlflow(finished, output_dir, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = [f"run={finished.folder.path}", "run_name=beside", "probe.epochs=2", "tracking.system_metrics=false"]
    probe([*given, "runtime=local"])
    made = RunFolder(output_dir / "digits" / "beside")
    assert made.is_complete and made.identity.uri == finished.uri and not (tmp_path / "runs").exists()


@pytest.mark.parametrize("job", ["probe", "transfer", "finetune", "embed", "export"])
@pytest.mark.parametrize("name", ["Modèles", "~/runs", "a=b"])
def test_a_job_about_a_run_needs_no_quotes_for_its_output_folder(job, name, finished):
    more = {"transfer": ["sets=[digits]"], "embed": ["output=x"], "export": ["format=safetensors"]}.get(job, [])
    assert values_of(job, [f"run={finished.folder.path}", f"output_dir={name}", *more])["output_dir"] == name


def test_hydras_prefix_of_a_key_makes_no_difference(finished, output_dir):
    def both(job: str, *overrides: str) -> tuple[dict, dict]:
        return values_of(job, overrides), values_of(job, [f"++{override}" for override in overrides])

    plain, forced = both("probe", "run=whole", f"output_dir={output_dir}", "probe.epochs=2", "probe.decay_at=[]")
    assert forced == plain and plain["probe"]["epochs"] == 2
    plain, forced = both("pretrain", "resume=whole", f"output_dir={output_dir}", "runtime.device=cuda")
    assert forced == plain and plain["runtime"]["device"] == "cuda"
    for job, word, option in (("probe", "run", "probe=few_labels"), ("pretrain", "resume", "runtime=ray")):
        given = [f"{word}=whole", f"output_dir={output_dir}"]
        plain, *prefixed = (values_of(job, [*given, f"{prefix}{option}"]) for prefix in ("", "+", "++"))
        assert prefixed == [plain] * 2
    plain, forced = both("finetune", f"run={finished.folder.path}", "encoder.std=[0.5]")
    assert forced == plain and plain["encoder"]["std"] == [0.5]


def test_values_about_a_run_may_refer_to_the_jobs_other_keys(finished, output_dir):
    given = [f"run={finished.folder.path}", "output=x", "runtime=local"]
    assert values_of("embed", [*given, "output_dir=out/${checkpoint}"])["output_dir"] == "out/last"
    given = [f"run={finished.folder.path}", f"output_dir={output_dir}", "probe.seed=${runtime.num_loader_workers}"]
    values = values_of("probe", given)
    assert values["probe"]["seed"] == values["runtime"]["num_loader_workers"]


def test_a_resumed_run_may_refer_to_the_environment_and_to_its_other_keys(finished, output_dir, monkeypatch):
    monkeypatch.setenv("SCRATCH", str(output_dir))
    names = ["tracking.experiment=${oc.env:SCRATCH}/${seed}", "tracking.tags.who=Zoë"]
    values = values_of("pretrain", ["resume=whole", "output_dir=${oc.env:SCRATCH}", *names])
    assert values["tracking"]["experiment"] == f"{output_dir}/0" and values["tracking"]["tags"] == {"who": "Zoë"}
    with pytest.raises(ConfigError, match="^tracking.experiment: made from nothing"):
        values_of("pretrain", ["resume=whole", f"output_dir={output_dir}", "tracking.experiment=${nothing}"])


def test_a_given_probe_group_is_taken_whole(output_dir):
    values = values_of("probe", ["run=whole", f"output_dir={output_dir}", "probe=few_labels"])
    assert values["probe"] == compose("probe", ["run=x", "probe=few_labels"])["probe"]


def test_the_probes_configuration_is_printed_as_it_would_run(output_dir, capsys):
    assert run_job("probe", probe, ["run=whole", f"output_dir={output_dir}", "--cfg", "job"]) == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    assert shown["probe"]["learning_rates"] == [0.01, 0.1]
    assert run_job("probe", probe, ["--cfg", "job"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["run"] == "???"


def test_a_probe_finds_its_run_by_name_and_is_its_child(finished, output_dir, capsys):
    given = ["run=whole", f"output_dir={output_dir}", "run_name=again", "tracking.system_metrics=false"]
    assert run_job("probe", probe, given) == 0
    kept = stored_values(output_dir / "digits" / "again" / "config.yaml")
    assert kept["run"] == finished.run_id and kept["probe"]["learning_rates"] == [0.01, 0.1]
    child = MlflowClient(finished.uri).get_run((output_dir / "digits" / "again" / "mlflow_run_id").read_text())
    assert child.data.tags["mlflow.parentRunId"] == finished.run_id


def test_the_old_key_of_the_decays_names_the_new_one(output_dir, capsys):
    given = ["run=whole", f"output_dir={output_dir}", "probe.decay_epochs=[3]"]
    assert run_job("probe", probe, given) == 2
    output = capsys.readouterr().err
    assert "error: probe.decay_epochs: unknown key; give probe.decay_at, shares of probe.epochs" in output


def test_a_configuration_of_version_0_1_is_read_with_its_decays_as_shares(tmp_path: Path):
    values = compose("pretrain", ["experiment=digits", "probe.epochs=20"])
    del values["probe"]["decay_at"]
    old = {**values, "probe": {**values["probe"], "decay_epochs": [12, 15, 60]}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(old))
    config = from_values(PretrainConfig, stored_values(tmp_path / "config.yaml"))
    assert config.probe.decay_at == (0.6, 0.75)  # the third was never reached


def test_run_names_are_taken_literally():
    given = ["run=12345678", "resume=/a b/é (1)/it's", "folder='x'", "resume=auto", "epochs=3"]
    assert quoted(given) == [
        "run='12345678'",
        "resume='/a b/é (1)/it\\'s'",
        "folder='x'",
        "resume=auto",
        "epochs=3",
    ]
    assert quoted(quoted(given)) == quoted(given)
    assert compose("probe", quoted(["run=1e10"]))["run"] == "1e10"


@pytest.mark.parametrize(
    ("typed", "num_gpus", "runtime"),
    [
        ([], 0, "local"),
        ([], 1, "local"),
        ([], 2, "ray"),
        (["runtime=ray"], 0, "ray"),
        (["runtime.num_workers=2"], 0, "ray"),
        (["runtime.precision=bfloat16"], 0, "local"),
        (["runtime=local"], 2, "local"),
    ],
)
def test_a_probe_takes_one_process_where_there_is_no_cluster(typed, num_gpus, runtime, output_dir, monkeypatch, caplog):
    monkeypatch.setattr("torch.cuda.device_count", lambda: num_gpus)
    values = values_of("probe", ["run=whole", f"output_dir={output_dir}", *typed])
    assert values["runtime"]["name"] == runtime
    from_values(ProbeJobConfig, values)
    chosen = not any(key.startswith(("runtime=", "runtime.num")) for key in typed)
    assert (f"runtime={runtime}: " in caplog.text) == chosen


def test_the_cluster_of_this_machine_is_chosen(output_dir, tmp_path):
    noted = tmp_path / "ray" / "ray_current_cluster"
    noted.parent.mkdir()
    with socket.create_server(("127.0.0.1", 0)) as server:
        noted.write_text(f"127.0.0.1:{server.getsockname()[1]}")
        assert values_of("probe", ["run=whole", f"output_dir={output_dir}"])["runtime"]["name"] == "ray"


def test_a_resumed_run_has_its_own_configuration_and_overrides(finished, output_dir):
    stored = stored_values(finished.folder.config_path)
    beside = {"resume": True, "output_dir": str(output_dir)}
    for word in ("whole", finished.run_id[:7], str(finished.folder.path)):
        assert values_of("pretrain", [f"resume={word}", f"output_dir={output_dir}"]) == {**stored, **beside}
    given = [f"resume={finished.folder.path}", "runtime=ray", "runtime.num_workers=2", "log_every_steps=3", "epochs=9"]
    values = values_of("pretrain", given)
    assert (values["log_every_steps"], values["epochs"]) == (3, 9)
    assert values["probe"] == stored["probe"] and stored["probe"]["enabled"] is False
    few = {**compose("probe", ["run=x", "probe=few_labels"])["probe"], "enabled": True}
    assert values_of("pretrain", [given[0], "probe=few_labels", "probe.enabled=true"])["probe"] == few
    assert values["runtime"] == to_values(configured("pretrain", [QUICK[0], *given[1:3]]).runtime)


def test_a_run_that_is_resumed_on_another_runtime_computes_as_before(finished, tmp_path):
    folder = tmp_path / "digits" / "whole"
    shutil.copytree(finished.folder.path, folder)
    stored = yaml.safe_load((folder / "config.yaml").read_text())
    stored["runtime"] |= {"precision": "float64", "num_loader_workers": 1}
    (folder / "config.yaml").write_text(yaml.safe_dump(stored))
    runtime = values_of("pretrain", [f"resume={folder}", "runtime=ray", "runtime.num_loader_workers=0"])["runtime"]
    assert (runtime["name"], runtime["precision"], runtime["num_loader_workers"]) == ("ray", "float64", 0)


@pytest.mark.parametrize(
    ("typed", "code", "message"),
    [
        (["seed=4"], 2, "seed: found 4, but the run to resume has 0"),
        (["data=cifar10", "data.root=/x"], 2, "data."),
        (["optimiser.momentm=1"], 2, "optimiser.momentm: unknown key for 'sgd'; did you mean 'momentum'"),
        (["sede=4"], 2, "sede: unknown key; did you mean 'seed'"),
        (["epochs=many"], 2, "epochs: found 'many', must be an integer"),
        (["epochs=1"], 2, "epochs: found 1, but the run to resume has 2"),
        (["epochs=4"], 2, "epochs: found 4, but the run to resume has 2; more are possible only where no schedule"),
        (["experiment=digits"], 2, "experiment=digits: a resumed run has its own configuration"),
        (["run_name=other"], 2, "run_name: found 'other', but the run to resume has 'whole'"),
        (["output_dir=/elsewhere"], 2, "output_dir: found '/elsewhere', but the run to resume has '"),
        (["seed=1,2"], 2, "'seed=1,2': found several values"),
        (["~seed"], 2, "'~seed': found several values or none"),
    ],
)
def test_impossible_overrides_of_a_resumed_run_are_one_line(typed, code, message, finished, capsys):
    before = finished.folder.config_path.read_text()
    assert run_job("pretrain", pretrain, [f"resume={finished.folder.path}", *typed]) == code
    output = capsys.readouterr().err.strip()
    assert output.startswith(f"error: {message}") and "\n" not in output
    assert finished.folder.config_path.read_text() == before


def test_a_run_that_cannot_be_longer_says_how_a_new_one_begins_with_its_weights(finished, capsys):
    assert run_job("pretrain", pretrain, [f"resume={finished.folder.path}", "epochs=4"]) == 2
    assert "; a new run can begin with the weights of a finished one, encoder.weights=" in capsys.readouterr().err


def test_a_finished_run_is_unchanged(finished, output_dir, capsys, caplog):
    client = MlflowClient(finished.uri)

    def state() -> tuple:
        files = {path: path.stat().st_mtime_ns for path in finished.folder.path.rglob("*")}
        return files, client.get_run(finished.run_id).to_dictionary()

    before = state()
    again = [*QUICK, *SETTINGS, "runtime=local", "run_name=whole"]
    for given in (["resume=whole"], [*again, "resume=true"], [*again, "resume=auto"]):
        caplog.clear()
        assert run_job("pretrain", pretrain, [*given, f"output_dir={output_dir}"]) == 0
        assert "whole is finished: there is nothing to resume" in caplog.text
        out = capsys.readouterr().out
        assert f"MLflow run: {finished.run_id}" in out and f":5000/#/runs/{finished.run_id}?" in out
        assert state() == before


def test_a_run_of_another_job_or_a_folder_that_was_moved_cannot_be_resumed(finished, tmp_path):
    values = stored_values(finished.folder.config_path)
    for place, job, message in [
        ("digits/whole", "probe", "holds a run of jobs.probe; allowed: a run of jobs.pretrain"),
        ("elsewhere/whole", "pretrain", "elsewhere/whole was renamed: its run is digits/whole"),
    ]:
        folder = RunFolder(tmp_path / place)
        folder.start(values)
        folder.identity_path.write_text(json.dumps({"uri": "", "tags": {"job": job}}))
        with pytest.raises(ConfigError, match=message):
            values_of("pretrain", [f"resume={folder.path}"])


def test_credentials_of_a_resumed_run_come_from_the_environment(tmp_path, monkeypatch):
    config = configured("pretrain", ["experiment=digits", "run_name=it"])
    uri = "https://name:word@mlflow.example"
    tracking = dataclasses.replace(config.tracking, uri=uri)
    folder = RunFolder(tmp_path / "digits" / "it")
    folder.start(to_values(dataclasses.replace(config, tracking=tracking)))
    assert "word" not in folder.config_path.read_text()
    with pytest.raises(ConfigError, match="give its credentials by MLFLOW_TRACKING_URI or tracking.uri="):
        values_of("pretrain", [f"resume={folder.path}"])
    assert values_of("pretrain", [f"resume={folder.path}", f"tracking.uri={uri}"])["tracking"]["uri"] == uri
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    assert values_of("pretrain", [f"resume={folder.path}"])["tracking"]["uri"] == uri
