import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ssl_sec.batch import Batch
from ssl_sec.errors import ConfigError, DataError
from ssl_sec.evaluation.retrieval import examples, nearest, num_without_positive, precision_at_r, recall_at_k

KS = [1, 2, 4, 8, 1000]


def cosine(a, b):
    lengths = math.hypot(*a) * math.hypot(*b)
    return math.fsum(x * y for x, y in zip(a, b, strict=True)) / lengths if lengths else 0.0


def slowly(embeddings, labels, ks, is_query=None):
    """From the definition, in Python's floats; similarities within 1e-12 are ties."""
    rows, labels = [[float(value) for value in row] for row in embeddings], list(map(int, labels))
    queries = [i for i in range(len(rows)) if is_query is None or is_query[i]]
    gallery = [i for i in range(len(rows)) if is_query is None or not is_query[i]]

    right = dict.fromkeys(ks, 0)
    for i in queries:
        others = [j for j in gallery if j != i]
        positives = [cosine(rows[i], rows[j]) for j in others if labels[j] == labels[i]]
        if positives:
            negatives = [cosine(rows[i], rows[j]) for j in others if labels[j] != labels[i]]
            rank = sum(similarity >= max(positives) - 1e-12 for similarity in negatives)
            right = {k: count + (rank < k) for k, count in right.items()}
    return {k: count / len(queries) for k, count in right.items()}


def precisions_slowly(embeddings, labels, is_query=None):
    """R-precision and MAP@R from the definition, in Python's floats; similarities within 1e-12 are ties."""
    rows, labels = [[float(value) for value in row] for row in embeddings], list(map(int, labels))
    queries = [i for i in range(len(rows)) if is_query is None or is_query[i]]
    gallery = [i for i in range(len(rows)) if is_query is None or not is_query[i]]
    r_precisions, average_precisions = [], []
    for i in queries:
        others = [j for j in gallery if j != i]
        num_positives = sum(labels[j] == labels[i] for j in others)
        # Of equally similar images, those of other classes come first.
        ranked = sorted(others, key=lambda j: -cosine(rows[i], rows[j]) - 1e-12 * (labels[j] != labels[i]))
        hits = [labels[j] == labels[i] for j in ranked[:num_positives]]
        precisions = [sum(hits[: place + 1]) / (place + 1) for place, hit in enumerate(hits) if hit]
        r_precisions.append(sum(hits) / max(1, num_positives))
        average_precisions.append(math.fsum(precisions) / max(1, num_positives))
    return tuple(math.fsum(each) / len(queries) for each in (r_precisions, average_precisions))


def clusters(seed, num_classes=9, per_class=5, dim=8, noise=1.2):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(num_classes, (num_classes * per_class,), generator=generator)
    centres = torch.randn(num_classes, dim, generator=generator)
    rows = centres[labels] + noise * torch.randn(len(labels), dim, generator=generator)
    return rows * (0.1 + 10 * torch.rand(len(labels), 1, generator=generator)), labels


@st.composite
def retrievals(draw):
    """Few directions and classes, so that ties, duplicates, zero rows and classes of one image are common."""
    num_images, dim = draw(st.integers(2, 24)), draw(st.integers(1, 4))
    # Small whole numbers: two cosines are equal, or differ by 1e-10 or more.
    entries = st.integers(-2, 2) if draw(st.booleans()) else st.integers(-16, 16)
    rows = draw(st.lists(st.lists(entries, min_size=dim, max_size=dim), min_size=num_images, max_size=num_images))
    labels = draw(st.lists(st.integers(-1, 4), min_size=num_images, max_size=num_images))
    is_query = draw(st.none() | st.lists(st.booleans(), min_size=num_images, max_size=num_images))
    if is_query is not None and len(set(is_query)) == 1:
        is_query[0] = not is_query[0]
    return (
        torch.tensor(rows, dtype=torch.float32),
        torch.tensor(labels),
        None if is_query is None else torch.tensor(is_query),
    )


@settings(max_examples=60)
@given(retrievals(), st.integers(1, 30))
def test_shares_are_those_of_the_slow_loop(case, tile_size):
    embeddings, labels, is_query = case
    expected = slowly(embeddings, labels, KS, is_query)
    assert recall_at_k(embeddings, labels, KS, is_query, tile_size=tile_size) == expected


@settings(max_examples=60)
@given(retrievals(), st.randoms(use_true_random=False), st.integers(-60, 60))
def test_order_and_norms_change_nothing_and_a_greater_k_finds_no_less(case, random, exponent):
    embeddings, labels, is_query = case
    shares = recall_at_k(embeddings, labels, KS, is_query)
    order = random.sample(range(len(labels)), len(labels))
    scales = torch.tensor([random.uniform(0.5, 2) * 2.0**exponent for _ in order], dtype=torch.float64).unsqueeze(1)
    mixed = (embeddings * scales)[order]
    assert recall_at_k(mixed, labels[order], KS, None if is_query is None else is_query[order], tile_size=5) == shares
    assert [shares[k] for k in KS] == sorted(shares[k] for k in KS)
    assert all(0 <= share <= 1 for share in shares.values())


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_ordinary_embeddings(seed, dtype):
    embeddings, labels = clusters(seed)
    embeddings = embeddings.to(dtype)
    shares = recall_at_k(embeddings, labels, KS)
    assert 0.3 < shares[1] < shares[8] < 1
    assert shares == slowly(embeddings, labels, KS)
    assert recall_at_k(embeddings.numpy(), labels.numpy().astype(np.int32), KS) == shares


def test_shares_are_pytorch_metric_learnings():
    peer = pytest.importorskip("pytorch_metric_learning.utils.accuracy_calculator")
    embeddings, labels = clusters(0, num_classes=40, per_class=20, dim=16, noise=1.5)
    counts = labels.bincount()
    is_shared = counts[labels] > 1
    embeddings, labels = embeddings[is_shared].double(), labels[is_shared]
    calculator = peer.AccuracyCalculator(include=("precision_at_1",), k=1, device=torch.device("cpu"))
    rows = torch.nn.functional.normalize(embeddings)
    theirs = calculator.get_accuracy(rows, labels, rows, labels, ref_includes_query=True)["precision_at_1"]
    assert 0.2 < theirs < 0.9
    assert recall_at_k(embeddings, labels, [1])[1] == pytest.approx(theirs)


@settings(max_examples=60)
@given(retrievals(), st.integers(1, 60))
def test_precisions_are_those_of_the_slow_loop(case, tile_size):
    embeddings, labels, is_query = case
    found = precision_at_r(embeddings, labels, is_query, tile_size=tile_size)
    assert found == pytest.approx(precisions_slowly(embeddings, labels, is_query), abs=1e-12)
    assert 0 <= found.map_at_r <= found.r_precision <= 1


@pytest.mark.parametrize("tile_size", [16, 40, 1536])
def test_precisions_of_ordinary_embeddings(tile_size):
    embeddings, labels = clusters(0, num_classes=12, per_class=9)
    is_query = torch.arange(len(labels)) % 3 == 0
    for query in (None, is_query, is_query.nonzero().squeeze(1).numpy()):
        found = precision_at_r(embeddings.numpy(), labels.numpy(), query, tile_size=tile_size)
        expected = precisions_slowly(embeddings, labels, None if query is None else is_query)
        assert found == pytest.approx(expected, abs=1e-12)
        assert 0.2 < found.map_at_r < found.r_precision < 0.9


def test_precisions_are_pytorch_metric_learnings():
    peer = pytest.importorskip("pytorch_metric_learning.utils.accuracy_calculator")
    embeddings, labels = clusters(0, num_classes=40, per_class=20, dim=16, noise=1.5)
    is_shared = labels.bincount()[labels] > 1
    embeddings, labels = embeddings[is_shared].double(), labels[is_shared]
    names = ("r_precision", "mean_average_precision_at_r")
    calculator = peer.AccuracyCalculator(include=names, k="max_bin_count", device=torch.device("cpu"))
    rows = torch.nn.functional.normalize(embeddings)
    theirs = calculator.get_accuracy(rows, labels, rows, labels, ref_includes_query=True)
    assert 0.1 < theirs[names[1]] < theirs[names[0]] < 0.9
    assert precision_at_r(embeddings, labels) == pytest.approx([theirs[name] for name in names], abs=1e-6)


@pytest.mark.parametrize(
    ("num_images", "tile_size", "dim"),
    [
        pytest.param(*sizes, dim, marks=[pytest.mark.slow] * (sizes[0] == 1000 and dim in (3, 128)))
        for sizes in [(2, 1), (7, 3), (64, 1024), (257, 37), (1000, 256), (1000, 1536)]
        for dim in (1, 3, 128, 512)
    ],
)
def test_collapsed_embeddings_score_0(num_images, tile_size, dim):
    generator = torch.Generator().manual_seed(num_images + dim)
    labels = torch.arange(num_images) % max(2, num_images // 4)
    ks = [1, min(4, num_images // 2)]
    norms = 0.01 + 100 * torch.rand(num_images, 1, generator=generator)
    for vector in (torch.ones(dim), torch.randn(dim, generator=generator), torch.zeros(dim)):
        for rows in (vector.expand(num_images, dim), vector * norms):
            assert recall_at_k(rows, labels, ks, tile_size=tile_size) == dict.fromkeys(ks, 0.0)
            if num_images > 7:  # else some classes have fewer images than others have positives
                assert precision_at_r(rows, torch.arange(num_images) // 4, tile_size=16 * tile_size) == (0, 0)


@pytest.mark.parametrize("num_images", [300, 1100])
def test_two_directions_that_hold_all_classes_score_0(num_images):
    generator = torch.Generator().manual_seed(0)
    directions = torch.randn(2, 512, generator=generator)
    labels = torch.arange(num_images) // 4
    shares = recall_at_k(directions[torch.arange(num_images) % 2], labels, [1, 100])
    assert shares == {1: 0, 100: 0}


def test_a_difference_below_float32_precision_decides():
    step = 1e-9
    angles = torch.tensor([0.0, 0.5, 0.5 - step, 0.5 + step], dtype=torch.float64)
    rows = torch.stack([angles.cos(), angles.sin()], dim=1)
    is_query = torch.tensor([True, False, False, False])
    assert recall_at_k(rows, torch.tensor([0, 0, 1, 1]), [1, 2], is_query) == {1: 0, 2: 1}
    assert recall_at_k(rows, torch.tensor([0, 1, 0, 1]), [1], is_query) == {1: 1}
    assert recall_at_k(rows, torch.tensor([0, 1, 1, 0]), [1, 2, 3], is_query) == {1: 0, 2: 0, 3: 1}
    # Only one image of another class is that near.
    assert recall_at_k(rows[[0, 1, 3]], torch.tensor([0, 0, 1]), [1], is_query[:3]) == {1: 1}


@pytest.mark.parametrize("noise", [1e-3, 1e-4, 1e-5])
def test_of_two_images_a_class_r_precision_is_recall_at_1_also_of_directions_that_are_nearly_equal(noise):
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(60).repeat_interleave(2)
    centre, of_class, of_image = (torch.randn(count, 16, generator=generator).double() for count in (1, 60, 120))
    rows = centre + noise * (of_class[labels] + of_image)
    (share,) = recall_at_k(rows, labels, [1]).values()
    assert precision_at_r(rows, labels) == pytest.approx((share, share), abs=1e-12) and 0.1 < share < 0.9


def test_a_duplicate_of_another_class_ranks_before_a_positive_that_is_as_near():
    rows = torch.tensor([[1.0, 2.0], [1.0, 2.0], [1.0, 2.0], [-3.0, 1.0]])
    labels = torch.tensor([0, 0, 1, 1])
    assert recall_at_k(rows, labels, [1, 2]) == slowly(rows, labels, [1, 2]) == {1: 0, 2: 0.5}


def test_an_image_is_never_its_own_neighbour():
    rows = torch.eye(4)
    assert recall_at_k(rows, torch.arange(4), [1, 4]) == {1: 0, 4: 0}


def test_a_query_without_a_positive_is_wrong_at_every_k():
    rows = torch.tensor([[1.0, 0.0], [1.0, 0.1], [0.0, 1.0]])
    assert recall_at_k(rows, torch.tensor([0, 0, 1]), [1, 100]) == {1: 2 / 3, 100: 2 / 3}
    assert recall_at_k(rows, torch.tensor([0, 1, 2]), [1, 100], torch.tensor([0])) == {1: 0, 100: 0}


def test_queries_without_a_positive_are_counted():
    labels = torch.tensor([3, 3, 5, 7, 7, 7])
    assert num_without_positive(labels) == num_without_positive(labels.numpy()) == 1
    assert num_without_positive(labels, torch.tensor([0, 1, 2, 3])) == 3
    assert num_without_positive(labels, torch.tensor([True, False, False, True, False, False])) == 0


def test_one_class_alone_scores_1():
    embeddings, labels = clusters(0)
    assert recall_at_k(embeddings, torch.zeros_like(labels), [1]) == {1: 1}
    assert precision_at_r(embeddings, torch.zeros_like(labels)) == (1, 1)


def test_r_is_the_number_of_a_querys_positives():
    rows = torch.tensor([[1.0, 0.0], [1.0, 0.1], [1.0, 0.2], [1.0, 0.3], [1.0, 0.4]])
    # Of three positives, those at places 1 and 3 are among the three nearest.
    found = precision_at_r(rows, torch.tensor([0, 0, 1, 0, 0]), torch.tensor([0]))
    assert found == pytest.approx((2 / 3, (1 + 2 / 3) / 3))
    # The second finds the third first, and the third, without a positive, has 0.
    assert precision_at_r(rows[:3], torch.tensor([0, 0, 1])) == pytest.approx((1 / 3, 1 / 3))
    assert precision_at_r(rows[:3], torch.tensor([0, 1, 2])) == (0, 0)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_rows_that_are_not_finite_are_never_right(bad):
    rows = torch.eye(3).repeat_interleave(2, dim=0)
    labels = torch.tensor([0, 0, 1, 1, 2, 2])
    assert recall_at_k(rows, labels, [1]) == {1: 1}
    assert recall_at_k(torch.full_like(rows, bad), labels, [1, 6]) == {1: 0, 6: 0}
    assert recall_at_k(torch.full_like(rows, bad), torch.zeros_like(labels), [1]) == {1: 0}
    assert precision_at_r(torch.full_like(rows, bad), labels) == (0, 0)
    assert precision_at_r(torch.full_like(rows, bad), torch.zeros_like(labels)) == (0, 0)
    rows[0] = bad
    # The two of its class have no positive left, and for the others it ranks first.
    assert recall_at_k(rows, labels, [1, 2]) == {1: 0, 2: 4 / 6}
    assert precision_at_r(rows, labels) == (0, 0)
    assert precision_at_r(rows, torch.tensor([9, 0, 1, 1, 1, 2])) == pytest.approx((1 / 6, 1 / 12))
    # Two of its class have each other.
    rows[4] = rows[1]
    assert recall_at_k(rows[:5], torch.tensor([0, 0, 1, 1, 0]), [1, 2]) == {1: 2 / 5, 2: 4 / 5}


def test_queries_may_be_a_mask_or_indices():
    embeddings, labels = clusters(1)
    is_query = torch.arange(len(labels)) % 3 == 0
    expected = slowly(embeddings, labels, KS, is_query)
    assert 0.2 < expected[1] < 1
    for query in (is_query, is_query.nonzero().squeeze(1), is_query.numpy(), is_query.nonzero().squeeze(1).numpy()):
        assert recall_at_k(embeddings, labels, KS, query, tile_size=8) == expected


def test_wrong_arguments_are_refused():
    rows, labels = torch.eye(4), torch.tensor([0, 0, 1, 1])
    with pytest.raises(DataError, match="3 labels for 4 embeddings"):
        recall_at_k(rows, labels[:3], [1])
    with pytest.raises(DataError, match="4 queries and 0 images"):
        precision_at_r(rows, labels, torch.arange(4))
    with pytest.raises(ConfigError, match="k = 0; allowed: 1 or more"):
        recall_at_k(rows, labels, [1, 0])
    with pytest.raises(DataError, match="0 queries and 4 images"):
        recall_at_k(rows, labels, [1], torch.zeros(4, dtype=torch.bool))
    with pytest.raises(DataError, match="4 queries and 0 images"):
        recall_at_k(rows, labels, [1], torch.arange(4))
    with pytest.raises(DataError, match="1 query and 0 images"):
        recall_at_k(rows[:1], labels[:1], [1])
    with pytest.raises(DataError, match="0 queries and 0 images"):
        recall_at_k(rows[:0], labels[:0], [1])
    with pytest.raises(DataError, match="query is a mask of 3 for 4 embeddings"):
        recall_at_k(rows, labels, [1], torch.ones(3, dtype=torch.bool))
    with pytest.raises(DataError, match="query has the index -1; allowed: 0 to 3"):
        recall_at_k(rows, labels, [1], torch.tensor([2, -1]))
    with pytest.raises(DataError, match="query has an index more than once; allowed: different ones, or a mask of "):
        recall_at_k(rows, labels, [1], torch.tensor([0, 1, 1, 0]))  # a mask of numbers


@pytest.mark.usefixtures("unchecked_types")
@pytest.mark.parametrize(
    ("query", "found"), [([1.0, 2.5], r"float32\[2\]"), ([[0, 1]], r"int64\[1, 2\]"), (2, r"int64\[\]")]
)
def test_queries_that_are_no_list_of_whole_numbers_are_refused(query, found):
    message = rf"^retrieval: query is {found}; allowed: a list of whole numbers, or a mask of booleans$"
    with pytest.raises(DataError, match=message):
        recall_at_k(torch.eye(4), torch.tensor([0, 0, 1, 1]), [1], torch.tensor(query))


def test_nearest_are_those_of_a_sort():
    embeddings, _ = clusters(2)
    rows = torch.nn.functional.normalize(embeddings)
    queries, is_listed = torch.tensor([40, 3]), torch.arange(len(rows)) < 20
    for gallery in (None, is_listed, is_listed.nonzero().squeeze(1).numpy()):
        found = nearest(embeddings.numpy(), queries, 5, gallery)
        for query, row in zip(queries.tolist(), found.tolist(), strict=True):
            listed = range(len(rows)) if gallery is None else range(20)
            order = sorted((i for i in listed if i != query), key=lambda i: -(rows[query] @ rows[i]).item())
            assert row == order[:5]


def test_nearest_takes_at_most_the_other_images():
    rows = torch.eye(4)
    assert sorted(nearest(rows, torch.tensor([1]), 3)[0].tolist()) == [0, 2, 3]
    for k in (0, 4):
        with pytest.raises(ConfigError, match=f"k = {k}; allowed: 1 to 3"):
            nearest(rows, torch.tensor([1]), k)
    with pytest.raises(ConfigError, match="k = 2; allowed: 1 to 1"):
        nearest(rows, torch.tensor([1]), 2, torch.tensor([1, 2]))
    rows[0] = torch.nan
    assert nearest(rows, torch.tensor([1]), 3)[0, -1] == 0


@pytest.mark.parametrize("num_queries", [None, 4])
def test_examples_of_a_small_gallery_have_fewer_neighbours(num_queries):
    """Image i has the pixel i and the label i mod 2."""
    embeddings = torch.nn.functional.normalize(torch.randn(6, 3, generator=torch.Generator().manual_seed(0)))
    queries = None if num_queries is None else torch.arange(6) < num_queries

    def read(chosen):
        return Batch(images=chosen.to(torch.uint8).reshape(-1, 1, 1, 1), labels=chosen % 2, indices=chosen)

    drawn = examples(read, embeddings, 8, queries)
    asking, answers = drawn["queries"].flatten().tolist(), drawn["neighbours"].flatten(1).tolist()
    for query, row, correct in zip(asking, answers, drawn["correct"].tolist(), strict=True):
        listed = [i for i in range(6) if i != query] if num_queries is None else [4, 5]
        assert row == sorted(listed, key=lambda i: -(embeddings[query] @ embeddings[i]).item())
        assert correct == [i % 2 == query % 2 for i in row]
    assert sorted(asking) == list(range(num_queries or 6))
