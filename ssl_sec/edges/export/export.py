"""The encoder of a run, and the head of an embedding, in files that others read; with a check and a model card."""

import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from jaxtyping import Float
from mlflow.entities import Run
from mlflow.tracking import MlflowClient
from torch import Tensor

from ssl_sec.augment.views import unit_range
from ssl_sec.data.image_set import ImageSet
from ssl_sec.edges.export.model_card import model_card
from ssl_sec.edges.export_config import ExportConfig
from ssl_sec.edges.folder.encoder import load_network
from ssl_sec.edges.folder.finding import trained_folder
from ssl_sec.edges.folder.folder import RunFolder
from ssl_sec.edges.folder.record import run_record
from ssl_sec.edges.folder.stored_config import training_config
from ssl_sec.edges.patience import ANSWER_S, Patience
from ssl_sec.edges.tracking.runs import RunArchive, beside, find_run
from ssl_sec.edges.tracking.scores import child_probes
from ssl_sec.edges.tracking.store import store_errors
from ssl_sec.errors import ConfigError, StorageError, UserError, first_line
from ssl_sec.exporting import FILE_NAMES, FORMATS, Exportable, Format, check_export, require_packages
from ssl_sec.exporting.checking import Check
from ssl_sec.recipes.config import TrainingConfig
from ssl_sec.recipes.registry import RECIPES, RecipeRow, trainings

logger = logging.getLogger("ssl_sec")

_CHECKED_IMAGES = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Exported:
    """What an export leaves.

    Attributes:
        folder: with the encoder's files and README.md, the model card.
        form: of the files.
        exportable: the encoder.
        check: what reading the files back gave.
    """

    folder: Path
    form: Format
    exportable: Exportable
    check: Check

    def __str__(self) -> str:
        check = self.check
        loading = [*self.form.loading(self.exportable).splitlines(), self.form.use(self.exportable)]
        return "\n".join(
            [
                f"exported: {self.exportable.architecture.title} as {self.form.name}",
                f"check: read back without this package, {check.num_images} images; largest difference "
                f"{check.largest_difference:.3g} ({self.exportable.output} up to {check.largest_value:.3g}, "
                f"{check.allowed:.3g} allowed)",
                f"folder: {self.folder}",
                "",
                *(f"    {line}".rstrip() for line in loading),
            ]
        )


def run_export(config: ExportConfig) -> Exported:
    """Exports the encoder of a training run, from MLflow or its folder; with the head where embeddings were trained.

    Raises:
        ConfigError: if there is no such run, the format cannot hold its encoder, the output is there already, or the
            files do not give the trained network's features or embeddings.
        DataError: if the images of the check cannot be had.
        StorageError: if the store cannot be used or the files cannot be written.
    """
    form = FORMATS[config.format]
    require_packages(form)
    with _found(config) as source:
        trained = source.config
        default = f"{config.output_dir}/exports/{trained.recipe_name}-{source.short_name}-{form.name}"
        output = Path(config.output or default).expanduser().resolve()
        _refuse_existing(output, config.overwrite)
        image_set = trained.open_evaluated(config.data or trained.data)
        channels, height, width = image_set.image_shape
        network = load_network(source.recipe, trained, image_set.image_shape, source.files)
        exportable = Exportable(
            encoder=network.encoder,
            architecture=trained.encoder.architecture(channels, min(height, width)),
            image_shape=(channels, height, width),
            head=network.head,
            dim=network.dim,
        )
    images = _some_images(image_set)
    with _laid_out(output, config.overwrite) as folder:
        form.write(exportable, images, folder)
        check = check_export(form, exportable, images, folder)
        (folder / "README.md").write_text(
            model_card(source.run, source.probes, form, exportable, check), encoding="utf-8"
        )
        for path in folder.iterdir():  # safetensors keeps its files from others, whom an export is for
            shutil.copymode(folder / "README.md", path)
    return Exported(folder=output, form=form, exportable=exportable, check=check)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Source:
    """A run whose network is exported.

    Attributes:
        recipe: that trained it.
        files: the folder with its weights.
        config: of the run.
        short_name: that sets its export apart from others of the recipe.
        run: what is known of it.
        probes: of its encoder; None if only MLflow knows, which cannot be asked.
    """

    recipe: RecipeRow
    files: Path
    config: TrainingConfig
    short_name: str
    run: Run
    probes: list[Run] | None


@contextmanager
def _found(config: ExportConfig) -> Iterator[_Source]:
    """The run that is meant, with its files as long as the context lasts."""
    folder = trained_folder(config.run, trainings())
    if folder is not None:
        yield _in_folder(folder, config)
        return
    store, found = find_run(config.run, config.tracking, config.output_dir, trainings())
    run, probes = _with_probes(store.client, found.run_id)
    with tempfile.TemporaryDirectory() as downloads:
        yield _Source(
            recipe=RECIPES[found.job],
            files=Path(downloads),
            config=store.download_network(found, trainings(), Path(downloads)),
            short_name=found.run_id[:8],
            run=run,
            probes=probes,
        )


def _in_folder(folder: RunFolder, config: ExportConfig) -> _Source:
    """A run from its folder; MLflow, if it answers, knows its probes and more of its origin."""
    recipe = RECIPES[str(folder.identity.job)]
    trained = training_config(recipe, folder.config_path)
    run_id = folder.run_id
    run, probes = run_record(folder, trained.data.title), None
    if run_id is not None:
        try:
            tracking = replace(beside(str(folder.path), config.tracking), experiment=None)
            store = RunArchive.open(tracking, config.output_dir)
            with store_errors(store.client.tracking_uri):
                run, probes = Patience(ANSWER_S).call(lambda: _with_probes(store.client, run_id))
        except UserError as error:
            logger.warning("%s; the model card tells what %s has", first_line(error), folder.path)
    short_name = folder.path.name if run_id is None else run_id[:8]
    return _Source(recipe=recipe, files=folder.path, config=trained, short_name=short_name, run=run, probes=probes)


def _with_probes(client: MlflowClient, run_id: str) -> tuple[Run, list[Run]]:
    with store_errors(client.tracking_uri):
        run = client.get_run(run_id)
        return run, child_probes(client, run.data.tags.get("recipe", "")).get(run_id, [])


def _some_images(image_set: ImageSet) -> Float[Tensor, "batch channels height width"]:
    """Images from all over the set, whose files may be in the order of their classes."""
    count = min(_CHECKED_IMAGES, len(image_set))
    batch = image_set.read(torch.linspace(0, len(image_set) - 1, count).long())
    # A recorded forward pass must not be tied to the number of images it was recorded with, and two is that number.
    images = unit_range(batch.images)
    return images if count > 2 else images.repeat(3, 1, 1, 1)


def _refuse_existing(output: Path, overwrite: bool) -> None:
    """Refuses an output that is there, unless it is an export and may be replaced.

    Raises:
        ConfigError: if it is refused.
    """
    if not os.path.lexists(output):
        return
    if not overwrite:
        raise ConfigError(f"output: {output} is there already; allowed: a new folder, or overwrite=true")
    others = ["it is no folder"] if not output.is_dir() or output.is_symlink() else []
    others = others or sorted(f"it holds {item.name!r}" for item in output.iterdir() if item.name not in FILE_NAMES)
    if others:
        raise ConfigError(f"overwrite: {output} is not an export, {others[0]}; allowed: a folder that an export made")


@contextmanager
def _laid_out(output: Path, overwrite: bool) -> Iterator[Path]:
    """A folder beside `output` that takes its place when all went well, and else is removed.

    Raises:
        ConfigError: if `output` is there and may not be replaced.
        StorageError: if it cannot be written.
    """
    _refuse_existing(output, overwrite)
    temporary = output.with_name(f".{output.name}.{os.getpid()}.tmp")
    replaced = output.with_name(f".{output.name}.{os.getpid()}.old")
    try:
        temporary.mkdir(parents=True)
        yield temporary
        _refuse_existing(output, overwrite)  # another export may have been faster
        if output.exists():
            output.rename(replaced)
        temporary.rename(output)
    except OSError as error:
        if replaced.exists():
            replaced.rename(output)
        raise StorageError(f"output: {output} cannot be written: {error.strerror or first_line(error)}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.rmtree(replaced, ignore_errors=True)
