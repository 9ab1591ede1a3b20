"""The metrics of a run among Ray's metrics, which Prometheus scrapes, for the operators of a cluster.

The driver sets them from the records of the run, which does not delay steps; they stay when workers are restarted.
"""

import string
from collections.abc import Sequence
from urllib.parse import quote

from ray.util.metrics import Gauge

from ssl_sec.edges.masking import masked
from ssl_sec.edges.run.spec import RunSpec
from ssl_sec.edges.tracking.following import Follower, Record

# Ray puts `ray_` in front of the names.
STEP, IMAGES_PER_S, LOSS = "ssl_sec_step", "ssl_sec_images_per_s", "ssl_sec_loss"
_METRICS = {"train/images_per_s": IMAGES_PER_S, "train/loss": LOSS, "probe/loss": LOSS}
_ABOUT = {
    STEP: "The last reported step of a run.",
    IMAGES_PER_S: "The images that a run trains on in a second; 0 once it has ended.",
    LOSS: "The last reported loss of a run.",
}
# Ray exports its metrics every 10 s.
_INTERVAL_S = 5.0


def in_ascii(text: str) -> str:
    """The text with its other characters encoded as in URLs: Ray's metrics refuse them, also as the name of a run."""
    return quote(text, safe=string.printable)


def shown_metrics(spec: RunSpec) -> Follower:
    """Sets the gauges of a run until the block ends."""
    return Follower(spec.folder.metrics_path, RunGauges(spec.folder.location), interval_s=_INTERVAL_S)


class RunGauges:
    """Sets the gauges of a run; a sink of its records.

    Args:
        location: the folder or URL of the run. Runs of several recipes, or in several output folders, may have the same
            name.
    """

    def __init__(self, location: str) -> None:
        output_dir, recipe, run = in_ascii(masked(location)).rsplit("/", 2)
        self._tags = {"run": run, "recipe": recipe, "output_dir": output_dir}
        self._gauges = {name: Gauge(name, about, tag_keys=tuple(self._tags)) for name, about in _ABOUT.items()}

    def __call__(self, records: Sequence[Record]) -> None:
        """Sets the newest metrics of these records."""
        newest: dict[str, float] = {}
        for record in records:
            for key, value in record.get("metrics", {}).items():
                newest[STEP] = record["step"]
                if key in _METRICS:
                    newest[_METRICS[key]] = float(value)
        for name, value in newest.items():
            self._gauges[name].set(value, self._tags)

    def close(self) -> None:
        """Shows that the run has stopped training."""
        self._gauges[IMAGES_PER_S].set(0.0, self._tags)
