"""Pretraining with further views of another size (multi-crop), and with the views of a class as positives."""

import math
from dataclasses import replace

import pytest
import torch
from PIL import Image
from torch import nn

from ssl_sec.data.image_set import ResidentImages
from ssl_sec.data.standard_sets import open_digits
from ssl_sec.errors import ConfigError, DataError, Stopped
from ssl_sec.losses import ORDERED_LOSSES, NTXentLoss
from ssl_sec.networks.encoder import Network
from ssl_sec.recipes.pretraining.recipe import build_recipe
from ssl_sec.training import step as training_module
from ssl_sec.training.optimisers.groups import parameter_groups
from ssl_sec.training.recipe import image_labels
from ssl_sec.training.replaying import WARM_UP_CALLS
from ssl_sec.training.step import train_step
from tests.fakes import FakeRuntime, assert_identical
from tests.recipes.pretraining.test_pretraining import config, run, without_labels
from tests.recipes.same_runs import (
    assert_resumes_bit_equal,
    assert_the_same_curve,
    assert_the_same_on_workers,
    on_a_worker,
)
from tests.training.fake_graphs import use_fake_graphs
from tests.training.test_step import Noise, fused_sgd
from tests.training.test_step import recipe as small_recipe
from tests.training.test_step import run as train_recipe
from tests.workers import on_workers

AUGMENT = {"min_scale": 0.4, "small_views": 3, "small_view_size_px": 5, "small_view_max_scale": 0.4}
# Batch norm and dropout in the head, too.
CHANGES = {"augment": AUGMENT, "epochs": 1, "head": {"name": "fc_bn", "dim": 16, "dropout": 0.3}}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """An uninterrupted run of five steps on one worker."""
    return run(tmp_path_factory.mktemp("alone"), **CHANGES)[0]


def test_all_views_of_an_image_are_positives(alone):
    # Without training each of the 5 x 40 views has 4 positives among the 199 others.
    assert 3 < alone.series("train/metric_loss")[0] < 2 * math.log(199)
    plain = {**CHANGES, "augment": {"min_scale": 0.4}}
    made = build_recipe(config(**plain), open_digits("train"), FakeRuntime())
    assert made.more_views == ()


def test_views_are_squares_of_the_shorter_side():
    digits = open_digits("train")
    assert isinstance(digits, ResidentImages)
    made = build_recipe(config(**CHANGES), replace(digits, images=digits.images[..., :6]), FakeRuntime())
    images = made.image_set.read(torch.arange(2)).images
    assert images.shape == (2, 1, 8, 6)
    sizes = [views(images, 0, slice(0, 2), 2).shape[2:] for views in (made.views, *made.more_views)]
    assert sizes == [(6, 6), (5, 5)]


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("num_workers", [2, 4])
def test_any_number_of_workers_gives_the_same_run(alone, num_workers, tmp_path):
    assert_the_same_on_workers(run, tmp_path, alone, CHANGES, num_workers=num_workers)


def test_a_stopped_and_resumed_run_ends_bit_equal(alone, tmp_path):
    assert_resumes_bit_equal(run, tmp_path, alone, 2, **CHANGES)


def test_a_run_that_recomputes_its_blocks_ends_bit_equal(alone, tmp_path):
    runtime = {"name": "local", "device": "cpu", "precision": "float64", "recompute": True}
    recomputed, _ = run(tmp_path, **CHANGES, runtime=runtime)
    assert_identical(recomputed.last_state(), alone.last_state())


def test_a_step_is_that_of_the_objective_of_all_views():
    recipe = build_recipe(config(**CHANGES, constraint={"name": "none"}), open_digits("train"), FakeRuntime())
    batch = recipe.image_set.read(torch.arange(40))
    rows = slice(0, 40)
    views = tuple(make(batch.images, 0, rows, 40).double() for make in (recipe.views, *recipe.more_views))
    assert [tuple(each.shape) for each in views] == [(80, 1, 8, 8), (120, 1, 5, 5)]
    assert recipe.row_labels(batch, rows).tolist() == 5 * list(range(40))
    training_module.draw_dropout(recipe.head, 0, rows, 5, torch.device("cpu"))
    features = torch.cat([recipe.encoder(each) for each in views])
    loss = NTXentLoss(0.5)(recipe.head(features), torch.arange(40).repeat(5))
    trained = [weight for weight in recipe.model.parameters() if weight.requires_grad]
    expected = torch.autograd.grad(loss, trained)
    terms, computed, _ = train_step(recipe, views, recipe.row_labels(batch, rows), 0)
    torch.testing.assert_close(computed, features.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(terms.total, loss.detach(), rtol=1e-12, atol=0, check_dtype=False)
    for weight, gradient in zip(trained, expected, strict=True):
        torch.testing.assert_close(weight.grad, gradient, rtol=1e-9, atol=1e-12)


def test_the_head_takes_the_features_of_all_sizes_at_once():
    torch.manual_seed(0)
    encoder, head = nn.AdaptiveAvgPool2d(1), nn.Sequential(nn.Flatten(), nn.BatchNorm1d(3))
    large, small = torch.rand(4, 3, 8, 8), torch.rand(6, 3, 5, 5)
    embeddings = Network(encoder, head)(large, small).embeddings
    expected = nn.functional.batch_norm(torch.cat([large.mean((2, 3)), small.mean((2, 3))]), None, None, training=True)
    torch.testing.assert_close(embeddings, expected)
    torch.testing.assert_close(Network(encoder, head)(large).embeddings, head(encoder(large)))


def test_replayed_steps_equal_called_steps(monkeypatch):
    graphs = use_fake_graphs(monkeypatch)

    def trained(**changes):
        labels = {"row_labels": lambda batch, rows: image_labels(batch, rows, 4)}
        made = small_recipe(**labels, **changes)
        # The encoder of that recipe takes nine pixels, in whatever shape.
        more = (lambda *images: Noise()(*images).flatten(2).unsqueeze(2) * 0.5,)
        optimiser = fused_sgd(parameter_groups([made.model], 1e-3))
        model = Network(made.encoder, made.head)
        runtime = train_recipe(replace(made, more_views=more, optimiser=optimiser, model=model))
        return runtime.series("train/loss"), runtime.last_state()

    losses, state = trained(graphed=True)
    expected_losses, expected = trained()
    assert graphs.replays == len(losses) - WARM_UP_CALLS > 0
    assert losses == pytest.approx(expected_losses, rel=1e-12)
    torch.testing.assert_close(state, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("encoder", "size_px"),
    [
        ({"name": "ir18", "width": 0.0625}, 24),  # built for one size
        ({"name": "bn_inception", "mean": [0.0], "std": [1.0]}, 3),  # too small for it
        ({"name": "pixels"}, 5),  # the head's size depends on it
    ],
)
def test_small_views_that_an_encoder_cannot_take_are_refused_in_one_line(encoder, size_px, tmp_path):
    changes = {**CHANGES, "encoder": encoder, "augment": {**AUGMENT, "small_view_size_px": size_px}}
    with pytest.raises(ConfigError, match=f"^augment.small_view_size_px: found {size_px}, .* cannot take") as error:
        run(tmp_path, **changes)
    assert "\n" not in str(error.value)


def steps(reports):
    """Without the metrics of the monitor, whose RankMe of almost equal features magnifies what rounding leaves."""
    return [(step, metrics) for step, metrics in reports if "train/loss" in metrics]


@pytest.mark.distributed
@pytest.mark.parametrize("loss", ["supcon", pytest.param("dcl", marks=pytest.mark.slow)])
def test_supervised_views_with_scaled_gradients_are_the_same_on_two_workers(tmp_path, loss):
    changes = {"loss": {"name": loss}, "positives": "classes", "grad_scale": 1.0, "epochs": 1}
    alone, _ = run(tmp_path, **changes)
    for reports, _ in on_workers(2, tmp_path, on_a_worker, run, tmp_path, changes):
        assert_the_same_curve(steps(reports), steps(report[:2] for report in alone.reports))


def test_supervision_makes_the_views_of_a_class_positives(tmp_path):
    settings = config(loss={"name": "supcon"}, positives="classes")
    images = settings.data.open("train")
    recipe = build_recipe(settings, images, FakeRuntime())
    batch = images.read(recipe.sampler.indices(0))
    assert recipe.row_labels(batch, slice(0, 40)).tolist() == 2 * images.labels[recipe.sampler.indices(0)].tolist()
    assert settings.name_parts == ("supcon", "sec_ema", "supervised")
    with pytest.raises(DataError, match="200 images without labels found; positives=classes needs the class of each"):
        run(tmp_path, data=without_labels(tmp_path), positives="classes")


@pytest.mark.parametrize(("key", "found", "allowed"), [("num_views", 3, 2), ("small_views", 4, 0)])
def test_a_loss_of_two_views_takes_no_others(key, found, allowed):
    message = rf"^augment.{key}: found {found}, must be {allowed} with loss=npair_normalized, which takes two views"
    with pytest.raises(ConfigError, match=message):
        config(loss={"name": "npair_normalized"}, augment={key: found})
    assert config(loss={"name": "npair"}, augment={key: found}).augment != config().augment


@pytest.mark.parametrize("name", sorted(ORDERED_LOSSES - {"angular_hinge", "triplet_disjoint"}))  # of triplets
def test_losses_that_pair_rows_by_their_order_do_not_take_classes(name):
    with pytest.raises(ConfigError, match=f"^positives: found 'classes', must be views with loss={name}, which pairs"):
        config(loss={"name": name}, positives="classes")


def test_an_encoder_that_learned_from_all_labels_is_not_measured_on_their_images(tmp_path):
    with pytest.raises(ConfigError, match="^probe.test_share: found 0.2, must be null with positives=classes"):
        config(loss={"name": "supcon"}, positives="classes", probe={"test_share": 0.2})
    runtime, _ = run(tmp_path, loss={"name": "supcon"}, positives="classes", epochs=1)
    assert set(runtime.reports[-1][1]) == {"val/rankme", "val/alpha_req", "val/alignment", "val/uniformity"}


def test_another_set_with_two_images_of_each_class_is_measured_by_knn_alone(tmp_path):
    images = open_digits("train")
    chosen = torch.cat([(images.labels == number).nonzero().flatten()[:2] for number in range(10)])
    for row in chosen.tolist():
        path = tmp_path / "other/train" / str(int(images.labels[row])) / f"{row}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(images.images[row, 0].numpy()).save(path)
    other = {"name": "folder", "root": str(tmp_path / "other"), "image_size_px": 8, "num_channels": 1}
    runtime, _ = run(tmp_path, monitor={"data": other, "every_epochs": 1, "max_images": 20}, epochs=1)
    assert "val/knn_top1" in runtime.reports[-1][1] and "val/probe_top1" not in runtime.reports[-1][1]


def test_only_initial_weights_are_divided_by_the_cut():
    plain, cut = (
        build_recipe(settings, settings.data.open("train"), FakeRuntime())
        for settings in (config(), config(cut_init=4.0, grad_scale=1.0))
    )
    assert cut.objective.grad_scale == 1.0 and plain.objective.grad_scale == 0.0
    torch.testing.assert_close(4 * cut.head.layers[0].weight, plain.head.layers[0].weight)
    for part, trained in (
        ("encoder", {"name": "resnet50", "weights": "w.pth"}),
        ("encoder", {"name": "timm", "model": "resnet10t", "pretrained": True}),
        ("head", {"name": "mlp", "weights": "head.safetensors"}),
    ):
        with pytest.raises(ConfigError, match=f"^cut_init: found 4.0, must be 1 with trained weights of the {part}$"):
            config(**{part: trained}, cut_init=4.0)


TAUGHT = {"epochs": 1, "constraint": {"name": "sec", "eta": 0.1}}


@pytest.mark.distributed
@pytest.mark.parametrize("loss", ["byol", pytest.param("mocov3", marks=pytest.mark.slow)])
def test_a_teacher_is_the_same_on_any_number_of_workers_and_after_a_resume(tmp_path, loss):
    changes = {**TAUGHT, "loss": {"name": loss, "momentum": 0.8, "predictor_dim": 24}}
    alone, store = run(tmp_path, **changes)
    for reports, state in on_workers(2, tmp_path, on_a_worker, run, tmp_path, changes):
        assert_the_same_curve(steps(reports), steps(report[:2] for report in alone.reports))
        torch.testing.assert_close(state["teacher"], alone.last_state()["teacher"], rtol=1e-7, atol=1e-9)
    stopped = FakeRuntime(stop_at=2)
    with pytest.raises(Stopped):
        run(tmp_path, stopped, **changes)
    resumed, _ = run(tmp_path, state=stopped.last_state(), **changes)
    assert_identical(resumed.last_state(), alone.last_state())


@pytest.mark.parametrize("loss", ["byol", "mocov3"])
def test_a_teacher_has_no_dropout(tmp_path, loss):
    head = {"name": "fc_bn", "dim": 16, "dropout": 0.3}
    runtime, _ = run(tmp_path, **TAUGHT, loss={"name": loss}, head=head)
    assert len(runtime.series("train/loss")) == 5


def test_a_teacher_follows_the_network_without_its_predictor():
    settings = config(**{**TAUGHT, "loss": {"name": "byol", "momentum": 0.8, "predictor_dim": 24}})
    recipe = build_recipe(settings, settings.data.open("train"), FakeRuntime())
    online = nn.ModuleDict({"encoder": recipe.encoder, "head": recipe.head.projector})
    before = {name: weight.clone() for name, weight in recipe.teacher.network.named_parameters()}
    assert_identical(before, dict(online.named_parameters()))
    views = torch.rand(80, 1, 8, 8, dtype=torch.float64)
    # Its batch norm uses the statistics of the batch, too.
    taught = Network(recipe.encoder, recipe.head.projector)(views).embeddings.detach()
    torch.testing.assert_close(recipe.teacher(views), taught)
    train_step(recipe, views, torch.arange(40).repeat(2), 2)
    momentum = 1 - 0.2 * (1 + math.cos(math.pi * 2 / 5)) / 2
    weights = dict(online.named_parameters())
    for name, weight in recipe.teacher.network.named_parameters():
        torch.testing.assert_close(weight, momentum * before[name] + (1 - momentum) * weights[name])
        assert weight.grad is None and not weight.requires_grad
    assert all(weight.grad is not None for weight in recipe.head.predictor.parameters())


@pytest.mark.parametrize(
    ("warmup_epochs", "is_said"), [(3, True), (2, False), pytest.param(1, False, marks=pytest.mark.slow)]
)
def test_a_warm_up_longer_than_the_run_is_said(tmp_path, caplog, warmup_epochs, is_said):
    with caplog.at_level("INFO"):
        run(tmp_path, optimiser={"name": "sgd", "learning_rate": 0.3, "warmup_epochs": warmup_epochs})
    said = "optimiser.warmup_epochs: the run's 10 steps are all warm-up: the rate ends at 0.2, below 0.3"
    assert (said in caplog.messages) == is_said


@pytest.mark.parametrize(
    ("optimiser", "said"),
    [
        (
            {"name": "lars", "learning_rate": 4.8},
            "4.8 is 102 times the usual rate of lars for batches of 40 images, 0.0469",
        ),
        (
            {"name": "adamw", "learning_rate": 2.4e-3},
            "0.0024 is 102 times the usual rate of adamw for batches of 40 images",
        ),
        ({"name": "adamw", "learning_rate": 2.4e-5}, None),
        (
            {"name": "sgd", "learning_rate": 0.5},
            "0.5 is 6.4 times the usual rate of sgd for batches of 40 images, 0.0781",
        ),
        ({"name": "sgd", "learning_rate": 0.3}, None),
    ],
)
def test_the_rate_of_a_much_larger_batch_is_named(tmp_path, caplog, optimiser, said):
    run(tmp_path, epochs=1, optimiser={**optimiser, "warmup_epochs": 0})
    warnings = [text for text in caplog.messages if text.startswith("optimiser.learning_rate: ")]
    assert len(warnings) == (said is not None)
    assert said is None or said in warnings[0]


@pytest.mark.parametrize(("view_size_px", "is_said"), [(4, True), (6, False), (None, False)])
def test_views_much_smaller_than_the_images_are_said(tmp_path, caplog, view_size_px, is_said):
    run(tmp_path, epochs=1, augment={"view_size_px": view_size_px})
    said = [
        text for text in caplog.messages if text.startswith("augment.view_size_px: the encoder is trained on views")
    ]
    assert len(said) == is_said
    assert not is_said or said[0].endswith(
        "of 4 pixels, and measured and exported for images of 8; null makes the views as large"
    )
