import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from ssl_sec.augment.views import unit_range
from ssl_sec.batch import Batch
from ssl_sec.data.image_set import ResidentImages
from ssl_sec.data.samplers import ShuffledBatches
from ssl_sec.errors import Stopped
from ssl_sec.losses import MultiSimilarityLoss, NTXentLoss, SphericalConstraint, SphericalFeatureTransform
from ssl_sec.networks import Network
from ssl_sec.training import step as training_module
from ssl_sec.training.cadence import Cadence
from ssl_sec.training.objective import Objective
from ssl_sec.training.optimisers.groups import lars, parameter_groups, sgd
from ssl_sec.training.recipe import Computation, Recipe, image_labels
from ssl_sec.training.replaying import WARM_UP_CALLS
from ssl_sec.training.schedules import Cosine, LinearRamp
from ssl_sec.training.step import autocast, train, train_step
from tests.fakes import FakeClock, FakeRuntime, assert_identical, loaded
from tests.training.fake_graphs import use_fake_graphs

NUM_IMAGES = 20
FLOAT64 = Computation(precision="float64")
BATCH = 8  # two steps an epoch
STEPS = 12
EVERY_STEP = Cadence(log_every_steps=1, save_every_steps=200, monitor_every_steps=200)


class Noise:
    """Two noisy copies of each image, by the step; records its arguments."""

    def __init__(self):
        self.asked = []

    def __call__(self, images, step, rows, global_batch_size):
        self.asked.append((step, rows, global_batch_size))
        generator = torch.Generator().manual_seed(step)
        pixels = unit_range(images).repeat(2, 1, 1, 1)
        return pixels + 0.1 * torch.randn(pixels.shape, generator=generator)


def recipe(**changes) -> Recipe:
    torch.manual_seed(0)
    images = torch.randint(0, 256, (NUM_IMAGES, 1, 3, 3), dtype=torch.uint8)
    encoder, head = nn.Sequential(nn.Flatten(), nn.Linear(9, 6), nn.BatchNorm1d(6), nn.ReLU()), nn.Linear(6, 4)
    network = Network(encoder, head).double()
    objective = Objective(NTXentLoss(0.5), SphericalConstraint(rho=0.5), LinearRamp(1.0, STEPS))
    settings = {
        "encoder": encoder,
        "head": head,
        "model": network,
        "objective": objective,
        "optimiser": sgd(parameter_groups([encoder, head, objective], 1e-3), momentum=0.9),
        "learning_rate": Cosine(0.1, STEPS),
        "image_set": ResidentImages(
            images=images, labels=torch.arange(NUM_IMAGES) % 2, class_names=("a", "b"), name="i", description="d"
        ),
        "sampler": ShuffledBatches(num_images=NUM_IMAGES, global_batch_size=BATCH, seed=3),
        "views": Noise(),
        "row_labels": lambda batch, rows: image_labels(batch, rows, 2),
        "total_steps": STEPS,
        "computation": FLOAT64,
    }
    return Recipe(**{**settings, **changes})


def run(recipe, cadence=EVERY_STEP, runtime=None, first_step=0):
    runtime = runtime or FakeRuntime()
    train(recipe, runtime, cadence, lambda steps_taken: {"val/knn_top1": 1.0}, first_step)
    return runtime


def test_views_of_one_image_share_its_row_of_the_global_batch():
    batch = Batch(
        images=torch.zeros(3, 1, 1, 1, dtype=torch.uint8), labels=torch.ones(3).long(), indices=torch.ones(3).long()
    )
    assert image_labels(batch, slice(3, 6), 2).tolist() == [3, 4, 5, 3, 4, 5]


def test_a_step_is_that_of_the_optimiser_on_the_objectives_gradient():
    ours, theirs = recipe(), recipe()
    views = torch.randn(16, 1, 3, 3, dtype=torch.float64)
    labels = torch.arange(8).repeat(2)
    optimiser = torch.optim.SGD(
        [
            {"params": [p for p in theirs.model.parameters() if p.ndim > 1], "weight_decay": 1e-3},
            {"params": [p for p in theirs.model.parameters() if p.ndim == 1]},
        ],
        momentum=0.9,
    )
    for step in range(3):
        terms = train_step(ours, views, labels, step).terms
        for group in optimiser.param_groups:
            group["lr"] = 0.1 * (1 + math.cos(math.pi * step / STEPS)) / 2
        optimiser.zero_grad()
        embeddings = theirs.model(views).embeddings
        loss = NTXentLoss(0.5)(embeddings, labels) + step / STEPS * theirs.objective.constraint(embeddings)
        loss.backward()
        optimiser.step()
        assert terms.total.item() == pytest.approx(loss.item(), rel=1e-13)
        torch.testing.assert_close(
            dict(ours.model.state_dict()), dict(theirs.model.state_dict()), rtol=1e-12, atol=1e-14
        )


def test_the_loop_reports_the_metrics_of_a_step():
    runtime = run(recipe())
    assert [step for step, metrics, _ in runtime.reports if "train/loss" in metrics] == list(range(STEPS))
    for step, metrics, _ in runtime.reports[:STEPS]:
        assert set(metrics) == {
            *(f"train/{name}" for name in ("loss", "metric_loss", "constraint", "eta", "lr", "images_per_s", "epoch")),
            *(f"train/{name}_{of}" for name in ("norm", "turn", "step_angle") for of in ("mean", "std")),
            "train/gradient_norm_mean",
        }
        assert metrics["train/eta"] == step / STEPS
        assert metrics["train/lr"] == Cosine(0.1, STEPS)(step)
        assert metrics["train/epoch"] == (step + 1) / 2
        weighted = metrics["train/metric_loss"] + metrics["train/eta"] * metrics["train/constraint"]
        assert metrics["train/loss"] == pytest.approx(weighted, rel=1e-12)
    # At the first step μ is the batch's mean, so that the constraint is the norms' variance.
    first = runtime.reports[0][1]
    assert first["train/norm_std"] ** 2 == pytest.approx(first["train/constraint"], rel=1e-10)
    free = recipe()
    free.objective.constraint = None
    assert set(first) - set(run(free).reports[0][1]) == {"train/constraint", "train/eta"}


def test_images_labels_and_views_are_those_of_the_step():
    views, seen = Noise(), []

    def row_labels(batch, rows):
        seen.append(batch.indices.tolist())
        return image_labels(batch, rows, 2)

    training = recipe(views=views, row_labels=row_labels)
    run(training)
    assert seen == [training.sampler.indices(step).tolist() for step in range(STEPS)]
    assert views.asked == [(step, slice(0, BATCH), BATCH) for step in range(STEPS)]


@pytest.mark.parametrize(
    ("log_every", "save_every", "monitor_every", "reported", "saved", "monitored"),
    [
        (1, 2, 2, range(12), [2, 4, 6, 8, 10, 12], [1, 3, 5, 7, 9, 11]),
        (5, 4, 6, [0, 1, 3, 5, 7, 9, 10, 11], [4, 8, 12], [5, 11]),
        (100, 8, 10, [0, 1, 3, 5, 7, 9, 11], [8, 12], [9, 11]),
        (100, 5, 7, [0, 1, 3, 4, 5, 6, 7, 9, 11], [5, 10, 12], [6, 11]),
    ],
)
def test_reports_saves_and_the_monitor_come_at_their_intervals(
    log_every, save_every, monitor_every, reported, saved, monitored
):
    cadence = Cadence(log_every_steps=log_every, save_every_steps=save_every, monitor_every_steps=monitor_every)
    runtime = run(recipe(), cadence)
    assert list(runtime.series("train/loss")) == list(reported)
    assert [step for step, _ in runtime.saves] == saved
    assert list(runtime.series("val/knn_top1")) == monitored
    with_norms = [step for step, _, norms in runtime.reports if norms is not None]
    assert with_norms == [0, 1, 3, 5, 7, 9, 11]  # the first step, and the ends of epochs
    assert all(norms.step == step for step, _, norms in runtime.reports if norms is not None)


def test_the_throughput_is_that_of_training_without_the_monitor(monkeypatch):
    clock, noise, runtime = FakeClock(), Noise(), FakeRuntime()
    monkeypatch.setattr(training_module, "time", clock)
    training = recipe(views=lambda *given: clock.sleep(0.5) or noise(*given))
    cadence = Cadence(log_every_steps=5, save_every_steps=4, monitor_every_steps=6)
    train(training, runtime, cadence, lambda steps_taken: clock.sleep(60) or {})
    rates = runtime.series("train/images_per_s")
    assert list(rates) == [0, 1, 3, 5, 7, 9, 10, 11]
    assert list(rates.values()) == pytest.approx([BATCH / 0.5] * len(rates), rel=1e-4)


def test_the_monitor_leaves_the_network_in_training():
    training = recipe()
    modes = []

    def monitor(steps_taken):
        modes.append(training.model.training)
        training.model.eval()
        return {}

    train(training, FakeRuntime(), Cadence(log_every_steps=1, save_every_steps=18, monitor_every_steps=2), monitor)
    assert modes == [True] * 6
    assert training.encoder[2].num_batches_tracked == STEPS


@pytest.mark.parametrize("stop_at", [1, 4, 9])
def test_a_stopped_and_resumed_run_ends_as_the_uninterrupted_one(stop_at):
    whole = run(recipe()).last_state()
    runtime = FakeRuntime(stop_at=stop_at)
    with pytest.raises(Stopped, match=f"^stopped after step {stop_at - 1}; the state is saved$"):
        run(recipe(), runtime=runtime)
    assert [step for step, _ in runtime.saves] == [stop_at]
    resumed = recipe()
    torch.manual_seed(99)
    first_step = resumed.restore(runtime.last_state())
    assert first_step == stop_at
    end = run(resumed, first_step=first_step)
    assert list(end.series("train/loss")) == list(range(stop_at, STEPS))
    assert_identical(end.last_state(), whole)
    assert whole["objective"]["constraint.mean_norm"] > 0
    assert whole["optimiser"]["state"]


def test_our_lars_resumes_a_state_of_lightlys():
    """Version 0.1 trained with it; its groups lack the options of timm's."""
    peer = pytest.importorskip("lightly.utils.lars")

    def with_optimiser(build):
        torch.manual_seed(0)
        fresh = recipe()
        return replace(fresh, optimiser=build(parameter_groups([fresh.encoder, fresh.head], 1e-3)))

    def earlier(groups):
        return peer.LARS(groups, lr=0.0, momentum=0.9)

    runtime = FakeRuntime(stop_at=5)
    with pytest.raises(Stopped):
        run(with_optimiser(earlier), runtime=runtime)
    resumed = with_optimiser(lambda groups: lars(groups, 0.9))
    end = run(resumed, first_step=resumed.restore(runtime.last_state())).last_state()
    whole = run(with_optimiser(earlier)).last_state()
    for name, weight in whole["encoder"].items():
        torch.testing.assert_close(end["encoder"][name], weight, rtol=1e-9, atol=1e-12)


def supervised() -> Recipe:
    """With all that an objective may hold: SFT's centres, which also decide which rows are generated, and μ."""
    torch.manual_seed(1)
    loss, transform = MultiSimilarityLoss(), SphericalFeatureTransform(2, 4, weight=0.5)
    objective = Objective(loss, SphericalConstraint(rho=0.5), LinearRamp(1.0, STEPS), transform).double()
    return recipe(objective=objective, row_labels=lambda batch, rows: batch.labels.repeat(2))


def test_the_centres_of_a_transform_are_resumed():
    whole = run(supervised()).last_state()
    runtime = FakeRuntime(stop_at=5)
    with pytest.raises(Stopped):
        run(supervised(), runtime=runtime)
    resumed = supervised()
    end = run(resumed, first_step=resumed.restore(runtime.last_state()))
    assert whole["objective"]["transform.centres"].abs().sum(dim=1).min() > 0
    assert any(end.series("train/generated_loss").values())
    assert_identical(end.last_state(), whole)


def test_a_stop_at_a_saved_step_saves_once_and_one_at_the_end_is_ignored():
    cadence = Cadence(log_every_steps=1, save_every_steps=2, monitor_every_steps=200)
    runtime = FakeRuntime(stop_at=2)
    with pytest.raises(Stopped):
        run(recipe(), cadence, runtime)
    assert [step for step, _ in runtime.saves] == [2]
    finished = run(recipe(), runtime=FakeRuntime(stop_at=STEPS))
    assert [step for step, _ in finished.saves] == [STEPS]


def test_a_requested_save_is_made_once_and_training_continues():
    cadence = Cadence(log_every_steps=1, save_every_steps=4, monitor_every_steps=200)
    runtime = run(recipe(), cadence, FakeRuntime(save_at=(1, 4)))
    assert [step for step, _ in runtime.saves] == [1, 4, 8, STEPS]  # step 4 is saved anyway
    assert_identical(runtime.last_state(), run(recipe()).last_state())


def test_a_finished_run_takes_no_step():
    runtime = run(recipe(), first_step=STEPS)
    assert runtime.reports == runtime.saves == []


def test_a_state_is_independent_of_the_steps_after_it():
    cadence = Cadence(log_every_steps=1, save_every_steps=2, monitor_every_steps=200)
    runtime = run(recipe(), cadence)
    states = [loaded(content)["encoder"]["1.weight"] for _, content in runtime.saves]
    assert all(not torch.equal(one, other) for one, other in zip(states[:-1], states[1:], strict=True))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_an_objective_that_is_not_finite_names_its_step(value):
    def spoiled(step):
        return value if step >= 5 else 0.1

    runtime = FakeRuntime()
    training = recipe(objective=Objective(NTXentLoss(), SphericalConstraint(), spoiled))
    with pytest.raises(FloatingPointError, match=rf"^the objective is {value} at step 5 \(metric loss .*rate .*\)$"):
        run(training, runtime=runtime)
    assert list(runtime.series("train/loss")) == [0, 1, 2, 3, 4]
    assert runtime.saves == []


def test_an_objective_that_is_not_finite_is_detected_between_reports():
    training = recipe(objective=Objective(NTXentLoss(), SphericalConstraint(), lambda step: math.nan if step else 0.1))
    rarely = Cadence(log_every_steps=1000, save_every_steps=2000, monitor_every_steps=2000)
    with pytest.raises(FloatingPointError, match="^the objective is nan at step 1 "):
        run(training, rarely)


def test_weights_that_are_not_finite_are_never_saved():
    """The loss of a step may be finite and its gradient not."""
    training, runtime, backwards = recipe(), FakeRuntime(), []

    def spoil(parameter):
        backwards.append(None)
        if len(backwards) == 4:  # the last step of the second epoch
            parameter.grad.fill_(math.nan)

    training.head.weight.register_post_accumulate_grad_hook(spoil)
    cadence = Cadence(log_every_steps=1, save_every_steps=2, monitor_every_steps=200)
    with pytest.raises(FloatingPointError, match=r"^head\.weight is not finite after step 3$"):
        run(training, cadence, runtime)
    assert [step for step, _ in runtime.saves] == [2]


def test_views_come_in_the_precision_and_layout_of_the_recipe():
    seen = []
    training = recipe(computation=replace(FLOAT64, channels_last=True))
    training.model.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    run(training)
    assert seen[0].dtype == torch.float64
    assert seen[0].is_contiguous(memory_format=torch.channels_last)


def test_bfloat16_is_for_the_network_only():
    training = recipe(computation=Computation(precision="bfloat16"))
    training.model.float()
    seen = []
    training.head.register_forward_hook(lambda module, inputs, outputs: seen.append(outputs.dtype))
    runtime = run(training)
    assert seen[:3] == [torch.float32, torch.bfloat16, torch.float32]  # the step between two measurements of its turn
    assert training.head.weight.dtype == training.head.weight.grad.dtype == torch.float32
    assert all(math.isfinite(value) for value in runtime.series("train/loss").values())
    with autocast(torch.device("cpu"), "float32"):
        assert not torch.is_autocast_enabled("cpu")


def fused_sgd(groups):
    return torch.optim.SGD(groups, lr=0.0, momentum=0.9, fused=True)  # as on a GPU


def foreach_lars(groups):
    return lars([{**group, "foreach": True} for group in groups], momentum=0.9)  # likewise


@pytest.fixture
def graphs(monkeypatch):
    return use_fake_graphs(monkeypatch)


@pytest.mark.parametrize("optimiser", [fused_sgd, foreach_lars])
def test_replayed_steps_equal_called_steps(optimiser, graphs):
    """The rate, η and the radius of SEC-EMA change at every step; none of them is part of what is recorded."""

    def trained(**changes):
        made = recipe(**changes)
        made = replace(made, optimiser=optimiser(parameter_groups([made.model], 1e-3)))
        runtime = run(made)
        return runtime.series("train/loss"), runtime.series("train/turn_mean"), runtime.last_state()

    losses, turns, state = trained(graphed=True)
    expected_losses, expected_turns, expected = trained()
    assert graphs.replays == STEPS - WARM_UP_CALLS
    assert losses == pytest.approx(expected_losses, rel=1e-12)
    assert turns == pytest.approx(expected_turns, rel=1e-9)
    torch.testing.assert_close(state, expected, rtol=1e-10, atol=1e-12)
    assert all(type(group["lr"]) is float for group in state["optimiser"]["param_groups"])


def test_a_replayed_run_can_be_resumed_without_replaying(graphs):
    def made(**changes):
        recipe_ = recipe(**changes)
        return replace(recipe_, optimiser=fused_sgd(parameter_groups([recipe_.model], 1e-3)))

    whole = run(made()).last_state()
    stopped = FakeRuntime(stop_at=7)
    with pytest.raises(Stopped):
        run(made(graphed=True), runtime=stopped)
    resumed = made()
    first_step = resumed.restore(stopped.last_state())
    torch.testing.assert_close(run(resumed, first_step=first_step).last_state(), whole, rtol=1e-10, atol=1e-12)
    assert graphs.replays == 7 - WARM_UP_CALLS


def test_a_resumed_run_keeps_the_options_of_its_own_optimiser():
    """A CPU's optimiser resumes a state of a GPU's."""
    of_gpu = recipe()
    of_gpu = replace(of_gpu, optimiser=fused_sgd(parameter_groups([of_gpu.model], 1e-3)))
    state = run(of_gpu).last_state()
    resumed = recipe()
    resumed = replace(resumed, optimiser=sgd(parameter_groups([resumed.model], 1e-3), momentum=0.9))
    resumed.restore(state)
    assert [group["fused"] for group in resumed.optimiser.param_groups] == [None, None]
    buffers = [each["momentum_buffer"] for each in resumed.optimiser.state_dict()["state"].values()]
    torch.testing.assert_close(buffers, [each["momentum_buffer"] for each in state["optimiser"]["state"].values()])
