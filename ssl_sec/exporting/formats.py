"""The formats of an export: how each is written, and the Python code that loads it."""

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
from jaxtyping import Float
from torch import Tensor, nn

from ssl_sec.data.crops import CentreCrop
from ssl_sec.errors import ConfigError, StorageError, first_line
from ssl_sec.exporting.record import RECORD, Record
from ssl_sec.networks.architecture import Architecture
from ssl_sec.networks.encoder import Encoder
from ssl_sec.networks.heads import building
from ssl_sec.networks.weights import save_weights

FormatName = Literal["safetensors", "pt2", "onnx", "torchscript", "timm", "hub"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Exportable:
    """An encoder, and the head of an embedding or a classifier, to export.

    Attributes:
        encoder: the encoder, on the CPU, in float32 and evaluation mode.
        architecture: architecture of its backbone.
        image_shape: channels, height and width of the training images.
        head: the head, likewise: features -> embeddings or logits; None to export the features.
        dim: dimension of the features, embeddings or logits.
        class_names: names of the classes if the head is their classifier, in the order of its logits.
        record: record from which this package loads the export; None if only other programs can load it.
    """

    encoder: Encoder
    architecture: Architecture
    image_shape: tuple[int, int, int]
    head: nn.Module | None = None
    dim: int
    class_names: tuple[str, ...] = ()
    record: Record | None = None

    @property
    def network(self) -> nn.Module:
        """Images in [0, 1] -> features, embeddings or logits."""
        return self.encoder if self.head is None else nn.Sequential(self.encoder, self.head).eval()

    @property
    def output(self) -> str:
        """The name of the network's output, also in the Python code."""
        if self.class_names:
            return "logits"
        return "features" if self.head is None else "embeddings"

    @property
    def mean(self) -> list[float]:
        """The mean that is subtracted from each channel of pixels in [0, 1]."""
        return self._by_channel(self.encoder.mean)

    @property
    def std(self) -> list[float]:
        """The standard deviation that each channel is then divided by."""
        return self._by_channel(self.encoder.std)

    def _by_channel(self, values: Tensor) -> list[float]:
        # The shortest decimals of these float32 numbers.
        listed = [float(str(np.float32(value))) for value in values.flatten().tolist()]
        return listed * self.image_shape[0] if len(listed) == 1 else listed

    @property
    def takes_raw_pixels(self) -> bool:
        """Whether the backbone takes pixels in [0, 1] without scaling."""
        return set(self.mean) == {0.0} and set(self.std) == {1.0}


class Format(ABC):
    """A file format for encoders.

    Attributes:
        name: name of the format.
        library: name of its library on the Hugging Face Hub.
        packages: packages that are needed to write and check it.
        install: what pip installs them by.
        takes_numpy: whether the loaded encoder takes and returns numpy arrays instead of tensors.
        tolerance: the largest difference that the check allows, relative to the largest value.
    """

    name: ClassVar[FormatName]
    library: ClassVar[str] = "pytorch"
    packages: ClassVar[tuple[str, ...]]
    install: ClassVar[str] = "."
    takes_numpy: ClassVar[bool] = False
    tolerance: ClassVar[float] = 1e-5

    @abstractmethod
    def write(self, exportable: Exportable, images: Float[Tensor, "batch channels height width"], folder: Path) -> None:
        """Writes the files of the encoder.

        Args:
            exportable: the encoder.
            images: two or more in [0, 1], for formats that record a forward pass.
            folder: an existing, empty folder.

        Raises:
            ConfigError: if the format does not support this encoder.
            StorageError: if the files cannot be written.
        """

    def require_fit(self, architecture: Architecture, has_head: bool) -> None:
        """Refuses an encoder that the format cannot hold, as far as that is known without its weights.

        Raises:
            ConfigError: if the format does not support it.
        """
        return

    @abstractmethod
    def loading(self, exportable: Exportable) -> str:
        """Python code that, run in the folder, loads the encoder."""

    def library_of(self, exportable: Exportable) -> str:
        """The name on the Hugging Face Hub of the library that loads the encoder."""
        return self.library

    def use(self, exportable: Exportable) -> str:
        """A line of Python that computes the output from `images`, pixels in [0, 1]."""
        return f"{exportable.output} = encoder(images)"

    def input_contract(self, exportable: Exportable) -> str:
        """A sentence about the scaling of pixels, and about the place of mean and standard deviation."""
        if exportable.takes_raw_pixels:
            return "The file holds the whole network, which takes pixels in [0, 1] as they are."
        return (
            "The file holds the whole network: give it pixels in [0, 1], it subtracts the mean "
            f"{exportable.mean} and divides by {exportable.std} itself."
        )


class Safetensors(Format):
    """Weights only, with torchvision's or timm's key names."""

    name = "safetensors"
    packages = ("torch", "torchvision", "timm", "safetensors")

    def require_fit(self, architecture: Architecture, has_head: bool) -> None:
        """Refuses networks that no library builds."""
        architecture.building()

    def write(self, exportable: Exportable, images: Float[Tensor, "batch channels height width"], folder: Path) -> None:
        """Writes the weights of encoder and head; the header has the architecture, mean and standard deviation."""
        header = {
            "architecture": exportable.architecture.title,
            "image_shape": json.dumps(exportable.image_shape),
            "mean": json.dumps(exportable.mean),
            "std": json.dumps(exportable.std),
            **({} if exportable.record is None else {RECORD: exportable.record.as_json()}),
        }
        save_weights(exportable.encoder.backbone, folder / "encoder.safetensors", header)
        if exportable.head is not None:
            save_weights(exportable.head, folder / "head.safetensors")

    def loading(self, exportable: Exportable) -> str:
        """Builds the model with its library, then loads the weights."""
        used = "torch" if exportable.head is None else "collections, torch"
        lines = [
            f"import {used}, {exportable.architecture.imports}",
            "from safetensors.torch import load_file",
            "",
            exportable.architecture.building(),
            f"encoder.load_state_dict({self.weights_of('encoder', exportable)})",
            "encoder.eval()",
        ]
        if exportable.head is not None:
            lines += [
                *building(exportable.head).splitlines(),
                f"head.load_state_dict({self.weights_of('head', exportable)})",
                "head.eval()",
            ]
        if not exportable.takes_raw_pixels:
            lines.append(f"mean, std = torch.tensor([{exportable.mean}, {exportable.std}])[..., None, None]")
        return "\n".join(lines)

    def weights_of(self, part: str, exportable: Exportable) -> str:
        """An expression for the weights of encoder or head."""
        return f'load_file("{part}.safetensors")'

    def use(self, exportable: Exportable) -> str:
        """Scales the pixels if the encoder does."""
        features = f"encoder({'images' if exportable.takes_raw_pixels else '(images - mean) / std'})"
        return f"{exportable.output} = {features if exportable.head is None else f'head({features})'}"

    def input_contract(self, exportable: Exportable) -> str:
        """The file has only weights."""
        if exportable.takes_raw_pixels:
            return "The model takes pixels in [0, 1] as they are; nothing is subtracted or divided."
        return (
            f"The file holds the backbone alone: scale the pixels first, (images - mean) / std with mean "
            f"{exportable.mean} and std {exportable.std}, as the lines below do. Both are in the file's header too."
        )


class TimmFolder(Format):
    """config.json and model.safetensors as of timm's models on the Hub; for networks of timm, at full width, only."""

    name = "timm"
    library = "timm"
    packages = ("torch", "timm", "safetensors")

    def require_fit(self, architecture: Architecture, has_head: bool) -> None:
        """Refuses networks that timm cannot build, and heads."""
        architecture.timm_model()
        if has_head:
            raise ConfigError(
                "format: found 'timm', but its folder holds only a backbone, and the output is that of a head; allowed "
                "for this network: safetensors, pt2, onnx, torchscript, hub"
            )

    def write(self, exportable: Exportable, images: Float[Tensor, "batch channels height width"], folder: Path) -> None:
        """Writes both files; mean and standard deviation are where timm's transforms expect them."""
        self.require_fit(exportable.architecture, exportable.head is not None)
        model, arguments = exportable.architecture.timm_model()
        import timm  # its registry takes a second to import

        registered = timm.get_pretrained_cfg(model)
        known = {} if registered is None else registered.to_dict()
        crop = None if exportable.record is None else exportable.record.crop
        config = {
            "architecture": model,
            "num_classes": 0,
            "num_features": exportable.encoder.num_features,
            "model_args": dict(arguments),
            "pretrained_cfg": {
                "input_size": list(exportable.image_shape),
                "fixed_input_size": known.get("fixed_input_size", False)
                and not arguments.get("dynamic_img_size", False),
                "interpolation": "bilinear",
                "crop_pct": _crop_pct(crop),
                # timm resizes both sides to that of the square, whatever the aspect, or the short side.
                "crop_mode": "center" if crop is None or crop.keep_aspect else "squash",
                "mean": exportable.mean,
                "std": exportable.std,
                "num_classes": 0,
                "pool_size": None,
                # timm needs these for another number of channels, or to train a classifier.
                "first_conv": known.get("first_conv"),
                "classifier": known.get("classifier"),
            },
            **({} if exportable.record is None else {RECORD: json.loads(exportable.record.as_json())}),
        }
        save_weights(exportable.encoder.backbone, folder / "model.safetensors")
        save_file_or_fail(folder / "config.json", lambda path: path.write_text(json.dumps(config, indent=2) + "\n"))

    def loading(self, exportable: Exportable) -> str:
        """Loads the folder with timm; mean and std are those of timm's own transforms."""
        return "\n".join(
            [
                "import timm, torch",
                "",
                'encoder = timm.create_model("local-dir:.", pretrained=True).eval()',
                'mean, std = torch.tensor([encoder.pretrained_cfg[key] for key in ("mean", "std")])[..., None, None]',
            ]
        )

    def use(self, exportable: Exportable) -> str:
        """Scales the pixels as timm's transforms do."""
        return "features = encoder((images - mean) / std)"

    def input_contract(self, exportable: Exportable) -> str:
        """The config has the scaling."""
        return (
            f"timm's models take scaled pixels: (images - mean) / std with mean {exportable.mean} and std "
            f"{exportable.std}, which config.json states and timm's own transforms apply."
        )


def _crop_pct(crop: CentreCrop | None) -> float:
    """The part of the short side that is kept; timm divides by it, rounds down, and gets the short side."""
    if crop is None:
        return 1.0
    part = crop.size_px / crop.short_side_px
    return part if math.floor(crop.size_px / part) == crop.short_side_px else math.nextafter(part, 0)


def save_file_or_fail(path: Path, write: Callable[[Path], object]) -> None:
    """Writes a file.

    Raises:
        StorageError: if it cannot be written.
    """
    try:
        write(path)
    except (OSError, ValueError, RuntimeError) as error:  # protobuf is limited to 2 GiB
        raise StorageError(f"{path} cannot be written: {first_line(error)}") from error
