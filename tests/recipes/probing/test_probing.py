import dataclasses

import pytest
import torch
import torchvision
from torch import nn
from torchvision.transforms import InterpolationMode

from ssl_sec.data.config import DigitsConfig
from ssl_sec.data.image_set import subset
from ssl_sec.data.standard_sets import open_digits
from ssl_sec.errors import ConfigError, DataError, Stopped
from ssl_sec.evaluation.classification import logistic
from ssl_sec.evaluation.classification.calibration import Calibration
from ssl_sec.evaluation.classification.knn import knn_top1
from ssl_sec.evaluation.classification.linear_probe import HELD_OUT_SHARE, ProbeResult
from ssl_sec.evaluation.classification.logistic import LogisticRegression, fit_logistic
from ssl_sec.evaluation.feature_table import FeatureTable
from ssl_sec.evaluation.splits import stratified_split
from ssl_sec.networks.config import ResNetConfig
from ssl_sec.networks.weights import save_weights
from ssl_sec.recipes.probing import recipe as probing
from ssl_sec.recipes.probing.adapting import Adapted
from ssl_sec.recipes.probing.config import ProbeConfig, ProbedRun, ProbeJobConfig
from ssl_sec.recipes.probing.measures import corrupted_top1, transfer_metrics
from ssl_sec.recipes.probing.recipe import ProbeFindings, linear_evaluation, open_splits
from ssl_sec.training.config import LocalConfig
from tests.data.files import noisy_set
from tests.fakes import FakeRuntime, FakeStore
from tests.workers import on_workers

CPU = LocalConfig(device="cpu")
QUICK = ProbeConfig(epochs=8, learning_rates=(0.01, 0.1, 1.0), decay_at=(5 / 8,))


class Pixels(nn.Module):
    """An encoder whose features are the pixels."""

    def forward(self, images):
        return images.flatten(1)


class Collapsed(nn.Module):
    """An encoder with constant features."""

    def forward(self, images):
        return images.new_ones(len(images), 5)


def probe(encoder=None, config=QUICK, runtime=None, data=None):
    splits = open_splits(data or DigitsConfig(), config)
    return linear_evaluation(
        encoder or Pixels(), *splits, config, CPU.on(torch.device("cpu")), runtime or FakeRuntime()
    )


def with_digits(monkeypatch, **changes):
    """Digits whose splits are changed by functions."""

    def open_split(self, split, crop):
        return changes.get(split, lambda image_set: image_set)(open_digits(split))

    monkeypatch.setattr(DigitsConfig, "_open", open_split)


def with_labels(function):
    return lambda image_set: dataclasses.replace(image_set, labels=function(image_set.labels))


def test_pixels_of_digits_are_mostly_linearly_separable():
    findings = probe()
    assert findings.probe.top1 > 0.85
    assert findings.probe.top5 > 0.98
    train, test = open_digits("train"), open_digits("test")
    pixels = (each.images.flatten(1) / 255 for each in (train, test))
    bank, queries = zip(pixels, (train.labels, test.labels), strict=True)
    assert findings.knn_top1 == knn_top1(*bank, *queries, num_classes=10) > 0.9  # of all training images
    assert findings.class_names == tuple(map(str, range(10)))
    assert findings.probe.confusion.sum() == 360


def test_test_labels_decide_the_score_and_not_the_choice(monkeypatch):
    honest = probe()
    with_digits(monkeypatch, test=with_labels(lambda labels: (labels + 1) % 10))
    poisoned = probe()
    assert poisoned.probe.learning_rate == honest.probe.learning_rate
    assert poisoned.probe.held_out_top1 == honest.probe.held_out_top1
    assert poisoned.probe.top1 < 0.1


@pytest.mark.parametrize(
    ("split", "names", "message"),
    [
        (
            "train",
            tuple("01234"),
            r"digits/test: its classes \(10: 0, 1, .*7, …\) are .* of digits/train \(5: 0, 1, 2, 3, 4\)",
        ),
        ("test", tuple("1023456789"), r"digits/test: its classes \(10: 1, 0, 2"),
    ],
)
def test_splits_of_other_classes_are_refused(monkeypatch, split, names, message):
    with_digits(monkeypatch, **{split: lambda image_set: dataclasses.replace(image_set, class_names=names)})
    with pytest.raises(DataError, match=message):
        probe()


def test_a_test_split_without_the_last_classes_is_measured(monkeypatch):
    def few(image_set):
        return dataclasses.replace(
            subset(image_set, (image_set.labels < 4).nonzero().flatten()), class_names=tuple("0123")
        )

    with_digits(monkeypatch, test=few)
    assert probe().probe.top1 > 0.85


def test_the_chosen_rate_is_the_best_on_held_out_training_images():
    findings = probe()
    held_out = findings.probe.held_out_top1
    assert set(held_out) == {0.01, 0.1, 1.0}
    assert held_out[findings.probe.learning_rate] == max(held_out.values())
    assert len(set(held_out.values())) > 1


@pytest.mark.parametrize(
    ("rates", "end"), [((1e-3, 0.1), "highest"), ((0.3, 1e3), "lowest"), ((1e-5, 0.1, 1e3), None), ((0.1,), None)]
)
def test_a_best_rate_at_an_end_of_the_rates_is_a_warning(rates, end, caplog):
    best = probe(config=dataclasses.replace(QUICK, learning_rates=rates)).probe.learning_rate
    text = (
        f"the probe's best learning rate, {best:g}, is the {end} of probe.learning_rates; one beyond it may be better"
    )
    assert [each.message for each in caplog.records if each.levelname == "WARNING"] == ([text] if end else [])


def test_equally_good_rates_are_no_warning(caplog):
    """As on an easy set, where every rate is right about all images: the lowest is taken."""
    probing._warn_of_an_end(0.1, {0.1: 1.0, 0.3: 1.0, 1.0: 1.0})
    assert caplog.text == ""


def test_with_all_labels_the_chosen_probe_is_trained_again_on_the_whole_training_set(monkeypatch):
    trained_on = []
    train = probing.train_linear_probes

    def spy(feature_batches, config, learning_rates, **options):
        trained_on.append((torch.cat([labels for _, labels in feature_batches(0)]), learning_rates))
        return train(feature_batches, config, learning_rates, **options)

    monkeypatch.setattr(probing, "train_linear_probes", spy)
    findings = probe()
    # Of 1,437 images, a tenth of each class is held out.
    assert [(len(labels), rates) for labels, rates in trained_on] == [
        (1295, QUICK.learning_rates),
        (1437, (findings.probe.learning_rate,)),
    ]
    trained_on.clear()
    probe(config=dataclasses.replace(QUICK, labels_per_class=3))
    assert [(labels.bincount().tolist(), rates) for labels, rates in trained_on] == [([3] * 10, QUICK.learning_rates)]


def test_fewer_labels_score_less(caplog):
    caplog.set_level("INFO")
    few = probe(config=dataclasses.replace(QUICK, labels_per_class=1))
    assert "training images (probe.labels_per_class=1)" in caplog.text
    some = probe(config=dataclasses.replace(QUICK, labels_per_class=20))
    assert 0.2 < few.probe.top1 < some.probe.top1 - 0.1
    assert few.knn_top1 < some.knn_top1 - 0.1


@pytest.mark.parametrize("augment", [False, True])
def test_a_collapsed_encoder_scores_no_more_than_chance(augment):
    findings = probe(Collapsed(), dataclasses.replace(QUICK, epochs=2, augment=augment))
    assert findings.probe.top1 <= 0.11
    assert findings.knn_top1 <= 0.11


def test_the_whole_training_set_is_used_despite_the_limit_of_pretraining():
    assert probe(data=DigitsConfig(max_images=30)).metrics() == probe().metrics()


def test_images_that_cannot_be_read_are_not_measured():
    splits = noisy_set(300, bad=range(0, 300, 3)), noisy_set(100, bad=range(0, 100, 3), name="noise/test")
    config = dataclasses.replace(QUICK, epochs=2)
    found = linear_evaluation(Pixels(), *splits, config, CPU.on(torch.device("cpu")), FakeRuntime())
    assert int(found.probe.confusion.sum()) == 66
    # A third of the images of noise would have their own copies in the training set.
    held_out = stratified_split(splits[0].labels, HELD_OUT_SHARE, seed=config.seed)[1]
    num_held_out = int((held_out % 3 > 0).sum())
    for top1 in found.probe.held_out_top1.values():
        assert num_held_out * top1 == pytest.approx(round(num_held_out * top1), abs=1e-4)


def test_the_encoder_is_not_trained():
    torch.manual_seed(0)
    encoder = ResNetConfig(name="resnet18", width=0.03).build(1, 8)
    before = {name: value.clone() for name, value in encoder.state_dict().items()}
    probe(encoder, dataclasses.replace(QUICK, epochs=1, augment=True, labels_per_class=5))
    torch.testing.assert_close(dict(encoder.state_dict()), before, rtol=0, atol=0)
    assert all(parameter.grad is None for parameter in encoder.parameters())
    assert not encoder.training


def test_each_epoch_of_both_trainings_is_reported():
    runtime = FakeRuntime()
    probe(runtime=runtime)
    assert list(runtime.series("probe/loss")) == list(range(16))
    assert runtime.series("probe/epoch") == {epoch: epoch + 1 for epoch in range(16)}


@pytest.mark.parametrize("options", [{"logistic": True}, {"few_shot": (5,)}])
def test_transfer_measurements_stop_on_request(options, monkeypatch):
    fits = []
    monkeypatch.setattr(
        logistic,
        "fit_logistic",
        lambda *given, **more: fits.append(given) or LogisticRegression(torch.zeros(2, 3), torch.zeros(2)),
    )
    rows = FeatureTable(torch.randn(20, 3), torch.arange(20) % 2)
    config = dataclasses.replace(QUICK, **options)
    with pytest.raises(Stopped, match="stopped during an evaluation"):
        transfer_metrics(config, rows, 10, rows, 2, FakeRuntime(stop_at=0))
    assert len(fits) == ("logistic" in options)


def test_measuring_corruptions_stops_on_request():
    with pytest.raises(Stopped):
        corrupted_top1(None, None, None, 0, FakeRuntime(stop_at=0))


def test_the_metrics_are_percentages_by_name():
    result = ProbeResult(
        learning_rate=2.0,
        held_out_top1={1.0: 0.5, 2.0: 0.75},
        top1=0.5,
        top5=0.9,
        mean_per_class=0.4,
        confusion=torch.zeros(2, 2, dtype=torch.int64),
        calibration=Calibration(counts=[0, 4], confidences=[0.0, 0.75], accuracies=[0.0, 0.5]),
    )
    few = dataclasses.replace(result, top5=None)
    assert "probe/top5" not in ProbeFindings(probe=few, knn_top1=0.25, class_names=("a", "b")).metrics()
    assert ProbeFindings(probe=result, knn_top1=0.25, class_names=("a", "b")).metrics() == {
        "probe/top1": 50.0,
        "probe/top5": 90.0,
        "probe/knn_top1": 25.0,
        "probe/learning_rate": 2.0,
        "probe/mean_per_class": 40.0,
        "probe/ece": 25.0,
        "probe/held_out_top1_lr_1": 50.0,
        "probe/held_out_top1_lr_2": 75.0,
    }


def test_transfer_and_corruptions_are_measured_on_request():
    plain = probe().metrics()
    assert not [name for name in plain if "logistic" in name or "few_shot" in name or "corruption" in name]
    assert 0 < plain["probe/ece"] < 30
    asked = dataclasses.replace(QUICK, corruptions=True, logistic=True, few_shot=(5, 20), few_shot_draws=10)
    metrics = probe(config=asked).metrics()
    assert plain.items() <= metrics.items()
    assert metrics["probe/logistic_top1"] > 90
    assert metrics["probe/logistic_mean_per_class"] == pytest.approx(metrics["probe/logistic_top1"], abs=1)
    assert 70 < metrics["probe/few_shot_5"] < metrics["probe/few_shot_20"] < 95
    assert 0 < metrics["probe/few_shot_20_interval"] < metrics["probe/few_shot_5_interval"] < 3
    corrupted = {name: value for name, value in metrics.items() if name.startswith("probe/corruption/")}
    assert len(corrupted) == 21
    # Contrast shrinks the digits towards their mean, which a linear probe of pixels cannot bear.
    assert corrupted["probe/corruption/contrast_5_top1"] < plain["probe/top1"] - 5
    assert corrupted["probe/corruption/mean_top1"] < plain["probe/top1"]


def test_logistic_regression_has_no_more_labels_than_the_probe(monkeypatch):
    fitted: list[int] = []

    def noted(train, *arguments, **options):
        fitted.append(len(train))
        return fit_logistic(train, *arguments, **options)

    monkeypatch.setattr(logistic, "fit_logistic", noted)
    probe(config=dataclasses.replace(QUICK, logistic=True, labels_per_class=3))
    assert set(fitted) == {30}


def test_a_number_of_labels_that_a_class_lacks_is_left_out():
    metrics = probe(config=dataclasses.replace(QUICK, few_shot=(5, 1000), few_shot_draws=2)).metrics()
    assert "probe/few_shot_5" in metrics
    assert "probe/few_shot_1000" not in metrics


def test_a_part_of_the_training_split_may_be_the_test_images():
    config = dataclasses.replace(QUICK, test_share=0.25)
    train, test = open_splits(DigitsConfig(), config)
    whole = open_digits("train")
    assert len(train) + len(test) == len(whole)
    assert len(test) == pytest.approx(0.25 * len(whole), abs=10)
    assert "held out for the test" in test.description
    both = torch.cat([each.read(torch.arange(len(each))).images for each in (train, test)]).flatten(1)
    everything = whole.read(torch.arange(len(whole))).images.flatten(1)
    assert sorted(map(tuple, both.tolist())) == sorted(map(tuple, everything.tolist()))
    assert probe(config=config).probe.confusion.sum() == len(test)


@pytest.mark.parametrize(("channels", "height", "width"), [(1, 8, 8), (3, 8, 8), (3, 30, 20), (1, 12, 16), (5, 8, 8)])
@pytest.mark.parametrize("num_channels", [1, 3, 5])
def test_images_are_converted_for_the_encoder(channels, height, width, num_channels):
    images = torch.rand(2, channels, height, width, generator=torch.Generator().manual_seed(0))
    found = Adapted(nn.Identity(), 12, num_channels)(images)
    grey = images.mean(1, keepdim=True)
    if channels == 3:
        grey = 0.299 * images[:, :1] + 0.587 * images[:, 1:2] + 0.114 * images[:, 2:]
    expected = (grey if channels != num_channels else images).expand(-1, num_channels, -1, -1)
    for image, ours in zip(expected, found, strict=True):
        shorter = min(height, width)
        theirs = torchvision.transforms.functional.resize(
            image, [round(height * 12 / shorter), round(width * 12 / shorter)], InterpolationMode.BICUBIC
        )
        theirs = torchvision.transforms.functional.center_crop(theirs, [12, 12]).clamp(0, 1)
        torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(Adapted(nn.Identity(), None, num_channels)(images), expected)


def test_images_that_the_trained_network_does_not_take_are_a_mistake_of_the_user(tmp_path):
    class Store(FakeStore):
        def probed(self):
            return ProbedRun(data=DigitsConfig(), encoder=encoder)

    encoder = ResNetConfig(name="resnet18", width=0.125)
    save_weights(encoder.build(3, 8).backbone, tmp_path / "encoder.safetensors")
    config = ProbeJobConfig(run="mine", probe=QUICK, runtime=CPU)
    with pytest.raises(
        ConfigError, match="^run: mine does not fit the encoder: .*; probe.image_size_px and probe.num_"
    ):
        probing.run(config, FakeRuntime(), Store(tmp_path))


@pytest.mark.parametrize(("few", "length"), [(None, 4), (5, 2)])
def test_the_results_are_reported_at_the_end_of_the_run(tmp_path, few, length):
    class Store(FakeStore):
        def probed(self):
            return ProbedRun(data=DigitsConfig(), encoder=encoder)

    encoder = ResNetConfig(name="resnet18", width=0.0625)
    save_weights(encoder.build(1, 8).backbone, tmp_path / "encoder.safetensors")
    settings = dataclasses.replace(QUICK, epochs=2, decay_at=(), labels_per_class=few)
    config, runtime = ProbeJobConfig(run="mine", probe=settings, runtime=CPU), FakeRuntime()
    probing.run(config, runtime, Store(tmp_path))
    assert list(runtime.series("probe/top1")) == [length] == [config.length]


def found(config):
    from ssl_sec.collectives import rank, world_size

    encoder = Pixels().double()
    return probe(encoder, config, FakeRuntime(rank(), world_size())).metrics()


@pytest.mark.distributed
@pytest.mark.parametrize(("augment", "batch_size"), [(False, 60), (True, 60), (True, 255), (True, 1400)])
def test_two_workers_equal_one(tmp_path, augment, batch_size):
    """The workers need not share a batch equally; a set may be smaller than a batch."""
    config = dataclasses.replace(QUICK, epochs=2, batch_size=batch_size, augment=augment)
    one = found(config)
    first, second = on_workers(2, tmp_path, found, config)
    assert first == second == pytest.approx(one, rel=1e-5)


@pytest.mark.distributed
def test_a_batch_may_have_fewer_images_than_there_are_workers(tmp_path):
    config = dataclasses.replace(QUICK, epochs=1, batch_size=2, labels_per_class=1, augment=True)
    one = found(config)
    assert on_workers(3, tmp_path, found, config) == [pytest.approx(one, rel=1e-5)] * 3


@pytest.mark.distributed
@pytest.mark.parametrize("augment", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_workers_that_divide_the_features_equal_one(tmp_path, augment):
    options = {"epochs": 2, "resident_limit_mib": 0, "logistic": True, "few_shot": (5,), "few_shot_draws": 2}
    config = dataclasses.replace(QUICK, augment=augment, corruptions=augment, **options)
    one = found(config)
    first, second = on_workers(2, tmp_path, found, config)
    assert first == second == pytest.approx(one, rel=1e-5)
