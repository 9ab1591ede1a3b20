import numpy as np
import pytest
import torch
from matplotlib.colors import to_hex

from ssl_sec.errors import DataError
from ssl_sec.evaluation.feature_maps import FeatureMaps
from ssl_sec.figures.images import Retrieved, retrieved_figure
from ssl_sec.recipes.metric_learning.pictures import MappedImages, draw_feature_maps, draw_retrieved
from tests.figures.test_training import texts


def retrieved(num_queries: int, num_retrieved: int, channels: int, height: int = 12, width: int = 16) -> Retrieved:
    generator = torch.Generator().manual_seed(0)
    shape = (channels, height, width)
    images = torch.randint(256, (num_queries, 1 + num_retrieved, *shape), generator=generator, dtype=torch.uint8)
    correct = torch.rand(num_queries, num_retrieved, generator=generator) < 0.5
    return Retrieved(images[:, 0], images[:, 1:], correct)


@pytest.mark.parametrize("channels", [1, 3])
def test_retrieved_images_are_beside_their_query(channels):
    query_images, retrieved_images, correct = one = retrieved(4, 3, channels)
    asked, answers = retrieved_figure({"run": one}, "title").axes
    assert [label.get_text() for label in asked.get_xticklabels()] == ["query"]
    assert [label.get_text() for label in answers.get_xticklabels()] == ["1", "2", "3"]
    for axes, images in ((asked, query_images[:, None]), (answers, retrieved_images)):
        for drawn, frame, (row, column) in zip(axes.images, axes.patches, np.ndindex(images.shape[:2]), strict=True):
            left, right, bottom, top = drawn.get_extent()
            assert ((left + right) / 2, (bottom + top) / 2) == pytest.approx((column, row))
            assert bottom > top and axes.get_ylim()[0] > axes.get_ylim()[1]  # upright, with row 0 at the top
            assert (bottom - top) * axes.get_aspect() / (right - left) == pytest.approx(12 / 16)
            assert np.array_equal(
                np.asarray(drawn.get_array()).reshape(12, 16, channels), images[row, column].permute(1, 2, 0)
            )
            assert frame.get_bbox().extents == pytest.approx([left, top, right, bottom])
            # A dark grey image is not stretched to white.
            assert drawn.norm.vmax == 255
    assert not asked.texts
    right = correct.flatten().tolist()
    assert [to_hex(frame.get_edgecolor()).upper() for frame in answers.patches] == [
        "#009E73" if is_right else "#CC3311" for is_right in right
    ]
    assert [text.get_text() for text in answers.texts] == ["✓" if is_right else "✗" for is_right in right]
    assert {True, False} == set(correct.flatten().tolist())


def test_one_image_retrieved_for_one_query_and_none():
    assert len(retrieved_figure({"run": retrieved(1, 1, 3)}, "").axes) == 2
    assert texts(retrieved_figure({"run": retrieved(0, 3, 3)}, "")) == ["no images were retrieved"]
    assert texts(retrieved_figure({"run": retrieved(2, 0, 3)}, "")) == ["no images were retrieved"]


def test_arms_retrieve_for_the_same_queries_side_by_side():
    one = retrieved(2, 3, 3)
    other = one._replace(correct=~one.correct)
    figure, rows = draw_retrieved({"none": [one], "SEC": [other]}, "")
    assert [len(axes.images) for axes in figure.axes] == [2, 6, 6]
    assert [axes.get_title() for axes in figure.axes] == ["", "none", "SEC"]
    wrong = {(row["query"], row["place"]) for row in rows if row["arm"] == "none" and not row["correct"]}
    assert wrong == {(row["query"], row["place"]) for row in rows if row["arm"] == "SEC" and row["correct"]}
    assert len(rows) == 12 and 0 < len(wrong) < 6 and {row["query"] for row in rows} == {1, 2}


def test_arms_with_other_queries_are_not_compared():
    one = retrieved(2, 3, 3)
    with pytest.raises(
        DataError, match="^none and SEC show different test images; allowed: runs with the same test set$"
    ):
        draw_retrieved({"none": [one], "SEC": [one._replace(queries=255 - one.queries)]}, "")


def test_each_arm_has_a_row_of_feature_maps_for_each_image():
    images, maps = retrieved(2, 1, 3).queries, torch.rand(2, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    arms = {
        arm: [MappedImages(images, FeatureMaps(scale * maps, torch.tensor([[5, 1, 2], [0, 7, 3]])))]
        for arm, scale in (("none", 1.0), ("SEC", 9.0))
    }
    figure, rows = draw_feature_maps(arms, "maps")
    assert len(figure.axes) == 2 * 2 * 4
    shown = np.array(figure.axes).reshape(2, 2, 4)
    assert [axes.get_title() for axes in shown[1, 1]] == ["", "channel 0", "channel 7", "channel 3"]
    assert [axes.get_ylabel() for axes in shown[0, :, 1]] == ["none", "SEC"]
    assert np.array_equal(shown[1, 1, 2].images[0].get_array(), 9 * maps[1, 1])
    # A row's maps share their colours.
    assert {image.norm.vmax for axes in shown[1, 1, 1:] for image in axes.images} == {float(9 * maps[1].max())}
    assert np.array_equal(shown[1, 0, 0].images[0].get_array(), images[1].permute(1, 2, 0))
    (row,) = [row for row in rows if (row["arm"], row["image"], row["place"]) == ("SEC", 2, 3)]
    assert (row["channel"], row["mean_activation"]) == (3, pytest.approx(float(9 * maps[1, 2].mean())))
