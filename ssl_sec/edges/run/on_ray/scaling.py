"""How many workers run, and what each of them gets of the nodes of a Ray cluster."""

from collections.abc import Mapping, Sequence
from typing import cast

import ray

# Ray's public table of placement groups has no jobs; the test of the wait for room notices if these names change.
from ray._private.state import state
from ray.core.generated.gcs_pb2 import PlacementGroupTableData  # pyright: ignore[reportAttributeAccessIssue]
from ray.train import ScalingConfig

from ssl_sec.errors import ConfigError, counted
from ssl_sec.training.config import RayConfig

# Kind of resource, such as "CPU" and "GPU" -> amount of it, for each node.
Nodes = Sequence[Mapping[str, float]]


def node_resources() -> Nodes:
    """The resources of each living node of the cluster."""
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def make_scaling(options: RayConfig, nodes: Nodes, counts: Sequence[int] | None = None) -> ScalingConfig:
    """Chooses the number of workers and the resources of each, which must be those of one node.

    Args:
        options: the runtime of the run.
        nodes: the nodes of the cluster.
        counts: the numbers of workers that the run can have; None for any.

    Raises:
        ConfigError: if the cluster has too few resources, and the run does not wait for nodes, or it is not known what
            it waits for.
    """
    num_gpus, num_cpus = _total(nodes, "GPU"), _total(nodes, "CPU")
    if options.wait_for_nodes and options.device == "auto" and num_gpus == 0:
        raise ConfigError(
            "runtime.device: found 'auto', but the cluster has no GPUs yet; allowed with "
            "runtime.wait_for_nodes=true: cuda, cpu"
        )
    use_gpu = options.device == "cuda" or (options.device == "auto" and num_gpus > 0)
    available = num_gpus if use_gpu else num_cpus
    if isinstance(options.num_workers, tuple):
        least, most = options.num_workers
        least = least if counts is None else min(count for count in counts if count >= least)
        # The resources of a worker are fixed while machines come and go: its share of the machines present now.
        sharing = available if use_gpu else 0
    else:
        least = most = options.num_workers or (max(1, num_gpus) if use_gpu else 1)
        sharing = min(least, available)  # the others wait for nodes
    cpus = options.cpus_per_worker or (max(1, _most_cpus(nodes, sharing, use_gpu)) if sharing else 1)
    if not options.wait_for_nodes:
        _require_room(nodes, least, cpus, use_gpu)
    return ScalingConfig(
        num_workers=(least, most) if isinstance(options.num_workers, tuple) else least,
        use_gpu=use_gpu,
        resources_per_worker={"CPU": cpus},
        elastic_resize_monitor_interval_s=options.resize_interval_s,
    )


def _require_room(nodes: Nodes, workers: int, cpus: int, use_gpu: bool) -> None:
    kind = "GPU" if use_gpu else "CPU"
    if workers > (available := _total(nodes, kind)):
        raise ConfigError(
            f"runtime.num_workers: found {workers}, but the cluster has {counted(available, kind)}; allowed: 1 to "
            f"{available}, or runtime.wait_for_nodes=true, if the cluster grows on demand"
        )
    if (room := _room(nodes, 1, use_gpu)) < workers:
        raise ConfigError(
            f"runtime.num_workers: found {workers}, but the cluster has {counted(room, 'GPU')} with a CPU on the same "
            f"node; allowed: 1 to {room}"
        )
    if (room := _room(nodes, cpus, use_gpu)) < workers:
        raise ConfigError(
            f"runtime.cpus_per_worker: found {cpus} for {counted(workers, 'worker')}, but the nodes have room for "
            f"{room} of them; allowed: 1 to {_most_cpus(nodes, workers, use_gpu)}"
        )


def describe_workers(scaling: ScalingConfig) -> str:
    """For example `2 to 8 workers with 4 CPUs and 1 GPU each`."""
    workers = scaling.num_workers
    count = f"{workers[0]} to {workers[1]}" if isinstance(workers, tuple) else str(workers)
    cpus = int(cast(dict[str, float], scaling.resources_per_worker)["CPU"])
    each = counted(cpus, "CPU") + (" and 1 GPU" if scaling.use_gpu else "")
    return f"1 worker with {each}" if count == "1" else f"{count} workers with {each} each"


def find_shortage(scaling: ScalingConfig, nodes: Nodes) -> str | None:
    """Describes which resources the cluster lacks while machines are away; None if it lacks none."""
    a_worker: dict[str, float] = {"GPU": 1.0} if scaling.use_gpu else {}
    a_worker |= cast(dict[str, float], scaling.resources_per_worker)
    for kind, each in a_worker.items():
        needed, found = round(scaling.min_workers * each), _total(nodes, kind)
        if found < needed:
            return f"the cluster has {counted(found, kind)}, and the workers need {needed}"
    cpus = round(a_worker["CPU"])
    if (room := _room(nodes, cpus, bool(scaling.use_gpu))) < scaling.min_workers:
        return (
            f"the nodes have room for {counted(room, 'worker')} with {counted(cpus, 'CPU')} each, must be "
            f"{scaling.min_workers}"
        )
    return None


def find_wait() -> str | None:
    """Describes what is free in the cluster while this job's workers wait for room; None if they do not."""
    job = ray.get_runtime_context().get_job_id()
    groups = map(PlacementGroupTableData.FromString, state._connect_and_get_accessor().get_placement_group_table())
    if not any(each.creator_job_id.hex() == job and each.state == each.PENDING for each in groups):
        return None
    free, all_nodes = ray.available_resources(), node_resources()
    return " and ".join(counted(int(free.get(kind, 0)), kind) for kind in ("CPU", "GPU") if _total(all_nodes, kind))


def _total(nodes: Nodes, kind: str) -> int:
    return sum(int(node.get(kind, 0)) for node in nodes)


def _room(nodes: Nodes, cpus: int, use_gpu: bool) -> int:
    """How many workers with this number of CPUs, and a GPU, the nodes have room for."""
    by_cpus = [int(node.get("CPU", 0)) // cpus for node in nodes]
    return sum(map(min, by_cpus, (int(node.get("GPU", 0)) for node in nodes))) if use_gpu else sum(by_cpus)


def _most_cpus(nodes: Nodes, workers: int, use_gpu: bool) -> int:
    """The largest number of CPUs that each of the workers can have; 0 if not even one."""
    largest = max((int(node.get("CPU", 0)) for node in nodes), default=0)
    return next((cpus for cpus in range(largest, 0, -1) if _room(nodes, cpus, use_gpu) >= workers), 0)
