"""The constraint and the runtime as values of a run."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import torch

from ssl_sec import compilers
from ssl_sec.data.log import log_once
from ssl_sec.data.samplers import worker_rows
from ssl_sec.errors import ConfigError
from ssl_sec.gpus import has_hidden_gpu, why_no_gpu
from ssl_sec.losses import SphericalConstraint
from ssl_sec.rules import Count, NotNegative, Processes, Range, Seconds, Share, check
from ssl_sec.settings import Settings, wherever_possible
from ssl_sec.training.recipe import Computation, Precision
from ssl_sec.training.schedules import CappedRamp, Constant, FaceRamp, LinearRamp, Schedule


@dataclass(frozen=True, kw_only=True)
class NoConstraintConfig:
    """No norm constraint."""

    name: Literal["none"] = "none"

    def build(self) -> None:
        """Nothing to build."""

    def weight(self, steps_per_epoch: int, total_steps: int) -> Schedule:
        """η = 0."""
        return Constant(0.0)


@dataclass(frozen=True, kw_only=True)
class SphericalConfig(Settings, key="constraint"):
    """The norm constraint and the schedule of its weight; see `ssl_sec.losses.spherical`.

    Attributes:
        name: which of the constraints it is; rho and radius must agree with it.
        eta: η ≥ 0, the weight of the constraint beside the loss.
        ramp: how η changes over the global step t of T: "constant"; "linear", η t / T (SEC, Eq. 29); "face", 0 for
            three epochs and linear over the fourth (SEC, B.2); "capped", min(η, 500 t / T) (SEC, Eq. 32).
        rho: weight of the batch's mean norm in μ, in (0, 1]; 1 is SEC, smaller values are SEC-EMA.
        radius: fixed μ ≥ 0 to which norms are pulled; 0 is L²-reg; None takes the mean norm.
    """

    name: Literal["sec", "sec_ema", "l2reg", "fixed_radius"]
    eta: NotNegative
    ramp: Literal["linear", "constant", "face", "capped"] = "linear"
    rho: Share = 1.0
    radius: NotNegative | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        others = f"with constraint={self.name}"
        if self.name != "sec_ema":
            check(self.rho == 1, "constraint.rho", self.rho, f"1 {others}; constraint=sec_ema has a moving average")
        if self.name == "l2reg":
            check(self.radius == 0, "constraint.radius", self.radius, f"0 {others}")
        elif self.name == "fixed_radius":
            check(self.radius is not None, "constraint.radius", self.radius, f"a number {others}")
        else:
            check(
                self.radius is None, "constraint.radius", self.radius, f"null {others}; constraint=fixed_radius has one"
            )

    def build(self) -> SphericalConstraint:
        """The constraint."""
        return SphericalConstraint(self.rho, self.radius)

    def weight(self, steps_per_epoch: int, total_steps: int) -> Schedule:
        """η by global step."""
        match self.ramp:
            case "constant":
                return Constant(self.eta)
            case "linear":
                return LinearRamp(self.eta, total_steps)
            case "face":
                return FaceRamp(self.eta, steps_per_epoch)
            case "capped":
                return CappedRamp(self.eta, total_steps)


ConstraintConfig = NoConstraintConfig | SphericalConfig


@dataclass(frozen=True, kw_only=True)
class _RuntimeConfig(Settings, key="runtime"):
    """How the network computes, on any machine.

    Attributes:
        device: device of the computation; auto takes a GPU if there is one.
        precision: precision of the forward pass; bfloat16 is autocast, float64 is for checks of exactness. None takes
            bfloat16 on GPUs that support it, else float32.
        channels_last: whether activations are in the channels_last layout; None for yes.
        compile: whether torch.compile compiles the network; None for yes on GPUs for which it can: with Triton, a C
            compiler and Python's headers.
        graphs: whether the launches of a step are recorded once and replayed (CUDA graphs), in pretraining with one
            worker; None for yes wherever that is possible.
        recompute: whether the backbone's blocks compute their activations again in the backward pass, which takes less
            memory and one more forward pass; weights and gradients are the same.
        micro_batch_size: views that the encoder takes at once, if it has no batch norm, which takes the memory of these
            and one more forward pass; weights and gradients are the same up to rounding. None for the whole batch.
        num_loader_workers: processes of each worker that decode a streamed set, ≥ 0.
    """

    device: Literal["auto", "cpu", "cuda"] = "auto"
    precision: Precision | None = None
    channels_last: bool | None = None
    compile: bool | None = None
    graphs: bool | None = None
    recompute: bool = False
    micro_batch_size: Annotated[int, Range(ge=1, le=65536)] | None = None
    num_loader_workers: Processes = 2

    def on(self, device: torch.device) -> Computation:
        """How the network computes on a device: options that are None are resolved.

        Raises:
            ConfigError: `compile` is true, and torch.compile cannot compile for the device.
        """
        on_gpu = device.type == "cuda"
        asked = False if self.compile is None and not on_gpu else self.compile
        has_bfloat16 = on_gpu and torch.cuda.is_bf16_supported(including_emulation=False)
        return Computation(
            precision=self.precision or ("bfloat16" if has_bfloat16 else "float32"),
            channels_last=self.channels_last is not False,
            compiled=wherever_possible("runtime.compile", asked, compilers.why_not_compiled(device)),
            recomputed=self.recompute,
            micro_batch_size=self.micro_batch_size,
            num_loader_workers=self.num_loader_workers,
        )

    def why_not_compiled(self, device: torch.device) -> str | None:
        """Why a network on a GPU is not compiled, though it would be by default; None if it is."""
        return compilers.why_not_compiled(device) if self.compile is None and device.type == "cuda" else None

    def replays_steps(self, device: torch.device, world_size: int) -> bool:
        """Whether the launches of a pretraining step are recorded once and replayed.

        Raises:
            ConfigError: `graphs` is true where it is not possible.
        """
        reason = None
        if device.type != "cuda":
            reason = f"the device is {device.type}, and only a GPU has launches"
        elif self.precision == "float64":
            reason = "the precision is float64, and a recorded step has its learning rate in float32"
        elif world_size > 1:
            reason = f"there are {world_size} workers, and what they send each other is not recorded"
        elif self.recompute:
            reason = "runtime.recompute is true, and it reads the state of the random numbers, which is not recorded"
        elif self.micro_batch_size is not None:
            reason = "runtime.micro_batch_size is set, which reads the state of the random numbers, too"
        return wherever_possible("runtime.graphs", self.graphs, reason)


@dataclass(frozen=True, kw_only=True)
class LocalConfig(_RuntimeConfig):
    """One process on this machine; Ray is not imported."""

    name: Literal["local"] = "local"

    def resolve_device(self) -> torch.device:
        """The device of this process; a warning says if the machine has a GPU that PyTorch does not find."""
        if self.device == "cpu":
            return torch.device("cpu")
        if torch.cuda.is_available():
            return torch.device("cuda", 0)
        if self.device == "cuda":
            raise ConfigError(
                f"runtime.device: found 'cuda', but PyTorch finds no GPU on this machine ({why_no_gpu()}); "
                "allowed here: cpu"
            )
        if has_hidden_gpu():
            log_once(
                logging.WARNING,
                "runtime.device: the CPU is used, since PyTorch finds no GPU, though this machine has one (%s); "
                "runtime.device=cpu uses it without this warning",
                str(why_no_gpu()),
            )
        return torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class RayConfig(_RuntimeConfig):
    """Ray Train: one worker for each GPU of the cluster, or one on CPUs.

    Attributes:
        num_workers: number of worker processes; [least, most] follows the size of the cluster, with the
            numbers in this range that divide the batch; None takes one for each GPU of the cluster, or one on CPUs.
        address: address of a Ray cluster; None joins that of RAY_ADDRESS or of this machine, or starts one here.
        cpus_per_worker: CPUs of each worker; None divides the cluster's CPUs among the workers.
        wait_for_nodes: whether workers wait for nodes that the cluster lacks, as one that grows on demand; otherwise
            they are refused.
        max_failures: number of restarts in a row without a new checkpoint, -1 for no limit; a node
            that is removed with notice does not count.
        timeout_s: seconds that a worker waits for the others in a collective.
        start_timeout_s: seconds that Ray waits for the workers to start before it checks the cluster again.
        resize_interval_s: seconds between two checks for room for more workers.
    """

    name: Literal["ray"] = "ray"
    num_workers: Count | tuple[Count, ...] | None = None
    address: str | None = None
    cpus_per_worker: Count | None = None
    wait_for_nodes: bool = False
    max_failures: Annotated[int, Range(ge=-1, le=10**6, note="-1 for no limit")] = 3
    timeout_s: Annotated[int, Range(ge=1, le=10**7)] = 600
    start_timeout_s: Seconds = 60.0
    resize_interval_s: Seconds = 60.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.num_workers, tuple):
            in_order = len(self.num_workers) == 2 and self.num_workers[0] <= self.num_workers[1]
            check(in_order, "runtime.num_workers", list(self.num_workers), "[least, most] with 1 ≤ least ≤ most")

    def check_shares(self, global_batch_size: int, counts: Sequence[int]) -> None:
        """Raises a ConfigError if no allowed number of workers is one of `counts`, which can share the batch."""
        if isinstance(self.num_workers, int):
            worker_rows(global_batch_size, 0, self.num_workers)
        elif self.num_workers is not None:
            least, most = self.num_workers
            check(
                any(least <= count <= most for count in counts),
                "runtime.num_workers",
                [least, most],
                f"a range with a number of workers that divides global_batch_size = {global_batch_size}: "
                f"{', '.join(map(str, counts))}",
            )


RuntimeConfig = LocalConfig | RayConfig
