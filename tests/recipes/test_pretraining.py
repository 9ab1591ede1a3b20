import logging
import math

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from ssl_sec.collectives import rank, world_size
from ssl_sec.data.image_set import UNLABELLED
from ssl_sec.data.standard_sets import open_digits
from ssl_sec.data.stores import limit_images
from ssl_sec.errors import ConfigError, Stopped
from ssl_sec.recipes.pretraining.config import PretrainConfig
from ssl_sec.recipes.pretraining.monitor import Monitor
from ssl_sec.recipes.pretraining.recipe import build_recipe
from ssl_sec.recipes.pretraining.recipe import run as pretrain
from ssl_sec.seeding import derived_seed
from ssl_sec.settings import from_values
from tests.fakes import FakeRuntime, FakeStore, assert_identical
from tests.workers import on_workers

VALUES = {
    "recipe": "digits",
    "data": {"name": "digits", "max_images": 200},
    "augment": {"min_scale": 0.4},
    "encoder": {"name": "resnet18", "width": 0.125},
    "head": {"name": "mlp", "dim": 16},
    "loss": {"name": "ntxent"},
    "constraint": {"name": "sec_ema", "eta": 1.0, "rho": 0.3},
    "optimiser": {"learning_rate": 0.1},
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
    machine, store = machine or FakeRuntime(), FakeStore(folder, state)
    pretrain(config(**changes), machine, store)
    return machine, store


def on_a_worker(folder, changes, stop_at=None, state=None):
    """What this worker reported, and its last saved state."""
    runtime = FakeRuntime(rank(), world_size(), stop_at)
    try:
        run(folder, runtime, state, **changes)
    except Stopped:
        assert stop_at is not None
    return [(step, metrics) for step, metrics, _ in runtime.reports], runtime.last_state()


def figures(reports):
    """All that must not depend on the number of workers: everything but the speed."""
    return [(step, {name: m[name] for name in sorted(m) if name != "train/images_per_s"}) for step, m in reports]


def assert_the_same_curve(one, other):
    one, other = figures(one), figures(other)
    assert [(step, list(metrics)) for step, metrics in one] == [(step, list(metrics)) for step, metrics in other]
    for (_, mine), (_, theirs) in zip(one, other, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-8)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An uninterrupted run of ten steps on one worker."""
    return run(tmp_path_factory.mktemp("whole"))


@pytest.mark.distributed
@pytest.mark.parametrize("num_workers", [2, 4])
def test_any_number_of_workers_gives_the_same_run(tmp_path, whole, num_workers):
    runtime, _ = whole
    expected = [(step, metrics) for step, metrics, _ in runtime.reports]
    assert len(runtime.series("train/loss")) == 10
    for reports, state in on_workers(num_workers, tmp_path, on_a_worker, tmp_path, {}):
        assert_the_same_curve(reports, expected)
        torch.testing.assert_close(state, runtime.last_state(), rtol=1e-7, atol=1e-9)


@pytest.mark.distributed
def test_four_blurred_views_of_another_size_are_the_same_on_two_workers(tmp_path):
    changes = {
        "augment": {"num_views": 4, "view_size_px": 6, "blur_probability": 0.5, "solarise_probability": 0.2},
        "epochs": 1,
    }
    alone, _ = run(tmp_path, **changes)
    # Without training each of the 4 x 40 views has 3 positives among the 159 others.
    assert 2 < alone.series("train/metric_loss")[0] < 2 * math.log(159)
    for reports, _ in on_workers(2, tmp_path, on_a_worker, tmp_path, changes):
        assert_the_same_curve(reports, [report[:2] for report in alone.reports])


@pytest.mark.distributed
def test_a_run_goes_on_with_another_number_of_workers(tmp_path, whole):
    expected = [(step, metrics) for step, metrics, _ in whole[0].reports]
    (first, state), _ = on_workers(2, tmp_path, on_a_worker, tmp_path, {}, 3)
    assert state["step"] == 3
    second, _ = on_a_worker(tmp_path, {}, state=state)
    assert_the_same_curve(first + second, expected)


def test_a_stopped_and_resumed_run_ends_bit_equal(tmp_path, whole):
    runtime = FakeRuntime(stop_at=4)
    with pytest.raises(Stopped):
        run(tmp_path, runtime)
    assert not (tmp_path / "encoder.safetensors").exists()
    torch.manual_seed(99)
    resumed, store = run(tmp_path, state=runtime.last_state())
    assert store.forgotten == [4]
    assert figures([r[:2] for r in runtime.reports + resumed.reports]) == figures([r[:2] for r in whole[0].reports])
    assert_identical(resumed.last_state(), whole[0].last_state())
    assert_identical(load_file(store.encoder_path), load_file(whole[1].encoder_path))


def test_a_resume_says_where_it_goes_on(tmp_path, whole, caplog):
    with caplog.at_level(logging.INFO, "ssl_sec.training.step"):
        resumed, _ = run(tmp_path, state=whole[0].last_state())
    assert "resuming after step 10 of 10" in caplog.text
    assert resumed.reports == resumed.saves == []
    assert_identical(load_file(tmp_path / "encoder.safetensors"), load_file(whole[1].encoder_path))


def test_the_reported_names_are_those_of_the_design(whole):
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
        "train/images_per_s",
        "train/epoch",
        "val/knn_top1",
        *WITHOUT_LABELS,
    }
    assert list(whole[0].series("val/knn_top1")) == [4, 9]
    assert all(0 <= value <= 100 for value in whole[0].series("val/knn_top1").values())


def monitored():
    """The figures of an encoder that was not trained, on this worker."""
    settings = config(data={"name": "digits"}, global_batch_size=42)
    runtime = FakeRuntime(rank(), world_size())
    recipe = build_recipe(settings, settings.data.open("train"), runtime)
    return Monitor(settings, recipe, runtime)(0)


@pytest.mark.distributed
def test_any_number_of_workers_monitors_the_same(tmp_path):
    # Four chunks of views, which three workers take in two turns.
    alone = monitored()
    for figures in on_workers(3, tmp_path, monitored):
        assert figures == pytest.approx(alone, rel=1e-8)


def test_images_without_labels_are_monitored_without_them(tmp_path, whole):
    images = open_digits("train")
    folder = tmp_path / "images"
    folder.mkdir()
    for number, image in enumerate(limit_images(images, 200, seed=0).read(torch.arange(200)).images):
        Image.fromarray(image[0].numpy()).save(folder / f"{number:03d}.png")
    data = {"name": "folder", "root": str(folder), "num_channels": 1}
    runtime, store = run(tmp_path, data=data)
    assert runtime.series("train/loss") == whole[0].series("train/loss")  # the images alone decide
    _, last, _ = runtime.reports[-1]
    assert set(last) == WITHOUT_LABELS
    for name in ("val/rankme", "val/alpha_req"):
        assert runtime.series(name)[9] == pytest.approx(whole[0].series(name)[9])
    kept = torch.load(store.features_path, weights_only=True)
    assert kept["features"].shape == (200, 64) and kept["labels"].unique().tolist() == [UNLABELLED]


def test_alignment_and_uniformity_are_those_of_the_embedded_views(tmp_path):
    settings = config(data={"name": "digits"}, epochs=0)
    runtime, images = FakeRuntime(), settings.data.open("train")
    recipe = build_recipe(settings, images, runtime)
    figures = Monitor(settings, recipe, runtime)(0)
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
    assert figures["val/alignment"] == pytest.approx(float((first - second).square().sum(1).mean()))
    assert figures["val/uniformity"] == pytest.approx(float((-2 * distances).exp().mean().log()))


def test_what_outlives_the_run_is_left_in_the_store(whole):
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
        "optimiser": {"learning_rate": 0.2},
        "runtime": {"name": "local", "device": "cpu"},
        "monitor": {"every_epochs": 100, "neighbours": 5},
    }
    runtime, _ = run(tmp_path, **changes)
    losses = list(runtime.series("train/metric_loss").values())
    assert sum(losses[-5:]) / 5 < losses[0] - 0.5
    assert runtime.series("val/knn_top1")[65] > 50  # chance is 10


def test_no_epochs_leave_the_initial_encoder_and_its_accuracy(tmp_path):
    runtime, store = run(tmp_path, epochs=0)
    ((step, metrics, _),) = runtime.reports
    assert step == 0 and set(metrics) == {"val/knn_top1", *WITHOUT_LABELS}
    assert metrics["val/knn_top1"] > 20
    assert runtime.saves == []
    initial = build_recipe(config(), config().data.open("train"), FakeRuntime()).encoder.backbone
    assert_identical(load_file(store.encoder_path), dict(initial.state_dict()))


def test_the_seed_decides_the_weights_and_nothing_else_does():
    def weights(seed):
        recipe = build_recipe(config(seed=seed), config().data.open("train"), FakeRuntime())
        return torch.cat([parameter.detach().flatten() for parameter in recipe.model.parameters()])

    torch.manual_seed(1)
    first = weights(0)
    torch.manual_seed(2)
    assert torch.equal(weights(0), first)
    assert not torch.equal(weights(1), first)


def test_a_gpu_would_draw_the_views_that_a_cpu_draws():
    """Moved to a device, kornia draws there, from a generator that no seed reaches."""
    images = config().data.open("train")
    pixels = images.images[:40]
    on_cpu, elsewhere = FakeRuntime(), FakeRuntime()
    elsewhere.device = torch.device("meta")
    views = [build_recipe(config(), images, runtime).views for runtime in (on_cpu, elsewhere)]
    assert_views_are_equal(*views, pixels)


def assert_views_are_equal(views, others, pixels):
    """Whether two augmentations make the same views of steps 0 and 1."""
    for step in range(2):
        one, other = (augment(pixels, step, slice(0, len(pixels)), len(pixels)) for augment in (views, others))
        assert torch.equal(one, other)


def test_a_run_that_diverges_names_its_step(tmp_path):
    with pytest.raises(FloatingPointError, match="^the objective is nan at step "):
        run(tmp_path, optimiser={"learning_rate": 1e6}, runtime={**VALUES["runtime"], "precision": "float32"})
    assert not (tmp_path / "encoder.safetensors").exists()


def test_bfloat16_and_the_other_layout_train_about_as_well(tmp_path, whole):
    options = {"name": "local", "device": "cpu", "precision": "bfloat16", "channels_last": False}
    runtime, _ = run(tmp_path, runtime=options)
    mine, exact = runtime.series("train/loss"), whole[0].series("train/loss")
    assert mine[0] == pytest.approx(exact[0], rel=0.02)
    assert mine[4] == pytest.approx(exact[4], rel=0.2)


def test_a_number_of_workers_that_does_not_divide_the_batch_is_refused():
    with pytest.raises(ConfigError, match="3 workers cannot share global_batch_size = 40 equally; allowed: 1, 2, 4, 5"):
        build_recipe(config(), config().data.open("train"), FakeRuntime(0, 3))


def test_the_monitor_looks_at_no_more_images_than_asked_for(tmp_path):
    _, store = run(tmp_path, epochs=0, monitor={"max_images": 50, "neighbours": 5})
    labels = torch.load(store.features_path, weights_only=True)["labels"]
    assert labels.bincount().tolist() == [5] * 10
