"""The formats that hold the forward pass, as torch records it, with its weights."""

import io
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from ssl_sec.errors import ConfigError, first_line
from ssl_sec.exporting.formats import Exportable, Format, FormatName, save_file_or_fail
from ssl_sec.exporting.record import RECORD
from ssl_sec.networks.encoder import Encoder

T = TypeVar("T")


class _RecordedFormat(Format):
    """A format of a recorded forward pass."""

    def _record(self, exportable: Exportable, record: Callable[[], T]) -> T:
        """Makes torch record the forward pass.

        Raises:
            ConfigError: if torch cannot record it.
        """
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            try:
                return record()
            except Exception as error:
                others = ", ".join(other for other in get_args(FormatName) if other != self.name)
                title = exportable.architecture.title
                raise ConfigError(
                    f"format: found {self.name!r}, but it does not support {title}: {first_line(error)}; try: {others}"
                ) from error


class TorchScript(_RecordedFormat):
    """The recorded forward pass and its weights, also for C++; deprecated by torch, unsupported on Python 3.14."""

    name = "torchscript"
    packages = ("torch",)

    def write(self, exportable: Exportable, images: Float[Tensor, "batch channels height width"], folder: Path) -> None:
        """Writes encoder.pt."""
        # torch.jit is deprecated, but libtorch and many servers still need it.
        with _floats_alone(exportable.encoder):
            traced = self._record(
                exportable, lambda: torch.jit.trace(exportable.network, images[:2], check_trace=False)
            )
        assert isinstance(traced, torch.jit.ScriptModule)
        more = {} if exportable.record is None else {RECORD: exportable.record.as_json()}
        content = traced.save_to_buffer(_extra_files=more)  # torch's writer of files aborts on a full disk
        save_file_or_fail(folder / "encoder.pt", lambda path: path.write_bytes(content))

    def loading(self, exportable: Exportable) -> str:
        """Needs only PyTorch."""
        return 'import torch\n\nencoder = torch.jit.load("encoder.pt")'


class PT2(_RecordedFormat):
    """The forward pass with its weights as a program of torch.export, for PyTorch alone."""

    name = "pt2"
    packages = ("torch",)

    def write(self, exportable: Exportable, images: Float[Tensor, "batch channels height width"], folder: Path) -> None:
        """Writes encoder.pt2."""
        with _floats_alone(exportable.encoder):
            program = self._record(
                exportable,
                lambda: torch.export.export(exportable.network, (images[:2],), dynamic_shapes=_any_batch()),
            )
        content = io.BytesIO()
        torch.export.save(program, content)
        save_file_or_fail(folder / "encoder.pt2", lambda path: path.write_bytes(content.getbuffer()))

    def loading(self, exportable: Exportable) -> str:
        """Needs only PyTorch."""
        return 'import torch\n\nencoder = torch.export.load("encoder.pt2").module()'


class ONNX(_RecordedFormat):
    """The forward pass as an ONNX graph with its weights in one file."""

    name = "onnx"
    library = "onnx"
    packages = ("onnx", "onnxscript", "onnxruntime")
    install = "'.[onnx]'"
    takes_numpy = True
    # ONNX Runtime's kernels are not torch's, and sum in another order.
    tolerance = 1e-4

    def write(self, exportable: Exportable, images: Float[Tensor, "batch channels height width"], folder: Path) -> None:
        """Writes encoder.onnx."""
        program = self._record(
            exportable,
            lambda: torch.onnx.export(
                exportable.network,
                (images[:2],),
                dynamo=True,
                input_names=["images"],
                output_names=[exportable.output],
                dynamic_shapes=_any_batch(),
                verbose=False,
            ),
        )
        assert program is not None
        save_file_or_fail(folder / "encoder.onnx", lambda path: program.save(path, external_data=False))

    def loading(self, exportable: Exportable) -> str:
        """Needs only ONNX Runtime; images and features are numpy arrays."""
        return 'import onnxruntime\n\nencoder = onnxruntime.InferenceSession("encoder.onnx")'

    def use(self, exportable: Exportable) -> str:
        """The encoder scales the pixels itself."""
        return f'({exportable.output},) = encoder.run(["{exportable.output}"], {{"images": images}})'


@contextmanager
def _floats_alone(encoder: Encoder) -> Iterator[None]:
    """Makes a recording refuse whole numbers, as the encoder does, whose own check is not recorded.

    A mean refuses them, and that of one value is the value. (torch.jit.trace drops assertions.)
    """
    hook = encoder.register_forward_pre_hook(lambda _, images: images[0].unsqueeze(0).mean(0))
    try:
        yield
    finally:
        hook.remove()


def _any_batch() -> tuple[dict[int, Any]]:
    """For torch's exporters: the batch may have any size, the images have one."""
    return ({0: torch.export.Dim("batch")},)
