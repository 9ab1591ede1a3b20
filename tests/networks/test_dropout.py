import jaxtyping
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ssl_sec.collectives import average_gradients, average_parameter_gradients, own_rows
from ssl_sec.losses import SoftmaxLoss
from ssl_sec.networks.dropout import GlobalDropout, draw_dropout
from ssl_sec.networks.heads import BatchNormLinearHead, LinearBatchNormHead, LinearHead, MaxoutHead
from ssl_sec.training.objective import Objective
from ssl_sec.training.schedules import Constant
from tests.recipes.face.test_recipe import run
from tests.recipes.same_runs import assert_resumes_bit_equal, assert_the_same_on_workers
from tests.workers import on_workers

CPU = torch.device("cpu")
BATCH, FEATURES, DIM, CLASSES, STEPS = 12, 7, 5, 4, 3
HEADS = {"fc": LinearHead, "bn_fc": BatchNormLinearHead, "fc_bn": LinearBatchNormHead, "maxout": MaxoutHead}
DROPPED = {"head": {"name": "fc_bn", "dim": 16, "dropout": 0.4}}


def kept(step=0, rows=slice(0, BATCH), num_views=1, probability=0.4, width=DIM, seed=0):
    layer = GlobalDropout(probability, width, seed)
    layer.draw(step, rows, num_views, CPU)
    return layer.kept


@given(
    step=st.integers(0, 10**9),
    cut=st.integers(1, BATCH - 1),
    num_views=st.integers(1, 3),
    probability=st.floats(0.01, 0.99),
)
def test_a_worker_drops_the_entries_that_one_worker_drops(step, cut, num_views, probability):
    whole = kept(step, slice(0, BATCH), num_views, probability).view(num_views, BATCH, DIM)
    for rows in (slice(0, cut), slice(cut, BATCH)):
        assert torch.equal(kept(step, rows, num_views, probability), whole[:, rows].flatten(0, 1))


def test_each_step_view_row_and_seed_has_its_own_draw():
    wide = {"width": 200}
    first, second = kept(num_views=2, **wide).split(BATCH)
    others = [second, kept(1, **wide), kept(seed=1, **wide), first.roll(1, 0)]
    for other in others:
        assert 0.3 < (first == other).float().mean() < 0.7
    assert torch.equal(kept(**wide), first)


def test_torchs_random_state_is_unchanged():
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    kept()
    assert torch.equal(torch.rand(2), expected)


@pytest.mark.parametrize("probability", [0.1, 0.5, 0.7, 0.95])
def test_entries_are_dropped_with_their_probability_and_the_mean_stays(probability):
    layer = GlobalDropout(probability, 500, seed=2)
    layer.draw(5, slice(0, 400), 1, CPU)
    values = torch.full((400, 500), 3.0, dtype=torch.float64)
    outputs = layer(values)
    dropped = (outputs == 0).double()
    assert dropped.mean().item() == pytest.approx(probability, abs=4 * (probability * (1 - probability) / 2e5) ** 0.5)
    assert set(outputs.unique().tolist()) == {0.0, 3.0 * (1 / (1 - probability))}
    assert outputs.mean().item() == pytest.approx(3, rel=0.05)
    for axis, count in ((0, 400), (1, 500)):  # no row and no column is favoured
        spread = dropped.mean(axis).std().item()
        assert spread == pytest.approx((probability * (1 - probability) / count) ** 0.5, rel=0.2)


@pytest.mark.parametrize("name", HEADS)
def test_a_heads_dropout_changes_neither_evaluation_nor_the_names_of_weights(name):
    torch.manual_seed(0)
    plain = HEADS[name](FEATURES, DIM).eval()
    head = HEADS[name](FEATURES, DIM, 0.5).eval()
    draw_dropout(head, 0, slice(0, BATCH), 1, CPU)
    assert head.state_dict().keys() == plain.state_dict().keys()
    head.load_state_dict(plain.state_dict())
    features = torch.randn(BATCH, FEATURES)
    assert torch.equal(head(features), plain(features))
    head.train()
    assert not torch.equal(head(features), plain.train()(features))


@pytest.mark.parametrize("name", ["fc", "bn_fc", "maxout"])
def test_entries_of_the_embeddings_are_dropped(name):
    torch.manual_seed(0)
    head = HEADS[name](FEATURES, DIM, 0.5, seed=9)
    draw_dropout(head, 4, slice(0, BATCH), 1, CPU)
    assert torch.equal(head(torch.randn(BATCH, FEATURES)) != 0, kept(4, probability=0.5, seed=9))


def test_entries_of_the_features_are_dropped_before_arcfaces_output():
    torch.manual_seed(0)
    head, features = LinearBatchNormHead(FEATURES, DIM, 0.5, seed=9), torch.randn(BATCH, FEATURES)
    draw_dropout(head, 4, slice(0, BATCH), 1, CPU)
    left = 2 * features * kept(4, probability=0.5, width=FEATURES, seed=9)
    torch.testing.assert_close(head(features), head.features(head.fc(left)))


def test_a_step_without_a_draw_says_what_to_call():
    head = LinearHead(FEATURES, DIM, dropout=0.5)
    message = rf"dropout of \[6, {DIM}\]: nothing was drawn; before each step call .*\.draw_dropout\(head, step, "
    with pytest.raises(RuntimeError, match=message):
        head(torch.randn(6, FEATURES))
    draw_dropout(head, 0, slice(0, 6), 1, CPU)
    assert head(torch.randn(6, FEATURES)).shape == (6, DIM)


def test_bfloat16_is_kept():
    layer = GlobalDropout(0.7, DIM, seed=0)
    layer.draw(0, slice(0, BATCH), 1, CPU)
    assert layer(torch.randn(BATCH, DIM, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_a_new_draw_does_not_recompile(monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # checks of shapes cannot be compiled
    torch._dynamo.reset()  # other tests have compiled the same code
    torch.manual_seed(0)
    head = MaxoutHead(FEATURES, DIM, 0.5)
    compiled = torch.compile(head, backend="aot_eager", fullgraph=True)
    features = torch.randn(BATCH, FEATURES)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for step in range(3):
            draw_dropout(head, step, slice(0, BATCH), 1, CPU)
            torch.testing.assert_close(compiled(features), head(features))


def trained(name):
    """Losses of some steps, and the gradients of the last, on this worker's rows."""
    torch.manual_seed(0)
    head = HEADS[name](FEATURES, DIM, 0.4, seed=6)
    network = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Tanh(), head).double()
    objective = Objective(SoftmaxLoss(CLASSES, DIM), None, Constant(0.0)).double()
    average_parameter_gradients(objective)
    model = average_gradients(network, CPU)
    parameters = [p for p in (*network.parameters(), *objective.parameters()) if p.requires_grad]
    optimiser, own = torch.optim.SGD(parameters, 0.3), own_rows(BATCH)
    values = []
    for step in range(STEPS):
        features = torch.randn(BATCH, FEATURES, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        draw_dropout(head, step, own, 1, CPU)
        optimiser.zero_grad()
        terms = objective(model(features[own]), (torch.arange(BATCH) % CLASSES)[own], step)
        terms.total.backward()
        optimiser.step()
        values.append(terms.total.item())
    return values, [p.grad for p in parameters]


@pytest.mark.distributed
@pytest.mark.parametrize("name", ["fc", "maxout"])
def test_two_workers_have_the_loss_and_the_gradients_of_one(name, tmp_path):
    whole = trained(name)
    assert len(set(whole[0])) == STEPS
    for found in on_workers(2, tmp_path, trained, name):
        torch.testing.assert_close(found, whole, rtol=1e-11, atol=1e-13)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An uninterrupted run of face recognition on one worker."""
    return run(tmp_path_factory.mktemp("whole"), **DROPPED)


@pytest.mark.slow
@pytest.mark.distributed
def test_two_workers_give_the_same_run(tmp_path, whole):
    assert_the_same_on_workers(run, tmp_path, whole[0], DROPPED)


def test_a_stopped_and_resumed_run_ends_bit_equal(tmp_path, whole):
    assert_resumes_bit_equal(run, tmp_path, whole[0], 4, **DROPPED)


def test_dropout_changes_the_run(tmp_path, whole):
    without, _ = run(tmp_path, head={"name": "fc_bn", "dim": 16}, epochs=0.5)
    with_dropout = whole[0].series("train/loss")
    for step, loss in without.series("train/loss").items():
        assert loss != pytest.approx(with_dropout[step], rel=1e-6)
