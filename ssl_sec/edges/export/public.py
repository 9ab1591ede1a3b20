"""What a model card says of data and of measurements: names and numbers, no places on the user's machine."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence

from mlflow.entities import Dataset, Run

from ssl_sec.data.base_config import title_of_place
from ssl_sec.edges.folder.record import data_of
from ssl_sec.edges.masking import masked
from ssl_sec.edges.storage.places import is_remote
from ssl_sec.edges.tracking.scores import PROTOCOL_TAG
from ssl_sec.edges.tracking.tracker import current_parameters
from ssl_sec.recipes.pretraining.config import OF_LABELS

_UNKNOWN_DATA = "data that MLflow does not name"
# What a description says after the place of its set.
_AFTER_THE_PLACE = re.compile(r"[,;] ((?:\w+ split\b|digest |\d+ of \d+ images|read by blocks).*)$")
_QUERY = re.compile(r"\?\S*?(?=[,;]?(?:\s|$))")
# Sets that are on the Hub too, as a description names them.
_HUB_IDS = {"cifar10": "uoft-cs/cifar10", "cifar100": "uoft-cs/cifar100", "mnist": "ylecun/mnist"}
_BY_TORCHVISION = re.compile(rf"^({'|'.join(_HUB_IDS)}) by torchvision\b")
_IN_THE_HUB = re.compile(r"\bhf://datasets/([\w.-]+/[\w.-]+)")


def described_data(data: Dataset) -> str:
    """A data set in a line: its name, its origin without a path of this machine, and its counts."""
    counts = json.loads(data.profile) if data.profile else {}
    numbers = [
        "no labels" if (key, value) == ("classes", 0) else f"{value} {key.replace('_', ' ')}"
        for key, value in counts.items()
    ]
    return f"{data.name}: {', '.join([*_origin(data.source), *numbers])}"


def hub_datasets(data: Iterable[Dataset]) -> list[str]:
    """The ids on the Hugging Face Hub of those sets that are there, each once."""
    ids: list[str] = []
    for each in data:
        ids += [_HUB_IDS[name] for name in _BY_TORCHVISION.findall(each.source)]
        ids += _IN_THE_HUB.findall(each.source)
    return list(dict.fromkeys(ids))


def described_measurement(run: Run, name: str) -> str:
    """The training run as the source of a metric, with the data of it."""
    parameters = current_parameters(run)
    trained_on = f"training on {_data_of(run)}"
    if name not in OF_LABELS or "monitor.data.name" not in parameters:
        return trained_on
    name, root = parameters["monitor.data.name"], parameters.get("monitor.data.root")
    other = title_of_place(root) if name == "folder" and root else name
    return f"{trained_on}, measured on {other or name}"


def described_probe(probe: Run) -> str:
    """A probe with its data and its protocol, in words."""
    data, labels = _data_of(probe), probe.data.params.get("probe.labels_per_class", "None")
    protocol = probe.data.tags.get(PROTOCOL_TAG)
    if protocol is None:  # a probe of an old version
        protocol = "all labels" if labels == "None" else f"{labels} labels per class"
    return f"probe {probe.info.run_id[:8]} on {data}: {protocol.removeprefix(f'{data}, ')}"


def newest_of_each_protocol(probes: Iterable[Run]) -> list[Run]:
    """The probes without those that a newer one repeats, with the same protocol on the same data.

    Args:
        probes: newest first. Those without a protocol are all kept, since nothing says what they repeat.
    """
    newest: dict[object, Run] = {}
    for probe in probes:
        protocol = probe.data.tags.get(PROTOCOL_TAG)
        newest.setdefault(probe.info.run_id if protocol is None else (protocol, _data_of(probe)), probe)
    return list(newest.values())


def public_settings(parameters: Mapping[str, str], kept: Sequence[str]) -> dict[str, str]:
    """The settings whose keys begin with one of some words; of a file of this machine only its name.

    Args:
        parameters: the run's settings.
        kept: beginnings of the keys.
    """
    return {
        key: value.rstrip("/").rpartition("/")[2] if value.startswith(("/", "~", "./", "../")) else value
        for key, value in sorted(parameters.items())
        if key.startswith(tuple(kept))
    }


def _data_of(run: Run) -> str:
    data = data_of(run)
    return run.data.tags.get("data") or (_UNKNOWN_DATA if data is None else data.name.partition("/")[0])


def _origin(description: str) -> list[str]:
    """What a set's description says, if anything, without a place on this machine and the query of a URL."""
    _, has_place, place = description.partition(" in ")
    if not has_place:
        return [description]
    if is_remote(place) and "::" not in place:
        return [_QUERY.sub("", masked(description))]
    after = _AFTER_THE_PLACE.search(place.rpartition("/")[2])
    return [after[1]] if after else []
