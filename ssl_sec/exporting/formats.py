"""The formats: what each writes of an encoder and a head, and the Python that reads it back."""

import importlib.metadata
import importlib.util
import json
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal, TypeVar

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from ssl_sec.errors import ConfigError, StorageError, first_line
from ssl_sec.networks.architecture import Architecture
from ssl_sec.networks.encoder import Encoder
from ssl_sec.networks.heads import building
from ssl_sec.networks.weights import save_weights

FormatName = Literal["safetensors", "torchscript", "onnx", "timm"]

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Exportable:
    """An encoder, and a head where its embeddings are asked for, with what their files say of them.

    Attributes:
        encoder: on the CPU, float32, in evaluation mode.
        architecture: of its backbone.
        image_shape: channels, height and width that it was trained on.
        head: likewise, features -> embeddings; None where the features are what is asked for.
        dim: of the features or embeddings.
    """

    encoder: Encoder
    architecture: Architecture
    image_shape: tuple[int, int, int]
    head: nn.Module | None = None
    dim: int

    @property
    def network(self) -> nn.Module:
        """Images in [0, 1] -> features or embeddings."""
        return self.encoder if self.head is None else nn.Sequential(self.encoder, self.head).eval()

    @property
    def output(self) -> str:
        """What the network makes of images, and the name of it in the Python that uses the files."""
        return "features" if self.head is None else "embeddings"

    @property
    def mean(self) -> list[float]:
        """That is subtracted from each channel of pixels in [0, 1]."""
        return self._by_channel(self.encoder.mean)

    @property
    def std(self) -> list[float]:
        """That each channel is then divided by."""
        return self._by_channel(self.encoder.std)

    def _by_channel(self, values: Tensor) -> list[float]:
        # The shortest decimals that are these float32 numbers.
        listed = [float(str(np.float32(value))) for value in values.flatten().tolist()]
        return listed * self.image_shape[0] if len(listed) == 1 else listed

    @property
    def leaves_pixels(self) -> bool:
        """Whether the backbone takes pixels in [0, 1] as they are."""
        return set(self.mean) == {0.0} and set(self.std) == {1.0}


class Format(ABC):
    """A way to write an encoder, and the words to read it back.

    Attributes:
        name: of the format.
        library: that the Hugging Face Hub files it under.
        packages: that writing and checking it takes.
        takes_numpy: whether what is read back takes and gives numpy arrays instead of tensors.
        tolerance: the difference that the check allows, as a part of the largest value.
    """

    name: ClassVar[FormatName]
    library: ClassVar[str] = "pytorch"
    packages: ClassVar[tuple[str, ...]]
    takes_numpy: ClassVar[bool] = False
    tolerance: ClassVar[float] = 1e-5

    @abstractmethod
    def write(self, exportable: Exportable, images: Float[Tensor, "batch channels height width"], folder: Path) -> None:
        """Writes the encoder's files into a folder.

        Args:
            exportable: the encoder.
            images: two or more in [0, 1], for formats that record a forward pass.
            folder: that exists and is empty.

        Raises:
            ConfigError: if the format cannot hold this encoder.
            StorageError: if the files cannot be written.
        """

    @abstractmethod
    def loading(self, exportable: Exportable) -> str:
        """Python that, run in the folder, makes what `use` names."""

    def use(self, exportable: Exportable) -> str:
        """A line that makes features or embeddings, under that name, from `images`, pixels in [0, 1]."""
        return f"{exportable.output} = encoder(images)"

    def input_contract(self, exportable: Exportable) -> str:
        """Who scales the pixels, and where mean and standard deviation are written."""
        if exportable.leaves_pixels:
            return "The file holds the whole network, which takes pixels in [0, 1] as they are."
        return (
            "The file holds the whole network: give it pixels in [0, 1], it subtracts the mean "
            f"{exportable.mean} and divides by {exportable.std} itself."
        )

    def _recorded(self, exportable: Exportable, record: Callable[[], T]) -> T:
        """A forward pass that torch records.

        Raises:
            ConfigError: if it cannot, whatever the reason.
        """
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            try:
                return record()
            except Exception as error:
                others = ", ".join(other for other in FORMATS if other != self.name)
                title = exportable.architecture.title
                raise ConfigError(
                    f"format: found {self.name!r}, but it cannot hold {title}: {first_line(error)}; try: {others}"
                ) from error


class Safetensors(Format):
    """Weights alone, with torchvision's or timm's key names."""

    name = "safetensors"
    packages = ("torch", "torchvision", "timm", "safetensors")

    def write(self, exportable: Exportable, images: Float[Tensor, "batch channels height width"], folder: Path) -> None:
        """Writes encoder.safetensors, whose header has the architecture, mean and standard deviation; and the head."""
        about = {
            "architecture": exportable.architecture.title,
            "image_shape": json.dumps(exportable.image_shape),
            "mean": json.dumps(exportable.mean),
            "std": json.dumps(exportable.std),
        }
        save_weights(exportable.encoder.backbone, folder / "encoder.safetensors", about)
        if exportable.head is not None:
            save_weights(exportable.head, folder / "head.safetensors")

    def loading(self, exportable: Exportable) -> str:
        """Builds the model with its own library, then loads the weights, every name of which must fit."""
        used = "torch" if exportable.head is None else "collections, torch"
        lines = [
            f"import {used}, {exportable.architecture.imports}",
            "from safetensors.torch import load_file",
            "",
            exportable.architecture.building(),
            'encoder.load_state_dict(load_file("encoder.safetensors"))',
            "encoder.eval()",
        ]
        if exportable.head is not None:
            lines += [
                *building(exportable.head).splitlines(),
                'head.load_state_dict(load_file("head.safetensors"))',
                "head.eval()",
            ]
        if not exportable.leaves_pixels:
            lines.append(f"mean, std = torch.tensor([{exportable.mean}, {exportable.std}])[..., None, None]")
        return "\n".join(lines)

    def use(self, exportable: Exportable) -> str:
        """Scales the pixels where the encoder does."""
        features = f"encoder({'images' if exportable.leaves_pixels else '(images - mean) / std'})"
        return f"features = {features}" if exportable.head is None else f"embeddings = head({features})"

    def input_contract(self, exportable: Exportable) -> str:
        """The file has weights alone."""
        if exportable.leaves_pixels:
            return "The model takes pixels in [0, 1] as they are; nothing is subtracted or divided."
        return (
            f"The file holds the backbone alone: scale the pixels first, (images - mean) / std with mean "
            f"{exportable.mean} and std {exportable.std}, as the lines below do. Both are in the file's header too."
        )


class TorchScript(Format):
    """The recorded forward pass with its weights, for Python and C++."""

    name = "torchscript"
    packages = ("torch",)

    def write(self, exportable: Exportable, images: Float[Tensor, "batch channels height width"], folder: Path) -> None:
        """Writes encoder.pt."""
        # torch.jit is deprecated; it is still what libtorch and many servers read.
        traced = self._recorded(exportable, lambda: torch.jit.trace(exportable.network, images[:2], check_trace=False))
        assert isinstance(traced, torch.jit.ScriptModule)
        _save(folder / "encoder.pt", lambda path: traced.save(str(path)))

    def loading(self, exportable: Exportable) -> str:
        """PyTorch alone is needed."""
        return 'import torch\n\nencoder = torch.jit.load("encoder.pt")'


class ONNX(Format):
    """The forward pass as an ONNX graph with its weights in one file."""

    name = "onnx"
    library = "onnx"
    packages = ("onnx", "onnxscript", "onnxruntime")
    takes_numpy = True
    # The kernels are others than torch's, and their sums have another order.
    tolerance = 1e-4

    def write(self, exportable: Exportable, images: Float[Tensor, "batch channels height width"], folder: Path) -> None:
        """Writes encoder.onnx."""
        program = self._recorded(
            exportable,
            lambda: torch.onnx.export(
                exportable.network,
                (images[:2],),
                dynamo=True,
                input_names=["images"],
                output_names=[exportable.output],
                dynamic_shapes=({0: torch.export.Dim("batch")},),
                verbose=False,
            ),
        )
        assert program is not None
        _save(folder / "encoder.onnx", lambda path: program.save(path, external_data=False))

    def loading(self, exportable: Exportable) -> str:
        """ONNX Runtime alone is needed; images and features are numpy arrays."""
        return 'import onnxruntime\n\nencoder = onnxruntime.InferenceSession("encoder.onnx")'

    def use(self, exportable: Exportable) -> str:
        """The encoder scales the pixels itself."""
        return f'({exportable.output},) = encoder.run(["{exportable.output}"], {{"images": images}})'


class TimmFolder(Format):
    """config.json and model.safetensors as the Hugging Face Hub keeps timm's models."""

    name = "timm"
    library = "timm"
    packages = ("torch", "timm", "safetensors")

    def write(self, exportable: Exportable, images: Float[Tensor, "batch channels height width"], folder: Path) -> None:
        """Writes both files; mean and standard deviation are where timm's transforms look for them."""
        if exportable.head is not None:
            raise ConfigError(
                "format: found 'timm', but its folder holds a backbone alone, and this run's embeddings are those of a "
                "head; allowed for this run: safetensors, torchscript, onnx"
            )
        model, arguments = exportable.architecture.timm_model()
        import timm  # its registry takes a second to import

        registered = timm.get_pretrained_cfg(model)
        told = {} if registered is None else registered.to_dict()
        config = {
            "architecture": model,
            "num_classes": 0,
            "num_features": exportable.encoder.num_features,
            "model_args": dict(arguments),
            "pretrained_cfg": {
                "input_size": list(exportable.image_shape),
                "fixed_input_size": told.get("fixed_input_size", False),
                "interpolation": "bilinear",
                "crop_pct": 1.0,
                "mean": exportable.mean,
                "std": exportable.std,
                "num_classes": 0,
                "pool_size": None,
                # For those who ask timm for other channels, or for a classifier to train.
                "first_conv": told.get("first_conv"),
                "classifier": told.get("classifier"),
            },
        }
        save_weights(exportable.encoder.backbone, folder / "model.safetensors")
        _save(folder / "config.json", lambda path: path.write_text(json.dumps(config, indent=2) + "\n"))

    def loading(self, exportable: Exportable) -> str:
        """A line reads the folder; timm's own transforms take mean and std from where the next one does."""
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


FORMATS: Mapping[FormatName, Format] = {
    "safetensors": Safetensors(),
    "torchscript": TorchScript(),
    "onnx": ONNX(),
    "timm": TimmFolder(),
}

# What an export's folder may hold, and so what overwriting may remove.
FILE_NAMES = frozenset(
    "README.md config.json encoder.onnx encoder.pt encoder.safetensors head.safetensors model.safetensors".split()
)


def require_packages(form: Format) -> None:
    """Checks that what the format needs is installed.

    Raises:
        ConfigError: with what to install.
    """
    missing = [name for name in form.packages if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"format: {form.name} needs {', '.join(form.packages)}, and {', '.join(missing)} is not installed; "
            "install with: pip install -c constraints.txt -e '.[onnx]'"
        )


def versions(form: Format) -> dict[str, str]:
    """The versions that wrote and checked an export."""
    return {name: importlib.metadata.version(name) for name in dict.fromkeys(("torch", *form.packages))}


def _save(path: Path, write: Callable[[Path], object]) -> None:
    try:
        write(path)
    except (OSError, ValueError, RuntimeError) as error:  # protobuf holds no more than 2 GiB
        raise StorageError(f"{path} cannot be written: {first_line(error)}") from error
