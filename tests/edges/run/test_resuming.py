import shlex
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from mlflow.tracking import MlflowClient
from safetensors.torch import load_file

from ssl_sec.edges.composition.compose import compose
from ssl_sec.edges.config import ReplayConfig
from ssl_sec.edges.folder.descriptions import RunIdentity
from ssl_sec.edges.folder.encoder import load_encoder
from ssl_sec.edges.folder.finding import usable_folder
from ssl_sec.edges.folder.folder import RunFolder
from ssl_sec.edges.folder.stored_config import stored_values
from ssl_sec.edges.run.driver import run_replay, run_training
from ssl_sec.edges.run.job_values import values_of
from ssl_sec.edges.run.resuming import free_keys, probe_folder, require_same_settings, resume_run, settings_kept
from ssl_sec.edges.run.uploading import Upload
from ssl_sec.edges.run.worker import FolderRuntime
from ssl_sec.errors import ConfigError, DataError, Stopped
from ssl_sec.recipes.metric_learning.config import MetricLearningConfig
from ssl_sec.recipes.pretraining.config import PretrainConfig
from ssl_sec.recipes.registry import METRIC_LEARNING, RECIPES
from ssl_sec.settings import from_values, to_values
from tests.data.test_fingerprint import write_image
from tests.edges.conftest import QUICK, QUICK_FACE
from tests.edges.run.faulty import folder_of, signalling_at, steps_so_far
from tests.jobs import configured

RETRIEVAL = (
    "experiment=digits_retrieval",
    "runtime=local",
    "runtime.device=cpu",
    "encoder.width=0.125",
    "log_every_steps=1",
    "tracking.register_model=false",
    "tracking.system_metrics=false",
)


def config_of(job, *overrides):
    return from_values(RECIPES[job].config, compose(job, [*overrides, "run_name=it"]))


def folder_with(path: Path, config) -> RunFolder:
    """The folder of a finished run."""
    folder = RunFolder(path / config.recipe / "it")
    folder.start(to_values(config))
    folder.write_outcome("finished")
    folder.close()
    return folder


def test_a_resume_needs_the_same_recipe_and_may_change_the_runtime():
    values = {"epochs": 3, "data": {"name": "digits"}, "runtime": {"name": "local"}}
    free = free_keys(PretrainConfig)
    require_same_settings(values, {**values, "runtime": {"name": "ray"}, "resume": True, "probe": {"epochs": 3}}, free)
    places = {"root": "there", "train": ["a"], "test": ["b"], "cache_folder": "here"}
    elsewhere = {"name": "digits", **places, "download": True, "resident_limit_mib": 64}
    require_same_settings(values, {**values, "data": elsewhere}, free)
    longer = {**values, "epochs": 4}
    with pytest.raises(ConfigError, match="epochs: found 4, but the run to resume has 3"):
        require_same_settings(values, longer, free)
    require_same_settings(values, longer, {"epochs"})
    with pytest.raises(ConfigError, match="^epochs: found 4, but the run to resume has 3; seed: found 1, but .* null$"):
        require_same_settings(values, {**longer, "seed": 1}, free)
    for key in ("encoder.weights", "resumed"):
        with pytest.raises(ConfigError, match=f"{key}: found 'x', but the run to resume has null"):
            require_same_settings(values, {**values, key: "x"}, free)


def test_a_resume_finds_test_sets_in_other_folders_but_takes_no_others():
    lfw = {"name": "lfw_pairs", "title": "lfw", "pairs": "pairs.txt", "root": "lfw"}
    moved = {**lfw, "pairs": "there/pairs.txt", "root": "there/lfw", "resident_limit_mib": 0}
    free = free_keys(RECIPES["face"].config)
    require_same_settings({"test_sets": [lfw]}, {"test_sets": [moved]}, free)
    for others in ([], [{**moved, "title": "other"}], [moved, lfw]):
        with pytest.raises(
            ConfigError, match=r"^test_sets: found .*, but the run to resume has \[{'name': 'lfw_pairs', "
        ):
            require_same_settings({"test_sets": [lfw]}, {"test_sets": others}, free)


@pytest.mark.parametrize("job", ["metric_learning", "face"])
def test_a_resume_keeps_the_layout_of_its_checkpoints(job):
    with pytest.raises(ConfigError, match="share_classes_from: found 2, but the run to resume has 50000"):
        require_same_settings({"share_classes_from": 50_000}, {"share_classes_from": 2}, free_keys(RECIPES[job].config))


@pytest.mark.parametrize(
    ("job", "given", "length"),
    [
        ("metric_learning", [*RETRIEVAL, "constraint.ramp=constant", "steps=10"], {"steps": 11}),
        ("face", [*QUICK_FACE, "constraint.ramp=face"], {"epochs": 2.5}),
        ("face", [*QUICK_FACE, "constraint=none"], {"epochs": 3.0}),
    ],
)
def test_a_finished_run_with_schedules_independent_of_its_length_can_be_extended(job, given, length, tmp_path):
    config = config_of(job, *given)
    folder = folder_with(tmp_path, config)
    assert not resume_run(RECIPES[job], folder, config)
    assert folder.is_complete
    (folder.path / "encoder.safetensors").write_bytes(b"of the shorter run")
    folder.write_identity(RunIdentity(tags={"job": job}))
    assert resume_run(RECIPES[job], folder, replace(config, **length))
    assert not folder.is_complete
    for use in (load_encoder, partial(usable_folder, folder, jobs=[job])):
        with pytest.raises(ConfigError, match="which has not finished; allowed: a finished run"):
            use(str(folder.path))
    assert stored_values(folder.config_path).items() >= length.items()


@pytest.mark.parametrize(
    ("job", "given", "length", "message"),
    [
        (
            "pretrain",
            QUICK,
            {"epochs": 9},
            r"has 2; .*: optimiser.learning_rate \(it falls .*\), constraint.ramp; a new run can begin",
        ),
        (
            "pretrain",
            [*QUICK, "constraint=none"],
            {"epochs": 9},
            r"do: optimiser.learning_rate \(it falls .*\); a new run can begin",
        ),
        (
            "metric_learning",
            [*RETRIEVAL, "constraint.ramp=linear"],
            {"steps": 9**9},
            "these do: constraint.ramp; a new run can begin",
        ),
        (
            "face",
            [*QUICK_FACE, "constraint.ramp=capped"],
            {"epochs": 9.0},
            "these do: constraint.ramp; a new run can begin",
        ),
        ("face", [*QUICK_FACE, "constraint=none"], {"epochs": 1.0}, "1.0, but the run to resume has 2.0$"),
    ],
)
def test_a_length_that_is_impossible_is_refused_with_the_reason(job, given, length, message, tmp_path):
    config = config_of(job, *given)
    folder = folder_with(tmp_path, config)
    with pytest.raises(ConfigError, match=f"^{next(iter(length))}: found .*{message}"):
        resume_run(RECIPES[job], folder, replace(config, **length))
    assert folder.is_complete


def test_a_probe_takes_no_folder_of_an_interrupted_training(tmp_path):
    trained, path = config_of("pretrain", *QUICK), tmp_path / "it-probe"
    config = configured("probe", ["run=it"])
    training = RunFolder(path)
    training.start(to_values(trained))
    training.write_identity(RunIdentity(tags={"job": "pretrain"}))
    assert probe_folder([path], config, trained, tmp_path / "none") is None
    other = probe_folder([path, tmp_path / "it-probe-2"], config, trained, tmp_path / "none")
    assert other is not None and other.name == "it-probe-2"


def test_runs_of_version_0_1_can_be_resumed(tmp_path):
    config = config_of("pretrain", *QUICK)
    folder = RunFolder(tmp_path / "digits" / "it")
    values = to_values(config)
    values["probe"]["decay_epochs"] = [values["probe"].pop("decay_at") and 3]
    del values["monitor"]
    folder.start(values)
    assert resume_run(RECIPES["pretrain"], folder, config)
    with pytest.raises(ConfigError, match="seed: found 1, but the run to resume has 0"):
        resume_run(RECIPES["pretrain"], folder, replace(config, seed=1))


@pytest.mark.slow
def test_a_finished_run_whose_extension_is_refused_stays_finished(tmp_path):
    images = tmp_path / "photos"
    for number in range(24):
        write_image(images / "train" / "abcdef"[number % 6] / f"{number:02d}.png", number)
    shape = ["data=folder", f"data.root={images}", "data.num_train_classes=4", "held_out_share=0.5"]
    batch = ["global_batch_size=4", "sampler.images_per_class=2", "steps=2", "run_name=it", f"output_dir={tmp_path}/o"]
    finished = run_training(METRIC_LEARNING, configured("metric_learning", [*RETRIEVAL, *shape, *batch]))
    folder, client = finished.folder, MlflowClient(finished.uri)
    settings, identity = folder.config_path.read_text(), folder.identity
    before = client.get_run(finished.run_id)

    for label in "abcd":  # two of these classes are held out
        write_image(images / "train" / label / "24.png", 24)
    longer = values_of("metric_learning", [f"resume={folder.path}", "steps=3"])
    with pytest.raises(DataError, match="but the run to resume began with 8"):
        run_training(METRIC_LEARNING, from_values(MetricLearningConfig, longer))
    assert folder.is_complete and folder.status == "FINISHED"
    assert (folder.config_path.read_text(), folder.identity) == (settings, identity)
    after = client.get_run(finished.run_id)
    assert (after.info.status, after.data.tags) == ("FINISHED", before.data.tags)

    for added in images.glob("train/*/24.png"):
        added.unlink()
    extended = run_training(METRIC_LEARNING, from_values(MetricLearningConfig, longer))
    assert [point.step for point in client.get_metric_history(finished.run_id, "train/loss")] == [0, 1, 2]
    assert extended.run_id == finished.run_id and client.get_run(finished.run_id).info.status == "FINISHED"


def test_a_finished_run_whose_results_an_extension_has_dropped_is_resumed(tmp_path):
    config = config_of("metric_learning", *RETRIEVAL, "constraint.ramp=constant", "steps=10")
    folder = folder_with(tmp_path, config)
    folder.append_record({"step": 10, "metrics": {"retrieval/nmi": 8.5}})
    with pytest.raises(DataError), settings_kept(folder):
        assert resume_run(METRIC_LEARNING, folder, replace(config, steps=20))
        folder.forget_records_from(10)
        raise DataError("an image cannot be read")
    assert not folder.is_complete and resume_run(METRIC_LEARNING, folder, config)


def test_a_stopped_extension_says_that_the_results_are_of_the_shorter_run(tmp_path, monkeypatch):
    given = [*RETRIEVAL, "steps=2", "run_name=it", f"output_dir={tmp_path}"]
    short = run_training(METRIC_LEARNING, configured("metric_learning", given))
    values = values_of("metric_learning", [f"resume={short.folder.path}", "steps=9"])
    monkeypatch.setattr(FolderRuntime, "report", signalling_at(4))
    with pytest.raises(Stopped):
        run_training(METRIC_LEARNING, from_values(MetricLearningConfig, values))
    run = MlflowClient(short.uri).get_run(short.run_id)
    ended = "stopped: on request, after saving; retrieval/* are results of its earlier, shorter training"
    assert run.info.status == "KILLED" and "retrieval/nmi" in run.data.metrics
    assert run.data.tags["ended"] == ended and f"- ended: {ended}" in run.data.tags["mlflow.note.content"]


def test_a_replay_of_an_extension_during_an_outage_replaces_the_results_of_the_shorter_run(tmp_path, monkeypatch):
    given = [*RETRIEVAL, "steps=2", "run_name=it", f"output_dir={tmp_path}"]
    short = run_training(METRIC_LEARNING, configured("metric_learning", given))
    values = values_of("metric_learning", [f"resume={short.folder.path}", "steps=3"])
    with monkeypatch.context() as outage:
        outage.setattr(Upload, "upload_results", lambda self, tracked: None)
        run_training(METRIC_LEARNING, from_values(MetricLearningConfig, values))
    client = MlflowClient(short.uri)
    ended = client.get_run(short.run_id).info.end_time
    run_replay(ReplayConfig(folder=str(short.folder.path)))
    kept = client.download_artifacts(short.run_id, "encoder.safetensors", str(tmp_path))
    assert Path(kept).read_bytes() == short.folder.encoder_path.read_bytes()
    assert client.get_run(short.run_id).info.end_time == ended


@pytest.mark.slow
def test_an_extended_run_ends_as_one_of_that_length(tmp_path):
    def run(name: str, steps: int):
        given = [*RETRIEVAL, f"steps={steps}", f"run_name={name}", f"output_dir={tmp_path}"]
        return run_training(METRIC_LEARNING, configured("metric_learning", given))

    long, short = run("long", 12), run("short", 6)
    values = values_of("metric_learning", [f"resume={short.folder.path}", "steps=12"])
    longer = run_training(METRIC_LEARNING, from_values(MetricLearningConfig, values))
    weights, wanted = load_file(longer.folder.encoder_path), load_file(long.folder.encoder_path)
    assert all(torch.equal(weights[name], wanted[name]) for name in wanted)
    assert longer.metrics["retrieval/recall_at_1"] == long.metrics["retrieval/recall_at_1"]
    client = MlflowClient(long.uri)
    assert longer.run_id == short.run_id
    tags = client.get_run(short.run_id).data.tags
    assert {key: value for key, value in tags.items() if key.startswith("resumed.")} == {"resumed.steps": "12"}
    assert [point.step for point in client.get_metric_history(short.run_id, "train/loss")] == list(range(12))


@pytest.mark.slow
def test_the_command_that_a_stopped_run_prints_resumes_it(tmp_path):
    """In a folder whose path needs quotes in a shell."""
    here = tmp_path / "my runs (é)"
    here.mkdir()
    run = folder_of(here / "runs")
    given = [*QUICK, "runtime=local", "epochs=60", "log_every_steps=1", "run_name=it"]
    command = [sys.executable, "-m", "jobs.pretrain", *given]
    process = subprocess.Popen(command, cwd=here, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while steps_so_far(run) < 5:
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 130, errors
    printed = errors.strip().splitlines()[-1].partition("resume it with: ")[2]
    assert printed == "python -m jobs.pretrain resume=runs/digits/it"
    words = [sys.executable, *shlex.split(printed)[1:]]
    resumed = subprocess.run(words, cwd=here, capture_output=True, text=True, timeout=600)
    assert resumed.returncode == 0, resumed.stderr
    assert steps_so_far(run) == 300
    absolute = [*words[:-1], f"resume={run.path}"]
    again = subprocess.run(absolute, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert again.returncode == 0 and "it is finished: there is nothing to resume" in again.stderr


def test_a_run_made_by_hand_needs_a_run_to_resume(tmp_path):
    config = configured("pretrain", [*QUICK, "run_name=none", "resume=true"])
    with pytest.raises(ConfigError, match="none holds no run; allowed: resume=auto or false"):
        resume_run(RECIPES["pretrain"], RunFolder(tmp_path / "digits" / "none"), config)
