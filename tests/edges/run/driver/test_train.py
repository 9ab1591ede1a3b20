"""Runs from Python."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from mlflow.tracking import MlflowClient

from ssl_sec import ConfigError, Encoder, train
from ssl_sec.edges.folder.folder import RunFolder
from tests.edges.conftest import QUICK

PAGE = Path(__file__).parents[4] / "docs" / "configuration.md"


def test_the_training_of_the_documentation_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (block,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    exec(block.replace('"runtime=local"', '"runtime=local", *quick'), names := {"quick": QUICK})
    run = names["run"]
    assert isinstance(names["encoder"], Encoder)
    *shown, last = capsys.readouterr().out.splitlines()
    assert last == f"{run.metrics['probe/top1']} {run.run_id}"
    assert shown[-4:-2] == [f"folder: {tmp_path}/runs/digits/{run.folder.name}", f"MLflow run: {run.run_id}"]
    in_notebook: list[str] = []
    run._repr_pretty_(SimpleNamespace(text=in_notebook.append), False)  # as IPython calls it
    assert in_notebook == [str(run)]
    assert repr(run.folder) == f"RunFolder('{run.folder.path}')"
    logged = MlflowClient(run.uri).get_run(run.run_id).data.metrics
    assert run.metrics["train/loss"] == logged["train/loss"]

    probed = train("probe", f"run={run.run_id}", "probe.epochs=3", "runtime=local", "tracking.system_metrics=false")
    assert RunFolder(probed.folder.path).probed_config_path.is_file()
    assert "probe/top1" in probed.metrics


def test_the_pixels_are_a_baseline_that_is_probed(tmp_path):
    pixels = ["encoder=pixels", "head=identity", "head.dim=64", "constraint=none", "epochs=0", "probe.enabled=true"]
    quick = [option for option in QUICK if not option.startswith(("encoder.", "epochs="))]
    random_state = torch.get_rng_state()
    run = train("pretrain", *quick, *pixels, "runtime=local", f"output_dir={tmp_path}")
    assert torch.equal(torch.get_rng_state(), random_state)
    assert run.metrics["probe/top1"] > 80


def test_own_experiments_are_found_as_by_the_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    own = tmp_path / "mine" / "experiment"
    own.mkdir(parents=True)
    (own / "short.yaml").write_text("# @package _global_\ndefaults: [digits, _self_]\nepochs: -1\n")
    with pytest.raises(ConfigError, match=r"^epochs: found -1, must be"):
        train("pretrain", "--config-dir=mine", "experiment=short", "runtime=local")


@pytest.mark.parametrize(
    ("job", "typed", "message"),
    [
        ("pretain", [], "job: found 'pretain'; did you mean 'pretrain'?"),
        ("export", [], "job: found 'export'; allowed: face, finetune, metric_learning, pretrain, probe"),
        ("pretrain", ["experiment=digitz"], "experiment: found 'digitz'; did you mean 'digits'?"),
        ("probe", [], "run: missing"),
    ],
)
def test_a_mistake_is_the_line_of_the_command(job, typed, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}"):
        train(job, *typed)
    assert not list(tmp_path.iterdir())
