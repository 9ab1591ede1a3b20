import json

import numpy as np
import pytest
import torch
from scipy.io import savemat

from ssl_sec.data.faces.lists import (
    read_blufr,
    read_detected_faces,
    read_megaface_list,
    read_template_faces,
    read_template_pairs,
    read_video_pairs,
)
from ssl_sec.errors import MissingDataError
from tests.data.test_sources import line

READERS = [
    read_template_faces,
    read_detected_faces,
    read_template_pairs,
    read_video_pairs,
    read_megaface_list,
    read_blufr,
]
SPLITS_HEADER = "split number, pair number in split, first name, second name, is same:\n"


@pytest.fixture
def path(tmp_path):
    return tmp_path / "list.txt"


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_faces_of_templates(path, end):
    path.write_text(end.join(["1.jpg 1 69544", '2".jpg 1 69544', "NA 20 -1", ""]), newline="")
    faces = read_template_faces(path)
    assert faces.paths == ("1.jpg", '2".jpg', "NA")
    assert faces.templates.tolist() == [1, 1, 20] and faces.media.tolist() == [69544, 69544, -1]


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_detected_faces(path, end):
    path.write_text(end.join(["1.jpg 1 2 3 4 5 6 7 8 9.5 -10 0.75", "2.jpg 1 2 3 4 5 6 7 8 9 10 1", ""]), newline="")
    faces = read_detected_faces(path)
    assert faces.paths == ("1.jpg", "2.jpg") and faces.scores.tolist() == [0.75, 1]
    assert faces.points[0].tolist() == [[1, 2], [3, 4], [5, 6], [7, 8], [9.5, -10]]


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_pairs_of_templates(path, end):
    path.write_text(end.join(["1 11065 1", "1 11066 0", ""]), newline="")
    first, second, same = read_template_pairs(str(path))
    assert (first.tolist(), second.tolist(), same.tolist()) == ([1, 1], [11065, 11066], [True, False])
    assert first.dtype == torch.int64 and same.dtype == torch.bool


def test_a_malformed_line_far_into_a_table_is_numbered(path):
    """Beyond the first block of the reader, which takes a megabyte at once."""
    rows = ["1 11065 1"] * 300_000
    rows[299_998] = "1 11065"
    path.write_text("\n".join(rows))
    assert line(lambda: read_template_pairs(path)) == f"{path} line 299999: Expected 3 columns, got 2: 1 11065"
    rows[299_998] = "1 eleven 1"
    path.write_text("\n".join(rows))
    assert f"{path} line 299999: " in line(lambda: read_template_pairs(path))


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"1 2 1\n3 4 2\n", "line 2: label 2; allowed: 0, 1"),
        (b"1 2 1\n3 4\n", "line 2: Expected 3 columns, got 2: 3 4"),
        (b"1 2 1\n3 4 0 9\n", "line 2: Expected 3 columns, got 4: 3 4 0 9"),
        (b"1 2 1\n\n3 4 1\n", "line 2: "),
        (b"1 2 1\nx 4 0\n", "line 2: CSV conversion error to int64: invalid value 'x'"),
        (b"1 2 1\n3.5 4 0\n", "line 2: CSV conversion error to int64: invalid value '3.5'"),
        (b"1 99999999999999999999 1\n", "line 1: CSV conversion error to int64"),
        (b"", "Empty CSV file"),
    ],
)
def test_malformed_pairs_of_templates(path, content, problem):
    path.write_bytes(content)
    assert line(lambda: read_template_pairs(path)).startswith(f"{path}")
    assert problem in line(lambda: read_template_pairs(path))


def test_names_that_are_not_utf_8(path):
    path.write_bytes(b"1.jpg 1 2\n\xff.jpg 1 2\n")
    assert "invalid UTF8 data" in line(lambda: read_template_faces(path))


def test_pairs_of_videos(path):
    path.write_text(SPLITS_HEADER + "1, 1, Ann/0, Bob/3, 0\n1, 2, Ann/0, Ann/1, 1\n10, 1, Bob/3, Ann/1, 0\n\n")
    pairs = read_video_pairs(path)
    assert pairs.videos == ("Ann/0", "Bob/3", "Ann/1")
    assert pairs.first.tolist() == [0, 0, 1] and pairs.second.tolist() == [1, 2, 2]
    assert pairs.same.tolist() == [False, True, False] and pairs.folds.tolist() == [1, 1, 10]


def test_people_of_videos_are_named_as_folders_are(path):
    path.write_bytes(f"{SPLITS_HEADER}1, 1, Jos\xe9/0, Bob/3, 0\n".encode("latin-1"))
    assert read_video_pairs(path).people == {"Jos\\xe9", "Bob"}


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        ("1, 1, a, b, 0\n1, 2, a, b\n", " line 3: 4 fields found, 5 expected"),
        ("1, 1, a, b, yes\n", " line 2: same is 'yes'; allowed: 0, 1"),
        ("1, 1, a, b, 0\n1, 2, a, a, 1\n", " line 3: a is compared with itself"),
        ("one, 1, a, b, 1\n", " line 2: split 'one'; allowed: whole numbers"),
        ("1, 1, a, b, 0\n\n1, 2, a, b, 1\n", " line 3: 0 fields found, 5 expected"),
        ("", ": no pairs"),
    ],
)
def test_malformed_pairs_of_videos(path, rows, problem):
    path.write_text(SPLITS_HEADER + rows)
    assert line(lambda: read_video_pairs(path)) == f"{path}{problem}"


def test_pairs_of_videos_without_a_header_lose_no_pair(path):
    path.write_text("1, 1, a, b, 0\n1, 2, a, c, 1\n")
    told = line(lambda: read_video_pairs(path))
    assert told == f"{path} line 1: found a pair, must be a header: split, number, first, second, same"


def test_lists_of_megaface(path):
    path.write_text(json.dumps({"id": ["Ann", "Bob"], "path": ["Ann/1.png", "Bob/2.png"]}))
    assert read_megaface_list(path) == (("Ann/1.png", "Bob/2.png"), ("Ann", "Bob"))
    path.write_text(json.dumps({"path": ["1/2/3.jpg"]}))
    assert read_megaface_list(path) == (("1/2/3.jpg",), ())


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ('{"path": [\n"a",\n]}', "no JSON: "),
        ("[" * 100_000, "no JSON: "),
        ("[]", "not a list of images"),
        ('{"id": []}', "not a list of images"),
        ('{"path": "abc"}', "not a list of images"),
        ('{"path": [1]}', "not a list of images"),
        ('{"path": ["a"], "id": ["b", "c"]}', "1 image and the people of 2"),
    ],
)
def test_malformed_lists_of_megaface(path, content, problem):
    path.write_text(content)
    assert line(lambda: read_megaface_list(path)).startswith(f"{path}: {problem}")


def cell(*columns):
    """A MATLAB cell array of column vectors."""
    cells = np.empty((len(columns), 1), object)
    for place, column in enumerate(columns):
        cells[place, 0] = np.array(column)[:, None]
    return cells


def blufr(path, **changes):
    content = {
        "imageList": np.array([["a_1.jpg"], ["a_2.jpg"], ["b_1.jpg"], ["c_1.jpg"]], object),
        "labels": np.array([[1], [1], [2], [3]], np.uint16),
        "galIndex": cell([1, 3], [2]),
        "probIndex": cell([2, 4], [1, 3, 4]),
    }
    savemat(path, {name: value for name, value in {**content, **changes}.items() if value is not None})


def test_blufr(tmp_path):
    path = tmp_path / "blufr_lfw_config.mat"
    blufr(path)
    images, labels, trials = read_blufr(path)
    assert images == ("a_1.jpg", "a_2.jpg", "b_1.jpg", "c_1.jpg")
    assert labels.tolist() == [1, 1, 2, 3]
    chosen = [[indices.tolist() for indices in trial] for trial in trials]
    assert chosen == [[[0, 2], [1, 3]], [[1], [0, 2, 3]]]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"galIndex": None}, "no galIndex; needed is blufr_lfw_config.mat"),
        ({"labels": np.array([1, 2])}, "2 labels for 4 images"),
        ({"labels": np.array([1, 2, 2.5, 3])}, "labels are not whole numbers"),
        ({"galIndex": cell([1, 0], [2])}, "galIndex has 0; allowed: 1 to 4"),
        ({"probIndex": cell([1], [5])}, "probIndex has 5; allowed: 1 to 4"),
        ({"probIndex": cell([1])}, "galIndex has 2 trials and probIndex 1"),
    ],
)
def test_malformed_blufr(tmp_path, changes, problem):
    path = tmp_path / "blufr_lfw_config.mat"
    blufr(path, **changes)
    assert line(lambda: read_blufr(path)) == f"{path}: {problem}"
    path.write_bytes(b"MATLAB 5.0 MAT-file")
    assert line(lambda: read_blufr(path)).startswith(f"{path}: cannot be read: ")


@pytest.mark.parametrize("read", READERS)
def test_a_missing_file_is_named(path, read):
    assert line(lambda: read(path), MissingDataError) == f"{path}: not there"
