"""The metrics of a run among Ray's."""

import threading
import time
import urllib.request

import pytest
import ray

from ssl_sec.edges.run.driver import run_training
from ssl_sec.edges.run.on_ray import gauges
from ssl_sec.edges.run.on_ray.gauges import IMAGES_PER_S, LOSS, STEP, RunGauges
from ssl_sec.recipes.registry import PRETRAIN
from tests.cluster.test_dashboard import named
from tests.edges.run.faulty import config_of, folder_of, steps_so_far


@pytest.fixture
def shown(monkeypatch) -> dict[str, list]:
    """The values that gauges were set to, with their tags."""
    found: dict[str, list] = {}

    class Gauge:
        def __init__(self, name: str, description: str, tag_keys: tuple[str, ...]) -> None:
            assert description and set(tag_keys) == {"run", "recipe", "output_dir"}
            self._values = found.setdefault(name, [])

        def set(self, value: float, tags: dict[str, str]) -> None:
            self._values.append((value, tags["run"], tags["recipe"], tags["output_dir"]))

    monkeypatch.setattr(gauges, "Gauge", Gauge)
    return found


def test_the_newest_metrics_of_a_run_are_shown_once_and_its_speed_ends(shown):
    sink = RunGauges("/runs/digits/it")
    sink([{"time": 1.0, "message": "INFO: it starts"}])
    assert shown == {STEP: [], IMAGES_PER_S: [], LOSS: []}
    sink(
        [
            {"step": 0, "metrics": {"train/loss": 3.0, "train/images_per_s": 100.0}},
            {"step": 1, "metrics": {"train/loss": 2.0, "train/images_per_s": 200.0}},
            {"step": 2, "metrics": {"val/knn_top1": 50.0}},
        ]
    )
    assert shown == {
        STEP: [(2, "it", "digits", "/runs")],
        IMAGES_PER_S: [(200.0, "it", "digits", "/runs")],
        LOSS: [(2.0, "it", "digits", "/runs")],
    }
    sink.close()
    assert shown[IMAGES_PER_S][-1] == (0.0, "it", "digits", "/runs") and len(shown[STEP]) == 1


def test_runs_of_one_name_in_two_output_folders_are_told_apart(shown):
    for location in ("/ada/runs/digits/it", "s3://me:secret@bucket/runs/digits/it", "/ada/Läufe/digits/it"):
        RunGauges(location)([{"step": 1, "metrics": {}}, {"step": 2, "metrics": {"train/loss": 1.0}}])
    assert shown[STEP] == [
        (2, "it", "digits", "/ada/runs"),
        (2, "it", "digits", "s3://***@bucket/runs"),
        (2, "it", "digits", "/ada/L%C3%A4ufe"),
    ]


@pytest.mark.slow
@pytest.mark.distributed
def test_a_page_of_ray_has_the_metrics_of_a_run_and_all_that_the_dashboard_draws(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # Not another Ray of this machine, which the address None might mean.
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    (node,) = ray.nodes()
    address = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    run, wanted, page = folder_of(tmp_path), named(), ""
    gpus = {name for name in wanted if "gpu" in name or "gram" in name}
    long = config_of(tmp_path, "runtime.num_workers=1", "epochs=3000", "monitor.every_epochs=3000")
    stopped: list[BaseException] = []

    def go() -> None:
        try:
            run_training(PRETRAIN, long)
        except Exception as error:
            stopped.append(error)

    thread = threading.Thread(target=go)
    thread.start()
    try:
        deadline = time.monotonic() + 400
        missing = wanted - gpus
        while missing and thread.is_alive() and time.monotonic() < deadline:
            time.sleep(3)
            with urllib.request.urlopen(address, timeout=10) as answer:
                page = answer.read().decode()
            missing = {name for name in wanted - gpus if f"\n{name}{{" not in page}
        assert not missing
        (line,) = [line for line in page.splitlines() if line.startswith("ray_ssl_sec_step{")]
        assert 'run="it"' in line and 'recipe="digits"' in line and f'output_dir="{run.path.parents[1]}"' in line
        assert 0 <= float(line.rpartition(" ")[2]) <= steps_so_far(run)
    finally:
        run.stop_path.parent.mkdir(parents=True, exist_ok=True)
        run.stop_path.touch()
        thread.join()
        ray.shutdown()
    assert "resume it with" in str(stopped)
