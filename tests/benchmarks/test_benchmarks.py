import json
import multiprocessing
import sys
import warnings
import weakref
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch
from PIL import Image

from benchmarks import (
    communication,
    evaluation,
    growth,
    launchers,
    loader,
    losses,
    measure,
    options,
    simclr,
    throughput,
)
from benchmarks.accuracy import finetuning, pretraining, selection
from benchmarks.contest import Contest
from ssl_sec.embeddings.parts import Rows, encoded
from tests.data.files import encode, write_parquet
from tests.fakes import FakeClock
from tests.jobs import pretrain


def test_functions_take_turns():
    turns = []
    seconds = measure.time_in_turns({"a": lambda: turns.append("a"), "b": lambda: turns.append("b")}, rounds=2, calls=2)
    assert turns == ["a", "b", *"aabb", *"aabb"]
    assert {name: len(taken) for name, taken in seconds.items()} == {"a": 2, "b": 2}
    assert all(taken > 0 for rounds in seconds.values() for taken in rounds)


def test_a_function_called_before_a_turn_is_not_timed(monkeypatch):
    order, clock = [], FakeClock()
    monkeypatch.setattr(measure, "time", clock)

    def take(name, seconds):
        order.append(name)
        clock.sleep(seconds)

    seconds = measure.time_in_turns(
        {"a": lambda: take("turn", 3)}, 2, calls=2, warm_up=False, before={"a": lambda: take("before", 50)}
    )
    assert order == ["before", "turn", "turn"] * 2
    assert seconds == {"a": pytest.approx([3, 3], abs=1e-5)}


class Waiting:
    """Waits a number of times in each step, twice more at the end of an epoch, and once at the end of a call."""

    def __init__(self, waits_per_step, steps_per_epoch, steps_taken):
        self.waits_per_step, self.steps_taken = waits_per_step, steps_taken
        self.recipe = SimpleNamespace(sampler=SimpleNamespace(steps_per_epoch=steps_per_epoch))

    def steps(self, count):
        for _ in range(count):
            self.steps_taken += 1
            self.wait(self.waits_per_step + 2 * (self.steps_taken % self.recipe.sampler.steps_per_epoch == 0))
        self.wait(1)

    def wait(self, times):
        for _ in range(times):
            warnings.warn("called a synchronizing CUDA operation", stacklevel=1)


@pytest.mark.filterwarnings("ignore:called a synchronizing")
@pytest.mark.parametrize("waits_per_step", [0, 3])
@pytest.mark.parametrize(("steps_per_epoch", "steps_taken"), [(48, 0), (48, 40), (48, 47), (5, 12), (2000, 7)])
def test_waits_are_counted_inside_an_epoch(waits_per_step, steps_per_epoch, steps_taken, monkeypatch):
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: None)
    contender = Waiting(waits_per_step, steps_per_epoch, steps_taken)
    assert simclr.count_waits_per_step(contender) == waits_per_step


def test_the_ratio_is_the_median_over_rounds():
    assert measure.median_ratio([4.0, 9.0, 100.0], [2.0, 3.0, 1.0]) == 3.0


def test_peak_memory_counts_tensors_that_are_held_together():
    def allocate():
        first = torch.empty(2**20, dtype=torch.uint8)
        del first
        second, third = torch.empty(2**20, dtype=torch.uint8), torch.empty(2**21, dtype=torch.uint8)
        return second, third

    assert measure.measure_peak_memory(allocate) == 3 * 2**20


def test_figures_are_saved_with_their_environment(tmp_path, monkeypatch):
    monkeypatch.setattr(measure, "RESULTS", tmp_path / "results")
    path = measure.save_results("some", {"environment": measure.describe_environment(), "rows": [1.5]})
    values = json.loads(path.read_text())
    assert values["rows"] == [1.5]
    assert values["environment"]["cores"] >= 1
    assert values["environment"]["torch"] == torch.__version__


def test_every_loss_and_its_peer_are_measured_at_a_small_size(monkeypatch):
    monkeypatch.setattr(losses, "SECONDS_PER_TURN", 0.0)
    monkeypatch.setattr(losses, "FACES", 50)
    small = [comparison for comparison in losses.make_comparisons() if len(comparison.labels) <= 256]
    assert len(small) == 17
    for comparison in small:
        figures = losses.measure(comparison, torch.device("cpu"))
        assert figures["ours_ms"] > 0 and figures["times_as_fast"] > 0 and figures["ours_peak_mib"] > 0
        assert losses.format_row(figures)["loss"] == comparison.name


@pytest.mark.slow
def test_every_part_of_the_evaluation_agrees_with_its_peer():
    rows = evaluation.measure(num_images=1500, rounds=1)
    assert [row["part"] for row in rows] == [
        "features",
        "linear probe",
        "linear probe",
        "kNN",
        "Recall@K, K of SOP",
        "Recall@K, K of CUB",
        "k-means",
    ]
    for row in rows:
        assert row["ours_s"] > 0 and row["times_as_fast"] > 0 and row["limit_s"] > 0
        assert evaluation.format_row(row)["part"] == row["part"]
        # The probe and k-means are solved by other algorithms, whose results differ.
        allowed = {"linear probe": 15.0, "k-means": 5.0}.get(row["part"], 0.2)
        assert row["ours_result"] == pytest.approx(row["peer_result"], abs=allowed)


SMALL = simclr.Setting(encoder="resnet18", batch=8, precision="float32", width=0.125)


@pytest.mark.slow
def test_loaders_read_the_same_images_and_ours_begins_anywhere(tmp_path, monkeypatch):
    for name, value in {"NUM_IMAGES": 64, "NUM_SHARDS": 4, "BATCH": 8, "WINDOW": 16, "MIDDLE": 4}.items():
        monkeypatch.setattr(loader, name, value)
    monkeypatch.setattr("ssl_sec.data.shards.tar.IMAGES_PER_BLOCK", 8)
    num_bytes = loader.write_images(loader.draw_jpegs(64), tmp_path)
    assert num_bytes == sum(path.stat().st_size for path in (tmp_path / "files").iterdir())
    local = loader.measure_local(tmp_path, 16, 0, rounds=1)
    assert [row["loader"].partition(",")[0] for row in local] == ["ours", "webdataset", "DataLoader of files"]
    shards = sorted(map(str, tmp_path.glob("*.tar")))
    ours = loader.Ours(shards, 16, 0, tmp_path / "cache")
    every, rest = list(ours()), list(ours(5))
    assert all(torch.equal(one, other) for one, other in zip(every[5:], rest, strict=True))
    assert len(every) == 8 and every[0].shape == (8, 3, 16, 16)
    assert loader.count_images(loader.Webdataset(shards, 16, 0)()) == 64
    # Of a server: once for the index, once an epoch, and a part of it up to the middle.
    ours, *_ = loader.measure_remote(tmp_path, 16, 0, 0.001, num_bytes)
    assert ours["bytes an epoch / all images"] == pytest.approx(1, abs=0.1)
    assert ours["bytes with the index / all images"] < 2.1
    assert 0 < ours["bytes to it / all images"] < 0.8


def test_a_contender_that_fails_leaves_no_memory_behind():
    class Full:
        """A contender for which memory is too short."""

        def steps(self, count):
            big = torch.zeros(count)
            held.append(weakref.ref(big))
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

        def close(self):
            raise RuntimeError("it cannot even be closed")

    held, contest = [], Contest()
    contest.enter("full", Full)
    held.append(weakref.ref(contest.contenders["full"]))
    assert contest.attempt("full", lambda contender: contender.steps(10)) is None
    assert [one() for one in held] == [None, None] and "full" not in contest.contenders
    assert "out of memory" in contest.errors["full"]
    assert contest.attempt("full", lambda contender: 1) is None


@pytest.mark.slow
def test_contenders_take_turns_at_training(monkeypatch):
    monkeypatch.setitem(throughput.SECONDS_PER_TURN, "cpu", 0.0)
    images = simclr.draw_images(40, 16)
    rows = throughput.measure(SMALL, images, torch.device("cpu"), rounds=1)
    assert [row["contender"] for row in rows] == ["ours", "ours, contiguous", "plain loop", "lightly"]
    for row in rows:
        assert row["images_per_s"] > 0
        assert set(row["times_as_fast_as"]) == {"plain loop", "lightly"} - {row["contender"]}
    parts = rows[0]["shares"]
    assert [*parts] == ["data", "augmentation", "forward", "loss", "backward", "optimiser"]
    assert sum(parts.values()) == pytest.approx(1.0, abs=0.05)
    assert rows[0]["mfu"] > 0 and "mfu" not in rows[3]
    assert throughput.draw(rows).axes[0].get_title() == "resnet18, float32"
    assert not multiprocessing.active_children()  # lightly's loader has ended


@pytest.mark.slow
def test_a_contender_in_its_own_process_trains_and_measures_the_parts_of_a_step():
    ours = throughput.ContenderProcess("ours", SMALL, simclr.draw_images(40, 16), torch.device("cpu"))
    try:
        ours.steps(1)
        parts = ours.measure_parts()
        assert parts is not None and parts["flops_per_image"] > 0 and len(parts["shares"]) == 6
        with pytest.raises(TypeError):
            ours.steps("many")  # the error is raised here
    finally:
        ours.close()


def test_views_made_in_advance_equal_those_of_their_steps():
    device = torch.device("cpu")
    recipe = simclr.make_recipe(SMALL, simclr.draw_images(40, 16), device)
    ahead, rows = options.ViewsAhead(recipe, device), slice(0, SMALL.batch)
    for step in (0, 1, 2, 4):  # the last one does not follow another
        images = recipe.image_set.read(recipe.sampler.indices(step)).images
        torch.testing.assert_close(
            ahead(images, step, rows, SMALL.batch), recipe.views(images, step, rows, SMALL.batch), rtol=0, atol=0
        )


def test_operations_per_image_are_those_of_its_two_views():
    ours = simclr.Ours(SMALL, simclr.draw_images(40, 16), torch.device("cpu"))
    # ResNet-18 with the CIFAR stem at an eighth of the width and 16 pixels: multiply-adds of the forward pass.
    stages = [
        (8, 8, 16, 4),
        (16, 8, 8, 1),
        (16, 16, 8, 3),
        (32, 16, 4, 1),
        (32, 32, 4, 3),
        (64, 32, 2, 1),
        (64, 64, 2, 3),
    ]
    products = 8 * 3 * 9 * 16**2 + sum(9 * out * inputs * side**2 * count for out, inputs, side, count in stages)
    products += 16 * 8 * 8**2 + 32 * 16 * 4**2 + 64 * 32 * 2**2 + 64 * 64 + 64 * 128
    counted = simclr.count_flops_per_image(ours.recipe)
    # The backward pass takes twice the forward pass, except for the images, which need no gradient.
    assert counted == 2 * (3 * 2 * products - 2 * 8 * 3 * 9 * 16**2)


@pytest.mark.slow
def test_launchers_take_turns_and_leave_no_processes(monkeypatch):
    monkeypatch.setattr(launchers, "SECONDS_PER_TURN", 1.0)
    before = set(psutil.Process().children(recursive=True))
    figures = launchers.measure(workers=1, rounds=2)
    assert all(len(rates) == 2 and min(rates) > 0 for rates in figures["epochs_per_s"].values())
    assert len(figures["overhead_percent"]["each"]) == 2
    assert set(psutil.Process().children(recursive=True)) <= before


@pytest.mark.slow
def test_workers_send_what_the_formulas_compute():
    figures = growth.measure_workers(2)  # asserts it in each worker
    assert figures["calls"] == 10 + 3 * 21  # the head has a batch norm too, and the last step is saved
    assert figures["kib_without_gradients"] > 2 * 128 * 128 * 4 / 1024


def test_more_gpus_are_estimated_to_train_more_images_at_lower_efficiency():
    rows = communication.estimate()
    for fewer, more in zip(rows, rows[1:], strict=False):
        assert more["images_per_s"] > fewer["images_per_s"]
        assert more["efficiency_percent"] < fewer["efficiency_percent"] < 100


def test_the_growth_of_time_and_memory_is_drawn():
    device = torch.device("cpu")
    measured = {
        "rows": [growth.measure_rows(rows, device, peak=1e12) for rows in (64, 128)],
        "classes": [growth.measure_classes(classes, device, peak=1e12) for classes in (10, 20)],
    }
    assert measured["rows"][1]["dense_mib"] > measured["rows"][0]["dense_mib"]
    figure = growth.draw(measured)
    assert [len(axes.lines) for axes in figure.axes] == [2, 2, 2, 2]


def test_accuracies_are_measured_side_by_side_and_a_second_call_only_adds_seeds(tmp_path, monkeypatch):
    monkeypatch.setattr(measure, "RESULTS", tmp_path)
    generator = np.random.default_rng(0)
    for split in ("train", "test"):
        images = [encode(Image.fromarray(generator.integers(0, 256, (32, 32, 3), dtype=np.uint8))) for _ in range(40)]
        write_parquet(tmp_path / f"{split}.parquet", images, [0, 1] * 20)
    options = ["--images", "32", "--epochs", "1", "--width", "0.0625", "--batch", "8", "--seeds"]
    found = []
    for seeds in (["3"], ["3", "4"]):
        monkeypatch.setattr(sys, "argv", ["pretraining", "--data", str(tmp_path), *options, *seeds])
        pretraining.main()
        found.append(json.loads((tmp_path / "accuracy-cpu.json").read_text())["runs"])
    assert [(row["name"], row["seed"]) for row in found[1]] == [(n, s) for s in (3, 4) for n in ("ours", "lightly")]
    assert found[1][:2] == found[0]
    assert all(0 <= row["probe/top1"] <= 100 and row["seconds"] > 0 for row in found[1])


def test_choices_of_images_to_label_are_measured_side_by_side(tmp_path, monkeypatch):
    monkeypatch.setattr(measure, "RESULTS", tmp_path)
    labels = np.repeat(np.arange(3), 30)
    embeddings = np.eye(4, dtype=np.float32)[labels] + np.random.default_rng(0).normal(0, 0.1, (90, 4)).astype(
        np.float32
    )
    for split in ("train", "test"):
        (tmp_path / split).mkdir()
        rows = Rows(rows=np.arange(90), paths=[None] * 90, labels=labels, embeddings=embeddings)
        (tmp_path / split / f"{split}-00000-of-00001.parquet").write_bytes(encoded(rows, ("a", "b", "c"), {}))
    folders = ["--train", str(tmp_path / "train"), "--test", str(tmp_path / "test")]
    monkeypatch.setattr(sys, "argv", ["selection", *folders, "--labels", "1", "3", "--seeds", "0", "1"])
    selection.main()
    runs = json.loads((tmp_path / "selection-cpu.json").read_text())["runs"]
    assert [(row["labels"], row["seed"]) for row in runs] == [(1, 0), (1, 1), (3, 0), (3, 1)]
    assert [row["typical"] for row in runs] == [pytest.approx(100 / 3)] * 2 + [100, 100]
    assert all(row["random"] <= row["typical"] for row in runs)


@pytest.mark.slow
def test_fine_tunings_are_measured_side_by_side(tmp_path, monkeypatch):
    monkeypatch.setattr(measure, "RESULTS", tmp_path)
    for split in ("train", "test"):
        images = [encode(Image.new("RGB", (8, 8), colour)) for colour in ("red", "green") for _ in range(20)]
        write_parquet(tmp_path / f"{split}.parquet", images, [0] * 20 + [1] * 20)
    data = ["data=parquet", f"data.train=[{tmp_path}/train.parquet]", "data.image_size_px=8"]
    network = ["encoder=resnet18", "encoder.stem=imagenet", "epochs=0", "global_batch_size=16"]
    place = [f"output_dir={tmp_path / 'runs'}", "run_name=start", "recipe=r", "tracking.register_model=false"]
    pretrain(["runtime=local", "monitor.neighbours=2", *data, *network, *place])
    options = ["--size", "8", "--share", "1", "--epochs", "2", "--batch", "8", "--seeds", "0"]
    arguments = ["finetuning", "--run", str(tmp_path / "runs/r/start"), "--data", str(tmp_path), *options]
    monkeypatch.setattr(sys, "argv", arguments)
    finetuning.main()
    rows = json.loads((tmp_path / "finetuning-cpu.json").read_text())["runs"]
    assert [row["name"] for row in rows] == ["ours", "timm"]
    assert all(0 <= row["top1"] <= 100 and row["seconds"] > 0 for row in rows)
