"""Grafana's dashboard: its schema, and the metrics that it names."""

import json
import re
from pathlib import Path

import pytest

FILE = Path(__file__).parents[2] / "jobs" / "cluster" / "grafana-dashboard.json"
BOARD = json.loads(FILE.read_text())
EXPRESSIONS = [target["expr"] for panel in BOARD["panels"] for target in panel.get("targets", [])]


def metrics_of(expression: str) -> set[str]:
    """The names of the metrics of an expression of PromQL, without the labels of a `by` clause or a selector."""
    bare = re.sub(r"\bby \([^)]*\)|\{[^}]*\}", "", expression)
    return set(re.findall(r"\bray_\w+", bare))


def named() -> set[str]:
    """The metrics that the dashboard draws."""
    return set[str]().union(*map(metrics_of, EXPRESSIONS))


def test_the_dashboard_has_what_grafana_requires():
    assert {"title", "uid", "schemaVersion", "panels", "templating", "time"} <= BOARD.keys()
    assert "id" not in BOARD  # Grafana would take it for the number of a dashboard that it has
    assert len(BOARD["uid"]) <= 40 and re.fullmatch(r"[\w-]+", BOARD["uid"])
    ids = [panel["id"] for panel in BOARD["panels"]]
    assert len(set(ids)) == len(ids)
    variables = {each["name"] for each in BOARD["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", re.sub(r"\$__\w+", "", json.dumps(BOARD))))
    assert used == variables == {"datasource", "run"}
    cells: set[tuple[int, int]] = set()
    for panel in BOARD["panels"]:
        place = panel["gridPos"]
        own = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not own & cells and max(x for x, _ in own) < 24, panel["title"]
        cells |= own
        if panel["type"] == "row":
            continue
        assert panel["type"] == "timeseries" and panel["title"] and panel["description"].endswith(".")
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        references = [target["refId"] for target in panel["targets"]]
        assert references and len(set(references)) == len(references)
        assert {"defaults", "overrides"} <= panel["fieldConfig"].keys()


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_an_expression_is_balanced_and_its_legend_shows_its_groups(expression):
    depth = 0
    for character in expression:
        depth += (character in "({[") - (character in ")}]")
        assert depth >= 0
    assert depth == 0 and metrics_of(expression)
    (legend,) = {
        target["legendFormat"]
        for panel in BOARD["panels"]
        for target in panel.get("targets", [])
        if target["expr"] == expression
    }
    grouped = re.search(r"\bby \(([^)]*)\)", expression)
    assert set(re.findall(r"\{\{(\w+)\}\}", legend)) == set(grouped[1].split(", ") if grouped else ())


def test_runs_are_told_apart_by_all_of_their_labels():
    runs = [expression for expression in EXPRESSIONS if "ray_ssl_sec_" in expression]
    assert len(runs) == 4 and all("max by (recipe, run, output_dir)" in expression for expression in runs)


def test_what_ray_publishes_only_for_seconds_is_drawn_until_it_changes():
    """Ray drops a gauge from its page 20 s after it was set, and sets those of Ray Train only when they change."""
    train = [expression for expression in EXPRESSIONS if "ray_train_" in expression]
    assert len(train) == 2
    for expression in train:
        assert re.search(r"last_over_time\(ray_train_\w+\{[^}]*\}\[1d\]\)", expression)


def test_ray_has_the_metrics_of_the_machines_and_of_train():
    """Metrics of GPUs need a GPU; tests/edges/run/on_ray checks the others on a page of Ray."""
    from ray.dashboard.modules.reporter.reporter_agent import METRICS_GAUGES
    from ray.train.v2._internal.metrics.controller import ControllerMetrics

    known = {f"ray_{name}" for name in METRICS_GAUGES}
    known |= {f"ray_{value}" for value in vars(ControllerMetrics).values() if isinstance(value, str)}
    machines = {name for name in named() if name.startswith(("ray_node_", "ray_cluster_", "ray_train_"))}
    assert len([name for name in machines if "gpu" in name or "gram" in name]) == 4
    assert machines <= known
