"""Probes one encoder on several data sets, each in a run of its own, and compares them in a table.

The name of a set's run is made from its settings, so that the same command, given again, takes the runs that have
finished as they are and measures only the other sets.
"""

import hashlib
import json
import logging
import tempfile
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from ssl_sec.data.image_set import require_labels
from ssl_sec.edges.folder.folder import RunFolder
from ssl_sec.edges.folder.names import new_name, weights_digest
from ssl_sec.edges.folder.stored import open_folder
from ssl_sec.edges.pictures import save_picture
from ssl_sec.edges.run.driver import as_before, is_here, run_probe
from ssl_sec.edges.run.resuming import is_probed
from ssl_sec.edges.run.running import running
from ssl_sec.edges.run.summary import Finished, ui_instructions
from ssl_sec.edges.run.sweeps import Sweep
from ssl_sec.edges.storage.files import place_at
from ssl_sec.edges.storage.places import local_folder
from ssl_sec.edges.tables import in_csv, in_markdown, in_table
from ssl_sec.edges.tracking.networks import FoundNetwork, found_network
from ssl_sec.errors import ConfigError, Stopped, UserError, counted, first_line
from ssl_sec.figures.transfer import transfer_figure
from ssl_sec.files import replace_text
from ssl_sec.recipes.probing.config import ProbeJobConfig, TransferConfig
from ssl_sec.recipes.registry import probed
from ssl_sec.rules import check
from ssl_sec.settings import to_values

logger = logging.getLogger("ssl_sec")

# Percentages in each set's row, by metric; that of the logistic regression depends on the set's measure.
_COLUMNS = {"probe/top1": "linear probe", "probe/knn_top1": "kNN"}


def run_transfer(config: TransferConfig) -> str:
    """Measures every set and returns the table.

    Raises:
        UserError: for mistakes of the user.
        Stopped: if a stop was requested; sets that have finished are kept.
    """
    with found_network(config.run, config.checkpoint, config.tracking, config.output_dir, probed()) as found:
        tracking, _ = found.tracking_of_job()
        config = replace(config, tracking=tracking)
        group, name = found.config.recipe_name, found.config.run_name or found.short_name
        probes = _probes(config, found)
    results: dict[str, Mapping[str, float]] = {}
    finished: Finished | None = None
    # As for a sweep, with one run of each arm.
    arms: dict[str, list[Mapping[str, float]]] = {}
    known = (
        local_folder(config.output_dir) / group / f"{name}-transfer-{_digest([p.run_name for p in probes.values()])}"
    )
    with ExitStack() as stack:
        stack.enter_context(running(RunFolder(known), "sets", "other sets"))
        earlier = [title for title, probe in probes.items() if is_probed(_folder(probe, group))]
        if is_here(config.runtime):
            _require_labels(probes, earlier)
        sweep = _sweep(config, group, name, known)
        stack.enter_context(sweep.ended_after(arms, lambda: _text(config, results)))
        for title, probe in probes.items():
            finished = _taken(probe, group, sweep) if title in earlier else _measured(probe, sweep)
            results[title] = finished.metrics
            arms[title] = [finished.metrics]
        with tempfile.TemporaryDirectory() as made:
            files = _files(config, results, Path(made))
            sweep.log_files(files)
            stem = new_name("transfer")
            place = place_at(f"{config.output_dir.rstrip('/')}/{group}", "output_dir")
            for file in files:
                place.write(f"{stem}{file.suffix}", file.read_bytes())
    assert finished is not None, "one set or more"
    own = replace(finished, run_id=sweep.run_id, experiment_id=sweep.experiment_id)
    return "\n".join(["", _text(config, results), "", ui_instructions(own)])


def _probes(config: TransferConfig, found: FoundNetwork) -> dict[str, ProbeJobConfig]:
    """The run of each set, by its title."""
    channels, size = _image_shape(config, found)
    weights = weights_digest(found.files / "encoder.safetensors")
    probes: dict[str, ProbeJobConfig] = {}
    for data in config.sets:
        share = None if data.has_test_images else config.test_share
        is_learned = found.config.has_learned(data, share, config.probe.seed)
        allowed = "sets with test images, or those from whose labels the encoder has not learned"
        check(not is_learned, "sets", data.title, allowed)
        probe = replace(
            config.probe,
            mean_per_class=data.title in config.mean_per_class,
            test_share=share,
            image_size_px=size,
            num_channels=channels,
        )
        # A set that has a size keeps its channels, too: the probe converts its images.
        as_trained = (size, channels) if data.read_size_px is None else (None, None)
        made = ProbeJobConfig(
            run=config.run,
            checkpoint=config.checkpoint,
            data=data.read_as(*as_trained, found.config.data.ranges),
            probe=probe,
            runtime=config.runtime,
            output_dir=config.output_dir,
            tracking=config.tracking,
        )
        number = _digest([found.short_name, config.checkpoint, weights, to_values(made.data), to_values(probe)])
        name = f"{found.config.run_name or found.short_name}-on-{data.title}-{number}"
        probes[data.title] = replace(made, run_name=name)
    return probes


def _image_shape(config: TransferConfig, found: FoundNetwork) -> tuple[int, int]:
    """Channels and side of the images that the encoder gets."""
    channels, size = config.probe.num_channels, config.probe.image_size_px
    if channels is not None and size is not None:
        return channels, size
    shape = found.image_shape
    if shape is None:
        try:
            shape = found.config.open_examples(found.config.data).image_shape
        except UserError as error:
            raise ConfigError(
                "probe.image_size_px, probe.num_channels: found null, must be given, since the images that the run was "
                f"trained on cannot be read: {first_line(error)}"
            ) from error
    own, height, width = shape
    return channels or own, size or min(height, width)


def _require_labels(probes: Mapping[str, ProbeJobConfig], earlier: Collection[str]) -> None:
    """Checks that each set that is still to be measured is there and has labels, before the first one is measured."""
    for index, (title, probe) in enumerate(probes.items()):
        if probe.data is None or title in earlier:
            continue
        key = f"sets[{index}]"
        try:
            probe.data.require_places(with_test=probe.probe.test_share is None)
            require_labels(probe.data.listed().open("train"), "a linear probe", key)
        except UserError as error:
            found = str(error)
            own = found.removeprefix("data.")
            raise type(error)(f"{key}: {found}" if own == found else f"{key}.{own}") from error


def _folder(probe: ProbeJobConfig, group: str) -> RunFolder:
    return open_folder(local_folder(probe.output_dir) / group / str(probe.run_name))


def _taken(probe: ProbeJobConfig, group: str, sweep: Sweep) -> Finished:
    """The run of a set that was measured before."""
    folder = _folder(probe, group)
    logger.info("%s is finished: taking its results", folder.location)
    sweep.adopt([folder.run_id])
    return as_before(folder, probe.tracking, probe.output_dir)


def _measured(probe: ProbeJobConfig, sweep: Sweep) -> Finished:
    """The run of one set."""
    try:
        return run_probe(probe, sweep.run_id)
    except Stopped:
        raise Stopped("stopped; finished sets are kept, and the same command measures the others") from None


def _sweep(config: TransferConfig, group: str, name: str, known: Path) -> Sweep:
    """The run in MLflow; if the same measurements are started again, they continue in it."""
    values = {
        "run": config.run,
        "checkpoint": config.checkpoint,
        "sets": [data.title for data in config.sets],
        "probe": to_values(config.probe),
    }
    return Sweep.opened(
        config.tracking,
        config.output_dir,
        values,
        known.with_name(f"{known.name}.mlflow_run_id"),
        recipe=group,
        job="transfer",
        name=new_name(f"{name}-transfer"),
    )


def _digest(values: object) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:8]


def _points(config: TransferConfig, title: str, metrics: Mapping[str, float]) -> dict[str, tuple[float, float | None]]:
    """The percentage of each measure, and half the width of its interval if it has one."""
    logistic = "probe/logistic_mean_per_class" if title in config.mean_per_class else "probe/logistic_top1"
    few = {f"probe/few_shot_{count}": f"{counted(count, 'label')} per class" for count in config.probe.few_shot}
    names = {**_COLUMNS, logistic: "logistic regression", **few}
    return {words: (metrics[key], metrics.get(f"{key}_interval")) for key, words in names.items() if key in metrics}


def _rows(config: TransferConfig, results: Mapping[str, Mapping[str, float]]) -> tuple[list[str], list[list[str]]]:
    """The header and the rows of the table."""
    points = {title: _points(config, title, metrics) for title, metrics in results.items()}
    measures = list(dict.fromkeys(measure for values in points.values() for measure in values))
    without_test = {data.title for data in config.sets if not data.has_test_images}
    rows = [
        [
            title,
            *(_shown(*values[measure]) if measure in values else "-" for measure in measures),
            "mean per class" if title in config.mean_per_class else "top-1",
            f"{config.test_share:.0%} held out" if title in without_test else "test split",
        ]
        for title, values in points.items()
    ]
    return ["set", *(f"{measure} %" for measure in measures), "measure", "test images"], rows


def _shown(value: float, half: float | None) -> str:
    return f"{value:.2f} ± {half:.2f}" if half is not None else f"{value:.2f}"


def _text(config: TransferConfig, results: Mapping[str, Mapping[str, float]]) -> str:
    if not results:
        return ""
    header, rows = _rows(config, results)
    notes = ["linear probe and kNN are by top-1; the measure is that of the others"] if config.mean_per_class else []
    if config.probe.few_shot:
        notes.append(f"±: 95 % interval of the mean over {config.probe.few_shot_draws} draws of the labels")
    return "\n".join([in_table(header, *rows), *notes])


def _files(config: TransferConfig, results: Mapping[str, Mapping[str, float]], folder: Path) -> list[Path]:
    """Writes the table as CSV and Markdown, and the figure."""
    header, rows = _rows(config, results)
    replace_text(folder / "transfer.csv", in_csv(header, *rows))
    replace_text(folder / "transfer.md", in_markdown(header, *rows) + "\n")
    points = {title: _points(config, title, metrics) for title, metrics in results.items()}
    save_picture(folder / "transfer.png", transfer_figure(points))
    return [folder / f"transfer.{ending}" for ending in ("csv", "md", "png")]
