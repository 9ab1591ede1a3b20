"""The folder of a model on the Hugging Face Hub: weights in one file, config.json, and a way to load them."""

import json
from pathlib import Path
from typing import ClassVar

from jaxtyping import Float
from torch import Tensor, nn

from ssl_sec.errors import ConfigError
from ssl_sec.exporting.formats import Exportable, Format, Safetensors, TimmFolder, save_file_or_fail
from ssl_sec.exporting.record import RECORD
from ssl_sec.exporting.recorded import PT2
from ssl_sec.networks.weights import save_weights


class HubFolder(Format):
    """model.safetensors and config.json as on the Hugging Face Hub; output=hf://<owner>/<name> pushes them."""

    name = "hub"
    packages = ("torch", "torchvision", "timm", "safetensors", "huggingface_hub")

    def write(self, exportable: Exportable, images: Float[Tensor, "batch channels height width"], folder: Path) -> None:
        """Writes timm's folder if timm has the network; a network of no other library is added as pt2."""
        reader = _reader(exportable)
        if isinstance(reader, TimmFolder):
            reader.write(exportable, images, folder)
            return
        backbone, head = exportable.encoder.backbone, exportable.head
        whole = backbone if head is None else nn.ModuleDict({"encoder": backbone, "head": head})
        save_weights(whole, folder / "model.safetensors")
        config = {
            "architecture": exportable.architecture.title,
            "output": exportable.output,
            "dim": exportable.dim,
            "image_shape": exportable.image_shape,
            "mean": exportable.mean,
            "std": exportable.std,
            **({} if exportable.record is None else {RECORD: json.loads(exportable.record.as_json())}),
        }
        text = json.dumps(config, indent=2) + "\n"
        save_file_or_fail(folder / "config.json", lambda path: path.write_text(text, encoding="utf-8"))
        if isinstance(reader, PT2):
            reader.write(exportable, images, folder)

    def library_of(self, exportable: Exportable) -> str:
        """The library by which the network is loaded."""
        return _reader(exportable).library

    def loading(self, exportable: Exportable) -> str:
        """Loads by timm or torchvision where they have the network, else by torch.export."""
        return _reader(exportable).loading(exportable)

    def use(self, exportable: Exportable) -> str:
        """The line of the library that loads the network."""
        return _reader(exportable).use(exportable)

    def input_contract(self, exportable: Exportable) -> str:
        """The sentence of the library that loads the network."""
        return _reader(exportable).input_contract(exportable)


class _OneFile(Safetensors):
    """Weights of the backbone, and of the head under a prefix, in one file."""

    file: ClassVar[str] = "model.safetensors"

    def weights_of(self, part: str, exportable: Exportable) -> str:
        """An expression for the weights of encoder or head."""
        if exportable.head is None:
            return f'load_file("{self.file}")'
        found = f'{{key.partition(".")[2]: value for key, value in load_file("{self.file}").items()'
        return f'{found} if key.startswith("{part}.")}}'

    def input_contract(self, exportable: Exportable) -> str:
        """The scaling is in config.json."""
        return super().input_contract(exportable).replace("the file's header", "config.json")


def _reader(exportable: Exportable) -> Format:
    """The format by whose code the network is loaded."""
    if exportable.head is None:
        try:
            exportable.architecture.timm_model()
            return TimmFolder()
        except ConfigError:
            pass
    try:
        exportable.architecture.building()
    except ConfigError:
        return PT2()
    return _OneFile()
