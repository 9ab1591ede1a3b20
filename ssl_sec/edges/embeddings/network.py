"""The network that embeds, of a run or of an export, as files that travel to the nodes of a cluster."""

import hashlib
import io
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load
from torch import Tensor, nn

from ssl_sec.data.bands import ValueRanges
from ssl_sec.data.config import DataConfig
from ssl_sec.data.crops import Crop
from ssl_sec.edges.config.embed import EmbedConfig
from ssl_sec.edges.embeddings.recording import Source
from ssl_sec.edges.folder.encoder import exported_network, load_network
from ssl_sec.edges.folder.finding import folder_at, opened_folder
from ssl_sec.edges.folder.names import training_tags
from ssl_sec.edges.tracking.networks import found_network
from ssl_sec.edges.tracking.registry import is_registered
from ssl_sec.errors import ConfigError, StorageError, counted
from ssl_sec.exporting.record import Record, load_script, read_record
from ssl_sec.networks.weights import UnfitWeightsError
from ssl_sec.recipes.config import TrainingConfig
from ssl_sec.recipes.registry import RECIPES, trainings


@dataclass(frozen=True, kw_only=True)
class TravellingNetwork:
    """A network with its weights in memory.

    Attributes:
        run: the id of its run, or the name of the run's folder.
        weights: the content of its files by name.
        build: shape of the images, folder of the files -> the network with its weights.
        data: the data set that it was trained on; None for an export, which does not record where its images are.
        num_channels: channels of the images that it was trained on; None if that is not known.
        image_size_px: side of those images; None if that is not known, or a crop's.
        crop: the crop of evaluated images; None if all have one size.
        value_ranges: lowest and highest value of the pixels of these images, if they were read with such.
    """

    run: str
    weights: Mapping[str, bytes] = field(repr=False)
    build: Callable[[tuple[int, int, int], Path], nn.Module]
    data: DataConfig | None = None
    num_channels: int | None = None
    image_size_px: int | None = None
    crop: Crop | None = None
    value_ranges: ValueRanges | None = None

    def digest(self, loaded: nn.Module) -> str:
        """Sixteen hexadecimal digits of the weights and the scale of pixels; the same for a run and its exports.

        Args:
            loaded: the result of `load`, from which the scale is taken; its other tensors may fit images of one size.
        """
        # By their values alone: the formats have other names, other files, and the scale among the weights or not.
        scale = [_shortest(value) for name, value in loaded.named_buffers() if _is_scale(name)]
        files = (_tensors(name, content) for name, content in self.weights.items())
        weights = [value for tensors in files for name, value in tensors.items() if not _is_scale(name)]
        return hashlib.sha256(b"".join(sorted(map(_sha256, [*weights, *scale])))).hexdigest()[:16]

    def load(self, image_shape: tuple[int, int, int]) -> nn.Module:
        """Images in [0, 1] -> embeddings, in evaluation mode.

        Raises:
            ConfigError: if the weights do not fit images of this shape.
            StorageError: if they cannot be read.
        """
        shape = " x ".join(map(str, image_shape))
        if self.num_channels is not None and self.num_channels != image_shape[0]:
            raise ConfigError(
                f"data: found images of {shape}, which do not fit the encoder; allowed: images of "
                f"{counted(self.num_channels, 'channel')}, as files are read with data.num_channels={self.num_channels}"
            )
        with tempfile.TemporaryDirectory() as folder:
            for name, content in self.weights.items():
                (Path(folder) / name).write_bytes(content)
            try:
                return self.build(image_shape, Path(folder))
            except UnfitWeightsError as error:
                raise ConfigError(f"data: found images of {shape}, which do not fit {error.what}") from error
            except StorageError as error:  # about a file that no longer exists when the user reads it
                what = str(error).partition(": ")[2].replace(f"{folder}/", "")
                raise StorageError(f"run: {self.run}: {what}") from error


def _built_of_run(job: str, config: TrainingConfig, image_shape: tuple[int, int, int], files: Path) -> nn.Module:
    return load_network(RECIPES[job], config, image_shape, files).whole


def _built_of_export(record: Record, image_shape: tuple[int, int, int], files: Path) -> nn.Module:
    if (files / "encoder.pt").is_file():
        if image_shape != record.image_shape:
            found, recorded = (" x ".join(map(str, shape)) for shape in (image_shape, record.image_shape))
            raise ConfigError(
                f"data: found images of {found}, which do not fit the encoder: TorchScript has the computation for "
                f"images of {recorded}"
            )
        return load_script(str(files / "encoder.pt")).eval()
    (path,) = (path for path in files.iterdir() if path.name != "head.safetensors")
    return exported_network(record, image_shape, path).whole


def _tensors(file: str, content: bytes) -> Mapping[str, Tensor]:
    """The tensors of a file, by name."""
    if file.endswith(".safetensors"):
        return load(content)
    return load_script(io.BytesIO(content)).state_dict()


def _is_scale(name: str) -> bool:
    """Whether it is the mean or the deviation of pixels."""
    return name.rpartition(".")[2] in ("mean", "std")


def _shortest(scale: Tensor) -> Tensor:
    """One value if all channels have the same: a run may have one for all, and its export one for each."""
    return scale[:1] if bool((scale == scale[:1]).all()) else scale


def _sha256(tensor: Tensor) -> bytes:
    described = f"{tensor.dtype} {tuple(tensor.shape)} ".encode()
    content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.sha256(described + content.tobytes()).digest()


def found_network_and_source(config: EmbedConfig) -> tuple[TravellingNetwork, Source]:
    """The network of a job of embeddings, and the run or export that it is from.

    Raises:
        ConfigError: if there is no such run, registered model or export, or it has no such network.
        StorageError: if the store or a file cannot be used.
    """
    word = config.run
    if not is_registered(word) and folder_at(word) is None:
        folder = opened_folder(word)
        exported = _exported(folder.path, config.checkpoint)
        if exported is not None:
            return exported, Source(tracking=config.tracking, recipe=folder.name, name=folder.name)
        if "/" in word:
            raise ConfigError(
                f"run: {folder.location} holds neither a run nor an export; allowed: the folder of either, a run's id, "
                "its name, the beginning of either, or models:/<name>@<alias>"
            )
    with found_network(word, config.checkpoint, config.tracking, config.output_dir, trainings()) as found:
        tracking, run_id = found.tracking_of_job()
        trained_shape = found.image_shape
        network = TravellingNetwork(
            run=found.run_id or found.short_name,
            weights={name: (found.files / name).read_bytes() for name in found.recipe.network_files},
            build=partial(_built_of_run, found.recipe.name, found.config),
            data=found.config.data,
            num_channels=None if trained_shape is None else trained_shape[0],
            image_size_px=found.config.size_px_of(trained_shape),
            crop=found.config.crop_of(trained_shape),
            value_ranges=found.config.data.ranges,
        )
        return network, Source(
            tracking=tracking,
            recipe=found.config.recipe_name,
            name=found.config.run_name or found.short_name,
            tags=training_tags(found.config),
            run_id=run_id,
            checkpoint=found.checkpoint,
        )


def _exported(folder: Path, checkpoint: int | str) -> TravellingNetwork | None:
    found = read_record(folder)
    if found is None:
        return None
    if checkpoint != "last":
        raise ConfigError(f"checkpoint: found {checkpoint!r}, must be 'last' with an export, which has one")
    path, record = found
    files = [
        path,
        *([path.with_name("head.safetensors")] if path.name == "encoder.safetensors" and record.head else []),
    ]
    try:
        weights = {file.name: file.read_bytes() for file in files}
    except OSError as error:
        raise StorageError(f"run: {error.filename} cannot be read: {error.strerror}") from error
    return TravellingNetwork(
        run=record.run,
        weights=weights,
        build=partial(_built_of_export, record),
        num_channels=record.image_shape[0],
        image_size_px=None if record.crop is not None else min(record.image_shape[1:]),
        crop=record.crop,
        value_ranges=record.value_ranges,
    )
