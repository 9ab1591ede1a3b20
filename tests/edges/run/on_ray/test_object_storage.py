"""Two Ray nodes without a shared folder, with runs in object storage that is slow, fails or is unavailable."""

import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
import ray
import torch
from ray.cluster_utils import Cluster
from safetensors.torch import load_file

from ssl_sec.edges.folder.finding import downloaded
from ssl_sec.edges.folder.folder import RunFolder
from ssl_sec.edges.folder.stored import StoredFolder
from ssl_sec.edges.run.driver import run_training
from ssl_sec.edges.storage.bucket import Bucket
from ssl_sec.edges.storage.places import local_folder
from ssl_sec.errors import Stopped, StorageError
from ssl_sec.recipes.registry import FACE, PRETRAIN
from ssl_sec.training.checkpoint import load_checkpoint
from tests import jobs
from tests.edges.conftest import QUICK_FACE, WHOLE_FACE
from tests.edges.run.faulty import RUN, Once, config_of, figures, kill, messages, steps_so_far
from tests.edges.servers import ceph_server
from tests.edges.storage.faulty_server import Faults, faulty
from tests.jobs import configured

pytestmark = [pytest.mark.slow, pytest.mark.distributed]


@pytest.fixture(scope="module")
def server(request, tmp_path_factory) -> Iterator[str]:
    """The address of an S3 server: Ceph's where it is installed, else one in this process."""
    if shutil.which("radosgw") is None:
        yield request.getfixturevalue("s3_server")
        return
    with ceph_server(tmp_path_factory.mktemp("ceph"), "the-key", "the-secret") as address:
        yield address


@pytest.fixture(scope="module")
def storage(server):
    """The faults of a proxy before the server, whose address is in the environment; it has a container."""
    with faulty(server) as (address, faults), pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "AWS_ACCESS_KEY_ID": "the-key",
            "AWS_SECRET_ACCESS_KEY": "the-secret",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": address,
        }.items():
            patch.setenv(name, value)
        fsspec.get_filesystem_class("s3").clear_instance_cache()
        fsspec.filesystem("s3").mkdir("nodes")
        yield faults
    fsspec.get_filesystem_class("s3").clear_instance_cache()


@pytest.fixture(scope="module")
def cluster(storage, tmp_path_factory):
    """Two nodes of one CPU, the driver on the first; each has a staging folder of its own."""
    root = tmp_path_factory.mktemp("nodes")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        patch.setenv("SSL_SEC_STAGING", str(root / "first"))
        # Concurrent tests would join it.
        patch.setattr("ray._private.utils.write_ray_address", lambda address: None)
        health = {
            "health_check_initial_delay_ms": 0,
            "health_check_period_ms": 500,
            "health_check_failure_threshold": 4,
        }
        head = {"num_cpus": 1, "include_dashboard": False, "_system_config": health}
        cluster = Cluster(initialize_head=True, head_node_args=head)
        ray.init(address=cluster.address, log_to_driver=False)
        patch.setenv("SSL_SEC_STAGING", str(root / "second"))
        cluster.second = cluster.add_node(num_cpus=1)
        patch.setenv("SSL_SEC_STAGING", str(root / "first"))
        yield cluster
        ray.shutdown()
        cluster.shutdown()


@pytest.fixture
def faults(storage: Faults):
    """No faults before and after a test."""
    yield storage
    storage.__init__()


@pytest.fixture(scope="module")
def whole(cluster, tmp_path_factory) -> RunFolder:
    """The run without a fault, in a folder that both nodes share."""
    folder = tmp_path_factory.mktemp("whole")
    run_training(PRETRAIN, config_of(folder))
    return RunFolder(folder / "digits" / "it")


@pytest.fixture
def url(request) -> str:
    """The URL of a test's runs."""
    return f"s3://nodes/{abs(hash(request.node.name)):x}"


def staged(url: str) -> RunFolder:
    """The driver's folder of the run."""
    return RunFolder(local_folder(url) / "digits" / "it")


def assert_bit_equal(url: str, whole: RunFolder) -> None:
    """Weights, optimiser, μ and figures, to the last bit, as the storage has them."""
    run = downloaded(f"{url}/digits/it")
    assert isinstance(run, StoredFolder)
    states = [load_checkpoint(each.find_checkpoint().path, torch.device("cpu")) for each in (run, whole)]
    torch.testing.assert_close(states[0], states[1], rtol=0, atol=0)
    torch.testing.assert_close(load_file(run.encoder_path), load_file(whole.encoder_path), rtol=0, atol=0)
    assert figures(run) == figures(whole)
    files = Bucket(f"{url}/digits/it").files().keys()
    assert "plots/curves.png" in files and "unclosed" not in files
    names = [name for name in files if name.startswith("checkpoints/")]
    kept = sorted({name.split("/")[1] for name in names})  # slow storage skips some
    assert kept[-1] == "step-000000008" and len(kept) <= 3
    assert all(name.endswith(("manifest.json", "state.pt")) for name in names)


def test_two_nodes_without_a_common_folder_give_the_run_of_a_common_one(cluster, whole, url):
    run_training(PRETRAIN, config_of(url))
    assert len({worker["node"] for worker in staged(url).workers()}) == 2
    for node in ("first", "second"):  # neither keeps what has been uploaded
        assert not list(Path(node).rglob("state.pt")) and not list(Path(node).rglob("workers/*/digits/it"))
    assert_bit_equal(url, whole)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_worker_changes_nothing(cluster, whole, url, rank):
    with Once(lambda: steps_so_far(staged(url)) >= 5, lambda: kill(staged(url), rank)) as killing:
        run_training(PRETRAIN, config_of(url))
    assert killing.happened
    assert len(staged(url).workers()) == 4
    assert_bit_equal(url, whole)


def test_sharded_templates_are_restored_after_a_kill(cluster, digit_pairs, url, tmp_path):
    options = [
        *QUICK_FACE,
        *WHOLE_FACE,
        "run_name=it",
        "share_classes_from=10",
        "checkpoint.every_epochs=1",
        digit_pairs,
    ]
    options += ["runtime=ray", "runtime.num_workers=2", "runtime.cpus_per_worker=1"]
    configs = [configured("face", [*options, f"output_dir={place}"]) for place in (url, tmp_path)]
    with Once(lambda: steps_so_far(staged(url)) >= 6, lambda: kill(staged(url), 1)) as killing:
        run_training(FACE, configs[0])
    expected = run_training(FACE, configs[1]).folder
    assert killing.happened
    run = downloaded(f"{url}/digits/it")
    places = [each.find_checkpoint().path for each in (run, expected)]
    assert len(list(places[0].glob("rows-*.safetensors"))) == 2
    states = [load_checkpoint(place, torch.device("cpu"), held=slice(0, 10)) for place in places]
    torch.testing.assert_close(states[0], states[1], rtol=0, atol=0)
    assert figures(run) == figures(expected)


def test_a_stopped_run_resumes_from_the_storage_alone(cluster, whole, url):
    run = staged(url)
    with (
        Once(lambda: steps_so_far(run) >= 1, run.stop_path.touch),
        pytest.raises(Exception, match=f"stopped; resume it with: .*resume={url}/digits/it"),
    ):
        run_training(PRETRAIN, config_of(url))
    for node in ("first", "second"):
        shutil.rmtree(node, ignore_errors=True)
    run_training(PRETRAIN, config_of(url, "resume=true"))
    assert_bit_equal(url, whole)


def test_a_killed_driver_and_the_same_run_again_change_nothing(cluster, whole, url):
    command = [sys.executable, "-m", "jobs.pretrain", *RUN, f"output_dir={url}", "run_name=it"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "RAY_ADDRESS": cluster.address}
    checkpoints = Bucket(f"{url}/digits/it/checkpoints")
    driver = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
    try:
        while not any(name.endswith("manifest.json") for name in checkpoints.files()):
            assert driver.poll() is None
            time.sleep(0.05)
    finally:
        driver.kill()
        driver.wait()
    again = subprocess.run([*command, "resume=true"], env=environment, capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    assert_bit_equal(url, whole)


def test_slow_and_unreliable_storage_changes_nothing(cluster, whole, url, faults):
    faults.latency_s, faults.failing, faults.cut = 0.2, 0.05, 0.2
    run_training(PRETRAIN, config_of(url))
    assert faults.counts["failed"] > 0 and faults.counts["cut"] > 0
    faults.latency_s = faults.failing = faults.cut = 0.0
    assert_bit_equal(url, whole)


def test_a_storage_outage_of_a_minute_delays_no_step(cluster, whole, url, faults, caplog):
    run, back = staged(url), threading.Timer(60, lambda: setattr(faults, "is_away", False))

    def leave() -> None:
        faults.is_away = True
        back.start()

    with Once(lambda: steps_so_far(run) >= 3, leave) as leaving:
        run_training(PRETRAIN, config_of(url))
    assert leaving.happened and faults.counts["away"] > 0
    assert "it is retried" in caplog.text + messages(run)
    back.join()
    assert_bit_equal(url, whole)


def test_a_worker_killed_in_a_storage_outage_waits_for_its_end(cluster, whole, url, faults):
    run, back = staged(url), threading.Timer(150, lambda: setattr(faults, "is_away", False))

    def leave() -> None:
        faults.is_away = True
        kill(run, 1)
        back.start()

    with Once(lambda: steps_so_far(run) >= 5, leave) as leaving:
        run_training(PRETRAIN, config_of(url))
    assert leaving.happened
    assert "it is retried for up to 600 s" in messages(run)
    back.join()
    assert_bit_equal(url, whole)


def test_a_stop_ends_the_wait_for_storage_that_is_away(cluster, url, faults):
    run, stopped_at = staged(url), []

    def leave() -> None:
        faults.is_away = True
        kill(run, 1)

    def stop() -> None:
        run.stop_path.touch()
        stopped_at.append(time.monotonic())
        faults.is_away = False  # or the end would wait a minute for its last upload

    with (
        Once(lambda: steps_so_far(run) >= 5, leave) as leaving,
        Once(lambda: leaving.happened and "it is retried for up to 600 s" in messages(run), stop),
        pytest.raises(Stopped),
    ):
        run_training(PRETRAIN, config_of(url))
    assert time.monotonic() - stopped_at[0] < 30


@pytest.mark.parametrize(
    ("refused", "reason"),
    [
        (
            (403, "InvalidAccessKeyId", "The AWS Access Key Id you provided does not exist in our records."),
            "Access Key",
        ),
        ((403, "QuotaExceeded", "the bucket is full"), "full"),
    ],
)
def test_refused_storage_ends_the_run_in_one_line_with_exit_code_4(cluster, url, faults, refused, reason, capsys):
    faults.refused = refused
    with pytest.raises(StorageError, match=reason) as caught:
        jobs.pretrain([*RUN, f"output_dir={url}", "run_name=it"])
    assert caught.value.exit_code == 4
    assert "\n" not in str(caught.value) and "the-secret" not in str(caught.value) + capsys.readouterr().err


def test_storage_that_fills_ends_the_run_and_keeps_checkpoints(cluster, url, faults):
    run = staged(url)
    with (
        Once(
            lambda: any(name.endswith("manifest.json") for name in Bucket(f"{url}/digits/it/checkpoints").files()),
            lambda: setattr(faults, "refused", (403, "QuotaExceeded", "the bucket is full")),
        ) as filling,
        pytest.raises(StorageError, match="the bucket is full; it is in .*/.uploads/step-.* on "),
    ):
        run_training(PRETRAIN, config_of(url, "epochs=400", "checkpoint.every_epochs=1"))
    assert filling.happened and run.failures() == []
    faults.refused = None
    assert any(name.endswith("manifest.json") for name in Bucket(f"{url}/digits/it/checkpoints").files())


def test_a_lost_node_leaves_a_run_on_the_other(cluster, whole, url, monkeypatch):
    lost = cluster.second
    run = staged(url)
    elastic = ("runtime.num_workers=[1,2]", "runtime.start_timeout_s=5", "runtime.resize_interval_s=1")
    exact = ("runtime.precision=float64", "probe.enabled=false")
    with Once(lambda: steps_so_far(run) >= 3, lambda: cluster.remove_node(lost, allow_graceful=False)) as losing:
        run_training(PRETRAIN, config_of(url, *elastic, *exact))
    assert losing.happened
    monkeypatch.setenv("SSL_SEC_STAGING", str(Path("second").resolve()))
    cluster.second = cluster.add_node(num_cpus=1)
    monkeypatch.undo()
    both = config_of(f"{url}/both", *exact)
    run_training(PRETRAIN, both)
    curves = [
        {(step, name): value for step, name, value in figures(downloaded(f"{place}/digits/it"))}
        for place in (url, f"{url}/both")
    ]
    assert curves[0] == pytest.approx(curves[1], rel=1e-8)
