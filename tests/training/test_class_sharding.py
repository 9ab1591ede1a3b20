import math
import threading
from dataclasses import replace

import pytest
import torch
from torch import nn

from ssl_sec import losses
from ssl_sec.augment.views import already_cropped
from ssl_sec.collectives import average_gradients, average_parameter_gradients, gather_objects, own_rows, rank
from ssl_sec.data.class_batches import ClassBatches
from ssl_sec.data.standard_sets import open_digits
from ssl_sec.errors import StorageError
from ssl_sec.losses import tiles
from ssl_sec.training import checkpoint, visibility
from ssl_sec.training import step as training_module
from ssl_sec.training.checkpoint import load_checkpoint, save_checkpoint, save_part, without_held_rows
from ssl_sec.training.class_sharding import HeldRows, draw_templates, held_templates, template_losses
from ssl_sec.training.objective import Objective
from ssl_sec.training.optimisers.groups import parameter_groups, sgd
from ssl_sec.training.recipe import Recipe, class_labels_of_views
from ssl_sec.training.schedules import Constant
from tests.fakes import FakeRuntime
from tests.losses.cases import rows
from tests.training import test_step
from tests.workers import on_workers, two_and_four

CPU = torch.device("cpu")
NUM_CLASSES, DIM, BATCH, STEPS = 11, 5, 12, 3
LOSSES = {
    "softmax": lambda: losses.SoftmaxLoss(NUM_CLASSES, DIM),
    "softmax_bias": lambda: losses.SoftmaxLoss(NUM_CLASSES, DIM, bias=True),
    "l2softmax": lambda: losses.L2SoftmaxLoss(NUM_CLASSES, DIM, scale=4.0),
    "modified_softmax": lambda: losses.ModifiedSoftmaxLoss(NUM_CLASSES, DIM),
    "normface": lambda: losses.NormFaceLoss(NUM_CLASSES, DIM),
    "sphereface": lambda: losses.SphereFaceLoss(NUM_CLASSES, DIM, scale=6.0),
    "cosface": lambda: losses.CosFaceLoss(NUM_CLASSES, DIM, scale=6.0),
    "arcface": lambda: losses.ArcFaceLoss(NUM_CLASSES, DIM, scale=6.0),
    "sub_centres": lambda: losses.ArcFaceLoss(NUM_CLASSES, DIM, scale=6.0, sub_centres=2),
    "magface": lambda: losses.MagFaceLoss(NUM_CLASSES, DIM, scale=6.0, least_norm=0.3, greatest_norm=0.9),
    "adaface": lambda: losses.AdaFaceLoss(NUM_CLASSES, DIM, scale=6.0, rho=0.3),
    "c_contrastive": lambda: losses.CContrastiveLoss(NUM_CLASSES, DIM, margin=2.0),
    "c_triplet": lambda: losses.CTripletLoss(NUM_CLASSES, DIM),
    "c_triplet_center": lambda: losses.CTripletLoss(NUM_CLASSES, DIM, margin=0.0, add_center=True),
    "proxy_anchor": lambda: losses.ProxyAnchorLoss(NUM_CLASSES, DIM, scale=8.0),
}
every_loss = pytest.mark.parametrize("name", LOSSES)


def trained(name, sharded, tile_entries=tiles.TILE_ENTRIES, first_step=0, folder=None):
    """Losses of some steps, the network's weights and gradients, and this worker's templates with their range."""
    tiles.TILE_ENTRIES = tile_entries
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(7, DIM), nn.Tanh(), nn.Linear(DIM, DIM)).double()
    loss = LOSSES[name]()
    draw_templates(loss, 3, sharded)
    for module in template_losses(loss):
        module.weight.data *= 30
    objective = Objective(loss, losses.SphericalConstraint(), Constant(0.1)).double()
    average_parameter_gradients(objective, [each.rows for each in held_templates(objective).values()])
    model = average_gradients(network, CPU)
    optimiser = sgd(parameter_groups([network, objective], 1e-3), 0.9)
    recipe = Recipe(
        encoder=network,
        head=nn.Identity(),
        model=model,
        objective=objective,
        optimiser=optimiser,
        learning_rate=Constant(0.3),
        image_set=replace(open_digits("test"), class_names=tuple(map(str, range(NUM_CLASSES)))),
        sampler=ClassBatches(labels=torch.arange(12) // 2, images_per_class=2, global_batch_size=BATCH, seed=0),
        views=already_cropped,
        total_steps=STEPS,
    )
    if first_step:
        recipe.restore(load_checkpoint(folder / f"step-{first_step:09d}", CPU, recipe.held_classes))
    values = []
    for step in range(first_step, STEPS):
        for group in optimiser.param_groups:
            group["lr"] = 0.3
        images, labels = rows(BATCH, 7, seed=step), torch.tensor([0, 3, 3, 10, 5, 6, 0, 9, 4, 2, 2, 1])
        own = own_rows(BATCH)
        optimiser.zero_grad()
        terms = objective(model(images[own]), labels[own], step)
        terms.total.backward()
        optimiser.step()
        values.append(terms.total.item())
        if folder is not None and not first_step:
            saved(folder, step + 1, recipe)
    parameters = [parameter.detach() for parameter in network.parameters()]
    gradients = [parameter.grad for parameter in network.parameters()]
    scale = [parameter.detach() for parameter in loss.parameters() if parameter.ndim == 0]
    scale += [average.double() for average in loss.buffers()]
    scale += [] if objective.distortion is None else [objective.distortion.distortion, objective.distortion.bound]
    tiles.TILE_ENTRIES = 1 << 24
    return values, [*parameters, *gradients, *scale], loss.weight.detach(), loss.weight.grad


def saved(folder, step, recipe):
    common, held = without_held_rows(recipe.state(step))
    parts = gather_objects(save_part(folder, step, held).name) if held else []
    if rank() == 0:
        save_checkpoint(folder, step, common, keep_last=9, parts=parts)
    gather_objects(None)  # until it is saved


def assert_equal(results, whole):
    for values, network, _, _ in results:
        torch.testing.assert_close(values, whole[0], rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(network, whole[1], rtol=1e-10, atol=1e-12)
    for part in (2, 3):
        torch.testing.assert_close(torch.cat([result[part] for result in results]), whole[part], rtol=1e-10, atol=1e-12)


@pytest.mark.distributed
@every_loss
@two_and_four
def test_workers_with_sharded_classes_equal_one_with_all(name, num_workers, tmp_path):
    whole = trained(name, sharded=False)
    results = on_workers(num_workers, tmp_path, trained, name, True)
    assert [len(result[2]) for result in results] == ([5, 6] if num_workers == 2 else [2, 3, 3, 3])
    assert_equal(results, whole)


def recognised(sharded):
    """Of each loss, which rows are, and the templates of their classes."""
    batch, labels, found = rows(60, DIM), torch.arange(60) % NUM_CLASSES, {}
    for name in ("softmax_bias", "arcface", "sub_centres"):
        loss = LOSSES[name]()
        draw_templates(loss, 3, sharded)
        loss.double()
        found[name] = loss.recognised(batch, labels), loss.templates_of(labels)
    return found


@pytest.mark.distributed
def test_rows_are_recognised_among_the_classes_of_all_workers(tmp_path):
    whole = recognised(False)
    assert all(0 < is_right.sum() < 60 for is_right, _ in whole.values())
    for part in on_workers(2, tmp_path, recognised, True):
        torch.testing.assert_close(part, whole, rtol=0, atol=0)


@every_loss
@pytest.mark.parametrize("classes_a_tile", [1, 3, 10])
def test_tiles_of_classes_equal_the_whole(name, classes_a_tile):
    assert_equal([trained(name, False, classes_a_tile * BATCH)], trained(name, False))


@pytest.mark.distributed
def test_tiles_of_sharded_classes_equal_the_whole(tmp_path):
    assert_equal(on_workers(2, tmp_path, trained, "arcface", True, 2 * BATCH), trained("arcface", False))


@pytest.mark.distributed
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), pytest.param(4, 2, marks=pytest.mark.slow)])
def test_a_run_resumes_with_another_number_of_workers(before, after, tmp_path):
    folder = tmp_path / "checkpoints"
    whole = trained("cosface", sharded=False)
    on_workers(before, tmp_path, trained, "cosface", True, 1 << 24, 0, folder)
    assert len(list((folder / "step-000000001").glob("rows-*"))) == before
    assert not list(folder.glob(".*"))
    results = on_workers(after, tmp_path, trained, "cosface", True, 1 << 24, 1, folder)
    assert_equal(results, (whole[0][1:], *whole[1:]))


def test_a_checkpoint_that_lacks_classes_is_refused(tmp_path):
    loss = LOSSES["cosface"]()
    draw_templates(loss, 3, sharded=True)
    common, held = without_held_rows({"loss": held_templates(loss)})
    parts = [save_part(tmp_path, 1, held).name]
    path = save_checkpoint(tmp_path, 1, common, keep_last=1, parts=parts)
    restored = load_checkpoint(path, CPU, slice(4, 9))["loss"]["weight"]
    assert torch.equal(restored, loss.weight[4:9])
    with pytest.raises(StorageError, match="templates of classes 4 to 20 are missing"):
        load_checkpoint(path, CPU, slice(4, 21))
    counted = save_checkpoint(tmp_path, 2, {"num_classes": 11}, keep_last=2)
    with pytest.raises(StorageError, match="step-000000002: its run had 11 classes, and this one has 21 or more"):
        load_checkpoint(counted, CPU, slice(4, 21))
    (path / "rows-000000000000.safetensors").unlink()
    with pytest.raises(StorageError, match=r"rows-000000000000.safetensors is missing"):
        load_checkpoint(path, CPU)


def save_parts(folder, monkeypatch, step, num_workers):
    """As `num_workers` workers do, with different values at every step."""
    rows = torch.arange(8.0).unsqueeze(1) + 10 * step
    monkeypatch.setattr(checkpoint, "world_size", lambda: num_workers)
    parts = []
    for number in range(num_workers):
        first, last = number * 8 // num_workers, (number + 1) * 8 // num_workers
        parts.append(save_part(folder, step, {'["weight"]': HeldRows(rows[first:last], first)}).name)
    return rows, parts


@pytest.mark.parametrize(("before", "after"), [(4, 2), (3, 2), (2, 4), (2, 2)])
def test_stale_parts_of_other_workers_are_ignored(before, after, tmp_path, monkeypatch):
    """They died before the state was written, and the run is resumed with another number of workers."""
    save_parts(tmp_path, monkeypatch, 1, before)
    rows, parts = save_parts(tmp_path, monkeypatch, 1, after)
    path = save_checkpoint(tmp_path, 1, {}, keep_last=1, parts=parts)
    assert len(list(path.glob("rows-*"))) == after
    assert torch.equal(load_checkpoint(path, CPU, slice(1, 8))["weight"], rows[1:])
    save_parts(tmp_path, monkeypatch, 3, after)
    save_checkpoint(tmp_path, 2, {}, keep_last=1)
    assert [folder.name for folder in tmp_path.glob(".*")] == [f".parts-000000003-of-{after}"]


def test_a_part_that_is_seen_late_is_waited_for(tmp_path, monkeypatch):
    rows, parts = save_parts(tmp_path, monkeypatch, 1, 2)
    (folder,) = tmp_path.glob(".parts-*")
    hidden = (folder / parts[1]).rename(tmp_path / "hidden")
    threading.Timer(0.3, hidden.rename, (folder / parts[1],)).start()
    path = save_checkpoint(tmp_path, 1, {}, keep_last=1, parts=parts)
    assert torch.equal(load_checkpoint(path, CPU, slice(0, 8))["weight"], rows)


def test_without_a_part_no_checkpoint_is_written_and_the_last_one_stays(tmp_path, monkeypatch):
    monkeypatch.setattr(visibility, "VISIBLE_WITHIN_S", 0.0)
    for step in (1, 2):
        rows, parts = save_parts(tmp_path, monkeypatch, step, 2)
        if step == 1:
            kept, first = save_checkpoint(tmp_path, step, {}, keep_last=1, parts=parts), rows
    (tmp_path / ".parts-000000002-of-2" / parts[1]).unlink()
    with pytest.raises(StorageError, match=f"checkpoint of step 2: .*/{parts[1]} is missing"):
        save_checkpoint(tmp_path, 2, {}, keep_last=1, parts=parts)
    assert [path.name for path in tmp_path.glob("*step-*")] == [kept.name]
    assert torch.equal(load_checkpoint(kept, CPU, slice(0, 8))["weight"], first)


@pytest.mark.parametrize(("before", "after"), [(4, 2), (3, 2), (2, 4), (1, 3)])
def test_parts_whose_rows_overlap_give_each_row_once(before, after, tmp_path, monkeypatch):
    """An old checkpoint may also have parts that another number of workers left."""
    monkeypatch.setattr(checkpoint, "_parts_folder", lambda folder, step: folder / ".parts")
    _, old = save_parts(tmp_path, monkeypatch, 1, before)
    rows, parts = save_parts(tmp_path, monkeypatch, 1, after)
    path = save_checkpoint(tmp_path, 1, {}, keep_last=1, parts=sorted({*old, *parts}))
    for first in range(8):
        for last in range(first + 1, 9):
            held = load_checkpoint(path, CPU, slice(first, last))["weight"]
            assert torch.equal(held, rows[first:last])


@pytest.mark.parametrize("spoiled_worker", [0, 1])
def test_templates_that_are_not_finite_are_never_saved(spoiled_worker, monkeypatch):
    """They may be in the part of another worker, which then has the higher number."""
    loss = losses.CosFaceLoss(2, 4)
    draw_templates(loss, 0, sharded=False)
    objective = Objective(loss, None, Constant(0.0))
    training, runtime = test_step.recipe(objective=objective, row_labels=class_labels_of_views), FakeRuntime()
    names = [*dict(training.model.named_parameters()), "objective.loss.weight"]
    if spoiled_worker == 0:
        loss.weight.data[1] = math.nan
    else:
        highest = names.index("objective.loss.weight")
        monkeypatch.setattr(training_module, "max_int_over_workers", lambda number, device: max(number, highest))
    with pytest.raises(FloatingPointError, match=r"^objective\.loss\.weight is not finite after step 3$"):
        training_module._save(training, runtime, 3)
    assert runtime.saves == []


def test_templates_depend_on_their_class_and_the_seed_alone():
    drawn = {}
    for number in (900, 3000):
        loss = losses.SoftmaxLoss(number, 4)
        draw_templates(loss, 7, sharded=False)
        drawn[number] = loss.weight.detach()
    assert torch.equal(drawn[900], drawn[3000][:900])
    assert drawn[3000].std().item() == pytest.approx(0.01, rel=0.05)
    assert len(drawn[3000].unique(dim=0)) == 3000
    loss = losses.SoftmaxLoss(900, 4)
    draw_templates(loss, 8, sharded=False)
    assert not torch.equal(loss.weight, drawn[900])


def test_a_loss_on_the_meta_device_becomes_real():
    with torch.device("meta"):
        loss = nn.ModuleList([losses.NormFaceLoss(20, 4), losses.CenterLoss(20, 4)])
    draw_templates(loss, 0, sharded=False)
    assert not any(tensor.is_meta for tensor in [*loss.parameters(), *loss.buffers()])
    assert loss[0].scale.item() > 1
    assert not loss[1].centres.any()
