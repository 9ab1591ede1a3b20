import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch.nn.functional import one_hot

from ssl_sec.collectives import rank, world_size
from ssl_sec.data.crops import CentreCrop
from ssl_sec.errors import ConfigError, DataError
from ssl_sec.evaluation.clustering import kmeans_assignments, nmi_f1
from ssl_sec.evaluation.retrieval import precision_at_r, recall_at_k
from ssl_sec.recipes.metric_learning import recipe
from ssl_sec.recipes.metric_learning.config import MetricLearningConfig, RetrievalConfig
from ssl_sec.recipes.metric_learning.recipe import build_recipe, retrieval_metrics, watched_images
from ssl_sec.recipes.metric_learning.recipe import run as learn_metric
from ssl_sec.settings import from_values
from tests.data.files import encode, plain, write_folder
from tests.fakes import FakeRuntime, assert_identical
from tests.recipes.pretraining.test_pretraining import assert_views_are_equal
from tests.recipes.same_runs import (
    assert_resumes_bit_equal,
    assert_the_same_curve,
    assert_the_same_on_workers,
    on_a_worker,
    run_with_fakes,
)
from tests.workers import on_workers

VALUES = {
    "recipe": "digits_retrieval",
    "data": {"name": "digits", "num_train_classes": 6},
    "augment": {"min_scale": 0.4, "flip_probability": 0.0},
    "encoder": {"name": "resnet18", "width": 0.125},
    "head": {"name": "bn_fc", "dim": 16},
    "loss": {"name": "triplet"},
    "constraint": {"name": "sec_ema", "eta": 0.5, "rho": 0.3, "ramp": "constant"},
    "transform": {"name": "sft"},
    "sampler": {"name": "classes", "images_per_class": 5},
    "optimiser": {"name": "adam", "learning_rate": 1e-3, "backbone_learning_rate": 5e-4, "decay_at_steps": [6]},
    "runtime": {"name": "local", "device": "cpu", "precision": "float64"},
    "steps": 10,
    "global_batch_size": 20,
    "held_out_share": 0.3,
    "log_every_steps": 1,
    "monitor": {"every_steps": 4},
    "checkpoint": {"every_steps": 3},
}
CROP = CentreCrop()


def config(**changes) -> MetricLearningConfig:
    return from_values(MetricLearningConfig, {**VALUES, **changes})


def run(folder, machine=None, state=None, **changes):
    return run_with_fakes(learn_metric, config(**changes), folder, machine, state)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An uninterrupted run of ten steps on one worker."""
    return run(tmp_path_factory.mktemp("whole"))


@pytest.mark.distributed
def test_two_workers_give_the_same_run(tmp_path, whole):
    # The test classes are measured by the first worker.
    assert_the_same_on_workers(run, tmp_path, whole[0], {}, num_of_first=1)


def test_a_stopped_and_resumed_run_ends_bit_equal(tmp_path, whole):
    store = assert_resumes_bit_equal(run, tmp_path, whole[0], 5)
    assert_identical(load_file(store.head_path), load_file(whole[1].head_path))


def test_the_papers_metrics_are_reported_at_their_intervals(whole):
    runtime, store = whole
    assert list(runtime.series("train/loss")) == list(range(10))
    assert list(runtime.series("val/recall_at_1")) == [0, 3, 7, 9]  # at the start, too
    assert [step for step, _ in runtime.saves] == [3, 6, 9, 10]
    step, metrics_at_the_end, _ = runtime.reports[-1]
    assert step == 10
    assert set(metrics_at_the_end) == {
        *(f"retrieval/recall_at_{k}" for k in (1, 2, 4, 8)),
        "retrieval/r_precision",
        "retrieval/map_at_r",
        "retrieval/nmi",
        "retrieval/f1",
        "retrieval/rotation_shift_mean",
        "retrieval/within_class_energy",
        *(f"retrieval/{split}_norm_{figure}" for split in ("test", "train") for figure in ("mean", "variance")),
    }
    recalls = [metrics_at_the_end[f"retrieval/recall_at_{k}"] for k in (1, 2, 4, 8)]
    assert recalls == sorted(recalls) and 25 < recalls[0] <= 100  # four classes
    kept = torch.load(store.features_path, weights_only=True)
    found = precision_at_r(kept["features"], kept["labels"])
    shown = [metrics_at_the_end[f"retrieval/{name}"] for name in ("r_precision", "map_at_r")]
    assert shown == pytest.approx([100 * found.r_precision, 100 * found.map_at_r])


def test_the_rates_fall_and_the_backbone_has_its_own(whole):
    runtime, _ = whole
    rates = list(runtime.series("train/lr").values())
    assert rates == pytest.approx([1e-3] * 6 + [1e-4] * 4)
    groups = runtime.last_state()["optimiser"]["param_groups"]
    assert {group["rate_factor"] for group in groups} == {0.5, 1.0}


def test_training_and_test_classes_are_disjoint(tmp_path):
    recipe = build_recipe(config(), config().data.open_by_class("train", CROP), FakeRuntime())
    trained = set(recipe.image_set.class_names)
    test = set(config().data.open_by_class("test", CROP).class_names)
    assert trained == set("012345") and test == set("6789")


def test_views_do_not_depend_on_the_device_of_the_runtime():
    images = config().data.open_by_class("train", CROP)
    on_cpu, elsewhere = FakeRuntime(), FakeRuntime()
    elsewhere.device = torch.device("meta")
    views = [build_recipe(config(), images, runtime).views for runtime in (on_cpu, elsewhere)]
    assert_views_are_equal(*views, images.images[:40])


def test_the_store_has_the_results_of_the_run(whole):
    runtime, store = whole
    state = runtime.last_state()
    assert_identical({f"backbone.{k}": v for k, v in load_file(store.encoder_path).items()}, dict(state["encoder"]))
    assert_identical(load_file(store.head_path), dict(state["head"]))
    kept = torch.load(store.features_path, weights_only=True)
    assert kept["features"].shape == (len(kept["labels"]), 16) and set(kept["labels"].tolist()) == {0, 1, 2, 3}
    assert kept["class_names"] == list("6789")
    examples = torch.load(store.examples_path, weights_only=True)
    assert examples["neighbours"].shape[:2] == examples["correct"].shape == (8, 4)
    assert not any(
        torch.equal(query, image)
        for query, images in zip(examples["queries"], examples["neighbours"], strict=True)
        for image in images[:1]
    )


def test_watched_embeddings_are_kept_at_the_monitors_interval(whole):
    _, store = whole
    kept = sorted(store.watched_path(0).parent.iterdir())
    assert kept == [store.watched_path(steps) for steps in (0, 4, 8, 10)]
    first, last = (load_file(path)["embeddings"] for path in (kept[0], kept[-1]))
    assert first.shape == last.shape and not torch.equal(first, last)


def test_the_starts_and_iterations_of_kmeans_are_those_of_the_config():
    embeddings, labels = torch.randn(300, 6, generator=torch.Generator().manual_seed(0)), torch.arange(300) % 20
    found = set()
    for starts, iterations in ((1, 2), (1, 100), (6, 100)):
        config = RetrievalConfig(kmeans_starts=starts, kmeans_iterations=iterations)
        clusters = kmeans_assignments(embeddings, 20, 0, num_starts=starts, num_iterations=iterations)
        nmi, f1 = nmi_f1(clusters, labels)
        metrics = retrieval_metrics(config, embeddings, labels)
        assert (metrics["retrieval/nmi"], metrics["retrieval/f1"]) == (100 * nmi, 100 * f1)
        recalls = [f"recall_at_{k}" for k in (1, 2, 4, 8)]
        assert [*metrics] == [f"retrieval/{name}" for name in (*recalls, "r_precision", "map_at_r", "nmi", "f1")]
        found.add(nmi)
    assert len(found) == 3


def test_the_curve_of_the_test_classes_ends_at_the_result(tmp_path):
    runtime, _ = run(tmp_path, steps=4, monitor={"every_steps": 2, "test_classes": True})
    curve = runtime.series("test/recall_at_1")
    assert list(curve) == list(runtime.series("val/recall_at_1")) == [0, 1, 3]
    assert curve[3] == runtime.series("retrieval/recall_at_1")[4]


def test_feature_maps_of_some_test_images_are_kept(whole):
    runtime, store = whole
    examples = torch.load(store.examples_path, weights_only=True)
    assert examples["maps"].shape[:2] == examples["channels"].shape == (4, 6)
    means = examples["maps"].mean((2, 3))
    assert torch.equal(means, means.sort(descending=True).values)
    kept = torch.load(store.features_path, weights_only=True)["training_norms"]
    (metrics_at_the_end,) = [metrics for _, metrics, _ in runtime.reports if "retrieval/nmi" in metrics]
    assert float(kept.mean()) == pytest.approx(metrics_at_the_end["retrieval/train_norm_mean"], rel=1e-6)


def test_of_a_large_set_some_training_images_are_embedded_for_their_norms(tmp_path, monkeypatch):
    monkeypatch.setattr(recipe, "_NORMS", 50)
    _, store = run(tmp_path, steps=0, held_out_share=0.0)
    assert len(torch.load(store.features_path, weights_only=True)["training_norms"]) == 50


def test_without_held_out_classes_the_training_classes_are_watched(tmp_path):
    runtime, store = run(tmp_path, held_out_share=0.0, steps=2)
    assert list(runtime.series("train/recall_at_1")) == [0, 1]
    assert runtime.series("val/recall_at_1") == {}
    assert store.described == [("digits/train", 866)]


def write_photos(root, num_bad):
    """Four training and three test classes of four images; some of the test images are damaged."""
    pixels = np.random.default_rng(0).integers(0, 256, (7, 4, 16, 16, 3), dtype=np.uint8)
    for number, images in enumerate(pixels):
        split = "train" if number < 4 else "test"
        files = {f"{each}.png": encode(Image.fromarray(image)) for each, image in enumerate(images)}
        write_folder(root / split / str(number), files)
    for path in sorted((root / "test").rglob("*.png"))[::2][:num_bad]:
        path.write_bytes(b"damaged")
    return str(root)


@pytest.mark.slow
@pytest.mark.distributed
def test_images_that_cannot_be_read_are_left_out_of_the_measures(tmp_path):
    root = write_photos(tmp_path / "photos", num_bad=5)
    changes = {
        "data": {"name": "folder", "root": root, "on_bad_image": "skip"},
        "augment": {"short_side_px": 16, "size_px": 16},
        "transform": {"name": "none"},
        "global_batch_size": 8,
        "sampler": {"name": "classes", "images_per_class": 2},
        "held_out_share": 0.0,
        "monitor": {"every_steps": 1, "test_classes": True},
        "steps": 1,
    }
    for name in ("skipped", "parted", "left"):
        (tmp_path / name).mkdir()
    runtime, store = run(tmp_path / "skipped", **changes)
    (parted, _), _ = on_workers(2, tmp_path, on_a_worker, run, tmp_path / "parted", changes)
    for path in (tmp_path / "photos/test").rglob("*.png"):
        if path.read_bytes() == b"damaged":
            path.unlink()
    left, left_store = run(tmp_path / "left", **changes)
    expected = [(step, metrics) for step, metrics, _ in left.reports]
    assert_the_same_curve(runtime.reports, expected)
    assert_the_same_curve(parted, expected)
    assert_identical(*(torch.load(each.examples_path, weights_only=True) for each in (store, left_store)))


@pytest.mark.parametrize("loss", ["triplet_disjoint", "angular_hinge"])
def test_disjoint_triplets_are_trained_on(tmp_path, loss):
    changes = {"loss": {"name": loss}, "sampler": {"name": "triplets"}, "transform": {"name": "none"}}
    runtime, store = run(tmp_path, steps=2, global_batch_size=21, evaluation={"neighbours": 5}, **changes)
    assert all(value >= 0 for value in runtime.series("train/metric_loss").values())
    assert torch.load(store.examples_path, weights_only=True)["correct"].shape == (8, 5)


def test_test_images_that_can_find_nothing_are_counted_in_the_log(tmp_path, caplog):
    root = write_photos(tmp_path / "photos", num_bad=0)
    for number in range(1, 4):
        (tmp_path / f"photos/test/5/{number}.png").unlink()
    crop = {"short_side_px": 16, "size_px": 16}
    changes = {"data": {"name": "folder", "root": root}, "augment": crop, "steps": 0, "held_out_share": 0.0}
    with caplog.at_level("INFO"):
        run(tmp_path, global_batch_size=8, sampler={"name": "classes", "images_per_class": 2}, **changes)
    expected = "1 of the test images has no other of its class to find: it is wrong at any K"
    assert caplog.messages.count(expected) == 1


def test_a_single_test_image_is_refused_before_the_training(tmp_path):
    files = {
        f"train/{label}/{number}.png": plain(20 * label + number, 16, 16) for label in range(4) for number in (1, 2)
    }
    root = write_folder(tmp_path / "photos", {**files, "test/x/1.png": plain(9, 16, 16)})
    changes = {"data": {"name": "folder", "root": str(root)}, "augment": {"short_side_px": 16, "size_px": 16}}
    batches = {"global_batch_size": 4, "sampler": {"name": "classes", "images_per_class": 2}}
    runtime = FakeRuntime()
    with pytest.raises(DataError, match=r"folder/test: found one image, must be two or more, which rank each other"):
        run(tmp_path, runtime, steps=1, held_out_share=0.0, **changes, **batches)
    assert not runtime.reports


@pytest.mark.parametrize("max_images", [50, 900, 3000])
def test_perfect_embeddings_find_all_watched_images(max_images):
    sizes = torch.randint(1, 12, (400,), generator=torch.Generator().manual_seed(0))
    labels = torch.arange(400).repeat_interleave(sizes)
    chosen = watched_images(labels, max_images)
    assert 0.7 * min(max_images, len(labels)) < len(chosen) <= max_images and len(chosen.unique()) == len(chosen)
    assert recall_at_k(one_hot(labels[chosen]).float(), labels[chosen], (1,)) == {1: 1.0}
    assert watched_images(torch.arange(9), 4).shape == (4,)


@pytest.mark.slow
def test_disjoint_triplets_keep_their_classes_where_images_cannot_be_read(tmp_path):
    root = write_photos(tmp_path / "photos", num_bad=0)
    for path in (tmp_path / "photos/train").rglob("3.png"):  # the last image of each class
        path.write_bytes(b"damaged")
    changes = {"loss": {"name": "triplet_disjoint"}, "sampler": {"name": "triplets"}, "transform": {"name": "none"}}
    data = {"name": "folder", "root": root, "on_bad_image": "skip"}
    crop = {"short_side_px": 16, "size_px": 16}
    runtime, _ = run(tmp_path, data=data, augment=crop, steps=5, global_batch_size=6, held_out_share=0.0, **changes)
    assert len(runtime.series("train/loss")) == 5
    for path in (tmp_path / "photos/train/2").glob("*.png"):
        path.write_bytes(b"damaged")
    with pytest.raises(DataError, match="^folder/train: 4 images of class 2 in a row cannot be read, the first: "):
        run(tmp_path, data=data, augment=crop, steps=5, global_batch_size=6, held_out_share=0.0, **changes)


def test_zero_steps_measure_the_initial_encoder(tmp_path):
    runtime, _ = run(tmp_path, steps=0)
    assert [list(metrics)[0] for _, metrics, _ in runtime.reports] == ["val/recall_at_1", "retrieval/recall_at_1"]


def test_the_loss_falls_and_training_classes_come_together(tmp_path):
    changes = {"monitor": {"every_steps": 100}, "checkpoint": {"every_steps": 100}, "held_out_share": 0.0}
    optimiser = {"name": "adam", "learning_rate": 3e-3, "backbone_learning_rate": 3e-3}
    runtime, _ = run(tmp_path, steps=60, transform={"name": "none"}, optimiser=optimiser, **changes)
    losses = list(runtime.series("train/metric_loss").values())
    assert sum(losses[-5:]) < 0.7 * sum(losses[:5])
    recalls = list(runtime.series("train/recall_at_1").values())
    assert recalls[-1] > recalls[0]


PROXIES = {
    "loss": {"name": "proxy_anchor"},
    "sampler": {"name": "shuffled"},
    "optimiser": {**VALUES["optimiser"], "template_learning_rate": 0.1},
    "steps": 4,
}


@pytest.fixture(scope="module")
def with_proxies(tmp_path_factory):
    return run(tmp_path_factory.mktemp("with_proxies"), **PROXIES)


def reports_of_a_worker(folder, changes):
    runtime = FakeRuntime(rank(), world_size())
    run(folder, runtime, **changes)
    return [(step, metrics) for step, metrics, _ in runtime.reports]


@pytest.mark.distributed
@pytest.mark.parametrize("share_classes_from", [2, 100])
def test_two_workers_train_the_same_proxies(tmp_path, with_proxies, share_classes_from):
    expected = [(step, metrics) for step, metrics, _ in with_proxies[0].reports]
    changes = {**PROXIES, "share_classes_from": share_classes_from}
    first, second = on_workers(2, tmp_path, reports_of_a_worker, tmp_path, changes)
    assert_the_same_curve(first, expected)
    assert_the_same_curve(second, expected[:-1])


def test_proxies_have_a_rate_of_their_own(tmp_path, with_proxies):
    state = with_proxies[0].last_state()
    assert state["objective"]["loss.weight"].shape == (4, 16)  # of the classes that are trained on
    groups = state["optimiser"]["param_groups"]
    assert [len(group["params"]) for group in groups if group["rate_factor"] == 100] == [1]
    state = run(tmp_path, **{**PROXIES, "optimiser": VALUES["optimiser"]})[0].last_state()
    assert {group["rate_factor"] for group in state["optimiser"]["param_groups"]} == {0.5, 1.0}


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"global_batch_size": 22}, ConfigError, "global_batch_size"),
        ({"data": {"name": "digits", "num_train_classes": 1}}, DataError, "1 class"),
        ({"data": {"name": "digits", "num_train_classes": 10}}, ConfigError, "data.num_train_classes: found 10"),
        ({"data": {"name": "digits"}}, ConfigError, "data.num_train_classes"),
        ({"sampler": {"name": "classes", "images_per_class": 1}}, ConfigError, "sampler.images_per_class"),
        ({"global_batch_size": 60}, (ConfigError, DataError), "classes"),
        ({"held_out_share": 1.0}, ConfigError, "held_out_share"),
        ({"steps": -1}, ConfigError, "steps"),
        (
            {"loss": {"name": "triplet_disjoint"}},
            ConfigError,
            "^sampler: found 'classes', must be 'triplets' with loss=triplet_disjoint$",
        ),
        (
            {"loss": {"name": "angular_hinge"}, "sampler": {"name": "triplets"}},
            ConfigError,
            "^transform: found 'sft', must be 'none' with loss=angular_hinge$",
        ),
        (
            {"sampler": {"name": "shuffled"}},
            ConfigError,
            "^sampler: found 'shuffled', must be 'classes' or 'triplets' with loss=triplet, which needs two images of",
        ),
        (
            {"loss": {"name": "normface"}, "transform": {"name": "hdml"}},
            ConfigError,
            "^transform: found 'hdml', must be 'none', 'sft', 'sftd' or 'ftl' with loss=normface, which has a template",
        ),
        (
            {"optimiser": PROXIES["optimiser"]},
            ConfigError,
            r"^optimiser\.template_learning_rate: found 0\.1, must be null with loss=triplet$",
        ),
        (
            {"loss": {"name": "center"}, "optimiser": PROXIES["optimiser"]},
            ConfigError,
            r"^optimiser\.template_learning_rate: found 0\.1, must be null with loss=center$",
        ),
    ],
)
def test_a_wrong_run_is_refused_in_one_line(tmp_path, changes, error, message):
    with pytest.raises(error, match=message) as raised:
        run(tmp_path, **changes)
    assert "\n" not in str(raised.value)
