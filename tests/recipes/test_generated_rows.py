"""Runs of metric learning with HDML, DVML and a memory of earlier batches."""

import pytest

from ssl_sec.errors import ConfigError
from tests.recipes.face.test_recipe import config as face_config
from tests.recipes.metric_learning.test_metric_learning import config, run
from tests.recipes.same_runs import assert_resumes_bit_equal, assert_the_same_on_workers

# An epoch has seven steps: both halves of HDML's loss count from then on.
SMALL = {
    "data": {"name": "digits", "num_train_classes": 2},
    "held_out_share": 0.0,
    "global_batch_size": 40,
    "sampler": {"name": "classes", "images_per_class": 20},
    "head": {"name": "bn_fc", "dim": 8},
}
METHODS = {
    "hdml": {**SMALL, "transform": {"name": "hdml", "alpha": 0.3, "hidden_dim": 16}},
    "dvml": {**SMALL, "transform": {"name": "dvml", "draws": 3, "first_phase_steps": 4, "hidden_dim": 16}},
    "memory": {**SMALL, "transform": {"name": "memory", "size": 100, "from_step": 2}},
}


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=[pytest.mark.slow] * (name == "dvml")) for name in METHODS]
)
def whole(request, tmp_path_factory):
    """The method's options, and its uninterrupted run of ten steps on one worker."""
    changes = METHODS[request.param]
    return changes, run(tmp_path_factory.mktemp("whole"), **changes)[0]


@pytest.mark.distributed
def test_two_workers_give_the_same_run(tmp_path, whole):
    changes, runtime = whole
    assert_the_same_on_workers(run, tmp_path, runtime, changes, num_of_first=1, rtol=1e-6, atol=1e-8)


def test_a_stopped_and_resumed_run_ends_bit_equal(tmp_path, whole):
    changes, expected = whole
    assert_resumes_bit_equal(run, tmp_path, expected, 5, **changes)


def test_the_state_has_all_that_it_learns(whole):
    changes, runtime = whole
    state = runtime.last_state()["objective"]
    parts = {key.split(".")[1] for key in state if key.startswith("transform.")}
    others = {"dvml": {"mean", "log_variance", "decoder"}, "memory": {"rows", "labels"}}
    if changes["transform"]["name"] in others:
        assert parts == others[changes["transform"]["name"]]
        return
    assert parts == {"generator", "classifier", "averages", "sums"}
    losses = list(runtime.series("train/metric_loss").values())
    generator_losses = list(runtime.series("train/generator_loss").values())
    assert state["transform.averages"].tolist() == pytest.approx([sum(losses[:7]) / 7, sum(generator_losses[:7]) / 7])


def test_the_losses_are_reported_and_that_of_the_generator_falls(whole):
    changes, runtime = whole
    if changes["transform"]["name"] == "memory":  # full after three steps
        assert [value > 0 for value in runtime.series("train/generated_loss").values()] == [False] * 3 + [True] * 7
        assert not runtime.series("train/generator_loss")
        return
    assert all(value > 0 for value in runtime.series("train/generated_loss").values())
    losses = list(runtime.series("train/generator_loss").values())
    assert len(losses) == 10 and losses[3] < losses[0]


@pytest.mark.parametrize(
    ("name", "loss"),
    [
        ("hdml", "npair_normalized"),
        ("dvml", "multi_similarity"),
        ("memory", "contrastive"),
        ("memory", "semihard"),
        *(
            pytest.param(*names, marks=pytest.mark.slow)
            for names in (
                *(("hdml", "multi_similarity"), ("hdml", "ranked_list")),
                *(("dvml", "npair_normalized"), ("dvml", "ranked_list")),
                *(("memory", name) for name in ("supcon", "multi_similarity", "circle", "ranked_list")),
            )
        ),
    ],
)
def test_the_losses_of_the_papers_can_be_trained(tmp_path, name, loss):
    changes = {**METHODS[name], "steps": 2, "loss": {"name": loss}, "monitor": {"every_steps": 2}}
    assert len(run(tmp_path, **changes)[0].series("train/generated_loss")) == 2


@pytest.mark.parametrize(("steps", "is_said"), [(0, False), (1, True), (3, True), (4, False)])
def test_a_memory_that_a_run_never_uses_is_said(tmp_path, caplog, steps, is_said):
    caplog.set_level("INFO")
    run(tmp_path, **METHODS["memory"], steps=steps, evaluation={"enabled": False})
    length = "1 step" if steps == 1 else f"{steps} steps"
    line = f"transform=memory: it is used from step 3 on, which this run of {length} does not reach"
    assert (line in caplog.messages) == is_said


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"transform": {"name": "hdml", "alpha": -1.0}}, r"^transform.alpha: found -1.0, must be ≥ 0$"),
        ({"transform": {"name": "hdml", "alfa": 1.0}}, r"transform.alfa: unknown key for 'hdml'"),
        ({"transform": {"name": "dvml", "draws": 0}}, r"^transform.draws: found 0, must be in \[1, 1048576\]$"),
        (
            {"transform": {"name": "dvml", "first_weights": [1.0, 1.0, 0.1]}},
            r"^transform.first_weights: found \[1.0, 1.0, 0.1\], must be four numbers, λ₁ to λ₄$",
        ),
        ({"transform": {"name": "dvml", "first_weights": [1.0, -1.0, 0.1, 1.0]}}, r"transform.first_weights.*-1.0"),
        ({"transform": {"name": "memory", "size": 0}}, r"^transform.size: found 0, must be in \[1, 4194304\]$"),
        (
            {"loss": {"name": "lifted_structure"}, "transform": {"name": "memory"}},
            "^loss: found 'lifted_structure', must be one that compares with remembered rows, with transform=memory: "
            "circle, contrastive, multi_similarity, ranked_list, semihard, supcon, triplet$",
        ),
        (
            {"loss": {"name": "triplet_disjoint"}, "sampler": {"name": "triplets"}, "transform": {"name": "hdml"}},
            r"^transform: found 'hdml', must be 'none' with loss=triplet_disjoint$",
        ),
    ],
)
def test_a_wrong_option_is_refused_in_one_line(changes, message):
    with pytest.raises(ConfigError, match=message) as raised:
        config(**changes)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("config", [config, face_config])
def test_rows_of_drawn_classes_need_a_loss_that_takes_rows_without_a_positive(config):
    changes = {"sampler": {"name": "classes", "images_per_class": 30}, "transform": {"name": "sft"}}
    assert config(**changes, loss={"name": "supcon"}).transform.name == "sft"
    with pytest.raises(ConfigError, match=r"^loss: found 'ntxent', must be .* transform=sft, such as 'supcon'$"):
        config(**changes, loss={"name": "ntxent"})
