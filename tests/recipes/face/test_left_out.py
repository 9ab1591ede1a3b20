"""Classes of the training set that have the name of a test set's person are left out, unless they have only numbers."""

import pytest
from PIL import Image

from tests.data.faces.test_records import entry, write_records
from tests.data.files import plain, write_folder, write_parquet
from tests.data.shards.test_tar import write_shards
from tests.recipes.face.test_recipe import run


def folder_named(names):
    def written(root):
        write_folder(root, {f"train/{names[n % 4]}/{n}.png": plain(n) for n in range(24)})
        return {"name": "folder", "root": str(root)}

    return written


def records(root):
    return {"name": "records", "root": str(write_records(root, {n: entry(n % 4, plain(n), n) for n in range(24)}))}


def shards(root):
    root.mkdir()
    cache = str(root / "cache")
    return {"name": "webdataset", "train": [write_shards(root, num_images=8)], "cache_folder": cache}


def parquet_named(names):
    def written(root):
        root.mkdir()
        file = write_parquet(root / "train.parquet", [plain(n) for n in range(24)], [n % 4 for n in range(24)], names)
        return {"name": "parquet", "train": [str(file)]}

    return written


@pytest.mark.parametrize(
    ("written", "num_left"),
    [
        (records, 24),
        (shards, 24),
        (parquet_named(None), 24),
        (parquet_named(["000", "001", "002", "007"]), 12),
        (folder_named(["0", "1", "2", "3"]), 12),
        (folder_named(["000", "001", "002", "007"]), 12),
    ],
)
def test_folders_with_numbers_leave_out_names_and_not_numbers_of_classes(tmp_path, caplog, written, num_left):
    data = {**written(tmp_path / "data"), "image_size_px": 8, "num_channels": 1}
    folders = ["0", "1", "000", "001", "x"]
    images = write_folder(tmp_path / "faces", {f"{folders[n % 5]}/{n}.png": plain(20 * n) for n in range(10)})
    pairs = [f"{n}.png,{(n + step) % 10}.png,{int(step == 5)},{n % 2}" for n in range(10) for step in (1, 5)]
    (table := tmp_path / "pairs.csv").write_text("\n".join(["first,second,same,fold", *pairs]))
    test_set = {"name": "pairs", "title": "cfp", "pairs": str(table), "images": str(images)}
    with caplog.at_level("INFO"):
        _, store = run(tmp_path, data=data, test_sets=[test_set], epochs=0, global_batch_size=6)
    assert [size for _, size in store.described] == [num_left]
    said = any(text.endswith("its people have numbers, not names: nobody is left out") for text in caplog.messages)
    assert said == (num_left == 24)


def test_people_of_a_test_set_are_left_out(tmp_path, tested):
    folder = tmp_path / "train"
    for label in range(12):
        (folder / f"digit {label}").mkdir(parents=True)
        for number in range(30):
            Image.new("L", (8, 8), 20 * label + number % 7).save(folder / f"digit {label}" / f"{number}.png")
    data = {"name": "folder", "root": str(tmp_path), "num_channels": 1}
    for leave_out, people in ((True, 2), (False, 12)):
        state = {"test_sets": [tested], "data": data, "leave_out_tested": leave_out, "epochs": 1}
        runtime, _ = run(tmp_path, global_batch_size=20, **state)
        assert runtime.last_state()["objective"]["loss.weight"].shape == (people, 16)
