import logging
from dataclasses import replace

import pytest
import torch

from ssl_sec.errors import DataError
from ssl_sec.evaluation.classification.knn import knn_top1
from ssl_sec.evaluation.features import extract_features
from ssl_sec.recipes.pretraining.monitor import Monitor, monitored_images
from ssl_sec.recipes.pretraining.recipe import build_recipe
from tests.data.files import encode, noise, noisy_set
from tests.fakes import FakeRuntime
from tests.recipes.pretraining.test_pretraining import config, run, without_labels


def test_a_query_that_cannot_be_read_is_not_replaced_by_an_image_of_the_bank():
    settings = config(monitor={"max_images": 1000, "neighbours": 1})
    images = noisy_set(500, bad=range(0, 500, 3), num_classes=10)
    recipe = build_recipe(settings, images, FakeRuntime())
    found = Monitor(settings, recipe, FakeRuntime())(0)["val/knn_top1"]
    chosen = monitored_images(images, 1000)
    features, labels = extract_features(recipe.encoder, replace(images, bad_indices=set()))
    bank, queries = ((features[rows], labels[rows]) for rows in (chosen.bank, chosen.queries))
    assert 100 * knn_top1(*bank, *queries, num_classes=10, k=1) > 30  # copies of the bank's images
    readable = (rows[rows % 3 > 0] for rows in (chosen.bank, chosen.queries))
    bank, queries = ((features[rows], labels[rows]) for rows in readable)
    assert found == 100 * knn_top1(*bank, *queries, num_classes=10, k=1) < 25
    assert len(queries[1]) < len(chosen.queries) and torch.equal(chosen.indices, torch.arange(500))


def test_a_set_with_one_image_of_each_class_is_refused_as_monitor_data(tmp_path):
    for number in range(4):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "one.png").write_bytes(encode(noise(8, 8)))
    data = {"name": "folder", "root": str(tmp_path), "num_channels": 1, "labels": True}
    settings = config(monitor={"data": data})
    recipe = build_recipe(settings, settings.data.open("train"), FakeRuntime())
    with pytest.raises(DataError, match="^monitor.data: found .*, one image of each class, must have two or more"):
        Monitor(settings, recipe, FakeRuntime())


def test_the_log_says_on_how_many_images_of_which_set_knn_is_measured(caplog, tmp_path):
    data = without_labels(tmp_path)
    caplog.set_level(logging.INFO)
    run(tmp_path, data=data, epochs=0, monitor={"data": {"name": "digits", "max_images": 60}})
    assert "measuring RankMe and uniformity on 200 images, and kNN of 10 images of digits among 50" in caplog.messages
    warned = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert warned == [
        "kNN is measured on 10 images of digits: its standard error is up to 16 points, and checkpoints that differ by "
        "less are not ranked by it; more labelled images make it smaller"
    ]
    caplog.clear()
    run(tmp_path, data={"name": "digits"}, epochs=0)
    assert "measuring kNN and RankMe on 1,437 images" in caplog.messages
    assert all(record.levelno == logging.INFO for record in caplog.records)


@torch.no_grad()
def test_a_collapsed_encoder_is_reported(caplog):
    caplog.set_level(logging.WARNING)
    settings = config()
    recipe = build_recipe(settings, noisy_set(40, bad=(), num_classes=10), FakeRuntime())
    monitor = Monitor(settings, recipe, FakeRuntime())
    monitor(1)
    assert not caplog.messages
    *_, bias = recipe.head.parameters()
    for weight in recipe.head.parameters():
        weight.zero_()
    bias.fill_(1)
    monitor(0)  # an encoder that has not been trained is not judged
    assert not caplog.messages
    assert monitor(1)["val/uniformity"] == pytest.approx(0, abs=1e-12)
    (message,) = caplog.messages
    assert message.startswith("the embeddings of 40 images have almost one direction (uniformity ")
