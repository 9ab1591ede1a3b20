import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from ssl_sec.augment.config import AugmentConfig
from ssl_sec.collectives import rank, world_size
from ssl_sec.data.image_set import UNLABELLED, ResidentImages
from ssl_sec.data.shards.streamed import shuffled_batches
from ssl_sec.data.standard_sets import open_digits
from ssl_sec.recipes.pretraining import recipe as recipe_module
from ssl_sec.recipes.pretraining.examples import first_views, neighbours
from ssl_sec.recipes.pretraining.figures import draw_at_start
from ssl_sec.recipes.pretraining.recipe import build_recipe
from tests.data.files import encode, write_folder, write_parquet
from tests.fakes import FakeRuntime, assert_identical
from tests.recipes.pretraining.test_pretraining import config, run
from tests.recipes.same_runs import curve
from tests.workers import on_workers

CPU = torch.device("cpu")


def resident(num_images, channels, height, width, class_names=()):
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(len(class_names), (num_images,), generator=generator) if class_names else None
    return ResidentImages(
        images=torch.randint(256, (num_images, channels, height, width), generator=generator, dtype=torch.uint8),
        labels=torch.full((num_images,), UNLABELLED) if labels is None else labels,
        class_names=class_names,
        name="noise/train",
        description="",
    )


@settings(max_examples=15)
@given(
    batch=st.integers(2, 20),
    channels=st.sampled_from([1, 3]),
    size=st.tuples(st.integers(4, 12), st.integers(4, 12)),
    num_views=st.integers(2, 4),
    view_size=st.none() | st.integers(3, 9),
    seed=st.integers(0, 2**40),
)
def test_the_views_are_those_of_the_first_step(batch, channels, size, num_views, view_size, seed):
    images = resident(24, channels, *size)
    sampler = shuffled_batches(images, batch, seed)
    views = AugmentConfig(num_views=num_views, view_size_px=view_size).build(min(size), channels, seed)
    before = torch.get_rng_state()
    found = first_views(images, sampler, (views,), CPU)
    assert torch.equal(torch.get_rng_state(), before)
    shown = min(batch, 8)
    indices = sampler.indices(0)
    assert torch.equal(found["images"], images.images[indices[:shown]])
    whole = views(images.read(indices).images, 0, slice(0, batch), batch).split(batch)
    assert len(found["views"]) == num_views
    for mine, theirs in zip(found["views"], whole, strict=True):
        assert mine.dtype == torch.uint8
        torch.testing.assert_close(mine.float() / 255, theirs[:shown], rtol=0, atol=0.51 / 255)


def test_large_images_are_stored_small():
    images = resident(4, 3, 600, 300)
    views = AugmentConfig(view_size_px=260).build(300, 3, seed=0)
    found = first_views(images, shuffled_batches(images, 4, 0), (views,), CPU)
    assert found["images"].shape == (4, 3, 256, 128)
    assert {each.shape for each in found["views"]} == {(4, 3, 256, 256)}
    shown = neighbours(images, torch.arange(4), torch.eye(4))
    assert shown["queries"].shape == (4, 3, 256, 128) and shown["neighbours"].shape == (4, 3, 3, 256, 128)


@pytest.mark.parametrize(("brightest", "is_warned"), [(15, True), (63, True), (64, False)])
def test_dark_images_as_of_12_bits_in_files_of_16_are_a_warning(brightest, is_warned, caplog):
    images = resident(10, 1, 8, 8)
    images.images.clamp_(max=brightest)
    views = AugmentConfig().build(8, 1, seed=0)
    first_views(images, shuffled_batches(images, 4, 0), (views,), CPU)
    assert (f"brightest pixel of 4 images of noise/train is {brightest} of 255" in caplog.text) == is_warned


def test_views_of_several_sizes_are_shown_in_order():
    images = resident(20, 3, 8, 8)
    sampler = shuffled_batches(images, 10, 0)
    large, small = (
        AugmentConfig(num_views=count, view_size_px=px).build(8, 3, seed=px) for count, px in ((2, 8), (3, 4))
    )
    found = first_views(images, sampler, (large, small), CPU)
    assert [each.shape[2:] for each in found["views"]] == [(8, 8)] * 2 + [(4, 4)] * 3
    alone = first_views(images, sampler, (small,), CPU)
    assert_identical(found["views"][2:], alone["views"])


def test_a_run_with_pictures_is_the_run_without(tmp_path, monkeypatch):
    (tmp_path / "with").mkdir(), (tmp_path / "without").mkdir()
    torch.manual_seed(3)
    drawn, store = run(tmp_path / "with")
    after = torch.get_rng_state()
    assert store.views_path.exists() and store.examples_path.exists()
    for name, result in (("save_first_views", None), ("neighbours", {})):
        monkeypatch.setattr(recipe_module, name, lambda *given, result=result: result)
    torch.manual_seed(3)
    plain, other = run(tmp_path / "without")
    assert torch.equal(torch.get_rng_state(), after)
    assert not other.views_path.exists()
    assert curve(drawn.reports) == curve(plain.reports)
    assert_identical(drawn.last_state(), plain.last_state())


def digits_in_files(tmp_path, kind):
    """A set of 96 digits, unlabelled in a folder, or labelled in Parquet; none is held in memory."""
    digits = open_digits("train")
    encoded = [encode(Image.fromarray(image[0].numpy())) for image in digits.images[:96]]
    data = {"name": kind, "num_channels": 1, "resident_limit_mib": 0}
    if kind == "folder":
        root = write_folder(tmp_path / "images", {f"{number:03d}.png": image for number, image in enumerate(encoded)})
        return {**data, "root": str(root)}
    file = write_parquet(tmp_path / "train.parquet", encoded, digits.labels[:96].tolist())
    return {**data, "train": [str(file)], "cache_folder": str(tmp_path / "cache"), "shuffle_window": 16}


@pytest.mark.parametrize("kind", [pytest.param("folder", marks=pytest.mark.slow), "parquet"])
def test_sets_that_are_read_from_files_are_shown_and_trained_on_as_before(tmp_path, monkeypatch, kind):
    data = digits_in_files(tmp_path, kind)
    changes = {"data": data, "global_batch_size": 16, "epochs": 1, "augment": {"num_views": 3}}
    drawn, store = run(tmp_path, **changes)
    found = torch.load(store.views_path, weights_only=True)
    images = config(**changes).data.open("train")
    recipe = build_recipe(config(**changes), images, FakeRuntime())
    assert torch.equal(found["images"], images.read(recipe.sampler.indices(0)[:8]).images)
    assert len(found["views"]) == 3
    saved = torch.load(store.examples_path, weights_only=True)
    assert saved["neighbours"].shape == (8, 6, 1, 8, 8)
    assert ("correct" in saved) == (kind == "parquet")
    monkeypatch.setattr(recipe_module, "save_first_views", lambda *given: None)
    plain, _ = run(tmp_path, **changes)
    assert drawn.series("train/loss") == plain.series("train/loss")


def shown_by_this_worker(folder):
    folder = folder / str(rank())
    folder.mkdir()
    _, store = run(folder, FakeRuntime(rank(), world_size()), epochs=0)
    paths = (store.views_path, store.examples_path)
    return [torch.load(path, weights_only=True) if path.exists() else None for path in paths]


@pytest.mark.distributed
def test_any_number_of_workers_stores_the_same_pictures(tmp_path):
    alone, *_ = on_workers(1, tmp_path, shown_by_this_worker, tmp_path)
    first, second = on_workers(2, tmp_path, shown_by_this_worker, _made(tmp_path / "two"))
    assert second == [None, None]
    assert_identical(first[0], alone[0])
    assert_identical(first[1]["queries"], alone[1]["queries"])


def _made(folder):
    folder.mkdir()
    return folder


def test_a_resumed_run_keeps_its_pictures_and_ignores_partial_ones(tmp_path, monkeypatch):
    _, store = run(tmp_path, epochs=0)
    before = store.views_path.read_bytes()
    run(tmp_path, epochs=0, seed=5)
    assert store.views_path.read_bytes() == before
    store.views_path.unlink()

    def interrupted(content, path):
        path.write_bytes(before[:100])
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, epochs=0)
    assert not store.views_path.exists()
    assert draw_at_start(store) == {}


@settings(max_examples=15)
@given(num_images=st.integers(2, 30), is_labelled=st.booleans(), seed=st.integers(0, 2**30))
def test_neighbours_have_the_greatest_cosines(num_images, is_labelled, seed):
    images = resident(40, 1, 3, 5, ("a", "b") if is_labelled else ())
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randperm(40, generator=generator)[:num_images]
    features = torch.randn(num_images, 4, generator=generator)
    found = neighbours(images, rows, features)
    assert found["neighbours"].shape[:2] == (min(8, num_images), min(6, num_images - 1))
    at = {images.images[row].numpy().tobytes(): place for place, row in enumerate(rows.tolist())}
    cosines = torch.nn.functional.cosine_similarity(features[:, None], features[None], dim=2)
    for number, (query, answers) in enumerate(zip(found["queries"], found["neighbours"], strict=True)):
        place = at[query.numpy().tobytes()]
        answered = [at[answer.numpy().tobytes()] for answer in answers]
        others = sorted((float(cosines[place, other]) for other in range(num_images) if other != place), reverse=True)
        assert cosines[place, answered].tolist() == pytest.approx(others[: len(answered)], abs=1e-5)
        if is_labelled:
            same = images.labels[rows[answered]] == images.labels[rows[place]]
            assert torch.equal(found["correct"][number], same)
    assert ("correct" in found) == is_labelled
