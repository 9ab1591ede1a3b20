import numpy as np
import pytest
import torch

from ssl_sec.evaluation.classification.scores import confusion_from, confusion_values, scores_of
from ssl_sec.figures.confusion import confusion_figure


def test_a_confusion_is_shown_in_percent_of_the_true_class():
    confusion = torch.tensor([[30, 10, 0], [0, 0, 0], [1, 1, 998]])
    figure = confusion_figure(confusion, ["cat", "dog", "horse"])
    axes = figure.axes[0]
    expected = [[75, 25, 0], [0, 0, 0], [0.1, 0.1, 99.8]]
    assert np.allclose(np.asarray(axes.images[0].get_array()), expected)
    written = {text.get_position(): text.get_text() for text in axes.texts}
    assert written == {(0, 0): "75", (1, 0): "25", (2, 2): "100"}
    assert [tick.get_text() for tick in axes.get_yticklabels()] == ["cat", "dog", "horse"]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("predicted class", "true class")


@pytest.mark.parametrize(("num_classes", "num_named"), [(100, 100), (101, 51), (1000, 100)])
def test_many_classes_have_no_numbers_and_at_most_100_names(num_classes, num_named):
    confusion = torch.eye(num_classes, dtype=torch.int64)
    axes = confusion_figure(confusion, [f"class {label}" for label in range(num_classes)]).axes[0]
    assert len(axes.texts) == 0
    assert len(axes.get_xticklabels()) == num_named


def test_a_confusion_needs_a_name_for_each_class():
    with pytest.raises(AssertionError, match="1 names for 2 classes"):
        confusion_figure(torch.eye(2, dtype=torch.int64), ["cat"])


def test_names_of_classes_are_shown_letter_by_letter():
    figure = confusion_figure(torch.eye(4, dtype=torch.int64), ["_back", "$x_$", "a$5 to $6", "z" * 200])
    figure.draw_without_rendering()  # raises for what it takes for an invalid formula


def sparse(*cells, num_classes=1001):
    true, predicted, counts = map(list, zip(*cells, strict=True))
    return confusion_from({"true": true, "predicted": predicted, "count": counts}, num_classes)


def test_too_many_classes_for_a_matrix_are_shown_by_their_most_frequent_mistakes():
    names = [f"class ${label}$" for label in range(1001)]
    axes = confusion_figure(sparse((0, 0, 30), (0, 7, 10), (2, 2, 1), (5, 9, 4), (1000, 3, 1)), names).axes[0]
    axes.figure.draw_without_rendering()
    shown = [tick.get_text().replace("\\", "") for tick in axes.get_yticklabels()]
    assert shown == ["class $0$ → class $7$", "class $5$ → class $9$", "class $1000$ → class $3$"]
    assert [bar.get_width() for bar in axes.patches] == [10, 4, 1]
    assert [text.get_text() for text in axes.texts] == ["25 %", "100 %", "100 %"]
    assert axes.get_xlabel() == "images, and their share of the true class"
    assert axes.figure.get_suptitle().endswith("31 of 46 images are right")


def test_at_most_30_mistakes_are_shown():
    cells = [(label, label + 1, 1 + label) for label in range(50)]
    axes = confusion_figure(sparse(*cells), list(map(str, range(1001)))).axes[0]
    assert [bar.get_width() for bar in axes.patches] == list(range(50, 20, -1))


def test_no_mistake_among_many_classes_is_said_to_be_none():
    (text,) = confusion_figure(sparse((1, 1, 4)), list(map(str, range(1001)))).texts
    assert text.get_text() == "no image was classified wrongly"


@pytest.mark.parametrize("num_classes", [1000, 1001])
def test_a_confusion_is_the_same_after_json(num_classes):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(300, num_classes, generator=generator)
    labels = torch.randint(num_classes, (300,), generator=generator)
    logits[:150] += 9 * torch.nn.functional.one_hot(labels[:150], num_classes)
    found = scores_of([(logits[:100], labels[:100]), (logits[100:], labels[100:])])
    expected = torch.zeros(num_classes, num_classes, dtype=torch.int64)
    for true, predicted in zip(labels.tolist(), logits.argmax(1).tolist(), strict=True):
        expected[true, predicted] += 1
    assert found.confusion.is_sparse == (num_classes > 1000)
    assert torch.equal(found.confusion.to_dense(), expected)
    again = confusion_from(confusion_values(found.confusion), num_classes)
    assert again.is_sparse == found.confusion.is_sparse
    assert torch.equal(again.to_dense(), expected)
    assert np.isclose(found.top1, expected.trace() / 300)
