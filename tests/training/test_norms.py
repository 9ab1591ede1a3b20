import dataclasses
import json
import math
import statistics

import numpy as np
import pytest
import torch
from torch import nn

from ssl_sec.losses import NTXentLoss
from ssl_sec.losses.geometry import angles
from ssl_sec.networks import Network
from ssl_sec.training.cadence import Cadence
from ssl_sec.training.norms import NormHistogram, norm_histogram
from ssl_sec.training.optimisers.groups import parameter_groups, sgd
from ssl_sec.training.recipe import Computation
from ssl_sec.training.step import train_step
from tests.fakes import assert_identical
from tests.training.test_step import BATCH, recipe, run


def test_a_norm_histogram_counts_every_norm_and_survives_json():
    norms = 10 + torch.randn(500, generator=torch.Generator().manual_seed(0))
    histogram = norm_histogram(norms, step=7, num_bins=12)
    assert (histogram.step, len(histogram.counts), sum(histogram.counts)) == (7, 12, 500)
    expected, edges = np.histogram(norms.double().numpy(), bins=12)
    assert histogram.counts == expected.tolist()
    assert histogram.edges == pytest.approx(edges.tolist())
    assert NormHistogram(**json.loads(json.dumps(dataclasses.asdict(histogram)))) == histogram


def test_norms_that_are_not_finite_are_left_out():
    assert sum(norm_histogram(torch.tensor([1.0, torch.nan, torch.inf, 2.0]), step=0).counts) == 2
    assert sum(norm_histogram(torch.full((3,), torch.nan), step=0).counts) == 0


def test_a_histogram_needs_one_edge_more_than_bins():
    with pytest.raises(AssertionError, match="one edge more"):
        NormHistogram(0, [0.0, 1.0], [1, 2])


def test_turns_equal_those_of_sgd_on_the_embeddings():
    training = recipe()
    training.objective.constraint = None
    runtime = run(training)
    again = recipe()
    views = again.views(again.image_set.images[again.sampler.indices(0)], 0, slice(0, BATCH), BATCH).double()
    embeddings = again.model(views).embeddings.detach().requires_grad_()
    NTXentLoss(0.5)(embeddings, torch.arange(BATCH).repeat(2)).backward()
    rate, radians = 1e-3, []
    for row, stepped in zip(embeddings.detach(), embeddings.detach() - rate * embeddings.grad, strict=True):
        # Half the angle, whose sine is exact where the cosine of the angle would round to 1.
        apart = (row / row.norm() - stepped / stepped.norm()).norm() / 2
        radians.append(2 * math.asin(apart))
    tangents = [math.tan(angle) / rate for angle in radians]
    assert runtime.reports[0][1]["train/turn_mean"] == pytest.approx(statistics.fmean(tangents), rel=1e-9)
    gradient_norms = embeddings.grad.norm(dim=1)
    assert runtime.reports[0][1]["train/gradient_norm_mean"] == pytest.approx(gradient_norms.mean().item(), rel=1e-9)
    assert runtime.reports[0][1]["train/turn_std"] == pytest.approx(statistics.pstdev(tangents), rel=1e-9)


def test_the_angles_of_a_step_are_those_of_its_own_views():
    trained, again = recipe(), recipe()
    reported = run(trained).reports
    rows = slice(0, BATCH)
    for step in range(3):
        images = again.image_set.images[again.sampler.indices(step)]
        views = again.views(images, step, rows, BATCH).double()
        before = again.model(views).embeddings.detach()
        train_step(again, views, torch.arange(BATCH).repeat(2), step)
        statistics = {name: buffer.clone() for name, buffer in again.model.named_buffers()}
        after = torch.func.functional_call(again.model, statistics, views).embeddings.detach()
        cosines = torch.nn.functional.cosine_similarity(before, after).clamp(max=1)
        assert reported[step][1]["train/step_angle_mean"] == pytest.approx(cosines.acos().mean().item(), rel=1e-6)
        assert reported[step][1]["train/step_angle_std"] == pytest.approx(
            cosines.acos().std(correction=0).item(), rel=1e-5
        )


def test_the_angles_of_a_small_step_are_not_the_rounding_of_bfloat16():
    slow = {"computation": Computation(precision="bfloat16"), "learning_rate": lambda step: 1e-5}
    trained, again = recipe(**slow), recipe(**slow)
    for one in (trained, again):
        one.model.float()
    reported = run(trained).reports[0][1]["train/step_angle_mean"]
    images = again.image_set.images[again.sampler.indices(0)]
    views = again.views(images, 0, slice(0, BATCH), BATCH).float()
    before = again.model(views).embeddings.detach()
    train_step(again, views, torch.arange(BATCH).repeat(2), 0)
    expected = angles(before, again.model(views).embeddings.detach()).mean().item()
    assert 0 < expected < 1e-4  # bfloat16 rounds by 4e-3
    assert reported == pytest.approx(expected, rel=0.05)


def test_with_bfloat16_some_reports_alone_have_the_angles():
    trained = recipe(computation=Computation(precision="bfloat16"))
    trained.model.float()
    reported = run(trained, Cadence(log_every_steps=1, save_every_steps=3, monitor_every_steps=200)).reports
    measured = [step for step, metrics, _ in reported if "train/step_angle_mean" in metrics]
    assert (trained.sampler.steps_per_epoch, trained.total_steps) == (2, 12)
    assert measured == [0, 1, 2, 3, 5, 7, 8, 9, 11]


@pytest.mark.parametrize("precision", ["float64", "bfloat16"])
def test_a_report_changes_nothing_of_the_run(precision):
    often, seldom = (recipe(computation=Computation(precision=precision)) for _ in range(2))
    if precision == "bfloat16":
        often.model.float(), seldom.model.float()
    run(often)
    run(seldom, Cadence(log_every_steps=200, save_every_steps=200, monitor_every_steps=200))
    assert_identical(often.model.state_dict(), seldom.model.state_dict())


def with_a_batch_norm_in_two_places():
    torch.manual_seed(0)
    norm, head = nn.BatchNorm1d(9), nn.Linear(9, 4)
    encoder = nn.Sequential(nn.Flatten(), norm, nn.Linear(9, 9), norm)
    optimiser = sgd(parameter_groups([encoder, head], 1e-3), momentum=0.9)
    network = Network(encoder, head).double()
    return recipe(encoder=encoder, head=head, model=network, optimiser=optimiser, total_steps=1)


def test_the_angles_of_a_step_move_no_statistics_of_a_batch_norm_that_is_used_twice():
    trained, again = with_a_batch_norm_in_two_places(), with_a_batch_norm_in_two_places()
    run(trained)
    images = again.image_set.images[again.sampler.indices(0)]
    views = again.views(images, 0, slice(0, BATCH), BATCH).double()
    train_step(again, views, torch.arange(BATCH).repeat(2), 0)
    assert_identical(trained.model.state_dict(), again.model.state_dict())
