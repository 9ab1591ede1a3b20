import numpy as np
import pytest
import torch
from matplotlib.colors import to_hex

from ssl_sec.figures.images import Retrieved, retrieved_figure, views_figure


def pixels(*shape: int) -> torch.Tensor:
    return torch.randint(256, shape, generator=torch.Generator().manual_seed(0), dtype=torch.uint8)


@pytest.mark.parametrize("channels", [1, 3, 5])
@pytest.mark.parametrize("num_views", [2, 5])
def test_an_image_is_drawn_before_its_views(channels, num_views):
    images = pixels(3, channels, 6, 12)
    views = [pixels(3, channels, 4 + number, 4 + number) for number in range(num_views)]
    (axes,) = views_figure(images, views).axes
    assert [label.get_text() for label in axes.get_xticklabels()] == [
        "image",
        *(f"view {number + 1}" for number in range(num_views)),
    ]
    shown = {}
    for drawn in axes.images:
        left, right, bottom, top = drawn.get_extent()
        column, row = (left + right) / 2, (bottom + top) / 2
        shown[round(column), round(row)] = np.asarray(drawn.get_array())
        assert column == pytest.approx(round(column)) and row == pytest.approx(round(row))
        height, width = shown[round(column), round(row)].shape[:2]
        assert (right - left) / (bottom - top) == pytest.approx(width / height)  # row 0 is at the top
        assert max(right - left, bottom - top) < 1  # apart from the others
        assert drawn.norm.vmax == 255
    assert len(shown) == 3 * (1 + num_views)
    for column, pictures in enumerate([images, *views]):
        for row, picture in enumerate(pictures):
            picture = picture[:3].permute(1, 2, 0)
            assert np.array_equal(shown[column, row].reshape(picture.shape), picture)
    assert axes.get_ylim()[0] > axes.get_ylim()[1]


def test_many_views_fit_on_a_page():
    figure = views_figure(pixels(8, 3, 4, 4), [pixels(8, 3, 4, 4)] * 64)
    assert figure.get_figwidth() < 25 and len(figure.axes[0].images) == 8 * 65


def test_images_without_labels_are_neither_right_nor_wrong():
    images = pixels(2, 4, 3, 5, 5)
    figure = retrieved_figure({"run": Retrieved(images[:, 0], images[:, 1:], None)}, "title")
    assert [len(axes.images) for axes in figure.axes] == [2, 6]
    assert {to_hex(frame.get_edgecolor()) for axes in figure.axes for frame in axes.patches} == {"#595959"}
    assert not any(axes.texts for axes in figure.axes)


def test_what_many_arms_retrieve_fits_on_a_page():
    images = pixels(2, 6, 3, 5, 5)
    arms = {f"run {number}": Retrieved(images[:, 0], images[:, 1:], None) for number in range(40)}
    figure = retrieved_figure(arms, "title")
    assert figure.get_figwidth() < 25
    assert [axes.get_title() for axes in figure.axes if axes.get_title()] == list(arms)
    # The queries, again in each of 14 rows of three arms.
    assert sum(len(axes.images) for axes in figure.axes) == 40 * 10 + 14 * 2
