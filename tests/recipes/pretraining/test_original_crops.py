"""Pretraining with crops that are cut out of the original images when they are decoded."""

import numpy as np
import pytest
import torch
from PIL import Image

from ssl_sec.augment.config import AugmentConfig
from ssl_sec.data.crops import NUMBERS_PER_BOX, RandomBox, row_draws
from ssl_sec.data.encoded_images import EncodedImages
from ssl_sec.errors import ConfigError
from ssl_sec.recipes.pretraining.recipe import build_recipe
from ssl_sec.seeding import uniform
from tests.data.files import encode, write_folder, write_parquet
from tests.data.shards.test_tar import write_tar
from tests.fakes import FakeRuntime, assert_identical
from tests.recipes.pretraining.test_pretraining import VALUES, config, run
from tests.recipes.same_runs import assert_resumes_bit_equal, assert_the_same_on_workers, curve

NUM_IMAGES = 40
AUGMENT = {"min_scale": 0.2, "view_size_px": 8, "small_views": 1, "small_view_size_px": 5, "from_original": True}
PLAIN = {"flip_probability": 0.0, "colour_strength": 0.0, "grey_probability": 0.0}


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Photos of many sizes in a folder, in Parquet and in a shard."""
    root, generator = tmp_path_factory.mktemp("photos"), np.random.default_rng(0)
    encoded = []
    for _ in range(NUM_IMAGES):
        width, height = generator.integers(12, 60, 2).tolist()
        pixels = Image.fromarray(generator.integers(0, 256, (height // 4, width // 4, 3), dtype=np.uint8))
        encoded.append(encode(pixels.resize((width, height))))
    write_folder(root / "images", {f"{number:02d}.png": image for number, image in enumerate(encoded)})
    write_parquet(root / "train.parquet", encoded, [0] * NUM_IMAGES)
    write_tar(root / "train.tar", {f"{number:02d}.png": image for number, image in enumerate(encoded)})
    return root


def data_of(photos, name="folder", **more):
    where = {
        "folder": {"root": str(photos / "images")},
        "parquet": {"train": [str(photos / "train.parquet")], "label_column": None},
        "webdataset": {"train": [str(photos / "train.tar")]},
    }
    cache = {} if name == "folder" else {"cache_folder": str(photos / "cache")}
    return {"name": name, **where[name], **cache, "image_size_px": 10, **more}


def changes_of(photos, **more):
    return {"data": data_of(photos), "augment": AUGMENT, "global_batch_size": 8, "check_images": 0, **more}


def numbers_of(draw, num_views=3):
    """The numbers of each view's box."""
    return iter(torch.tensor(uniform(draw, NUMBERS_PER_BOX * num_views)).view(num_views, -1).tolist())


def built(photos, data=None, **augment):
    settings = config(**changes_of(photos, data=data or data_of(photos), augment={**AUGMENT, **augment}))
    images = settings.augment.crops(settings.trained_data.open("train"))
    return build_recipe(settings, images, FakeRuntime())


@pytest.fixture(scope="module")
def alone(photos, tmp_path_factory):
    """An uninterrupted run of ten steps on one worker."""
    return run(tmp_path_factory.mktemp("alone"), **changes_of(photos))[0]


@pytest.mark.slow
@pytest.mark.distributed
def test_two_workers_give_the_same_run(photos, alone, tmp_path):
    assert len(alone.series("train/loss")) == 10
    assert_the_same_on_workers(run, tmp_path, alone, changes_of(photos))


def test_a_stopped_and_resumed_run_ends_bit_equal(photos, alone, tmp_path):
    assert_resumes_bit_equal(run, tmp_path, alone, 4, **changes_of(photos))


def test_views_are_parts_of_the_original_images(photos):
    recipe, rows = built(photos, **PLAIN), slice(0, 8)
    indices = recipe.sampler.indices(3)
    draws = recipe.draws(3)
    assert torch.equal(draws, row_draws(0, 3, 8))
    batch = recipe.image_set.read(indices, draws)
    views = [make(batch.images, 3, rows, 8) for make in (recipe.views, *recipe.more_views)]
    assert [each.shape for each in views] == [(16, 3, 8, 8), (8, 3, 5, 5)]
    of_sizes = [
        (RandomBox(size_px=8, min_scale=0.2), views[0]),
        (RandomBox(size_px=5, min_scale=0.05, max_scale=0.14), views[1]),
    ]
    for row, (index, draw) in enumerate(zip(indices.tolist(), draws.tolist(), strict=True)):
        numbers = numbers_of(draw)
        with Image.open(photos / f"images/{index:02d}.png") as file:
            image = file.convert("RGB")
        for (box, made), rows_of_it in zip(of_sizes, ((row, row + 8), (row,)), strict=True):
            for view in rows_of_it:
                part = image.crop(box.box(*image.size, next(numbers)))
                expected = np.array(part.resize((box.size_px, box.size_px), Image.Resampling.BILINEAR))
                torch.testing.assert_close(made[view] * 255, torch.from_numpy(expected.transpose(2, 0, 1)).float())


def test_workers_cut_their_own_rows(photos):
    recipe, indices = built(photos), torch.arange(8)
    whole = recipe.image_set.read(indices, recipe.draws(0)).images
    expected = recipe.views(whole, 0, slice(0, 8), 8).unflatten(0, (2, 8))
    for rows in (slice(0, 3), slice(3, 8)):
        own = recipe.image_set.read(indices[rows], recipe.draws(0)[rows]).images
        made = recipe.views(own, 0, rows, 8).unflatten(0, (2, -1))
        assert torch.equal(made, expected[:, rows])


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("folder", {"resident_limit_mib": 100}),
        ("parquet", {}),
        ("webdataset", {}),
        ("parquet", {"shuffle_window": 16}),
        ("webdataset", {"shuffle_window": 16}),
    ],
)
def test_every_kind_of_set_gives_the_same_crops(photos, name, more):
    indices, draws = torch.tensor([5, 0, 39]), row_draws(1, 2, 3)
    expected = built(photos).image_set.read(indices, draws).images
    assert expected.shape == (3, 3 * (2 * 8 * 8 + 5 * 5))
    recipe = built(photos, data_of(photos, name, **more))
    assert torch.equal(recipe.image_set.read(indices, draws).images, expected)
    assert torch.equal(recipe.image_set.read(indices).images, built(photos).image_set.read(indices).images)


@pytest.mark.parametrize(
    ("name", "more"), [pytest.param("folder", {}, marks=pytest.mark.slow), ("webdataset", {"shuffle_window": 16})]
)
def test_loaders_do_not_change_the_run(photos, tmp_path, name, more):
    changes = changes_of(photos, data=data_of(photos, name, **more), epochs=1)
    first, second = (
        run(tmp_path, **changes, runtime={**VALUES["runtime"], "num_loader_workers": count})[0] for count in (0, 2)
    )
    assert curve(first.reports) == curve(second.reports)
    assert_identical(first.last_state(), second.last_state())


def test_evaluation_sees_the_centred_squares(photos, alone, tmp_path):
    squares, _ = run(tmp_path, **changes_of(photos, augment={**AUGMENT, "from_original": False}, epochs=0))
    originals, _ = run(tmp_path, **changes_of(photos, epochs=0))
    (_, expected, _), (_, found, _) = squares.reports[-1], originals.reports[-1]
    assert found["val/rankme"] == expected["val/rankme"]
    assert found["val/alignment"] != expected["val/alignment"]


def test_an_image_that_replaces_an_unreadable_one_is_cropped(photos, tmp_path):
    files = {path.name: path.read_bytes() for path in (photos / "images").iterdir()}
    write_folder(tmp_path, {**files, "05.png": b"damaged"})
    recipe = built(photos, data_of(photos, root=str(tmp_path), on_bad_image="skip"))
    batch = recipe.image_set.read(torch.tensor([5, 7]), torch.tensor([1, 2]))
    assert batch.indices.tolist() == [6, 7]
    expected = recipe.image_set.read(torch.tensor([6]), torch.tensor([1])).images
    assert torch.equal(batch.images[:1], expected)


def test_only_images_in_files_have_originals(photos):
    message = (
        "^augment.from_original: found true, must be false without data.image_size_px, at which images are measured$"
    )
    for data in ({"name": "digits"}, data_of(photos, image_size_px=None)):
        with pytest.raises(ConfigError, match=message):
            config(data=data, augment={"from_original": True})
    squares = built(photos, from_original=False).image_set
    assert AugmentConfig().crops(squares) is squares


def test_a_small_set_is_not_kept_as_squares(photos):
    assert isinstance(built(photos).image_set, EncodedImages)
    assert not isinstance(built(photos, from_original=False).image_set, EncodedImages)
