import logging
import os
import re
import statistics
from pathlib import Path

import pytest
import torch
from mlflow.tracking import MlflowClient
from PIL import Image

from ssl_sec.data.standard_sets import open_digits
from ssl_sec.edges.folder.folder import RunFolder
from ssl_sec.edges.run import worker
from ssl_sec.edges.run.summary import Finished
from ssl_sec.edges.study import ablation
from ssl_sec.edges.study.ablation import _Names
from ssl_sec.edges.study.arms import read_arms
from ssl_sec.edges.study.cells import KeptCells
from ssl_sec.errors import ConfigError, DataError, Stopped, StorageError
from ssl_sec.recipes.pretraining.config import PretrainConfig
from ssl_sec.recipes.registry import RecipeRow
from tests.edges.run.faulty import signalling_at
from tests.jobs import ablate


def test_arms_and_seeds_make_one_table(quick, tmp_path: Path):
    given = ["runtime=local", "data.max_images=400", "tracking.parent_run=above", "arms=[random,sec]", "seeds=[0,1]"]
    table = ablate([*quick, *given])
    lines = table.strip().splitlines()
    assert re.split("  +", lines[0]) == [
        *("arm", "runs", "probe top-1 %", "probe top-5 %", "kNN top-1 %", "difference from random [95 %]", "p"),
        "kNN difference [95 %]",
    ]
    assert lines[2].split()[:2] == ["random", "2"]
    assert lines[3].split()[:2] == ["sec", "2"]
    assert lines[3].count("±") == 3
    assert "ui --backend-store-uri" in table
    (kept,) = (tmp_path / "runs" / "digits").glob("ablation-*.csv")
    cells = KeptCells(kept)
    results = {arm: [cell.metrics for cell in cells if cell.arm == arm] for arm in ("random", "sec")}
    assert len(results["random"]) == len(results["sec"]) == 2
    pairs = list(zip(results["random"], results["sec"], strict=True))
    differences = [[sec[name] - random[name] for random, sec in pairs] for name in ("probe/top1", "probe/knn_top1")]
    # Two seeds with the same difference have no spread, and so no interval.
    assert lines[3].count("[") == sum(abs(first - second) > 1e-3 for first, second in differences) > 0
    assert "train/loss" in results["sec"][0]
    assert "train/loss" not in results["random"][0]
    assert results["sec"][0]["train/loss"] != results["sec"][1]["train/loss"]

    client = MlflowClient(f"sqlite:///{tmp_path / 'runs'}/mlflow.db")
    experiment = client.get_experiment_by_name("digits")
    (parent,) = client.search_runs([experiment.experiment_id], "tags.job = 'ablate'")
    assert parent.info.status == "FINISHED" and parent.data.tags["mlflow.parentRunId"] == "above"
    described = [line.strip("| ") for line in parent.data.tags["mlflow.note.content"].splitlines() if line[:1] == "|"]
    assert [re.split(" +[|] +", described[row])[:6] for row in (0, 3)] == [
        re.split("  +", lines[row])[:6] for row in (0, 3)
    ]
    means = [statistics.fmean(run["probe/top1"] for run in results[arm]) for arm in ("random", "sec")]
    found = [parent.data.metrics[f"sweep/probe_top1_mean {arm}"] for arm in ("random", "sec")]
    assert found == pytest.approx(means, rel=1e-5)
    children = client.search_runs([experiment.experiment_id], f"tags.`mlflow.parentRunId` = '{parent.info.run_id}'")
    names = sorted(run.info.run_name for run in children)
    assert names == [f"digits-resnet18-{arm}-s{seed}" for arm in ("random", "sec") for seed in (0, 1)]
    assert f"/#/experiments/{experiment.experiment_id}/runs?workflowType=machine_learning&viewStateShareKey=" in table
    assert "mlflow.sharedViewState.scores" in experiment.tags


@pytest.mark.slow
def test_images_without_labels_are_compared_by_rankme(quick, tmp_path: Path):
    (tmp_path / "images").mkdir()
    digits = open_digits("train")
    for index, pixels in enumerate(digits.read(torch.arange(80)).images[:, 0].numpy()):
        Image.fromarray(pixels).save(tmp_path / "images" / f"{index}.png")
    data = ["data=folder", f"data.root={tmp_path / 'images'}", "data.image_size_px=8", "data.num_channels=1"]
    given = [*quick, *data, "runtime=local", "global_batch_size=16", "epochs=1", "arms=[random,sec]", "seeds=[0,1]"]
    with pytest.raises(DataError, match=r"80 images without labels found; .*probe.enabled=true; false leaves it out"):
        ablate(given)
    lines = ablate([*given, "probe.enabled=false"]).strip().splitlines()
    assert re.split("  +", lines[0]) == ["arm", "runs", "effective rank (RankMe)", "difference from random [95 %]", "p"]
    assert [line.split()[:2] for line in lines[2:4]] == [["random", "2"], ["sec", "2"]]
    assert all("±" in line for line in lines[2:4])


def test_a_damaged_list_of_an_ablations_runs_is_one_line(quick):
    cells = read_arms([*quick, "seeds=[0]"])
    names = _Names(cells)
    names.of(cells[0])
    (left,) = (Path(cells[0].config.output_dir) / "digits").glob(".ablation-*.json")
    left.write_text('{"ran')
    with pytest.raises(StorageError, match=rf"{left} cannot be read: Unterminated .*; to start anew, delete it"):
        _Names(cells)


def test_an_interrupted_ablation_continues_in_its_runs(quick, tmp_path: Path, monkeypatch, caplog):
    command = [*quick, "runtime=local", "arms=[random,sec]", "seeds=[0]", "log_every_steps=1"]
    with (
        monkeypatch.context() as patch,
        pytest.raises(Stopped, match="^stopped; the same command continues the ablation$"),
    ):
        patch.setattr(worker.FolderRuntime, "report", signalling_at(3))
        ablate(command)
    client = MlflowClient(f"sqlite:///{tmp_path / 'runs'}/mlflow.db")
    experiment = client.get_experiment_by_name("digits").experiment_id
    (parent,) = client.search_runs([experiment], "tags.job = 'ablate'")
    assert parent.info.status == "KILLED"
    with caplog.at_level(logging.INFO, "ssl_sec"):
        rows = ablate(command).strip().splitlines()[2:4]
    assert [row.split()[:2] for row in rows] == [["random", "1"], ["sec", "1"]]
    assert any("2 of 2 runs had begun; to start anew, delete " in message for message in caplog.messages)
    (parent,) = client.search_runs([experiment], "tags.job = 'ablate'")
    assert parent.info.status == "FINISHED"
    children = client.search_runs([experiment], f"tags.`mlflow.parentRunId` = '{parent.info.run_id}'")
    assert {run.info.run_name: run.info.status for run in children} == {
        f"digits-resnet18-{arm}-s0": "FINISHED" for arm in ("random", "sec")
    }
    assert not list((tmp_path / "runs" / "digits").glob(".ablation-*"))


@pytest.mark.parametrize("place", ["folder", pytest.param("object storage", marks=pytest.mark.slow)])
def test_only_an_ablation_that_was_interrupted_continues(place, quick, trained, request, monkeypatch, caplog):
    command = [*quick, "runtime=local", "arms=[none,sec]", "seeds=[0,1]"]
    if place == "object storage":
        command += [f"output_dir={request.getfixturevalue('s3')}", "tracking.uri=sqlite:////dev/null/none"]
    run = ablation.run_recipe

    def stopped(recipe, config):
        if len(trained) == 2:
            raise Stopped("stopped; resume it with: ...")
        return run(recipe, config)

    with monkeypatch.context() as patch, pytest.raises(Stopped):
        patch.setattr(ablation, "run_recipe", stopped)
        ablate(command)
    with caplog.at_level(logging.INFO, "ssl_sec"):
        ablate([*command, "seeds=[1,2]"])  # another one
        assert "interrupted" not in caplog.text
        ablate(command)
        assert "interrupted: 3 of 4 runs had begun" in caplog.text
        caplog.clear()
        ablate(command)
        assert "interrupted" not in caplog.text
    first, other, again, anew = ([config.run_name for config in trained][i : i + 4] for i in (0, 2, 6, 10))
    assert all(config.resume == "auto" for config in trained)
    assert first[:2] == again[:2] and len({*first[:2], *other, *again[2:], *anew}) == 12
    assert [re.sub(r"-\d$", "", name) for name in again] == [
        f"digits-resnet18-{arm}-s{seed}" for seed in (0, 1) for arm in ("none", "sec")
    ]


def test_an_ablation_that_another_process_runs_is_refused(quick, trained, monkeypatch):
    command = [*quick, "runtime=local", "arms=[none,sec]", "seeds=[0]"]
    monkeypatch.setattr("ssl_sec.edges.run.running._FREE_WITHIN_S", 0.0)
    run = ablation.run_recipe

    def run_beside(recipe, config):
        with pytest.raises(
            ConfigError, match=rf"^arms: .*/\.ablation-\w+ is in use: process {os.getpid()} on .* other arms"
        ):
            ablate(command)
        return run(recipe, config)

    monkeypatch.setattr(ablation, "run_recipe", run_beside)
    ablate(command)
    assert len(trained) == 2


@pytest.fixture
def trained(monkeypatch, tmp_path: Path) -> list[PretrainConfig]:
    """The configurations of the runs, without running them."""
    configs: list[PretrainConfig] = []

    def run(recipe: RecipeRow, config: PretrainConfig) -> Finished:
        configs.append(config)
        folder = RunFolder(tmp_path / "digits" / f"run{len(configs)}")
        folder.path.mkdir(parents=True)
        metrics = {"probe/top1": 10.0 * len(configs), "probe/top5": 99.0, "probe/knn_top1": 50.0}
        return Finished(folder=folder, uri="http://mlflow", run_id=None, experiment_id=None, metrics=metrics)

    monkeypatch.setattr(ablation, "run_recipe", run)
    return configs


def test_arms_are_options_of_any_group_or_values_of_any_key(quick, trained):
    arms = "arms=[random,sec,loss=ntxent,loss=triplet+constraint=sec_ema,constraint.eta=1e+1,random+encoder=resnet34]"
    table = ablate([*quick, "runtime=local", arms])
    rows = [line.split() for line in table.strip().splitlines()]
    assert [rows[0][0], *(row[0] for row in rows[2:8])] == [
        "arm",
        *arms.removeprefix("arms=[").removesuffix("]").split(","),
    ]
    assert [row[2] for row in rows[2:8]] == ["10.00", "20.00", "30.00", "40.00", "50.00", "60.00"]
    got = [(c.encoder.name, c.loss.name, c.constraint.name, c.epochs) for c in trained]
    assert got == [
        ("resnet18", "ntxent", "none", 0),
        ("resnet18", "ntxent", "sec", 2),
        ("resnet18", "ntxent", "sec", 2),
        ("resnet18", "triplet", "sec_ema", 2),
        ("resnet18", "ntxent", "sec", 2),
        ("resnet34", "ntxent", "none", 0),
    ]
    assert trained[4].constraint.eta == 10.0
    assert [config.tracking.tags["arm"] for config in trained] == [row[0] for row in rows[2:8]]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["arms=[loss=ntxnet]"], "arms: loss=ntxnet: loss: found 'ntxnet'; did you mean 'ntxent'"),
        (["arms=[sec,loss=arcface]"], "arms: loss=arcface: loss: found 'arcface', which jobs.pretrain cannot use"),
        (["arms=[constraint.etta=1]"], "arms: constraint.etta=1: constraint.etta: unknown key; did you mean"),
        (["arms=[sec,probe.enabled=false]"], "probe.enabled cannot be part of an arm: give it for all arms"),
        (["arms=[sec,seed=3]"], r"arms: found 'seed=3'; seed cannot be part of an arm: give seeds=\[...\]"),
        (["arms=[loss=triplet+sce]"], "arms: found 'sce'; did you mean 'sec'.* or an override of any group or key"),
        (["arms=[none]", "epochs=-1"], "^epochs: found -1"),
    ],
)
def test_a_wrong_arm_is_one_line_before_anything_runs(quick, trained, overrides, message):
    with pytest.raises(ConfigError, match=message):
        ablate([*quick, "runtime=local", *overrides])
    assert trained == []


def test_an_unknown_arm_is_refused_before_anything_runs(quick, tmp_path: Path):
    with pytest.raises(ConfigError, match="arms: found 'sce'; did you mean 'sec'"):
        ablate([*quick, "runtime=local", "arms=[random,sce]"])
    assert not (tmp_path / "runs").exists()
