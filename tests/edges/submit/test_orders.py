"""Where the runs of a submitted job are, and its data."""

import pytest

from ssl_sec.edges.submit.orders import Order, check_command
from ssl_sec.edges.submit.submission import submit_order
from ssl_sec.errors import ConfigError
from tests.edges.submit.test_submission import SentJobs


def test_a_probe_of_a_folder_takes_the_output_folder_of_its_run_unless_another_is_given(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def sent(*overrides: str, is_local: bool = False) -> tuple[str, ...]:
        found = check_command("probe", overrides, "p", is_local=is_local).overrides
        return tuple(each for each in found if each.startswith(("run=", "output_dir=")))

    assert sent("run=/shared/runs/digits/it") == ("run=/shared/runs/digits/it",)
    assert sent("run=s3://bucket/runs/digits/it") == ("run=s3://bucket/runs/digits/it",)
    assert sent("run=digits/it", is_local=True) == (f"run={tmp_path}/digits/it",)
    with pytest.raises(
        ConfigError, match="^run: found 'digits/it', must be an absolute path on storage that all nodes"
    ):
        sent("run=digits/it")
    given = ("run=/shared/runs/digits/it", "output_dir=/other")
    assert sent(*given) == given
    assert sent("run=abc", is_local=True) == ("run=abc", f"output_dir={tmp_path}/runs")
    cluster = SentJobs()
    shown = submit_order(Order(job="probe", overrides=("run=/shared/runs/digits/it",), name="p"), cluster)
    assert "output_dir" not in cluster.sent[0][0]
    assert shown["MLflow"] == "sqlite:////shared/runs/mlflow.db"


def test_relative_paths_of_data_become_absolute_here_and_are_refused_elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def sent(*overrides: str, is_local: bool = False) -> list[str]:
        given = ("experiment=digits", "output_dir=/shared/runs", *overrides)
        found = check_command("pretrain", given, "it", is_local=is_local)
        return list(found.overrides[len(given) + 1 :])  # after those that were given, and the name

    assert sent("data=folder", "data.root=my photos (1)", is_local=True) == [f"data.root='{tmp_path}/my photos (1)'"]
    shards = ("data=parquet", "data.train=[a/*.parquet,s3://bucket/b.parquet,~/c.parquet]", "data.test=[/d.parquet]")
    others = "'s3://bucket/b.parquet','~/c.parquet'"
    assert sent(*shards, is_local=True) == [f"data.train=['{tmp_path}/a/*.parquet',{others}]"]
    with pytest.raises(
        ConfigError, match=r"^data.train: found 'a/\*.parquet', must be an absolute path .*, or a URL: no"
    ):
        sent(*shards)
    with pytest.raises(
        ConfigError, match="^data.root: found 'data', must be an absolute path that all nodes see: no data"
    ):
        sent("data=cifar10")
    assert sent("data=cifar10", "data.download=true") == sent("data=cifar10", "data.root=/data") == sent() == []
