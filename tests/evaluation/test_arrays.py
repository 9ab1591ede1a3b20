"""Directions of rows of any norm, and the measures of directions."""

import numpy as np
import pytest
import torch
from torch.nn import functional

from ssl_sec.errors import ConfigError, DataError
from ssl_sec.evaluation.arrays import as_labelled, as_labels, as_same, as_scores, as_tensor, tiles, unit_rows
from ssl_sec.evaluation.classification.knn import knn_top1
from ssl_sec.evaluation.clustering import kmeans_assignments, nmi_f1
from ssl_sec.evaluation.faces.identification import all_pairs_tar_at_far, rank_1_identification
from ssl_sec.evaluation.faces.roc import tar_at_far
from ssl_sec.evaluation.faces.verification import kfold_accuracy_of_scores
from ssl_sec.evaluation.rank import alpha_req, rankme
from ssl_sec.evaluation.retrieval import recall_at_k
from ssl_sec.evaluation.uniformity import alignment, uniformity


@pytest.fixture(scope="module")
def rows():
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(60) % 5
    return torch.randn(5, 8, generator=generator)[labels] + torch.randn(60, 8, generator=generator), labels


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_usual_rows_have_exactly_the_directions_of_torch(rows, dtype):
    embeddings = (rows[0].double() * torch.logspace(-6, 6, 60, dtype=torch.float64).unsqueeze(1)).to(dtype)
    torch.testing.assert_close(unit_rows(embeddings), functional.normalize(embeddings, dim=1), rtol=0, atol=0)


def test_rows_without_a_direction():
    found = unit_rows(torch.tensor([[0.0, 0.0], [torch.inf, 1.0], [torch.nan, 1.0]]))
    assert found[0].tolist() == [0, 0] and found[1:].isnan().any(1).all()
    assert unit_rows(torch.zeros(0, 3)).shape == (0, 3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_smallest_and_the_largest_numbers_have_a_direction(dtype):
    limits = torch.finfo(dtype)
    scales = [limits.smallest_normal * limits.eps, 3 * limits.smallest_normal * limits.eps, limits.smallest_normal]
    for scale in (*scales, 1.0, limits.max / 4, limits.max):
        found = unit_rows(torch.tensor([[scale, -scale, 0.0, scale, scale], [0.0, 0.0, -scale, 0.0, 0.0]], dtype=dtype))
        expected = torch.tensor([[0.5, -0.5, 0.0, 0.5, 0.5], [0.0, 0.0, -1.0, 0.0, 0.0]], dtype=dtype)
        torch.testing.assert_close(found, expected)


def test_the_last_part_has_the_rest():
    assert list(tiles(5, 2)) == [slice(0, 2), slice(2, 4), slice(4, 5)]
    assert list(tiles(4, 4)) == [slice(0, 4)] and list(tiles(0, 3)) == []


def test_arrays_may_be_reversed_or_read_only(rows):
    embeddings, labels = (each.numpy() for each in rows)
    expected = recall_at_k(embeddings, labels, [1])
    assert recall_at_k(embeddings[::-1], labels[::-1], [1]) == expected
    embeddings.flags.writeable = False
    assert recall_at_k(embeddings, labels, [1]) == expected


def test_embeddings_may_have_gradients(rows):
    embeddings, labels = rows
    leaf = embeddings.clone().requires_grad_()
    assert as_tensor(leaf).data_ptr() == leaf.data_ptr() and not as_tensor(leaf).requires_grad
    assert recall_at_k(leaf, labels, [1]) == recall_at_k(embeddings, labels, [1])
    for measure in (rankme, alpha_req, uniformity, lambda rows: alignment(rows, 2 * rows)):
        assert measure(leaf) == measure(embeddings)


@pytest.mark.parametrize("order", "<>")
def test_arrays_may_have_any_byte_order(rows, order):
    embeddings, labels = (each.numpy() for each in rows)
    expected = recall_at_k(embeddings, labels, [1])
    assert recall_at_k(embeddings.astype(f"{order}f4"), labels.astype(f"{order}u2"), [1]) == expected


@pytest.mark.usefixtures("unchecked_types")
@pytest.mark.parametrize(
    "measure", [lambda rows, labels: recall_at_k(rows, labels, [1]), lambda _, labels: nmi_f1(labels, labels)]
)
def test_labels_that_are_no_whole_numbers_one_an_image_are_refused(rows, measure):
    embeddings, labels = rows
    for wrong, found in (
        (labels / 10, "type float32, must be whole numbers"),
        ((labels / 10).numpy(), "type float32, must be whole numbers"),
        (labels > 2, "type bool, must be whole numbers"),
        (labels.to(torch.complex64), "type complex64, must be whole numbers"),
        (labels.unsqueeze(1), r"shape \[60, 1\], must be \[images\]"),
    ):
        with pytest.raises(DataError, match=f": found labels of {found}"):
            measure(embeddings, wrong)


@pytest.mark.usefixtures("unchecked_types")
def test_names_of_classes_are_refused_as_labels(rows):
    embeddings, _ = rows
    names = [f"class {number % 5}" for number in range(60)]
    message = (
        r": found the label class 0, must be whole numbers, as of numpy.unique\(labels, return_inverse=True\)\[1\]$"
    )
    for given in (names, np.array(names), np.array(names, dtype=object)):
        for measure in (
            lambda given: recall_at_k(embeddings, given, [1]),
            lambda given: knn_top1(embeddings, given, embeddings, given, num_classes=5),
            lambda given: all_pairs_tar_at_far(embeddings, given, [0.1]),
        ):
            with pytest.raises(DataError, match=message):
                measure(given)
    for none in (np.array([], dtype=object), np.array([], dtype=str)):
        with pytest.raises(DataError, match=r"^k: found no labels, of type .*, must be whole numbers, as of numpy.un"):
            as_labels("k", none)
    with pytest.raises(DataError, match=r"^k: found the label b'dog', must be whole numbers"):
        as_labels("k", np.array([b"dog", b"cat"]))


@pytest.mark.usefixtures("unchecked_types")
@pytest.mark.parametrize("shape", [(4,), (4, 2, 3), (3, 2), (0, 2)])
def test_features_are_a_row_for_each_label(shape):
    labels = torch.zeros(0 if shape[0] == 0 else 4, dtype=torch.int64)
    with pytest.raises(DataError, match=r"^k: found features of shape \[[\d, ]+\] and labels of shape \[\d\], must be"):
        as_labelled("k", torch.ones(shape), labels)


@pytest.mark.parametrize(
    ("labels", "num_classes", "message"),
    [
        ([0, 5, 5], 5, r"found label 5, must be in \[0, 4\] \(num_classes\)"),
        ([0, -1, 9], None, "found label -1, must be ≥ 0"),
    ],
)
def test_labels_are_in_their_range(labels, num_classes, message):
    with pytest.raises(DataError, match=f"^k: {message}$"):
        as_labelled("k", torch.ones(3, 2), torch.tensor(labels), num_classes)
    assert as_labelled("k", torch.ones(2, 2), torch.tensor([0, 4]), 5)[1].tolist() == [0, 4]


@pytest.mark.usefixtures("unchecked_types")
@pytest.mark.parametrize("wrong", [0.5, -1.0, 2.0, torch.nan])
def test_whether_two_images_show_one_person_is_yes_or_no(wrong):
    expected = [True, False, True]
    for dtype in (torch.bool, torch.uint8, torch.int64, torch.float32):
        assert as_same(torch.tensor(expected).to(dtype)).tolist() == expected
    with pytest.raises(DataError, match=rf"^verification: found {wrong:g} in same, must be booleans, or 0 and 1$"):
        as_same(torch.tensor([1.0, wrong, 0.0, 3.0]))


@pytest.mark.usefixtures("unchecked_types")
def test_scores_are_floats_and_same_is_on_their_device():
    same = torch.tensor([1, 0, 1])
    for given, wanted in ((torch.int32, torch.float64), (torch.float32,) * 2, (torch.float64,) * 2):
        scores, is_genuine = as_scores(torch.tensor([3, 1, 2], dtype=given), same)
        assert (scores.dtype, scores.tolist()) == (wanted, [3, 1, 2]) and is_genuine.tolist() == [True, False, True]
    assert as_scores(torch.empty(3, device="meta"), same)[1].device.type == "meta"


@pytest.mark.usefixtures("unchecked_types")
def test_rows_of_other_shapes_are_refused(rows):
    row, labels = rows[0][0], torch.arange(8)
    measures = (
        rankme,
        alpha_req,
        uniformity,
        lambda row: alignment(row, row),
        lambda row: recall_at_k(row, labels, [1]),
    )
    for measure in (*measures, lambda row: kmeans_assignments(row, 2, seed=0)):
        with pytest.raises(DataError, match=r"^embeddings: found the shape \[8\], must be \[images, dim\]$"):
            measure(row)
    for measure in (lambda scores, same: tar_at_far(scores, same, [0.1]), kfold_accuracy_of_scores):
        with pytest.raises(DataError, match=r"^verification: found scores of shape \[60, 8\], must be \[pairs\]$"):
            measure(rows[0], rows[1] > 2)
        with pytest.raises(DataError, match=r"^verification: found same of shape \[60, 8\], must be \[pairs\]$"):
            measure(rows[0][:, 0], rows[0] > 0)


@pytest.mark.usefixtures("unchecked_types")
def test_one_number_of_neighbours_or_one_rate_is_refused(rows):
    with pytest.raises(ConfigError, match=r"^ks: found 5, must be several numbers, such as \[5\]$"):
        recall_at_k(*rows, 5)
    for measure in (tar_at_far, all_pairs_tar_at_far):
        with pytest.raises(ConfigError, match=r"^fars: found 0.1, must be several rates, such as \[0.1\]$"):
            measure(rows[0] if measure is all_pairs_tar_at_far else rows[0][:, 0], (rows[1] > 2).long(), 0.1)
    with pytest.raises(ConfigError, match=r"^sizes: found 10, must be several numbers, such as \[10\]$"):
        rank_1_identification(*rows, [rows[0]], 10)


@pytest.mark.usefixtures("unchecked_types")
def test_numbers_of_neighbours_and_rates_may_be_tensors_or_arrays(rows):
    expected = recall_at_k(*rows, [1, 10])
    assert recall_at_k(*rows, torch.tensor([1, 10])) == recall_at_k(*rows, np.array([1, 10])) == expected
    pairs = rows[0][:, 0], rows[1] > 2
    rates = torch.logspace(-3, -1, 3)
    assert tar_at_far(*pairs, rates) == tar_at_far(*pairs, rates.numpy()) == tar_at_far(*pairs, rates.tolist())


@pytest.mark.parametrize("scale", [1e-36, 1e-14, 1e20, 1e36])
def test_measures_of_directions_do_not_depend_on_norms(rows, scale):
    embeddings, labels = rows
    scaled = scale * embeddings
    torch.testing.assert_close(unit_rows(scaled), unit_rows(embeddings), rtol=0, atol=1e-6)
    assert knn_top1(scaled, labels, embeddings, labels, num_classes=5, k=5) == knn_top1(
        embeddings, labels, embeddings, labels, num_classes=5, k=5
    )
    found, expected = (nmi_f1(kmeans_assignments(each, 5, seed=0), labels) for each in (scaled, embeddings))
    assert found == pytest.approx(expected, abs=1e-6)
    assert uniformity(scaled) == pytest.approx(uniformity(embeddings), abs=1e-5)
    assert alignment(scaled, embeddings) == pytest.approx(0, abs=1e-10)


@pytest.mark.parametrize("size", [0, -3])
def test_parts_have_one_row_or_more(rows, size):
    for measure in (lambda: uniformity(rows[0], chunk_size=size), lambda: recall_at_k(*rows, [1], tile_size=size)):
        with pytest.raises(ConfigError, match=rf"^size of a part: found {size}, must be ≥ 1$"):
            measure()
