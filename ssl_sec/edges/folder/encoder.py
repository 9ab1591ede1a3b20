"""The network of a run, from its files."""

import os
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import nn

from ssl_sec.edges.folder.finding import opened_folder
from ssl_sec.edges.folder.folder import RunFolder
from ssl_sec.edges.folder.stored_config import stored_values
from ssl_sec.edges.folder.unfinished import require_finished
from ssl_sec.errors import ConfigError
from ssl_sec.exporting.record import Record, read_record
from ssl_sec.networks import Encoder
from ssl_sec.networks.config import ClassifierConfig, EncoderConfig, HeadConfig
from ssl_sec.recipes.config import TrainingConfig
from ssl_sec.recipes.registry import RECIPES, RecipeRow
from ssl_sec.settings import from_values


@dataclass(frozen=True, kw_only=True)
class _Trained:
    """The parts of a run's configuration that describe its network."""

    encoder: EncoderConfig
    head: HeadConfig | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedNetwork:
    """A trained network, in evaluation mode.

    Attributes:
        encoder: images in [0, 1] -> features.
        head: features -> embeddings; None if the recipe does not keep it.
        dim: dimension of the features or embeddings.
    """

    encoder: Encoder
    head: nn.Module | None
    dim: int

    @property
    def whole(self) -> nn.Module:
        """Images -> features or embeddings."""
        return self.encoder if self.head is None else nn.Sequential(self.encoder, self.head).eval()


def load_encoder(run: str | os.PathLike[str]) -> Encoder:
    """The encoder that a run of pretraining, metric learning or face recognition trained, in evaluation mode.

    Args:
        run: the folder or URL of the run, or of an export as safetensors, timm or hub.

    Raises:
        ConfigError: if it does not hold a run that has ended, or such an export.
        StorageError: if a file, or the storage of a URL, cannot be used.
    """
    return _trained_network(os.fspath(run), with_head=False).encoder


def load_embedder(run: str | os.PathLike[str]) -> nn.Module:
    """What `jobs.embed` computes embeddings with, in evaluation mode: images in [0, 1] -> embeddings.

    Of metric learning and faces it is the encoder with its head, whose rows are to be compared by their cosine; of
    other runs it is the encoder. `extract_features` takes it, too.

    Args:
        run: as for `load_encoder`.

    Raises:
        ConfigError: if it does not hold a run that has ended, or such an export.
        StorageError: if a file, or the storage of a URL, cannot be used.
    """
    return _trained_network(os.fspath(run), with_head=True).whole


def _trained_network(run: str, with_head: bool) -> TrainedNetwork:
    """The network of a run or of an export; its head, if it keeps one, only where it is wanted."""
    folder = opened_folder(run)
    if not folder.holds_run and (found := read_record(folder.path)) is not None:
        path, record = found
        if path.suffix != ".safetensors":
            formats = "format=safetensors, timm or hub"
            raise ConfigError(f"run: found {run}, an export without its network's parts; allowed: one with {formats}")
        return exported_network(record, record.image_shape, path)
    values = stored_values(folder.config_path) if folder.holds_run and folder.encoder_path.is_file() else {}
    if "encoder" not in values:  # a probe has none of its own
        raise ConfigError(f"run: found {run}, which holds no trained encoder; allowed: the folder of a run or export")
    require_finished(run, folder)
    wanted = ("encoder", "head") if with_head and _leaves_head(run, folder) else ("encoder",)
    trained = from_values(_Trained, {key: values[key] for key in wanted})
    shape = folder.data().image_shape
    return _network(trained.encoder, trained.head, shape, folder.encoder_path, folder.head_path)


def _leaves_head(run: str, folder: RunFolder) -> bool:
    """Whether the head belongs to the network that a run has trained."""
    recipe = RECIPES.get(str(folder.identity.job))
    if recipe is None:
        raise ConfigError(
            f"run: found {run}, whose {folder.identity_path.name} does not name the job that trained it; allowed: the "
            "whole folder of a run, or load_encoder for its features"
        )
    return recipe.leaves_head


def load_network(recipe: RecipeRow, config: TrainingConfig, image_shape: tuple[int, ...], path: Path) -> TrainedNetwork:
    """The network of a run with its final weights: the encoder, and the head if the recipe keeps it.

    Args:
        recipe: the run's recipe.
        config: the run's configuration.
        image_shape: channels, height and width of the training images.
        path: folder of the weights.
    """
    head = config.head if recipe.leaves_head else None
    return _network(config.encoder, head, image_shape, path / "encoder.safetensors", path / "head.safetensors")


def exported_network(record: Record, image_shape: tuple[int, ...], path: Path) -> TrainedNetwork:
    """The network of an export as safetensors, timm or hub.

    Args:
        record: the record in the export.
        image_shape: channels, height and width of the images.
        path: file with the weights of the encoder, or of the encoder and the head; others of the head are beside it.
    """
    head_path = path.with_name("head.safetensors")
    with tempfile.TemporaryDirectory() as made:
        if record.head is not None and path.name == "model.safetensors":
            weights = load_file(path)
            path, head_path = (Path(made, f"{part}.safetensors") for part in ("encoder", "head"))
            for to in (path, head_path):
                prefix = f"{to.stem}."
                save_file({key.removeprefix(prefix): v for key, v in weights.items() if key.startswith(prefix)}, to)
        return _network(record.encoder, record.head, image_shape, path, head_path)


def _network(
    config: EncoderConfig,
    head_config: HeadConfig | ClassifierConfig | None,
    image_shape: tuple[int, ...],
    path: Path,
    head_path: Path,
) -> TrainedNetwork:
    """The network with the weights of two files; without a head if it has no configuration."""
    channels, height, width = image_shape
    encoder = replace(config, weights=str(path)).build(channels, min(height, width)).eval()
    if head_config is None:
        return TrainedNetwork(encoder=encoder, head=None, dim=encoder.num_features)
    assert head_config.dim is not None, "an export's record has the number of classes"
    head = replace(head_config, weights=str(head_path)).build(encoder.num_features, seed=0)  # replaced by the file's
    return TrainedNetwork(encoder=encoder, head=head.eval(), dim=head_config.dim)
