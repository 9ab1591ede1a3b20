import logging
import pickle
from dataclasses import replace

import pytest
import torch

from ssl_sec.data import encoded_images as module
from ssl_sec.data.crops import CentreCrop, CentreSquare, RandomResizedCrop
from ssl_sec.data.encoded_images import EncodedImages
from ssl_sec.data.image_set import ImageSet, ResidentImages, subset
from ssl_sec.data.stores import FileStore, with_crop
from ssl_sec.errors import DataError
from tests.data.files import plain, write_folder


def resident(num_images=6) -> ResidentImages:
    return ResidentImages(
        images=torch.arange(num_images, dtype=torch.uint8)[:, None, None, None].expand(-1, 3, 2, 2).contiguous(),
        labels=torch.arange(num_images) % 2,
        class_names=("even", "odd"),
        name="r",
        description="made up",
    )


def encoded(root, num_images=6, bad=(), on_bad_image="skip") -> EncodedImages:
    """PNGs of the values 0, 1, …, of which some are text."""
    names = [f"{value:03}.png" for value in range(num_images)]
    files = {name: b"text" if value in bad else plain(value) for value, name in enumerate(names)}
    return EncodedImages(
        store=FileStore.of(write_folder(root, files), names),
        labels=torch.arange(num_images),
        class_names=tuple(map(str, range(num_images))),
        image_shape=(3, 8, 8),
        name="e",
        description="made up",
        on_bad_image=on_bad_image,
    )


def values(batch) -> list[int]:
    assert batch.images.dtype == torch.uint8
    return batch.images[:, 0, 0, 0].tolist()


def test_both_kinds_are_image_sets(tmp_path):
    for image_set in (resident(), encoded(tmp_path)):
        assert isinstance(image_set, ImageSet)
        batch = image_set.read(torch.tensor([4, 0, 4]))
        assert values(batch) == [4, 0, 4] == batch.indices.tolist()
        assert batch.labels.tolist() == image_set.labels[[4, 0, 4]].tolist()
        assert image_set.num_bad_images == 0 and len(image_set) == 6
        assert tuple(batch.images.shape[1:]) == image_set.image_shape


def test_a_set_is_printed_in_one_line(tmp_path):
    assert repr(resident()) == "ResidentImages('r', images=6, image_shape=(3, 2, 2), classes=2)"
    assert repr(encoded(tmp_path)) == "EncodedImages('e', images=6, image_shape=(3, 8, 8), classes=6)"


def test_resident_images_move_to_a_device():
    moved = resident().to(torch.device("meta"))
    batch = moved.read(torch.tensor([1, 2]))
    assert {batch.images.device.type, batch.labels.device.type, batch.indices.device.type} == {"meta"}
    assert moved.labels.device.type == "cpu"


def test_a_subset_shares_the_pixels(tmp_path):
    for image_set in (resident(), encoded(tmp_path)):
        view = subset(image_set, torch.tensor([5, 3, 1, 0]))
        again = subset(view, torch.tensor([2, 0]), "chosen twice")
        assert values(view.read(torch.arange(4))) == [5, 3, 1, 0]
        batch = again.read(torch.tensor([0, 1]))
        assert values(batch) == [1, 5] and batch.indices.tolist() == [0, 1]
        assert batch.labels.tolist() == image_set.labels[[1, 5]].tolist()
        assert len(again) == 2 and again.class_names == image_set.class_names
        assert again.description == "made up; 4 of 6 images, stated; 2 of 4 images, chosen twice"
    assert again.queries is None
    asked = replace(image_set, queries=torch.tensor([True, False, False, True, False, False]))
    assert subset(subset(asked, torch.tensor([5, 3, 1, 0])), torch.tensor([1, 2])).queries.tolist() == [True, False]
    whole = resident()
    assert subset(whole, torch.tensor([1])).images is whole.images


def test_bad_images_are_replaced_counted_and_named_once(tmp_path, caplog):
    image_set = encoded(tmp_path, bad=(2, 3, 5))
    with caplog.at_level(logging.WARNING, "ssl_sec.data"):
        batch = image_set.read(torch.tensor([1, 2, 3, 5]))
        image_set.read(torch.tensor([2, 5]))
    assert batch.indices.tolist() == [1, 4, 4, 0] == values(batch) == batch.labels.tolist()
    assert image_set.num_bad_images == 3
    assert [sum(f"{value:03}.png" in line for line in caplog.messages) for value in range(6)] == [0, 0, 1, 1, 0, 1]
    assert all("not an image" in line for line in caplog.messages)


def test_a_replacement_is_of_the_same_class_while_it_has_one_that_can_be_read(tmp_path):
    image_set = replace(
        encoded(tmp_path, bad=(1, 3, 5)), labels=torch.tensor([0, 0, 1, 1, 2, 3]), class_names=(*"abcd",)
    )
    batch = image_set.read(torch.arange(6))
    assert batch.indices.tolist() == [0, 0, 2, 2, 4, 0] == values(batch) and batch.labels.tolist() == [0, 0, 1, 1, 2, 0]


def test_a_replacement_comes_from_the_view(tmp_path):
    view = subset(encoded(tmp_path, bad=(2,)), torch.tensor([0, 2, 5]))
    batch = view.read(torch.tensor([1]))
    assert values(batch) == [5] and batch.indices.tolist() == [2]
    assert view.num_bad_images == 1


def test_bad_images_raise(tmp_path):
    image_set = encoded(tmp_path, bad=(2,), on_bad_image="raise")
    with pytest.raises(DataError, match="002.png: not an image.*; data.on_bad_image=skip leaves such images out$"):
        image_set.read(torch.tensor([1, 2]))
    assert image_set.num_bad_images == 0


def test_no_setting_is_named_where_none_would_skip_the_image(tmp_path):
    with pytest.raises(DataError, match="002.png: not an image; allowed: [A-Z, ]+$"):
        encoded(tmp_path, bad=(2,), on_bad_image=None).read(torch.tensor([2]))


def test_many_unreadable_images_in_a_row_are_an_error(tmp_path):
    image_set = encoded(tmp_path, num_images=4, bad=range(4))
    with pytest.raises(DataError, match=r"e: 4 images in a row cannot be read, the first: .*001.png"):
        image_set.read(torch.tensor([1]))


def test_a_store_that_is_unavailable_is_an_error_after_some_images(tmp_path, monkeypatch):
    """Not after all of them, each of which may take seconds."""
    monkeypatch.setattr(module, "MAX_BAD_IN_A_ROW", 3)
    image_set = encoded(tmp_path, bad=range(5))
    with pytest.raises(DataError, match="e: 3 images in a row cannot be read"):
        image_set.read(torch.tensor([1]))
    assert values(image_set.read(torch.tensor([3]))) == [5]


def test_another_size_is_never_skipped(tmp_path):
    image_set = encoded(tmp_path)
    (tmp_path / "004.png").write_bytes(plain(4, width=9))
    with pytest.raises(DataError, match="004.png: 9 x 8 pixels.*8 x 8.*data.image_size_px"):
        image_set.read(torch.tensor([4]))
    resized = replace(image_set, crop=CentreSquare(size_px=8))
    assert values(resized.read(torch.tensor([4]))) == [4]


def test_one_set_is_cropped_for_training_and_for_evaluation(tmp_path):
    image_set = encoded(tmp_path, bad=(2,))
    training = with_crop(image_set, RandomResizedCrop(short_side_px=8, size_px=5))
    evaluation = with_crop(training, CentreCrop(short_side_px=7, size_px=6))
    assert training.image_shape == (3, 5, 5) and evaluation.image_shape == (3, 6, 6)
    assert values(training.read(torch.tensor([1, 2]), torch.tensor([11, 12]))) == [1, 3]
    assert values(evaluation.read(torch.tensor([1, 2]))) == [1, 3]
    assert training.num_bad_images == evaluation.num_bad_images == 1
    assert len(with_crop(subset(training, torch.tensor([5, 4])), CentreSquare(size_px=4))) == 2
    whole = resident()
    assert with_crop(whole, CentreCrop()) is whole


def test_images_read_at_one_size_keep_it(tmp_path):
    image_set = replace(encoded(tmp_path), crop=CentreSquare(size_px=5), image_shape=(3, 5, 5))
    assert with_crop(image_set, CentreCrop(short_side_px=7, size_px=6)) is image_set


def test_pickling(tmp_path):
    image_set = subset(encoded(tmp_path), torch.tensor([3, 1]))
    assert values(pickle.loads(pickle.dumps(image_set)).read(torch.tensor([0, 1]))) == [3, 1]
