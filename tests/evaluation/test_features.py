from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from ssl_sec.data import loading
from ssl_sec.data.image_set import ResidentImages
from ssl_sec.errors import ConfigError, DataError
from ssl_sec.evaluation import features as features_module
from ssl_sec.evaluation.features import extract_features, feature_table, readable_rows
from ssl_sec.networks import Encoder
from tests.data.files import noisy_set
from tests.workers import on_workers, two_and_four

CPU = torch.device("cpu")


def images(count=11):
    pixels = torch.randint(0, 256, (count, 1, 2, 3), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    return ResidentImages(
        images=pixels, labels=torch.arange(count) % 3, class_names=("a", "b", "c"), name="i", description="made up"
    )


def encoder():
    torch.manual_seed(0)
    return nn.Sequential(nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(6, 4)).double()


def extracted(indices, batch_size):
    return extract_features(encoder(), images(), torch.tensor(indices), CPU, batch_size=batch_size)


@pytest.mark.parametrize("batch_size", [1, 4, 100])
def test_features_and_labels_are_in_the_order_of_the_indices(batch_size):
    indices = [7, 0, 10, 3, 7]
    features, labels = extracted(indices, batch_size)
    assert labels.tolist() == [index % 3 for index in indices]
    expected = encoder().eval()(images().images[indices].double() / 255)
    assert not features.requires_grad
    torch.testing.assert_close(features, expected.detach(), rtol=1e-6, atol=1e-7)


def test_indices_may_be_lists_and_arrays():
    expected = extracted([7, 0, 3], 4)
    for indices in ([7, 0, 3], np.array([7, 0, 3]), np.array([7, 0, 3], dtype=np.int32)):
        torch.testing.assert_close(extract_features(encoder(), images(), indices, batch_size=4), expected)


@pytest.mark.usefixtures("unchecked_types")
@pytest.mark.parametrize(
    ("indices", "message"),
    [
        ([], r"i: found indices float32\[0\], must be whole numbers, one or more"),
        (torch.arange(0), r"i: found indices int64\[0\], must"),
        (torch.arange(11) < 3, r"i: found indices bool\[11\], must"),
        (torch.zeros(2, 2).long(), r"i: found indices int64\[2, 2\], must"),
        ([3, -1], r"i: found index -1, must be in \[0, 10\]"),
        ([11], r"i: found index 11, must be in \[0, 10\]"),
    ],
)
def test_indices_outside_the_set_are_refused(indices, message):
    with pytest.raises(DataError, match=f"^{message}"):
        extract_features(encoder(), images(), indices)


def test_images_of_other_channels_than_the_encoders_are_refused():
    coloured = Encoder(nn.Conv2d(3, 4, 1), 4, num_channels=3)
    with pytest.raises(DataError, match=r"^images: found shape \[\d+, 1, 2, 3\], must be \[batch, 3, height, width\]"):
        extract_features(coloured, images())


@pytest.mark.parametrize("batch_size", [0, -1])
def test_a_batch_has_one_image_or_more(batch_size):
    with pytest.raises(ConfigError, match=rf"^batch_size: found {batch_size}, must be ≥ 1$"):
        extract_features(encoder(), images(), batch_size=batch_size)


@pytest.mark.parametrize("batch_size", [1, 4, 100])
def test_an_image_is_corrupted_by_its_index_in_the_set(batch_size):
    def numbered(of_batch, indices):
        return torch.zeros_like(of_batch) + indices.view(-1, 1, 1, 1)

    indices = torch.tensor([7, 0, 10, 3, 7])
    features, _ = extract_features(nn.Flatten(), images(), indices, CPU, batch_size=batch_size, corrupt=numbered)
    assert torch.equal(features, indices.unsqueeze(1).expand(5, 6).float())


def test_the_encoder_is_evaluated_and_put_back():
    network = encoder()
    for training in (True, False):
        network.train(training)
        extract_features(network, images(), torch.arange(11), CPU)
        assert network.training == training
    assert network[0].running_mean.item() == 0
    assert network[0].num_batches_tracked == 0


@pytest.mark.parametrize(
    ("given", "wanted"), [(torch.float64,) * 2, (torch.float32,) * 2, (torch.bfloat16, torch.float32)]
)
def test_features_are_in_single_or_double_precision(given, wanted):
    features, _ = extract_features(encoder().to(given), images(), torch.arange(11), CPU)
    assert features.dtype == wanted


def test_an_encoder_without_parameters_gets_single_precision():
    features, _ = extract_features(nn.Flatten(), images(), torch.arange(3), CPU)
    assert torch.equal(features, images().images[:3].float().flatten(1) / 255)


def test_the_images_of_a_batch_and_the_loader_processes_are_as_many_as_stated(monkeypatch):
    sizes, asked = [], []

    def batches(image_set, parts, device, num_loader_workers):
        asked.append(num_loader_workers)
        return loading.batches(image_set, parts, device, 0)

    class Counted(nn.Flatten):
        def forward(self, batch):
            sizes.append(len(batch))
            return super().forward(batch)

    monkeypatch.setattr(features_module, "batches", batches)
    extract_features(Counted(), images(), batch_size=4, num_loader_workers=3)
    assert (sizes, asked) == ([4, 4, 3], [3])


def test_the_features_are_on_the_given_device():
    table = feature_table(nn.Flatten(), images(), device=torch.device("meta"))
    assert table.features.device.type == table.labels.device.type == "meta"


def calls_before_batches(count):
    calls = []
    feature_table(encoder(), images(), range(count), batch_size=1, before_batch=lambda: calls.append(1))
    return len(calls)


@pytest.mark.distributed
@pytest.mark.parametrize("count", [1, 3, 5])
def test_workers_have_as_many_batches_as_each_other(tmp_path, count):
    """Whatever they do before each batch, such as a collective operation, all do as many times."""
    assert on_workers(2, tmp_path, calls_before_batches, count) == [(count + 1) // 2] * 2


class Wide(nn.Module):
    """An eighth of a MiB for each image."""

    def forward(self, batch):
        return batch.flatten(1)[:, :1].expand(-1, 2**15)


def held(count, limit_mib):
    table = feature_table(Wide(), images(count), batch_size=4, limit_mib=limit_mib)
    assert len(table.labels) == count
    return len(table.features), table.first, table.is_divided


@pytest.mark.distributed
def test_large_features_are_divided_among_several_workers(tmp_path):
    assert held(9, 1) == (9, 0, False)  # of one worker
    assert on_workers(2, tmp_path, held, 8, 1) == [(8, 0, False)] * 2  # just as large as the limit
    assert on_workers(2, tmp_path, held, 9, None) == [(9, 0, False)] * 2
    assert on_workers(2, tmp_path, held, 9, 1) == [(5, 0, True), (4, 5, True)]
    assert on_workers(3, tmp_path, held, 1, 0) == [(1, 0, True), (0, 1, True), (0, 1, True)]


def rows_of_readable(indices):
    noise = noisy_set(11, bad=(0, 4, 9))
    rows = readable_rows(partial(feature_table, nn.Flatten(), device=CPU), CPU, noise, torch.tensor(indices))
    return rows.features, rows.labels


@pytest.mark.distributed
def test_images_that_replace_unreadable_ones_are_left_out(tmp_path):
    noise = noisy_set(11, bad=())
    for indices, good in (([9, 1, 0, 2], [1, 2]), (list(range(11)), [1, 2, 3, 5, 6, 7, 8, 10])):
        batch = noise.read(torch.tensor(good))
        expected = batch.images.flatten(1) / 255, batch.labels
        torch.testing.assert_close(rows_of_readable(indices), expected)
        for part in on_workers(2, tmp_path, rows_of_readable, indices):
            torch.testing.assert_close(part, expected)
    with pytest.raises(DataError, match="^noise/train: 2 images to measure, and none can be read$"):
        rows_of_readable([4, 9])


@pytest.mark.parametrize("bad", [(), (0, 4, 9)])
def test_images_that_can_be_read_may_be_corrupted(bad):
    extract = partial(feature_table, nn.Flatten(), device=CPU)
    noise, indices = noisy_set(11, bad=bad), torch.tensor([9, 1, 0, 2])
    rows = readable_rows(extract, CPU, noise, indices, lambda of_batch, places: 0 * of_batch + places.view(-1, 1, 1, 1))
    assert rows.features[:, 0].tolist() == [index for index in indices.tolist() if index not in bad]


@pytest.mark.distributed
@two_and_four
@pytest.mark.parametrize("indices", [[5], [3, 1], [9, 8, 7, 1, 0], list(range(11))])
def test_every_worker_gets_the_features_of_one(tmp_path, num_workers, indices):
    whole = extracted(indices, 2)
    for part in on_workers(num_workers, tmp_path, extracted, indices, 2):
        torch.testing.assert_close(part, whole, rtol=1e-12, atol=1e-14)
