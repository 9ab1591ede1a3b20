"""Metric learning on images of one's own with queries and a gallery."""

import numpy as np
import pytest
import torch
from PIL import Image

from ssl_sec.data import retrieval_sets
from ssl_sec.data.retrieval_sets import Counts, read_inshop
from tests.data.files import encode, write_folder, write_parquet
from tests.evaluation.test_retrieval import precisions_slowly, slowly
from tests.fakes import assert_identical
from tests.recipes.metric_learning.test_metric_learning import run
from tests.recipes.same_runs import assert_the_same_curve, on_a_worker
from tests.workers import on_workers

# Images of each class: four classes are trained on; the queries of class 5 have nothing to find.
SIZES = {
    "train": {0: 4, 1: 4, 2: 4, 3: 4},
    "query": {4: 4, 5: 2, 6: 3},
    "gallery": {4: 3, 6: 4, 7: 5},
}
CHANGES = {
    "augment": {"short_side_px": 16, "size_px": 16},
    "transform": {"name": "none"},
    "global_batch_size": 8,
    "sampler": {"name": "classes", "images_per_class": 2},
    "held_out_share": 0.0,
    "monitor": {"every_steps": 1, "test_classes": True},
    "evaluation": {"ks": [1, 2, 3, 5], "neighbours": 3},
    "steps": 2,
}


def pictures():
    """PNGs of noise: part -> (class, image), in the order of the classes."""
    generator = np.random.default_rng(0)

    def noise(label):  # around the colour of its class, so that some queries find it
        colour = np.random.default_rng(label).integers(90, 160, 3)
        return encode(Image.fromarray((colour + generator.integers(-90, 91, (16, 16, 3))).astype(np.uint8)))

    return {
        part: [(label, noise(label)) for label, size in sizes.items() for _ in range(size)]
        for part, sizes in SIZES.items()
    }


def as_folder(root, parts):
    for part, images in parts.items():
        write_folder(root, {f"{part}/{label}/{at:02d}.png": image for at, (label, image) in enumerate(images)})
    return {"name": "folder", "root": str(root), "on_bad_image": "skip"}


def as_parquet(root, parts):
    for part, images in parts.items():
        labels, encoded = zip(*images, strict=True)
        write_parquet(root / f"{part}-00000-of-00001.parquet", list(encoded), list(labels))
    files = {part: [f"{root}/{part}-*.parquet"] for part in parts}
    return {"name": "parquet", **files, "cache_folder": str(root / "cache")}


def as_inshop(root, parts):
    rows = [
        (f"img/{label}/{part}_{at}.png", str(label), part, image)
        for part, images in parts.items()
        for at, (label, image) in enumerate(images)
    ]
    write_folder(root, {path: image for path, *_, image in rows})
    lines = [f"{path} {label} {part}" for path, label, part, _ in rows]
    (root / "list_eval_partition.txt").write_text(
        "\n".join([str(len(rows)), "image_name item_id evaluation_status", *lines])
    )
    return {"name": "inshop", "root": str(root)}


def trained(folder, data, **changes):
    (folder / "run").mkdir()
    return run(folder / "run", **{**CHANGES, "data": data, **changes})


@pytest.fixture(scope="module")
def of_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("of_folder")
    return trained(folder, as_folder(folder / "photos", pictures()))


def test_queries_rank_the_gallery_and_nothing_else(of_folder):
    runtime, store = of_folder
    kept = torch.load(store.features_path, weights_only=True)
    sizes = [sum(SIZES[part].values()) for part in ("query", "gallery")]
    embeddings, labels, is_query = kept["features"], kept["labels"], [True] * sizes[0] + [False] * sizes[1]
    assert len(labels) == sum(sizes) and len(labels.unique()) == 4
    found = runtime.reports[-1][1]
    expected = slowly(embeddings, labels, [1, 2, 3, 5], is_query)
    among_all = slowly(embeddings, labels, [1, 2, 3, 5])
    for k in (1, 2, 3, 5):
        assert found[f"retrieval/recall_at_{k}"] == pytest.approx(100 * expected[k])
    assert expected[1] != among_all[1] and 0 < expected[5] <= 7 / 9
    at_r = [100 * share for share in precisions_slowly(embeddings, labels, is_query)]
    assert [found["retrieval/r_precision"], found["retrieval/map_at_r"]] == pytest.approx(at_r)
    assert runtime.series("test/recall_at_1")[1] == found["retrieval/recall_at_1"]
    assert "retrieval/nmi" in found


def test_the_pictures_are_of_queries_with_images_of_the_gallery(of_folder):
    _, store = of_folder
    images = {
        part: {
            np.array(Image.open(path)).tobytes() for path in store.encoder_path.parents[1].glob(f"photos/{part}/*/*")
        }
        for part in ("query", "gallery")
    }
    shown = torch.load(store.examples_path, weights_only=True)

    def pixels(found):
        return {image.permute(1, 2, 0).contiguous().numpy().tobytes() for image in found}

    assert shown["neighbours"].shape[:2] == (8, 3)
    assert pixels(shown["queries"]) < images["query"] and pixels(shown["neighbours"].flatten(0, 1)) <= images["gallery"]


@pytest.mark.parametrize(
    "layout", [pytest.param(as_parquet, marks=pytest.mark.slow), pytest.param(as_inshop, marks=pytest.mark.slow)]
)
def test_the_layout_makes_no_difference(tmp_path, of_folder, layout, monkeypatch):
    counts = {part: Counts(sum(sizes.values()), len(sizes)) for part, sizes in SIZES.items()}
    monkeypatch.setitem(retrieval_sets.RETRIEVAL_SETS, "inshop", (read_inshop, counts))
    (tmp_path / "images").mkdir()
    runtime, store = trained(tmp_path, layout(tmp_path / "images", pictures()))
    assert_the_same_curve(runtime.reports, [(step, metrics) for step, metrics, _ in of_folder[0].reports])
    assert_identical(*(torch.load(each.examples_path, weights_only=True) for each in (store, of_folder[1])))


@pytest.mark.distributed
def test_images_that_cannot_be_read_are_neither_queries_nor_in_the_gallery(tmp_path):
    parts = pictures()
    whole = as_folder(tmp_path / "whole", parts)
    for path in sorted((tmp_path / "whole").glob("[qg]*/*/*"))[::3]:
        path.unlink()
    damaged = as_folder(tmp_path / "damaged", parts)
    for path in sorted((tmp_path / "damaged").glob("[qg]*/*/*"))[::3]:
        path.write_bytes(b"damaged")
    (tmp_path / "parted").mkdir()
    runtime, store = trained(tmp_path, whole)
    expected = [(step, metrics) for step, metrics, _ in runtime.reports]
    (parted, _), _ = on_workers(2, tmp_path, on_a_worker, run, tmp_path / "parted", {**CHANGES, "data": damaged})
    assert_the_same_curve(parted, expected)
    shown = torch.load(tmp_path / "parted" / store.examples_path.name, weights_only=True)
    assert_identical(shown, torch.load(store.examples_path, weights_only=True))


def test_queries_that_can_find_nothing_are_counted_in_the_log(tmp_path, caplog):
    with caplog.at_level("INFO"):
        trained(tmp_path, as_folder(tmp_path / "photos", pictures()), steps=0)
    assert "2 of the 9 queries have no image of their class in the gallery: they are wrong at any K" in caplog.messages
    assert "measuring retrieval on 21 images of the test classes, 9 of them queries" in caplog.messages
