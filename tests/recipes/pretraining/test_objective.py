import pytest
import torch

from ssl_sec.collectives import own_rows
from ssl_sec.losses import ORDERED_LOSSES, PAIR_LOSSES, BYOLLoss, base, contrastive, pair
from ssl_sec.recipes.pretraining.objective import SupervisedObjective
from ssl_sec.recipes.pretraining.recipe import build_recipe
from ssl_sec.training.objective import Objective
from ssl_sec.training.step import train_step
from tests.fakes import FakeRuntime
from tests.losses.cases import rows
from tests.recipes.pretraining.test_pretraining import config
from tests.workers import on_workers

NAMES = sorted(PAIR_LOSSES.keys() - ORDERED_LOSSES)
NEED_NEGATIVES = ("circle", "dcl", "lifted_structure", "multi_similarity", "semihard", "triplet")
MIXED, ONE_CLASS = torch.tensor([0, 1, 1, 2, 0, 1, 1, 2]), torch.full((8,), 3)


@pytest.fixture(params=[True, False], ids=["CPU", "GPU"])
def _labels_are_read(request, monkeypatch):
    """Whether a loss may read the labels, or, as on a GPU, would wait for them."""
    if not request.param:
        for module in (base, contrastive, pair):
            monkeypatch.setattr(module, "may_read_values", lambda labels: False)


def outcome(kind, name, labels):
    """The metric loss of this worker's rows, and their gradient."""
    own = own_rows(len(labels))
    embeddings = rows(len(labels))[own].requires_grad_()
    terms = kind(PAIR_LOSSES[name]())(embeddings, labels[own], step=0)
    return terms.total.item(), torch.autograd.grad(terms.total, embeddings)[0]


@pytest.mark.usefixtures("_labels_are_read")
@pytest.mark.parametrize("name", NAMES)
def test_images_of_one_class_cost_nothing_where_a_loss_needs_negatives(name):
    value, gradient = outcome(SupervisedObjective, name, ONE_CLASS)
    if name in NEED_NEGATIVES:
        assert value == 0 and not gradient.any()
    else:
        expected, its_gradient = outcome(Objective, name, ONE_CLASS)
        assert value == expected > 0 and torch.equal(gradient, its_gradient)


@pytest.mark.usefixtures("_labels_are_read")
@pytest.mark.parametrize("name", NAMES)
def test_another_batch_has_the_loss_of_every_objective(name):
    (value, gradient), (expected, its_gradient) = (
        outcome(kind, name, MIXED) for kind in (SupervisedObjective, Objective)
    )
    assert value == expected != 0 and torch.equal(gradient, its_gradient)


def test_a_loss_against_a_teacher_compares_images_of_one_class():
    arguments = rows(8), ONE_CLASS, 0
    values = [kind(BYOLLoss())(*arguments, targets=rows(8, seed=1)).total for kind in (SupervisedObjective, Objective)]
    assert values[0] == values[1] > 0


def on_one_worker(labels):
    return outcome(SupervisedObjective, "triplet", labels)


@pytest.mark.distributed
@pytest.mark.parametrize("labels", [ONE_CLASS, MIXED, torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])])
def test_the_classes_are_those_of_the_global_batch(tmp_path, labels):
    value, gradient = on_one_worker(labels)
    found = on_workers(2, tmp_path, on_one_worker, labels)
    assert [each for each, _ in found] == pytest.approx([value] * 2, rel=1e-12)
    together = torch.cat([each for _, each in found]) / 2  # each worker differentiates its own copy of the loss
    torch.testing.assert_close(together, gradient, rtol=1e-12, atol=1e-15)


def test_weights_have_no_gradient_of_images_of_one_class():
    settings = config(loss={"name": "triplet"}, positives="classes", constraint={"name": "none"})
    recipe = build_recipe(settings, settings.data.open("train"), FakeRuntime())
    for labels, have_gradients in ((ONE_CLASS, False), (MIXED, True)):
        result = train_step(recipe, torch.rand(8, 1, 8, 8).double(), labels, step=0)
        assert (result.terms.total.item() > 0) == have_gradients
        assert any(weight.grad.any() for weight in recipe.model.parameters()) == have_gradients
