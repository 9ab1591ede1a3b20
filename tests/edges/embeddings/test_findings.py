"""What a search says of labels: those of sets and splits with other classes are compared by name."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from ssl_sec.data.image_set import ResidentImages
from ssl_sec.data.selection.left_out import without_listed
from ssl_sec.edges.embeddings.findings import Findings
from ssl_sec.edges.embeddings.neighbours import run_neighbours
from ssl_sec.embeddings.parts import Rows, encoded
from ssl_sec.errors import ConfigError, DataError
from tests.jobs import configured
from tests.test_library import blocks

# Images of two classes as embeddings, four of each.
CATS, DOGS = np.eye(8, dtype=np.float32)[:4], np.eye(8, dtype=np.float32)[4:]


def write(folder: Path, split: str, classes: dict[str, np.ndarray]) -> Path:
    """The embeddings of a split, by the names of its classes."""
    folder.mkdir(exist_ok=True)
    embeddings, labels = np.concatenate(list(classes.values())), np.repeat(np.arange(len(classes)), 4)
    rows = Rows(rows=np.arange(len(labels)), paths=[None] * len(labels), labels=labels, embeddings=embeddings)
    (folder / f"{split}-00000-of-00001.parquet").write_bytes(encoded(rows, tuple(classes), {}))
    return folder


def images_of(labels: Sequence[int]) -> ResidentImages:
    """Training images with some labels."""
    return ResidentImages(
        images=torch.zeros(len(labels), 1, 1, 1, dtype=torch.uint8),
        labels=torch.tensor(labels),
        class_names=("cat", "copy", "dog", "fox"),
        name="copies/train",
        description="images",
    )


def find(embeddings: Path, output: Path, *overrides: str) -> Findings:
    given = [f"embeddings={embeddings}", f"output={output}", "runtime=local", "k=1", *overrides]
    return run_neighbours(configured("neighbours", given))


def test_a_folder_may_have_the_name_of_a_file(tmp_path: Path):
    folder = write(tmp_path / "as_of_spark.parquet", "train", {"cat": CATS, "dog": DOGS})
    assert find(folder, tmp_path / "out").num_images == 8
    with pytest.raises(ConfigError, match="^output: found .*as_of_spark.parquet, the folder of the embeddings"):
        find(folder, folder)


def test_one_file_of_several_is_searched_if_it_is_named(tmp_path: Path):
    folder = write(tmp_path / "animals", "train", {"cat": CATS, "dog": DOGS})
    one = (folder / "train-00000-of-00001.parquet").rename(folder / "train-00000-of-00002.parquet")
    assert find(one, tmp_path / "out").num_images == 8
    with pytest.raises(DataError, match="^embeddings: found 1 of the 2 files of the train split"):
        find(folder, tmp_path / "other")


def test_one_pair_is_counted_in_the_singular(tmp_path: Path):
    cats = np.concatenate([CATS[:3], CATS[:1]])
    lines = find(write(tmp_path / "cats", "train", {"cat": cats, "dog": DOGS}), tmp_path / "out").lines()
    assert "near-duplicates: 1 pair of cosine 0.95 or more in 1 group of 2 images, the largest of 2" in lines


def test_missing_pictures_of_one_set_are_warned_of_once(tmp_path: Path, caplog):
    find(write(tmp_path / "animals", "train", {"cat": CATS, "dog": DOGS}), tmp_path / "out")
    assert [record.message for record in caplog.records if "picture" in record.message] == [
        "8 pictures of the train split could not be read: the files do not say which images they are of; allowed: a "
        "column 'path' with files of this machine"
    ]


@pytest.mark.parametrize("files", [["a.parquet"], ["a.parquet", "b.parquet"]])
def test_a_training_leaves_out_the_redundant_images_of_files_of_another_program(files: list[str], tmp_path: Path):
    (tmp_path / "mine").mkdir()
    for name, embeddings in zip(files, np.split(np.concatenate([CATS, CATS]), len(files)), strict=True):
        pq.write_table(pa.table({"embedding": embeddings.tolist()}), tmp_path / "mine" / name)
    lines = find(tmp_path / "mine", tmp_path / "out").lines()
    listed = f"{tmp_path}/out/redundant.parquet"
    assert f"made redundant by them: 4 images; data.leave_out=[{listed}] trains without them" in lines
    assert not any("splits" in line for line in lines)
    assert "<figcaption>row 3<" in (tmp_path / "out/index.html").read_text()
    kept = without_listed(images_of([*range(4), *range(4)]), [listed])
    assert kept.labels.tolist() == [0, 1, 2, 3] and len(kept) == 4


def test_queries_that_are_among_the_embeddings_are_warned_of(tmp_path: Path, caplog):
    folder = write(write(tmp_path / "animals", "train", {"cat": CATS}), "test", {"dog": DOGS})
    find(folder, tmp_path / "out", f"queries={folder}/test-00000-of-00001.parquet")
    named = f"queries: {folder}/test-00000-of-00001.parquet is among the embeddings, too: each of its images is found"
    assert named in caplog.text
    caplog.clear()
    find(folder, tmp_path / "other", f"queries={write(tmp_path / 'more', 'test', {'fox': 2 * CATS})}")
    assert "among the embeddings" not in caplog.text


def test_only_training_images_are_said_to_be_left_out(tmp_path: Path):
    copies = write(tmp_path / "copies", "val", {"cat": CATS, "copy": CATS})
    assert "made redundant by them: 4 images" in find(copies, tmp_path / "val").lines()
    write(copies, "train", {"dog": DOGS, "copy": DOGS})
    listed = f"data.leave_out=[{tmp_path}/both/redundant.parquet] trains without the 4 of the train split"
    assert f"made redundant by them: 8 images; {listed}" in find(copies, tmp_path / "both").lines()


@pytest.fixture
def one(tmp_path: Path) -> Path:
    return write(tmp_path / "one", "train", {"cat": CATS, "dog": DOGS})


def captions(page: str, kind: str) -> Sequence[str]:
    return [part.partition("<figcaption>")[2].partition("<br><")[0] for part in page.split(f'class="{kind}"')[1:]]


def test_a_training_leaves_out_the_images_that_others_make_redundant(tmp_path: Path):
    copies = write(tmp_path / "copies", "train", {"cat": CATS, "copy": CATS, "dog": DOGS})
    findings = find(copies, tmp_path / "out")
    assert findings.num_redundant == 4
    line = f"made redundant by them: 4 images; data.leave_out=[{tmp_path}/out/redundant.parquet] trains without them"
    assert line in findings.lines() and ", duplicates.parquet, redundant.parquet, outliers.parquet" in str(findings)
    images = images_of([0] * 4 + [1] * 4 + [2] * 4)
    kept = without_listed(images, [str(tmp_path / "out/redundant.parquet")])
    assert kept.labels.tolist() == [0, 0, 0, 0, 2, 2, 2, 2]
    found = find(copies, tmp_path / "other", f"queries={copies}")
    assert "redundant" not in str(found) and not (tmp_path / "other/redundant.parquet").exists()


def test_images_whose_neighbours_have_another_label_are_listed_as_the_documentation_does(tmp_path: Path, monkeypatch):
    """The last dog is in truth a cat."""
    dogs = np.concatenate([DOGS[:1] + 0.1 * DOGS[:3], CATS[:1]])
    animals = write(tmp_path / "animals", "train", {"cat": CATS[:1] + 0.1 * CATS, "dog": dogs})
    find(animals, tmp_path / "neighbours", "k=3")
    monkeypatch.chdir(tmp_path)
    exec(blocks("evaluation.md")[-1], {})
    table = pq.read_table("doubtful.parquet").to_pydict()
    assert (table["row"], table["share"], table["split"]) == ([7], [0.0], ["train"])
    assert [path.name for path in tmp_path.glob("*.parquet")] == ["doubtful.parquet"]


def test_a_class_has_other_numbers_in_another_set(one: Path, tmp_path: Path):
    other = write(tmp_path / "other", "train", {"dog": DOGS, "fox": CATS})
    findings = find(one, tmp_path / "out", f"queries={other}")
    assert (findings.nearest_of_same_label, findings.num_pairs, findings.num_conflicts) == (0.5, 8, 4)
    assert "same label as the nearest neighbour: 50.0% of the images" in findings.lines()
    assert "pairs with different labels: 4" in findings.lines()
    page = (tmp_path / "out/index.html").read_text()
    red = captions(page, "other")
    assert len(red) == 4 + 4 + 4 and sorted({each.rpartition("<br>")[2] for each in red}) == ["cat", "fox"]


def test_splits_of_other_classes_are_in_one_folder(one: Path, tmp_path: Path):
    write(one, "test", {"fox": CATS, "owl": DOGS})
    findings = find(one, tmp_path / "out")
    assert (findings.nearest_of_same_label, findings.num_conflicts) == (0.0, 8)
    page = (tmp_path / "out/index.html").read_text()
    shown = {each for each in captions(page, "other") if "train 7" in each or "test 7" in each}
    assert shown == {"train 7<br>dog", "test 7<br>owl"}


def test_an_image_without_a_split_is_of_that_of_its_file(tmp_path: Path):
    split = ["test", None, "test", None]
    pq.write_table(pa.table({"embedding": [[1.0, 0.0]] * 3 + [[0.0, 1.0]], "split": split}), tmp_path / "mine.parquet")
    findings = find(tmp_path / "mine.parquet", tmp_path / "out")
    assert "splits of the pairs: 1 test and test, 2 test and unnamed" in findings.lines()
    assert pq.read_table(tmp_path / "out" / "redundant.parquet")["split"].to_pylist() == [None]
    (tmp_path / "mine.parquet").rename(tmp_path / "train-00000-of-00001.parquet")
    findings = find(tmp_path / "train-00000-of-00001.parquet", tmp_path / "named")
    assert "splits of the pairs: 1 test and test, 2 test and train" in findings.lines()


def test_nothing_is_said_of_labels_that_cannot_be_compared(one: Path, tmp_path: Path):
    rows = Rows(rows=np.arange(4), paths=[None] * 4, labels=np.zeros(4, np.int64), embeddings=DOGS)
    (tmp_path / "mine.parquet").write_bytes(encoded(rows, (), {}))
    findings = find(one, tmp_path / "out", f"queries={tmp_path / 'mine.parquet'}")
    assert findings.nearest_of_same_label is None and findings.num_conflicts is None
    assert "labels:" not in str(findings) and "same label" not in str(findings)
    assert 'class="other"' not in (tmp_path / "out/index.html").read_text()


@pytest.mark.parametrize(
    ("num_images", "num_searched", "size", "num_pairs", "doubt"),
    [
        (20, 20, 10, 9, None),
        (20, 20, 11, 10, "one group of near-duplicates has 11 of 20 images"),
        (20, 200, 11, 10, None),  # two sets, of 220 images
        (101, 101, 2, 1010, None),
        (101, 101, 2, 2020, "40% of all pairs are near-duplicates"),
        (10, 2000, 2, 200, None),
        (10, 2000, 2, 400, "2% of all pairs are near-duplicates"),
    ],
)
def test_a_large_group_or_many_pairs_are_doubted(num_images, num_searched, size, num_pairs, doubt):
    findings = found(num_images, num_searched, size, num_pairs)
    assert (findings.doubt or "").partition(":")[0] == (doubt or "")


@pytest.mark.parametrize(
    ("separating", "is_centred", "advice"),
    [
        (
            0.999,
            False,
            "; duplicates_above=0.999 leaves 10% of the images with a near-duplicate, and centred=true may separate "
            "better",
        ),
        (0.999, True, "; duplicates_above=0.999 leaves 10% of the images with a near-duplicate"),
        (0.4, False, "; centred=true may separate better"),
        (0.4, True, ""),
    ],
)
def test_a_doubt_advises_neither_less_than_was_asked_for_nor_what_was_done(separating, is_centred, advice):
    """One of twenty queries is near many images: most queries have no near-duplicate."""
    doubt = found(20, 100, 32, 31, separating=separating, is_centred=is_centred).doubt
    assert doubt is not None and doubt.partition("with this encoder")[2] == advice


def found(num_images: int, num_searched: int, size: int, num_pairs: int, **more: Any) -> Findings:
    both = {"split": "train", "path": None, "label": 0}
    pairs = [
        {
            **both,
            "row": 0,
            **{f"neighbour_{key}": value for key, value in both.items()},
            "neighbour_row": row,
            "group": 0,
        }
        for row in range(1, size)
    ]
    empty = pa.table({})
    values: dict[str, Any] = dict(
        output="out",
        num_images=num_images,
        num_searched=num_searched,
        k=1,
        images_per_s=None,
        nearest_of_same_label=None,
        is_one_set=num_images == num_searched,
        is_centred=False,
        duplicates_above=0.95,
        separating=0.999,
        num_pairs=num_pairs,
        num_conflicts=None,
        num_redundant=0,
        num_redundant_train=0,
        duplicates=pa.Table.from_pylist(pairs),
        outliers=empty,
        examples=empty,
    )
    return Findings(**{**values, **more})
