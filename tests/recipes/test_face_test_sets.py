import json
import re
import statistics
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.io import savemat
from torch import nn

from ssl_sec.data.decode import Decoding
from ssl_sec.data.faces.config import LFWPairsConfig, PairTableConfig
from ssl_sec.errors import ConfigError, MissingDataError
from ssl_sec.evaluation.faces.identification import all_pairs_tar_at_far, open_set_identification
from ssl_sec.evaluation.faces.roc import tar_at_far
from ssl_sec.evaluation.faces.verification import kfold_accuracy_of_scores
from ssl_sec.evaluation.features import extract_features
from ssl_sec.recipes.face import test_sets as face_test_sets
from ssl_sec.recipes.face.test_set_config import (
    BLUFRConfig,
    MegaFaceConfig,
    TemplatesConfig,
    TestSetConfig,
    VideosConfig,
    open_test_set,
)
from ssl_sec.recipes.face.test_sets import FaceTestSet, Protocols, power_of_ten
from ssl_sec.settings import from_values
from tests.data.files import plain, write_folder
from tests.data.test_sources import line
from tests.workers import on_workers

NUM_PEOPLE, PER_PERSON = 8, 3
PEOPLE = [f"Person_{number}" for number in range(NUM_PEOPLE)]
PROTOCOLS = Protocols(fars=(0.1,))


def grey(person: int, image: int) -> bytes:
    """Who is on an image is its grey value in twenties; which image of theirs it is, the rest."""
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
        "videos": partial(VideosConfig, splits=str(folder / "splits.txt"), root=str(folder / "ytf")),
    }
    return made[kind](**changes)


def opened(kind: str, folder: Path, /, **changes) -> FaceTestSet:
    return open_test_set(config_of(kind, folder, **changes), Decoding(image_size_px=4))


class Exact:
    """Embeddings by grey value; and what was asked for."""

    def __init__(self, table: torch.Tensor) -> None:
        self.table = table
        self.asked = []

    def __call__(self, image_set, indices):
        self.asked.append((image_set.name, indices.tolist()))
        return self.table[image_set.read(indices).images[:, 0, 0, 0].long()]


PERFECT, COLLAPSED = torch.eye(256)[torch.arange(256) // 20], torch.full((256, 4), 0.3)
KINDS = ("pairs", "blufr", "drawn", "megaface", "templates", "videos")

# Accuracy that fails is that of guessing; the others' failures are 0.
WORST = {"accuracy": 50, "accuracy_max": 50, "accuracy_hik": 50, "eer": 50}
NAMES = {
    "pairs": {"accuracy", "eer", "tar_at_far_1e-1"},
    "blufr": {"tar_at_far_1e-3", "tar_at_far_1e-3_mean", "dir_at_far_1e-2", "dir_at_far_1e-2_mean"},
    "drawn": {"tar_at_far_1e-3", "tar_at_far_1e-3_mean", "dir_at_far_1e-2", "dir_at_far_1e-2_mean"},
    "megaface": {"1e1_rank1", "1.8e1_rank1"},
    "templates": {"tar_at_far_1e-2", "tar_at_far_1e-1"},
    "videos": {"accuracy", "accuracy_max", "accuracy_hik", "eer", "tar_at_far_1e-1"},
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_lists(tmp_path_factory.mktemp("faces"))


@pytest.mark.parametrize("limit", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_who_tells_all_people_apart_and_who_tells_none(root, kind, limit):
    test_set = opened(kind, root, resident_limit_mib=limit)
    best = test_set.measure(Exact(PERFECT), PROTOCOLS, None)
    worst = test_set.measure(Exact(COLLAPSED), PROTOCOLS, None)
    spreads = {name for name in best if name.endswith("_std")}
    assert best.keys() == worst.keys() and best.keys() - spreads - {"norm_mean"} == NAMES[kind]
    for name in NAMES[kind]:
        assert best[name] == pytest.approx(0 if name == "eer" else 100), name
        assert worst[name] == pytest.approx(WORST.get(name, 0)), name
    assert all(best[name] == 0 for name in spreads - {"norm_std"})


@pytest.mark.parametrize("kind", KINDS)
def test_figures_depend_neither_on_norms_nor_on_what_is_kept(root, kind, tmp_path):
    table = (
        torch.randn(256, 3, generator=torch.Generator().manual_seed(1))
        + 2 * torch.randn(13, 3, generator=torch.Generator().manual_seed(2)).repeat_interleave(20, 0)[:256]
    )
    test_set = opened(kind, root)
    found = test_set.measure(Exact(table), PROTOCOLS, None)
    scaled = test_set.measure(Exact(table * torch.linspace(0.1, 9, 256).unsqueeze(1)), PROTOCOLS, tmp_path / "kept.pt")
    for name in found.keys() - {"norm_mean", "norm_std"}:
        assert scaled[name] == pytest.approx(found[name]), name
    assert any(0 < found[name] < 100 for name in NAMES[kind])
    if kind in ("blufr", "drawn", "megaface"):
        assert not (tmp_path / "kept.pt").exists()
    else:
        kept = torch.load(tmp_path / "kept.pt", weights_only=True)
        fars = (0.01, 0.1) if kind == "templates" else PROTOCOLS.fars
        for far, rate in tar_at_far(kept["scores"], kept["same"], fars).items():
            assert found[f"tar_at_far_{power_of_ten(far)}"] == pytest.approx(100 * rate)


@pytest.mark.parametrize(
    ("kind", "people"),
    [
        ("pairs", PEOPLE),
        ("blufr", PEOPLE),
        ("drawn", PEOPLE),
        ("megaface", PEOPLE[:4]),
        ("templates", []),
        ("videos", PEOPLE),
    ],
)
def test_whose_images_they_are(root, kind, people):
    test_set = opened(kind, root)
    assert isinstance(test_set, FaceTestSet) and test_set.people == set(people)


def test_hardest_pairs_are_kept_as_pixels(root, tmp_path):
    table = PERFECT.clone()
    table[20:40] = table[0]  # the first two people are one
    table[60:80] = 0
    opened("pairs", root).measure(Exact(table), PROTOCOLS, tmp_path / "kept.pt")
    kept = torch.load(tmp_path / "kept.pt", weights_only=True)
    assert (kept["different_scores"][0], kept["same_scores"][0]) == (1, 0)
    shown = {name: int(kept[name][0].unique()) for name in kept if name.endswith(("first", "second"))}
    # The first image of one, the third or the second of another.
    assert shown == {"different_first": 1, "different_second": 23, "same_first": 61, "same_second": 62}
    assert kept["same_first"].shape == (6, 3, 4, 4) and kept["same_first"].dtype == torch.uint8


@pytest.mark.parametrize("kind", ["blufr", "drawn"])
def test_blufr_tells_the_mean_less_the_deviation_over_trials(root, kind):
    table = torch.randn(256, 2, generator=torch.Generator().manual_seed(0))
    test_set = opened(kind, root)
    found = test_set.measure(Exact(table), PROTOCOLS, None)
    rows, labels = Exact(table)(test_set.images, torch.arange(NUM_PEOPLE * PER_PERSON)), test_set.images.labels
    assert labels.tolist() == [p for p in range(NUM_PEOPLE) for _ in range(PER_PERSON)]
    rates = []
    for gallery, probes in test_set.trials:
        tested = [*gallery.tolist(), *probes.tolist()]
        assert len({*tested}) == len(tested) == 6 * PER_PERSON
        rates.append(100 * all_pairs_tar_at_far(rows[tested], labels[tested], [1e-3])[1e-3])
    assert found["tar_at_far_1e-3"] == pytest.approx(statistics.fmean(rates) - statistics.stdev(rates))
    assert found["tar_at_far_1e-3_mean"] == pytest.approx(statistics.fmean(rates))
    rates = [100 * open_set_identification(rows, labels, trial, [1e-2])[1e-2] for trial in test_set.trials]
    assert found["dir_at_far_1e-2_std"] == pytest.approx(statistics.stdev(rates))
    assert found["dir_at_far_1e-2"] == pytest.approx(statistics.fmean(rates) - statistics.stdev(rates))


def test_one_trial_has_no_spread(root):
    found = opened("drawn", root, num_trials=1).measure(Exact(PERFECT), PROTOCOLS, None)
    assert (found["tar_at_far_1e-3"], found["tar_at_far_1e-3_std"]) == (100, 0)


def test_distractors_are_embedded_in_parts_and_no_more_than_are_asked_for(root, monkeypatch):
    monkeypatch.setattr(face_test_sets, "_DISTRACTORS_AT_ONCE", 5)
    embed = Exact(PERFECT)
    opened("megaface", root, seed=3).measure(embed, PROTOCOLS, None)
    (name, probes), *parts = embed.asked
    assert (name, probes) == ("megaface/probes", list(range(12)))
    assert [len(indices) for _, indices in parts] == [5, 5, 5, 3]
    first = {name: [index for part, indices in parts if part == name for index in indices] for name, _ in parts}
    assert len({*first["megaface/distractors"]}) == 18
    again, other = Exact(PERFECT), Exact(PERFECT)
    opened("megaface", root, seed=3).measure(again, PROTOCOLS, None)
    opened("megaface", root, seed=4).measure(other, PROTOCOLS, None)
    assert again.asked == embed.asked != other.asked


def test_a_distractor_that_is_as_near_hides_a_person(root):
    table = PERFECT.clone()
    chosen = Exact(PERFECT)
    test_set = opened("megaface", root)
    test_set.measure(chosen, PROTOCOLS, None)
    order = chosen.asked[1][1]
    # Among 18 but not among 10, it looks like the first of four people.
    table[161 + order[12]] = table[0]
    found = test_set.measure(Exact(table), PROTOCOLS, None)
    assert found == pytest.approx({"1e1_rank1": 100, "1.8e1_rank1": 75})


def test_videos_score_the_mean_of_their_frames_cosines(root):
    table = torch.randn(256, 3, generator=torch.Generator().manual_seed(2))
    test_set = opened("videos", root)
    first, second, same, folds = test_set.pairs[1:]
    frames = [(test_set.frames.labels == video).nonzero().flatten() for video in range(len(test_set.pairs.videos))]
    assert sorted({len(one) for one in frames}) == [1, 2, 3]
    rows = nn.functional.normalize(Exact(table)(test_set.frames, torch.arange(len(test_set.frames))).double(), dim=1)
    cosines = [rows[frames[a]] @ rows[frames[b]].T for a, b in zip(first, second, strict=True)]
    found = test_set.measure(Exact(table), PROTOCOLS, None)
    scores = torch.stack([one.mean() for one in cosines])
    expected = kfold_accuracy_of_scores((scores * 2**20).round(), same, folds)
    assert found["accuracy"] == pytest.approx(100 * expected.mean)
    assert found["accuracy_std"] == pytest.approx(100 * expected.std)


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(48, 16), nn.Tanh(), nn.Linear(16, 3)).double()


def measured(root: Path) -> dict[str, dict[str, float]]:
    """The figures of all test sets by this worker, who embeds its share."""

    def embed(image_set, indices):
        return extract_features(network(0), image_set, indices, torch.device("cpu"), batch_size=4)[0]

    face_test_sets._DISTRACTORS_AT_ONCE = 5
    return {kind: opened(kind, root).measure(embed, PROTOCOLS, None) for kind in KINDS}


@pytest.mark.distributed
def test_two_workers_find_what_one_finds(root, tmp_path, monkeypatch):
    monkeypatch.setattr(face_test_sets, "_DISTRACTORS_AT_ONCE", 5)
    whole = measured(root)
    for part in on_workers(2, tmp_path, measured, root):
        assert part.keys() == whole.keys()
        for kind, figures in whole.items():
            assert part[kind] == pytest.approx(figures, rel=1e-9), kind


@dataclass(frozen=True, kw_only=True)
class Settings:
    test_sets: tuple[TestSetConfig, ...]


def test_kinds_are_told_apart_by_name():
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
    assert [one.figures_title for one in found] == ["pairs", "blufr", "megaface", "ijbc", "ijbb", "ytf"]
    assert found[2].sizes == (1000, 10000, 100000, 1000000)
    told = line(lambda: from_values(Settings, {"test_sets": [{"name": "video"}]}), ConfigError)
    assert told.startswith("test_sets[0].name: found 'video'; did you mean 'videos'?")


@pytest.mark.parametrize(
    ("kind", "changes", "told"),
    [
        ("blufr", {"title": "a/b"}, "test_sets.title: found 'a/b'"),
        ("blufr", {"num_gallery": 0}, "test_sets.num_gallery: found 0, must be ≥ 1"),
        ("blufr", {"num_trials": 0}, "test_sets.num_trials: found 0, must be in [1, 1000]"),
        ("drawn", {"num_training_people": -1}, "test_sets.num_training_people: found -1, must be ≥ 0"),
        ("megaface", {"sizes": ()}, "test_sets.sizes: found (), must be one value or more"),
        ("megaface", {"sizes": (0, 5)}, "test_sets.sizes[0]: found 0, must be ≥ 1"),
        ("templates", {"fars": (1.0,)}, "test_sets.fars[0]: found 1.0, must be in (0, 1)"),
        ("videos", {"resident_limit_mib": -1}, "test_sets.resident_limit_mib: found -1"),
    ],
)
def test_settings_out_of_range(kind, changes, told):
    assert line(lambda: config_of(kind, Path("nowhere"), **changes), ConfigError).startswith(told)


@pytest.mark.parametrize("kind", KINDS)
def test_a_list_or_a_folder_that_is_not_there(root, tmp_path, kind):
    line(lambda: opened(kind, tmp_path), MissingDataError)
    keys = {"pairs": "images", "megaface": "distractors_root"}
    there = line(lambda: opened(kind, root, **{keys.get(kind, "root"): str(tmp_path / "none")}), MissingDataError)
    assert there.startswith(f"{tmp_path / 'none'}: no such folder")


@pytest.mark.parametrize(
    ("kind", "missing", "told"),
    [
        ("blufr", "lfw/Person_2/Person_2_0002.png", "blufr.mat image 8: no image 'Person_2_0002.jpg' in "),
        ("megaface", "lfw/Person_0/Person_0_0003.png", "probes.json image 3: Person_0/Person_0_0003.png is not there"),
        ("megaface", "distractors/4/deep/19.png", "distractors.json image 20: 4/deep/19.png is not there"),
        ("templates", "lfw/Person_1/Person_1_0001.png", "faces.txt line 4: Person_1/Person_1_0001.png is not there"),
        ("videos", "ytf/Person_3/0", "splits.txt: Person_3/0 is not there"),
        ("videos", "ytf/Person_0/0/0.0.png", "Person_0/0: no images; allowed: .bmp, "),
    ],
)
def test_a_missing_image_is_named_with_its_list(tmp_path, kind, missing, told):
    root = write_lists(tmp_path)
    (root / missing).rename(root / "elsewhere")
    assert told in line(lambda: opened(kind, root))


@pytest.mark.parametrize(
    ("kind", "file", "change", "told"),
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
        ("megaface", "probes.json", ('"id"', '"names"'), "probes.json: 12 images of 0 people; needed: two of one"),
    ],
)
def test_lists_that_cannot_be_measured_are_refused_before_anything_is_embedded(tmp_path, kind, file, change, told):
    root = write_lists(tmp_path)
    content = (root / file).read_text()
    changed = re.sub(*change, content)
    assert changed != content
    (root / file).write_text(changed)
    assert told in line(lambda: opened(kind, root))


def test_too_few_distractors_and_too_few_people(root):
    told = line(lambda: opened("megaface", root, sizes=(10, 21)))
    assert told == f"{root / 'distractors.json'}: 20 images, but test_sets.sizes asks for 21"
    assert "a gallery of 9 people; 8 have two images or more" in line(
        lambda: opened("drawn", root, num_gallery=9, num_training_people=0)
    )
    assert "trial 1 looks up 16 images of people in the gallery and 0 of others; needed: 1 or more of each" in line(
        lambda: opened("drawn", root, num_gallery=8, num_training_people=0)
    )
