"""How many workers run, and what each of them gets, without a cluster."""

import pytest

from ssl_sec.data.samplers import worker_counts
from ssl_sec.edges.run.on_ray.scaling import describe_workers, find_shortage, make_scaling
from ssl_sec.errors import ConfigError
from ssl_sec.training.config import RayConfig


def test_more_workers_than_the_cluster_has_are_refused():
    with pytest.raises(ConfigError, match="runtime.num_workers: found 3, but the cluster has 2 CPUs; allowed: 1 to 2"):
        make_scaling(RayConfig(num_workers=3), [{"CPU": 2.0}])
    with pytest.raises(ConfigError, match="found 5, but the cluster has 4 GPUs"):
        make_scaling(RayConfig(num_workers=5), [{"CPU": 64.0, "GPU": 4.0}])
    with pytest.raises(ConfigError, match="runtime.cpus_per_worker: found 2 for 2 workers"):
        make_scaling(RayConfig(num_workers=2, cpus_per_worker=2), [{"CPU": 3.0}])
    with pytest.raises(ConfigError, match="but the cluster has 0 GPUs"):
        make_scaling(RayConfig(num_workers=1, device="cuda"), [{"CPU": 2.0}])


@pytest.mark.parametrize(
    ("options", "nodes", "num_workers", "cpus"),
    [
        ({"num_workers": 4, "device": "cuda"}, [{"CPU": 2.0}], 4, 1),
        ({"num_workers": 4, "device": "cuda", "cpus_per_worker": 8}, [{"CPU": 2.0}], 4, 8),
        ({"num_workers": 4}, [{"CPU": 2.0}, {"CPU": 16.0, "GPU": 2.0}], 4, 8),  # as much as the two that are here
        ({"num_workers": (4, 8)}, [{"CPU": 2.0}, {"CPU": 16.0, "GPU": 2.0}], (4, 8), 8),
        ({"num_workers": (4, 8), "device": "cuda"}, [], (4, 8), 1),
        ({"num_workers": 3, "device": "cpu"}, [{"CPU": 2.0}], 3, 1),
        ({"device": "cuda"}, [], 1, 1),
    ],
)
def test_workers_wait_for_nodes_of_a_cluster_that_grows(options, nodes, num_workers, cpus):
    scaling = make_scaling(RayConfig(**options, wait_for_nodes=True), nodes)
    assert (scaling.num_workers, scaling.resources_per_worker) == (num_workers, {"CPU": cpus})
    assert scaling.use_gpu == (options.get("device") != "cpu")
    allowed = "allowed: 1 to .*, or runtime.wait_for_nodes=true, if the cluster grows on demand$"
    with pytest.raises(ConfigError, match=allowed):
        make_scaling(RayConfig(**options), nodes)


def test_workers_that_wait_for_nodes_need_to_know_their_kind():
    with pytest.raises(
        ConfigError, match="^runtime.device: found 'auto', but the cluster has no GPUs yet; .*cuda, cpu"
    ):
        make_scaling(RayConfig(num_workers=2, wait_for_nodes=True), [{"CPU": 64.0}])


@pytest.mark.parametrize(
    ("num_workers", "nodes", "cpus"),
    [
        (2, [{"CPU": 8.0}, {"CPU": 4.0, "GPU": 1.0}, {"CPU": 4.0, "GPU": 1.0}], 4),  # the first has no GPU
        (3, [{"CPU": 8.0, "GPU": 4.0}, {"CPU": 8.0, "GPU": 4.0}], 4),  # two of them on one node
        (None, [{"CPU": 8.0, "GPU": 4.0}, {"CPU": 16.0, "GPU": 2.0}], 2),
        (8, [{"CPU": 8.0, "GPU": 4.0}, {"CPU": 8.0, "GPU": 4.0}], 2),
        (1, [{"CPU": 4.0}, {"CPU": 6.0}], 6),
        (3, [{"CPU": 4.0}, {"CPU": 6.0}], 3),
        ((1, 6), [{"CPU": 8.0, "GPU": 4.0}, {"CPU": 16.0, "GPU": 2.0}], 2),
    ],
)
def test_a_worker_gets_what_one_node_has(num_workers, nodes, cpus):
    assert make_scaling(RayConfig(num_workers=num_workers), nodes).resources_per_worker == {"CPU": cpus}


def test_workers_that_fit_no_node_are_refused_and_a_shortage_of_room_is_described():
    nodes = [{"CPU": 8.0, "GPU": 4.0}, {"CPU": 8.0, "GPU": 4.0}]
    message = "runtime.cpus_per_worker: found 5 for 3 workers, but the nodes have room for 2 of them; allowed: 1 to 4"
    with pytest.raises(ConfigError, match=message):
        make_scaling(RayConfig(num_workers=3, cpus_per_worker=5), nodes)
    with pytest.raises(ConfigError, match="found 3, but the cluster has 2 GPUs with a CPU on the same node"):
        make_scaling(RayConfig(num_workers=3), [{"CPU": 2.0, "GPU": 4.0}])
    scaling = make_scaling(RayConfig(num_workers=2), nodes)
    one_gpu_each = [{"CPU": 15.0, "GPU": 1.0}, {"CPU": 1.0, "GPU": 1.0}]
    assert scaling.resources_per_worker == {"CPU": 8}
    assert find_shortage(scaling, one_gpu_each) == ("the nodes have room for 1 worker with 8 CPUs each, must be 2")


def test_an_elastic_run_needs_the_minimum_of_workers_with_a_machines_share_each():
    cpus = make_scaling(RayConfig(num_workers=(2, 8), resize_interval_s=7.0), [{"CPU": 3.0}])
    assert (cpus.num_workers, cpus.resources_per_worker) == ((2, 8), {"CPU": 1})
    assert cpus.elastic_resize_monitor_interval_s == 7
    gpus = make_scaling(RayConfig(num_workers=(2, 8)), [{"CPU": 64.0, "GPU": 4.0}])
    assert (gpus.num_workers, gpus.use_gpu, gpus.resources_per_worker) == ((2, 8), True, {"CPU": 16})
    with pytest.raises(ConfigError, match="runtime.num_workers: found 4, but the cluster has 3 CPUs; allowed: 1 to 3"):
        make_scaling(RayConfig(num_workers=(4, 8)), [{"CPU": 3.0}])
    with pytest.raises(ConfigError, match="runtime.cpus_per_worker: found 2 for 2 workers"):
        make_scaling(RayConfig(num_workers=(2, 8), cpus_per_worker=2), [{"CPU": 3.0}])


def test_the_minimum_of_an_elastic_run_is_a_number_of_workers_that_can_share_the_batch():
    with pytest.raises(ConfigError, match="runtime.num_workers: found 4, but the cluster has 3 CPUs; allowed: 1 to 3"):
        make_scaling(RayConfig(num_workers=(3, 8)), [{"CPU": 3.0}], worker_counts(256))
    assert make_scaling(RayConfig(num_workers=(2, 8)), [{"CPU": 4.0}], worker_counts(256)).num_workers == (2, 8)
    scaling = make_scaling(RayConfig(num_workers=(3, 8)), [{"CPU": 4.0}], worker_counts(256))
    assert scaling.num_workers == (4, 8)
    assert find_shortage(scaling, [{"CPU": 3.0}]) == "the cluster has 3 CPUs, and the workers need 4"


@pytest.mark.parametrize(
    ("options", "resources", "expected"),
    [
        (RayConfig(), [{"CPU": 2.0}], "1 worker with 2 CPUs"),
        (RayConfig(num_workers=2), [{"CPU": 2.0}], "2 workers with 1 CPU each"),
        (RayConfig(num_workers=(2, 8)), [{"CPU": 64.0, "GPU": 4.0}], "2 to 8 workers with 16 CPUs and 1 GPU each"),
    ],
)
def test_workers_are_described_in_words(options, resources, expected):
    assert describe_workers(make_scaling(options, resources)) == expected


def test_a_cluster_that_lost_machines_is_described():
    scaling = make_scaling(RayConfig(num_workers=4), [{"CPU": 8.0, "GPU": 4.0}])
    assert find_shortage(scaling, [{"CPU": 8.0, "GPU": 4.0}]) is None
    assert find_shortage(scaling, [{"CPU": 8.0, "GPU": 3.0}]) == "the cluster has 3 GPUs, and the workers need 4"
    assert find_shortage(scaling, [{"CPU": 6.0, "GPU": 4.0}]) == "the cluster has 6 CPUs, and the workers need 8"
    elastic = make_scaling(RayConfig(num_workers=(1, 4)), [{"CPU": 8.0, "GPU": 4.0}])
    assert find_shortage(elastic, [{"CPU": 2.0, "GPU": 1.0}]) is None
    assert find_shortage(elastic, [{"CPU": 2.0}]) == "the cluster has 0 GPUs, and the workers need 1"


def test_workers_are_found_by_themselves():
    gpus = make_scaling(RayConfig(), [{"CPU": 64.0, "GPU": 8.0}])
    assert (gpus.num_workers, gpus.use_gpu, gpus.resources_per_worker) == (8, True, {"CPU": 8})
    one_gpu = make_scaling(RayConfig(), [{"CPU": 4.0, "GPU": 1.0}])
    assert (one_gpu.num_workers, one_gpu.use_gpu, one_gpu.resources_per_worker) == (1, True, {"CPU": 4})
    cpus = make_scaling(RayConfig(), [{"CPU": 2.0}])
    assert (cpus.num_workers, cpus.use_gpu, cpus.resources_per_worker) == (1, False, {"CPU": 2})
    on_cpus = make_scaling(RayConfig(device="cpu"), [{"CPU": 16.0, "GPU": 8.0}])
    assert (on_cpus.num_workers, on_cpus.use_gpu, on_cpus.resources_per_worker) == (1, False, {"CPU": 16})
    forced = make_scaling(RayConfig(device="cpu", num_workers=4), [{"CPU": 16.0, "GPU": 8.0}])
    assert (forced.num_workers, forced.use_gpu, forced.resources_per_worker) == (4, False, {"CPU": 4})
