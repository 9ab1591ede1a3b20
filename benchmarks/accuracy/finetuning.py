"""Fine-tunes an encoder on a share of the labels: ours, and a loop of timm's parts as in its training script.

    OMP_NUM_THREADS=1 python -m benchmarks.accuracy.finetuning --run runs/cifar10_cpu/wide --data cifar10

The encoder is a ResNet of its full width with the ImageNet stem, which timm can build. Both start from its weights and
train on the same images, all weights, by SGD with Nesterov's momentum and a cosine over the steps, on random crops and
flips, in float32; the last epoch's network is measured on the test images. A time is that of a whole fine-tuning,
including loading the images and measuring the test images. timm loads in the training's own process, as ours does.

Writes benchmarks/results/finetuning-{cpu,gpu}.json.
"""

import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from torchvision.transforms.functional import to_pil_image

from benchmarks.measure import choose_device, describe_environment, format_table, make_parser, save_results
from benchmarks.simclr import describe_data
from ssl_sec.edges.composition.compose import compose
from ssl_sec.edges.folder.folder import RunFolder
from ssl_sec.edges.folder.stored_config import training_config
from ssl_sec.edges.run.worker import Worker, work
from ssl_sec.edges.tables import mean_and_std
from ssl_sec.recipes.finetuning.config import FinetuneConfig
from ssl_sec.recipes.finetuning.recipe import labelled_images
from ssl_sec.recipes.registry import PRETRAIN
from ssl_sec.settings import from_values, to_values

NAMES = ("ours", "timm")


def main() -> None:
    """Measures both, prints the table and writes the results."""
    parser = make_parser("accuracy.finetuning", __doc__)
    parser.add_argument("--run", type=Path, required=True, help="folder of the run whose encoder is fine-tuned")
    parser.add_argument("--data", type=Path, required=True, help="folder with train.parquet and test.parquet")
    parser.add_argument("--size", type=int, default=32, help="side of the images, pixels")
    parser.add_argument("--share", type=float, default=0.1, help="of the labels")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch", type=int, default=256, help="images of a step")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options = parser.parse_args()
    rows = []
    for seed in options.seeds:
        data = {**describe_data(options.data), "image_size_px": options.size}
        config = make_config(options.run, data, options.share, options.epochs, options.batch, seed)
        for name in NAMES:
            begun = time.perf_counter()
            top1 = finetune(config) if name == "ours" else finetune_by_timm(config)
            rows.append({"name": name, "seed": seed, "top1": top1, "seconds": time.perf_counter() - begun})
            print(format_table([{key: _shown(value) for key, value in rows[-1].items()}]), flush=True)
    print(format_table([summarise(name, rows) for name in NAMES]))
    values = {
        "share": options.share,
        "epochs": options.epochs,
        "batch": options.batch,
        "runs": rows,
        "environment": describe_environment(),
    }
    save_results("finetuning", values)


def make_config(run: Path, data: dict[str, Any], share: float, epochs: int, batch: int, seed: int) -> FinetuneConfig:
    """Makes the configuration of a fine-tuning of a run's encoder.

    Args:
        run: the run's folder.
        data: keys and values of the labelled images.
        share: share of the labels.
        epochs: passes over the labelled images.
        batch: number of images in a step.
        seed: seed for the labelled images and the classifier.
    """
    values = compose("finetune", ["data=parquet", "data.train=[x]", "runtime=local", f"epochs={epochs}"])
    values |= {
        "seed": seed,
        "global_batch_size": batch,
        "labels_share": share,
        "held_out_share": 0.0,
        "evaluated": "last",
        "data": data,
    }
    values["monitor"] = {"every_epochs": epochs}
    values["runtime"] = {**values["runtime"], "precision": "float32"}
    encoder = training_config(PRETRAIN, RunFolder(run).config_path).encoder
    values["encoder"] = {**to_values(encoder), "weights": str(RunFolder(run).encoder_path)}
    return from_values(FinetuneConfig, values)


def finetune(config: FinetuneConfig) -> float:
    """Fine-tunes as `jobs.finetune` does in one process; returns the top-1 accuracy on the test images in percent."""
    with tempfile.TemporaryDirectory() as path:
        folder = RunFolder(Path(path) / "run")
        values = to_values(config)
        folder.start(values)
        work("finetune", values, folder, Worker(rank=0, world_size=1, device=choose_device()))
        return folder.last_metrics()["finetune/top1"]


class Pictures(Dataset[tuple[Tensor, int]]):
    """Images of a set as timm's loader takes them.

    Args:
        images: uint8, [images, channels, height, width].
        labels: labels of the images.
    """

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.pictures = [to_pil_image(image) for image in images]
        self.labels = labels.tolist()
        self.transform: Any = None  # set by timm's loader

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, place: int) -> tuple[Tensor, int]:
        return self.transform(self.pictures[place]), self.labels[place]


def finetune_by_timm(config: FinetuneConfig) -> float:
    """Fine-tunes the same encoder on the same images by timm; returns the same as `finetune`."""
    import timm
    from safetensors.torch import load_file
    from timm.optim import create_optimizer_v2  # pyright: ignore[reportPrivateImportUsage]
    from timm.scheduler.cosine_lr import CosineLRScheduler

    torch.manual_seed(config.seed)
    device = choose_device()
    whole, test = config.data.open("train"), config.data.open("test")
    train = labelled_images(config, whole).trained_on
    network = timm.create_model(config.encoder.name, num_classes=len(whole.class_names)).to(device)
    weights = {name.removeprefix("backbone."): value for name, value in load_file(str(config.encoder.weights)).items()}
    missing = network.load_state_dict(weights, strict=False)
    if missing.unexpected_keys or set(missing.missing_keys) != {"fc.weight", "fc.bias"}:
        raise ValueError(f"the weights are not those of timm's {config.encoder.name}: {missing}")
    batches = make_loader(train, config, is_training=True)
    optimiser = create_optimizer_v2(
        network,
        opt="sgd",  # timm's has Nesterov's momentum
        lr=config.optimiser.learning_rate,
        momentum=0.9,
        weight_decay=config.optimiser.weight_decay,
    )
    total_steps = config.epochs * len(batches)
    schedule = CosineLRScheduler(optimiser, t_initial=total_steps, t_in_epochs=False)
    criterion, step = nn.CrossEntropyLoss(), 0
    network.train()
    for _ in range(config.epochs):
        for images, labels in batches:
            optimiser.zero_grad()
            criterion(network(images.to(device)), labels.to(device)).backward()
            optimiser.step()
            step += 1
            schedule.step_update(step)
    network.eval()
    with torch.inference_mode():
        right = sum(
            int((network(images.to(device)).argmax(1) == labels.to(device)).sum())
            for images, labels in make_loader(test, config, is_training=False)
        )
    return 100 * right / len(test)


def make_loader(images: Any, config: FinetuneConfig, is_training: bool) -> Any:
    """Makes timm's loader over the images of a set in memory."""
    from timm.data.loader import create_loader

    augment, (channels, height, width) = config.augment, images.image_shape
    pictures: Any = Pictures(images.read(torch.arange(len(images))).images, images.labels)
    return create_loader(
        pictures,
        input_size=(channels, height, width),
        batch_size=config.global_batch_size,
        is_training=is_training,
        use_prefetcher=False,
        scale=(augment.min_scale, 1.0),
        hflip=augment.flip_probability,
        color_jitter=0.0,
        interpolation="bilinear",
        mean=(0.0,) * channels,
        std=(1.0,) * channels,
        crop_pct=1.0,
        num_workers=0,
        persistent_workers=False,
    )


def summarise(name: str, rows: list[dict[str, Any]]) -> dict[str, str]:
    """Makes the row of the table of ours or of timm: mean and standard deviation over the seeds."""
    own = [row for row in rows if row["name"] == name]
    return {
        "": name,
        "seeds": str(len(own)),
        "top-1 %": mean_and_std([row["top1"] for row in own]),
        "seconds": mean_and_std([row["seconds"] for row in own]),
    }


def _shown(value: Any) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
