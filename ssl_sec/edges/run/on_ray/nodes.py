"""The nodes of a run in MLflow: a description of the cluster, and the utilisation of each node.

Ray measures each of its nodes, and shows the metrics on a page of that node, for Prometheus. The driver reads these
pages and logs them. So the workers need neither MLflow nor its credentials, any store can be used, and training is not
affected.
"""

import logging
import threading
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import ray
from prometheus_client.parser import text_string_to_metric_families

# Ray gives the address only to the call of `ray.init` that connects, which need not be ours.
from ray._private.worker import get_dashboard_url

from ssl_sec.edges.folder.folder import RunFolder
from ssl_sec.errors import counted, first_line

if TYPE_CHECKING:
    from ssl_sec.edges.tracking.deferred import DeferredRun

logger = logging.getLogger("ssl_sec")

_MEGABYTE = 1e6
# MLflow's names -> Ray's names, with MLflow's unit in Ray's unit.
_FIGURES = {
    "cpu_utilization_percentage": ("ray_node_cpu_utilization", 1.0),
    "system_memory_usage_megabytes": ("ray_node_mem_used", _MEGABYTE),
    "disk_usage_percentage": ("ray_node_disk_utilization_percentage", 1.0),
    "disk_usage_megabytes": ("ray_node_disk_usage", _MEGABYTE),
    "disk_available_megabytes": ("ray_node_disk_free", _MEGABYTE),
    "network_receive_megabytes": ("ray_node_network_received", _MEGABYTE),
    "network_transmit_megabytes": ("ray_node_network_sent", _MEGABYTE),
}
_GPU_FIGURES = {
    "utilization_percentage": ("ray_node_gpus_utilization", 1.0),
    "memory_usage_megabytes": ("ray_node_gram_used", _MEGABYTE / 2**20),  # Ray counts MiB
    "power_usage_watts": ("ray_node_gpu_power_milliwatts", 1000.0),
}
_ANSWER_WITHIN_S = 3.0
# Prefix of Ray's names of resources for the types of a node's GPUs.
_ACCELERATOR = "accelerator_type:"
# Samples without an answer after which a warning is logged: a node that joins needs a moment to show its metrics.
_WARN_AFTER = 3
_END_WITHIN_S = 5.0

# The nodes are in the driver's network, so a proxy in the environment cannot reach them.
_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def describe_cluster() -> str:
    """The cluster that this process has joined, in Markdown, with a link to the job if there is a dashboard.

    For example `2 nodes, 24 CPUs, 6 GPUs (4 H100, 2 A100), Ray 2.60.0`.
    """
    alive = [node for node in ray.nodes() if node["Alive"]]
    cpus, gpus = (int(sum(node["Resources"].get(kind, 0) for node in alive)) for kind in ("CPU", "GPU"))
    types = Counter[str]()
    for node in alive:
        for name in node["Resources"]:
            if name.startswith(_ACCELERATOR):
                types[name.removeprefix(_ACCELERATOR)] += int(node["Resources"].get("GPU", 0))
    known = ", ".join(f"{count} {name}" for name, count in sorted(types.items()) if count)
    parts = [
        counted(len(alive), "node"),
        counted(cpus, "CPU"),
        *([counted(gpus, "GPU") + (f" ({known})" if known else "")] if gpus else []),
        f"Ray {ray.__version__}",
    ]
    if dashboard := get_dashboard_url():
        parts.append(f"[job in the dashboard](http://{dashboard}/#/jobs/{ray.get_runtime_context().get_job_id()})")
    return ", ".join(parts)


@contextmanager
def followed_nodes(folder: RunFolder, tracking: "DeferredRun") -> Iterator[None]:
    """Logs the utilisation of the workers' nodes until the block ends, except for the driver's machine.

    Args:
        folder: the run's folder.
        tracking: tracking of the run, which says whether and how often machines are sampled.
    """
    if tracking.machine_interval_s is None:
        yield
        return
    here = ray.get_runtime_context().get_node_id()
    monitor = NodeMonitor(lambda: metrics_pages(folder, here), tracking.log_machines, tracking.machine_interval_s)
    monitor.start()
    try:
        yield
    finally:
        monitor.close()


def metrics_pages(folder: RunFolder, here: str) -> dict[str, str]:
    """The addresses of the nodes' pages of metrics, by host name.

    If a host has several nodes, as in tests, the name also has the node's id.

    Args:
        folder: the run's folder, which records the nodes of the newest workers.
        here: id of the driver's node, which is left out.
    """
    ids = {worker["node"].rpartition(" ")[2] for worker in folder.newest_workers().values()}
    alive = [node for node in ray.nodes() if node["Alive"]]
    hosts = Counter(node["NodeManagerHostname"] for node in alive)
    pages: dict[str, str] = {}
    for node in alive:
        host = node["NodeManagerHostname"]
        if node["NodeID"] in ids - {here}:
            name = host if hosts[host] == 1 else f"{host}-{node['NodeID'][:6]}"
            address = node["NodeManagerAddress"]
            pages[name] = f"http://{f'[{address}]' if ':' in address else address}:{node['MetricsExportPort']}/metrics"
    return pages


class NodeMonitor(threading.Thread):
    """Logs the utilisation of nodes until it is closed; its failures do not affect training.

    Args:
        find_pages: returns the addresses of the pages of the current nodes, by name.
        log: takes the metrics of all nodes, by their names in MLflow.
        interval_s: time between two samples.
    """

    def __init__(
        self,
        find_pages: Callable[[], Mapping[str, str]],
        log: Callable[[Mapping[str, float]], object],
        interval_s: float,
    ) -> None:
        super().__init__(name="node-monitor", daemon=True)
        self._find_pages = find_pages
        self._log = log
        self._interval_s = interval_s
        self._first: dict[str, dict[str, float]] = {}
        self._silences: Counter[str] = Counter()
        self._has_warned = False
        self._closed = threading.Event()

    def run(self) -> None:
        """Samples the nodes."""
        while not self._closed.wait(self._interval_s):
            try:
                metrics = self._sample(self._find_pages())
                if metrics and not self._closed.is_set():
                    self._log(metrics)
            except Exception:  # lost metrics of a machine do not matter; an outage is reported once
                logger.debug("no metrics of the nodes", exc_info=True)

    def close(self) -> None:
        """Stops it; does not wait for a store that does not answer."""
        self._closed.set()
        self.join(_END_WITHIN_S)

    def _sample(self, pages: Mapping[str, str]) -> dict[str, float]:
        metrics: dict[str, float] = {}
        for name, address in pages.items():
            if self._closed.is_set():
                break
            try:
                with _direct.open(address, timeout=_ANSWER_WITHIN_S) as page:
                    found = utilisation(page.read().decode())
            except (OSError, ValueError) as error:
                self._note_silence(name, address, error)
                continue
            first = self._first.setdefault(name, found)
            # Ray's counters start with the machine, MLflow's with the run.
            since = {key: round(found[key] - first.get(key, 0.0), 1) for key in found if key.startswith("network_")}
            metrics |= {f"system/{name}/{key}": value for key, value in {**found, **since}.items()}
        return metrics

    def _note_silence(self, name: str, address: str, error: Exception) -> None:
        """Warns once about a node that has never answered; one that has answered before is probably being lost."""
        self._silences[name] += 1
        if name not in self._first and self._silences[name] == _WARN_AFTER and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "MLflow gets no metrics of the machine %s: %s cannot be read from here (%s)",
                name,
                address,
                first_line(error),
            )


def utilisation(page: str) -> dict[str, float]:
    """The metrics of a node, by MLflow's names and in its units.

    Args:
        page: Ray's metrics of the node, in the format of Prometheus.
    """
    lines = [line for line in page.splitlines() if line.startswith("ray_node_")]
    samples: dict[tuple[str, str | None], float] = {}
    for family in text_string_to_metric_families("\n".join(lines) + "\n"):
        for each in family.samples:
            samples[each.name, each.labels.get("GpuIndex")] = float(each.value)
    found = {
        name: samples[key, None] / unit
        for name, (key, unit) in _FIGURES.items()
        if samples.get((key, None)) is not None
    }
    if total := samples.get(("ray_node_mem_total", None)):
        found["system_memory_usage_percentage"] = 100 * samples.get(("ray_node_mem_used", None), 0.0) / total
    for gpu in sorted({index for _, index in samples if index is not None}):
        for name, (key, unit) in _GPU_FIGURES.items():
            if (key, gpu) in samples:
                found[f"gpu_{gpu}_{name}"] = samples[key, gpu] / unit
        used, free = (samples.get((f"ray_node_gram_{what}", gpu), 0.0) for what in ("used", "available"))
        if used + free:
            found[f"gpu_{gpu}_memory_usage_percentage"] = 100 * used / (used + free)
    return {name: round(value, 1) for name, value in found.items()}
