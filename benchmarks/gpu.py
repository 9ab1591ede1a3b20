"""All that is measured on a GPU, in one command that ends within eight minutes and writes one file.

    python -m benchmarks.gpu --images <folder with a folder of images for each class>

Needs neither Ray nor MLflow. Parts that are still to come when the time is over are left out and named; a part that
fails leaves its error instead of figures. Parts: pretraining of ResNet-50 and ResNet-18 beside lightly's recipe and a
plain loop; what each option of ours brings; NT-Xent and class templates as they grow; evaluation beside its peers.
Writes benchmarks/results/gpu.json (on a machine without one, gpu-missing.json: a rehearsal).
"""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks import evaluation, growth, throughput
from benchmarks.measure import RESULTS, command_line, environment, peak_rate
from benchmarks.options import of_augmentations, of_steps
from benchmarks.simclr import Setting

MINUTES = 8.0


def main() -> None:
    """Measures until the time is over, and writes the figures after each part."""
    parser = command_line("gpu", __doc__)
    parser.add_argument("--images", type=Path, help="without it, random pixels")
    parser.add_argument("--minutes", type=float, default=MINUTES)
    parser.add_argument("--encoder", nargs="+", default=["resnet50", "resnet18"], choices=["resnet18", "resnet50"])
    parser.add_argument("--batch", nargs="+", type=int, default=[1024, 256, 4096])
    parser.add_argument("--width", type=float, default=1.0)
    parser.add_argument("--rows", nargs="+", type=int, default=[512, 2048, 8192, 32_768, 65_536])
    parser.add_argument("--classes", nargs="+", type=int, default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--evaluated", type=int, default=50_000, help="images of the evaluation")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    deadline = time.monotonic() + 60 * options.minutes
    images = throughput.images_of(options.images, 32, max(options.batch))
    settings = [
        Setting(encoder=encoder, batch=batch, precision="bfloat16", width=options.width)
        for batch in options.batch
        for encoder in options.encoder
    ]
    parts: dict[str, Callable[[], Any]] = {
        f"throughput, {each.encoder}, {each.batch}": lambda each=each: throughput.measure(
            each, images, device, rounds=3
        )
        for each in settings
    }
    parts["options"] = lambda: of_steps(settings[0], images, device, rounds=3)
    parts["augmentation"] = lambda: of_augmentations(settings[0].batch, device, rounds=3)
    peak = peak_rate(device, "float32")
    parts["rows"] = lambda: [growth.of_rows(count, device, peak) for count in options.rows]
    parts["classes"] = lambda: [growth.of_classes(count, device, peak) for count in options.classes]
    parts["evaluation"] = lambda: evaluation.measure(options.evaluated, rounds=1)
    path = RESULTS / ("gpu.json" if device.type == "cuda" else "gpu-missing.json")
    figures: dict[str, Any] = {"environment": environment(), "images": images.description}
    for name, measured in parts.items():
        start = time.monotonic()
        figures[name] = _figures(measured) if start < deadline else "left out: the time was over"
        print(f"{name}: {time.monotonic() - start:.0f} s", flush=True)
        RESULTS.mkdir(exist_ok=True)
        path.write_text(json.dumps(figures, indent=2) + "\n")
    print(path)


def _figures(measured: Callable[[], Any]) -> Any:
    try:
        return measured()
    except (RuntimeError, ValueError, ImportError) as error:  # out of memory, a compiler that is not there
        return f"failed: {type(error).__name__}: {error}"
    finally:
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
