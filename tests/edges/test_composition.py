import re
from pathlib import Path
from typing import get_args

import pytest

from ssl_sec.config import PretrainConfig, ProbeJobConfig
from ssl_sec.edges.composition import CONFIG_FOLDER, compose, composed_yaml, options
from ssl_sec.errors import ConfigError
from ssl_sec.loss_config import ClassLossConfig
from ssl_sec.settings import from_values, to_values

# SEC, Tables 5 and 12: (constraint, epochs) -> (η, top-1) on CIFAR-10 and on CIFAR-100.
PAPER = {
    ("ntxent", 100): ((None, 84.76), (None, 58.43)),
    ("l2reg", 100): ((5e-3, 86.64), (1e-3, 61.43)),
    ("sec", 100): ((0.25, 86.87), (0.01, 61.66)),
    ("sec_ema", 100): ((0.5, 86.82), (0.05, 61.88)),
    ("ntxent", 200): ((None, 89.05), (None, 65.73)),
    ("l2reg", 200): ((5e-3, 90.14), (1e-3, 66.57)),
    ("sec", 200): ((0.25, 90.35), (0.01, 66.25)),
    ("sec_ema", 200): ((1.0, 90.21), (0.05, 66.59)),
}
CIFAR_ROWS = [
    (f"{data}_{constraint}_{epochs}", data, constraint, epochs, *PAPER[constraint, epochs][column])
    for column, data in enumerate(("cifar10", "cifar100"))
    for constraint, epochs in PAPER
]

CLASS_LOSSES = {kind.name for kind in get_args(ClassLossConfig)}


@pytest.mark.parametrize(("name", "data", "constraint", "epochs", "eta", "top1"), CIFAR_ROWS)
def test_cifar_experiments_are_the_papers(name, data, constraint, epochs, eta, top1):
    config = from_values(PretrainConfig, compose("pretrain", [f"experiment={name}"]))
    assert (config.recipe, config.data.name, config.epochs) == (name, data, epochs)
    assert config.constraint.name == {"ntxent": "none"}.get(constraint, constraint)
    if eta is not None:
        assert (config.constraint.eta, config.constraint.ramp) == (eta, "linear")
        assert config.constraint.rho == (0.2 if constraint == "sec_ema" else 1.0)
        assert config.constraint.radius == (0.0 if constraint == "l2reg" else None)
    assert (config.encoder.name, config.encoder.stem, config.encoder.width) == ("resnet50", "cifar", 1.0)
    assert (config.head.num_layers, config.head.dim, config.loss.temperature) == (2, 128, 0.5)
    assert (config.global_batch_size, config.optimiser.name) == (256, "sgd")
    assert (config.optimiser.learning_rate, config.optimiser.momentum) == (0.5, 0.9)
    assert (config.optimiser.weight_decay, config.optimiser.warmup_epochs) == (1e-4, 0)
    assert (config.augment.min_scale, config.augment.flip_probability, config.augment.colour_strength) == (
        0.08,
        0.5,
        0.5,
    )
    assert (config.probe.epochs, config.probe.batch_size, config.probe.learning_rates) == (100, 256, (1, 2, 5, 10))
    assert (config.probe.decay_epochs, config.probe.decay_factor) == ((60, 75, 90), 5)
    assert f"top1 {top1}," in options()["experiment"][name]


def test_the_keys_of_every_config_are_those_of_its_dataclass():
    required = {
        "timm": ["encoder.model=resnet18"],
        "folder": ["data.root=x"],
        "parquet": ["data.train=[x]", "data.test=[x]"],
    }
    for group, names in options().items():
        for name in names:
            if group == "loss" and name in CLASS_LOSSES:  # self-supervision has no classes
                continue
            overrides = [f"{group}={name}", *required.get(name, [])]
            if name == "cifar10_cpu":
                overrides += required["parquet"]
            values = compose("pretrain", overrides)
            assert to_values(from_values(PretrainConfig, values)) == values, (group, name)
    values = compose("probe", ["run=abc"])
    assert to_values(from_values(ProbeJobConfig, values)) == values


def test_overrides_win_over_the_experiment():
    values = compose("pretrain", ["experiment=cifar10_sec_100", "constraint.eta=0.5", "optimiser.learning_rate=1.0"])
    assert (values["constraint"]["eta"], values["optimiser"]["learning_rate"]) == (0.5, 1.0)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["experiment=cifar10_sec_10"], "experiment: found 'cifar10_sec_10'; did you mean 'cifar10_sec_100'"),
        (["encoder=resnet51"], "encoder: found 'resnet51'; did you mean 'resnet50'"),
        (["optimiser.momentm=0.9"], "optimiser.momentm: unknown key; did you mean 'optimiser.momentum'"),
        (["experiment=digits", "constraint.etta=1"], "constraint.etta: unknown key; did you mean 'constraint.eta'"),
        (["epoch=3"], "epoch: unknown key; did you mean 'epochs'"),
        (["table=5"], "table: unknown key"),
        (["digits"], "'digits': not understood; give key=value, or --help"),
        (["data=folder"], "data.root: missing; give it as data.root=<value>"),
        (["epochs=[1"], "'epochs=[1': not understood"),
    ],
)
def test_a_mistake_is_one_line_that_names_the_nearest(overrides, message):
    with pytest.raises(ConfigError) as caught:
        compose("pretrain", overrides)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_weight_for_no_constraint_is_refused():
    with pytest.raises(ConfigError, match="constraint.eta: unknown key for 'none'"):
        from_values(PretrainConfig, compose("pretrain", ["experiment=cifar10_sec_100", "constraint=none"]))


def test_cfg_shows_what_a_job_would_run():
    text = composed_yaml("pretrain", ["experiment=cifar100_sec_ema_200"])
    assert "rho: 0.2" in text
    assert "name: resnet50" in text


def test_every_option_is_explained():
    for group, found in options().items():
        for name, explanation in found.items():
            assert len(explanation) > 10, (group, name)


def test_every_experiment_file_opens_with_command_and_hardware():
    for path in [*(CONFIG_FOLDER / "experiment").glob("*.yaml"), *(CONFIG_FOLDER / "table").glob("*.yaml")]:
        head = Path(path).read_text()
        assert re.search(r"^# Command: +python -m jobs\.", head, re.M), path
        assert re.search(r"^# Hardware: +\S", head, re.M), path
