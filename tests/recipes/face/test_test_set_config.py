"""Test sets of the command line: their kinds, and what is refused before anything is embedded."""

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from ssl_sec.data.decode import Decoding
from ssl_sec.data.faces.config import LFWPairsConfig
from ssl_sec.errors import ConfigError, MissingDataError
from ssl_sec.recipes.face.recipe import _open_test_sets
from ssl_sec.recipes.face.test_set_config import (
    BLUFRConfig,
    MegaFaceConfig,
    TemplatesConfig,
    TestSetConfig,
    VideosConfig,
)
from ssl_sec.recipes.face.test_sets import OpenSetTestSet
from ssl_sec.settings import from_values
from tests.data.files import encode, write_folder
from tests.data.test_sources import line
from tests.recipes.face.conftest import KINDS, config_of, opened, write_lists
from tests.recipes.face.test_recipe import config


@dataclass(frozen=True, kw_only=True)
class Settings:
    test_sets: tuple[TestSetConfig, ...]


def test_kinds_are_distinguished_by_name():
    values = [
        {"name": "lfw_pairs", "pairs": "pairs.txt", "root": "lfw"},
        {"name": "blufr", "root": "lfw"},
        {"name": "megaface", "probes": "a", "probes_root": "b", "distractors": "c", "distractors_root": "d"},
        {"name": "templates", "faces": "a", "pairs": "b", "root": "c"},
        {"name": "templates", "title": "ijbb", "faces": "a", "pairs": "b", "root": "c"},
        {"name": "videos", "splits": "a", "root": "b"},
    ]
    found = from_values(Settings, {"test_sets": values}).test_sets
    kinds = [LFWPairsConfig, BLUFRConfig, MegaFaceConfig, TemplatesConfig, TemplatesConfig, VideosConfig]
    assert [type(one) for one in found] == kinds
    assert [one.shown_title for one in found] == ["pairs", "blufr", "megaface", "ijbc", "ijbb", "ytf"]
    assert found[2].sizes == (1000, 10000, 100000, 1000000)
    message = line(lambda: from_values(Settings, {"test_sets": [{"name": "video"}]}), ConfigError)
    assert message.startswith("test_sets[0].name: found 'video'; did you mean 'videos'?")


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("blufr", {"title": "a/b"}, "test_sets.title: found 'a/b'"),
        ("blufr", {"num_gallery": 0}, "test_sets.num_gallery: found 0, must be ≥ 1"),
        ("blufr", {"num_trials": 0}, "test_sets.num_trials: found 0, must be in [1, 1000]"),
        ("drawn", {"num_training_people": -1}, "test_sets.num_training_people: found -1, must be ≥ 0"),
        ("megaface", {"sizes": ()}, "test_sets.sizes: found [], must be one value or more"),
        ("megaface", {"sizes": (0, 5)}, "test_sets.sizes[0]: found 0, must be ≥ 1"),
        ("templates", {"fars": (1.0,)}, "test_sets.fars[0]: found 1.0, must be in (0, 1)"),
        ("templates", {"weights": "both"}, "test_sets.scores: found null, must be a file with weights=both"),
        ("templates", {"scores": "a"}, "test_sets.scores: found 'a', must be null with weights=none"),
        ("videos", {"resident_limit_mib": -1}, "test_sets.resident_limit_mib: found -1"),
    ],
)
def test_settings_out_of_range(kind, changes, message):
    assert line(lambda: config_of(kind, Path("nowhere"), **changes), ConfigError).startswith(message)


@pytest.mark.parametrize("kind", KINDS)
def test_missing_lists_and_folders(root, tmp_path, kind):
    line(lambda: opened(kind, tmp_path), MissingDataError)
    keys = {"pairs": "images", "megaface": "distractors_root"}
    there = line(lambda: opened(kind, root, **{keys.get(kind, "root"): str(tmp_path / "none")}), MissingDataError)
    assert there.startswith(f"{tmp_path / 'none'}: no such folder")


@pytest.mark.parametrize(
    ("kind", "missing", "message"),
    [
        ("blufr", "lfw/Person_2/Person_2_0002.png", "blufr.mat image 8: no image 'Person_2_0002.jpg' in "),
        ("megaface", "lfw/Person_0/Person_0_0003.png", "probes.json image 3: Person_0/Person_0_0003.png is not there"),
        ("megaface", "distractors/4/deep/19.png", "distractors.json image 20: 4/deep/19.png is not there"),
        ("templates", "lfw/Person_1/Person_1_0001.png", "faces.txt line 4: Person_1/Person_1_0001.png is not there"),
        ("videos", "ytf/Person_3/0", "splits.txt: Person_3/0 is not there"),
        ("videos", "ytf/Person_0/0/0.0.png", "Person_0/0: no images in it or below it; allowed: .avif, .bmp, "),
    ],
)
def test_a_missing_image_is_named_with_its_list(tmp_path, kind, missing, message):
    root = write_lists(tmp_path)
    (root / missing).rename(root / "elsewhere")
    assert message in line(lambda: opened(kind, root))


@pytest.mark.parametrize(
    ("kind", "file", "change", "message"),
    [
        ("pairs", "pairs.csv", (",fold", ",group"), "test set pairs: all pairs are in one fold"),
        ("videos", "splits.txt", (r"(?m)^\d", "0"), "splits.txt: all pairs are in one fold"),
        ("videos", "splits.txt", (r"(?m)\d$", "1"), "splits.txt: all 16 pairs show one person"),
        (
            "videos",
            "splits.txt",
            (r"(?m)^([123].*)\d$", r"\g<1>1"),
            "splits.txt without split 0: all 12 pairs show one person; both are needed",
        ),
        ("videos", "splits.txt", ("Person_3/0", "../ytf/Person_3/0"), "leads out of"),
        (
            "templates",
            "template_pairs.txt",
            ("0 1 1", "0 99 1"),
            "template_pairs.txt line 1: no face of template 99 in ",
        ),
        ("templates", "template_pairs.txt", (r"(?m)\d$", "1"), "template_pairs.txt: all 64 pairs show one person"),
        (
            "scored",
            "detected.txt",
            ("Person_1_0001", "1_0001"),
            "detected.txt: no line of Person_1/Person_1_0001.png, a ",
        ),
        ("scored", "detected.txt", ("0.25", "-0.25"), "detected.txt line 6: a negative score"),
        ("scored", "detected.txt", ("1.5 0.25", "inf 0.25"), "detected.txt line 6: a number that is not finite"),
        ("megaface", "probes.json", ('"id"', '"names"'), "probes.json: 12 images of 0 people; needed: two of one"),
    ],
)
def test_lists_that_cannot_be_measured_are_refused_before_anything_is_embedded(tmp_path, kind, file, change, message):
    root = write_lists(tmp_path)
    content = (root / file).read_text()
    changed = re.sub(*change, content)
    assert changed != content
    (root / file).write_text(changed)
    assert message in line(lambda: opened(kind, root))
    if message != "leads out of":  # as links are followed, this depends on the folder
        assert message in line(config_of(kind, root).require_list)


@pytest.mark.parametrize("kind", [*KINDS, "scored"])
def test_lists_are_checked_without_their_images(tmp_path, kind):
    root = write_lists(tmp_path)
    for folder in ("lfw", "ytf", "distractors"):
        (root / folder).rename(root / f"no_{folder}")
    config_of(kind, root).require_list()


def test_blufrs_lists_are_checked_before_a_run(tmp_path):
    write_lists(tmp_path)
    (tmp_path / "blufr.mat").write_bytes(b"MATLAB")
    message = line(config_of("blufr", tmp_path).require_list)
    assert message.startswith(f"{tmp_path / 'blufr.mat'}: cannot be read: ")


def test_drawn_trials_have_the_images_of_people_at_any_depth(tmp_path, root):
    nested = write_lists(tmp_path)
    for person in (nested / "lfw").iterdir():
        first, *_ = sorted(person.iterdir())
        (person / "2019/more").mkdir(parents=True)
        first.rename(person / "2019/more" / first.name)
    found, flat = (opened("drawn", each) for each in (nested, root))
    assert isinstance(found, OpenSetTestSet) and isinstance(flat, OpenSetTestSet)
    assert found.people == flat.people and found.images.labels.tolist() == flat.images.labels.tolist()


def test_a_folder_that_holds_everyone_is_no_person_of_blufr(root):
    lists, folder = str(root / "blufr.mat"), root / "lfw"
    found, above = (BLUFRConfig(root=str(each), lists=lists).open(Decoding()) for each in (folder, root))
    assert found.people == {path.name for path in folder.iterdir()} and above.people == frozenset()
    assert torch.equal(above.images.labels, found.images.labels)


def test_a_person_whose_name_is_not_utf_8_is_named_as_in_training(tmp_path):
    root = write_lists(tmp_path)
    (root / "lfw" / "Person_7").rename(root / "lfw" / "Jos\udce9")
    drawn = opened("drawn", root)
    assert isinstance(drawn, OpenSetTestSet) and "Jos\\xe9" in drawn.people


def test_too_few_distractors_and_too_few_people(root):
    message = line(lambda: opened("megaface", root, sizes=(10, 21)))
    assert message == f"{root / 'distractors.json'}: 20 images, but test_sets.sizes asks for 21"
    assert line(config_of("megaface", root, sizes=(10, 21)).require_list) == message
    assert "found 8 people with two images or more beside the 0 of 8 who are left out (num_training_people), " in line(
        lambda: opened("drawn", root, num_gallery=9, num_training_people=0)
    )
    assert "trial 1 looks up 16 images of people in the gallery and 0 of others; needed: 1 or more of each" in line(
        lambda: opened("drawn", root, num_gallery=8, num_training_people=0)
    )


def test_the_images_of_test_sets_have_the_ranges_of_those_in_training(tmp_path):
    brightest = encode(Image.fromarray(np.full((8, 8), 4095, np.uint16)))  # 12 bits
    root = write_folder(tmp_path / "people", {f"{who}/{who}{n}.png": brightest for who in "ab" for n in range(2)})
    (table := tmp_path / "pairs.csv").write_text("first,second,same,fold\na0.png,a1.png,1,0\na1.png,b0.png,0,1\n")
    test_set = {"name": "pairs", "pairs": str(table), "images": str(root)}
    data = {"name": "folder", "root": str(root), "num_channels": 1, "value_ranges": [[0, 4095]]}
    values = config(data=data, test_sets=[test_set])
    (opened_set,) = _open_test_sets(values, values.data.open("train")).values()
    (images,) = opened_set.image_sets
    assert (images.read(torch.arange(len(images))).images == 255).all()
