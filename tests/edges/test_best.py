"""The alias `best` of a recipe's registered model."""

import pytest
from mlflow.tracking import MlflowClient

from ssl_sec.edges.mlflow_tracker import child_probes, connected, mark_best


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> MlflowClient:
    return connected(f"sqlite:///{tmp_path_factory.mktemp('store')}/mlflow.db")


def add_version(client, recipe, knn=None):
    """A run with its registered encoder; its id."""
    run_id = client.create_run("0", tags={"job": "pretrain", "recipe": recipe}).info.run_id
    if knn is not None:
        client.log_metric(run_id, "val/knn_top1", 1.0, step=1)
        client.log_metric(run_id, "val/knn_top1", knn, step=2)
    if not client.search_registered_models(f'name="{recipe}-encoder"'):
        client.create_registered_model(f"{recipe}-encoder")
    client.create_model_version(f"{recipe}-encoder", f"runs:/{run_id}/encoder", run_id)
    return run_id


def add_probe(client, recipe, parent, top1, status="FINISHED"):
    tags = {"job": "probe", "recipe": recipe, "mlflow.parentRunId": parent}
    run_id = client.create_run("0", tags=tags).info.run_id
    client.log_metric(run_id, "probe/top1", top1)
    client.set_terminated(run_id, status)
    return run_id


def best(client, recipe):
    mark_best(client, recipe)
    return str(client.get_registered_model(f"{recipe}-encoder").aliases.get("best"))


def test_the_last_knn_figure_chooses_and_of_equals_the_earliest_stays(client):
    add_version(client, "odd's")
    assert best(client, "odd's") == "None"
    for knn, expected in ((60.0, "2"), (70.0, "3"), (70.0, "3"), (65.0, "3")):
        add_version(client, "odd's", knn)
        assert best(client, "odd's") == expected


def test_probes_choose_where_all_have_been_probed(client):
    first, second = add_version(client, "probed", 60.0), add_version(client, "probed", 70.0)
    add_probe(client, "probed", first, 90.0)
    assert best(client, "probed") == "2"
    add_probe(client, "probed", second, 95.0, status="FAILED")
    assert best(client, "probed") == "2"
    add_probe(client, "probed", second, 80.0)
    assert best(client, "probed") == "1"
    assert {parent: len(runs) for parent, runs in child_probes(client, "probed").items()} == {first: 1, second: 1}


def test_other_recipes_do_not_count(client):
    first = add_version(client, "one", 60.0)
    add_version(client, "other", 99.0)
    add_probe(client, "one", first, 50.0)
    assert best(client, "one") == "1"


def test_a_recipe_without_encoders_has_no_best(client):
    mark_best(client, "none")
    assert client.search_registered_models("name='none-encoder'") == []


def test_a_better_version_that_comes_while_the_alias_is_set_is_seen(client, monkeypatch):
    """Another run registers its encoder and sets the alias before we overwrite it with what we had found."""
    set_alias, calls = MlflowClient.set_registered_model_alias, []

    def slow(self, name, alias, version):
        calls.append(version)
        if len(calls) == 1:
            add_version(client, "raced", 80.0)
            set_alias(self, name, alias, "2")
        set_alias(self, name, alias, version)

    monkeypatch.setattr(MlflowClient, "set_registered_model_alias", slow)
    add_version(client, "raced", 60.0)
    assert best(client, "raced") == "2"
    assert calls == ["1", "2"]
