"""Runs with many classes: steps that compare with a part of them, and fewer classes than workers."""

import contextlib
import json

import pytest
import torch
from safetensors.torch import load_file

from ssl_sec.data.standard_sets import open_digits
from ssl_sec.edges.folder.folder import RunFolder
from ssl_sec.errors import ConfigError, DataError
from ssl_sec.recipes import assembly
from ssl_sec.recipes.face.recipe import build_recipe
from tests.data.test_fingerprint import write_image
from tests.fakes import FakeRuntime
from tests.recipes.face.test_recipe import VALUES, config, on_a_worker, run, work_on_a_worker
from tests.recipes.pretraining.test_pretraining import assert_the_same_curve
from tests.workers import on_workers

SAMPLED = {"class_sample_rate": 0.4, "evaluation": {"enabled": False}}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An uninterrupted run on one worker."""
    return run(tmp_path_factory.mktemp("whole"), **SAMPLED)


def test_the_first_losses_are_those_of_fewer_classes(tmp_path, whole):
    """Before anything is learned, a softmax over k classes is near log k."""
    of_all = run(tmp_path, evaluation={"enabled": False})[0].series("train/metric_loss")
    sampled = whole[0].series("train/metric_loss")
    assert sampled[0] <= of_all[0]
    assert sampled != of_all


@pytest.mark.distributed
def test_two_workers_give_the_same_curve(tmp_path, whole):
    expected = [(step, metrics) for step, metrics, _ in whole[0].reports]
    (reports, _), _ = on_workers(2, tmp_path, on_a_worker, tmp_path, SAMPLED)
    assert_the_same_curve(reports, expected)


@pytest.mark.distributed
def test_a_resume_on_one_worker_of_a_run_that_two_shared_continues_the_curve(tmp_path, whole):
    changes = {**SAMPLED, "share_classes_from": 10}
    folder = RunFolder(tmp_path / "run")
    folder.start({**VALUES, **changes})
    folder.stop_path.touch()
    on_workers(2, tmp_path, work_on_a_worker, folder.path, changes)
    assert folder.outcome() == "stopped"
    folder.stop_path.unlink()
    on_workers(1, tmp_path, work_on_a_worker, folder.path, changes)
    records = [json.loads(line) for line in folder.metrics_path.read_text().splitlines()]
    reports = [(record["step"], record["metrics"]) for record in records if "metrics" in record]
    assert_the_same_curve(reports, whole[0].reports)
    torch.testing.assert_close(load_file(folder.encoder_path), load_file(whole[1].encoder_path), rtol=1e-7, atol=1e-9)


def refused_on_a_worker(folder, changes):
    with contextlib.suppress(Exception):  # the other workers lose their connection
        work_on_a_worker(folder, changes)


@pytest.mark.distributed
def test_a_resume_of_sharded_templates_with_another_class_is_refused_as_one_with_other_images(tmp_path):
    root = tmp_path / "people"
    for number in range(16):
        write_image(root / "train" / "abcd"[number % 4] / f"{number}.png", number)
    data = {"name": "folder", "root": str(root), "image_size_px": 8, "num_channels": 1}
    changes = {"data": data, "share_classes_from": 2, "global_batch_size": 8, "evaluation": {"enabled": False}}
    folder = RunFolder(tmp_path / "run")
    folder.start({**VALUES, **changes})
    folder.stop_path.touch()
    on_workers(2, tmp_path, work_on_a_worker, folder.path, changes)
    folder.stop_path.unlink()
    write_image(root / "train" / "e" / "16.png", 16)
    on_workers(2, tmp_path, refused_on_a_worker, folder.path, changes)
    error = folder.error()
    assert isinstance(error, DataError), error
    assert "found 17 images, but the run to resume began with 16" in str(error)


@pytest.mark.parametrize("loss", [{"name": "c_triplet"}, {"name": "center"}])
def test_a_loss_without_a_softmax_over_the_classes_is_refused(loss):
    message = f"^class_sample_rate: found 0.4, must be 1 with loss={loss['name']}, which is no softmax$"
    with pytest.raises(ConfigError, match=message):
        config(**SAMPLED, loss=loss)


def test_one_of_two_losses_may_be_the_softmax():
    first, second = {"name": "cosface", "scale": 8.0}, {"name": "center"}
    config(**SAMPLED, loss={"name": "combined", "first": first, "second": second, "weight": 0.1})


def test_fewer_classes_than_workers_are_not_sharded(monkeypatch):
    monkeypatch.setattr(assembly, "world_size", lambda: 12)
    message = "^share_classes_from: found 10, must be above 10, the number of classes, with 12 workers$"
    with pytest.raises(ConfigError, match=message):
        build_recipe(config(share_classes_from=10), open_digits("train"), FakeRuntime())
