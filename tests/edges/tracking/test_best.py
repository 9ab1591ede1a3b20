"""The alias `best` of a registered model, and the tags of its versions."""

import json
import math

import pytest
from mlflow.entities import Dataset, DatasetInput, Param
from mlflow.tracking import MlflowClient

from ssl_sec.data.config import DigitsConfig
from ssl_sec.edges.folder.descriptions import DataDescription
from ssl_sec.edges.tracking.scores import child_probes, describe_versions, mark_best, probe_protocol
from ssl_sec.edges.tracking.store import connect_to_store
from ssl_sec.evaluation.config import ProbeConfig

PAPER, FEW = "digits, all labels (aaaaaaaa)", "digits, 10 labels (bbbbbbbb)"


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> MlflowClient:
    return connect_to_store(f"sqlite:///{tmp_path_factory.mktemp('store')}/mlflow.db")


def log_data(client, run_id, digest, classes):
    data = Dataset("digits/train", digest, "ssl_sec", "scikit-learn's", profile=json.dumps({"classes": classes}))
    client.log_inputs(run_id, [DatasetInput(data, [])])


def add_version(client, recipe, knn=None, *, digest="d1", classes=10, neighbours=20, rankme=None, other=None):
    """A run with its registered encoder; its id."""
    run_id = client.create_run("0", tags={"job": "pretrain", "recipe": recipe, "constraint": "sec"}).info.run_id
    client.log_param(run_id, "monitor.neighbours", neighbours)
    client.log_param(run_id, "monitor.data", None) if other is None else client.log_batch(
        run_id, params=[Param(f"monitor.data.{key}", value) for key, value in other.items()]
    )
    if digest is not None:
        log_data(client, run_id, digest, classes)
    if knn is not None:
        client.log_metric(run_id, "val/knn_top1", 1.0, step=1)
        client.log_metric(run_id, "val/knn_top1", knn, step=2)
    if rankme is not None:
        client.log_metric(run_id, "val/rankme", rankme, step=2)
    if not client.search_registered_models(f'name="{recipe}-encoder"'):
        client.create_registered_model(f"{recipe}-encoder")
    client.create_model_version(f"{recipe}-encoder", f"runs:/{run_id}/encoder", run_id)
    return run_id


def add_probe(client, recipe, parent, top1, protocol=PAPER, *, digest="test", classes=10, status="FINISHED"):
    tags = {"job": "probe", "recipe": recipe, "mlflow.parentRunId": parent, "probe.protocol": protocol}
    run_id = client.create_run("0", tags=tags).info.run_id
    log_data(client, run_id, digest, classes)
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


def test_without_labels_the_effective_rank_chooses(client):
    for rankme, expected in ((90.0, "1"), (300.0, "2"), (120.0, "2"), (math.inf, "2")):
        add_version(client, "photos", classes=0, rankme=rankme, digest="photos")
        assert best(client, "photos") == expected
    add_version(client, "photos", 50.0, digest="labelled photos", rankme=400.0)  # with labels the rank no longer counts
    assert best(client, "photos") == "5"
    add_version(client, "photos", classes=0, rankme=100.0, digest="photos")
    assert best(client, "photos") == "2"


def test_the_probe_chooses_once_two_versions_have_one(client):
    first, second = add_version(client, "probed", 60.0), add_version(client, "probed", 70.0)
    add_probe(client, "probed", first, 90.0)
    assert best(client, "probed") == "2"
    add_probe(client, "probed", second, 95.0, status="FAILED")
    assert best(client, "probed") == "2"
    add_probe(client, "probed", second, 80.0)
    assert best(client, "probed") == "1"
    assert {parent: len(runs) for parent, runs in child_probes(client, "probed").items()} == {first: 1, second: 1}
    add_version(client, "probed", 99.0)  # one that is not probed yet
    assert best(client, "probed") == "1"


def test_versions_of_a_run_that_was_trained_further_keep_the_scores_of_their_weights(client):
    name, other = "longer-encoder", add_version(client, "longer", 75.0)
    run_id = add_version(client, "longer", 70.0)
    describe_versions(client, "longer", other)
    describe_versions(client, "longer", run_id)
    assert best(client, "longer") == "1"
    for step, knn, expected in ((3, 90.0, "3"), (4, 60.0, "3")):
        client.log_metric(run_id, "val/knn_top1", knn, step=step)
        client.create_model_version(name, f"runs:/{run_id}/encoder", run_id)
        describe_versions(client, "longer", run_id)
        assert best(client, "longer") == expected
    shown = [client.get_model_version(name, str(number)).description for number in (1, 2, 3, 4)]
    assert [text.splitlines()[0].split(" (")[0] for text in shown] == [
        f"Score: val/knn_top1 {value}" for value in (75, 70, 90, 60)
    ]
    add_probe(client, "longer", run_id, 90.0)
    describe_versions(client, "longer", run_id)
    assert client.get_model_version(name, "4").tags["score"] == "90"
    assert client.get_model_version(name, "3").tags["score.name"] == "val/knn_top1"


def test_a_kept_checkpoint_that_was_registered_has_no_score_of_its_runs_last_weights(client, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", client.tracking_uri)  # where MLflow looks for the model of a version

    def register_checkpoint(run_id: str) -> None:
        model = client.create_logged_model("0", source_run_id=run_id, model_type="checkpoint")
        client.create_model_version("kept-encoder", f"models:/{model.model_id}", run_id, model_id=model.model_id)

    run_id = add_version(client, "kept", 80.0)
    register_checkpoint(run_id)
    describe_versions(client, "kept", run_id)
    add_probe(client, "kept", run_id, 75.0)
    add_probe(client, "kept", add_version(client, "kept", 70.0), 65.0)
    assert best(client, "kept") == "1"
    client.delete_model_version("kept-encoder", "1")  # the checkpoint is the run's only version
    describe_versions(client, "kept", run_id)
    assert best(client, "kept") == "3" and client.get_model_version("kept-encoder", "2").tags == {}


@pytest.mark.parametrize(
    ("first", "later", "expected"), [(76.134, 76.132, "1"), (76.136, 76.138, "3"), (100 / 3, 100 / 3, "1")]
)
def test_an_earlier_version_of_a_run_is_compared_with_all_digits(client, first, later, expected):
    """Of 50,000 images one is 0.002 %; of equal versions the oldest is the best."""
    recipe = f"digits of {first} and {later}"
    run_id = add_version(client, recipe, first)
    describe_versions(client, recipe, run_id)
    client.log_metric(run_id, "val/knn_top1", 20.0, step=3)
    client.create_model_version(f"{recipe}-encoder", f"runs:/{run_id}/encoder", run_id)
    describe_versions(client, recipe, run_id)
    add_version(client, recipe, later)
    assert best(client, recipe) == expected


def test_a_fine_tuning_counts_by_the_network_that_it_saved(client):
    for last, chosen, expected in ((70.0, 90.0, "1"), (80.0, 80.0, "1"), (95.0, None, "3")):
        run_id = add_version(client, "tuned", None)
        client.log_metric(run_id, "val/top1", last, step=5)
        if chosen is not None:
            client.log_metric(run_id, "finetune/val_top1", chosen, step=6)
        assert best(client, "tuned") == expected


def test_the_protocol_of_a_run_without_a_monitor_is_its_score(client):
    run_id = client.create_run("0", tags={"job": "finetune", "recipe": "alone"}).info.run_id
    log_data(client, run_id, "d1", 10)
    client.log_metric(run_id, "val/top1", 70.0)
    client.create_registered_model("alone-encoder")
    client.create_model_version("alone-encoder", f"runs:/{run_id}/encoder", run_id)
    describe_versions(client, "alone", run_id)
    version = client.get_model_version("alone-encoder", "1")
    assert version.tags["score.protocol"] == "val/top1"
    assert version.description.startswith("Score: val/top1 70 (val/top1)\n")


def test_other_recipes_do_not_count(client):
    first = add_version(client, "one", 60.0)
    add_version(client, "other", 99.0)
    add_probe(client, "one", first, 50.0)
    assert best(client, "one") == "1"


def test_a_recipe_without_encoders_has_no_best(client):
    mark_best(client, "none")
    assert client.search_registered_models("name='none-encoder'") == []


def test_encoders_of_other_data_are_not_compared(client):
    """All user sets shared one model name; the data of the newest version decides."""
    add_version(client, "flowers", 99.0, digest="d1")
    add_version(client, "flowers", 60.0, digest="d2")
    assert best(client, "flowers") == "2"
    add_version(client, "flowers", 50.0, digest="d2")
    assert best(client, "flowers") == "2"
    add_version(client, "flowers", 40.0, digest="d1")
    assert best(client, "flowers") == "1"


def test_a_run_without_a_data_digest_is_not_compared(client):
    add_version(client, "untold", 60.0)
    add_version(client, "untold", 99.0, digest=None)
    assert best(client, "untold") == "1"


@pytest.mark.parametrize("score", [math.nan, math.inf])
def test_scores_that_are_not_finite_do_not_count(client, score):
    recipe = f"unranked{score}"
    first, second = add_version(client, recipe, 60.0), add_version(client, recipe, score)
    assert best(client, recipe) == "1"
    add_probe(client, recipe, first, 80.0)
    add_probe(client, recipe, second, score)
    assert best(client, recipe) == "1"


def test_scores_of_one_class_do_not_count(client):
    first = add_version(client, "one class", 60.0)
    add_version(client, "one class", 100.0, digest="one", classes=1)
    assert best(client, "one class") == "None"
    second = add_version(client, "one class", 50.0)
    for run_id in (first, second):
        add_probe(client, "one class", run_id, 100.0 if run_id == second else 99.0, digest="one", classes=1)
    assert best(client, "one class") == "1"


def test_probes_of_another_protocol_are_not_compared(client):
    first, second = add_version(client, "mixed", 60.0), add_version(client, "mixed", 50.0)
    add_probe(client, "mixed", first, 70.0, FEW)
    add_probe(client, "mixed", second, 90.0, PAPER)
    assert best(client, "mixed") == "1"  # no two of one protocol: kNN
    add_probe(client, "mixed", first, 85.0, PAPER)
    assert best(client, "mixed") == "2"
    third = add_version(client, "mixed", 40.0)
    for run_id, top1 in ((second, 10.0), (third, 99.0)):
        add_probe(client, "mixed", run_id, top1, FEW)
    assert best(client, "mixed") == "3"  # three have this one


def test_monitors_with_other_settings_are_not_compared(client):
    add_version(client, "watched", 99.0, neighbours=1)
    for knn in (60.0, 61.0):
        add_version(client, "watched", knn)
    assert best(client, "watched") == "3"


def test_labels_of_another_set_compare_encoders_of_images_without_labels(client):
    other = {"name": "cifar10", "root": "/data"}
    for knn, rankme in ((60.0, 9.0), (70.0, 5.0)):
        add_version(client, "lent", knn, classes=0, rankme=rankme, other=other)
    assert best(client, "lent") == "2"
    add_version(client, "lent", 65.0, classes=0, rankme=9.5, other={**other, "root": "/elsewhere"})
    assert best(client, "lent") == "2"
    add_version(client, "lent", 80.0, classes=0, rankme=1.0, other={"name": "cifar100"})  # the only one of its set
    assert best(client, "lent") == "2"


def test_a_version_has_its_data_score_and_run(client):
    run_id = add_version(client, "described", 60.0)
    client.set_tag(run_id, "mlflow.runName", "described-sec-s0")
    describe_versions(client, "described", run_id)
    version = client.get_model_version("described-encoder", "1")
    assert version.tags.items() >= {"score": "60", "score.name": "val/knn_top1", "data.digest": "d1"}.items()
    assert version.tags.items() >= {"constraint": "sec", "run_id": run_id}.items()
    assert "kNN" not in version.description and "val/knn_top1 60" in version.description
    add_probe(client, "described", run_id, 81.5)
    describe_versions(client, "described", run_id)
    version = client.get_model_version("described-encoder", "1")
    assert version.tags.items() >= {"score": "81.5", "score.name": "probe/top1", "score.protocol": PAPER}.items()
    assert all(part in version.description for part in ("probe/top1 81.5", PAPER, "digest d1", "scikit-learn", run_id))


def test_a_better_version_registered_meanwhile_gets_the_alias(client, monkeypatch):
    """Another run registers its encoder and sets the alias before we overwrite it with an older result."""
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


@pytest.mark.parametrize(
    ("settings", "number"),
    [
        # As in earlier versions, whose scores are compared with new ones.
        ({}, "55f7a9c9"),
        ({"resident_limit_mib": 0, "enabled": True, "logistic": True, "few_shot": (5,)}, "55f7a9c9"),
        ({"labels_per_class": 10, "test_share": 0.2}, "52f7e26c"),
        ({"min_scale": 0.08}, "55f7a9c9"),
        ({"augment": True, "min_scale": 0.2}, "92904b2d"),
    ],
)
def test_a_protocol_has_the_settings_that_change_a_score(settings, number):
    described = {"description": "", "num_bad_images": 0, "image_shape": (1, 8, 8), "class_names": ()}
    test_set = DataDescription(name="digits/test", num_images=360, digest="d1", **described)
    assert probe_protocol(ProbeConfig(**settings), DigitsConfig(), test_set).endswith(f"({number})")


def test_probes_that_leave_out_other_images_have_other_protocols():
    described = {"description": "", "num_bad_images": 0, "image_shape": (1, 8, 8), "class_names": ()}
    test_set = DataDescription(name="digits/test", num_images=360, digest="d1", **described)
    lists = [(), ("/a/left.csv",), ("/a/left.csv", "other.csv")]
    found = [probe_protocol(ProbeConfig(), DigitsConfig(leave_out=places), test_set) for places in lists]
    assert [each.partition(",")[0] for each in found[:2]] == ["digits", "digits without left.csv"]
    assert len({each.rpartition(" ")[2] for each in found}) == 3
