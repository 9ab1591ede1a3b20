"""Images and lists of made-up people for all test sets."""

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from scipy.io import savemat

from ssl_sec.data.decode import Decoding
from ssl_sec.data.faces.config import PairTableConfig
from ssl_sec.recipes.face.test_set_config import (
    BLUFRConfig,
    MegaFaceConfig,
    TemplatesConfig,
    TestSetConfig,
    VideosConfig,
    open_test_set,
)
from ssl_sec.recipes.face.test_sets import FaceTestSet
from tests.data.files import plain, write_digit_pairs, write_folder

NUM_PEOPLE, PER_PERSON = 8, 3
PEOPLE = [f"Person_{number}" for number in range(NUM_PEOPLE)]
KINDS = ("pairs", "blufr", "drawn", "megaface", "templates", "videos")


def grey(person: int, image: int) -> bytes:
    """The grey value is 20 times the person's number plus the image's."""
    return plain(20 * person + image)


def write_lists(root: Path) -> Path:
    """Images and lists of all test sets."""
    write_folder(
        root / "lfw",
        {f"{who}/{who}_{k:04d}.png": grey(p, k) for p, who in enumerate(PEOPLE) for k in range(1, PER_PERSON + 1)},
    )
    same = [(p, 1, p, 2) for p in range(NUM_PEOPLE)]
    different = [(p, 1, (p + 1) % NUM_PEOPLE, 3) for p in range(NUM_PEOPLE)]
    lines = ["first,second,same,fold"]
    for is_same, pairs in ((1, same), (0, different)):
        for fold, (p, k, q, m) in enumerate(pairs):
            lines.append(f"{PEOPLE[p]}_{k:04d}.png,{PEOPLE[q]}_{m:04d}.png,{is_same},{fold % 4}")
    (root / "pairs.csv").write_text("\n".join(lines))

    # BLUFR's list has another ending, counts from 1, and numbers people as it likes.
    names = [f"{who}_{k:04d}.jpg" for who in PEOPLE for k in range(1, PER_PERSON + 1)]
    galleries, probes = np.empty((1, 3), object), np.empty((1, 3), object)
    for trial in range(3):
        known = [p for p in range(NUM_PEOPLE) if p % 4 != trial][:3]
        galleries[0, trial] = np.array([[PER_PERSON * p + 1] for p in known])
        tested = [i + 1 for i in range(len(names)) if i // PER_PERSON % 4 != trial]
        probes[0, trial] = np.array([[i] for i in tested if i not in galleries[0, trial]])
    images = np.empty((len(names), 1), object)
    images[:, 0] = names
    labels = np.array([[7 * (p + 1)] for p in range(NUM_PEOPLE) for _ in range(PER_PERSON)], float)
    savemat(root / "blufr.mat", {"imageList": images, "labels": labels, "galIndex": galleries, "probIndex": probes})

    paths = [f"{who}/{who}_{k:04d}.png" for who in PEOPLE[:4] for k in (1, 2, 3)]
    (root / "probes.json").write_text(json.dumps({"path": paths, "id": [path.split("/")[0] for path in paths]}))
    distractors = [f"{number % 5}/deep/{number}.png" for number in range(20)]
    write_folder(root / "distractors", {path: plain(161 + n) for n, path in enumerate(distractors)})
    (root / "distractors.json").write_text(json.dumps({"path": distractors}))

    faces = [(f"{who}/{who}_{k:04d}.png", 10 * p + k % 2, k) for p, who in enumerate(PEOPLE) for k in (1, 2, 3)]
    (root / "faces.txt").write_text("".join(f"{path} {template} {medium}\n" for path, template, medium in faces))
    points = " ".join(["1.5"] * 10)
    detected = [f"{path} {points} {0.2 + 0.01 * number:.2f}\n" for number, (path, *_) in enumerate(faces)]
    (root / "detected.txt").write_text("".join(detected))
    pairs = [(10 * p, 10 * q + 1, int(p == q)) for p in range(NUM_PEOPLE) for q in range(NUM_PEOPLE)]
    (root / "template_pairs.txt").write_text("".join(f"{a} {b} {c}\n" for a, b, c in pairs))

    write_folder(
        root / "ytf",
        {
            f"{who}/{v}/{v}.{k}.png": grey(p, 3 * v + k)
            for p, who in enumerate(PEOPLE)
            for v in (0, 1)
            for k in range(1 + v + p % 2)
        },
    )
    rows = [f"{n % 4}, {n}, {PEOPLE[p]}/0, {PEOPLE[p]}/1, 1" for n, p in enumerate(range(NUM_PEOPLE))]
    rows += [f"{n % 4}, {n}, {PEOPLE[n]}/1, {PEOPLE[n - 1]}/0, 0" for n in range(NUM_PEOPLE)]
    (root / "splits.txt").write_text("\n".join(["split number, pair number, first, second, same", *rows]))
    return root


def config_of(kind: str, folder: Path, /, **changes) -> TestSetConfig:
    lfw = str(folder / "lfw")
    made = {
        "pairs": partial(PairTableConfig, pairs=str(folder / "pairs.csv"), images=lfw),
        "blufr": partial(BLUFRConfig, root=lfw, lists=str(folder / "blufr.mat")),
        "drawn": partial(BLUFRConfig, root=lfw, num_trials=4, num_gallery=3, num_training_people=2, title="drawn"),
        "megaface": partial(
            MegaFaceConfig,
            probes=str(folder / "probes.json"),
            probes_root=lfw,
            distractors=str(folder / "distractors.json"),
            distractors_root=str(folder / "distractors"),
            sizes=(10, 18),
        ),
        "templates": partial(
            TemplatesConfig,
            faces=str(folder / "faces.txt"),
            pairs=str(folder / "template_pairs.txt"),
            root=lfw,
            fars=(0.01, 0.1),
        ),
        "scored": partial(
            TemplatesConfig,
            faces=str(folder / "faces.txt"),
            pairs=str(folder / "template_pairs.txt"),
            root=lfw,
            weights="scores",
            scores=str(folder / "detected.txt"),
        ),
        "videos": partial(VideosConfig, splits=str(folder / "splits.txt"), root=str(folder / "ytf")),
    }
    return made[kind](**changes)


def opened(kind: str, folder: Path, /, **changes) -> FaceTestSet:
    return open_test_set(config_of(kind, folder, **changes), Decoding(image_size_px=4))


@pytest.fixture(scope="package")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_lists(tmp_path_factory.mktemp("faces"))


@pytest.fixture(scope="module")
def tested(tmp_path_factory):
    """A test_set of test digits."""
    pairs, images = write_digit_pairs(tmp_path_factory.mktemp("people"))
    return {"name": "pairs", "title": "digits", "pairs": str(pairs), "images": str(images)}
