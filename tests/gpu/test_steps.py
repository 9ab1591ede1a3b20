"""Whole training steps: they wait for no GPU between two reports, and a resumed run equals an uninterrupted one.

What holds for a resume on a GPU: the images, their views, dropout, the learning rate and η of each step are the
same bit for bit, being functions of (seed, step), and so is all of the state that is saved. The weights that follow are
the same bit for bit where torch is asked for deterministic algorithms (`torch.use_deterministic_algorithms`, with
CUBLAS_WORKSPACE_CONFIG=:4096:8); else as close as two runs are, since a GPU adds some gradients up in any order.
"""

from dataclasses import replace

import pytest
import torch

from tests.fakes import assert_identical
from tests.gpu.runs import deterministic, recipe_on, trained
from tests.gpu.waiting import forbid

REPORTED = 6


@pytest.mark.parametrize("precision", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
@pytest.mark.parametrize(
    ("optimiser", "constraint", "fused", "clip_norm"),
    [
        ("sgd", "sec", None, None),
        ("sgd", "sec_ema", False, 0.1),
        ("lars", "sec_ema", None, None),
        ("adamw", "sec", None, 0.1),
    ],
)
def test_the_host_waits_for_nothing_between_two_reports(device, precision, optimiser, constraint, fused, clip_norm):
    options = {"precision": precision, "optimiser": optimiser, "constraint": constraint, "fused": fused}
    recipe, runtime = recipe_on(device, **options)
    forbidden = []

    def views(images, step, *rows):
        """From here to the next step's views, the reading of its batch with them."""
        is_forbidden = step % REPORTED != 0 and step != recipe.total_steps - 1 and (step + 1) % 5 != 0
        forbid(device, is_forbidden)
        forbidden.extend([step] * is_forbidden)
        return recipe.views(images, step, *rows)

    try:
        trained(replace(recipe, views=views, clip_norm=clip_norm), runtime, log_every_steps=REPORTED)
    finally:
        forbid(device, False)
    assert forbidden == [1, 2, 3, 5, 7, 8, 10]  # steps 4 and 9 end an epoch
    assert [step for step, _, _ in runtime.reports] == [0, 4, 6, 9, 11, 11]


def watched(recipe):
    """The recipe, and the views that it will have made, by step."""
    made = {}

    def views(images, step, *rows):
        made[step] = recipe.views(images, step, *rows)
        return made[step]

    return replace(recipe, views=views), made


@pytest.mark.parametrize(
    ("fused", "is_asked_for"),
    [
        pytest.param(None, True, id="one launch where possible-deterministic"),
        pytest.param(None, False, id="one launch where possible-as fast as can be", marks=pytest.mark.slow),
        pytest.param(False, True, id="kornia-deterministic", marks=pytest.mark.slow),
        pytest.param(False, False, id="kornia-as fast as can be"),
    ],
)
def test_a_resumed_run_goes_on_as_if_nothing_had_been(device, fused, is_asked_for):
    with deterministic(is_asked_for):
        recipe, runtime = recipe_on(device, fused=fused)
        recipe, expected_views = watched(recipe)
        trained(recipe, runtime)
        whole = runtime.last_state()

        recipe, stopped = recipe_on(device, fused=fused)
        stopped.stop_at = 3  # the third report is that of step 6
        trained(recipe, stopped)
        state = stopped.last_state()
        assert state["step"] == 7

        torch.manual_seed(99)
        recipe, resumed = recipe_on(device, fused=fused)
        recipe, views = watched(recipe)
        trained(recipe, resumed, first_step=recipe.restore(state))
    assert list(views) == [7, 8, 9, 10, 11]
    assert all(torch.equal(views[step], expected_views[step]) for step in views)
    end = resumed.last_state()
    if is_asked_for or device.type == "cpu":
        assert_identical(end, whole)
    else:
        torch.testing.assert_close(end["encoder"], whole["encoder"], rtol=1e-2, atol=4e-3)
        torch.testing.assert_close(end["objective"], whole["objective"], rtol=5e-3, atol=1e-5)
    assert whole["objective"]["constraint.mean_norm"] > 0


@pytest.mark.parametrize(
    ("optimiser", "channels_last"),
    [
        ("sgd", True),
        pytest.param("sgd", False, marks=pytest.mark.slow),
        pytest.param("lars", True, marks=pytest.mark.slow),
        pytest.param("lars", False, marks=pytest.mark.slow),
        pytest.param("adamw", True, marks=pytest.mark.slow),
        ("adamw", False),
    ],
)
def test_a_run_resumes_in_the_other_memory_layout(device, optimiser, channels_last):
    """Fused optimisers on a GPU refuse a state that is laid out in another way than the weights."""
    with deterministic():
        whole, runtime = recipe_on(device, optimiser=optimiser)
        trained(whole, runtime)
        stopped, broken_off = recipe_on(device, optimiser=optimiser, channels_last=channels_last)
        broken_off.stop_at = 3  # the third report is that of step 6
        trained(stopped, broken_off)
        resumed, after = recipe_on(device, optimiser=optimiser, channels_last=not channels_last)
        trained(resumed, after, first_step=resumed.restore(broken_off.last_state()))
    torch.testing.assert_close(after.last_state()["encoder"], runtime.last_state()["encoder"], rtol=3e-2, atol=1e-2)
