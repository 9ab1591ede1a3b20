"""The network that embeds, as files that travel to the nodes of a cluster."""

import hashlib
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from torch import nn

from ssl_sec.edges.config.embed import EmbedConfig
from ssl_sec.edges.folder.encoder import load_network
from ssl_sec.edges.tracking.networks import found_network
from ssl_sec.errors import ConfigError, StorageError
from ssl_sec.recipes.config import TrainingConfig
from ssl_sec.recipes.registry import RECIPES, trainings


@dataclass(frozen=True, kw_only=True, slots=True)
class TravellingNetwork:
    """The network of a run, with its weights in memory.

    Attributes:
        job: of the run.
        config: of the run.
        run: its id, or the name of its folder.
        weights: the content of its files by name.
    """

    job: str
    config: TrainingConfig
    run: str
    weights: Mapping[str, bytes] = field(repr=False)

    @property
    def digest(self) -> str:
        """Sixteen hexadecimal digits that differ for different weights."""
        digest = hashlib.sha256()
        for name, content in sorted(self.weights.items()):
            digest.update(name.encode() + hashlib.sha256(content).digest())
        return digest.hexdigest()[:16]

    def load(self, image_shape: tuple[int, int, int]) -> nn.Module:
        """Images in [0, 1] -> embeddings, in evaluation mode.

        Raises:
            ConfigError: if the weights do not fit images of this shape.
        """
        with tempfile.TemporaryDirectory() as folder:
            for name, content in self.weights.items():
                (Path(folder) / name).write_bytes(content)
            try:
                return load_network(RECIPES[self.job], self.config, image_shape, Path(folder)).whole
            except StorageError as error:  # the weights are whole, so it is the shape that does not fit
                shape, why = " x ".join(map(str, image_shape)), str(error).rpartition(" does not fit ")[2]
                raise ConfigError(f"data: found images of {shape}, which do not fit {why}") from error


def travelling_network(config: EmbedConfig) -> TravellingNetwork:
    """The network that a job embeds with.

    Raises:
        ConfigError: if there is no such run, or it has no such network.
        StorageError: if the store cannot be used.
    """
    with found_network(config.run, config.checkpoint, config.tracking, config.output_dir, trainings()) as found:
        return TravellingNetwork(
            job=found.recipe.name,
            config=found.config,
            run=found.run_id or found.short_name,
            weights={name: (found.files / name).read_bytes() for name in found.recipe.network_files},
        )
