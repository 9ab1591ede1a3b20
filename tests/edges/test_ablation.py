import json
import statistics
from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient

from ssl_sec.edges.ablation import run_ablation
from ssl_sec.errors import ConfigError


def test_arms_and_seeds_make_one_table(quick, tmp_path: Path):
    table = run_ablation([*quick, "runtime=local", "arms=[random,sec]", "seeds=[0,1]"])
    lines = table.strip().splitlines()
    assert lines[0].split() == ["constraint", "probe", "top-1", "%", "probe", "top-5", "%", "kNN", "top-1", "%"]
    assert lines[2].startswith("random")
    assert lines[3].startswith("sec")
    assert lines[3].count("±") == 3
    assert "over 2 seeds" in table
    assert "ui --backend-store-uri" in table
    (kept,) = (tmp_path / "runs" / "digits").glob("ablation-*.json")
    results = json.loads(kept.read_text())["results"]
    assert len(results["random"]) == len(results["sec"]) == 2
    assert "train/loss" in results["sec"][0]
    assert "train/loss" not in results["random"][0]
    assert results["sec"][0]["train/loss"] != results["sec"][1]["train/loss"]

    client = MlflowClient(f"sqlite:///{tmp_path / 'runs'}/mlflow.db")
    experiment = client.get_experiment_by_name("digits")
    (parent,) = client.search_runs([experiment.experiment_id], "tags.job = 'ablate'")
    assert parent.info.status == "FINISHED"
    means = [statistics.fmean(run["probe/top1"] for run in results[arm]) for arm in ("random", "sec")]
    told = [parent.data.metrics[f"{arm}/probe_top1_mean"] for arm in ("random", "sec")]
    assert told == pytest.approx(means)
    children = client.search_runs([experiment.experiment_id], f"tags.`mlflow.parentRunId` = '{parent.info.run_id}'")
    names = sorted(run.info.run_name for run in children)
    assert names == [f"digits-resnet18-{arm}-s{seed}" for arm in ("random", "sec") for seed in (0, 1)]
    assert f"/#/experiments/{experiment.experiment_id}/runs?workflowType=machine_learning&viewStateShareKey=" in table
    assert "mlflow.sharedViewState.scores" in experiment.tags


def test_an_unknown_arm_is_refused_before_anything_runs(quick, tmp_path: Path):
    with pytest.raises(ConfigError, match="arms: found 'sce'; did you mean 'sec'"):
        run_ablation([*quick, "runtime=local", "arms=[random,sce]"])
    assert not (tmp_path / "runs").exists()
