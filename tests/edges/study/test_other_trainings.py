"""Ablations and studies of metric learning, faces and fine-tuning."""

import csv
import re
from pathlib import Path

import pytest

from ssl_sec.edges.composition.compose import compose, config_of, training_of
from ssl_sec.edges.composition.help_text import help_text
from ssl_sec.edges.study.arms import read_arms
from ssl_sec.edges.study.cells import KeptCell
from ssl_sec.edges.study.comparison import deciding_metric
from ssl_sec.edges.study.plan import read_study
from ssl_sec.edges.study.searches import KeptSearches, KeptTrial
from ssl_sec.edges.tune.trials import Trial
from ssl_sec.errors import ConfigError
from ssl_sec.recipes.registry import FACE, FINETUNE, METRIC_LEARNING, PRETRAIN
from tests.edges.conftest import QUICK, QUICK_FACE
from tests.jobs import ablate, pretrain, study

RETRIEVAL = (
    *("experiment=digits_retrieval", "encoder.width=0.125", "steps=4", "runtime=local", "monitor.every_steps=2"),
    *("tracking.register_model=false", "tracking.system_metrics=false"),
)
FILE = """
shared: [experiment=digits_retrieval, encoder.width=0.125, steps=4, runtime=local, monitor.every_steps=2]
arms:
  none: [constraint=none]
  sec: [constraint=sec, constraint.eta=0.1]
seeds: [0, 1]
"""


@pytest.mark.parametrize(
    ("given", "training", "config"),
    [
        ([], "pretrain", "ablate"),
        (["experiment=digits", "seeds=[1,2]"], "pretrain", "ablate"),
        (["experiment=digits_retrieval"], "metric_learning", "ablate_of_metric_learning"),
        (["experiment=lfw_cpu"], "face", "ablate_of_face"),
        (["experiment=digits_finetune"], "finetune", "ablate_of_finetune"),
        (["job=face"], "face", "ablate_of_face"),
        (["job=null", "experiment=no_such"], "pretrain", "ablate"),
    ],
)
def test_the_training_is_that_of_the_key_or_of_the_experiment(given, training, config):
    assert training_of(given) == training
    assert config_of("ablate", given) == config
    assert config_of("pretrain", given) == "pretrain"


def test_a_training_that_does_not_exist_is_refused():
    with pytest.raises(ConfigError, match="^job: found 'faces'; did you mean 'face'?"):
        training_of(["job=faces"])


@pytest.mark.parametrize("job", ["metric_learning", "face", "finetune"])
def test_the_help_explains_the_keys_of_the_training(job):
    text = help_text("ablate", [f"job={job}"])
    assert re.search(r"^  arms=\[random,none,sec\] ", text, re.M)
    assert re.search(r"^  steps=", text, re.M) if job == "metric_learning" else re.search(r"^  epochs=", text, re.M)
    assert "ablate_of" not in text


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["experiment=digits_retrieval", "epochs=3"], "epochs: unknown key; did you mean 'steps'?"),
        (["experiment=digits_retrieval", "sampler=all"], "sampler: found 'all'; allowed: classes"),
        (["experiment=digits_retrieval", "augment=simclr"], "augment: found 'simclr', which jobs.ablate cannot use"),
        (["job=face", "arms=[none,sek]"], "arms: found 'sek'; did you mean 'sec'?"),
        (
            ["experiment=digits_finetune"],
            "arms: found 'sec'; allowed: none, random, or an override of any",
        ),
    ],
)
def test_a_wrong_ablation_is_refused_in_one_line(given, message):
    with pytest.raises(ConfigError) as caught:
        read_arms(given)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("given", ["experiment=digits", "experiment=digits_retrieval", "experiment=digits_finetune"])
def test_the_encoders_of_an_ablation_are_registered_only_where_that_is_asked(given):
    (cell,) = read_arms([given, "arms=[random]", "seeds=[0]"])
    assert not cell.config.tracking.register_model
    (cell,) = read_arms([given, "arms=[random]", "seeds=[0]", "tracking.register_model=true"])
    assert cell.config.tracking.register_model


def test_an_untrained_encoder_is_an_arm_of_every_training():
    retrieval, face, finetuning = (
        read_arms([*given, "arms=[random]"])[0].config
        for given in (["experiment=digits_retrieval"], ["job=face"], ["experiment=digits_finetune"])
    )
    assert (retrieval.steps, face.epochs, finetuning.epochs) == (0, 0, 0)
    assert {each.constraint.name for each in (retrieval, face)} == {"none"}


@pytest.mark.slow
def test_an_ablation_of_metric_learning_compares_what_test_classes_show(tmp_path: Path):
    table = ablate([*RETRIEVAL, f"output_dir={tmp_path}", "arms=[random,none]"])
    lines = table.strip().splitlines()
    assert re.split("  +", lines[0]) == ["arm", "runs", "Recall@1 %", "NMI %", "held-out Recall@1 %"]
    assert [line.split()[:2] for line in lines[2:4]] == [["none", "1"], ["random", "1"]]
    (kept,) = (tmp_path / "digits_retrieval").glob("ablation-*.csv")
    rows = list(csv.DictReader(kept.open()))
    assert len(rows) == 2 and all(float(row["retrieval/recall_at_1"]) > 0 for row in rows)


def test_an_ablation_of_fine_tuning_starts_from_the_run(tmp_path: Path):
    pretrain([*QUICK, f"output_dir={tmp_path}", "run_name=start", "runtime=local"])
    given = ["experiment=digits_finetune", "run=start", f"output_dir={tmp_path}", "epochs=1", "runtime=local"]
    lines = ablate([*given, "arms=[random,trained_stages=0]"]).strip().splitlines()
    assert lines[0].split()[:4] == ["arm", "runs", "top-1", "%"]
    assert [line.split()[:2] for line in lines[2:4]] == [["random", "1"], ["trained_stages=0", "1"]]


def test_the_runs_of_a_study_are_of_the_experiments_training(tmp_path: Path):
    (path := tmp_path / "mine.yaml").write_text(FILE)
    made = read_study([f"study={path}"])
    cells = made.cells({})
    assert made.job == "metric_learning" and {cell.job for cell in cells} == {"metric_learning"}
    assert [cell.name for cell in cells] == ["none-s0", "sec-s0", "none-s1", "sec-s1"]
    assert not [one for one in cells[0].overrides if one.startswith("probe")]
    assert len({cell.digest for cell in cells}) == 2
    path.write_text(FILE.replace("shared:", "job: face\nshared:").replace("experiment=digits_retrieval, ", ""))
    with pytest.raises(ConfigError, match="steps: unknown key"):
        read_study([f"study={path}"])
    path.write_text(FILE.replace("shared:", "job: fase\nshared:"))
    with pytest.raises(ConfigError, match="mine.yaml: job: found 'fase'; did you mean 'face'?"):
        read_study([f"study={path}"])


@pytest.mark.slow
def test_a_study_of_metric_learning_runs_and_is_compared(tmp_path: Path):
    (path := tmp_path / "mine.yaml").write_text(FILE)
    given = [f"study={path}", f"output_dir={tmp_path / 'runs'}", "concurrent=2", "tracking.register_model=false"]
    shown = study([*given, "seeds=[0]"])
    lines = shown.strip().splitlines()
    assert re.split("  +", lines[0])[:4] == ["arm", "runs", "Recall@1 %", "NMI %"]
    assert [line.split()[:2] for line in lines[2:4]] == [["none", "1"], ["sec", "1"]]
    folder = tmp_path / "runs" / "mine"
    assert {path.name for path in folder.glob("cells-*.png")} >= {"cells-forest.png", "cells-curves.png"}
    assert study([*given, "seeds=[0]", "run=false"]).splitlines()[1:4] == shown.splitlines()[1:4]


def test_searched_steps_are_kept_under_their_name(tmp_path: Path):
    (path := tmp_path / "mine.yaml").write_text(
        FILE.replace("constraint.eta=0.1", "'constraint.eta=interval(0.1,1)'") + "search: [trials=2]\n"
    )
    (arm,) = [arm for arm in read_study([f"study={path}"]).arms if arm.search is not None]
    trials = [Trial(name=f"s-00{n}", overrides=[f"constraint.eta=0.{n}"], values={}, metric=n, at=4) for n in (1, 2)]
    file = tmp_path / "searches.csv"
    KeptSearches(file).add(arm, [KeptTrial.of(arm, trial) for trial in trials])
    assert file.read_text().splitlines()[0] == "arm,point,trial,metric,steps,space,config,overrides"
    assert KeptSearches(file).best(arm) == ("constraint.eta=0.2",)
    assert [trial.at for trial in KeptSearches(file)] == [4, 4]


@pytest.mark.parametrize(
    ("recipe", "runs", "metric"),
    [
        (PRETRAIN, [{"probe/top1", "val/knn_top1"}, {"probe/top1"}], "probe/top1"),
        (PRETRAIN, [{"probe/top1", "val/knn_top1"}, {"val/knn_top1"}], "val/knn_top1"),
        (PRETRAIN, [], "probe/top1"),
        (METRIC_LEARNING, [{"val/recall_at_1", "retrieval/recall_at_1"}], "retrieval/recall_at_1"),
        (METRIC_LEARNING, [{"val/recall_at_1"}, {"val/recall_at_1", "retrieval/recall_at_1"}], "val/recall_at_1"),
        (FACE, [{"val/verification_accuracy", "face/lfw_accuracy", "face/cfp_accuracy"}], "face/cfp_accuracy"),
        (FACE, [{"train/verification_accuracy", "train/loss"}], "train/verification_accuracy"),
        (FINETUNE, [{"val/top1", "finetune/top1"}], "finetune/top1"),
    ],
)
def test_the_first_metric_that_all_runs_have_decides(recipe, runs, metric):
    kept = [
        KeptCell(arm="a", point="", seed=seed, digest="", minutes=1.0, run_id="", metrics=dict.fromkeys(names, 1.0))
        for seed, names in enumerate(runs)
    ]
    assert deciding_metric(recipe, kept) == metric


def test_a_job_over_faces_has_the_keys_of_both():
    values = compose(config_of("ablate", ["job=face"]), ["job=face", *QUICK_FACE])
    assert {"arms", "seeds", "job", "test_sets", "loss", "held_out_share"} <= values.keys()
