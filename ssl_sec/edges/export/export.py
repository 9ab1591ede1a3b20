"""Exports the encoder of a run, and the head of an embedding, with a check and a model card."""

import json
import logging
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from mlflow.entities import Run
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient
from torch import Tensor

from ssl_sec.augment.views import unit_range
from ssl_sec.data.crops import CentreCrop
from ssl_sec.data.image_set import ImageSet
from ssl_sec.edges.config.export import HUB_SCHEME, ExportConfig
from ssl_sec.edges.export.folder import ExportFolder
from ssl_sec.edges.export.model_card import model_card
from ssl_sec.edges.folder.encoder import load_network
from ssl_sec.edges.folder.record import run_record
from ssl_sec.edges.patience import ANSWER_S, Patience
from ssl_sec.edges.storage.places import is_remote
from ssl_sec.edges.tracking.networks import FoundNetwork, found_network
from ssl_sec.edges.tracking.runs import RunArchive, beside
from ssl_sec.edges.tracking.scores import child_probes
from ssl_sec.edges.tracking.store import store_errors
from ssl_sec.errors import ConfigError, MissingDataError, UserError, counted, first_line
from ssl_sec.exporting import FORMATS, Exportable, Format, check_export, require_packages
from ssl_sec.exporting.checking import Check
from ssl_sec.exporting.record import Record
from ssl_sec.networks.config import TimmConfig
from ssl_sec.recipes.config import TrainingConfig
from ssl_sec.recipes.registry import trainings
from ssl_sec.recipes.tracking import Checkpoint
from ssl_sec.rules import check

if TYPE_CHECKING:
    from ssl_sec.edges.export.hub import HubRepository

logger = logging.getLogger("ssl_sec")

_CHECKED_IMAGES = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Exported:
    """The result of an export.

    Attributes:
        folder: folder with the files of the encoder, and the model card in README.md; None if they are on the Hub.
        url: address of their page on the Hub.
        form: format of the files.
        exportable: the encoder.
        check: check of the files.
    """

    folder: Path | None
    url: str | None = None
    form: Format
    exportable: Exportable
    check: Check

    def __str__(self) -> str:
        check = self.check
        loading = [*self.form.loading(self.exportable).splitlines(), self.form.use(self.exportable)]
        return "\n".join(
            [
                f"exported: {self.exportable.architecture.title} as {self.form.name}",
                f"check: loaded without this package, {counted(check.num_images, 'image')}; largest difference "
                f"{check.largest_difference:.3g} ({self.exportable.output} up to {check.largest_value:.3g}, "
                f"{check.allowed:.3g} allowed)",
                *check.remarks,
                f"folder: {self.folder}" if self.url is None else f"repository: {self.url}",
                "",
                *(f"    {line}".rstrip() for line in loading),
            ]
        )


def run_export(config: ExportConfig) -> Exported:
    """Exports the encoder of a training run, from MLflow or its folder; with the head if embeddings were trained.

    With `classifier=true`, the classifier of a fine-tuning is its head.

    Raises:
        ConfigError: if there is no such run, the format does not support its encoder, the output already exists, or the
            files do not give the output of the trained network.
        DataError: if the images of the check cannot be read.
        StorageError: if the store cannot be used or the files cannot be written.
    """
    form = FORMATS[config.format]
    require_packages(form)
    with found_network(config.run, config.checkpoint, config.tracking, config.output_dir, trainings()) as source:
        trained = source.config
        destination = _destination(config, source)
        destination.require_replaceable(config.overwrite)
        if config.classifier:
            _require_classifier(source)
        if (shape := source.image_shape) is not None:  # before the images are read
            has_head = source.recipe.leaves_head or config.classifier
            form.require_fit(trained.encoder.architecture(shape[0], min(shape[1:])), has_head)
        image_set = _checked_set(config, trained, shape)
        channels, height, width = image_set.image_shape
        network = load_network(source.recipe, trained, image_set.image_shape, source.files)
        exportable = Exportable(
            encoder=network.encoder,
            architecture=trained.encoder.architecture(channels, min(height, width)),
            image_shape=(channels, height, width),
            head=network.head,
            dim=network.dim,
        )
        if config.classifier:
            exportable = _with_classifier(exportable, source)
        exportable = replace(exportable, record=_network_record(source, exportable))
        run, probes = _record(source, config)
    images = _some_images(image_set)
    with destination.filled(config.overwrite) as folder:
        form.write(exportable, images, folder)
        if exportable.class_names:
            text = json.dumps(exportable.class_names, ensure_ascii=False, indent=2)
            (folder / "classes.json").write_text(f"{text}\n", encoding="utf-8")
        check = check_export(form, exportable, images, folder)
        card = model_card(
            run,
            probes,
            form,
            exportable,
            check,
            has_learned_labels=bool(trained.learned_sets),
            checkpoint=source.version or source.checkpoint,
            license=config.license,
            hub_name=destination.hub_name,
        )
        (folder / "README.md").write_text(card, encoding="utf-8")
    return Exported(folder=destination.folder, url=destination.url, form=form, exportable=exportable, check=check)


def _destination(config: ExportConfig, source: FoundNetwork) -> "ExportFolder | HubRepository":
    output, hub_name = config.output, None
    if output is not None and output.startswith(HUB_SCHEME):
        from ssl_sec.edges.export.hub import HubRepository, has_token  # imports the Hub's client

        if has_token():
            return HubRepository(output, config.private)
        hub_name, output = output.removeprefix(HUB_SCHEME), None
    near = "runs" if is_remote(config.output_dir) else config.output_dir
    of = "" if config.checkpoint == "last" else f"-{config.checkpoint}"
    of += "-classifier" if config.classifier else ""
    default = f"{near}/exports/{source.config.recipe_name}-{source.short_name}{of}-{config.format}"
    folder = Path(output or default).expanduser().resolve()
    if hub_name is not None:
        logger.warning(
            "no token of the Hugging Face Hub (HF_TOKEN, or `hf auth login`): nothing is pushed; the files go to %s; "
            "with a token, the same command pushes them, or `hf upload %s %s`",
            folder,
            hub_name,
            folder,
        )
    return ExportFolder(folder, hub_name if hub_name and "/" in hub_name else None)


def _checked_set(config: ExportConfig, trained: TrainingConfig, shape: tuple[int, ...] | None) -> ImageSet:
    """The images of the check, in the shape of the training images unless that is not known.

    Raises:
        ConfigError: if they have another shape.
        DataError: if they cannot be read.
    """
    data = trained.data
    if config.data is not None:  # files are read as squares, or as they are
        size_px = trained.size_px_of(shape) if shape is None or shape[1] == shape[2] else None
        data = config.data.read_as(size_px, None if shape is None else shape[0], trained.data.ranges)
    try:
        image_set = trained.open_examples(data)
    except MissingDataError as error:
        raise MissingDataError(f"{error}; the check of an export needs images; allowed: data=<set>") from error
    if shape is not None and image_set.image_shape != shape:
        found, needed = (" x ".join(map(str, each)) for each in (image_set.image_shape, shape))
        raise ConfigError(
            f"data: found images of {found}, must be of {needed}, as the run was trained; files are read so unless "
            "data.image_size_px is given"
        )
    return image_set


def _require_classifier(source: FoundNetwork) -> None:
    """Raises a ConfigError unless the run keeps a classifier of the encoder that is exported."""
    name, version = source.recipe.name, source.version
    check(source.recipe.classifier != "", "classifier", True, f"false with a run of jobs.{name}, which keeps none")
    check(
        version is None, "classifier", True, f"false with run={version}, an encoder alone; a run keeps its classifier"
    )


def _with_classifier(exportable: Exportable, source: FoundNetwork) -> Exportable:
    """The encoder with the classifier that its run keeps, and the names of the classes.

    Raises:
        ConfigError: if the run's folder, or MLflow, does not have them.
    """
    weights, names = "head.safetensors", "confusion.json"
    with tempfile.TemporaryDirectory() as made:
        try:
            if source.folder is not None:
                place = source.folder.path
            else:
                assert source.archive is not None and source.run_id is not None
                place = Path(made)
                for name in (weights, names):
                    source.archive.client.download_artifacts(source.run_id, name, made)
            class_names = tuple(json.loads((place / names).read_text(encoding="utf-8"))["class_names"])
            head = replace(source.config.head, weights=str(place / weights), dim=len(class_names))
            classifier = head.build(exportable.dim, seed=0).eval()
        except (MlflowException, OSError) as error:
            raise ConfigError(
                f"classifier: found true, but run {source.short_name} has no {weights} or no {names} that can be read"
                f"{' in MLflow; its folder may have them, run=<folder>' if source.folder is None else ''}: "
                f"{first_line(error)}"
            ) from error
    return replace(exportable, head=classifier, dim=len(class_names), class_names=class_names)


def _network_record(source: FoundNetwork, exportable: Exportable) -> Record:
    """The record by which a run's network is built without the files that its training started from."""
    trained = source.config
    encoder = replace(trained.encoder, weights=None, mean=tuple(exportable.mean), std=tuple(exportable.std))
    # Files of other sets are then read as by the run.
    has_size = trained.size_px_of(exportable.image_shape) is not None
    crop = None if has_size else trained.crop_of(exportable.image_shape)
    return Record(
        run=source.run_id or source.short_name,
        encoder=replace(encoder, pretrained=False) if isinstance(encoder, TimmConfig) else encoder,
        head=None if exportable.head is None else replace(trained.head, weights=None, dim=exportable.dim),
        image_shape=exportable.image_shape,
        crop=crop if isinstance(crop, CentreCrop) else None,
        value_ranges=trained.data.ranges,
    )


def _record(source: FoundNetwork, config: ExportConfig) -> tuple[Run, list[Run] | None]:
    """The run in MLflow, or made from its folder, and the probes of its encoder; None if MLflow cannot be asked."""
    run_id, folder = source.run_id, source.folder
    if folder is None:
        assert source.archive is not None and run_id is not None
        run, probes = _with_probes(source.archive.client, run_id, config.checkpoint)
        return run, probes if source.version is None else []
    if run_id is not None:
        try:
            tracking = replace(beside(folder.location, config.tracking), experiment=None)
            store = RunArchive.open(tracking, config.output_dir)
            with store_errors(store.client.tracking_uri):
                return Patience(ANSWER_S).call(lambda: _with_probes(store.client, run_id, config.checkpoint))
        except UserError as error:
            logger.warning("%s; the model card has only what is in %s", first_line(error), folder.location)
    return run_record(folder, source.config.data.title), None


def _with_probes(client: MlflowClient, run_id: str, checkpoint: Checkpoint) -> tuple[Run, list[Run]]:
    with store_errors(client.tracking_uri):
        run = client.get_run(run_id)
        return run, child_probes(client, run.data.tags.get("recipe", ""), checkpoint).get(run_id, [])


def _some_images(image_set: ImageSet) -> Float[Tensor, "batch channels height width"]:
    """Images from all parts of the set, since its files may be sorted by class."""
    count = min(_CHECKED_IMAGES, len(image_set))
    batch = image_set.read(torch.linspace(0, len(image_set) - 1, count).long())
    # More than two, as the forward pass is recorded with two images and must work with any number.
    images = unit_range(batch.images)
    return images if count > 2 else images.repeat(3, 1, 1, 1)
