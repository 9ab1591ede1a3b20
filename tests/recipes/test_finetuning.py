import json
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from ssl_sec.collectives import rank, world_size
from ssl_sec.data.config import DigitsConfig
from ssl_sec.data.image_set import subset
from ssl_sec.data.standard_sets import open_digits
from ssl_sec.errors import ConfigError, MissingDataError, Stopped, StorageError
from ssl_sec.evaluation.classification.scores import scores_of
from ssl_sec.evaluation.config import ProbeConfig
from ssl_sec.evaluation.splits import with_test_images
from ssl_sec.recipes.finetuning import recipe as finetuning
from ssl_sec.recipes.finetuning.config import FinetuneConfig
from ssl_sec.recipes.finetuning.recipe import Classified, build_recipe, labelled_images
from ssl_sec.recipes.finetuning.recipe import run as finetune
from ssl_sec.recipes.probing.recipe import open_splits
from ssl_sec.settings import from_values
from ssl_sec.training.step import train_step
from tests.data.files import noisy_set
from tests.fakes import FakeRuntime, FakeStore, assert_identical, loaded
from tests.recipes.same_runs import assert_resumes_bit_equal, assert_the_same_on_workers, run_with_fakes
from tests.workers import on_workers

VALUES = {
    "data": {"name": "digits"},
    "augment": {"min_scale": 0.4, "flip_probability": 0.0},
    "encoder": {"name": "resnet18", "width": 0.125},
    "head": {"name": "classifier"},
    "loss": {"name": "cross_entropy", "label_smoothing": 0.1},
    "optimiser": {"name": "nesterov", "learning_rate": 0.1, "layer_decay": 0.8},
    "runtime": {"name": "local", "device": "cpu", "precision": "float64"},
    "epochs": 3,
    "labels_share": 0.1,
    "global_batch_size": 40,
    "mixup": 0.4,
    "log_every_steps": 1,
    "checkpoint": {"every_epochs": 1},
}


def config(**changes) -> FinetuneConfig:
    return from_values(FinetuneConfig, {**VALUES, **changes})


def run(folder, machine=None, state=None, **changes):
    return run_with_fakes(finetune, config(**changes), folder, machine, state)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An uninterrupted run of three epochs on one worker."""
    return run(tmp_path_factory.mktemp("whole"))


@pytest.mark.distributed
def test_two_workers_give_the_same_run(tmp_path, whole):
    # The test images are reported by the first worker.
    assert_the_same_on_workers(run, tmp_path, whole[0], {}, num_of_first=1)


def test_images_that_cannot_be_read_are_not_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(DigitsConfig, "_open", lambda *_: noisy_set(200, bad=range(0, 200, 4)))
    watched = labelled_images(config(held_out_share=0.2), noisy_set(200, bad=())).watched.rows
    num_watched = int((watched % 4 > 0).sum())
    augment = {"short_side_px": 8, "size_px": 8}
    runtime, store = run(tmp_path, epochs=1, labels_share=0.5, held_out_share=0.2, augment=augment)
    confusion = torch.tensor(json.loads(store.confusion_path.read_text())["confusion"])
    assert int(confusion.sum()) == 150
    (top1,) = runtime.series("val/top1").values()
    num_right = top1 * num_watched / 100
    assert num_watched < len(watched) and num_right == pytest.approx(round(num_right), abs=1e-4)


def gradients_on_a_worker(changes):
    """The gradients of one step, by parameter."""
    recipe = recipe_of(FakeRuntime(rank(), world_size()), **changes)
    rows = slice(rank() * 20, (rank() + 1) * 20) if world_size() == 2 else slice(0, 40)
    batch = recipe.image_set.read(recipe.sampler.indices(0)[rows])
    views = recipe.views(batch.images, 0, rows, 40).double()
    torch.nn.init.normal_(recipe.head.fc.weight, generator=torch.Generator().manual_seed(1))
    train_step(recipe, views, batch.labels, 0)
    named = {**dict(recipe.encoder.named_parameters()), **dict(recipe.head.named_parameters())}
    return {name: value.grad for name, value in named.items() if value.grad is not None}


def recipe_of(runtime, **changes):
    settings = config(**changes)
    images = labelled_images(settings, settings.data.open("train"))
    return build_recipe(settings, images.trained_on, runtime)


@pytest.mark.distributed
@pytest.mark.parametrize("trained_stages", ["all", 2])
def test_two_workers_equal_one_in_the_gradients(tmp_path, trained_stages):
    changes = {"trained_stages": trained_stages}
    expected = gradients_on_a_worker(changes)
    assert len(expected) > 4 and all(float(value.abs().max()) > 0 for value in expected.values())
    for found in on_workers(2, tmp_path, gradients_on_a_worker, changes):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def test_a_stopped_and_resumed_run_ends_bit_equal(tmp_path, whole):
    store = assert_resumes_bit_equal(run, tmp_path, whole[0], 6)
    assert_identical(load_file(store.head_path), load_file(whole[1].head_path))


def test_a_run_starts_from_the_weights_of_another(tmp_path):
    (tmp_path / "before").mkdir()
    plain = {"runtime": {"name": "local", "device": "cpu"}}
    _, source = run(tmp_path / "before", epochs=1, seed=7, **plain)
    source.encoder_path.rename(FakeStore(tmp_path).initial_path)
    _, store = run(tmp_path, run="abc", epochs=0, **plain)
    assert_identical(load_file(store.encoder_path), load_file(store.initial_path))
    _, anew = run(tmp_path, epochs=0, **plain)
    assert not torch.equal(load_file(anew.encoder_path)["conv1.weight"], load_file(anew.initial_path)["conv1.weight"])
    weights = load_file(store.initial_path)
    save_file({**weights, "conv1.weight": weights["conv1.weight"].repeat(1, 3, 1, 1)}, store.initial_path)
    with pytest.raises(
        ConfigError, match="^run: abc does not fit the encoder: conv1.weight has .*, for images of 1 x 8 x 8;"
    ):
        run(tmp_path, run="abc")
    store.initial_path.write_bytes(b"torn")
    with pytest.raises(StorageError, match=r"^encoder.weights: .*initial\.safetensors cannot be read as weights: "):
        run(tmp_path, run="abc")
    store.initial_path.unlink()
    with pytest.raises(MissingDataError, match=r"initial\.safetensors"):
        run(tmp_path, run="abc")


@pytest.mark.parametrize(("num_classes", "has_top5"), [(5, False), (6, True)])
def test_top5_is_reported_with_more_than_five_classes(num_classes, has_top5):
    metrics = Classified(**vars(scores_of([(torch.eye(num_classes), torch.arange(num_classes))]))).metrics()
    assert ("finetune/top5" in metrics) == has_top5
    assert metrics["finetune/top1"] == 100


def test_reports_come_at_their_intervals(whole):
    runtime, store = whole
    steps = 142 // 40 * 3
    assert list(runtime.series("train/loss")) == list(range(steps))
    assert list(runtime.series("val/top1")) == [2, 5, 8]
    assert [step for step, _ in runtime.saves] == [3, 6, 9]
    step, at_the_end, _ = runtime.reports[-1]
    assert step == steps
    names = ("top1", "top5", "mean_per_class", "ece", "epoch", "val_top1", "val_mean_per_class")
    assert set(at_the_end) == {f"finetune/{name}" for name in names}
    assert at_the_end["finetune/val_top1"] == max(runtime.series("val/top1").values())
    assert at_the_end["finetune/top1"] <= at_the_end["finetune/top5"] <= 100
    record = json.loads(store.confusion_path.read_text())
    confusion = torch.tensor(record["confusion"])
    assert confusion.sum() == 360 and record["class_names"] == [str(digit) for digit in range(10)]
    assert 100 * float(confusion.diag().sum()) / 360 == pytest.approx(at_the_end["finetune/top1"])
    of_each = 100 * confusion.diag() / confusion.sum(1)
    assert float(of_each.mean()) == pytest.approx(at_the_end["finetune/mean_per_class"])
    assert runtime.reports[0][1]["train/loss"] == pytest.approx(math.log(10))  # all classes are equally probable


def with_scores(monkeypatch, *scores, measure="top1"):
    """Held-out images whose accuracies by a measure are these, epoch by epoch."""
    left = list(scores)

    def measured(hits, labels):
        assert len(hits) == len(labels) == 142
        return left.pop(0)

    monkeypatch.setattr(finetuning, measure, measured)


@pytest.mark.parametrize("measure", ["top1", "mean_per_class"])
def test_the_measure_by_which_the_best_epoch_is_chosen(tmp_path, monkeypatch, measure):
    other = {"top1": "mean_per_class", "mean_per_class": "top1"}[measure]
    with_scores(monkeypatch, 0.2, 0.5, 0.4, measure=measure)
    with_scores(monkeypatch, 0.7, 0.6, 0.8, measure=other)
    runtime, _ = run(tmp_path, balanced=measure == "mean_per_class")
    assert runtime.series("finetune/epoch") == {9: 2.0}
    assert runtime.series(f"finetune/val_{measure}") == {9: 50.0}
    assert runtime.series(f"finetune/val_{other}") == {9: 60.0}


@pytest.mark.parametrize("stop_at", [None, 7])
def test_the_network_of_the_best_epoch_is_measured_and_saved(tmp_path, monkeypatch, stop_at):
    """The second epoch's, also if the run is stopped and resumed after it."""
    with_scores(monkeypatch, 0.2, 0.5, 0.5)
    runtime, state = FakeRuntime(stop_at=stop_at), None
    if stop_at is not None:
        with pytest.raises(Stopped):
            run(tmp_path, runtime)
        state = runtime.last_state()
        assert state["step"] in (6, 7) and state["best"]["epoch"] == 2
        runtime = FakeRuntime()
    best, store = run(tmp_path, runtime, state)
    assert best.series("finetune/epoch") == {9: 2.0}
    with_scores(monkeypatch, 0.2, 0.5, 0.5)
    (tmp_path / "last").mkdir()
    last, other = run(tmp_path / "last", evaluated="last")
    assert last.series("finetune/epoch") == {9: 3.0}
    after_two = loaded(dict(last.saves)[6])
    encoder, state = load_file(store.encoder_path), last.last_state()
    assert_identical({f"backbone.{name}": value for name, value in encoder.items()}, dict(after_two["encoder"]))
    assert_identical(load_file(store.head_path), dict(after_two["head"]))
    assert_identical(load_file(other.head_path), dict(state["head"]))
    assert not torch.equal(encoder["conv1.weight"], state["encoder"]["backbone.conv1.weight"])
    assert "best" not in state


def test_balanced_classes_count_alike(tmp_path, monkeypatch):
    """Digits below 5 have twenty times the images of the others."""

    def open_split(self, split, crop):
        images = open_digits(split)
        is_kept = (images.labels < 5) | (torch.arange(len(images)) % 20 == 0) | (split == "test")
        return subset(images, is_kept.nonzero().flatten(), "uneven")

    monkeypatch.setattr(DigitsConfig, "_open", open_split)
    found = {}
    for balanced in (False, True):
        (tmp_path / str(balanced)).mkdir()
        changes = {"labels_share": 1.0, "mixup": 0.0, "held_out_share": 0, "evaluated": "last", "balanced": balanced}
        runtime, store = run(tmp_path / str(balanced), epochs=6, runtime={"name": "local", "device": "cpu"}, **changes)
        assert list(runtime.series("train/mean_per_class")) == list(runtime.series("train/top1"))
        confusion = torch.tensor(json.loads(store.confusion_path.read_text())["confusion"])
        found[balanced] = float((confusion.diag() / confusion.sum(1))[5:].mean())
    assert found[True] > found[False] + 0.2, found


def test_test_labels_decide_the_score_and_not_the_choice(tmp_path, monkeypatch, whole):
    def open_split(self, split, crop):
        images = open_digits(split)
        return replace(images, labels=(images.labels + 1) % 10) if split == "test" else images

    monkeypatch.setattr(DigitsConfig, "_open", open_split)
    poisoned, store = run(tmp_path)
    assert poisoned.series("val/top1") == whole[0].series("val/top1")
    assert_identical(load_file(store.encoder_path), load_file(whole[1].encoder_path))
    assert poisoned.series("finetune/top1") != whole[0].series("finetune/top1")


@pytest.mark.parametrize("seed", [0, 1])
def test_without_a_test_split_the_test_images_are_those_of_a_probe(tmp_path, monkeypatch, seed):
    train_set = open_digits("train")

    def open_split(self, split, crop):
        if split == "test":
            raise MissingDataError("digits/test: no such folder")
        return train_set

    monkeypatch.setattr(DigitsConfig, "_open", open_split)
    with pytest.raises(
        MissingDataError, match=r"digits/test: no such folder; test_share=0\.2 holds out test images of"
    ):
        run(tmp_path)
    divided = []

    def divide(*given, **named):
        divided.append(with_test_images(*given, **named))
        return divided[-1]

    monkeypatch.setattr(finetuning, "with_test_images", divide)
    runtime, _ = run(tmp_path, epochs=0, test_share=0.25, seed=seed)
    (top1,) = runtime.series("finetune/top1").values()
    assert 0 <= top1 <= 100
    expected = open_splits(DigitsConfig(), ProbeConfig(test_share=0.25))
    assert [each.rows.tolist() for each in divided[0]] == [each.rows.tolist() for each in expected]
    _, fewer = open_splits(DigitsConfig(), ProbeConfig(test_share=0.1))
    assert set(fewer.rows.tolist()) < set(expected[1].rows.tolist())


def test_frozen_stages_keep_their_weights_and_batch_norm_statistics(tmp_path):
    runtime, store = run(tmp_path, trained_stages=2, mixup=0.0)
    torch.manual_seed(0)
    initial = recipe_of(FakeRuntime(), trained_stages=2).encoder.backbone.state_dict()
    trained = load_file(store.encoder_path)
    moved = {name.partition(".")[0] for name, value in trained.items() if not torch.equal(value, initial[name])}
    assert moved == {"layer3", "layer4"}
    rates = {group["rate_factor"] for group in runtime.last_state()["optimiser"]["param_groups"]}
    assert rates == {1.0, 0.8, 0.8**2}


def test_no_stage_trains_the_classifier_alone(tmp_path):
    runtime, store = run(
        tmp_path, trained_stages=0, epochs=6, mixup=0.0, optimiser={"name": "nesterov", "learning_rate": 1.0}
    )
    initial = recipe_of(FakeRuntime()).encoder.backbone.state_dict()
    assert_identical(load_file(store.encoder_path), dict(initial))
    losses = list(runtime.series("train/loss").values())
    assert losses[-1] < losses[0] and float(load_file(store.head_path)["fc.weight"].abs().max()) > 0


@pytest.mark.parametrize("name", ["nesterov", pytest.param("adamw", marks=pytest.mark.slow)])
def test_fine_tuning_improves_the_accuracy(tmp_path, name):
    rate = {"nesterov": 0.1, "adamw": 3e-3}[name]
    changes = {"epochs": 12, "labels_share": 0.3, "mixup": 0.0, "optimiser": {"name": name, "learning_rate": rate}}
    runtime, _ = run(tmp_path, runtime={"name": "local", "device": "cpu"}, **changes)
    (top1,) = runtime.series("finetune/top1").values()
    assert top1 > 60


def test_the_loss_is_that_of_smoothed_and_mixed_labels():
    recipe = recipe_of(FakeRuntime())
    images = recipe.image_set.read(recipe.sampler.indices(3))
    logits = torch.randn(40, 10, generator=torch.Generator().manual_seed(0)).double()
    share = recipe.views.share(3)
    assert 0 < share < 1
    total = 0.0
    for row, scores in enumerate(logits.tolist()):
        label, other = int(images.labels[row]), int(images.labels[row ^ 1])
        normaliser = math.log(sum(math.exp(score) for score in scores))
        for k, score in enumerate(scores):
            target = 0.1 / 10 + 0.9 * (share * (k == label) + (1 - share) * (k == other))
            total -= target * (score - normaliser)
    found = recipe.objective(logits.requires_grad_(), images.labels, 3)
    assert found.total.item() == pytest.approx(total / 40, rel=1e-12)
    assert torch.autograd.gradcheck(lambda rows: recipe.objective(rows, images.labels, 3).total, logits)


@given(share=st.floats(0.01, 1.0), seed=st.integers(0, 2**20), held_out=st.sampled_from([0.0, 0.1, 0.5]))
def test_labelled_images_are_the_same_share_of_every_class(share, seed, held_out):
    labels = open_digits("train").labels
    images = labelled_images(
        config(labels_share=share, seed=seed, held_out_share=held_out, evaluated="last"), open_digits("train")
    )
    counts, sizes = images.trained_on.labels.bincount(minlength=10), labels.bincount()
    for count, size in zip(counts.tolist(), sizes.tolist(), strict=True):
        left = size - round(held_out * size)
        assert count == min(max(1, round(share * size)), left)


def test_other_seeds_have_other_labels_and_more_labels_contain_fewer():
    rows = [
        set(labelled_images(config(**changes), open_digits("train")).trained_on.rows.tolist())
        for changes in (
            {"seed": 0},
            {"seed": 0},
            {"seed": 1},
            {"labels_share": 0.2},
            {"labels_share": 1.0, "labels_per_class": 5},
        )
    ]
    assert rows[0] == rows[1] != rows[2]
    assert rows[0] < rows[3] and rows[4] < rows[0] and len(rows[4]) == 50
    held_out = [
        set(labelled_images(config(labels_share=share), open_digits("train")).watched.rows.tolist())
        for share in (0.1, 1.0)
    ]
    assert held_out[0] == held_out[1] and not held_out[0] & (rows[0] | rows[3] | rows[4])


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"labels_share": 0.0}, ConfigError, "^labels_share: found 0.0, "),
        ({"labels_per_class": 5}, ConfigError, "^labels_share: found 0.1, must be left out with labels_per_class$"),
        ({"labels_share": 1.0, "labels_per_class": 500}, ConfigError, "^labels_per_class: found 500, must be 1 to "),
        ({"held_out_share": 0.0}, ConfigError, "^evaluated: found 'best', must be 'last' with held_out_share=0$"),
        (
            {"trained_stages": 6},
            ConfigError,
            "^trained_stages: found 6, must be 0 to 5, the stages of the encoder, or all$",
        ),
        ({"trained_stages": "some"}, ConfigError, "^trained_stages: found 'some', must be an integer or 'all'$"),
        ({"mixup": -1.0}, ConfigError, "^mixup: found -1.0, "),
        ({"global_batch_size": 41}, ConfigError, "^global_batch_size: found 41, must be even with mixup"),
        (
            {"global_batch_size": 1000},
            ConfigError,
            "^global_batch_size: found 1000, must be 1 to 142, the number of images; set global_batch_size=128$",
        ),
        (
            {"head": {"name": "classifier", "dim": 3}},
            ConfigError,
            "^head.dim: found 3, must be null or 10, the number of classes$",
        ),
        ({"loss": {"name": "cross_entropy", "label_smoothing": 1.0}}, ConfigError, "^loss.label_smoothing: found 1.0"),
        ({"optimiser": {"name": "nesterov", "layer_decay": 0.0}}, ConfigError, "^optimiser.layer_decay: found 0.0"),
        ({"optimiser": {"name": "lars"}}, ConfigError, "^optimiser.name: found 'lars'"),
    ],
)
def test_a_wrong_run_is_refused_in_one_line(tmp_path, changes, error, message):
    with pytest.raises(error, match=message) as raised:
        run(tmp_path, **changes)
    assert "\n" not in str(raised.value)


def test_workers_that_cannot_mix_pairs_are_refused():
    with pytest.raises(
        ConfigError, match="^mixup: found 0.4, must be 0 where each of 8 workers has an odd number of rows, 5 "
    ):
        recipe_of(FakeRuntime(0, 8))


def test_an_elastic_run_takes_numbers_of_workers_that_can_mix_pairs():
    assert config(global_batch_size=50).worker_counts == [1, 5, 25]
    assert config(global_batch_size=50, mixup=0.0).worker_counts == [1, 2, 5, 10, 25, 50]
