import pytest
import torch

from ssl_sec.losses import TripletLoss
from ssl_sec.losses.generators.base import GlobalBatch
from ssl_sec.losses.generators.dvml import VariationalSynthesis
from ssl_sec.losses.generators.hdml import HardnessAwareSynthesis
from ssl_sec.losses.generators.memory import WITH_MEMORY, CrossBatchMemory
from ssl_sec.losses.geometry import directions
from tests.losses.cases import DIM, PAIR_LOSSES, rows
from tests.losses.generators.batches import FEATURES, LABELS, batch, head

SIZE = 2 * len(LABELS)
# The numbers of positives and negatives of its rows differ.
LABELS_WITH_A_LONELY_ROW = torch.tensor([0, 0, 1, 1, 0, 2, 0, 3, 0, 7])
# Losses in which rows without a positive count.
COUNT_ALL = ("contrastive", "multi_similarity", "ranked_list")
CASES = {case.name: case for case in PAIR_LOSSES if case.make in WITH_MEMORY}


def filled(**options):
    """A memory of the batches of the steps 1 and 2, the newest first."""
    memory = CrossBatchMemory(DIM, **{"size": SIZE, "from_step": 0, **options}).double()
    for step in (0, 1, 2):
        memory(step_of(step), slice(0, len(LABELS)), head(), TripletLoss())
    return memory


def step_of(step, labels=LABELS):
    return batch(labels=torch.where(labels < 4, (labels + step) % 4, labels), step=step, seed=10 * step)


def num_terms(name, labels):
    """The terms of each row, of which the loss is the mean."""
    counts = []
    for label in labels:
        positives = labels.count(label) - 1
        triplets = positives * (len(labels) - 1 - positives)
        counts.append({"triplet": triplets, "semihard": positives}.get(name, positives > 0 or name in COUNT_ALL))
    return counts


def test_the_memory_learns_nothing_and_the_other_generators_have_parameters():
    kinds = (HardnessAwareSynthesis(2, FEATURES, DIM, steps_per_epoch=1), VariationalSynthesis(FEATURES, DIM))
    assert [generator.is_trained for generator in (filled(), *kinds)] == [False, True, True]


def test_the_memory_has_the_newest_rows_of_the_steps_before():
    memory = filled()
    assert torch.equal(memory.rows, torch.cat([step_of(2).embeddings, step_of(1).embeddings]))
    assert torch.equal(memory.labels, torch.cat([step_of(2).labels, step_of(1).labels]))
    few = filled(size=3)
    assert torch.equal(few.rows, step_of(2).embeddings[:3]) and torch.equal(few.labels, step_of(2).labels[:3])
    assert not memory.rows.requires_grad


@pytest.mark.parametrize("name", CASES)
def test_the_share_is_the_mean_over_the_anchors_of_the_batch_among_all_rows(name):
    case, memory, given = CASES[name], filled().eval(), step_of(3, LABELS_WITH_A_LONELY_ROW)
    loss = case.build()
    every = torch.cat([given.embeddings.detach(), memory.rows])
    labels = torch.cat([given.labels, memory.labels])
    terms = case.slow_terms(loss, every, labels)
    counts = num_terms(name, labels.tolist())
    times = sum(counts) / sum(counts[: len(LABELS)])
    shares = [memory(given, part, head(), loss).generated_loss for part in (slice(0, 4), slice(4, 10))]
    for share, part in zip(shares, (slice(0, 4), slice(4, 10)), strict=True):
        assert share.item() == pytest.approx(times * sum(terms[: len(LABELS)][part]), rel=1e-10)

    def value(embeddings):
        batch = GlobalBatch(features=given.features, embeddings=embeddings, labels=given.labels, step=3)
        return memory(batch, slice(0, len(LABELS)), head(), loss).generated_loss

    if case.weighted:  # no gradient passes through the weights of pairs
        weights = loss._weights(directions(every[: len(LABELS)]) @ directions(every).T)
        loss._weights = lambda similarities: weights
    assert torch.autograd.gradcheck(value, given.embeddings)


def peer_of(name):
    """The peer's loss and its miner."""
    peers, distances, miners, reducers = (
        pytest.importorskip(f"pytorch_metric_learning.{each}") for each in ("losses", "distances", "miners", "reducers")
    )
    every_term = {"distance": distances.LpDistance(power=2), "reducer": reducers.MeanReducer()}
    return {
        "supcon": lambda: (peers.SupConLoss(0.3), None),
        "circle": lambda: (peers.CircleLoss(m=0.3, gamma=4.0), None),
        "triplet": lambda: (peers.TripletMarginLoss(0.4, **every_term), None),
        "multi_similarity": lambda: (peers.MultiSimilarityLoss(2, 10, 0.4), miners.MultiSimilarityMiner(0.1)),
    }[name]()


@pytest.mark.parametrize(
    ("name", "labels"),
    [
        *((name, LABELS_WITH_A_LONELY_ROW) for name in ("supcon", "circle", "triplet")),
        ("multi_similarity", LABELS),  # the peer keeps the negatives of a row without a positive
    ],
)
def test_it_is_the_memory_of_the_peer(name, labels):
    """pytorch-metric-learning's, which has the batch itself among the remembered rows, the newest last."""
    peers = pytest.importorskip("pytorch_metric_learning.losses")
    (theirs, miner), loss = peer_of(name), CASES[name].build()
    memory, given = filled().eval(), step_of(3, labels)
    peer = peers.CrossBatchMemory(theirs, DIM, memory_size=SIZE + len(LABELS), miner=miner)
    peer.embedding_memory = peer.embedding_memory.double()
    for found in (step_of(1), step_of(2), given):
        value = peer(found.embeddings.detach(), found.labels)
    assert torch.equal(peer.embedding_memory[len(LABELS) : -len(LABELS)], step_of(2).embeddings)
    share = memory(given, slice(0, len(LABELS)), head(), loss).generated_loss
    assert share.item() == pytest.approx(value.item(), rel=1e-9)


@pytest.mark.parametrize(
    ("step", "from_step", "is_used"), [(1, 0, False), (2, 0, True), (2, 3, False), (3, 3, True), (0, 0, False)]
)
def test_it_is_used_from_its_step_on_once_it_is_full(step, from_step, is_used):
    memory = filled(from_step=from_step).eval()
    shares = memory(batch(step=step), slice(0, len(LABELS)), head(), TripletLoss())
    assert (shares.generated_loss.item() > 0) == is_used
    assert shares.generator_loss.item() == shares.classifier_loss.item() == 0
    assert memory.weights(step) == (1.0, 1.0) and filled(weight=0.3).weights(step) == (1.0, 0.3)


def test_it_is_full_after_as_many_steps_as_its_rows_need():
    memories = [CrossBatchMemory(DIM, size, from_step=0) for size in (1, 10, 11, 20, 21)]
    assert [memory.first_step(batch_size=10) for memory in memories] == [1, 1, 2, 2, 3]


def test_evaluation_remembers_nothing():
    memory = filled().eval()
    before = memory.rows.clone()
    memory(step_of(3), slice(0, len(LABELS)), head(), TripletLoss())
    assert torch.equal(memory.rows, before)


def test_rows_in_single_precision_are_remembered_exactly():
    memory = CrossBatchMemory(DIM, size=4, from_step=0)
    embeddings = rows(10, DIM, dtype=torch.float32)
    given = GlobalBatch(features=embeddings, embeddings=embeddings, labels=LABELS, step=0)
    memory(given, slice(0, 10), head(), TripletLoss())
    assert torch.equal(memory.rows, embeddings[:4]) and memory.rows.dtype == torch.float32


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": 0}, r"size: found 0, must be in \[1, 4194304\]"),
        ({"from_step": -1}, "from_step: found -1, must be ≥ 0"),
        ({"weight": -0.5}, "weight: found -0.5, must be ≥ 0"),
    ],
)
def test_a_value_outside_its_range_is_refused(options, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        CrossBatchMemory(DIM, **options)
