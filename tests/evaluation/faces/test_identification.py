import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ssl_sec.data.faces.lists import OpenSetTrial
from ssl_sec.errors import ConfigError, DataError
from ssl_sec.evaluation.faces.identification import (
    all_pairs_tar_at_far,
    open_set_identification,
    random_open_set_trials,
    rank_1_identification,
    shuffled,
)
from ssl_sec.evaluation.faces.roc import tar_at_far

FARS = [1.0, 0.3, 0.1, 0.01, 0.0]


def cosine(a, b):
    lengths = math.hypot(*a) * math.hypot(*b)
    return round(math.fsum(x * y for x, y in zip(a, b, strict=True)) / lengths if lengths else 0.0, 9)


def people(seed, num_people=12, per_person=4, dim=6, noise=0.8):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(num_people, (num_people * per_person,), generator=generator)
    rows = torch.randn(num_people, dim, generator=generator)[labels]
    rows = rows + noise * torch.randn(len(labels), dim, generator=generator)
    return rows * (0.1 + 10 * torch.rand(len(labels), 1, generator=generator)), labels


@st.composite
def faces(draw, min_size=4):
    """Few directions, so that ties and rows of 0 are common, in whole numbers, so that the slow loop sees them."""
    count, dim = draw(st.integers(min_size, 14)), draw(st.integers(1, 3))
    rows = draw(st.lists(st.lists(st.integers(-2, 2), min_size=dim, max_size=dim), min_size=count, max_size=count))
    labels = draw(st.lists(st.integers(0, 3), min_size=count, max_size=count))
    return torch.tensor(rows, dtype=torch.float32), torch.tensor(labels)


def slow_tars(genuine, impostors, fars):
    rates = {}
    for far in fars:
        allowed = round(far * 10**6) * len(impostors) // 10**6
        # Beyond the scores there is a threshold that accepts nothing.
        thresholds = [t for t in {*genuine, *impostors} if sum(s >= t for s in impostors) <= allowed]
        rates[far] = max((sum(s >= t for s in genuine) / len(genuine) for t in thresholds), default=0.0)
    return rates


def slow_pairs(rows, labels):
    genuine, impostors = [], []
    for i in range(len(rows)):
        for j in range(i):
            (genuine if labels[i] == labels[j] else impostors).append(cosine(rows[i], rows[j]))
    return genuine, impostors


@settings(max_examples=60)
@given(faces(), st.integers(1, 20), st.integers(0, len(FARS) - 1))
def test_all_pairs_are_those_of_the_slow_loop(case, tile_size, first):
    rows, labels = case
    genuine, impostors = slow_pairs(rows.tolist(), labels.tolist())
    if not genuine or not impostors:
        with pytest.raises(DataError, match=f"{len(genuine)} genuine pairs and {len(impostors)} impostors"):
            all_pairs_tar_at_far(rows, labels, FARS)
    else:
        # The highest one decides how many impostors' scores are kept.
        fars = FARS[first:]
        assert all_pairs_tar_at_far(rows, labels, fars, tile_size=tile_size) == slow_tars(genuine, impostors, fars)


def test_all_pairs_are_those_of_the_scores_of_all():
    rows, labels = people(0, 40, 6, dim=8, noise=0.4)
    unit = torch.nn.functional.normalize(rows.double())
    first, second = torch.triu_indices(len(rows), len(rows), 1)
    expected = tar_at_far((unit @ unit.T)[first, second], labels[first] == labels[second], FARS)
    assert 0 < expected[0.0] < expected[0.01] < expected[0.1] < 1
    assert all_pairs_tar_at_far(rows, labels, FARS, tile_size=37) == expected
    for far in FARS:
        assert all_pairs_tar_at_far(rows, labels, [far], tile_size=37) == {far: expected[far]}
    assert all_pairs_tar_at_far(rows.numpy(), labels.numpy(), FARS) == expected


def slow_detection(rows, labels, gallery, probes, fars):
    genuine, impostors = [], []
    for p in probes:
        mates = [cosine(rows[p], rows[g]) for g in gallery if labels[g] == labels[p]]
        others = [cosine(rows[p], rows[g]) for g in gallery if labels[g] != labels[p]]
        if not mates:
            impostors.append(max(others))
        else:
            genuine.append(max(mates) if max(mates) > max(others, default=-math.inf) else None)
    rates = {}
    for far in fars:
        allowed = round(far * 10**6) * len(impostors) // 10**6
        ordered = sorted(impostors, reverse=True)
        floor = ordered[allowed] if allowed < len(ordered) else -math.inf
        rates[far] = sum(s is not None and s > floor for s in genuine) / len(genuine)
    return rates


@settings(max_examples=80)
@given(faces(), st.data())
def test_open_set_rates_are_those_of_the_slow_loop(case, data):
    rows, labels = case
    order = data.draw(st.permutations(range(len(rows))))
    cut = data.draw(st.integers(1, len(rows) - 1))
    gallery, probes = order[:cut], order[cut:]
    known = {int(labels[g]) for g in gallery}
    kinds = {int(labels[p]) in known for p in probes}
    trial = OpenSetTrial(torch.tensor(gallery), torch.tensor(probes))
    if len(kinds) < 2:
        with pytest.raises(DataError, match="genuine probes? and .* impostors?; 1 or more each"):
            open_set_identification(rows, labels, trial, FARS)
    else:
        expected = slow_detection(rows.tolist(), labels.tolist(), gallery, probes, FARS)
        assert open_set_identification(rows, labels, trial, FARS, tile_size=3) == expected


def test_open_set_rates_of_ordinary_embeddings():
    rows, labels = people(1, 60, 5, noise=0.7)
    trial = random_open_set_trials(labels, 0, num_trials=1, num_gallery=20, num_training_people=10)[0]
    expected = slow_detection(rows.tolist(), labels.tolist(), trial.gallery.tolist(), trial.probes.tolist(), FARS)
    assert 0 < expected[0.01] < expected[0.3] < 1
    assert open_set_identification(rows.numpy(), labels.numpy(), trial, FARS) == expected


def slow_rate(probes, labels, distractors, size):
    found, pairs = 0, 0
    for i, probe in enumerate(probes):
        ranks = [cosine(probe, d) for d in distractors[:size]]
        for j, mate in enumerate(probes):
            if i != j and labels[i] == labels[j]:
                pairs += 1
                found += not any(s >= cosine(probe, mate) for s in ranks)
    return found / pairs


@settings(max_examples=60)
@given(faces(min_size=5), faces(), st.integers(1, 6), st.integers(1, 9))
def test_identification_is_that_of_the_slow_loop(case, others, chunk, tile_size):
    rows, labels = case
    distractors = torch.nn.functional.pad(others[0], (0, 3))[:, : rows.shape[1]]
    sizes = [1, 3, len(distractors)]
    found = rank_1_identification(rows, labels, distractors.split(chunk), sizes, tile_size=tile_size)
    for size in sizes:
        assert found[size] == slow_rate(rows.tolist(), labels.tolist(), distractors.tolist(), size)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_identification_of_ordinary_embeddings(dtype):
    rows, labels = people(2, dim=16)
    distractors = torch.randn(500, 16, generator=torch.Generator().manual_seed(3))
    rows, distractors = rows.to(dtype), distractors.to(dtype)
    found = rank_1_identification(rows, labels, distractors.split(70), [500, 10, 100], tile_size=32)
    assert list(found) == [10, 100, 500]
    assert 0.2 < found[500] < found[100] < found[10] <= 1
    for size, rate in found.items():
        assert rate == slow_rate(rows.tolist(), labels.tolist(), distractors.tolist(), size)
    chunks = (chunk.numpy() for chunk in distractors.split(501))
    assert rank_1_identification(rows.numpy(), labels.numpy(), chunks, [500, 10, 100]) == found


def test_chunks_without_distractors_change_nothing():
    generator = torch.Generator().manual_seed(0)
    probes, others = torch.randn(12, 3, generator=generator), torch.randn(30, 3, generator=generator)
    labels = torch.arange(12) // 3
    expected = rank_1_identification(probes, labels, [others], [4, 9])
    assert expected[4] > expected[9] > 0
    chunks = [others[:0], others[:4], others[:0], others[:0], others[4:]]
    assert rank_1_identification(probes, labels, chunks, [4, 9]) == expected


def test_a_difference_that_float32_rounding_hides_decides():
    """A distractor a little farther than the mate, then one as near: sums in float32 order such cosines at random."""
    step = 7.2e-7
    labels = torch.zeros(2, dtype=torch.int64)
    generator = torch.Generator().manual_seed(0)
    for _ in range(100):
        # So many dimensions that the sums in float32 are off by more than the difference of the cosines, 7e-8.
        basis = torch.linalg.qr(torch.randn(16384, 2, dtype=torch.float64, generator=generator)).Q.T

        def at(*angles, basis=basis):
            angle = torch.tensor(angles, dtype=torch.float64)
            return torch.stack([angle.cos(), angle.sin()], 1) @ basis

        # The mate lies beside the distractors and never finds the other before them.
        found = rank_1_identification(at(0.0, 0.1), labels, at(0.1 + step, 0.1).split(1), [1, 2])
        assert found == {1: 0.5, 2: 0}


@pytest.mark.parametrize("dim", [1, 512])
def test_collapsed_embeddings_are_never_identified(dim):
    generator = torch.Generator().manual_seed(dim)
    labels = torch.arange(60) % 6
    trial = OpenSetTrial(torch.arange(4), torch.arange(4, 60))
    for row in (torch.ones(dim), torch.randn(dim, generator=generator), torch.zeros(dim)):
        for norms in (torch.ones(160, 1), 0.01 + 100 * torch.rand(160, 1, generator=generator)):
            rows = row * norms
            assert set(all_pairs_tar_at_far(rows[:60], labels, [0.5, 0.1], tile_size=7).values()) == {0}
            assert open_set_identification(rows[:60], labels, trial, [1.0], tile_size=7) == {1.0: 0}
            found = rank_1_identification(rows[:60], labels, rows[60:].split(9), [1, 100], tile_size=8)
            assert found == {1: 0, 100: 0}


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_scores_that_are_not_finite_count_against_the_probe(bad):
    rows, labels = torch.eye(3).repeat_interleave(2, 0), torch.tensor([0, 0, 1, 1, 2, 2])
    trial = OpenSetTrial(torch.tensor([0, 2]), torch.tensor([1, 3, 4, 5]))
    distractors = torch.full((2, 3), 0.1)
    assert open_set_identification(rows, labels, trial, [0.5]) == {0.5: 1}
    assert all_pairs_tar_at_far(rows, labels, [0.0]) == {0.0: 1}
    assert rank_1_identification(rows, labels, [distractors], [2]) == {2: 1}
    distractors[0] = bad
    assert rank_1_identification(rows, labels, [distractors], [2]) == {2: 0}
    rows[4] = bad
    assert open_set_identification(rows, labels, trial, [0.0, 0.5]) == {0.0: 0, 0.5: 1}
    assert all_pairs_tar_at_far(rows, labels, [0.0, 0.5]) == {0.0: 0, 0.5: 2 / 3}
    assert rank_1_identification(rows, labels, [torch.full((1, 3), 0.1)], [1]) == {1: 4 / 6}
    rows[1] = bad
    assert open_set_identification(rows, labels, trial, [0.5]) == {0.5: 0.5}


def test_trials_are_drawn_as_blufrs():
    sizes = torch.tensor([1, 2, 3, 5, 1, 4] * 10)
    labels = 7 * torch.arange(60).repeat_interleave(sizes)
    trials = random_open_set_trials(labels, 5, num_trials=10, num_gallery=20, num_training_people=15)
    assert len(trials) == 10
    for gallery, probes in trials:
        known, looked_up = labels[gallery], labels[probes]
        assert len(known.unique()) == len(gallery) == 20
        assert torch.isin(known, looked_up).all()
        tested = torch.cat([known, looked_up]).unique()
        assert len(tested) == 45
        both = torch.cat([gallery, probes])
        assert torch.equal(both.sort().values, torch.isin(labels, tested).nonzero().squeeze(1))
    assert len({tuple(gallery.tolist()) for gallery, _ in trials}) == 10
    again = random_open_set_trials(labels.numpy(), 5, num_trials=2, num_gallery=20, num_training_people=15)
    assert [[each.tolist() for each in trial] for trial in again] == [
        [each.tolist() for each in trial] for trial in trials[:2]
    ]
    other = random_open_set_trials(labels, 6, num_trials=1, num_gallery=20, num_training_people=15)
    assert not torch.equal(other[0].gallery, trials[0].gallery)


def test_orders_are_functions_of_the_seed():
    assert sorted(shuffled(50, 1).tolist()) == list(range(50))
    assert torch.equal(shuffled(50, 1), shuffled(50, 1))
    assert not torch.equal(shuffled(50, 1), shuffled(50, 2))


def test_wrong_arguments_are_refused():
    rows, labels = torch.eye(4), torch.tensor([0, 0, 1, 1])
    with pytest.raises(DataError, match="3 labels for 4 embeddings"):
        all_pairs_tar_at_far(rows, labels[:3], [0.1])
    with pytest.raises(ConfigError, match="FAR = -0.1; allowed: 0 to 1"):
        all_pairs_tar_at_far(rows, labels, [-0.1])
    with pytest.raises(DataError, match="found 1 person with two images or more beside the 1 of 2 .* num_gallery = 2"):
        random_open_set_trials(labels, 0, num_trials=1, num_gallery=2, num_training_people=1)
    for sizes in ([0], []):
        with pytest.raises(
            ConfigError, match=rf"found \[{sizes[0] if sizes else ''}\] distractors, must be one number"
        ):
            rank_1_identification(rows, labels, [rows], sizes)
    with pytest.raises(DataError, match="8 distractors, must be 10 or more"):
        rank_1_identification(rows, labels, [rows, rows], [10])
    with pytest.raises(DataError, match="4 probes, no two of one person"):
        rank_1_identification(rows, torch.arange(4), [rows], [1])


@pytest.mark.usefixtures("unchecked_types")
def test_distractors_of_other_dimensions_are_refused():
    rows, labels = torch.eye(4), torch.tensor([0, 0, 1, 1])
    with pytest.raises(DataError, match="^identification, probes and distractors: found rows of 4 and of 3 dimensions"):
        rank_1_identification(rows, labels, [rows[:, :3]], [1])
