from dataclasses import replace

import torch

from ssl_sec.evaluation.features import extract_features
from ssl_sec.evaluation.knn import knn_top1
from ssl_sec.recipes.pretraining.monitor import Monitor, monitored_images
from ssl_sec.recipes.pretraining.recipe import build_recipe
from tests.data.files import noisy_set
from tests.fakes import FakeRuntime
from tests.recipes.test_pretraining import config


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
