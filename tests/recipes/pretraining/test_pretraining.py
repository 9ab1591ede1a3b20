import logging
import math
import re
from dataclasses import replace

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from ssl_sec.collectives import rank, world_size
from ssl_sec.data.image_set import UNLABELLED
from ssl_sec.data.standard_sets import open_digits
from ssl_sec.data.stores import limit_images
from ssl_sec.errors import ConfigError, DataError, Stopped
from ssl_sec.evaluation.classification.linear_probe import linear_probe
from ssl_sec.evaluation.features import extract_features
from ssl_sec.recipes.pretraining.config import PretrainConfig
from ssl_sec.recipes.pretraining.monitor import Monitor, monitored_images
from ssl_sec.recipes.pretraining.recipe import build_recipe
from ssl_sec.recipes.pretraining.recipe import run as pretrain
from ssl_sec.seeding import derived_seed
from ssl_sec.settings import from_values
from tests.fakes import FakeRuntime, assert_identical
from tests.recipes.same_runs import (
    assert_the_same_curve,
    assert_the_same_on_workers,
    curve,
    on_a_worker,
    run_with_fakes,
)
from tests.workers import on_workers, two_and_four

VALUES = {
    "recipe": "digits",
    "data": {"name": "digits", "max_images": 200},
    "augment": {"min_scale": 0.4},
    "encoder": {"name": "resnet18", "width": 0.125},
    "head": {"name": "mlp", "dim": 16},
    "loss": {"name": "ntxent"},
    "constraint": {"name": "sec_ema", "eta": 1.0, "rho": 0.3},
    "optimiser": {"name": "sgd", "learning_rate": 0.1},
    "runtime": {"name": "local", "device": "cpu", "precision": "float64"},
    "epochs": 2,
    "global_batch_size": 40,  # five steps an epoch
    "log_every_steps": 1,
    "monitor": {"every_epochs": 1, "neighbours": 5},
    "checkpoint": {"every_epochs": 1},
}

WITHOUT_LABELS = {"val/rankme", "val/alpha_req", "val/alignment", "val/uniformity"}


def config(**changes) -> PretrainConfig:
    return from_values(PretrainConfig, {**VALUES, **changes})


def run(folder, machine=None, state=None, **changes):
    return run_with_fakes(pretrain, config(**changes), folder, machine, state)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An uninterrupted run of ten steps on one worker."""
    return run(tmp_path_factory.mktemp("whole"))


@pytest.mark.distributed
@two_and_four
def test_any_number_of_workers_gives_the_same_run(tmp_path, whole, num_workers):
    runtime, _ = whole
    assert len(runtime.series("train/loss")) == 10
    assert_the_same_on_workers(run, tmp_path, runtime, {}, num_workers=num_workers)


@pytest.mark.slow
@pytest.mark.distributed
def test_four_blurred_views_of_another_size_are_the_same_on_two_workers(tmp_path):
    changes = {
        "augment": {"num_views": 4, "view_size_px": 6, "blur_probability": 0.5, "solarise_probability": 0.2},
        "epochs": 1,
    }
    alone, _ = run(tmp_path, **changes)
    # Without training each of the 4 x 40 views has 3 positives among the 159 others.
    assert 2 < alone.series("train/metric_loss")[0] < 2 * math.log(159)
    for reports, _ in on_workers(2, tmp_path, on_a_worker, run, tmp_path, changes):
        assert_the_same_curve(reports, alone.reports)


def test_a_run_that_recomputes_its_blocks_ends_bit_equal(tmp_path, whole):
    recomputed, _ = run(tmp_path, runtime={**VALUES["runtime"], "recompute": True})
    assert curve(recomputed.reports) == curve(whole[0].reports)
    assert_identical(recomputed.last_state(), whole[0].last_state())


@pytest.mark.distributed
def test_a_run_resumes_with_another_number_of_workers(tmp_path, whole):
    (first, state), _ = on_workers(2, tmp_path, on_a_worker, run, tmp_path, {}, 3)
    assert state["step"] == 3
    second, _ = on_a_worker(run, tmp_path, {}, state=state)
    assert_the_same_curve(first + second, whole[0].reports)


def test_a_stopped_and_resumed_run_ends_bit_equal(tmp_path, whole):
    runtime = FakeRuntime(stop_at=4)
    with pytest.raises(Stopped):
        run(tmp_path, runtime)
    assert not (tmp_path / "encoder.safetensors").exists()
    torch.manual_seed(99)
    resumed, store = run(tmp_path, state=runtime.last_state())
    assert store.forgotten == [4]
    assert curve(runtime.reports + resumed.reports) == curve(whole[0].reports)
    assert_identical(resumed.last_state(), whole[0].last_state())
    assert_identical(load_file(store.encoder_path), load_file(whole[1].encoder_path))


def test_resuming_a_finished_run_says_so_and_trains_no_step(tmp_path, whole, caplog):
    with caplog.at_level(logging.INFO, "ssl_sec.training.step"):
        resumed, _ = run(tmp_path, state=whole[0].last_state())
    assert "resuming after step 10 of 10" in caplog.text
    assert resumed.reports == resumed.saves == []
    assert_identical(load_file(tmp_path / "encoder.safetensors"), load_file(whole[1].encoder_path))


def test_the_reported_metrics_have_the_expected_names(whole):
    names = {name for _, metrics, _ in whole[0].reports for name in metrics}
    assert names == {
        "train/loss",
        "train/metric_loss",
        "train/constraint",
        "train/eta",
        "train/lr",
        "train/norm_mean",
        "train/norm_std",
        "train/turn_mean",
        "train/turn_std",
        "train/gradient_norm_mean",
        "train/step_angle_mean",
        "train/step_angle_std",
        "train/images_per_s",
        "train/epoch",
        "val/knn_top1",
        "val/probe_top1",
        *WITHOUT_LABELS,
    }
    assert list(whole[0].series("val/knn_top1")) == [4, 9]
    assert all(0 <= value <= 100 for value in whole[0].series("val/knn_top1").values())


def monitored():
    """The metrics of an encoder that was not trained, on this worker."""
    settings = config(data={"name": "digits"}, global_batch_size=42)
    runtime = FakeRuntime(rank(), world_size())
    recipe = build_recipe(settings, settings.data.open("train"), runtime)
    return Monitor(settings, recipe, runtime)(0)


@pytest.mark.slow
@pytest.mark.distributed
def test_any_number_of_workers_monitors_the_same(tmp_path):
    # Four chunks of views, which three workers take in two turns.
    alone = monitored()
    for metrics in on_workers(3, tmp_path, monitored):
        assert metrics == pytest.approx(alone, rel=1e-8)


def without_labels(folder):
    """The data of the runs as images in a flat folder."""
    images = limit_images(open_digits("train"), 200, seed=0).read(torch.arange(200)).images
    root = folder / "images"
    root.mkdir()
    for number, image in enumerate(images):
        Image.fromarray(image[0].numpy()).save(root / f"{number:03d}.png")
    return {"name": "folder", "root": str(root), "num_channels": 1}


def test_images_without_labels_are_monitored_without_them(tmp_path, whole):
    runtime, store = run(tmp_path, data=without_labels(tmp_path))
    assert runtime.series("train/loss") == whole[0].series("train/loss")  # the images alone decide
    _, last, _ = runtime.reports[-1]
    assert set(last) == WITHOUT_LABELS
    for name in ("val/rankme", "val/alpha_req"):
        assert runtime.series(name)[9] == pytest.approx(whole[0].series(name)[9])
    kept = torch.load(store.features_path, weights_only=True)
    assert kept["features"].shape == (200, 64) and kept["labels"].unique().tolist() == [UNLABELLED]


def test_labels_of_another_set_rank_the_encoders_of_images_without_labels(tmp_path, whole):
    monitor = {**VALUES["monitor"], "data": {"name": "digits", "max_images": 200}}
    runtime, store = run(tmp_path, data=without_labels(tmp_path), monitor=monitor)
    assert runtime.series("train/loss") == whole[0].series("train/loss")
    assert runtime.series("val/knn_top1") == whole[0].series("val/knn_top1")  # the same images, with labels
    assert torch.load(store.features_path, weights_only=True)["labels"].unique().tolist() == [UNLABELLED]
    # The protocol of the run's own probe, on the images of the monitor.
    settings = config(monitor=monitor)
    recipe = build_recipe(settings, settings.data.open("train"), FakeRuntime())
    recipe.encoder.load_state_dict(runtime.last_state()["encoder"])
    chosen = monitored_images(recipe.image_set, settings.monitor.max_images)
    features, labels = extract_features(recipe.encoder, chosen.image_set, chosen.indices)
    bank, queries = ((features[rows], labels[rows]) for rows in (chosen.bank, chosen.queries))
    expected = linear_probe(bank, queries).top1
    assert runtime.series("val/probe_top1")[9] == pytest.approx(100 * expected) and expected > 0.2


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        ({}, DataError, "give labelled images, or monitor.data.labels=true if the folders are classes"),
        (
            {"image_size_px": 12, "labels": True},
            ConfigError,
            "must have the shape of the run's own, 1 x 8 x 8; monitor.data.image_size_px=8 monitor.data.",
        ),
    ],
)
def test_another_set_must_have_labels_and_the_shape_of_the_runs_own(tmp_path, data, error, message):
    other = {**without_labels(tmp_path), **data}
    if data:
        root = tmp_path / "images"
        for number, path in enumerate(sorted(root.glob("*.png"))):
            (root / str(number % 2)).mkdir(exist_ok=True)
            path.rename(root / str(number % 2) / path.name)
    with pytest.raises(error, match=re.escape(message)):
        run(tmp_path, monitor={"data": other})


def test_the_online_probe_changes_nothing_else_and_can_be_left_out(tmp_path, whole):
    runtime, store = run(tmp_path, monitor={**VALUES["monitor"], "online_probe": False})
    assert not runtime.series("val/probe_top1") and list(whole[0].series("val/probe_top1")) == [4, 9]
    without = [(step, {n: v for n, v in m.items() if n != "val/probe_top1"}) for step, m, _ in whole[0].reports]
    assert curve(runtime.reports) == curve(without)
    assert_identical(load_file(store.encoder_path), load_file(whole[1].encoder_path))
    # A run with a probe can resume a state without one; the probe then starts anew.
    state = runtime.last_state()
    assert "observer" not in state
    resumed, _ = run(tmp_path, state=state)
    assert resumed.reports == []


def test_the_online_probe_is_trained_on_no_query(tmp_path):
    settings = config(monitor={**VALUES["monitor"], "max_images": 100})
    images = settings.data.open("train")
    recipe = build_recipe(settings, images, FakeRuntime())
    probe = Monitor(settings, recipe, FakeRuntime()).online_probe
    chosen = monitored_images(images, 100)
    assert probe.left_out.tolist() == sorted(chosen.indices[chosen.queries].tolist())
    assert len(probe.left_out) == 10 and probe.left_out.max() >= 100


def test_images_with_one_class_each_are_ranked_without_labels():
    settings = config(data={"name": "digits"})
    digits = settings.data.open("train")
    images = replace(digits, labels=torch.arange(len(digits)), class_names=tuple(map(str, range(len(digits)))))
    monitor = Monitor(settings, build_recipe(settings, images, FakeRuntime()), FakeRuntime())
    assert monitor.online_probe is None and set(monitor(1)) == WITHOUT_LABELS


def test_alignment_and_uniformity_are_those_of_the_embedded_views(tmp_path):
    settings = config(data={"name": "digits"}, epochs=0)
    runtime, images = FakeRuntime(), settings.data.open("train")
    recipe = build_recipe(settings, images, runtime)
    metrics = Monitor(settings, recipe, runtime)(0)
    assert recipe.encoder.training and recipe.head.training
    seed = derived_seed(0, "monitored views")
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))[:1024]
    views = settings.augment.build(8, 1, seed)
    first, second = [], []
    network = torch.nn.Sequential(recipe.encoder, recipe.head).eval()
    with torch.no_grad():
        for number, chunk in enumerate(order.split(256)):
            pixels = views(images.read(chunk).images, number, slice(0, 256), 256).double()
            one, other = torch.nn.functional.normalize(network(pixels), dim=1).split(256)
            first.append(one), second.append(other)
    first, second = torch.cat(first), torch.cat(second)
    distances = torch.pdist(first).square()
    assert metrics["val/alignment"] == pytest.approx(float((first - second).square().sum(1).mean()))
    assert metrics["val/uniformity"] == pytest.approx(float((-2 * distances).exp().mean().log()))


def test_the_store_has_the_results_of_the_run(whole):
    runtime, store = whole
    assert store.described == [("digits/train", 200)]
    assert store.forgotten == [0]
    weights = load_file(store.encoder_path)
    state = runtime.last_state()["encoder"]
    assert_identical({f"backbone.{name}": value for name, value in weights.items()}, dict(state))
    assert "conv1.weight" in weights and not any(name.startswith("fc") for name in weights)
    kept = torch.load(store.features_path, weights_only=True)
    assert kept["features"].shape == (200, 64) and kept["labels"].bincount().tolist() == [20] * 10


def writes(folder):
    """Whether this worker described the data and wrote into its own folder."""
    folder = folder / str(rank())
    folder.mkdir()
    _, store = run(folder, FakeRuntime(rank(), world_size()), epochs=0)
    return bool(store.described), bool(store.forgotten), store.encoder_path.exists(), store.features_path.exists()


@pytest.mark.distributed
def test_only_the_first_worker_writes(tmp_path):
    assert on_workers(2, tmp_path, writes, tmp_path) == [(True,) * 4, (False,) * 4]


def test_the_loss_falls_and_neighbours_are_found(tmp_path):
    changes = {
        "data": {"name": "digits"},
        "epochs": 6,
        "global_batch_size": 128,
        "optimiser": {"name": "sgd", "learning_rate": 0.2},
        "runtime": {"name": "local", "device": "cpu"},
        "monitor": {"every_epochs": 100, "neighbours": 5},
    }
    runtime, _ = run(tmp_path, **changes)
    losses = list(runtime.series("train/metric_loss").values())
    assert sum(losses[-5:]) / 5 < losses[0] - 0.5
    assert runtime.series("val/knn_top1")[65] > 50  # chance is 10


def test_zero_epochs_keep_the_initial_encoder_and_its_accuracy(tmp_path):
    runtime, store = run(tmp_path, epochs=0)
    ((step, metrics, _),) = runtime.reports
    assert step == 0 and set(metrics) == {"val/knn_top1", *WITHOUT_LABELS}
    assert metrics["val/knn_top1"] > 20
    assert runtime.saves == []
    initial = build_recipe(config(), config().data.open("train"), FakeRuntime()).encoder.backbone
    assert_identical(load_file(store.encoder_path), dict(initial.state_dict()))


def test_initial_weights_depend_on_the_seed_alone():
    def weights(seed):
        recipe = build_recipe(config(seed=seed), config().data.open("train"), FakeRuntime())
        return torch.cat([parameter.detach().flatten() for parameter in recipe.model.parameters()])

    torch.manual_seed(1)
    first = weights(0)
    torch.manual_seed(2)
    assert torch.equal(weights(0), first)
    assert not torch.equal(weights(1), first)


def test_views_do_not_depend_on_the_device_of_the_runtime():
    """A kornia module on a device would draw there, from a generator without our seed."""
    images = config().data.open("train")
    pixels = images.images[:40]
    on_cpu, elsewhere = FakeRuntime(), FakeRuntime()
    elsewhere.device = torch.device("meta")
    views = [build_recipe(config(), images, runtime).views for runtime in (on_cpu, elsewhere)]
    assert_views_are_equal(*views, pixels)


def assert_views_are_equal(views, others, pixels):
    """Asserts that two augmentations make the same views of steps 0 and 1."""
    for step in range(2):
        one, other = (augment(pixels, step, slice(0, len(pixels)), len(pixels)) for augment in (views, others))
        assert torch.equal(one, other)


def test_a_run_that_diverges_names_its_step(tmp_path):
    with pytest.raises(FloatingPointError, match="^the objective is nan at step "):
        run(tmp_path, optimiser={"name": "sgd", "learning_rate": 1e6}, runtime={"name": "local", "device": "cpu"})
    assert not (tmp_path / "encoder.safetensors").exists()


def test_bfloat16_and_the_other_layout_train_similarly(tmp_path, whole):
    options = {"name": "local", "device": "cpu", "precision": "bfloat16", "channels_last": False}
    runtime, _ = run(tmp_path, runtime=options)
    mine, exact = runtime.series("train/loss"), whole[0].series("train/loss")
    assert mine[0] == pytest.approx(exact[0], rel=0.02)
    assert mine[4] == pytest.approx(exact[4], rel=0.2)


def test_a_number_of_workers_that_does_not_divide_the_batch_is_refused():
    with pytest.raises(ConfigError, match="3 workers cannot share global_batch_size = 40 equally; allowed: 1, 2, 4, 5"):
        build_recipe(config(), config().data.open("train"), FakeRuntime(0, 3))


def test_the_monitor_reads_only_the_requested_number_of_images(tmp_path):
    _, store = run(tmp_path, epochs=0, monitor={"max_images": 50, "neighbours": 5})
    labels = torch.load(store.features_path, weights_only=True)["labels"]
    assert labels.bincount().tolist() == [5] * 10
