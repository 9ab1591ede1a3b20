"""Configurations from options and overrides, and the messages about mistakes."""

import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import zip_longest
from pathlib import Path
from typing import get_args

import hydra
import pytest
from hydra.core.config_store import ConfigStore

from ssl_sec.data.config import DigitsConfig, FolderConfig
from ssl_sec.edges.composition.compose import _of_options, compose, composed_yaml, experiments, job_of
from ssl_sec.edges.composition.config_folders import CONFIG_FOLDER
from ssl_sec.edges.composition.experiments import explanations
from ssl_sec.edges.composition.options import groups, options, primary
from ssl_sec.errors import ConfigError
from ssl_sec.losses.config import CONFIGS, ClassLossConfig, GeneratorConfig
from ssl_sec.recipes.face.config import FaceConfig
from ssl_sec.recipes.finetuning.config import FinetuneConfig
from ssl_sec.recipes.metric_learning.config import MetricLearningConfig
from ssl_sec.recipes.pretraining.config import PretrainConfig
from ssl_sec.recipes.probing.config import ProbeJobConfig
from ssl_sec.settings import flattened, from_values, to_values
from tests.jobs import configured

EVERY_OPTION = {**{group: options(group, "pretrain") for group in groups()}, "experiment": explanations()}
OF_FINETUNING = ("classifier", "cross_entropy")
OF_TRIPLETS = ("angular_hinge", "triplet_disjoint")
CLASS_LOSSES = {kind.name for kind in get_args(ClassLossConfig)}
GENERATORS = {kind.name for kind in get_args(GeneratorConfig)}

REQUIRED = {
    "timm": ["encoder.model=resnet18"],
    "identity": ["head.dim=64"],
    "folder": ["data.root=x"],
    **{name: ["data.train=[x]", "data.test=[x]"] for name in ("parquet", "webdataset")},
    **{name: ["data.root=x"] for name in ("records", "cub", "cars196", "sop", "inshop")},
}
ONLY_IN = {
    "pretrain": {"optimiser": {"sgd", "lars", "adamw"}, "augment": {"simclr", "digits", "byol"}},
    "finetune": {
        "optimiser": {"nesterov", "adamw"},
        "augment": {"crop", "retrieval"},
        "head": {"classifier"},
        "loss": {"cross_entropy"},
        "constraint": {"none"},
    },
    "metric_learning": {
        "optimiser": {"adam", "adamw", "sgd_steps"},
        "augment": {"crop", "retrieval"},
        "sampler": {"classes", "pairs", "triplets"},
    },
    "face": {
        "optimiser": {"adamw", "sgd_epochs", "sgd_polynomial"},
        "augment": {"flip"},
        "sampler": {"classes", "pairs", "shuffled"},
        "transform": {"none", "sft", "sftd", "ftl"},
    },
}
# Values of these are chosen by their names, and have the defaults of their dataclasses.
BY_NAME = ("test_sets", "loss.first.", "loss.second.")


@cache
def composed(job: str, *overrides: str) -> dict[str, object]:
    """Composed once for all tests."""
    return compose(job, overrides)


def given_for(name: str) -> list[str]:
    """What an experiment needs from the command line."""
    if name in ("cifar10_cpu", "cars196_cpu", "lfw_cpu"):
        return REQUIRED["parquet"]
    if name in ("photos_cpu", "photos_simclr"):
        return REQUIRED["folder"]
    if name in ("digits_plane", "mnist_plane"):
        return []
    if name.startswith("simclr_finetune"):  # on the data set of a run, or on this one
        return ["data=folder", *REQUIRED["folder"]]
    if job_of(name) == "face":
        return REQUIRED["records"]
    data = name.partition("_")[0]
    return REQUIRED.get(data, []) if job_of(name) == "metric_learning" else []


def spelt_out(values: dict[str, object]) -> dict[str, object]:
    """The keys that a config's YAML must set itself."""
    return {key: value for key, value in flattened(values).items() if not key.startswith(BY_NAME)}


_FILES = {path.stem for path in (CONFIG_FOLDER / "experiment").glob("*.yaml")}


def together(job: str) -> list[list[str]]:
    """Overrides that choose each option once, and an option of every group at a time."""
    found = []
    of_job = primary(job).keys - {"experiment"}
    chosen = {group: ONLY_IN[job].get(group, names) for group, names in EVERY_OPTION.items() if group in of_job}
    if job != "finetune":  # which alone has one head and one loss
        for group in ("head", "loss"):
            chosen[group] = [name for name in chosen[group] if name not in OF_FINETUNING]
    if job == "pretrain":  # self-supervision has no classes
        chosen["loss"] = [name for name in chosen["loss"] if name not in CLASS_LOSSES]
    chosen["loss"] = [name for name in chosen["loss"] if name not in OF_TRIPLETS]
    if job != "pretrain":  # which alone has a teacher
        chosen["loss"] = [name for name in chosen["loss"] if name not in ("byol", "mocov3")]
    if job == "metric_learning":
        found += [[f"loss={name}", "sampler=triplets", "data=digits"] for name in OF_TRIPLETS]
        found += [[f"transform={name}", "data=digits"] for name in GENERATORS]  # with losses of pairs alone
        chosen["transform"] = [name for name in chosen["transform"] if name not in GENERATORS]
    if job == "face":  # only templates classify
        found += [[f"split={name}"] for name in chosen["split"]]
        chosen["split"] = ["none"]
    for row in zip_longest(*map(sorted, chosen.values())):
        options_of = {group: name for group, name in zip(chosen, row, strict=True) if name is not None}
        overrides = [f"{group}={name}" for group, name in options_of.items()]
        if job in ("face", "metric_learning") and options_of.get("loss", "cosface") not in CLASS_LOSSES:
            overrides.append("sampler=classes")
        if job == "finetune" and "data" not in options_of:  # that of a run, otherwise
            overrides.append("data=digits")
        found.append(overrides + [override for name in options_of.values() for override in REQUIRED.get(name, [])])
    return found


@pytest.mark.parametrize(
    ("job", "kind"),
    [
        ("pretrain", PretrainConfig),
        ("finetune", FinetuneConfig),
        ("metric_learning", MetricLearningConfig),
        ("face", FaceConfig),
    ],
)
def test_the_keys_of_every_config_are_those_of_its_dataclass(job, kind):
    # Rows of one table have the same keys.
    some = [name for place, name in enumerate(experiments(job)) if place % 12 == 0 or name in _FILES]
    for overrides in [*together(job), *([f"experiment={name}", *given_for(name)] for name in some)]:
        values = composed(job, *overrides)
        assert spelt_out(to_values(from_values(kind, values))) == spelt_out(values), overrides


def test_a_set_of_the_monitor_is_chosen_by_its_name_and_has_its_own_keys():
    assert compose("pretrain", [])["monitor"]["data"] is None
    chosen = compose("pretrain", ["monitor.data=folder", "monitor.data.root=x", "monitor.data.image_size_px=8"])
    data = from_values(PretrainConfig, chosen).monitor.data
    assert data == FolderConfig(root="x", image_size_px=8)
    replaced = compose("pretrain", ["monitor.data={name: folder, root: x}", "monitor.data=digits"])
    assert from_values(PretrainConfig, replaced).monitor.data == DigitsConfig()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["monitor.data=folder"], "monitor.data.root: missing; give it as monitor.data.root=<value>"),
        (["monitor.data=digits", "monitor.data.root=x"], "monitor.data.root: unknown key; "),
        (
            ["monitor.data.root=x"],
            "monitor.data.root: unknown key; name the set, too: for example monitor.data=folder "
            "monitor.data.root=<folder>",
        ),
        (
            ["monitor.data=folder", "monitor.data.rot=x"],
            "monitor.data.rot: unknown key; did you mean 'monitor.data.root'",
        ),
    ],
)
def test_a_key_that_a_set_of_the_monitor_lacks_is_named(given, message):
    with pytest.raises(ConfigError, match="^" + re.escape(message)):
        compose("pretrain", given)


def test_an_unknown_set_of_the_monitor_lists_the_known_ones():
    with pytest.raises(ConfigError, match="^monitor.data: found 'digit'; did you mean 'digits'?"):
        configured("pretrain", ["monitor.data=digit"])


def test_a_loss_of_a_combined_one_has_other_values_than_its_own():
    given = ["loss=combined", "loss.first={name: cosface, scale: 32}", "data=digits"]
    config = configured("face", given)
    assert config.loss.first == CONFIGS["cosface"](scale=32.0)
    with pytest.raises(ConfigError, match=r"loss\.first\.scal: unknown key for 'cosface'; did you mean 'scale'"):
        configured("face", [given[0], "loss.first={name: cosface, scal: 32}", given[2]])


def test_losses_of_triplets_are_for_metric_learning():
    message = "^loss: found 'triplet_disjoint', must be another; only metric learning samples triplets$"
    with pytest.raises(ConfigError, match=message):
        configured("pretrain", ["data=digits", "loss=triplet_disjoint"])
    with pytest.raises(ConfigError, match="^sampler: found 'classes', must be 'triplets' with loss=triplet_disjoint$"):
        configured("face", ["data=digits", "loss=triplet_disjoint", "sampler=classes"])


def test_the_keys_of_a_probe_are_those_of_its_dataclass():
    values = compose("probe", ["run=abc", "data=digits"])
    assert to_values(from_values(ProbeJobConfig, values)) == values


def test_a_missing_value_is_reported_with_the_allowed_ones():
    with pytest.raises(
        ConfigError,
        match=re.escape("format: missing; give it as format=<safetensors | pt2 | onnx | torchscript | timm | hub>"),
    ):
        compose("export", ["run=abc"])


def test_a_missing_folder_is_reported_before_derived_values():
    with pytest.raises(ConfigError, match="^data.root: missing; give it as data.root=<value>$"):
        compose("face", ["experiment=casia_arcface_sec"])
    with pytest.raises(
        ConfigError, match=r"^test_sets\[0\].path: made from data.root, which .*; give test_sets=<value>$"
    ):
        compose("face", ["experiment=casia_arcface_sec", "data=parquet", "data.train=[x]"])


def test_an_experiment_of_another_job_is_named_with_its_job():
    with pytest.raises(ConfigError, match="'cars196_triplet', which is run by jobs.metric_learning; allowed: "):
        compose("pretrain", ["experiment=cars196_triplet"])
    assert job_of("cifar10_sec_100") == "pretrain" and job_of("nothing") is None
    assert not experiments("pretrain").keys() & experiments("metric_learning").keys()


def test_overrides_win_over_the_experiment():
    values = compose("pretrain", ["experiment=cifar10_sec_100", "constraint.eta=0.5", "optimiser.learning_rate=1.0"])
    assert (values["constraint"]["eta"], values["optimiser"]["learning_rate"]) == (0.5, 1.0)
    for given in ("constraint=none", "+constraint=none", "++constraint=none"):
        assert compose("pretrain", ["experiment=digits", given])["constraint"] == {"name": "none"}


def test_values_of_one_config_are_not_in_the_next():
    before = compose("pretrain", ["experiment=digits"])
    other = compose("pretrain", ["experiment=digits", "+tracking.tags.team=vision", "encoder.mean.0=0.1", "seed=3"])
    assert (other["tracking"]["tags"], other["encoder"]["mean"][0], other["seed"]) == ({"team": "vision"}, 0.1, 3)
    other["augment"].clear()
    assert compose("pretrain", ["experiment=digits"]) == before


def test_a_program_of_hydra_keeps_its_configs_and_its_state(tmp_path, monkeypatch):
    (tmp_path / "program.yaml").write_text("defaults: [data: digits]")
    monkeypatch.setitem(ConfigStore.instance().repo, "data", {})
    ConfigStore.instance().store(group="data", name="digits", node={"of": "the program"})
    with hydra.initialize_config_dir(str(tmp_path), version_base="1.2", job_name="program"):
        _of_options.cache_clear()
        assert compose("pretrain", ["experiment=digits"])["data"]["name"] == "digits"
        own = hydra.compose("program", return_hydra_config=True)  # with the configs of Hydra's plugins
        assert (own.data, own.hydra.job.name, str(hydra.version.getbase())) == ({"of": "the program"}, "program", "1.2")


def test_threads_compose_at_the_same_time():
    _of_options.cache_clear()
    depths = [18, 34, 50]
    with ThreadPoolExecutor(3) as threads:
        values = threads.map(lambda depth: compose("pretrain", [f"encoder=resnet{depth}", "data=digits"]), depths)
        assert [value["encoder"]["name"] for value in values] == [f"resnet{depth}" for depth in depths]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["experiment=cifar10_sec_10"], "experiment: found 'cifar10_sec_10'; did you mean 'cifar10_sec_100'"),
        (["encoder=resnet51"], "encoder: found 'resnet51'; did you mean 'resnet50'"),
        (["optimiser.momentm=0.9"], "optimiser.momentm: unknown key; did you mean 'optimiser.momentum'"),
        (["experiment=digits", "constraint.etta=1"], "constraint.etta: unknown key; did you mean 'constraint.eta'"),
        (["epoch=3"], "epoch: unknown key; did you mean 'epochs'"),
        (["table=5"], "table: unknown key; allowed: augment, check_images, checkpoint, "),
        (["lr=0.1"], "lr: unknown key; did you mean 'optimiser.learning_rate'?"),
        (["learning_rate=0.1"], "learning_rate: unknown key; did you mean 'optimiser.learning_rate'?"),
        (["optimizer.lr=0.1"], "optimizer.lr: unknown key; did you mean 'optimiser.learning_rate'?"),
        (["batch_size=64"], "did you mean 'global_batch_size' or 'probe.batch_size'?"),
        (["width=0.5"], "width: unknown key; did you mean 'encoder.width'?"),
        (["temperature=0.1"], "temperature: unknown key; did you mean 'loss.temperature'?"),
        (["steps=10"], "steps: unknown key; did you mean 'epochs' or 'probe.epochs'?"),
        (
            ["image_size=64"],
            "did you mean 'data.image_size_px', with data=folder, data=parquet, data=records or data=webdataset?",
        ),
        (["grad_clip=1"], "grad_clip: unknown key; did you mean 'optimiser.clip_norm'?"),
        (["num_workers=4"], "did you mean 'runtime.num_loader_workers' or 'runtime.num_workers'?"),
        (["runtime=local", "gpus=2"], "gpus: unknown key; did you mean 'runtime.num_workers', with runtime=ray?"),
        (
            ["runtime=local", "runtime.num_workers=2"],
            "runtime.num_workers: unknown key with runtime=local (One process on this machine); runtime=ray has it",
        ),
        (
            ["encoder.model=resnet18"],
            "unknown key with encoder=resnet18 (A ResNet of 18, 34 or 50 layers); encoder=timm has it",
        ),
        (
            ["sampler.images_per_class=2"],
            "sampler.images_per_class: unknown key; it is a key of jobs.metric_learning and",
        ),
        (["test_sets=[]"], "test_sets: unknown key; it is a key of jobs.face"),
        (["benchmarks=[]"], "benchmarks: unknown key; give test_sets, with the same values, to jobs.face"),
        (["data=parquet", "data.train=a,b"], "data.train: found several values, a,b, must be one list: 'data.train=[a"),
        (
            ["seed=0,1"],
            "seed: found several values, 0,1, must be one; python -m jobs.submit pretrain ... seed=0,1 sweeps on a Ray "
            "cluster; python -m jobs.ablate ... 'seeds=[0,1]' runs one after the other on this machine",
        ),
        (["constraint=none,sec"], "python -m jobs.ablate ... 'arms=[none,sec]' runs one after the other"),
        (["digits"], "'digits': not understood; give key=value, or --help"),
        (["data=folder"], "data.root: missing; give it as data.root=<value>"),
        (["epochs=[1"], "'epochs=[1': not understood"),
        (["+seed=3"], "+seed=3: the key is there already; give seed=<value>"),
        (["seed@a=3"], "seed@a=3: seed is no group of options; give seed=<value>"),
    ],
)
def test_a_mistake_is_one_line_with_the_nearest_name(overrides, message):
    with pytest.raises(ConfigError) as caught:
        compose("pretrain", overrides)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("job", "overrides", "message"),
    [
        ("metric_learning", ["epochs=3"], "epochs: unknown key; did you mean 'steps'?"),
        (
            "face",
            ["seed=1,2"],
            "must be one; python -m jobs.submit face ... seed=1,2 sweeps on a Ray cluster; python -m jobs.ablate "
            "job=face ... 'seeds=[1,2]' runs one after the other on this machine",
        ),
        (
            "embed",
            ["run=a", "output=b", "data.on_bad_image=skip"],
            "data.on_bad_image: unknown key; name the set, too, also that of the run: for example data=folder "
            "data.root=<folder>",
        ),
        ("report", ["table=1,2"], "table: found several values, 1,2, must be one"),
        (
            "pretrain",
            ["output_dir=/a,b"],
            """must be one, or in quotes: 'output_dir="/a,b"'; python -m jobs.submit pretrain ... output_dir=/a,b """
            "sweeps on a Ray cluster",
        ),
        ("export", ["run=a,b"], """run: found several values, a,b, must be one, or in quotes: 'run="a,b"'"""),
    ],
)
def test_the_hints_are_those_of_the_job(job, overrides, message):
    with pytest.raises(ConfigError) as caught:
        compose(job, overrides)
    assert str(caught.value).endswith(message)


def test_a_key_that_is_misspelled_is_named_without_torch():
    code = (
        "import sys\n"
        "from ssl_sec.edges.composition.compose import compose\n"
        "for given in ('epoch=3', 'lr=0.1', 'optimiser.momentm=0.9'):\n"
        "    try: compose('pretrain', [given])\n"
        "    except ValueError as error: print(error)\n"
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("did you mean") == 3


def test_a_weight_for_no_constraint_is_refused():
    with pytest.raises(ConfigError, match="^constraint.eta: unknown key with constraint=none"):
        compose("pretrain", ["experiment=cifar10_sec_100", "constraint=none", "constraint.eta=0.5"])


def test_cfg_shows_what_a_job_would_run():
    text = composed_yaml("pretrain", ["experiment=cifar100_sec_ema_200"])
    assert "rho: 0.2" in text
    assert "name: resnet50" in text


def test_every_option_is_explained():
    assert explanations()["casia_c_triplet_wen"] == "the paper's: lfw_accuracy 99.11 ± 0.008"
    for group, found in EVERY_OPTION.items():
        for name, explanation in found.items():
            assert len(explanation) > 10, (group, name)


def test_every_experiment_file_opens_with_command_and_hardware():
    for path in [*(CONFIG_FOLDER / "experiment").glob("*.yaml"), *(CONFIG_FOLDER / "table").glob("*.yaml")]:
        head = Path(path).read_text()
        assert re.search(r"^# Command: +python -m jobs\.", head, re.M), path
        assert re.search(r"^# Hardware: +\S", head, re.M), path


@pytest.mark.parametrize(("job", "given"), [("probe", ["run=abc"]), ("export", ["run=abc", "format=onnx"])])
def test_another_data_set_is_chosen_as_for_training(job, given):
    assert "data" not in compose(job, given)
    assert compose(job, [*given, "data=digits"])["data"]["name"] == "digits"
    assert compose(job, [*given, "data=cifar10", "data.root=/here"])["data"]["root"] == "/here"
    assert "data" in primary(job).options
    with pytest.raises(ConfigError, match="^data: found 'digit'; did you mean 'digits'"):
        compose(job, [*given, "data=digit"])
