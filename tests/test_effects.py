from dataclasses import dataclass

import pytest

from ssl_sec.data.config import DataConfig
from ssl_sec.effects import (
    Content,
    ImageFiles,
    NoEffect,
    NoEffectYetKept,
    file_names,
    image_files,
    is_among,
    kept_by_resume,
    without_effect,
)
from ssl_sec.recipes.registry import RECIPES, trainings
from ssl_sec.rules import Local
from ssl_sec.settings import Settings


@dataclass(frozen=True, kw_only=True)
class Part(Settings):
    root: Local
    files: ImageFiles[tuple[str, ...]] = ()
    size: int = 1


@dataclass(frozen=True, kw_only=True)
class Whole(Settings):
    parts: tuple[Part, ...] = ()
    part: NoEffect[Part | None] = None
    count: NoEffect[int] = 1
    rows: NoEffectYetKept[int] = 1
    weights: Content | None = None
    epochs: int = 1


def test_marks_count_in_groups_unions_and_lists():
    assert without_effect(Whole) == {"count", "rows", "part", "part.root", "parts.root"}
    assert image_files(Whole) == {"part.files", "parts.files"}
    assert kept_by_resume(Whole) == {"rows"}


@pytest.mark.parametrize(
    ("key", "expected"), [("part", True), ("part.size", True), ("parts", False), ("parts.root", True), ("count", True)]
)
def test_a_key_is_among_keys_by_itself_or_its_group(key, expected):
    assert is_among(key, without_effect(Whole)) == expected


def test_marked_values_are_checked_by_their_types():
    with pytest.raises(ValueError, match="count: found"):
        Whole(count=float("nan"))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("name", trainings())
def test_how_and_where_a_training_runs_has_no_effect(name):
    keys = without_effect(RECIPES[name].config)
    assert {"runtime", "tracking", "checkpoint", "resume", "output_dir", "log_every_steps"} <= keys
    # The best of the measured epochs is the result of a fine-tuning.
    assert is_among("monitor.every_epochs", keys) == (name != "finetune")
    assert not {"epochs", "steps", "seed", "loss", "constraint", "encoder.weights", "head.weights", "data.name"} & keys


def test_the_places_of_data_sets_have_no_effect():
    assert without_effect(DataConfig) == {"root", "download", "cache_folder", "index_folder", "resident_limit_mib"}
    assert image_files(DataConfig) == {"train", "test", "query", "gallery"}


def test_names_of_files():
    assert file_names(["s3://bucket/a/b.parquet", "c.parquet"]) == ["b.parquet", "c.parquet"]
    assert file_names(None) is None
