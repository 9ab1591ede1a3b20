"""Digests: the same for the same settings, in every version."""

import csv
from pathlib import Path

import pytest

from ssl_sec.edges.composition.compose import compose
from ssl_sec.edges.study.digest import digest_of
from ssl_sec.edges.study.plan import read_study
from ssl_sec.recipes.registry import RECIPES
from ssl_sec.settings import from_values
from tests.jobs import configured

STUDIES = Path(__file__).parents[3] / "docs" / "studies"
FILES = ("data=parquet", "data.train=[/a/b.parquet]", "data.test=[/a/c.parquet]", "encoder.weights=/w.pth")
OTHERWISE = (
    "data.train=[s3://bucket/b.parquet]",
    "data.resident_limit_mib=3",
    "data.cache_folder=/z",
    "monitor.every_epochs=3",
    "runtime=ray",
    "runtime.num_workers=2",
    "seed=4",
    "probe.enabled=true",
    "check_images=3",
    "checkpoint.every_epochs=1",
    "log_every_steps=7",
    "tracking.register_model=false",
)


def digest(*overrides: str) -> str:
    return digest_of(configured("pretrain", [*overrides]))


def test_the_cells_of_a_study_that_has_run_keep_their_digests():
    with (STUDIES / "why_cpu.csv").open() as file:
        kept = {(row["arm"], row["point"], int(row["seed"])): row["config"] for row in csv.DictReader(file)}
    cells = read_study(["study=why_cpu", "data.train=[train.parquet]", "data.test=[test.parquet]"]).cells({})
    assert len(cells) == 50
    assert {cell.key: cell.digest for cell in cells} == kept


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (("experiment=digits",), "e40c52ffa496"),
        ((*FILES, "probe.epochs=3"), "fe9fc15a421c"),
        ((*FILES, "probe.epochs=3", *OTHERWISE), "fe9fc15a421c"),
    ],
)
def test_a_digest_is_the_one_of_earlier_versions_wherever_and_however_a_run_is_made(overrides, expected):
    assert digest(*overrides) == expected


@pytest.mark.parametrize(
    ("job", "given"),
    [("metric_learning", ["experiment=digits_retrieval"]), ("face", ["experiment=casia_softmax_wen", "data.root=x"])],
)
def test_who_holds_the_templates_does_not_change_a_digest(job, given):
    one, other = (
        digest_of(from_values(RECIPES[job].training, compose(job, [*given, *more])), job)
        for more in ([], ["share_classes_from=2"])
    )
    assert one == other


@pytest.mark.parametrize("changed", ["probe.epochs=4", "data.train=[/a/d.parquet]", "encoder.weights=/v.pth"])
def test_settings_with_an_effect_change_a_digest(changed):
    assert digest(*FILES, "probe.epochs=3", changed) != "fe9fc15a421c"
