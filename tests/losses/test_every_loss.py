"""What holds of every loss of the core."""

import json
import math
import sys
import threading
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ssl_sec.losses import pair
from tests.losses.cases import ALL_LOSSES, CLASS_LOSSES, DIM, NUM_CLASSES, PAIR_LOSSES, rows

EVEN = torch.tensor([0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5])
MIXED = torch.tensor([3, 0, 2, 0, 3, 3, 1, 2, 1, 0, 3, 1])
LONELY = torch.tensor([3, 0, 2, 0, 3, 3, 1, 5, 1, 4, 3, 1])

every = pytest.mark.parametrize("case", ALL_LOSSES, ids=str)
every_pair = pytest.mark.parametrize("case", PAIR_LOSSES, ids=str)
every_class = pytest.mark.parametrize("case", CLASS_LOSSES, ids=str)
normalised = pytest.mark.parametrize("case", [case for case in ALL_LOSSES if case.normalised], ids=str)


def label_sets(case):
    return [case.arrange(labels) for labels in ([EVEN, MIXED] if case.of_positives else [EVEN, MIXED, LONELY])]


def gradient(loss, embeddings, labels):
    embeddings = embeddings.clone().requires_grad_()
    return torch.autograd.grad(loss(embeddings, labels), embeddings)[0]


@every
def test_the_value_is_that_of_the_slow_loop(case):
    for seed, labels in enumerate(label_sets(case)):
        loss = case.build()
        value = loss(rows(seed=seed), labels)
        assert value.dtype == torch.float64
        assert value.shape == ()
        expected = sum(case.slow_terms(loss, rows(seed=seed), labels))
        assert expected > 1e-3
        assert value.item() == pytest.approx(expected, rel=1e-11)


@pytest.mark.parametrize("case", PAIR_LOSSES, ids=str)
@given(
    sizes=st.lists(st.integers(2, 4), min_size=2, max_size=5),
    lonely=st.integers(0, 2),
    dim=st.integers(2, 6),
    seed=st.integers(0, 10_000),
)
@settings(max_examples=25)
def test_the_value_is_that_of_the_slow_loop_for_any_shape(case, sizes, lonely, dim, seed):
    labels = [label for label, size in enumerate(sizes) for _ in range(size)]
    if not case.of_positives:
        labels += [100 + number for number in range(lonely)]
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    labels = case.arrange(torch.tensor(labels)[order])
    loss, embeddings = case.build(), rows(len(labels), dim, seed)
    expected = sum(case.slow_terms(loss, embeddings, labels))
    assert loss(embeddings, labels).item() == pytest.approx(expected, rel=1e-10, abs=1e-13)


@given(seed=st.integers(0, 10_000), cut=st.integers(0, 14))
@settings(max_examples=30)
def test_triplets_are_counted_alike_by_a_sort_and_one_by_one(seed, cut):
    labels = torch.tensor([0, 1, 1, 2, 2, 2, 3, 3, 3, 3, 3, 1, 0, 4])
    (case,) = [case for case in PAIR_LOSSES if case.name == "triplet"]
    outcomes = []
    for most in (0, 100):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pair, "FEW_POSITIVES", most)
            embeddings = rows(14, seed=seed).requires_grad_()
            share = case.build()(embeddings, labels, anchors=slice(cut, 14))
            outcomes.append((share.item(), torch.autograd.grad(share, embeddings)[0]))
    torch.testing.assert_close(outcomes[0], outcomes[1], rtol=1e-12, atol=1e-14)
    expected = sum(case.slow_terms(None, rows(14, seed=seed), labels)[cut:])
    assert outcomes[0][0] == pytest.approx(expected, rel=1e-11, abs=1e-14)


@pytest.mark.parametrize("case", CLASS_LOSSES, ids=str)
@given(labels=st.lists(st.integers(0, 5), min_size=1, max_size=10), seed=st.integers(0, 10_000))
@settings(max_examples=25)
def test_the_value_is_that_of_the_slow_loop_for_any_classes(case, labels, seed):
    loss, embeddings, labels = case.build(), rows(len(labels), seed=seed), torch.tensor(labels)
    expected = sum(case.slow_terms(loss, embeddings, labels))
    assert loss(embeddings, labels).item() == pytest.approx(expected, rel=1e-10, abs=1e-13)


@every
@pytest.mark.parametrize("cuts", [(0, 12), (0, 1, 12), (0, 3, 6, 9, 12), (0, 5, 5, 12)])
def test_the_shares_of_the_anchors_add_up_to_the_loss(case, cuts):
    for labels in label_sets(case):
        loss = case.build()
        whole, parts = rows().requires_grad_(), rows().requires_grad_()
        shares = [loss(parts, labels, anchors=slice(a, b)) for a, b in zip(cuts[:-1], cuts[1:], strict=True)]
        terms = case.slow_terms(loss, rows(), labels)
        for share, start, stop in zip(shares, cuts[:-1], cuts[1:], strict=True):
            assert share.item() == pytest.approx(sum(terms[start:stop]), rel=1e-10, abs=1e-14)
        sum(shares).backward()
        loss(whole, labels).backward()
        torch.testing.assert_close(parts.grad, whole.grad, rtol=1e-10, atol=1e-14)


@every
@pytest.mark.usefixtures("unchecked_types")  # hundreds of calls; the other tests check the types
def test_the_gradient_is_that_of_finite_differences(case):
    for labels in label_sets(case):
        loss = case.build()
        case.fix_weights(loss, rows())
        names = [name for name, _ in loss.named_parameters()]

        def value(embeddings, *parameters, case=case, loss=loss, names=names, labels=labels):
            if case.reads_norms:
                embeddings = embeddings / embeddings.norm(dim=1, keepdim=True) * rows().norm(dim=1, keepdim=True)
            return torch.func.functional_call(loss, dict(zip(names, parameters, strict=True)), (embeddings, labels))

        parameters = [p.detach().clone().requires_grad_() for p in loss.parameters()]
        assert torch.autograd.gradcheck(value, (rows().requires_grad_(), *parameters))


@every
def test_the_order_of_rows_changes_nothing(case):
    generator, labels = torch.Generator().manual_seed(1), case.arrange(MIXED)
    order = torch.randperm(12, generator=generator)
    if case.by_order:  # the rows of a class keep their order
        permuted = labels[order]
        for label in labels.unique():
            order[permuted == label] = order[permuted == label].sort().values
    if case.of_triplets:  # and those of a triplet
        order = torch.arange(12).view(4, 3)[torch.randperm(4, generator=generator)].flatten()
        assert order[0] != 0
    loss = case.build()
    assert loss(rows()[order], labels[order]).item() == pytest.approx(loss(rows(), labels).item(), rel=1e-12)


@normalised
def test_the_scale_of_each_row_changes_nothing(case):
    labels = case.arrange(MIXED)
    scale = torch.logspace(-4, 4, 12, dtype=torch.float64)[:, None]
    loss = case.build()
    assert loss(scale * rows(), labels).item() == pytest.approx(loss(rows(), labels).item(), rel=1e-11)


@pytest.mark.parametrize("case", [case for case in ALL_LOSSES if not case.normalised], ids=str)
def test_the_scale_matters_where_the_rows_are_raw(case):
    labels = case.arrange(MIXED)
    loss = case.build()
    scale = torch.tensor([2.0, 1.0], dtype=torch.float64).repeat(6)[:, None]
    assert loss(scale * rows(), labels).item() != pytest.approx(loss(rows(), labels).item(), rel=1e-2)


@every
def test_a_rotation_of_the_space_changes_nothing(case):
    labels = case.arrange(MIXED)
    turn, _ = torch.linalg.qr(rows(DIM, DIM, seed=2))
    loss = case.build()
    before = loss(rows(), labels).item()
    for tensor in [*loss.parameters(), *loss.buffers()]:
        if tensor.ndim:
            turned = [part @ turn if part.shape[1] == DIM else part for part in tensor.data.split(DIM, 1)]
            tensor.data = torch.cat(turned, 1)  # a bias stays
    assert loss(rows() @ turn, labels).item() == pytest.approx(before, rel=1e-12)


@every_pair
def test_new_names_for_the_classes_change_nothing(case):
    labels = case.arrange(MIXED)
    loss = case.build()
    assert loss(rows(), 7 * labels + 100).item() == loss(rows(), labels).item()


@normalised
def test_the_gradient_is_orthogonal_to_the_embedding_and_falls_with_its_norm(case):
    """SEC, Proposition 1 and Eq. 4."""
    labels = case.arrange(MIXED)
    loss = case.build()
    at_rows = gradient(loss, rows(), labels)
    assert at_rows.norm() > 1e-3
    assert (at_rows * rows()).sum(1).abs().max() < 1e-15
    torch.testing.assert_close(gradient(loss, 10 * rows(), labels), at_rows / 10, rtol=1e-9, atol=1e-14)


def degenerate():
    some, one_class, doubled = rows(), rows(), rows()
    some[[0, 4]] = 0
    one_class[MIXED == 3] = 0
    doubled[[1, 3]] = rows()[9]  # of one class
    doubled[[2, 6]] = rows()[0]  # of three classes
    return {
        "a zero row": some,
        "a class of zero rows": one_class,
        "all rows zero": torch.zeros_like(some),
        "equal rows": doubled,
        "all rows equal": rows(1).expand(12, -1).clone(),
        "opposite rows": torch.where((MIXED == 3)[:, None], -rows(1), rows(1)),
        "tiny rows": 1e-20 * rows(),
    }


@every
@pytest.mark.parametrize("kind", degenerate())
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_degenerate_rows_give_a_finite_value_and_gradient(case, kind, dtype):
    loss = case.build().to(dtype)
    embeddings = degenerate()[kind].to(dtype).requires_grad_()
    value = loss(embeddings, case.arrange(MIXED))
    value.backward()
    assert value.isfinite()
    assert embeddings.grad.isfinite().all()
    assert all(parameter.grad.isfinite().all() for parameter in loss.parameters())


@every
def test_a_nan_row_gives_a_nan_loss(case):
    """Also one that has no positive, or takes no part."""
    for labels in label_sets(case):
        for row in range(len(labels)):
            embeddings = rows()
            embeddings[row] = math.nan
            assert case.build()(embeddings, labels).isnan(), (labels, row)


@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_losses_are_computed_in_single_precision_under_autocast(case, dtype):
    labels = case.arrange(EVEN).repeat(4)
    embeddings = rows(48).to(dtype)
    loss = case.build().float()
    expected = case.build()
    expected.load_state_dict({name: tensor.double() for name, tensor in loss.state_dict().items()})
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value = loss(embeddings, labels)
    assert value.dtype == torch.float32
    assert value.item() == pytest.approx(expected(embeddings.double(), labels).item(), rel=1e-5)


@every
@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8])
def test_labels_may_be_any_whole_numbers(case, dtype):
    labels = case.arrange(MIXED)
    assert case.build()(rows(), labels.to(dtype)).item() == case.build()(rows(), labels).item()


@every
def test_half_precision_rows_have_a_gradient_in_half_precision(case):
    embeddings = rows().bfloat16().requires_grad_()
    loss = case.build().float()
    loss(embeddings, case.arrange(MIXED)).backward()
    assert embeddings.grad.dtype == torch.bfloat16
    assert embeddings.grad.isfinite().all()


NEED_BOTH = [case for case in PAIR_LOSSES if case.name not in {"ntxent", "supcon", "contrastive", "ranked_list"}]


@pytest.mark.parametrize("case", NEED_BOTH, ids=str)
def test_a_batch_without_negatives_is_refused(case):
    with pytest.raises(ValueError, match=f"^{type(case.build()).__name__[:4]}.* needs a negative: "):
        case.build()(rows(), torch.full((12,), 7))


@pytest.mark.parametrize("case", [case for case in NEED_BOTH if not case.of_positives], ids=str)
def test_a_batch_without_positives_is_refused(case):
    with pytest.raises(ValueError, match=f"^{type(case.build()).__name__[:4]}.* needs a positive: "):
        case.build()(rows(), torch.arange(12))


@pytest.mark.parametrize("case", PAIR_LOSSES, ids=str)
def test_a_single_row_is_refused(case):
    with pytest.raises(ValueError, match=" needs a "):
        case.build()(rows(1), torch.tensor([0]))


@pytest.mark.parametrize("name", ["contrastive", "ranked_list"])
@pytest.mark.parametrize("labels", [torch.full((12,), 7), torch.arange(12)])
def test_a_loss_over_pairs_takes_a_batch_of_only_positives_or_only_negatives(name, labels):
    (case,) = [case for case in PAIR_LOSSES if case.name == name]
    value = case.build()(rows(), labels).item()
    assert value == pytest.approx(sum(case.slow_terms(case.build(), rows(), labels)), rel=1e-12)
    assert value > 0
    broken = rows()
    broken[0] = math.nan
    assert case.build()(broken, labels).isnan()


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("multi_similarity", {"epsilon": 0.0}),
        ("multi_similarity", {"epsilon": 1.0}),
        ("ranked_list", {"alpha": 2.0, "margin": 2.0}),
    ],
)
def test_ties_with_a_bound_are_left_out(name, values):
    """All similarities are exactly -1, 0 or 1; a pair at a bound would count in a sum of weights."""
    (case,) = [replace(case, values=case.values | values) for case in PAIR_LOSSES if case.name == name]
    axes, labels = torch.cat([torch.eye(2), -torch.eye(2)]).double(), torch.arange(12) // 3
    for seed in range(5):
        embeddings = axes[torch.randint(4, (12,), generator=torch.Generator().manual_seed(seed))]
        expected = sum(case.slow_terms(None, embeddings, labels))
        assert case.build()(embeddings, labels).item() == pytest.approx(expected, rel=1e-12, abs=1e-14)


@pytest.mark.parametrize("scale", [1.0, 80.0, 1e5])
def test_circles_loss_of_equal_rows_is_exact_at_any_scale(scale):
    """Each row has a positive and two negatives of similarity 1: log(1 + 2 exp(s (1 - m²)) exp(-s m²))."""
    excess = math.log(2) + scale * (1 - 2 * 0.4**2)
    value = pair.CircleLoss(scale, margin=0.4)(torch.ones(4, 3, dtype=torch.float64), torch.tensor([0, 0, 1, 1]))
    assert value.item() == pytest.approx(excess + math.log1p(math.exp(-excess)), rel=1e-12)


@every
def test_each_loss_states_which_batches_it_accepts(case):
    loss, taken = case.build(), set()
    for labels in (EVEN, LONELY, EVEN[:2], EVEN[:1], EVEN[1:4], torch.arange(6), EVEN[:0], case.arrange(EVEN)):
        try:
            value = loss(rows(len(labels), DIM), labels)
        except ValueError:
            value = None
        found = loss.compares(labels)
        assert (found.shape, found.dtype) == ((), torch.bool)
        assert bool(found) == (value is not None and bool(value.isfinite())), (labels, value)
        taken.add(bool(found))
    assert taken == {True, False}


@every_class
@pytest.mark.parametrize("label", [-1, 6])
def test_a_label_that_is_no_class_is_named(case, label):
    labels = MIXED.clone()
    labels[3] = label
    with pytest.raises(ValueError, match=rf"has 6 classes: found label {label}, must be in \[0, 5\]"):
        case.build()(rows(), labels)


@every_class
@pytest.mark.parametrize(("count", "dim"), [(12, 4), (0, 5)])
def test_rows_of_another_dim_or_none_are_refused(case, count, dim):
    with pytest.raises(ValueError, match=rf"needs one row or more of dim 5: the batch is \[{count}, {dim}\]"):
        case.build()(rows(count, dim), torch.zeros(count, dtype=torch.int64))


@pytest.fixture(scope="module")
def other_threads():
    """Threads that compute, so that the parts of a parallel operation end in another order at each call."""
    before, switch_s = torch.get_num_threads(), sys.getswitchinterval()
    torch.set_num_threads(2)
    sys.setswitchinterval(switch_s / 20)  # else each operation waits for milliseconds until it may go on
    ended = threading.Event()

    def compute():
        generator = torch.Generator().manual_seed(0)
        while not ended.is_set():
            size = int(torch.randint(10, 400, (1,), generator=generator))
            matrix = torch.rand(size, size, generator=generator)
            (matrix @ matrix).sum()
            json.loads(json.dumps({str(number): number for number in range(2000)}))

    threads = [threading.Thread(target=compute, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    yield
    ended.set()
    for thread in threads:
        thread.join()
    torch.set_num_threads(before)
    sys.setswitchinterval(switch_s)


@every
@pytest.mark.usefixtures("other_threads")
def test_a_gradient_is_the_same_at_every_call(case):
    """Whatever other threads compute, and with many rows of a class: a sum depends on the order of its parts."""
    # Large enough for torch to divide an operation among threads.
    count, dim = 510, 128
    torch.manual_seed(0)
    loss = case.make(NUM_CLASSES, dim, **case.values) if case.of_classes else case.make(**case.values)
    for template in loss.parameters():
        torch.nn.init.normal_(template)
    loss.eval()  # the centres of a class stay
    labels = case.arrange(torch.arange(count) % NUM_CLASSES)
    embeddings = torch.randn(len(labels), dim)
    leaves = [embeddings.requires_grad_(), *loss.parameters()]
    first = torch.autograd.grad(loss(embeddings, labels), leaves)
    for _ in range(16):  # one that depends on the order differed in a sixth of the calls or more
        again = torch.autograd.grad(loss(embeddings, labels), leaves)
        assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))
