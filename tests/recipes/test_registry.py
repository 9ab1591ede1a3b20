import dataclasses
import subprocess
import sys

import pytest
from mlflow.tracking import MlflowClient

from ssl_sec.edges.composition.keys import kind_of
from ssl_sec.edges.config.export import ExportConfig
from ssl_sec.edges.export.export import run_export
from ssl_sec.edges.report.report import NORMFACE_FIGURES, SWEEP
from ssl_sec.edges.run.driver import run_recipe
from ssl_sec.edges.tracking.pages import scores_view
from ssl_sec.metrics import METRICS, metric
from ssl_sec.papers import list_papers, load
from ssl_sec.recipes.config import RunConfig, TrainingConfig
from ssl_sec.recipes.registry import RECIPES, RecipeRow, trainings
from ssl_sec.settings import from_values

CLASSIFY = RecipeRow(
    name="classify",
    about="Classification.",
    package="tests.recipes.added",
    examples=(("data=digits", "digits"),),
    leaves_head=True,
    view_metrics=("train/loss",),
    network="A classifier's embedding in {dim} dimensions.",
    hub_tags=("image-classification",),
)


@pytest.mark.parametrize("name", RECIPES)
def test_a_row_and_its_package_agree(name):
    row = RECIPES[name]
    assert issubclass(row.config, RunConfig) and issubclass(row.config, TrainingConfig) == row.is_training
    assert callable(row.run) and callable(row.draw)
    of_paper = () if row.paper_figure is None else row.paper_figure[:1]
    named = (row.score, row.score_without_labels, *row.view_metrics, *row.test_metrics, *row.curves, *of_paper)
    assert [name for name in named if name is not None and name not in METRICS and metric(name) is None] == []
    if row.is_training:
        assert row.length in {field.name for field in dataclasses.fields(row.config)}
        assert row.score is not None and row.view_metrics and "{dim}" in row.network
        assert row.score in row.curves and "norms" in row.comparisons
        assert (row.measure is None) == (set(row.comparisons) == {"norms"})


def test_every_figure_of_a_paper_is_drawn_from_some_runs():
    drawn = {"curve", "norm_statistics", *NORMFACE_FIGURES, SWEEP}.union(*(row.comparisons for row in RECIPES.values()))
    shown = [(paper, figure) for paper in list_papers() for figure in load(paper).figures]
    assert len(shown) >= 10
    for paper, figure in shown:
        assert set(figure.shows) <= drawn, (paper, figure)


@pytest.mark.parametrize(
    ("modules", "absent"),
    [
        (["ssl_sec.recipes.registry"], {"torch", "numpy", "matplotlib"}),
        (
            [*(f"{row.package}.recipe" for row in RECIPES.values()), "ssl_sec.edges.run.worker"],
            {"matplotlib", "mlflow", "ray", "hydra"},
        ),
    ],
)
def test_training_does_not_draw(modules, absent):
    code = f"""
import importlib, sys
for module in {modules}:
    importlib.import_module(module)
    print(module, *sorted({absent} & set(sys.modules)))
"""
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout
    assert printed.splitlines() == modules


def test_a_recipe_is_added_by_a_package_and_a_row(monkeypatch, tmp_path):
    """It trains, is tracked and drawn, resumed and exported."""
    monkeypatch.setitem(RECIPES, CLASSIFY.name, CLASSIFY)
    assert CLASSIFY.name in trainings()
    values = {
        "data": {"name": "digits", "max_images": 200},
        "encoder": {"name": "resnet18", "width": 0.0625},
        "head": {"name": "fc", "dim": 8},
        "loss": {"name": "softmax"},
        "augment": {"flip_probability": 0.0},
        "constraint": {"name": "none"},
        "optimiser": {"name": "sgd", "learning_rate": 0.1},
        "runtime": {"name": "local", "device": "cpu"},
        "tracking": {"system_metrics": False},
        "epochs": 2,
        "global_batch_size": 100,
        "output_dir": str(tmp_path),
        "run_name": "added",
    }
    kind_of.cache_clear()
    config = from_values(kind_of("classify"), values)
    finished = run_recipe(CLASSIFY, config)
    assert "total loss: " in str(finished)
    client = MlflowClient(finished.uri)
    run = client.get_run(finished.run_id)
    assert (run.info.status, run.data.tags["job"], run.data.tags["loss"]) == ("FINISHED", "classify", "softmax")
    drawn = {path.path for path in client.list_artifacts(finished.run_id, "plots")}
    assert drawn == {"plots/curves.png", "plots/norms.png"}
    assert client.get_registered_model("digits-encoder").latest_versions
    assert "train/loss" in next(iter(scores_view("classify").values()))
    resumed = run_recipe(CLASSIFY, dataclasses.replace(config, resume=True))  # nothing is left to do
    assert resumed.metrics == finished.metrics
    exported = run_export(
        ExportConfig(run=str(finished.folder.path), format="safetensors", output=str(tmp_path / "out"))
    )
    assert "A classifier's embedding in 8 dimensions." in (exported.folder / "README.md").read_text()
