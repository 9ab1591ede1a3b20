"""Runs with settings drawn at random: two or three workers give the run of one, and a resume ends bit-equal."""

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from ssl_sec.errors import UserError
from ssl_sec.losses import CLASS_LOSSES, PAIR_LOSSES
from ssl_sec.recipes.face.recipe import run as recognise_faces
from ssl_sec.recipes.finetuning.recipe import run as finetune
from ssl_sec.recipes.metric_learning.recipe import run as learn_metric
from ssl_sec.recipes.pretraining.recipe import run as pretrain
from tests.jobs import configured
from tests.recipes.same_runs import assert_resumes_bit_equal, assert_the_same_on_workers, run_with_fakes

COMMON = (
    *("runtime=local", "runtime.precision=float64", "runtime.num_loader_workers=0"),
    *("encoder.width=0.0625", "log_every_steps=1"),
)
# In fewer dimensions dropout may keep none that two rows share; their cosine is 0, and any of them may be the nearest.
DIM = "head.dim=24"
PRETRAINING = (
    *(DIM, "experiment=digits", "epochs=1", "optimiser.learning_rate=0.01"),
    *("monitor.every_epochs=1", "monitor.neighbours=5", "checkpoint.every_epochs=1"),
)
METRIC_LEARNING = (
    *(DIM, "experiment=digits_retrieval", "steps=5", "optimiser.decay_at_steps=[3]", "data.max_images=600"),
    *("monitor.every_steps=3", "checkpoint.every_steps=3", "evaluation.enabled=false"),
)
FACES = (
    *(DIM, "recipe=digits", "encoder=ir18", "data.max_images=320", "monitor.max_pairs=40"),
    *("epochs=2", "optimiser.learning_rate=0.01", "optimiser.decay_at_epochs=[1.5]"),
)
FINETUNING = ("experiment=digits_finetune", "epochs=2", "optimiser.learning_rate=0.01", "checkpoint.every_epochs=1")
JOBS = {"pretrain": pretrain, "metric_learning": learn_metric, "face": recognise_faces, "finetune": finetune}


def run(folder, machine=None, state=None, *, job, overrides):
    return run_with_fakes(JOBS[job], configured(job, overrides), folder, machine, state)


def at_times(*overrides):
    """None of the overrides, or one of them."""
    return st.sampled_from([(), *((override,) for override in overrides)])


def options(group, names):
    return at_times(*(f"{group}={name}" for name in names))


def all_of(base, *parts):
    return st.tuples(*parts).map(lambda chosen: [*base, *COMMON, *(one for part in chosen for one in part)])


common = (
    options("constraint", ("none", "sec", "sec_ema", "l2reg", "fixed_radius")),
    options("head", ("bn_fc", "fc", "fc_bn", "maxout", "mlp2", "mlp3")),
    at_times("head.dropout=0.3"),
    at_times("optimiser.clip_norm=0.5"),
    at_times("grad_scale=0.5", "grad_scale=1"),
    at_times("grad_scale_by=batch"),
    at_times("runtime.recompute=true"),
    at_times("seed=7"),
)
pretraining = all_of(
    PRETRAINING,
    options("loss", (*PAIR_LOSSES, "byol", "mocov3")),
    options("optimiser", ("sgd", "lars", "adamw")),
    st.sampled_from((60, 61, 100)).map(lambda images: [f"data.max_images={images}"]),
    st.sampled_from((12, 24, 30)).map(lambda size: [f"global_batch_size={size}"]),
    at_times("augment.num_views=3", "augment.num_views=4"),
    # Smaller ones may be black, and of two equal rows either may be the nearest.
    at_times("augment.small_views=2 augment.small_view_min_scale=0.4 augment.small_view_max_scale=0.6").map(
        lambda chosen: [one for each in chosen for one in each.split()]
    ),
    at_times("positives=classes"),
    at_times("augment.solarise_probability=0.4", "augment.quarter_turn_probability=0.4"),
    at_times("augment.second_blur_probability=0.3", "augment.second_solarise_probability=0.4"),
    at_times("cut_init=2"),
    at_times("monitor.online_probe=false"),
    *common,
)
# The batch, and the images of each of two to four classes in it.
batches = st.sampled_from([(24, 6), (24, 8), (24, 12), (60, 15), (60, 20)])
metric_learning = all_of(
    METRIC_LEARNING,
    options("loss", (*PAIR_LOSSES, *CLASS_LOSSES)),
    options("transform", ("none", "sft", "sftd", "ftl", "hdml", "dvml", "memory")),
    options("sampler", ("classes", "pairs", "shuffled", "triplets")),
    options("optimiser", ("adam", "adamw", "sgd_steps")),
    batches.map(lambda batch: [f"global_batch_size={batch[0]}", f"sampler.images_per_class={batch[1]}"]),
    at_times("class_sample_rate=0.5"),
    *common,
)


faces = all_of(
    FACES,
    options("loss", CLASS_LOSSES),
    options("transform", ("none", "sft", "sftd")),
    options("sampler", ("shuffled", "classes", "triplets")),
    options("optimiser", ("sgd_epochs", "adamw")),
    st.sampled_from((60, 90)).map(lambda size: [f"global_batch_size={size}"]),
    at_times("held_out_share=0.3"),
    at_times("class_sample_rate=0.5"),
    *common,
)
finetuning = all_of(
    FINETUNING,
    options("optimiser", ("nesterov", "adamw")),
    st.sampled_from((24, 36)).map(lambda size: [f"global_batch_size={size}"]),
    at_times("labels_share=1 labels_per_class=5", "labels_share=0.3").map(
        lambda chosen: [one for each in chosen for one in each.split()]
    ),
    at_times("mixup=0.4"),
    at_times("balanced=true"),
    at_times("evaluated=last"),
    at_times("trained_stages=0", "trained_stages=2"),
    at_times("optimiser.layer_decay=0.7"),
    *common,
)


def taken(job, overrides):
    """The overrides without those that are refused beside the others; None if nothing is left to be left out."""
    while True:
        try:
            configured(job, overrides)
        except UserError as error:
            key = str(error).partition(":")[0]
            fewer = [one for one in overrides if not one.startswith(f"{key}=")]
            if len(fewer) == len(overrides):
                return None
            overrides = fewer
        else:
            return overrides


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("job", "drawn"),
    [
        ("pretrain", pretraining),
        ("metric_learning", metric_learning),
        ("face", faces),
        ("finetune", finetuning),
    ],
)
def test_the_same_run_on_any_number_of_workers_and_after_a_stop(job, drawn, tmp_path_factory):
    compared, num_of_first = [], int(job == "finetune")  # whose test images the first worker alone measures

    @settings(max_examples=30, phases=[Phase.generate])  # each example takes seconds, so that none is made simpler
    @given(drawn, st.sampled_from((2, 3)))
    def compare(overrides, num_workers):
        overrides, folder = taken(job, overrides), tmp_path_factory.mktemp("runs")
        if overrides is None:
            return
        changes = {"job": job, "overrides": overrides}
        try:
            whole, _ = run(folder, **changes)
        except UserError:  # the images do not fit
            return
        # RankMe and others of so small a network, and steps at high rates, enlarge what is rounded.
        near = {"num_of_first": num_of_first, "rel": 1e-6, "rtol": 1e-5, "atol": 1e-7}
        assert_the_same_on_workers(run, folder, whole, changes, num_workers=num_workers, **near)
        assert_resumes_bit_equal(run, folder, whole, 1, **changes)
        compared.append(overrides)

    compare()
    assert len(compared) >= 10
