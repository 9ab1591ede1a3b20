import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ssl_sec.losses import SphericalFeatureTransform, rotation
from ssl_sec.losses.geometry import directions, norms
from tests.losses.cases import rows

LABELS = torch.tensor([0, 0, 1, 1, 2, 2, 3, 3, 4, 4])


def matrix(mean_from, mean_to):
    """SFT's Eq. 4, with the D × D matrix built."""
    first = mean_from / mean_from.norm()
    target = mean_to / mean_to.norm()
    second = target - (target @ first) * first
    second = second / second.norm()
    angle = torch.acos((target @ first).clamp(-1, 1))
    skew = torch.outer(second, first) - torch.outer(first, second)
    plane = torch.outer(first, first) + torch.outer(second, second)
    return torch.eye(len(first), dtype=first.dtype) + skew * angle.sin() + plane * (angle.cos() - 1)


def with_centres(mode="rotate", tail_classes=None, num_classes=5, **options):
    transform = SphericalFeatureTransform(num_classes, 4, mode, tail_classes, **options).double()
    transform.centres.copy_(rows(num_classes, 4, seed=7))
    return transform.eval()


def test_the_rotation_is_rodrigues_formula():
    froms, tos = rows(6, 4, seed=1), rows(6, 4, seed=2)
    turned = rotation(froms, tos)(rows(6, 4))
    for row in range(6):
        expected = matrix(froms[row], tos[row]) @ rows(6, 4)[row]
        torch.testing.assert_close(turned[row], expected, rtol=1e-12, atol=1e-14)


@given(dim=st.integers(2, 8), seed=st.integers(0, 1000), apart=st.floats(1e-9, 10.0))
def test_the_rotation_maps_one_mean_to_the_other_and_keeps_inner_products(dim, seed, apart):
    mean_from = rows(1, dim, seed)
    mean_to = mean_from + apart * rows(1, dim, seed + 1)
    turn = rotation(mean_from, mean_to)
    torch.testing.assert_close(turn(directions(mean_from)), directions(mean_to), rtol=1e-9, atol=1e-10)
    some = rows(5, dim, seed + 2)
    turned = rotation(mean_from.expand(5, -1), mean_to.expand(5, -1))(some)
    torch.testing.assert_close(turned @ turned.T, some @ some.T, rtol=1e-8, atol=1e-8)


def test_rows_orthogonal_to_both_means_are_unchanged():
    mean_from, mean_to = torch.eye(4)[0], torch.eye(4)[1]
    rest = torch.tensor([0.0, 0.0, 2.0, 3.0])
    assert torch.equal(rotation(mean_from, mean_to)(rest), rest)
    torch.testing.assert_close(rotation(mean_from, mean_to)(torch.eye(4)[1]), -torch.eye(4)[0])


def test_one_rotation_turns_many_rows():
    mean_from, mean_to = rows(2, 4, seed=1)
    turned = rotation(mean_from, mean_to)(rows(6, 4))
    torch.testing.assert_close(turned, rows(6, 4) @ matrix(mean_from, mean_to).T, rtol=1e-12, atol=1e-14)


def test_equal_means_turn_nothing():
    mean = rows(1, 4, seed=1)
    torch.testing.assert_close(rotation(mean, 3 * mean)(rows(1, 4)), rows(1, 4), rtol=1e-14, atol=1e-15)


def test_a_mean_that_is_zero_turns_nothing():
    zero = torch.zeros(6, 4, dtype=torch.float64)
    assert torch.equal(rotation(zero, rows(6, 4, seed=1))(rows(6, 4)), rows(6, 4))
    assert torch.equal(rotation(rows(6, 4, seed=1), zero)(rows(6, 4)), rows(6, 4))


def test_opposite_means_mirror_their_axis():
    mean = torch.tensor([2.0, 0.0, 0.0])
    assert rotation(mean, -mean)(torch.tensor([1.0, 5.0, 6.0])).tolist() == [-1, 5, 6]


def test_the_gradient_of_a_turned_row_is_turned_back():
    mean_from, mean_to = rows(2, 4, seed=1)
    some = rows(3, 4).requires_grad_()
    (gradient,) = torch.autograd.grad(rotation(mean_from, mean_to)(some)[:, 0].sum(), some)
    torch.testing.assert_close(gradient, matrix(mean_from, mean_to)[0].expand(3, -1), rtol=1e-12, atol=1e-14)


def test_generated_rows_are_turned_from_their_centre_to_that_of_the_drawn_class():
    transform = with_centres()
    generated, targets = transform(rows(10, 4), LABELS, step=3)
    for row in range(10):
        turn = matrix(transform.centres[LABELS[row]], transform.centres[targets[row]])
        torch.testing.assert_close(generated[row], turn @ rows(10, 4)[row], rtol=1e-11, atol=1e-13)
    torch.testing.assert_close(norms(generated), norms(rows(10, 4)))


def test_translated_rows_are_put_back_on_their_sphere():
    """SFT-d: Eq. 2 before normalisation."""
    transform = with_centres("translate")
    generated, targets = transform(rows(10, 4), LABELS, step=3)
    moved = rows(10, 4) + transform.centres[targets] - transform.centres[LABELS]
    torch.testing.assert_close(directions(generated), directions(moved))
    torch.testing.assert_close(norms(generated), norms(rows(10, 4)))


@pytest.mark.parametrize(("energy", "expected"), [(0.3, 1), (0.6, 2), (0.9, 3), (1.0, 4)])
def test_ftl_lends_the_principal_part_of_the_variety(energy, expected):
    transform = with_centres("ftl", energy=energy)
    generated, targets = transform(rows(10, 4), LABELS, step=3)
    residuals = directions(rows(10, 4)) - transform.centres[LABELS]
    values, vectors = torch.linalg.eigh(residuals.T @ residuals)
    values, vectors = values.flip(0), vectors.flip(1)
    count = next(k for k in range(1, 5) if values[:k].sum() >= energy * values.sum() * (1 - 1e-12))
    lent = residuals @ vectors[:, :count] @ vectors[:, :count].T
    torch.testing.assert_close(generated, transform.centres[targets] + lent, rtol=1e-10, atol=1e-12)
    assert count == expected


@pytest.mark.parametrize("mode", ["rotate", "translate", "ftl"])
def test_the_network_is_reached_through_generated_rows_and_the_centres_are_not(mode):
    transform = with_centres(mode)
    embeddings = rows(10, 4).requires_grad_()
    generated, _ = transform(embeddings, LABELS, 0)
    generated.square()[:, 0].sum().backward()
    assert (embeddings.grad.norm(dim=1) > 0).all()
    assert list(transform.parameters()) == []

    def first_column(some):
        # The residuals' axes are constants of the batch.
        return transform(some, LABELS, 0)[0]

    if mode != "ftl":
        assert torch.autograd.gradcheck(first_column, rows(10, 4).requires_grad_())


@pytest.mark.parametrize("unknown", [[], [6], [0, 2], [0, 2, 3, 5, 6, 7]])
def test_every_other_class_with_a_centre_is_drawn_uniformly(unknown):
    """SFT, Section 3.5: "we randomly choose a different class as target"."""
    transform = with_centres(num_classes=8)
    transform.centres[unknown] = 0
    counts = torch.zeros(8, 8)
    for step in range(600):
        _, targets = transform(rows(10, 4), LABELS, step)
        counts.index_put_((LABELS, targets), torch.ones(10), accumulate=True)
    sources = [label for label in range(5) if label not in unknown]
    known = [label for label in range(8) if label not in unknown]
    for label in set(unknown) & set(range(5)):
        assert counts[label].nonzero().flatten().tolist() == [label]  # it generates what it is
    for label in sources:
        others = [other for other in known if other != label]
        assert counts[label].sum() == counts[label, others].sum() == 1200
        expected = 1200 / len(others)
        assert ((counts[label, others] - expected).square() / expected).sum() < 24  # 6 degrees: once in 2000


def test_draws_depend_on_seed_and_step_and_row_alone():
    def drawn(seed, step, labels=LABELS):
        return with_centres(seed=seed)(rows(len(labels), 4), labels, step)[1].tolist()

    assert drawn(1, 5) == drawn(1, 5)
    assert drawn(1, 5) != drawn(1, 6)
    assert drawn(1, 5) != drawn(2, 5)


@pytest.mark.parametrize("mode", ["rotate", "translate", "ftl"])
def test_without_centres_the_generated_rows_are_the_batch(mode):
    transform = SphericalFeatureTransform(5, 4, mode).double()
    generated, targets = transform(rows(10, 4), LABELS, 0)
    assert torch.equal(targets, LABELS)
    torch.testing.assert_close(directions(generated), directions(rows(10, 4)))


def test_of_two_classes_each_generates_the_other():
    transform = with_centres(num_classes=2)
    labels = torch.arange(10) % 2
    for step in range(5):
        assert torch.equal(transform(rows(10, 4), labels, step)[1], 1 - labels)


def test_the_only_class_with_a_centre_is_generated_unchanged():
    transform = with_centres()
    transform.centres[[0, 1, 2, 4]] = 0
    generated, targets = transform(rows(4, 4), torch.tensor([3, 3, 1, 3]), 0)
    assert targets.tolist() == [3, 3, 1, 3]
    torch.testing.assert_close(generated, rows(4, 4))


def test_the_unbalanced_scheme_lends_from_heads_to_tails():
    transform = with_centres(tail_classes=[1, 4])
    seen = set()
    for step in range(30):
        generated, targets = transform(rows(10, 4), LABELS, step)
        heads = torch.tensor([0, 1, 4, 5, 6, 7])
        assert len(generated) == len(targets) == 6
        seen |= set(targets.tolist())
        for place, row in enumerate(heads.tolist()):
            turn = matrix(transform.centres[LABELS[row]], transform.centres[targets[place]])
            torch.testing.assert_close(generated[place], turn @ rows(10, 4)[row], rtol=1e-11, atol=1e-13)
    assert seen == {1, 4}


def test_tail_classes_need_not_be_in_the_batch_but_need_a_centre():
    transform = with_centres(num_classes=9, tail_classes=torch.tensor([7, 8]))
    transform.centres[8] = 0
    transform.centres[0] = 0
    targets = torch.cat([transform(rows(10, 4), LABELS, step)[1] for step in range(20)])
    assert set(targets.tolist()) == {7}
    assert len(targets) < 20 * 8
    assert not any(len(transform(rows(4, 4), LABELS.new_zeros(4), step)[1]) for step in range(20))  # nor without one


def test_a_batch_of_tail_classes_generates_nothing():
    generated, targets = with_centres(tail_classes=torch.tensor([0, 1, 2, 3]))(rows(8, 4), LABELS[:8], 0)
    assert generated.shape == (0, 4)
    assert targets.shape == (0,)


@pytest.mark.parametrize(("mode", "raw"), [("rotate", False), ("translate", True), ("ftl", False)])
def test_the_centres_move_after_they_were_used_and_only_in_training(mode, raw):
    """Algorithm 1: line 5 generates, line 6 moves by Eq. 9."""
    transform = with_centres(mode)
    before = transform.centres.clone()
    in_evaluation, _ = transform(rows(10, 4), LABELS, 3)
    assert torch.equal(transform.centres, before)
    in_training, _ = transform.train()(rows(10, 4), LABELS, 3)
    assert torch.equal(in_training, in_evaluation)
    batch = rows(10, 4) if raw else directions(rows(10, 4))
    for label in range(5):
        members = batch[LABELS == label]
        step = (before[label] - members).sum(0) / (1 + len(members))
        torch.testing.assert_close(transform.centres[label], before[label] - step, rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("mode", ["rotate", "translate", "ftl"])
def test_random_centres_are_a_function_of_the_seed_and_stay(mode):
    made = [SphericalFeatureTransform(5, 4, mode, seed=seed, centres="random") for seed in (0, 0, 1)]
    first, again, other = [transform.centres.clone() for transform in made]
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    torch.testing.assert_close(first.norm(dim=1), torch.ones(5))
    for step in range(3):
        made[0](rows(10, 4), LABELS, step)
    assert torch.equal(made[0].centres, first)
    _, targets = made[0](rows(10, 4), LABELS, 3)
    assert (targets != LABELS).all()  # they exist from the first step


@pytest.mark.parametrize(("mode", "raw"), [("rotate", False), ("translate", True), ("ftl", False)])
def test_a_picked_centre_is_a_row_of_its_class_redrawn_every_step(mode, raw):
    transform = with_centres(mode, num_classes=6, centres="picked")
    absent = transform.centres[5].clone()  # no row of LABELS has this class
    batch = rows(10, 4)
    generated, _ = transform(batch, LABELS, 0)
    in_training, _ = transform.train()(batch, LABELS, 0)
    assert torch.equal(in_training, generated)  # the centres move after they were used
    members = batch if raw else directions(batch)
    picked = set()
    for step in range(40):
        transform(batch, LABELS, step)
        distances = (transform.centres[:5, None] - members[None]).norm(dim=2)
        chosen = distances.argmin(1)
        torch.testing.assert_close(transform.centres[:5], members[chosen], rtol=0, atol=0)
        assert torch.equal(LABELS[chosen], torch.arange(5))
        picked |= set(chosen.tolist())
    assert picked == set(range(10))
    assert torch.equal(transform.centres[5], absent)
    again = with_centres(mode, num_classes=6, centres="picked").train()
    again(batch, LABELS, 39)
    assert torch.equal(again.centres, transform.centres)


def test_the_state_dict_has_the_centres():
    transform = with_centres(tail_classes=torch.tensor([1]))
    assert set(transform.state_dict()) == {"centres"}


def test_it_computes_in_single_precision_under_autocast():
    transform = with_centres().float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        generated, _ = transform(rows(10, 4).bfloat16(), LABELS, 3)
    assert generated.dtype == torch.float32
    expected, _ = transform(rows(10, 4).bfloat16().float(), LABELS, 3)
    torch.testing.assert_close(generated, expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_classes": 1}, "num_classes: found 1, must be ≥ 2"),
        ({"dim": 0}, "dim: found 0, must be ≥ 1"),
        ({"weight": -1.0}, "weight: found -1.0, must be ≥ 0"),
        ({"energy": 0.0}, "energy: found 0.0, must be in (0, 1]"),
        ({"energy": math.nan}, "energy: found nan, must be in (0, 1]"),
        (
            {"tail_classes": torch.tensor([5])},
            "tail_classes: found [5], must be one class or more in [0, 4], not all",
        ),
        (
            {"tail_classes": torch.tensor([-1, 2])},
            "tail_classes: found [-1, 2], must be one class or more in [0, 4], not all",
        ),
        (
            {"tail_classes": torch.arange(5)},
            "tail_classes: found [0, 1, 2, 3, 4], must be one class or more in [0, 4], not all",
        ),
    ],
)
def test_a_value_outside_its_range_is_refused(options, message):
    with pytest.raises(ValueError) as caught:
        SphericalFeatureTransform(**{"num_classes": 5, "dim": 4, **options})
    assert str(caught.value) == message


def test_the_repr_shows_the_settings():
    shown = "SphericalFeatureTransform(num_classes=5, dim=4, mode='rotate', weight=0.2, balanced)"
    assert repr(SphericalFeatureTransform(5, 4)) == shown
    assert "balanced, picked centres" in repr(SphericalFeatureTransform(5, 4, centres="picked"))
    tails = SphericalFeatureTransform(5, 4, "translate", torch.tensor([1, 2]))
    assert "mode='translate', weight=0.2, 2 tail classes" in repr(tails)


@pytest.mark.parametrize("mode", ["rotate", "translate", "ftl"])
@pytest.mark.parametrize("centres", ["mean", "picked"])
def test_a_class_whose_row_overflowed_keeps_its_centre(mode, centres):
    transform = with_centres(mode, centres=centres).train()
    before, broken = transform.centres.clone(), rows(10, 4)
    broken[2:4, 0] = math.inf
    generated, _ = transform(broken, LABELS, 0)
    assert torch.equal(generated.isfinite().all(1), broken.isfinite().all(1))
    assert torch.equal((transform.centres != before).any(1), torch.arange(5) != 1)
    assert transform(rows(10, 4), LABELS, 1)[0].isfinite().all()


@pytest.mark.usefixtures("unchecked_types")
def test_labels_of_any_whole_numbers_are_taken_and_others_refused():
    transform = with_centres()
    torch.testing.assert_close(transform(rows(10, 4), LABELS.int(), 3), transform(rows(10, 4), LABELS, 3))
    for wrong in (LABELS - 1, LABELS + 3):
        with pytest.raises(ValueError, match=r"^SphericalFeatureTransform has 5 classes: found label .* in \[0, 4\]"):
            transform(rows(10, 4), wrong, 3)
    with pytest.raises(TypeError, match=r"^SphericalFeatureTransform: found float64\[10, 4\] and float32\[10\], must"):
        transform(rows(10, 4), LABELS + 0.5, 3)


def test_rows_of_another_dim_are_refused():
    with pytest.raises(ValueError, match=r"^SphericalFeatureTransform needs rows of dim 4: the batch is \[10, 3\]$"):
        with_centres()(rows(10, 3), LABELS, 3)
