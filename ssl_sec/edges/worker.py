"""What one worker does, on any runtime: it reports and saves to the run's folder."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
import yaml

from ssl_sec.checkpoint import save_checkpoint
from ssl_sec.collectives import barrier
from ssl_sec.config import PretrainConfig, ProbeJobConfig
from ssl_sec.diagnostics import NormHistogram
from ssl_sec.edges.run_folder import RunFolder
from ssl_sec.encoders import Encoder
from ssl_sec.errors import Stopped, UserError
from ssl_sec.pretraining import pretrain
from ssl_sec.probing import linear_evaluation
from ssl_sec.settings import from_values

Job = Literal["pretrain", "probe"]


@dataclass(frozen=True, slots=True)
class FolderRuntime:
    """The Runtime that training sees: figures and checkpoints of rank 0 go to the run's folder.

    Attributes:
        rank: this worker's number.
        world_size: the number of workers.
        device: this worker's.
        folder: of the run.
        keep_last: checkpoints to keep.
    """

    rank: int
    world_size: int
    device: torch.device
    folder: RunFolder
    keep_last: int = 1

    def report(self, step: int, metrics: Mapping[str, float], norms: NormHistogram | None = None) -> None:
        """Adds a line to the run's figures."""
        if self.rank == 0:
            histogram = {} if norms is None else {"norms": asdict(norms)}
            self.folder.append_record({"step": step, "metrics": dict(metrics), **histogram})

    def save(self, step: int, state: Mapping[str, Any]) -> None:
        """Writes a checkpoint; every worker waits for it."""
        if self.rank == 0:
            save_checkpoint(self.folder.checkpoints_path, step, state, self.keep_last)
        barrier()

    def stop_requested(self) -> bool:
        """Whether the driver asked for a stop."""
        return self.rank == 0 and self.folder.stop_path.exists()


def work(
    job: Job, values: Mapping[str, Any], folder_path: str, rank: int, world_size: int, device: torch.device
) -> None:
    """Does a job on this worker, and tells in the run's folder how it ended.

    Args:
        job: which.
        values: its configuration.
        folder_path: the run's folder, absolute, on storage that all workers share.
        rank: this worker's number.
        world_size: the number of workers.
        device: this worker's.
    """
    folder = RunFolder(Path(folder_path))
    told = folder.error()
    if told is not None:  # a restart by the cluster cannot mend it
        raise told
    try:
        if job == "pretrain":
            _pretrain(from_values(PretrainConfig, values), folder, rank, world_size, device)
        else:
            _probe(from_values(ProbeJobConfig, values), folder, rank, world_size, device)
    except Stopped:
        folder.write_outcome("stopped")
    except UserError as error:
        folder.write_error(error)
        raise
    except FloatingPointError as error:
        failure = UserError(f"training diverged: {error}")
        folder.write_error(failure)
        raise failure from error
    else:
        folder.write_outcome("finished")


def _pretrain(config: PretrainConfig, folder: RunFolder, rank: int, world_size: int, device: torch.device) -> None:
    runtime = FolderRuntime(rank, world_size, device, folder, config.checkpoint.keep_last)
    pretrain(config, runtime, folder)


def _probe(config: ProbeJobConfig, folder: RunFolder, rank: int, world_size: int, device: torch.device) -> None:
    """Probes the encoder that the driver laid into the folder, beside its run's configuration."""
    trained = from_values(PretrainConfig, yaml.safe_load((folder.path / "pretrain.yaml").read_text()))
    runtime = FolderRuntime(rank, world_size, device, folder)
    data = config.data or trained.data
    encoder = load_encoder(trained, data.open("test").image_shape, folder.encoder_path).to(device)
    findings = linear_evaluation(encoder, data, config.probe, config.runtime, runtime)
    last_step = 2 * config.probe.epochs
    runtime.report(last_step, findings.metrics())
    if rank == 0:
        confusion = {"confusion": findings.probe.confusion.tolist(), "class_names": list(findings.class_names)}
        (folder.path / "confusion.json").write_text(json.dumps(confusion))


def load_encoder(trained: PretrainConfig, image_shape: tuple[int, ...], weights: Path) -> Encoder:
    """The encoder of a run, with its final weights."""
    channels, height, width = image_shape
    return replace(trained.encoder, weights=str(weights)).build(channels, min(height, width))
