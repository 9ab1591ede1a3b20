import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ssl_sec.losses import ORDERED_LOSSES, angular, base, contrastive, pair
from ssl_sec.losses.classes import classes_of, positive_pairs, sum_rows, take_rows
from tests.losses.cases import ALL_LOSSES, DIM, PAIR_LOSSES, rows


@given(labels=st.lists(st.integers(-3, 5), min_size=1, max_size=12))
def test_the_classes_are_those_of_a_search_row_by_row(labels):
    classes = classes_of(torch.tensor(labels))
    for row, label in enumerate(labels):
        members = [other for other, its in enumerate(labels) if its == label]
        assert classes.size[row] == len(members)
        assert classes.occurrence[row] == members.index(row)
        assert [classes.next(steps)[row] for steps in range(len(members))] == [
            members[(members.index(row) + steps) % len(members)] for steps in range(len(members))
        ]
        assert classes.number[row] == sorted(set(labels)).index(label)
        assert classes.num_positives[row] == len(members) - 1
        assert classes.num_negatives[row] == len(labels) - len(members)
        others = [other for other in members if other != row]
        assert classes.positive[row] == (others[0] if others else row)


@pytest.mark.parametrize("anchors", [slice(None), slice(0, 2), slice(2, 5), slice(3, 3)])
def test_positives_share_the_label_and_no_row_is_its_own(anchors):
    labels = [4, 9, 4, 4, 9]
    positive, negative = positive_pairs(torch.tensor(labels), anchors)
    numbers = range(5)[anchors]
    assert positive.tolist() == [[labels[a] == labels[b] and a != b for b in range(5)] for a in numbers]
    assert negative.tolist() == [[labels[a] != labels[b] for b in range(5)] for a in numbers]


@pytest.mark.parametrize("case", ALL_LOSSES, ids=str)
@pytest.mark.parametrize("labels", [[0, 0, 1, 1, 2, 2], [0, 0], [0], [1] * 6, [0, 1, 2, 3, 4, 5], [0, 0, 1, 2]])
def test_a_batch_with_nothing_to_compare_is_nan_if_labels_cannot_be_read(case, labels, monkeypatch):
    for module in (angular, base, contrastive, pair):
        monkeypatch.setattr(module, "may_read_values", lambda labels: False)
    loss, labels = case.build(), torch.tensor(labels)
    try:
        value = loss(rows(len(labels), DIM), labels)
    except ValueError:  # the shapes tell
        assert not loss.compares(labels)
    else:
        assert value.isfinite() == loss.compares(labels)


@pytest.mark.parametrize("case", [case for case in PAIR_LOSSES if not case.of_triplets], ids=str)
def test_the_order_of_a_class_matters_to_the_losses_that_are_listed(case):
    labels, loss, embeddings = torch.arange(4).repeat(4), case.build(), rows(16)
    values = [loss(embeddings[order], labels[order]).item() for order in map(torch.randperm, 8 * [16])]
    assert (max(values) - min(values) < 1e-12 * max(values)) == (case.name not in ORDERED_LOSSES)


def test_labels_may_be_a_column_of_a_table():
    labels = torch.stack([torch.arange(8) // 2, torch.arange(8)], 1)[:, 0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        classes = classes_of(labels)
    assert torch.equal(classes.size, torch.full((8,), 2)) and torch.equal(classes.number, labels)


def test_gathering_and_scattering_rows_equal_indexing():
    values = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    index = torch.tensor([4, 0, 0, 2, 0])
    taken = take_rows(values, index)
    assert torch.equal(taken, values[index])
    (gradient,) = torch.autograd.grad((taken * torch.arange(15).view(5, 3)).sum(), values)
    assert gradient[0].tolist() == [3 + 6 + 12, 4 + 7 + 13, 5 + 8 + 14]
    assert gradient[1].tolist() == [0, 0, 0]
    summed = sum_rows(values, index, 6)
    assert summed.shape == (6, 3) and summed[5].tolist() == [0, 0, 0]
    torch.testing.assert_close(summed[0], values[[1, 2, 4]].sum(0))
    assert torch.autograd.gradcheck(lambda rows: sum_rows(rows, index, 6), values)
