"""Embeds a data set by a trained network, part by part: in this process, or on the workers of a cluster."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from ssl_sec.data.config import DataConfig
from ssl_sec.data.encoded_images import DecodedImages
from ssl_sec.data.fingerprint import file_sizes, fingerprint
from ssl_sec.data.image_set import ImageSet
from ssl_sec.edges.config.embed import EmbedConfig
from ssl_sec.edges.embeddings.network import TravellingNetwork, found_network_and_source
from ssl_sec.edges.embeddings.recording import Source, start_run, upload_results
from ssl_sec.edges.embeddings.workers import done_on
from ssl_sec.edges.embeddings.written import alone_in, whole_files
from ssl_sec.edges.folder.stored_config import require_whole_data
from ssl_sec.edges.masking import masked, masked_values
from ssl_sec.edges.progress_bar import progress_shown
from ssl_sec.edges.run.signals import interruptible
from ssl_sec.edges.run.sweeps import JobRun
from ssl_sec.edges.storage.files import place_at
from ssl_sec.edges.tracking.tracker import TrackedRun
from ssl_sec.embeddings.computing import embed
from ssl_sec.embeddings.parts import PartPlan, encoded, stem_of
from ssl_sec.errors import ConfigError, counted, out_of_memory
from ssl_sec.networks.convolutions import lay_out
from ssl_sec.recipes.assembly import describe_images
from ssl_sec.settings import to_values
from ssl_sec.training.config import LocalConfig, RuntimeConfig

logger = logging.getLogger("ssl_sec")

# Keys of the origin that must be equal for two files to belong together, as must the precision, which devices decide.
_DECIDING = (
    *("weights", "images", "digest", "file_sizes", "split", "image_shape", "crop", "value_ranges", "rows_per_part"),
    "dim",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class EmbedResult:
    """The result of a job of embeddings.

    Attributes:
        output: the folder or URL of the files.
        split: split of the data set.
        num_images: number of images in the set.
        num_left_out: images of the newly computed parts that could not be read.
        dim: dimension of the embeddings.
        num_parts: number of files in total.
        num_kept: number of files that already existed.
        images_per_s: speed of the newly computed parts; None if there were none.
        run_id: id of the job's run in MLflow; None if it had nothing to compute, or MLflow could not be used.
        where: lines with that id and how to see the run's page; none without a run.
    """

    output: str
    split: str
    num_images: int
    num_left_out: int
    dim: int
    num_parts: int
    num_kept: int
    images_per_s: float | None
    run_id: str | None
    where: Sequence[str]

    def __str__(self) -> str:
        speed = "" if self.images_per_s is None else f", {self.images_per_s:,.0f} images/s"
        left_out = f"; {self.num_left_out:,} that cannot be read were left out" if self.num_left_out else ""
        embedded = counted(self.num_images - self.num_left_out, "image")
        kept = f", of which {self.num_kept} already existed" if self.num_kept else ""
        return "\n".join(
            [
                f"embedded: {embedded} in {counted(self.dim, 'dimension')}{speed}{left_out}",
                f"files: {self.num_parts}{kept}",
                f"folder: {self.output}",
                *self.where,
                "",
                "    import pandas",
                "",
                f'    embeddings = pandas.read_parquet("{self.output}")',
            ]
        )


def run_embed(config: EmbedConfig) -> EmbedResult:
    """Writes those embeddings of a data set that do not exist yet.

    Raises:
        ConfigError: if there is no such run, its network does not take the images, or the output holds other
            embeddings.
        DataError: if the images cannot be read.
        StorageError: if the output cannot be written.
        Stopped: if the job was interrupted; whole files are kept.
    """
    network, source = found_network_and_source(config)
    # Each worker reads its own parts, and only a set that is decoded when it is read knows its paths.
    data = _data(config, network).undecoded()
    logger.info("opening the %s images of %s", config.split, data.title)
    image_set = data.open_to_embed(config.split, network.crop)  # cropped as in the run's evaluation
    logger.info("data: %s", describe_images(image_set))
    loaded = network.load(image_set.image_shape)
    dim, digest = _dim(loaded, image_set), network.digest(loaded)
    plan = PartPlan(split=config.split, num_images=len(image_set), rows_per_part=config.rows_per_part)
    if isinstance(image_set, DecodedImages):
        logger.info("reading some of the images and the sizes of files, by which embeddings of others are recognised")
    origin = _origin(config, network.run, source, digest, data, image_set, dim)
    work = EmbeddingWork(config=config, network=network, data=data, plan=plan, origin=origin)
    with alone_in(place_at(config.output), config.split):
        return _write_missing(work, source, image_set)


def _write_missing(work: "EmbeddingWork", source: Source, image_set: ImageSet) -> EmbedResult:
    """Computes the parts that do not exist, in a folder to which this process alone writes this split."""
    config, data, plan, dim = work.config, work.data, work.plan, work.origin["dim"]
    present, precision = _present(work)
    work = replace(work, precision=precision)
    work.require_precision(work.origin["precision"])
    waiting = [part for part in range(plan.num_parts) if part not in present]
    progress = _Progress(
        num_images=sum(len(plan.rows(part)) for part in waiting),
        num_files=len(waiting),
        left_out_before=sum(len(plan.rows(part)) - rows for part, rows in present.items()),
    )
    if present:
        logger.info("%d of %d files already exist", len(present), plan.num_parts)
    run = start_run(config, source, data) if waiting else JobRun(None)

    def upload(tracked: TrackedRun) -> None:
        metrics = {"images": len(image_set), "dim": dim, "files": plan.num_parts, **progress.metrics}
        upload_results(tracked, metrics, work.origin, image_set, data)

    with run.ended_with(upload):
        _do(work, image_set, waiting, progress)
    return EmbedResult(
        output=config.output,
        split=config.split,
        num_images=len(image_set),
        num_left_out=progress.num_left_out,
        dim=dim,
        num_parts=plan.num_parts,
        num_kept=len(present),
        images_per_s=progress.images_per_s,
        run_id=run.run_id,
        where=run.where,
    )


@dataclass(kw_only=True, slots=True)
class _Progress:
    """The progress of a job.

    Attributes:
        num_images: number of images in the files to write.
        num_files: number of files to write.
        left_out_before: number of images that the existing files lack, as they could not be read.
        written: number of images in each written file; images that cannot be read are left out.
        seconds: time taken so far.
    """

    num_images: int
    num_files: int
    left_out_before: int
    written: list[int] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def num_left_out(self) -> int:
        """Images that could not be read, known once all files are written."""
        return self.left_out_before + self.num_images - sum(self.written)

    @property
    def images_per_s(self) -> float | None:
        """The speed; None before the first file is written."""
        return sum(self.written) / self.seconds if self.written else None

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics for MLflow."""
        found: dict[str, float] = {"files_written": len(self.written), "images_embedded": sum(self.written)}
        if self.images_per_s is not None:
            found["images_per_s"] = self.images_per_s
        if len(self.written) == self.num_files:  # not known if the job was stopped
            found["images_left_out"] = self.num_left_out
        return found


def _do(work: "EmbeddingWork", image_set: ImageSet, waiting: list[int], progress: _Progress) -> None:
    """Computes the missing parts; workers of a cluster open the set themselves.

    Raises:
        Stopped: if the job was interrupted; whole files are kept.
    """
    runtime, began = work.config.runtime, time.perf_counter()
    start = partial(work.start, image_set=image_set) if isinstance(runtime, LocalConfig) else work.start
    with (
        progress_shown("embed", progress.num_images) as update,
        interruptible(f"whole files are kept in {work.config.output}"),
    ):
        try:
            for rows in done_on(runtime, start, waiting, update, "embed"):
                progress.written.append(rows)
        finally:
            progress.seconds = time.perf_counter() - began


@dataclass(frozen=True, kw_only=True)
class EmbeddingWork:
    """Computes and writes parts, on any machine.

    Attributes:
        config: the job's configuration.
        network: the network that computes the embeddings.
        data: the data set.
        plan: its division into parts.
        origin: the settings and files that the embeddings are computed from.
        precision: precision of the files that exist; None if there are none.
    """

    config: EmbedConfig
    network: TravellingNetwork
    data: DataConfig
    plan: PartPlan
    origin: Mapping[str, Any]
    precision: str | None = None

    def require_precision(self, precision: str | None) -> None:
        """Raises a ConfigError if the existing files have another precision; None if it is not known yet."""
        if None not in (self.precision, precision) and precision != self.precision:
            raise ConfigError(
                f"output: {self.config.output} holds embeddings in {self.precision}, and {precision} is asked for; "
                f"allowed: another folder, or runtime.precision={self.precision}"
            )

    def start(
        self, device: torch.device, on_images: Callable[[int], object], image_set: ImageSet | None = None
    ) -> Callable[[int], int]:
        """A function that computes a part on a device, and returns how many images it embedded.

        Args:
            device: device of this process.
            on_images: called with the number of images after each forward pass.
            image_set: the images, if this process has opened them.

        Raises:
            ConfigError: if the files that exist are of another precision.
        """
        opened = self.data.open_to_embed(self.config.split, self.network.crop) if image_set is None else image_set
        computation = self.config.runtime.on(device)
        self.require_precision(computation.precision)
        origin = {**self.origin, "precision": computation.precision}
        network = self.network.load(opened.image_shape).to(device, computation.dtype)
        lay_out(network, device, computation.channels_last)
        place = place_at(self.config.output)

        def do(part: int) -> int:
            rows = self.plan.rows(part)
            found = embed(network, opened, rows, device, computation, self.config.batch_size, on_images)
            found = replace(found, paths=[None if path is None else masked(path) for path in found.paths])
            place.write(self.plan.name(part), encoded(found, opened.class_names, origin))
            return len(found.rows)

        return do


def _data(config: EmbedConfig, network: TravellingNetwork) -> DataConfig:
    """The set of the job, its files read at the size of the training images; or that of the run, as it is."""
    if config.data is not None:
        return config.data.read_as(network.image_size_px, value_ranges=network.value_ranges)
    if network.data is None:
        raise ConfigError(
            f"data: missing, as the export {config.run} does not say where images are; give it as data=<set>"
        )
    require_whole_data(to_values(network.data))
    return network.data


def _dim(loaded: nn.Module, image_set: ImageSet) -> int:
    """The length of the embeddings, from one image on the CPU: a network that does not fit is found at once."""
    batch = image_set.read(torch.zeros(1, dtype=torch.int64))
    try:
        with torch.no_grad():
            return loaded(batch.images.cpu() / 255).shape[1]
    except RuntimeError as error:
        if out_of_memory(error) is not None:
            raise
        shape = " x ".join(map(str, image_set.image_shape))
        raise ConfigError(f"data: found images of {shape}, which the network does not take") from error


def _origin(
    config: EmbedConfig, run: str, source: Source, weights: str, data: DataConfig, image_set: ImageSet, dim: int
) -> dict[str, Any]:
    """The settings and files that determine the embeddings and their division into files, and their origin."""
    return {
        "run": run,
        "checkpoint": source.checkpoint,
        "weights": weights,
        "data": masked_values(to_values(data)),
        "digest": fingerprint(image_set),
        "file_sizes": file_sizes(image_set),
        "split": config.split,
        "images": len(image_set),
        "image_shape": list(image_set.image_shape),
        "crop": to_values(image_set.crop) if isinstance(image_set, DecodedImages) and image_set.crop else None,
        "value_ranges": None if data.ranges is None else [list(each) for each in data.ranges],
        "rows_per_part": config.rows_per_part,
        "dim": dim,
        "precision": _precision(config.runtime),
    }


def _precision(runtime: RuntimeConfig) -> str | None:
    """The precision of the network; None if the workers of a cluster decide."""
    if isinstance(runtime, LocalConfig):
        return runtime.on(runtime.resolve_device()).precision
    return runtime.precision


def _present(work: EmbeddingWork) -> tuple[dict[int, int], str | None]:
    """Part -> rows of its file if that exists, and the files' precision; an incomplete file is computed again.

    Raises:
        ConfigError: if the output holds other embeddings of this split.
        StorageError: if a file cannot be read.
    """
    place, split = place_at(work.config.output), work.config.split
    names = sorted(name for name in place.files() if stem_of(name) == split)
    by_name = {work.plan.name(part): part for part in range(work.plan.num_parts)}
    num_rows: dict[int, int] = {}
    precision: str | None = None
    deciding = {key: work.origin[key] for key in _DECIDING}
    for name, file in whole_files(place, names, deciding, f"other embeddings of the {split} split").items():
        if name in by_name:
            num_rows[by_name[name]] = file.num_rows
            precision = precision or file.origin["precision"]
    return num_rows, precision
