"""The encoder of a run, from its folder."""

import os
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

from ssl_sec.edges.folder.folder import RunFolder
from ssl_sec.errors import ConfigError
from ssl_sec.networks import Encoder
from ssl_sec.networks.config import EncoderConfig
from ssl_sec.settings import from_values


@dataclass(frozen=True, kw_only=True)
class _Trained:
    """What of a run's configuration its encoder is built from."""

    encoder: EncoderConfig


def load_encoder(run: str | os.PathLike[str]) -> Encoder:
    """The encoder that a run of pretraining, metric learning or face recognition trained, in evaluation mode.

    Args:
        run: the folder that the job printed.

    Raises:
        ConfigError: if it holds no run that has ended.
    """
    folder = RunFolder(Path(run).expanduser().resolve())
    if not (folder.holds_run and folder.encoder_path.is_file()):
        raise ConfigError(f"run: found {folder.path}, which holds no trained encoder; allowed: the folder of a run")
    values = yaml.safe_load(folder.config_path.read_text())
    trained = from_values(_Trained, {"encoder": values["encoder"]})
    channels, height, width = folder.data().image_shape
    return replace(trained.encoder, weights=str(folder.encoder_path)).build(channels, min(height, width)).eval()
