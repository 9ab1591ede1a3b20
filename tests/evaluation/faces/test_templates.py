import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ssl_sec.errors import DataError
from ssl_sec.evaluation.faces.roc import tar_at_far
from ssl_sec.evaluation.faces.templates import pool_templates, template_scores


def slowly(rows, templates, media, weights=None):
    """Mean of each medium, sum of the media, length 1."""
    weights = [1.0] * len(rows) if weights is None else weights
    pooled = {}
    for template in sorted(set(templates)):
        total = [0.0] * len(rows[0])
        for medium in {m for t, m in zip(templates, media, strict=True) if t == template}:
            listed = zip(rows, weights, templates, media, strict=True)
            faces = [(r, w) for r, w, t, m in listed if (t, m) == (template, medium)]
            for face, weight in faces:
                for d, value in enumerate(face):
                    total[d] += weight * value / math.hypot(*face) / len(faces)
        pooled[template] = [value / math.hypot(*total) for value in total]
    return pooled


def faces(seed, count=60, dim=5):
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(count, dim, generator=generator) + 0.5
    templates = torch.randint(-3, 9, (count,), generator=generator)
    return rows, templates, torch.randint(4, (count,), generator=generator)


@settings(max_examples=30)
@given(st.integers(0, 2**31))
def test_templates_are_those_of_the_slow_loop_in_any_order_and_of_any_norms(seed):
    rows, templates, media = faces(seed)
    ids, pooled = pool_templates(rows, templates, media)
    expected = slowly(rows.tolist(), templates.tolist(), media.tolist())
    assert ids.tolist() == list(expected)
    # In float64: templates that are equally similar tie.
    assert torch.allclose(pooled, torch.tensor(list(expected.values()), dtype=torch.float64), rtol=0, atol=1e-12)
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(rows), generator=generator)
    scaled = rows * (0.1 + torch.rand(len(rows), 1, generator=generator))
    again = pool_templates(scaled[order].numpy(), templates[order].numpy(), media[order].numpy())
    assert torch.equal(again[0], ids) and torch.allclose(again[1], pooled, atol=1e-6)


@settings(max_examples=20)
@given(st.integers(0, 2**31))
def test_weighted_templates_are_those_of_the_slow_loop(seed):
    rows, templates, media = faces(seed)
    weights = torch.rand(len(rows), generator=torch.Generator().manual_seed(seed))
    _, pooled = pool_templates(rows, templates, media, weights)
    expected = slowly(rows.tolist(), templates.tolist(), media.tolist(), weights.tolist())
    assert torch.allclose(pooled, torch.tensor(list(expected.values()), dtype=torch.float64), atol=1e-6)
    assert torch.allclose(pool_templates(rows, templates, media, 3 * weights.double().numpy())[1], pooled)


def test_a_face_without_weight_is_as_if_it_were_seen_from_no_side():
    rows = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 4.0]])
    _, pooled = pool_templates(rows, torch.tensor([0, 0, 1]), torch.tensor([0, 1, 0]), torch.tensor([1.0, 0.0, 0.0]))
    assert pooled.tolist() == [[1, 0], [0, 0]]


def test_a_long_video_weighs_no_more_than_a_photograph():
    rows = torch.tensor([[1.0, 0.0]] * 9 + [[0.0, 5.0]])
    media = torch.tensor([1] * 9 + [2])
    _, pooled = pool_templates(rows, torch.zeros(10, dtype=torch.int64), media)
    assert torch.allclose(pooled, torch.full((1, 2), 0.5**0.5, dtype=torch.float64))


def test_scores_are_the_cosines_of_the_pairs():
    ids, pooled = pool_templates(*faces(1))
    generator = torch.Generator().manual_seed(0)
    positions = torch.randint(len(ids), (2, 9000), generator=generator)
    first, second = ids[positions]
    scores = template_scores(ids, pooled, first, second)
    expected = (pooled[positions[0]] * pooled[positions[1]]).sum(1)
    assert scores.dtype == torch.float32
    assert torch.allclose(scores.double(), expected, atol=1e-7)
    assert torch.equal(template_scores(ids, pooled, first.numpy(), second.numpy()), scores)


@pytest.mark.parametrize("dim", [1, 512])
def test_collapsed_embeddings_score_0(dim):
    generator = torch.Generator().manual_seed(dim)
    rows = torch.randn(dim, generator=generator) * (0.01 + 100 * torch.rand(80, 1, generator=generator))
    ids, pooled = pool_templates(rows, torch.arange(80) % 10, torch.arange(80) % 7)
    first, second = torch.triu_indices(10, 10, 1)
    scores = template_scores(ids, pooled, first, second)
    assert tar_at_far(scores, first % 5 == second % 5, [0.9, 0.1]) == {0.9: 0, 0.1: 0}


def test_a_row_that_is_not_finite_affects_only_its_template():
    rows, templates, media = faces(2)
    ids, pooled = pool_templates(rows, templates, media)
    rows[0] = math.nan
    again = pool_templates(rows, templates, media)[1]
    spoilt = ids == templates[0]
    assert again[spoilt].isnan().all()
    assert torch.equal(again[~spoilt], pooled[~spoilt])


def test_wrong_arguments_are_refused():
    rows, templates, media = faces(0)
    with pytest.raises(DataError, match="60 numbers of templates and 59 of media for 60 embeddings"):
        pool_templates(rows, templates, media[1:])
    with pytest.raises(DataError, match="59 weights for 60 embeddings"):
        pool_templates(rows, templates, media, torch.ones(59))
    ids, pooled = pool_templates(rows, templates, media)
    for wrong in (99, -99):
        with pytest.raises(DataError, match=f"1 of the pairs name one without a face, such as {wrong}"):
            template_scores(ids, pooled, ids[:2], torch.tensor([int(ids[0]), wrong]))
    with pytest.raises(DataError, match="2 first ones and 1 second ones"):
        template_scores(ids, pooled, ids[:2], ids[:1])
