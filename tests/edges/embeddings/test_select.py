"""jobs.select: a list of the images to label first, and a page that shows them."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image

from ssl_sec.edges.embeddings.select import run_select
from ssl_sec.embeddings.parts import Rows, encoded
from ssl_sec.errors import ConfigError, DataError, StorageError
from tests.jobs import configured

SIZES = (12, 20, 8)


def write(folder: Path, split: str = "train", paths: list[str] | None = None, labels: bool = True) -> Path:
    """Embeddings of three clusters of different sizes."""
    folder.mkdir(exist_ok=True, parents=True)
    classes = np.repeat(np.arange(3), SIZES)
    embeddings = torch.eye(4)[classes] + 0.05 * torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
    rows = Rows(
        rows=np.arange(40),
        paths=paths or [None] * 40,
        labels=classes if labels else np.full(40, -1),
        embeddings=embeddings.numpy().astype(np.float32),
    )
    names = ("cat", "dog", "owl") if labels else ()
    (folder / f"{split}-00000-of-00001.parquet").write_bytes(encoded(rows, names, {}))
    return folder


def select(embeddings: Path, output: Path, *overrides: str):
    return run_select(configured("select", [f"embeddings={embeddings}", f"output={output}", *overrides]))


def test_the_list_has_the_images_in_their_order(tmp_path: Path):
    found = select(write(tmp_path / "embeddings"), tmp_path / "out", "count=3")
    table = pd.read_csv(tmp_path / "out" / "selected.csv")
    pd.testing.assert_frame_equal(table, pd.read_parquet(tmp_path / "out" / "selected.parquet"), check_dtype=False)
    assert table["label"].tolist() == [1, 0, 2] and table["cluster_size"].tolist() == [20, 12, 8]
    assert table["split"].tolist() == ["train"] * 3 and table["row"].between(0, 39).all()
    assert str(found).splitlines()[:2] == [
        "selected: 3 images of 40, from 3 clusters of 8 to 20 images",
        "classes of the selected images: 3 of 3",
    ]


@pytest.mark.parametrize("kind", ["csv", "parquet", "paths"])
def test_a_second_selection_complements_the_first(kind, tmp_path: Path):
    embeddings = write(tmp_path / "embeddings", paths=[f"{number}.png" for number in range(40)])
    select(embeddings, tmp_path / "first", "count=2")
    labelled = tmp_path / "first" / ("selected.parquet" if kind == "parquet" else "selected.csv")
    first = pd.read_csv(tmp_path / "first" / "selected.csv")
    if kind == "paths":  # of a list that another program made
        labelled = tmp_path / "paths.csv"
        first[["path"]].to_csv(labelled, index=False)
    found = select(embeddings, tmp_path / "second", "count=1", f"labelled=[{labelled}]")
    assert found.lines()[0] == "selected: 1 image of 40, 2 of which have labels, from 1 cluster of 8 to 8 images"
    assert found.table["label"].to_pylist() == [2]


def test_listed_images_that_are_not_embedded_are_counted(tmp_path: Path, caplog):
    embeddings = write(tmp_path / "embeddings", paths=[f"{number}.png" for number in range(40)])
    (tmp_path / "list.csv").write_text("path\n3.png\nother.png\n7.png\n")
    found = select(embeddings, tmp_path / "out", "count=1", f"labelled=[{tmp_path / 'list.csv'}]")
    assert found.num_labelled == 2
    assert "labelled: 1 of 3 listed images are not among the images to choose from" in caplog.text


def test_an_image_is_listed_by_its_row_or_by_its_path_where_it_has_none(tmp_path: Path, caplog):
    embeddings = write(tmp_path / "embeddings", paths=[f"{number}.png" for number in range(40)])
    (tmp_path / "list.csv").write_text("split,row,path\ntrain,3,\n,4,\ntrain,,5.png\n,,7.png\ntest,6,6.png\n")
    (tmp_path / "paths.csv").write_text("path\n3.png\n4.png\nother.png\n\n")
    listed = f"labelled=[{tmp_path}/list.csv,{tmp_path}/paths.csv]"
    assert select(embeddings, tmp_path / "out", "count=1", listed).num_labelled == 4  # 3, 4, 5 and 7
    assert "labelled: 2 of 8 listed images are not among the images to choose from" in caplog.text


def test_images_of_one_split_are_chosen(tmp_path: Path):
    embeddings = write(write(tmp_path / "embeddings"), "test")
    with pytest.raises(ConfigError, match=r"^split: found null, must be one of test \(40\), train \(40\)$"):
        select(embeddings, tmp_path / "out", "count=3")
    with pytest.raises(ConfigError, match="^split: found val, must be one of"):
        select(embeddings, tmp_path / "out", "count=3", "split=val")
    found = select(embeddings, tmp_path / "out", "count=3", "split=train")
    assert set(found.table["split"].to_pylist()) == {"train"} and found.num_images == 40


def test_a_folder_of_files_of_another_program_is_one_set(tmp_path: Path):
    (tmp_path / "spark").mkdir()
    for part in range(3):
        rows = np.random.default_rng(part).normal(size=(10, 4)).tolist()
        pd.DataFrame({"embedding": rows}).to_parquet(tmp_path / "spark" / f"part-0000{part}-1c2d-c000.snappy.parquet")
    with pytest.raises(ConfigError, match="^split: found train, must be null: the embeddings have no splits$"):
        select(tmp_path / "spark", tmp_path / "first", "count=25", "split=train")
    first = select(tmp_path / "spark", tmp_path / "first", "count=25").table
    assert len(set(first["row"].to_pylist())) == 25 and set(first["split"].to_pylist()) == {None}
    listed = f"labelled=[{tmp_path}/first/selected.csv]"
    second = select(tmp_path / "spark", tmp_path / "second", "count=5", listed).table
    assert sorted([*first["row"].to_pylist(), *second["row"].to_pylist()]) == list(range(30))


def test_the_page_shows_the_images_and_no_labels_are_needed(tmp_path: Path):
    paths = [str(tmp_path / f"{number}.png") for number in range(40)]
    for number, path in enumerate(paths):
        Image.new("RGB", (6, 6), (number, 0, 0)).save(path)
    found = select(
        write(tmp_path / "embeddings", paths=paths, labels=False), tmp_path / "out", "count=5", "images_shown=4"
    )
    page = (tmp_path / "out" / "index.html").read_text(encoding="utf-8")
    assert page.count('<img src="data:image/png;base64,') == 4
    assert "classes" not in str(found)
    assert all(Path(path).name in page for path in found.table["path"].to_pylist()[:4])


def test_a_list_is_not_overwritten(tmp_path: Path):
    embeddings = write(tmp_path / "embeddings")
    select(embeddings, tmp_path / "out", "count=3")
    before = (tmp_path / "out" / "selected.csv").read_bytes()
    with pytest.raises(ConfigError, match="^output: .*out holds a selection already; allowed: another folder$"):
        select(embeddings, tmp_path / "out", "count=4")
    assert (tmp_path / "out" / "selected.csv").read_bytes() == before
    with pytest.raises(ConfigError, match="^output: found .*, the folder of the embeddings; must be another$"):
        select(embeddings, embeddings, "count=3")


def test_an_output_that_cannot_be_written_is_refused_before_the_search(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("ssl_sec.edges.embeddings.select.select_typical", lambda *_, **__: pytest.fail("searched"))
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="^output: .*/file/out"):
        select(write(tmp_path / "embeddings"), tmp_path / "file" / "out", "count=3")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("name\nx\n", r"labelled: .*list\.csv: found the columns 'name', must have 'row' or 'path'"),
        ("path\nother.png\n", r"labelled: found none of the listed images among those in "),
        ("", r"labelled: .*list\.csv cannot be read: Empty CSV file"),
    ],
)
def test_a_list_that_cannot_be_used_is_one_line(content, message, tmp_path: Path):
    embeddings = write(tmp_path / "embeddings")
    (tmp_path / "list.csv").write_text(content)
    with pytest.raises(DataError, match=f"^{message}"):
        select(embeddings, tmp_path / "out", "count=3", f"labelled=[{tmp_path / 'list.csv'}]")
    with pytest.raises(ConfigError, match=r"^labelled: found .*list\.txt', must be files, \*\.csv or \*\.parquet$"):
        select(embeddings, tmp_path / "out", "count=3", f"labelled=[{tmp_path / 'list.txt'}]")
    assert not (tmp_path / "out" / "selected.csv").exists()
