"""The package as a library: its names, losses of two views, and the Python of the documentation."""

import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import lightly.loss
import pyarrow as pa
import pytest
import torch
from pyarrow import parquet
from safetensors.torch import save_file
from torch import nn

import ssl_sec
from ssl_sec import from_views, losses
from ssl_sec.collectives import own_rows, rank
from ssl_sec.data.config import DigitsConfig
from ssl_sec.data.standard_sets import open_digits
from ssl_sec.edges.folder.folder import RunFolder
from ssl_sec.errors import ConfigError
from ssl_sec.evaluation.classification.linear_probe import linear_probe
from ssl_sec.evaluation.features import extract_features
from ssl_sec.losses.base import require_labels, require_range
from ssl_sec.networks import Encoder, save_weights
from ssl_sec.recipes.probing.config import ProbeConfig
from ssl_sec.recipes.probing.recipe import linear_evaluation, open_splits
from ssl_sec.settings import to_values
from ssl_sec.training.recipe import Computation
from tests.data.files import plain, write_folder
from tests.fakes import FakeRuntime
from tests.jobs import configured
from tests.losses.cases import PAIR_LOSSES, rows
from tests.losses.slow import pairs
from tests.workers import on_workers

DOCS = Path(__file__).parents[1] / "docs"
Z1, Z2 = rows(8, 16, seed=1), rows(8, 16, seed=2)


def test_every_name_is_there_and_every_loss_has_one():
    assert set(ssl_sec.__all__) <= set(dir(ssl_sec))
    assert all(getattr(ssl_sec, name) is not None for name in ssl_sec.__all__)
    of_losses = {name for name in losses.__all__ if isinstance(getattr(losses, name), type)} - {"Rotation"}
    assert of_losses <= set(ssl_sec.__all__)
    with pytest.raises(AttributeError, match="module 'ssl_sec' has no attribute 'NTXent'"):
        _ = ssl_sec.NTXent


def test_importing_the_package_imports_nothing_else():
    code = "import sys, ssl_sec; dir(ssl_sec); print(sorted({'torch', 'numpy', 'hydra', 'mlflow'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"


@pytest.mark.parametrize("case", [case for case in PAIR_LOSSES if not case.of_triplets], ids=str)
def test_a_loss_of_two_views_is_that_of_their_rows_and_images(case):
    labels = torch.tensor([*range(8), *range(8)])
    loss = case.build()
    torch.testing.assert_close(loss(*from_views(Z1, Z2)), loss(torch.cat([Z1, Z2]), labels), rtol=0, atol=0)


def test_ntxent_of_two_views_is_lightlys():
    ours = ssl_sec.NTXentLoss(temperature=0.2)(*from_views(Z1, Z2))
    torch.testing.assert_close(ours, lightly.loss.NTXentLoss(temperature=0.2)(Z1, Z2))


def test_three_views_of_an_image_are_positives_of_each_other():
    embeddings, labels = from_views(Z1, Z2, Z1)
    assert embeddings.shape == (24, 16)
    assert labels.tolist() == [*range(8)] * 3


@pytest.mark.parametrize(
    "labels",
    [
        Z2,
        torch.zeros(8, dtype=torch.float64),
        torch.zeros(7, dtype=torch.int64),
        torch.zeros(8, 1, dtype=torch.int64),
        torch.zeros(8, dtype=torch.bool),
    ],
)
def test_invalid_labels_are_refused_with_the_right_call(labels):
    with pytest.raises(
        TypeError, match=r"NTXentLoss: found float64\[8, 16\] and .* loss\(\*ssl_sec.from_views\(z1, z2\)\)"
    ):
        require_labels("NTXentLoss", Z1, labels)
    require_labels("NTXentLoss", Z1, torch.zeros(8, dtype=torch.int32))


@pytest.mark.parametrize("embeddings", [Z1.to(torch.int64), Z1.to(torch.complex64), Z1[:, 0], Z1.unsqueeze(2)])
def test_embeddings_that_are_no_rows_of_floats_are_refused(embeddings):
    with pytest.raises(TypeError, match=r"TripletLoss: found .*\[8.*\] and int64\[8\], must be .* floats"):
        require_labels("TripletLoss", embeddings, torch.zeros(8, dtype=torch.int64))


def test_arguments_that_are_no_tensors_are_refused_by_their_type():
    with pytest.raises(TypeError, match=r"TripletLoss: found float64\[8, 16\] and list, must be tensors, "):
        require_labels("TripletLoss", Z1, [0] * 8)
    with pytest.raises(TypeError, match=r"TripletLoss: found ndarray and int64\[8\], must be"):
        require_labels("TripletLoss", Z1.numpy(), torch.zeros(8, dtype=torch.int64))


@pytest.mark.parametrize(("anchors", "found"), [((Z1, Z2), "tuple"), (slice(0, 8, 2), r"slice\(0, 8, 2\)")])
def test_mined_pairs_and_steps_in_place_of_anchors_are_refused(anchors, found):
    with pytest.raises(TypeError, match=f"TripletLoss: anchors: found {found}, must be a slice of rows with step 1"):
        require_range("TripletLoss", anchors)
    require_range("TripletLoss", slice(2, 8, 1))


def test_views_called_as_labels_are_a_type_error_outside_of_the_tests_too():
    code = "import torch, ssl_sec; ssl_sec.TripletLoss()(torch.randn(8, 16), torch.randn(8, 16))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr.splitlines()[-1] == (
        "TypeError: TripletLoss: found float32[8, 16] and float32[8, 16], must be tensors, embeddings of shape [batch, "
        "dim], floats, and labels, one whole number a row; of two views of the same images: "
        "loss(*ssl_sec.from_views(z1, z2))"
    )


@pytest.mark.usefixtures("unchecked_types")
@pytest.mark.parametrize("views", [(Z1,), (Z1, Z2[:4]), (Z1[0], Z2[0])])
def test_invalid_views_are_refused(views):
    with pytest.raises(ValueError, match="^from_views: found "):
        from_views(*views)


def blocks(page: str) -> list[str]:
    """The blocks of Python of a page."""
    return re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(encoding="utf-8"), re.DOTALL)


@pytest.fixture
def run_folder(tmp_path) -> Path:
    """The encoder's folder of a run on digits."""
    config = configured("pretrain", ["experiment=digits", "encoder.width=0.125"])
    folder = RunFolder(tmp_path / "runs" / "digits" / "mine")
    folder.start(to_values(config))
    folder.describe_data(open_digits("train"))
    torch.manual_seed(0)
    save_weights(config.encoder.build(1, 8).backbone, folder.encoder_path)
    folder.write_outcome("finished")
    return folder.path


@pytest.mark.parametrize("place", [0, 1])
def test_the_losses_of_the_documentation_run(place):
    names = {"z1": Z1, "z2": Z2}
    exec(blocks("losses.md")[place], names)
    assert names["loss"].shape == ()


def documented_step(block: str, world_size: int) -> list[list[float]]:
    """The gradients of the network by the loop of the documentation, on this worker's images."""
    torch.manual_seed(rank())
    network = nn.Linear(16, 8).double()
    nn.init.eye_(network.weight)
    nn.init.zeros_(network.bias)
    own = own_rows(8)
    exec(block, {"network": network, "first": Z1[own], "second": Z2[own]})
    assert world_size == 1 or len(Z1[own]) < 8
    return [parameter.grad.flatten().tolist() for parameter in network.parameters()]


@pytest.mark.distributed
def test_the_loop_of_the_documentation_on_two_workers_is_that_on_one(tmp_path):
    block = blocks("losses.md")[2]
    (alone,) = on_workers(1, tmp_path, documented_step, block, 1)
    for gradients in on_workers(2, tmp_path, documented_step, block, 2):
        for ours, theirs in zip(gradients, alone, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-9, abs=1e-12)


def test_the_loader_of_the_documentation_gives_every_image_once():
    block = blocks("data.md")[1]
    seen = []
    exec(block + "    seen.append((images, labels))\n", {"seen": seen})
    images, labels = (torch.cat(each) for each in zip(*seen, strict=True))
    train = open_digits("train")
    assert images.shape == (len(train), 1, 8, 8) and images.max() == 1
    assert torch.equal(labels.sort().values, train.labels.sort().values)


def test_the_classes_of_the_documentation_are_those_of_the_classifier(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs" / "photos_finetuned" / "mine"
    folder.mkdir(parents=True)
    save_file({"fc.weight": torch.eye(3, 2), "fc.bias": torch.tensor([0.0, 0.0, 0.5])}, folder / "head.safetensors")
    (folder / "data.json").write_text(json.dumps({"class_names": ["cat", "dog", "owl"]}))
    rows = {"path": ["a.jpg", "b.jpg", "c.jpg"], "embedding": [[0.0, 1.0], [1.0, 0.0], [0.2, 0.3]]}
    (tmp_path / "photos_embedded").mkdir()
    parquet.write_table(pa.table(rows), tmp_path / "photos_embedded" / "train-00000-of-00001.parquet")
    names = {}
    exec(blocks("evaluation.md")[0], names)
    assert dict(zip(rows["path"], names["rows"]["class"], strict=True)) == {
        "a.jpg": "dog",
        "b.jpg": "cat",
        "c.jpg": "owl",
    }


def test_the_table_of_the_documentation_becomes_a_set_with_labels(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    files = {f"photos/{name}.png": plain(grey) for name, grey in (("a", 1), ("b", 2), ("c", 3))}
    write_folder(tmp_path, files)
    table = zip(files, ("dog", "cat", "dog"), strict=True)
    (tmp_path / "labels.csv").write_text("file,label\n" + "".join(f"{file},{label}\n" for file, label in table))
    exec(blocks("data.md")[0], {})
    train = ssl_sec.open_parquet("train", "train.parquet")
    assert train.class_names == ("cat", "dog") and train.labels.tolist() == [1, 0, 1]
    assert train.read(torch.arange(3)).images[:, 0, 0, 0].tolist() == [1, 2, 3]


@pytest.mark.parametrize("page", ["metric-learning.md", "faces.md"])
def test_the_evaluation_of_the_documentation_runs(page):
    (block,) = blocks(page)
    *before, last = block.splitlines()
    names = {}
    exec("\n".join(before), names)
    assert eval(last, names)


def test_the_loss_of_the_documentation_is_its_slow_loop():
    """The class of "Extending" is the sum of the terms beside it, in shares of anchors too."""
    made, looped, _ = blocks("extending.md")
    names = {}
    exec(made, names)
    exec(looped, terms := dict(vars(pairs)))
    loss, labels = names["AlignmentLoss"](weight=0.5), torch.tensor([0, 1, 2, 3] * 2)
    expected = sum(terms["alignment"](Z1.tolist(), labels.tolist(), weight=0.5))
    shares = [loss(Z1, labels, anchors=slice(start, start + 4)) for start in (0, 4)]
    torch.testing.assert_close(loss(Z1, labels).item(), expected)
    torch.testing.assert_close(sum(shares), loss(Z1, labels))


def test_the_image_set_of_the_documentation_gives_the_features_of_its_images():
    *_, made = blocks("extending.md")
    exec(made, names := {})
    pixels = torch.arange(32 * 4, dtype=torch.uint8).reshape(32, 1, 2, 2)
    image_set = names["Pixels"](pixels, torch.arange(32) % 2, ("even", "odd"))
    features, labels = ssl_sec.extract_features(torch.nn.Flatten(), image_set, batch_size=8)
    torch.testing.assert_close(features, pixels.flatten(1) / 255)
    assert labels.tolist() == image_set.labels.tolist()


def test_the_probe_of_the_documentation_runs(run_folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    _, probing, of_own, *_ = blocks("evaluation.md")
    names = {}
    exec(probing, names)
    exec(of_own, names)
    assert 0.5 < names["top1"] <= 1 and names["recall"][1] <= names["recall"][10] and 0 < names["nmi"] < 1
    assert len([line for line in probing.splitlines() if line]) == 5
    assert capsys.readouterr().out == f"{names['result'].top1}\n"
    assert 0.5 < names["result"].top1 <= 1


def test_the_encoder_of_a_folder_is_the_one_that_was_trained(run_folder, tmp_path):
    encoder = ssl_sec.load_encoder(run_folder)
    torch.manual_seed(0)
    trained = Encoder(*ssl_sec.resnet(18, "cifar", 0.125, 1))
    torch.testing.assert_close(encoder.state_dict(), trained.state_dict(), rtol=0, atol=0)
    assert not encoder.training
    with pytest.raises(
        ConfigError, match=r"run: found .*, which holds no trained encoder; allowed: the folder of a run"
    ):
        ssl_sec.load_encoder(tmp_path)


def test_a_probe_of_features_is_that_of_the_job():
    encoder = nn.Flatten()
    config = ProbeConfig(epochs=8, learning_rates=(0.01, 0.1), decay_at=(0.6,), seed=3)
    splits = open_splits(DigitsConfig(), config)
    job = linear_evaluation(encoder, *splits, config, Computation(), FakeRuntime()).probe
    train, test = (extract_features(encoder, open_digits(split)) for split in ("train", "test"))
    ours = linear_probe(train, test, config)
    assert (ours.learning_rate, ours.held_out_top1, ours.top1) == (job.learning_rate, job.held_out_top1, job.top1)
    torch.testing.assert_close(ours.confusion, job.confusion, rtol=0, atol=0)


def test_no_module_is_long_and_no_folder_is_full():
    modules = [path for top in ("ssl_sec", "benchmarks", "tests") for path in (DOCS.parent / top).rglob("*.py")]
    assert len(modules) > 300
    assert [str(path) for path in modules if len(path.read_text(encoding="utf-8").splitlines()) > 400] == []
    folders = Counter(path.parent for path in modules if path.name != "__init__.py")
    assert {str(folder): count for folder, count in folders.items() if count > 15} == {}
