"""Three implementations of SimCLR's training step, with the same network, batch, precision and images.

Ours is the package's `build_recipe` and `train`. lightly's follows its CIFAR-10 benchmark: PIL images, its transform in
the processes of a DataLoader, its NT-Xent. The plain loop is a simple implementation: images on the device, kornia's
batched transforms, NT-Xent as the cross-entropy of all cosines. All use SGD with momentum.
"""

import itertools
import warnings
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import torch
from jaxtyping import Float, UInt8
from kornia import augmentation
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset
from torch.utils.flop_counter import FlopCounterMode

from ssl_sec import collectives
from ssl_sec.data.config import FolderConfig, ParquetConfig
from ssl_sec.data.image_set import ResidentImages
from ssl_sec.edges.run.cpu import keep_freed_memory
from ssl_sec.recipes.pretraining.config import PretrainConfig
from ssl_sec.recipes.pretraining.recipe import build_recipe
from ssl_sec.settings import from_values
from ssl_sec.training.cadence import Cadence
from ssl_sec.training.norms import NormHistogram
from ssl_sec.training.recipe import Precision, Recipe
from ssl_sec.training.step import Request, TakeStep, autocast, choose_step, train

# The learning rate is low enough that no network diverges on random pixels, in any number of steps.
TEMPERATURE, LEARNING_RATE, MOMENTUM, WEIGHT_DECAY = 0.5, 1e-4, 0.9, 1e-4
NEVER = 10**9


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The settings that all implementations share.

    Attributes:
        encoder: resnet18 or resnet50, with the CIFAR stem.
        batch: the number of images in a step, two views each.
        precision: the precision of the forward pass.
        width: factor for the channels of every layer.
    """

    encoder: str
    batch: int
    precision: Precision
    width: float = 1.0


def draw_images(count: int, size_px: int) -> ResidentImages:
    """Draws images of random pixels; the speed does not depend on the content."""
    pixels = torch.randint(256, (count, 3, size_px, size_px), generator=torch.Generator().manual_seed(0)).byte()
    labels = torch.zeros(count, dtype=torch.int64)
    return ResidentImages(
        images=pixels, labels=labels, class_names=("any",), name="random", description="random pixels"
    )


def describe_data(path: Path) -> dict[str, Any]:
    """Returns the values of `data` for the images at a path.

    Args:
        path: a Parquet file, a folder with train*.parquet and test*.parquet, or a folder with a subfolder per class.

    Raises:
        SystemExit: the path does not exist.
    """
    if path.is_file():
        return {"name": "parquet", "train": [str(path)]}
    if not path.is_dir():
        raise SystemExit(f"{path}: neither a Parquet file nor a folder")
    train, test = (sorted(map(str, path.glob(f"{split}*.parquet"))) for split in ("train", "test"))
    if train:
        return {"name": "parquet", "train": train, "test": test or None}
    return {"name": "folder", "root": str(path)}


def open_images(data: Mapping[str, Any]) -> ResidentImages:
    """Loads the training images that the values of `data` describe into memory."""
    config = from_values(ParquetConfig if data["name"] == "parquet" else FolderConfig, data)
    images = config.open("train")
    assert isinstance(images, ResidentImages)
    return images


class Contender(Protocol):
    """An implementation that takes part; each call continues the training."""

    def ready(self) -> None:
        """Drops data prepared while others had their turns."""
        ...

    def steps(self, count: int) -> None:
        """Takes `count` steps."""
        ...

    def close(self) -> None:
        """Ends the processes that it started."""
        ...


@dataclass(frozen=True)
class QuietRuntime:
    """A runtime that records nothing, for this worker of the process group or for a single process."""

    device: torch.device
    rank: int = field(default_factory=collectives.rank)
    world_size: int = field(default_factory=collectives.world_size)

    def report(self, step: int, metrics: Mapping[str, float], norms: NormHistogram | None = None) -> None:
        """Ignores the metrics."""

    def save(self, step: int, state: Mapping[str, Any]) -> None:
        """Ignores the state."""

    def request(self) -> Request:
        """Returns that nothing is requested."""
        return Request.NONE


def make_recipe(
    setting: Setting,
    images: ResidentImages,
    device: torch.device,
    augment: Mapping[str, object] = MappingProxyType({}),
    **runtime: object,
) -> Recipe:
    """Builds the package's recipe, with options of `augment` and `runtime`."""
    values: dict[str, object] = {
        "recipe": "throughput",
        "epochs": 1_000_000,
        "global_batch_size": setting.batch,
        "data": {"name": "digits"},  # not opened: the images are given
        "encoder": {"name": setting.encoder, "width": setting.width},
        "head": {"name": "mlp"},
        "augment": dict(augment),
        "loss": {"name": "ntxent", "temperature": TEMPERATURE},
        "constraint": {"name": "sec", "eta": 0.5, "ramp": "constant"},
        "optimiser": {
            "name": "sgd",
            "learning_rate": LEARNING_RATE,
            "momentum": MOMENTUM,
            "weight_decay": WEIGHT_DECAY,
        },
        "runtime": {"name": "local", "precision": setting.precision, **runtime},
    }
    config = from_values(PretrainConfig, values)
    return build_recipe(config, images.to(device), QuietRuntime(device))


class Ours:
    """The package's training loop.

    Attributes:
        recipe: the recipe that is trained.
        steps_taken: number of steps taken by all calls.
    """

    def __init__(self, setting: Setting, images: ResidentImages, device: torch.device, **options: Any) -> None:
        if device.type == "cpu":
            keep_freed_memory()  # as a worker does
        else:
            torch.backends.cudnn.benchmark = True  # as in a worker; the peers benefit too
        self.recipe = make_recipe(setting, images, device, **options)
        self._runtime = QuietRuntime(device)
        self.steps_taken = 0
        self._take_step: TakeStep | None = None

    def ready(self) -> None:
        """Does nothing: nothing is prepared ahead of a step."""

    def steps(self, count: int) -> None:
        """Takes `count` steps."""
        first, self.steps_taken = self.steps_taken, self.steps_taken + count
        recipe = replace(self.recipe, total_steps=self.steps_taken)
        cadence = Cadence(log_every_steps=NEVER, save_every_steps=NEVER, monitor_every_steps=NEVER)
        self._take_step = self._take_step or choose_step(self.recipe, self._runtime.device)  # made once
        train(recipe, self._runtime, cadence, lambda _: {}, first, self._take_step)

    def close(self) -> None:
        """Does nothing: there are no processes to end."""


def count_waits_per_step(contender: Ours) -> float:
    """Counts by torch's warnings how often a step waits for the GPU, without the waits at the end of a call.

    A report at the end of an epoch waits too, so the steps are inside an epoch.
    """
    steps_per_epoch = contender.recipe.sampler.steps_per_epoch
    steps = max(1, min(10, (steps_per_epoch - 1) // 3))
    if behind := contender.steps_taken % steps_per_epoch:
        contender.steps(steps_per_epoch - behind)

    def count_waits(count: int) -> int:
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                contender.steps(count)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return sum("synchronizing CUDA operation" in str(each.message) for each in caught)

    return (count_waits(2 * steps) - count_waits(steps)) / steps


def count_flops_per_image(recipe: Recipe) -> float:
    """Counts the operations of the forward and backward pass of both views of an image, by torch's counter."""
    views = torch.zeros(2, *recipe.image_set.image_shape, device=next(recipe.encoder.parameters()).device)
    with FlopCounterMode(display=False) as counter:
        recipe.head(recipe.encoder(views)).sum().backward()
    recipe.optimiser.zero_grad()
    return counter.get_total_flops()


class _Peer:
    """The common parts of the two peers: the network, SGD and the training step."""

    def __init__(self, setting: Setting, images: ResidentImages, device: torch.device) -> None:
        # The network starts with our weights; on GPUs it has the layout of the peers' recipes.
        recipe = make_recipe(setting, images, device, channels_last=device.type == "cpu")
        self._model = nn.Sequential(recipe.encoder, recipe.head).train()
        self._optimiser = torch.optim.SGD(
            self._model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY
        )
        self._setting = setting
        self._device = device
        self._pairs = self.pairs(images)

    def pairs(self, images: ResidentImages) -> Generator[tuple[Tensor, Tensor]]:
        """Yields batches of first and second views without end."""
        raise NotImplementedError

    def loss(self, first: Tensor, second: Tensor) -> Tensor:
        """Computes NT-Xent from the embeddings of both views."""
        raise NotImplementedError

    def ready(self) -> None:
        """Does nothing, unless views are made ahead."""

    def steps(self, count: int) -> None:
        """Takes `count` steps."""
        for first, second in itertools.islice(self._pairs, count):
            self._optimiser.zero_grad()
            with autocast(self._device, self._setting.precision):
                embeddings = self._model(torch.cat([first, second]))
            self.loss(*embeddings.float().chunk(2)).backward()
            self._optimiser.step()

    def close(self) -> None:
        """Ends the loader's processes, which would otherwise live until the garbage collector runs."""
        self._pairs.close()


class Lightly(_Peer):
    """lightly's recipe, whose transform runs in `num_workers` processes."""

    def __init__(self, setting: Setting, images: ResidentImages, device: torch.device, num_workers: int) -> None:
        from lightly.loss import NTXentLoss

        self._num_workers = num_workers
        self._nt_xent = NTXentLoss(TEMPERATURE)
        super().__init__(setting, images, device)

    def pairs(self, images: ResidentImages) -> Generator[tuple[Tensor, Tensor]]:
        """Yields both views of its transform, epoch after epoch."""
        loader = DataLoader(
            PilImages(images),
            self._setting.batch,
            shuffle=True,
            drop_last=True,
            num_workers=self._num_workers,
            persistent_workers=self._num_workers > 0,
            pin_memory=self._device.type == "cuda",
        )
        while True:
            for first, second in loader:
                yield first.to(self._device, non_blocking=True), second.to(self._device, non_blocking=True)

    def ready(self) -> None:
        """Drops the batches that the loader has prepared, two for each process."""
        for _ in itertools.islice(self._pairs, 2 * self._num_workers):
            pass

    def loss(self, first: Tensor, second: Tensor) -> Tensor:
        """Computes lightly's NT-Xent."""
        return self._nt_xent(first, second)


class PilImages(Dataset[Sequence[Any]]):
    """Two views of each image in memory, loaded as by torchvision's CIFAR10.

    Args:
        images: images in colour.
        normalise: whether the views have ImageNet's mean and deviation subtracted and divided, as is lightly's default.
    """

    def __init__(self, images: ResidentImages, normalise: bool = True) -> None:
        from lightly.transforms.simclr_transform import SimCLRTransform

        self._pixels = images.images.permute(0, 2, 3, 1).contiguous().numpy()
        how: dict[str, Any] = {} if normalise else {"normalize": None}
        self._transform = SimCLRTransform(images.image_shape[1], cj_strength=0.5, gaussian_blur=0.0, **how)

    def __len__(self) -> int:
        return len(self._pixels)

    def __getitem__(self, index: int) -> Sequence[Any]:
        return self._transform(Image.fromarray(self._pixels[index]))


class Plain(_Peer):
    """A plain PyTorch loop with the images on the device."""

    def pairs(self, images: ResidentImages) -> Generator[tuple[Tensor, Tensor]]:
        """Yields both views of a batch, transformed by kornia."""
        pixels: UInt8[Tensor, "images 3 height width"] = images.images.to(self._device)
        size = images.image_shape[1]
        transform = augmentation.AugmentationSequential(
            # kornia's faster mode.
            augmentation.RandomResizedCrop((size, size), scale=(0.08, 1.0), cropping_mode="resample"),
            augmentation.RandomHorizontalFlip(),
            augmentation.ColorJitter(0.4, 0.4, 0.4, 0.1, p=0.8),
            augmentation.RandomGrayscale(p=0.2),
            data_keys=["input"],
        )
        while True:
            order = torch.randperm(len(pixels), device=self._device)
            for rows in order.split(self._setting.batch):
                if len(rows) == self._setting.batch:
                    batch = pixels[rows].float() / 255
                    yield transform(batch), transform(batch)

    def loss(self, first: Float[Tensor, "batch dim"], second: Float[Tensor, "batch dim"]) -> Tensor:
        """Computes the cross-entropy of each row's cosines with all others."""
        rows = functional.normalize(torch.cat([first, second]), dim=1)
        logits = (rows @ rows.T / TEMPERATURE).fill_diagonal_(float("-inf"))
        partner = torch.arange(len(rows), device=rows.device).roll(len(first))
        return functional.cross_entropy(logits, partner)
