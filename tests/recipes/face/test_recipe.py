import json
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import load_file

from ssl_sec.collectives import rank, world_size
from ssl_sec.data.decode import Decoding
from ssl_sec.data.folders.opening import open_folder
from ssl_sec.data.image_set import subset
from ssl_sec.data.standard_sets import open_digits
from ssl_sec.edges.folder.folder import RunFolder
from ssl_sec.edges.run.worker import Worker, work
from ssl_sec.errors import ConfigError, DataError, Stopped, StorageError
from ssl_sec.evaluation.plane import plane_grid
from ssl_sec.losses import normalized_softmax_lower_bound
from ssl_sec.recipes.face import recipe as face_recipe
from ssl_sec.recipes.face.config import FaceConfig
from ssl_sec.recipes.face.recipe import _Monitor, _WithFlips, build_recipe, drawn_pairs
from ssl_sec.recipes.face.recipe import run as recognise_faces
from ssl_sec.recipes.face.test_sets import PairsTestSet
from ssl_sec.settings import from_values
from tests.data.files import plain, write_digit_pairs, write_folder
from tests.fakes import FakeRuntime, FakeStore, assert_identical
from tests.recipes.pretraining.test_pretraining import assert_the_same_curve, curve
from tests.workers import on_workers

CPU = torch.device("cpu")
VALUES = {
    "recipe": "digits_faces",
    "data": {"name": "digits"},
    "augment": {"flip_probability": 0.5},
    "encoder": {"name": "ir18", "width": 0.0625},
    "head": {"name": "fc_bn", "dim": 16},
    "loss": {"name": "arcface", "scale": 16.0},
    "constraint": {"name": "sec_ema", "eta": 0.5, "rho": 0.4, "ramp": "capped"},
    "sampler": {"name": "shuffled"},
    "optimiser": {"name": "sgd_epochs", "decay_at_epochs": [1.5]},
    "runtime": {"name": "local", "device": "cpu", "precision": "float64"},
    "epochs": 2,
    "global_batch_size": 300,
    "log_every_steps": 1,
    "monitor": {"max_pairs": 40},
    "checkpoint": {"every_epochs": 1},
}
FLOAT32 = {"name": "local", "device": "cpu"}


def config(**changes) -> FaceConfig:
    return from_values(FaceConfig, {**VALUES, **changes})


def run(folder, machine=None, state=None, **changes):
    machine, store = machine or FakeRuntime(), FakeStore(folder, state)
    recognise_faces(config(**changes), machine, store)
    return machine, store


@pytest.fixture(scope="module")
def whole(tmp_path_factory, tested):
    """An uninterrupted run of two epochs of four steps on one worker."""
    return run(tmp_path_factory.mktemp("whole"), test_sets=[tested])


def on_a_worker(folder, changes):
    runtime = FakeRuntime(rank(), world_size())
    run(folder, runtime, **changes)
    return [(step, metrics) for step, metrics, _ in runtime.reports], runtime.last_state()


@pytest.mark.distributed
def test_two_workers_give_the_same_run(tmp_path, whole, tested):
    expected = whole[0].reports
    for reports, state in on_workers(2, tmp_path, on_a_worker, tmp_path, {"test_sets": [tested]}):
        assert_the_same_curve(reports, expected)
        torch.testing.assert_close(state, whole[0].last_state(), rtol=1e-7, atol=1e-9)


def work_on_a_worker(folder, changes):
    """A job as on a worker of a cluster, with the run's folder."""
    worker = Worker(rank=rank(), world_size=world_size(), device=CPU)
    work("face", {**VALUES, **changes}, RunFolder(folder), worker)


@pytest.mark.distributed
@pytest.mark.parametrize(("before", "after"), [pytest.param(2, 1, marks=pytest.mark.slow), (1, 2)])
def test_sharded_classes_equal_one_worker_also_if_the_number_of_workers_changes(tmp_path, whole, tested, before, after):
    changes = {"share_classes_from": 10, "test_sets": [tested]}
    folder = RunFolder(tmp_path / "run")
    folder.start({**VALUES, **changes})
    folder.stop_path.touch()
    on_workers(before, tmp_path, work_on_a_worker, folder.path, changes)
    assert folder.outcome() == "stopped"
    (checkpoint,) = folder.checkpoints_path.iterdir()
    assert len(list(checkpoint.glob("rows-*.safetensors"))) == before
    folder.stop_path.unlink()
    on_workers(after, tmp_path, work_on_a_worker, folder.path, changes)
    assert folder.outcome() == "finished"
    records = [json.loads(line) for line in folder.metrics_path.read_text().splitlines()]
    reports = [(record["step"], record["metrics"]) for record in records if "metrics" in record]
    assert_the_same_curve(reports, whole[0].reports)
    torch.testing.assert_close(load_file(folder.encoder_path), load_file(whole[1].encoder_path), rtol=1e-7, atol=1e-9)


def test_a_stopped_and_resumed_run_ends_bit_equal(tmp_path, whole, tested):
    runtime = FakeRuntime(stop_at=4)
    with pytest.raises(Stopped):
        run(tmp_path, runtime, test_sets=[tested])
    torch.manual_seed(99)
    resumed, _ = run(tmp_path, state=runtime.last_state(), test_sets=[tested])
    assert curve(runtime.reports + resumed.reports) == curve(whole[0].reports)
    assert_identical(resumed.last_state(), whole[0].last_state())


def test_an_unreadable_test_image_does_not_lose_the_training(tmp_path, whole):
    """Images that do not fit into memory are read when they are measured."""
    table, images = write_digit_pairs(tmp_path)
    test_set = {"name": "pairs", "title": "digits", "pairs": str(table), "images": str(images)}
    path = next(images.glob("digit 3/*.png"))
    content = path.read_bytes()
    path.write_bytes(content[:60])
    runtime = FakeRuntime()
    with pytest.raises(DataError, match=f"{path}: "):
        run(tmp_path, runtime, test_sets=[{**test_set, "resident_limit_mib": 0}])
    path.write_bytes(content)
    mended, _ = run(tmp_path, state=runtime.last_state(), test_sets=[{**test_set, "resident_limit_mib": 0}])
    assert [report[:2] for report in mended.reports] == [whole[0].reports[-1][:2]]


def test_reports_come_at_their_intervals(whole):
    runtime, _ = whole
    steps_per_epoch = 1437 // 300
    assert list(runtime.series("train/loss")) == list(range(2 * steps_per_epoch))
    assert list(runtime.series("train/verification_accuracy")) == [0, 3, 7]
    assert [step for step, _ in runtime.saves] == [4, 8]
    assert list(runtime.series("train/lr").values()) == pytest.approx([0.1] * 6 + [0.01] * 2)
    step, measured, _ = runtime.reports[-1]
    assert step == 8
    assert {"face/digits_accuracy", "face/digits_accuracy_std", "face/digits_eer"} <= set(measured)
    assert {f"face/digits_tar_at_far_1e-{power}" for power in (1, 2, 3)} <= set(measured)


def test_the_curve_of_a_test_set_ends_at_its_result_and_changes_nothing(tmp_path, whole, tested, monkeypatch):
    kept, measure = [], PairsTestSet.measure
    monkeypatch.setattr(PairsTestSet, "measure", lambda self, *how: kept.append(how[-1]) or measure(self, *how))
    runtime, store = run(tmp_path, test_sets=[tested], monitor={"max_pairs": 40, "test_sets": ["digits"]})
    accuracies = runtime.series("test/digits_accuracy")
    assert list(accuracies) == [0, 3, 7] and accuracies[7] == runtime.reports[-1][1]["face/digits_accuracy"]
    assert kept == [None, None, store.test_set_path("digits")]  # the last step's is the result
    assert runtime.reports[-1][1] == whole[0].reports[-1][1]
    assert_identical(runtime.last_state(), whole[0].last_state())
    with pytest.raises(
        ConfigError, match="monitor.test_sets: found 'lfw', must be titles of test_sets that .*: digits$"
    ):
        config(test_sets=[tested], monitor={"test_sets": ["lfw"]})


def test_people_are_separated(tmp_path, tested):
    changes = {"runtime": FLOAT32, "global_batch_size": 64, "epochs": 4, "augment": {"flip_probability": 0.0}}
    runtime, _ = run(tmp_path, test_sets=[tested], evaluation={"flips": "none"}, **changes)
    losses = list(runtime.series("train/metric_loss").values())
    assert losses[-1] < 0.5 * losses[0]
    accuracies = list(runtime.series("train/verification_accuracy").values())
    assert accuracies[-1] > 80 and accuracies[-1] > accuracies[0] + 10
    assert runtime.reports[-1][1]["face/digits_eer"] < 25


@pytest.mark.parametrize("flips", ["none", "sum_of_directions", "sum_of_embeddings"])
def test_mirror_images_are_merged_as_configured(tmp_path, tested, flips):
    runtime, _ = run(tmp_path, test_sets=[tested], epochs=0, evaluation={"flips": flips})
    measured = runtime.reports[-1][1]
    others, _ = run(tmp_path, test_sets=[tested], epochs=0, evaluation={"flips": flips, "pca": 5})
    assert others.reports[-1][1]["face/digits_accuracy"] != measured["face/digits_accuracy"]


@pytest.mark.parametrize("flips", ["none", "sum_of_directions", "sum_of_embeddings"])
def test_only_a_sum_of_embeddings_has_a_meaningful_norm(flips):
    """NormFace's components see the sum as it is; a sum of directions says nothing about norms."""
    torch.manual_seed(0)
    network, images = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 3)), torch.rand(5, 1, 3, 4)
    own, flipped = network(images), network(images.flip(-1))
    units = [torch.nn.functional.normalize(each) for each in (own, flipped)]
    expected = {
        "none": own,
        "sum_of_directions": torch.nn.functional.normalize(sum(units)) * own.norm(dim=1, keepdim=True),
        "sum_of_embeddings": (own + flipped) / 2,
    }
    torch.testing.assert_close(_WithFlips(network, flips)(images), expected[flips])


@pytest.mark.parametrize("loss", ["softmax", "c_triplet"])
def test_embeddings_of_two_dimensions_are_kept_with_the_probabilities_of_the_plane(tmp_path, loss, monkeypatch):
    monkeypatch.setattr(face_recipe, "_ON_THE_PLANE", 30)
    values = {"name": loss, **({"bias": True} if loss == "softmax" else {})}
    changes = {"head": {"name": "fc", "dim": 2}, "runtime": FLOAT32, "epochs": 0.25, "constraint": {"name": "none"}}
    runtime, store = run(tmp_path, loss=values, **changes)
    kept = torch.load(store.features_path, weights_only=True)
    assert kept["embeddings"].shape == (30, 2) and len(kept["labels"].unique()) > 5
    assert ("probabilities" in kept) == (loss == "softmax")
    if loss == "softmax":
        weight = runtime.last_state()["objective"]["loss.weight"]
        logits = plane_grid(kept["embeddings"]) @ weight[:, :2].T + weight[:, 2]
        torch.testing.assert_close(kept["probabilities"], logits.softmax(1)[:, 0])
        assert kept["probabilities"].min() < kept["probabilities"].max()
    else:
        assert {"train/agent_distortion", "train/agent_distortion_bound"} <= set(runtime.reports[1][1])


def test_held_out_people_are_watched_and_not_trained_on(tmp_path):
    runtime, store = run(tmp_path, held_out_share=0.3, epochs=1)
    assert store.described[0][1] < 1437
    assert list(runtime.series("val/verification_accuracy")) == [0, 2]
    assert runtime.series("train/verification_accuracy") == {}


@pytest.mark.parametrize("leave_out", [True, False])
def test_a_test_set_that_names_nobody_is_said_to_leave_nobody_out(tmp_path, tested, caplog, leave_out):
    images = write_folder(tmp_path / "flat", {f"{n}.png": plain(20 * n) for n in range(8)})
    pairs = [f"{n}.png,{n + 1}.png,{n % 2},{n % 4 // 2}" for n in range(7)]
    (tmp_path / "pairs.csv").write_text("\n".join(["first,second,same,fold", *pairs]))
    flat = {"name": "pairs", "title": "flat", "pairs": str(tmp_path / "pairs.csv"), "images": str(images)}
    with caplog.at_level("INFO"):
        run(tmp_path, test_sets=[tested, flat], epochs=0, leave_out_tested=leave_out)
    said = "test sets without names of people, none of whom can be left out: flat"
    assert caplog.messages.count(said) == int(leave_out)


@pytest.mark.parametrize(("epochs", "is_said"), [(3, True), (4, False), (0, False)])
def test_a_ramp_that_never_begins_is_said_to_train_without_the_constraint(caplog, epochs, is_said):
    never = config(constraint={"name": "sec", "eta": 0.5, "ramp": "face"}, epochs=epochs)
    with caplog.at_level("INFO"):
        build_recipe(never, open_digits("train"), FakeRuntime())
    assert any(text.startswith("constraint.ramp=face: η is 0 in all ") for text in caplog.messages) == is_said


def test_normfaces_bound_is_reported_beside_its_loss(tmp_path):
    runtime, _ = run(tmp_path, loss={"name": "normface"}, epochs=1)
    bounds, scales = (list(runtime.series(f"train/{name}").values()) for name in ("loss_lower_bound", "scale"))
    assert bounds == pytest.approx([normalized_softmax_lower_bound(10, scale) for scale in scales])
    assert len(set(scales)) > 1


@pytest.mark.parametrize(
    "loss",
    [
        {"name": "combined", "first": {"name": "normface"}, "second": {"name": "c_contrastive"}, "weight": 0.01},
        {"name": "combined", "first": {"name": "softmax"}, "second": {"name": "center"}, "weight": 0.003},
        {"name": "l2softmax", "scale": 10.0},
        pytest.param({"name": "c_triplet"}, marks=pytest.mark.slow),
    ],
)
def test_other_losses_train(tmp_path, loss):
    runtime, _ = run(tmp_path, loss=loss, epochs=2, transform={"name": "sft", "tail_below": 145})
    losses = list(runtime.series("train/metric_loss").values())
    assert losses[-1] < losses[0]
    assert max(runtime.series("train/generated_loss").values()) > 0


HEAD_AND_TAIL = {"name": "head_and_tail", "num_head": 6, "head_images": 90, "tail_images": 4}


def classified(folder, changes):
    """The accuracies of a small run on head and tail classes."""
    runtime = FakeRuntime(rank(), world_size())
    small = {"split": HEAD_AND_TAIL, "loss": {"name": "cosface", "scale": 16.0}, "global_batch_size": 60, "epochs": 3}
    run(folder, runtime, transform={"name": "sft", "tail_below": 15}, **{**small, **changes})
    assert runtime.series("train/generated_loss")[20] > 0
    return {name: value for _, metrics, _ in runtime.reports for name, value in metrics.items() if "_classes_" in name}


@pytest.mark.distributed
def test_head_and_tail_classes_are_classified_and_equally_on_two_workers_that_divide_them(tmp_path):
    alone = classified(tmp_path, {})
    assert alone["face/head_classes_accuracy"] > 60 > alone["face/tail_classes_accuracy"]
    assert on_workers(2, tmp_path, classified, tmp_path, {"share_classes_from": 10}) == 2 * [alone]


def test_a_small_part_of_an_epoch_is_a_step(tmp_path):
    runtime, _ = run(tmp_path, epochs=1e-3)
    assert len(runtime.series("train/loss")) == 1


def test_pair_losses_take_batches_of_classes(tmp_path):
    changes = {"loss": {"name": "triplet"}, "sampler": {"name": "classes", "images_per_class": 30}}
    runtime, _ = run(tmp_path, **changes, epochs=0.5)
    assert len(runtime.series("train/loss")) >= 2


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"loss": {"name": "triplet"}}, ConfigError, "sampler: found 'shuffled', must be 'classes' with loss=triplet"),
        ({"epochs": -1}, ConfigError, "epochs"),
        ({"global_batch_size": 2000}, ConfigError, "global_batch_size: found 2000"),
        ({"transform": {"name": "sft", "tail_below": 5}}, ConfigError, "transform.tail_below: found 5, must part"),
        ({"test_sets": [{"name": "bin", "path": "nowhere.bin"}]}, DataError, "nowhere.bin"),
        ({"test_sets": 2 * [{"name": "bin", "path": "x.bin"}]}, ConfigError, "test_sets.title: found 'x'"),
        (
            {"test_sets": [{"name": "bin", "path": f"{title}.bin"} for title in ("lfw", "LFW")]},
            ConfigError,
            "test_sets.title: found 'lfw', must be another for each test set, without regard to case",
        ),
        ({"test_sets": [{"name": "bin", "path": "x (1).bin"}]}, ConfigError, r"test_sets.title: found 'x \(1\)'"),
        ({"evaluation": {"fars": [2.0]}}, ConfigError, "evaluation.fars"),
        ({"evaluation": {"pca": 17}}, ConfigError, "evaluation.pca: found 17, must be 1 to 16, the dimension of the "),
        ({"share_classes_from": 1}, ConfigError, "share_classes_from"),
        (
            {"split": {**HEAD_AND_TAIL, "head_images": 101}},
            ConfigError,
            "split.head_images: found 101, must be at most",
        ),
        ({"split": {**HEAD_AND_TAIL, "tail_images": 90}}, ConfigError, "split.tail_images: found 90, must be below"),
        ({"split": HEAD_AND_TAIL, "held_out_share": 0.2}, ConfigError, "held_out_share: found 0.2, must be 0 with "),
        ({"split": HEAD_AND_TAIL, "loss": {"name": "center"}}, ConfigError, "loss: found 'center', must be one with a"),
        ({"split": {"name": "head_and_tail"}}, DataError, "digits/train: 10 classes found; at least 1501 needed"),
    ],
)
def test_a_wrong_run_is_refused_in_one_line(tmp_path, changes, error, message):
    with pytest.raises(error, match=message) as raised:
        run(tmp_path, **changes)
    assert "\n" not in str(raised.value)


def test_a_person_with_one_image_is_refused_where_a_loss_needs_two(tmp_path):
    for label, count in enumerate((1, 4, 5)):
        (tmp_path / "train" / str(label)).mkdir(parents=True)
        for number in range(count):
            Image.new("L", (8, 8), 9 * number).save(tmp_path / "train" / str(label) / f"{number}.png")
    changes = {
        "loss": {"name": "triplet"},
        "sampler": {"name": "classes", "images_per_class": 2},
        "global_batch_size": 6,
    }
    data = {"name": "folder", "root": str(tmp_path), "num_channels": 1}
    with pytest.raises(DataError, match="1 person has one image; loss=triplet needs two of each or more"):
        run(tmp_path, data=data, **changes)


def test_images_that_are_not_square_are_refused_before_test_sets_would_be_cut_to_squares(tmp_path, tested):
    pixels = {f"train/{person}/{n}.png": plain(n, width=6, height=8) for person in "ab" for n in range(4)}
    data = {"name": "folder", "root": str(write_folder(tmp_path, pixels)), "num_channels": 1}
    message = "folder/train: found images of 6 x 8 pixels, must be square, as those of test_sets are"
    with pytest.raises(DataError, match=message):
        run(tmp_path, data=data, test_sets=[tested], global_batch_size=4)


def test_components_that_no_people_are_left_for_are_refused_before_the_training(tmp_path):
    files = {f"{person}/{number}.png": plain(20 * person + number, 8, 8) for person in range(4) for number in range(3)}
    drawn = {"num_trials": 1, "num_gallery": 2, "num_training_people": 0}
    test_set = {"name": "blufr", "root": str(write_folder(tmp_path / "lfw", files)), **drawn}
    machine = FakeRuntime()
    with pytest.raises(DataError, match=r"evaluation.pca: found 2, but trial 1 of blufr tests everyone"):
        run(tmp_path, machine, test_sets=[test_set], evaluation={"pca": 2}, epochs=1)
    assert not machine.reports


def test_a_checkpoint_of_other_classes_is_refused(whole):
    state = {**whole[0].last_state(), "num_classes": 11}
    recipe = build_recipe(config(), open_digits("train"), FakeRuntime())
    with pytest.raises(StorageError, match="digits/train has 10 classes, but the checkpoint's run had 11"):
        recipe.restore(state)


def test_pairs_with_an_image_that_cannot_be_read_are_not_verified(tmp_path, caplog):
    content = {"a": plain(40), "b": plain(160), "c": b"damaged"}
    files = {f"train/{person}/{number:02d}.png": content[person] for person in content for number in range(20)}
    images = open_folder("train", write_folder(tmp_path, files), Decoding(on_bad_image="skip", resident_limit_mib=0))

    def embed(image_set, indices):
        return torch.stack([torch.eye(2)[int(level > 100)] for level in image_set.read(indices).images[:, 0, 0, 0]])

    # The next image that can be read, of the first person, stands in for those of the third.
    assert embed(images, torch.tensor([59])).tolist() == [[1, 0]]
    assert _Monitor("val", images, 100, embed, FakeRuntime())(0)["val/verification_accuracy"] == 100
    collapsed = _Monitor("val", images, 100, lambda _, indices: torch.ones(len(indices), 2), FakeRuntime())
    assert collapsed(0)["val/verification_eer"] == 50
    few = replace(images, bad_indices=set(range(31)))
    assert _Monitor("val", few, 100, embed, FakeRuntime())(0) == {}
    with caplog.at_level("INFO"):
        assert _Monitor("val", subset(images, torch.arange(5)), 100, embed, FakeRuntime())(0) == {}
    assert "val: fewer than 10 pairs of one person or of two; not verified" in caplog.messages


@given(
    sizes=st.lists(st.integers(1, 30), min_size=2, max_size=12), max_pairs=st.integers(10, 60), seed=st.integers(0, 99)
)
def test_drawn_pairs_are_half_of_one_person_and_half_of_two(sizes, max_pairs, seed):
    labels = torch.tensor([label for label, size in enumerate(sizes) for _ in range(size)])
    drawn = drawn_pairs(labels, max_pairs, seed)
    if drawn is None:
        assert sum(size - 1 for size in sizes) < 10 or max(sizes) > len(labels) // 2
        return
    first, second, same = drawn
    assert torch.equal(labels[first] == labels[second], same)
    assert (first != second).all()
    assert 10 <= int(same.sum()) == len(same) // 2 <= max_pairs
