"""Configs that can be read without torch repeat the defaults of dataclasses: they must agree."""

import dataclasses

import pytest

from ssl_sec.augment.config import AugmentConfig, CropConfig, FlipConfig
from ssl_sec.edges.composition.options import option, primary, values_of_file
from ssl_sec.evaluation.config import ProbeConfig
from ssl_sec.recipes.registry import RECIPES
from ssl_sec.settings import to_values
from ssl_sec.training.optimisers.config import CosineSGDConfig

# Defaults of a job that differ from the dataclass's, as its file states.
OTHERWISE = {("probe", "tracking"), ("face", "checkpoint")}


@pytest.mark.parametrize(
    ("job", "group", "name", "config"),
    [
        ("pretrain", "augment", "simclr", AugmentConfig()),
        ("metric_learning", "augment", "retrieval", CropConfig()),
        ("face", "augment", "flip", FlipConfig()),
        ("pretrain", "optimiser", "sgd", CosineSGDConfig()),
        ("pretrain", "probe", "paper", ProbeConfig()),
    ],
)
def test_an_option_in_a_file_has_the_defaults_of_its_dataclass(job, group, name, config):
    file = option(group, name, job)
    assert file is not None
    assert values_of_file(group, file, job) == to_values(config)


@pytest.mark.parametrize("job", RECIPES)
def test_the_config_of_a_job_has_the_defaults_of_its_dataclass(job):
    checked = 0
    for field in dataclasses.fields(RECIPES[job].config):
        has_default = field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING
        if field.name not in primary(job).values or not has_default or (job, field.name) in OTHERWISE:
            continue
        default = field.default_factory() if field.default is dataclasses.MISSING else field.default
        found = primary(job).values[field.name]
        expected = to_values(default) if dataclasses.is_dataclass(default) else default
        assert found == (list(expected) if isinstance(expected, tuple) else expected), field.name
        checked += 1
    assert checked > 2
