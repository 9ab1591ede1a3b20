"""Steps recorded as CUDA graphs and replayed equal called steps."""

from dataclasses import replace

import pytest
import torch

from ssl_sec.training import step as training
from ssl_sec.training.replaying import WARM_UP_CALLS, CUDAGraphs
from tests.fakes import assert_identical
from tests.gpu.runs import deterministic, recipe_on, trained
from tests.gpu.waiting import forbid

STEPS = 12


@pytest.fixture
def recordings(monkeypatch):
    """The graphs that are recorded."""
    made = []

    class Noted(CUDAGraphs):
        def record(self, function):
            recorded = super().record(function)
            made.append(recorded)
            return recorded

    monkeypatch.setattr(training, "CUDAGraphs", Noted)
    return made


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize(("optimiser", "clip_norm"), [("sgd", None), ("sgd", 0.1), ("lars", None), ("adamw", 0.1)])
def test_replayed_steps_equal_called_steps(gpu, recordings, optimiser, clip_norm, precision):
    options = {"optimiser": optimiser, "precision": precision, "total_steps": STEPS}
    ends = []
    for graphs in (False, True):
        recipe, runtime = recipe_on(gpu, graphs=graphs, **options)
        with deterministic():
            trained(replace(recipe, clip_norm=clip_norm), runtime, log_every_steps=1)
        ends.append((runtime.series("train/loss"), runtime.series("train/turn_mean"), runtime.last_state()))
    (expected_losses, expected_turns, expected), (losses, turns, state) = ends
    assert len(recordings) == 1 and list(losses) == list(range(STEPS))
    tolerance = 1e-3 if precision == "float32" else 3e-2
    assert losses == pytest.approx(expected_losses, rel=tolerance)
    assert turns == pytest.approx(expected_turns, rel=10 * tolerance)
    torch.testing.assert_close(
        state["objective"]["constraint.mean_norm"],
        expected["objective"]["constraint.mean_norm"],
        rtol=tolerance,
        atol=0,
    )
    torch.testing.assert_close(state["encoder"], expected["encoder"], rtol=10 * tolerance, atol=tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize("clip_norm", [None, 0.1])
def test_a_replayed_step_waits_for_nothing(gpu, recordings, clip_norm):
    recipe, runtime = recipe_on(gpu, graphs=True, total_steps=STEPS)
    forbidden = []

    def views(images, step, *rows):
        is_forbidden = step > WARM_UP_CALLS and step not in (4, 6, 9, STEPS - 1)  # the recording, and reports
        forbid(gpu, is_forbidden)
        forbidden.extend([step] * is_forbidden)
        return recipe.views(images, step, *rows)

    try:
        trained(replace(recipe, views=views, clip_norm=clip_norm), runtime, log_every_steps=6)
    finally:
        forbid(gpu, False)
    assert len(recordings) == 1 and forbidden == [5, 7, 8, 10]


@pytest.mark.gpu
@pytest.mark.parametrize("optimiser", ["sgd", "adamw"])
def test_a_run_resumes_in_the_middle_of_replays(gpu, recordings, optimiser):
    with deterministic():
        whole, runtime = recipe_on(gpu, graphs=True, optimiser=optimiser)
        trained(whole, runtime)
        stopped, broken_off = recipe_on(gpu, graphs=True, optimiser=optimiser)
        broken_off.stop_at = 3  # the third report is that of step 6
        trained(stopped, broken_off)
        resumed, after = recipe_on(gpu, graphs=True, optimiser=optimiser)
        trained(resumed, after, first_step=resumed.restore(broken_off.last_state()))
    assert len(recordings) == 3
    assert_identical(after.last_state(), runtime.last_state())
