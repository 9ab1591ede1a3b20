import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ssl_sec.losses import BYOLLoss, DCLLoss, MoCoV3Loss, NTXentLoss, SupConLoss, contrastive, tiles
from tests.losses.cases import rows
from tests.losses.slow import pairs

PAIRS = torch.tensor([0, 1, 2, 3, 0, 1, 2, 3])


@pytest.mark.parametrize("temperature", [0.1, 0.5])
def test_value_and_gradient_are_lightlys(temperature):
    peer = pytest.importorskip("lightly.loss")
    ours, theirs = rows(64, 16).requires_grad_(), rows(64, 16).requires_grad_()
    value = NTXentLoss(temperature)(ours, torch.arange(32).repeat(2))
    oracle = peer.NTXentLoss(temperature)(theirs[:32], theirs[32:])
    assert value.item() == pytest.approx(oracle.item(), rel=1e-12)
    value.backward()
    oracle.backward()
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("temperature", [0.1, 0.5])
def test_decoupled_value_and_gradient_are_lightlys(temperature):
    peer = pytest.importorskip("lightly.loss")
    ours, theirs = rows(64, 16).requires_grad_(), rows(64, 16).requires_grad_()
    value = DCLLoss(temperature)(ours, torch.arange(32).repeat(2))
    oracle = peer.DCLLoss(temperature)(*(torch.nn.functional.normalize(view) for view in (theirs[:32], theirs[32:])))
    assert value.item() == pytest.approx(oracle.item(), rel=1e-12)
    value.backward()
    oracle.backward()
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-10, atol=1e-14)


def test_a_positive_that_agrees_does_not_weaken_the_decoupled_gradient():
    """The factor of NT-Xent's gradient that DCL takes out: it vanishes as the positives agree."""
    embeddings = rows(4).repeat(2, 1)
    lengths = []
    for loss in (NTXentLoss(0.03), DCLLoss(0.03)):
        leaf = embeddings.clone().requires_grad_()
        loss(leaf, PAIRS).backward()
        lengths.append(leaf.grad.norm().item())
    assert lengths[0] < 0.01 * lengths[1]


def test_two_views_as_classes_make_supcon_nt_xent():
    embeddings = rows(8)
    assert SupConLoss(0.2)(embeddings, PAIRS).item() == NTXentLoss(0.2)(embeddings, PAIRS).item()


def test_equal_rows_give_the_logarithm_of_the_number_of_others():
    value = NTXentLoss(0.5)(torch.ones(8, 5), PAIRS)
    assert value.item() == pytest.approx(math.log(7), rel=1e-6)


def test_one_pair_alone_gives_zero():
    assert NTXentLoss(0.5)(rows(2), torch.tensor([3, 3])).item() == pytest.approx(0, abs=1e-15)


@pytest.mark.parametrize("temperature", [1e-4, 0.01, 0.03, 0.5, 100.0])
def test_large_and_small_logits_neither_overflow_nor_vanish(temperature):
    single, double = rows(8).float().requires_grad_(), rows(8).requires_grad_()
    value, expected = NTXentLoss(temperature)(single, PAIRS), NTXentLoss(temperature)(double, PAIRS)
    assert value.item() == pytest.approx(expected.item(), rel=1e-4)
    value.backward()
    expected.backward()
    torch.testing.assert_close(single.grad.double(), double.grad, rtol=2e-3, atol=1e-3 * double.grad.abs().max().item())


def test_rows_that_are_all_opposite_do_not_vanish():
    """The largest logit is the positive's, e^{1/T}, and the others are e^{-1/T}."""
    embeddings = torch.tensor([[1.0, 0.0], [-1.0, 0.0]]).repeat(4, 1)
    value = NTXentLoss(0.03)(embeddings, torch.tensor([0, 1]).repeat(4))
    assert value.item() == pytest.approx(math.log(3), rel=1e-5)


@pytest.mark.parametrize("temperature", [0.011, 0.02, 0.026])
def test_positives_that_agree_fully_do_not_overflow(temperature):
    embeddings = rows(4).float().repeat(2, 1)
    value = NTXentLoss(temperature)(embeddings, PAIRS)
    assert value.item() == pytest.approx(NTXentLoss(temperature)(embeddings.double(), PAIRS).item(), abs=1e-5)


@pytest.mark.parametrize("temperature", [1 / 87, 1 / 86])
def test_sums_of_many_large_logits_do_not_overflow(temperature):
    value = NTXentLoss(temperature)(torch.ones(64, 5), torch.arange(32).repeat(2))
    assert value.item() == pytest.approx(math.log(63), rel=1e-5)


def test_a_label_that_occurs_once_is_named():
    with pytest.raises(ValueError, match=r"^NTXentLoss needs a positive for every row: label 7 occurs once"):
        NTXentLoss()(rows(5), torch.tensor([1, 1, 7, 2, 2]))


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that was made."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.untyped_storage().nbytes() // tensor.element_size())
        return result


@pytest.mark.parametrize("num_shares", [1, 2])
@pytest.mark.parametrize("temperature", [0.5, 0.01])
@pytest.mark.parametrize("loss", [NTXentLoss, DCLLoss, SupConLoss])
def test_memory_is_linear_in_the_batch(monkeypatch, loss, num_shares, temperature):
    monkeypatch.setattr(tiles, "CPU_TILE_ROWS", 32)
    largest = []
    for count in (256, 512):
        embeddings, labels = rows(count, 4).requires_grad_(), torch.arange(count // 2).repeat(2)
        share = count // num_shares
        with Largest() as seen:
            for start in range(0, count, share):
                loss(temperature)(embeddings, labels, anchors=slice(start, start + share)).backward()
        largest.append(seen.elements)
    assert largest == [256 * 4, 512 * 4]


# Two views of four images, and three views, whose order on the workers is another.
VIEWS = [PAIRS, torch.tensor([0, 1, 0, 1, 0, 1, 2, 3, 2, 3, 2, 3])]
TAUGHT = [(BYOLLoss, pairs.byol, {}), (MoCoV3Loss, pairs.mocov3, {"temperature": 0.2})]


@pytest.mark.parametrize("labels", VIEWS)
@pytest.mark.parametrize(("loss", "terms", "values"), TAUGHT)
def test_a_loss_of_predictions_is_its_slow_loop(monkeypatch, loss, terms, values, labels):
    monkeypatch.setattr(tiles, "CPU_TILE_ROWS", 3)
    predictions, targets = rows(len(labels)).requires_grad_(), rows(len(labels), seed=1).requires_grad_()
    made = loss(**values)
    expected = terms(predictions.tolist(), targets.tolist(), labels.tolist(), **values)
    value = made(predictions, targets, labels)
    assert value.item() == pytest.approx(sum(expected), rel=1e-12)
    shares = [made(predictions, targets, labels, slice(a, b)).item() for a, b in ((0, 3), (3, 4), (4, len(labels)))]
    assert shares == pytest.approx([sum(expected[:3]), expected[3], sum(expected[4:])], rel=1e-12)
    value.backward()
    assert targets.grad is None
    assert torch.autograd.gradcheck(lambda x: made(x, targets, labels, slice(1, 6)), predictions)


def test_byol_is_lightlys_cosine():
    peer = pytest.importorskip("lightly.loss").NegativeCosineSimilarity()
    p, k = rows(16, 6), rows(16, 6, seed=1)
    oracle = (peer(p[:8], k[8:]) + peer(p[8:], k[:8])) / 2
    value = BYOLLoss()(p, k, torch.arange(8).repeat(2))
    assert value.item() == pytest.approx(2 + 2 * oracle.item(), rel=1e-12)


def test_moco_v3_is_the_cross_entropy_of_its_algorithm():
    p, k = rows(16, 6), rows(16, 6, seed=1)
    unit = torch.nn.functional.normalize
    own = torch.arange(8)

    def contrast(queries, keys):
        return torch.nn.functional.cross_entropy(unit(queries) @ unit(keys).T / 0.2, own) * 2 * 0.2

    oracle = (contrast(p[:8], k[8:]) + contrast(p[8:], k[:8])) / 2
    assert MoCoV3Loss(0.2)(p, k, own.repeat(2)).item() == pytest.approx(oracle.item(), rel=1e-12)


@pytest.mark.parametrize(("loss", "terms", "values"), TAUGHT)
def test_an_image_with_one_view_is_named(loss, terms, values):
    with pytest.raises(ValueError, match=f"^{loss.__name__} needs two views of every image: label 7 occurs once"):
        loss(**values)(rows(5), rows(5), torch.tensor([1, 1, 7, 2, 2]))


@pytest.mark.parametrize(("loss", "terms", "values"), TAUGHT)
def test_an_image_with_one_view_makes_the_loss_nan_if_labels_may_not_be_read(loss, terms, values, monkeypatch):
    monkeypatch.setattr(contrastive, "may_read_values", lambda labels: False)
    assert loss(**values)(rows(5), rows(5), torch.tensor([1, 1, 7, 2, 2])).isnan()
    assert loss(**values)(rows(5), rows(5), torch.tensor([1, 1, 2, 2, 2])).isfinite()


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8])
@pytest.mark.parametrize(("loss", "terms", "values"), TAUGHT)
def test_a_teachers_labels_may_be_any_whole_numbers(loss, terms, values, dtype):
    given = rows(8), rows(8, seed=1)
    assert loss(**values)(*given, PAIRS.to(dtype)).item() == loss(**values)(*given, PAIRS).item()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("loss", "terms", "values"), TAUGHT)
def test_rows_in_half_precision_are_compared_with_a_teachers_in_single_precision(loss, terms, values, dtype):
    predictions, targets = rows(8).to(dtype).requires_grad_(), rows(8, seed=1).to(dtype)
    value = loss(**values)(predictions, targets, PAIRS)
    expected = sum(terms(predictions.double().tolist(), targets.double().tolist(), PAIRS.tolist(), **values))
    assert value.dtype == torch.float32
    assert value.item() == pytest.approx(expected, rel=1e-5)
    value.backward()
    assert predictions.grad.dtype == dtype


@pytest.mark.parametrize("loss", [NTXentLoss, DCLLoss])
def test_a_batch_without_rows_is_refused(loss):
    with pytest.raises(ValueError, match=f"{loss.__name__} needs a positive for every row: the batch has no rows"):
        loss()(torch.zeros(0, 5), torch.zeros(0, dtype=torch.int64))


@pytest.mark.parametrize("loss", [BYOLLoss, MoCoV3Loss])
def test_a_teachers_batch_without_rows_is_refused(loss):
    none = torch.zeros(0, 5)
    with pytest.raises(ValueError, match=rf"{loss.__name__}: found float32\[0, 5\] and float32\[0, 5\], must be"):
        loss()(none, none, torch.zeros(0, dtype=torch.int64))


@pytest.mark.usefixtures("unchecked_types")
@pytest.mark.parametrize("loss", [BYOLLoss, MoCoV3Loss])
@pytest.mark.parametrize("labels", [PAIRS.double(), PAIRS[:4], PAIRS.unsqueeze(1), rows(8)])
def test_a_teachers_labels_are_one_whole_number_a_row(loss, labels):
    with pytest.raises(
        TypeError, match=rf"^{loss.__name__}: found float64\[8, 5\] and .*, must be tensors, embeddings"
    ):
        loss()(rows(8), rows(8), labels)


@pytest.mark.usefixtures("unchecked_types")
@pytest.mark.parametrize("loss", [BYOLLoss, MoCoV3Loss])
@pytest.mark.parametrize("anchors", [slice(0, 8, 2), (0, 8)])
def test_a_teachers_anchors_are_a_range_of_rows(loss, anchors):
    with pytest.raises(TypeError, match=rf"^{loss.__name__}: anchors: found .*, must be a slice of rows with step 1"):
        loss()(rows(8), rows(8), PAIRS, anchors)


@pytest.mark.usefixtures("unchecked_types")
@pytest.mark.parametrize("loss", [BYOLLoss, MoCoV3Loss])
@pytest.mark.parametrize("count", [3, 5])
def test_teachers_rows_of_another_number_are_refused(loss, count):
    with pytest.raises(ValueError, match=rf"{loss.__name__}: found float64\[4, 6\] and float64\[{count}, 6\], must be"):
        loss()(rows(4, 6), rows(count, 6), torch.arange(4) // 2)
