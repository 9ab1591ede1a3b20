import statistics
from pathlib import Path

import pytest
import torch
from sklearn.decomposition import PCA
from torch import nn

from ssl_sec.errors import DataError
from ssl_sec.evaluation.faces.identification import all_pairs_tar_at_far, open_set_identification
from ssl_sec.evaluation.faces.quality import quality_auc
from ssl_sec.evaluation.faces.roc import tar_at_far
from ssl_sec.evaluation.faces.verification import kfold_accuracy_of_scores
from ssl_sec.evaluation.faces.videos import compare_videos
from ssl_sec.evaluation.features import extract_features
from ssl_sec.recipes.face import test_sets as face_test_sets
from ssl_sec.recipes.face.test_sets import FaceTestSet, Protocols, power_of_ten
from tests.recipes.face.conftest import KINDS, NUM_PEOPLE, PEOPLE, PER_PERSON, opened
from tests.workers import on_workers

PROTOCOLS = Protocols(fars=(0.1,))


class Exact:
    """Embeddings by grey value; and what was asked for."""

    def __init__(self, table: torch.Tensor) -> None:
        self.table = table
        self.asked = []

    def __call__(self, image_set, indices):
        self.asked.append((image_set.name, indices.tolist()))
        return self.table[image_set.read(indices).images[:, 0, 0, 0].long()]


PERFECT, COLLAPSED = torch.eye(256)[torch.arange(256) // 20], torch.full((256, 4), 0.3)

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


@pytest.mark.parametrize("limit", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_perfect_and_collapsed_embeddings_of_each_kind(root, kind, limit):
    test_set = opened(kind, root, resident_limit_mib=limit)
    best = test_set.measure(Exact(PERFECT), PROTOCOLS, None)
    worst = test_set.measure(Exact(COLLAPSED), PROTOCOLS, None)
    spreads = {name for name in best if name.endswith("_std")}
    others = spreads | {"norm_mean"} | {name for name in best if name.startswith("threshold")}
    assert best.keys() == worst.keys() and best.keys() - others == NAMES[kind]
    for name in NAMES[kind]:
        assert best[name] == pytest.approx(0 if name == "eer" else 100), name
        assert worst[name] == pytest.approx(WORST.get(name, 0)), name
    assert all(best[name] == 0 for name in spreads - {"norm_std"})


@pytest.mark.parametrize("kind", KINDS)
def test_metrics_depend_neither_on_norms_nor_on_what_is_kept(root, kind, tmp_path):
    table = (
        torch.randn(256, 3, generator=torch.Generator().manual_seed(1))
        + 2 * torch.randn(13, 3, generator=torch.Generator().manual_seed(2)).repeat_interleave(20, 0)[:256]
    )
    test_set = opened(kind, root)
    found = test_set.measure(Exact(table), PROTOCOLS, None)
    scaled = test_set.measure(Exact(table * torch.linspace(0.1, 9, 256).unsqueeze(1)), PROTOCOLS, tmp_path / "kept.pt")
    for name in found.keys() - {"norm_mean", "norm_std", "norm_auc"}:
        assert scaled[name] == pytest.approx(found[name]), name
    assert any(0 < found[name] < 100 for name in NAMES[kind])
    if kind in ("blufr", "drawn", "megaface"):
        assert not (tmp_path / "kept.pt").exists()
    else:
        kept = torch.load(tmp_path / "kept.pt", weights_only=True)
        fars = (0.01, 0.1) if kind == "templates" else PROTOCOLS.fars
        for far, rate in tar_at_far(kept["scores"], kept["same"], fars).items():
            assert found[f"tar_at_far_{power_of_ten(far)}"] == pytest.approx(100 * rate)


def test_thresholds_decide_as_the_rates_of_their_names(root, tmp_path):
    table = torch.randn(256, 3, generator=torch.Generator().manual_seed(1))
    found = opened("pairs", root).measure(Exact(table), PROTOCOLS, tmp_path / "kept.pt")
    kept = torch.load(tmp_path / "kept.pt", weights_only=True)
    scores, same = kept["scores"], kept["same"]
    accepted = (scores[same] > found["threshold_at_far_1e-1"]).double().mean()
    assert 100 * float(accepted) == pytest.approx(found["tar_at_far_1e-1"])
    assert 0 < found["tar_at_far_1e-1"] < 100

    def num_right(threshold):
        return int(((scores > threshold) == same).sum())

    assert -1 < found["threshold"] < 1
    assert num_right(found["threshold"]) == max(map(num_right, [-1.0, *scores.tolist()]))


def test_norms_that_tell_which_pairs_are_refused(root, tmp_path):
    """Pairs of one person that are refused get short embeddings."""
    test_set = opened("pairs", root)
    table = torch.randn(256, 3, generator=torch.Generator().manual_seed(1))
    plain = test_set.measure(Exact(table), PROTOCOLS, tmp_path / "plain.pt")
    refused = torch.load(tmp_path / "plain.pt", weights_only=True)["refused"]
    pairs = test_set.pairs
    rows = Exact(table)(pairs.images, torch.arange(len(pairs.images)))
    rows[pairs.first[pairs.same][refused]] *= 1e-3
    found = test_set.measure(lambda image_set, indices: rows[indices], PROTOCOLS, tmp_path / "kept.pt")
    kept = torch.load(tmp_path / "kept.pt", weights_only=True)
    assert 0 < refused.sum() < len(refused)
    assert torch.equal(kept["refused"], refused) and kept["far"] == 0.1
    assert found["norm_auc"] == 100 * quality_auc(kept["quality"], refused) > max(plain["norm_auc"], 90)
    assert found["tar_at_far_1e-1"] == pytest.approx(100 * (~refused).double().mean())


@pytest.mark.parametrize("kind", KINDS)
def test_no_rates_may_be_asked_for(root, kind, tmp_path):
    test_set = opened(kind, root, **({"fars": ()} if kind == "templates" else {}))
    found = test_set.measure(Exact(PERFECT), Protocols(fars=()), tmp_path / "kept.pt")
    fixed = NAMES[kind] if kind in ("blufr", "drawn") else set()  # BLUFR's own rates
    assert {name for name in found if "_at_far" in name and not name.endswith("_std")} == fixed
    if kind == "pairs":
        assert found["accuracy"] == 100 and "norm_auc" not in found
        assert "refused" not in torch.load(tmp_path / "kept.pt", weights_only=True)


@pytest.mark.parametrize("weights", ["none", "norms", "scores", "both"])
def test_faces_of_templates_are_weighted_as_by_insightface(root, tmp_path, weights):
    table = torch.randn(256, 3, generator=torch.Generator().manual_seed(1)) + 0.5
    scores = None if weights in ("none", "norms") else str(root / "detected.txt")
    test_set = opened("templates", root, weights=weights, scores=scores)
    test_set.measure(Exact(table), PROTOCOLS, tmp_path / "kept.pt")
    rows = Exact(table)(test_set.images, torch.arange(len(test_set.images))).double()
    if weights in ("none", "scores"):
        rows = rows / rows.norm(dim=1, keepdim=True)
    if scores is not None:
        rows = rows * (0.2 + 0.01 * torch.arange(len(rows)).unsqueeze(1))
    pooled = {}
    for template in test_set.faces.templates.unique().tolist():
        of_template = test_set.faces.templates == template
        media = test_set.faces.media[of_template]
        total = sum(rows[of_template][media == medium].mean(0) for medium in media.unique())
        pooled[template] = total / total.norm()
    pairs = zip(test_set.pairs.first.tolist(), test_set.pairs.second.tolist(), strict=True)
    expected = torch.stack([pooled[first] @ pooled[second] for first, second in pairs])
    kept = torch.load(tmp_path / "kept.pt", weights_only=True)["scores"]
    torch.testing.assert_close(kept.double(), expected, rtol=0, atol=1e-6)


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
def test_a_test_set_lists_its_people(root, kind, people):
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
def test_blufr_reports_the_mean_minus_the_deviation_over_trials(root, kind):
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


@pytest.mark.parametrize("kind", ["blufr", "drawn"])
def test_blufrs_components_are_those_of_the_people_whom_a_trial_does_not_test(root, kind):
    people = torch.randn(13, 4, generator=torch.Generator().manual_seed(1)).repeat_interleave(20, 0)[:256]
    noise = torch.randn(256, 4, generator=torch.Generator().manual_seed(0))
    table = people + 0.2 * noise + torch.tensor([0, 3, 0, 0])
    test_set = opened(kind, root)
    found = test_set.measure(Exact(table), Protocols(pca=2), None)
    images, labels = torch.arange(NUM_PEOPLE * PER_PERSON), test_set.images.labels
    rows, rates = Exact(table)(test_set.images, images).double(), []
    for trial in test_set.trials:
        tested = {int(labels[place]) for place in (*trial.gallery, *trial.probes)}
        others = [place for place in images.tolist() if int(labels[place]) not in tested]
        assert 0 < len(others) == len(images) - len(trial.gallery) - len(trial.probes)
        reduced = torch.from_numpy(PCA(2, svd_solver="full").fit(rows[others].numpy()).transform(rows.numpy()))
        rates.append(100 * open_set_identification(reduced, labels, trial, [1e-2])[1e-2])
    assert found["dir_at_far_1e-2_mean"] == pytest.approx(statistics.fmean(rates))
    assert (
        0 < found["dir_at_far_1e-2_mean"] != test_set.measure(Exact(table), Protocols(), None)["dir_at_far_1e-2_mean"]
    )


def test_components_need_people_whom_a_trial_does_not_test(root):
    test_set = opened("drawn", root, num_training_people=0)
    with pytest.raises(DataError, match=r"evaluation.pca: found 2, but trial 1 of drawn tests everyone; needed: peop"):
        test_set.measure(Exact(PERFECT), Protocols(pca=2), None)


def test_pairs_are_verified_by_inner_products_and_distances_too(root):
    table = torch.randn(256, 3, generator=torch.Generator().manual_seed(2))
    table *= torch.linspace(0.1, 3, 256).unsqueeze(1)
    test_set = opened("pairs", root)
    found = test_set.measure(Exact(table), Protocols(similarities=True), None)
    pairs = test_set.pairs
    rows = Exact(table)(pairs.images, torch.arange(len(pairs.images))).double()
    for name, given in (("", rows), ("_normalised", nn.functional.normalize(rows))):
        first, second = given[pairs.first], given[pairs.second]
        scores = {"inner_product": (first * second).sum(1), "euclidean": -(first - second).norm(dim=1)}
        for similarity, values in scores.items():
            expected = kfold_accuracy_of_scores(values, pairs.same, pairs.folds)
            assert found[f"accuracy_{similarity}{name}"] == pytest.approx(100 * expected.mean)
            assert found[f"accuracy_{similarity}{name}_std"] == pytest.approx(100 * expected.std)
    assert found["accuracy_euclidean"] != found["accuracy"] == found["accuracy_euclidean_normalised"]
    assert not any("euclidean" in name for name in test_set.measure(Exact(table), PROTOCOLS, None))


def test_histograms_of_some_pairs_of_videos_are_kept(root, tmp_path, monkeypatch):
    monkeypatch.setattr(face_test_sets, "_HISTOGRAMS", 3)
    table = torch.randn(256, 3, generator=torch.Generator().manual_seed(2))
    test_set = opened("videos", root)
    test_set.measure(Exact(table), Protocols(pca=2), tmp_path / "kept.pt")
    kept = torch.load(tmp_path / "kept.pt", weights_only=True)
    rows = Exact(table)(test_set.frames, torch.arange(len(test_set.frames)))
    videos = rows.split(test_set.frames.labels.bincount().tolist())
    for kind, places in (("same", [0, 3, 7]), ("different", [8, 11, 15])):  # the first, one between and the last
        first, second = (numbers[places] for numbers in (test_set.pairs.first, test_set.pairs.second))
        assert torch.equal(kept[f"{kind}_histograms"], compare_videos(videos, first, second).histograms)


def test_one_trial_has_no_spread(root):
    found = opened("drawn", root, num_trials=1).measure(Exact(PERFECT), PROTOCOLS, None)
    assert (found["tar_at_far_1e-3"], found["tar_at_far_1e-3_std"]) == (100, 0)


def test_distractors_are_embedded_in_parts_up_to_the_requested_number(root, monkeypatch):
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
def test_two_workers_equal_one(root, tmp_path, monkeypatch):
    monkeypatch.setattr(face_test_sets, "_DISTRACTORS_AT_ONCE", 5)
    whole = measured(root)
    for part in on_workers(2, tmp_path, measured, root):
        assert part.keys() == whole.keys()
        for kind, figures in whole.items():
            assert part[kind] == pytest.approx(figures, rel=1e-9), kind
