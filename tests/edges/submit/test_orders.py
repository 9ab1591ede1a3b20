"""Where the runs of a submitted job are, and its data."""

import pytest

from ssl_sec.edges.submit.orders import Order, check_command, following_stages, passed_environment
from ssl_sec.edges.submit.submission import submit_order
from ssl_sec.errors import ConfigError
from tests.edges.submit.test_submission import SentJobs


@pytest.fixture(autouse=True)
def no_cluster_on_this_machine(monkeypatch):
    monkeypatch.setattr("ssl_sec.edges.submit.cluster.find_gcs_addresses", set)


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
    assert shown["MLflow"].endswith(" or else sqlite:////shared/runs/mlflow.db")


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
    lists = ("data=digits", "data.leave_out=[out.csv,s3://bucket/redundant.parquet]")
    assert sent(*lists, is_local=True) == [f"data.leave_out=['{tmp_path}/out.csv','s3://bucket/redundant.parquet']"]
    assert sent("data=cifar10", "data.download=true") == sent("data=cifar10", "data.root=/data") == sent() == []


def completed(*overrides: str, is_local: bool = False) -> tuple[str, ...]:
    """What is added to a pretraining, after its name."""
    given = ("experiment=digits", *overrides)
    return check_command("pretrain", given, "it", is_local).overrides[len(given) + 1 :]


def test_a_home_or_a_file_url_is_the_folder_that_it_names(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert completed("output_dir=~/runs", is_local=True) == (f"output_dir={tmp_path}/runs",)
    assert completed("output_dir=file:///shared/runs") == ()
    with pytest.raises(ConfigError, match="^output_dir: found '~/runs', must be an absolute path on storage"):
        completed("output_dir=~/runs")


def test_a_store_that_only_this_machine_reaches_is_refused_for_another_cluster(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    relative, loopback = "sqlite:///runs/mlflow.db", "http://localhost:5000"
    folder = "output_dir=/shared/runs"
    assert completed(folder, f"tracking.uri={relative}", is_local=True) == (
        f"tracking.uri=sqlite:///{tmp_path}/runs/mlflow.db",
    )
    assert completed(folder, f"tracking.uri={loopback}", is_local=True) == ()
    assert completed(folder, "tracking.uri=sqlite:////shared/mlflow.db") == ()
    for uri in (relative, loopback):
        with pytest.raises(ConfigError, match=f"^tracking.uri: found '{uri}', which the cluster's nodes cannot reach"):
            completed(folder, f"tracking.uri={uri}")
        monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
        with pytest.raises(ConfigError, match="^MLFLOW_TRACKING_URI: found "):
            passed_environment(is_local=False)
    assert passed_environment(is_local=True)["MLFLOW_TRACKING_URI"] == loopback
    monkeypatch.setenv("MLFLOW_TRACKING_URI", relative)
    assert passed_environment(is_local=True)["MLFLOW_TRACKING_URI"] == f"sqlite:///{tmp_path}/runs/mlflow.db"


@pytest.mark.parametrize(
    ("output_dir", "own"), [("s3://bucket/runs", "in mlflow.db"), ("/shared/runs", "sqlite:////shared/runs/mlflow.db")]
)
def test_without_an_address_the_store_of_a_run_is_that_of_the_nodes(output_dir, own, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    order = Order(job="pretrain", overrides=("experiment=digits", f"output_dir={output_dir}"), name="it")
    assert submit_order(order, SentJobs())["MLflow"].startswith(f"at MLFLOW_TRACKING_URI of the nodes, or else {own}")


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("tracking.tags={api_token: abc}", "tracking.tags"),
        ("+tracking.tags.password=geheim", "tracking.tags.password"),
    ],
)
def test_the_values_of_secret_keys_are_refused(override, key):
    with pytest.raises(ConfigError, match=rf"^{key}=\*\*\*: found credentials"):
        completed("output_dir=/shared/runs", override)


def test_the_probe_of_a_chain_takes_the_folder_of_the_run_before_it():
    trained = check_command("pretrain", ("experiment=digits", "output_dir=s3://b/runs"), "it", is_local=False)
    (stage,) = following_stages("probe", trained, is_local=False)
    assert "run=s3://b/runs/digits/it" in stage.overrides


def test_a_probe_has_the_runtime_and_the_tracking_of_its_pretraining():
    shared = ("runtime.num_workers=2", "++runtime.precision=float32", "++tracking.tags={a: 1}")
    trained = check_command("pretrain", ("output_dir=/shared", *shared, "tracking.system_metrics=false"), "a", False)
    (probe,) = following_stages("probe", trained, is_local=False)
    assert [each for each in probe.overrides if "runtime" in each or "tracking" in each] == list(shared)


@pytest.mark.parametrize("then", ["", "'probe"])
def test_what_follows_must_be_a_command(then):
    trained = check_command("pretrain", ("experiment=digits", "output_dir=/shared/runs"), "it", is_local=False)
    with pytest.raises(ConfigError, match="^--then: found .*; allowed: probe, or"):
        following_stages(then, trained, is_local=False)


def test_a_run_that_only_the_nodes_see_is_resumed_by_its_name():
    with pytest.raises(ConfigError, match="holds no run; .* its settings with run_name=it resume=auto$"):
        completed("resume=/shared/runs/digits/it/")
