"""Unusable input gives one line on stderr and an exit code for its kind."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ssl_sec.edges.command_line import run_job
from ssl_sec.edges.composition.compose import compose
from ssl_sec.edges.folder.folder import RunFolder
from ssl_sec.edges.report.report import run_report
from ssl_sec.edges.run.driver import require_files
from ssl_sec.edges.run.worker import Worker, work
from ssl_sec.errors import MissingDataError, UserError
from ssl_sec.networks.config import HEAD_CONFIGS, ResNetConfig
from ssl_sec.training.config import LocalConfig, RayConfig
from tests.data.files import plain, write_folder
from tests.edges.conftest import QUICK
from tests.jobs import ablate, align, configured, export, face, finetune, metric_learning, pretrain, probe, replay

JOBS = {
    "pretrain": pretrain,
    "finetune": finetune,
    "metric_learning": metric_learning,
    "face": face,
    "ablate": ablate,
    "probe": probe,
    "export": export,
    "align": align,
    "replay": replay,
    "report": run_report,
}
# What else each needs.
NEEDED = {
    "probe": ["run=abc", "runtime=local"],
    "export": ["run=abc", "format=timm"],
    "align": ["images=a", "landmarks=b", "output=c"],
    "replay": ["folder=a"],
    "report": ["table=5"],
}


@pytest.fixture
def refused(capsys, tmp_path, monkeypatch):
    """The one line with which a job refuses its arguments, leaving nothing behind."""
    monkeypatch.chdir(tmp_path)

    def line(job: str, arguments: list[str], code: int = 2) -> str:
        there = sorted(tmp_path.rglob("*"))
        given = {argument.partition("=")[0] for argument in arguments}
        needed = [each for each in NEEDED.get(job, ["runtime=local"]) if each.partition("=")[0] not in given]
        assert run_job(job, JOBS[job], [*needed, *arguments]) == code
        output = capsys.readouterr().err.strip()
        assert output.startswith("error: ") and "\n" not in output and len(output) < 1000
        assert sorted(tmp_path.rglob("*")) == there
        return output.removeprefix("error: ")

    return line


FOLDERS = [
    ("export", "output"),
    ("report", "output"),
    *(("align", key) for key in ("images", "landmarks", "output")),
]
PLACES = [
    *((job, "output_dir") for job in ("pretrain", "metric_learning", "face", "ablate", "probe", "export", "report")),
    ("replay", "folder"),
]


@pytest.mark.parametrize(("job", "key"), FOLDERS)
@pytest.mark.parametrize("url", ["s3://bucket/runs", "file:///tmp/runs"])
def test_a_url_is_refused_where_a_folder_is_needed(refused, job, key, url):
    assert refused(job, [f"{key}={url}"]) == (
        f"{key}: found {url!r}, a URL; must be a path, on a cluster one that all nodes see"
    )


@pytest.mark.parametrize(("job", "key"), PLACES)
@pytest.mark.parametrize("url", ["ftp://host/runs", "s3://", "hdfs://name/runs"])
def test_a_url_that_is_no_object_storage_is_refused(refused, job, key, url):
    assert refused(job, [f"{key}={url}"]) == (
        f"{key}: found {url!r}, must be a folder, or a URL: s3://…, gs://…, az://…, abfs://…, abfss://…"
    )


@pytest.mark.parametrize(
    ("job", "arguments", "message"),
    [
        ("pretrain", ["data=folder", "data.root=s3://bucket"], "data.root: found 's3://bucket', a URL; "),
        ("pretrain", ["data=folder", f"data.root={'r' * 300}"], "data.root: found 'rrr"),
        ("pretrain", [f"output_dir={'long/' * 1000}"], "output_dir: found 'long/"),
        ("pretrain", ["output_dir="], "output_dir: found '', must be a path"),
        ("pretrain", [f"run_name={'n' * 300}"], "run_name: found 'nnn"),
        ("pretrain", [f"data={'d' * 300}"], "data: found 'ddd"),
        ("pretrain", [f"data.{'d' * 300}=1"], "data.ddd"),
        ("pretrain", ["optimiser.learning_rate=1e300"], "optimiser.learning_rate: found 1e+300, must be in [0, "),
        ("pretrain", [f"seed={2**64}"], f"seed: found {2**64}, must be in [0, {2**63 - 1}]"),
        ("pretrain", [f"seed={'9' * 5000}"], "'seed=999"),
        ("pretrain", [f"seed={'[' * 1000}{']' * 1000}"], "'seed=[[["),
        ("pretrain", ["encoder=vit_small"], "encoder: found 'vit_small'; allowed: bn_inception, "),
        ("pretrain", ["encoder.width=inf"], "encoder.width: found inf, must be in (0, 64]"),
        ("pretrain", ["encoder.width=1e9"], "encoder.width: found 1000000000.0, must be in (0, 64]"),
        ("pretrain", ["head.dim=1000000000000"], "head.dim: found 1000000000000, must be in [1, 1048576]"),
        ("pretrain", ["augment.colour_strength=inf"], "augment.colour_strength: found inf, must be in [0, 2.5]"),
        ("pretrain", ["encoder.std=[inf]"], "encoder.std[0]: found inf, must be in [1e-06, 1000]"),
        ("pretrain", ["encoder.mean=[nan]"], "encoder.mean[0]: found nan, must be in [-1000, 1000]"),
        ("pretrain", ["~seed"], "~seed: a key cannot be removed; give seed=<value>"),
        ("pretrain", ["~data"], "~data: a key cannot be removed; give data=<value>"),
        ("pretrain", ["hydra.run.dir="], "hydra.run.dir: settings of Hydra have no effect; output_dir=<folder> says"),
        ("pretrain", ["hydra/launcher=x"], "hydra/launcher: settings of Hydra have no effect; "),
        ("pretrain", ["--cfg"], "--cfg: found '--cfg', must be --cfg job"),
        ("pretrain", ["--cfg", "seed=3"], "--cfg: found '--cfg seed=3', must be --cfg job"),
        ("pretrain", ["experiment=null"], "experiment: found 'null'; "),
        ("probe", ["probe.learning_rates=[inf]"], "probe.learning_rates[0]: found inf, must be in [1e-12, 1000000]"),
        ("metric_learning", [f"evaluation.ks=[{2**64}]"], f"evaluation.ks[0]: found {2**64}, must be in [1, "),
        ("ablate", ["seeds=null"], "seeds: found null, must be a list"),
        ("ablate", ["seeds=[]"], "seeds: found [], must be one value or more"),
        ("ablate", ["seeds=3"], "seeds: found 3, must be a list, as in 'seeds=[3]'"),
        ("ablate", ["seeds=word"], "seeds: found 'word', must be a list"),
        ("ablate", ["seeds=[word]"], "seeds[0]: found 'word', must be an integer"),
        ("ablate", ["seeds=[0,1.5]"], "seeds[1]: found 1.5, must be an integer"),
        ("ablate", ["seeds=[-1]"], "seeds[0]: found -1, must be ≥ 0"),
        ("ablate", ["seeds=[0,1,0]"], "seeds: found [0, 1, 0], must be different seeds"),
        ("ablate", ["arms=[sec,none,sec]"], "arms: found ['sec', 'none', 'sec'], must be different arms"),
        ("ablate", ["arms=null"], "arms: found null, must be a list"),
        ("ablate", ["arms=[]"], "arms: found [], must be one value or more"),
        ("ablate", ["arms=sec"], "arms: found 'sec', must be a list"),
        ("ablate", ["arms=[3]"], "arms[0]: found 3, must be a string"),
        ("pretrain", ["run_name=20261127"], "run_name: found 20261127, must be a string, as '\"20261127\"'"),
        ("ablate", ["seed=3"], "seed: an ablation sets it; allowed: seeds=[<seed>,...]"),
        ("ablate", ["run_name=mine"], "run_name: an ablation sets it; allowed: recipe=<name>: runs are named after"),
        ("ablate", ["resume=auto", "run_name=a"], "resume: an ablation sets it; allowed: the same command"),
    ],
)
def test_a_meaningless_value_is_refused(refused, job, arguments, message):
    assert refused(job, arguments).startswith(message)


@pytest.mark.parametrize("job", ["pretrain", "ablate"])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["data=folder", "data.root=nowhere"], "data.root: found 'nowhere': no such file or folder"),
        (["data=parquet", "data.train=[nowhere/a.parquet]"], "data.train: found 'nowhere/a.parquet': no such file or"),
        (["data=webdataset", "data.train=['no/{0..3}.tar', no/4.tar]"], "data.train: found 'no/4.tar': no such file"),
        (["data=parquet", "data.train=[.]", "data.test=[no.parquet]", "probe.enabled=true"], "data.test: found 'no.pa"),
        (["data=cifar10", "data.root=nowhere"], "cifar10: nowhere/cifar-10-batches-py is missing or incomplete; set"),
        (["data.leave_out=[no.csv]"], "data.leave_out: found 'no.csv': no such file or folder"),
        (["monitor.data={name: folder, root: no}"], "monitor.data.root: found 'no': no such file or folder"),
        (["monitor.data={name: mnist, root: no}"], "monitor.data: mnist: no/MNIST/raw is missing or incomplete; set"),
        (["encoder.weights=no.pt"], "encoder.weights: no file no.pt; give encoder.weights=<file>"),
        (["head.weights=."], "head.weights: . is a folder; allowed: a file of weights"),
    ],
)
def test_data_that_do_not_exist_leave_neither_a_folder_nor_a_run(refused, job, arguments, message):
    assert refused(job, arguments, code=3).startswith(message)


def test_test_sets_of_faces_that_do_not_exist_leave_neither_a_folder_nor_a_run(refused):
    pairs = "test_sets=[{name: pairs, title: those, pairs: no.csv, images: .}]"
    given = ["data=folder", "data.root=.", pairs]
    assert refused("face", given, code=3) == "test_sets.pairs of those: found 'no.csv': no such file or folder"


def test_malformed_pairs_of_faces_leave_neither_a_folder_nor_a_run(refused, tmp_path: Path):
    (tmp_path / "those.csv").write_text("first,second,same\na.jpg,b.jpg,2\n")
    (tmp_path / "these.txt").write_text("10\nA 1\n")
    for test_set, message in (
        ("{name: pairs, pairs: those.csv, images: .}", "those.csv line 2: same '2'; allowed: 0, 1"),
        (
            "{name: lfw_pairs, pairs: these.txt, root: .}",
            "these.txt line 2: found 'A 1'; allowed: name number number, with tabs between them if names have spaces",
        ),
    ):
        assert refused("face", ["data=folder", "data.root=.", f"test_sets=[{test_set}]"], code=3) == message


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "it is empty"), (b"hello world", "it is neither safetensors nor a state dict that torch.save wrote")],
)
def test_a_file_without_weights_leaves_neither_a_folder_nor_a_run(refused, tmp_path: Path, content, message):
    (tmp_path / "w.pt").write_bytes(content)
    for key in ("encoder.weights", "head.weights"):
        found = refused("pretrain", [f"{key}=w.pt"], code=4)
        assert found == f"{key}: w.pt cannot be read as weights: {message}"


def test_weights_of_another_network_leave_neither_a_folder_nor_a_run(refused, tmp_path: Path):
    backbone = ResNetConfig(name="resnet18", width=0.125).build(3, 8).backbone
    torch.save(backbone.state_dict(), tmp_path / "w.pt")
    wider = "encoder.weights: w.pt does not fit the encoder: bn1.bias has shape (8,), the encoder (16,) and "
    assert refused("pretrain", ["encoder.width=0.25", "encoder.weights=w.pt"], code=4).startswith(wider)
    grey = (
        "encoder.weights: w.pt does not fit the encoder: conv1.weight has shape (8, 3, 3, 3), the encoder (8, 1, 3, 3)"
    )
    assert refused("pretrain", ["encoder.width=0.125", "encoder.weights=w.pt"], code=4) == grey
    deeper = ["encoder=resnet34", "encoder.width=0.125", "encoder.freeze_batch_norm=true", "encoder.weights=w.pt"]
    assert " does not fit the encoder: conv1.weight has shape (8, 3, 3, 3), " in refused("pretrain", deeper, code=4)


def test_networks_without_weights_take_no_file(refused, tmp_path: Path):
    torch.save({"weight": torch.zeros(1)}, tmp_path / "w.pt")
    given = ["constraint=none", "head.dim=64", "head=identity"]
    pixels = "encoder.weights: found 'w.pt', must be null: the pixels have no weights"
    assert refused("pretrain", [*given, "encoder=pixels", "encoder.weights=w.pt"]) == pixels
    identity = "head.weights: found 'w.pt', must be null: head=identity has none"
    assert refused("pretrain", [*given, "head.weights=w.pt"]) == identity


def test_weights_of_another_head_leave_neither_a_folder_nor_a_run(refused, tmp_path: Path):
    torch.save(HEAD_CONFIGS["fc"](dim=5).build(64, 0).state_dict(), tmp_path / "w.pt")
    given = ["head=fc", "head.weights=w.pt", "encoder.width=0.125"]
    narrow = "head.weights: w.pt does not fit the head: fc.weight has shape (5, 64), the head (5, 128)"
    assert refused("pretrain", [*given, "head.dim=5", "encoder.width=0.25"], code=4) == narrow
    short = "head.weights: w.pt does not fit the head: fc.bias has shape (5,), the head (6,) and 1 more"
    assert refused("metric_learning", ["experiment=digits_retrieval", *given, "head.dim=6"], code=4) == short
    faces = ["data=folder", "data.root=.", "encoder=ir18", *given, "head.dim=5"]
    of_maps = "head.weights: w.pt does not fit the head: fc.weight has shape (5, 64), the head (5, 256)"
    assert refused("face", [*faces, "data.image_size_px=32"], code=4) == of_maps


@pytest.mark.parametrize(
    ("job", "arguments", "allowed"),
    [
        ("pretrain", [], "1437, the number of images; set global_batch_size=1024"),
        ("pretrain", ["data.max_images=100"], "100, the number of images; set global_batch_size=64"),
        ("finetune", ["labels_share=0.1"], "142, the number of images; set global_batch_size=128"),
        ("finetune", ["labels_share=1", "test_share=0.5"], "649, the number of images; set global_batch_size=512"),
    ],
)
def test_batches_of_more_images_than_there_are_leave_neither_a_folder_nor_a_run(refused, job, arguments, allowed):
    experiment = {"pretrain": "digits", "finetune": "digits_finetune"}[job]
    given = [f"experiment={experiment}", "global_batch_size=2000", *arguments]
    assert refused(job, given) == f"global_batch_size: found 2000, must be 1 to {allowed}"


def test_batches_of_more_images_than_a_folder_has_leave_neither_a_folder_nor_a_run(refused, tmp_path: Path):
    # Of different sizes, which metric learning crops.
    files = {f"train/{c}/{k}.png": plain(k, 8 + k) for c in ("cat", "dog") for k in range(10)}
    root = write_folder(tmp_path / "photos", files)
    given = ["data=folder", f"data.root={root}", "global_batch_size=64"]
    allowed = "global_batch_size: found 64, must be 1 to 20, the number of images; set global_batch_size=16"
    assert refused("pretrain", [*given, "data.image_size_px=16"]) == allowed
    assert refused("metric_learning", ["experiment=digits_retrieval", *given, "data.num_train_classes=1"]) == allowed
    assert refused("finetune", [*given, "data.image_size_px=16", "test_share=0.2"]).startswith(
        "global_batch_size: found 64"
    )
    chosen = "global_batch_size: found 64, must be 1 to 18, the number of images; set global_batch_size=16"
    (tmp_path / "out.csv").write_text("row\n3\n5\n", encoding="utf-8")
    leave_out = f"data.leave_out=[{tmp_path / 'out.csv'}]"
    assert refused("pretrain", [*given, "data.image_size_px=16", leave_out]) == chosen


def test_data_of_a_cluster_are_looked_for_by_its_workers_alone(tmp_path: Path, monkeypatch):
    given = [*QUICK, "data=folder", f"data.root={tmp_path / 'nowhere'}"]
    nowhere = configured("pretrain", given)
    monkeypatch.setenv("RAY_ADDRESS", "local")
    for runtime in (LocalConfig(), RayConfig()):
        with pytest.raises(MissingDataError, match=r"^data\.root: found .*nowhere': no such file or folder$"):
            require_files(replace(nowhere, runtime=runtime))
    require_files(replace(nowhere, runtime=RayConfig(address="10.0.0.1:6379")))
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    require_files(replace(nowhere, runtime=RayConfig()))


@pytest.mark.parametrize(
    ("uri", "content"),
    [
        ("file://{folder}/runs", None),
        ("gopher://host/store", None),
        ("sqlite:///{folder}/store.db", b"no database of any kind"),
        ("sqlite:///{folder}/store.db", b"SQLite format 3\0" + bytes(range(256))),
        ("sqlite:////proc/none/store.db", None),
    ],
)
def test_a_probe_with_an_unusable_store_is_refused(capsys, tmp_path: Path, uri, content):
    if content is not None:
        (tmp_path / "store.db").write_bytes(content)
    arguments = ["run=abc", "runtime=local", f"output_dir={tmp_path}", f"tracking.uri={uri.format(folder=tmp_path)}"]
    assert run_job("probe", probe, arguments) in (2, 4)
    output = capsys.readouterr().err.strip()
    assert output.startswith("error: tracking.uri: ") and "\n" not in output


def test_too_little_memory_is_one_line(capsys):
    def job(arguments):
        return str(torch.empty(2**46))

    assert run_job("align", job, []) == 2
    output = capsys.readouterr().err.strip()
    assert output.startswith("error: not enough memory for 281474976710656 bytes") and "\n" not in output


def worked_on(tmp_path: Path, overrides: list[str]) -> RunFolder:
    """The folder of a run on which one worker failed."""
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    values = compose("pretrain", ["experiment=digits", "encoder.width=0.125", "runtime=local", *overrides])
    with pytest.raises(UserError):
        work("pretrain", values, folder, Worker(rank=0, world_size=1, device=torch.device("cpu")))
    return folder


def test_a_workers_lack_of_memory_is_kept_for_the_driver(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("ssl_sec.recipes.pretraining.recipe.run", lambda *arguments: torch.empty(2**46))
    folder = worked_on(tmp_path, [])
    assert str(folder.error()).startswith("not enough memory for 281474976710656 bytes at once")
    assert "DefaultCPUAllocator" in folder.failures()[0]["traceback"]


def test_weights_that_are_not_finite_are_refused_before_anything_is_measured(tmp_path: Path):
    weights = ResNetConfig(name="resnet18", width=0.125).build(1, 8).backbone.state_dict()
    weights["conv1.weight"] = weights["conv1.weight"] * math.nan
    torch.save(weights, tmp_path / "w.pt")
    folder = worked_on(tmp_path, ["epochs=0", f"encoder.weights={tmp_path / 'w.pt'}"])
    assert str(folder.error()).endswith("does not fit the encoder: conv1.weight has values that are not finite")
    assert folder.records() == []
