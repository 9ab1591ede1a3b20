"""The check of an export: its output in a process without this package is compared with the trained network's."""

import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from ssl_sec.errors import ConfigError
from ssl_sec.exporting.formats import Exportable, Format
from ssl_sec.exporting.record import load_script

_CHECK_TIMEOUT_S = 600


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """A check that an export has passed.

    Attributes:
        num_images: number of compared images; not the number in the recorded batch.
        largest_difference: largest absolute difference of an output value.
        largest_value: largest absolute value of our output.
        allowed: the largest difference that passes.
        is_tied_to_cpu: whether the files have steps that were recorded for the CPU, and may fail on a GPU.
    """

    num_images: int
    largest_difference: float
    largest_value: float
    allowed: float
    is_tied_to_cpu: bool = False

    @property
    def remarks(self) -> list[str]:
        """What the user of the files should know; nothing if they run everywhere."""
        if not self.is_tied_to_cpu:
            return []
        return [
            "TorchScript has steps of this encoder that were recorded for the CPU, and may fail on a GPU; the other "
            "formats run on both."
        ]


def check_export(
    form: Format, exportable: Exportable, images: Float[Tensor, "batch channels height width"], folder: Path
) -> Check:
    """Loads an export in a process without this package, and compares its output with the trained network's.

    The input is all images at once, and the first one alone. A difference may be up to the format's tolerance times the
    largest value.

    Raises:
        ConfigError: if it cannot be loaded or its output differs.
    """
    with torch.no_grad():
        ours = exportable.network(images).numpy()
    written = f"format: {form.name} was written, but"
    nothing_kept = "nothing is kept; allowed: another format"
    read_back = _read_back(form, exportable, images.numpy(), folder)
    if isinstance(read_back, str):
        raise ConfigError(f"{written} reading it back fails: {read_back}; {nothing_kept}")
    theirs, first = read_back
    largest_value = float(np.abs(ours).max())
    allowed = form.tolerance * largest_value
    if theirs.shape != ours.shape or first.shape != ours[:1].shape:
        shapes = f"of shape {theirs.shape} instead of {ours.shape}"
        raise ConfigError(f"{written} has {exportable.output} {shapes}; {nothing_kept}")
    difference = float(np.maximum(np.abs(theirs - ours).max(), np.abs(first - ours[:1]).max()))
    if not difference <= allowed:  # true for NaN
        found = f"differs from the trained network by {difference:.3g}, and {allowed:.3g} is allowed"
        raise ConfigError(f"{written} {found}; {nothing_kept}")
    return Check(
        num_images=len(images),
        largest_difference=difference,
        largest_value=largest_value,
        allowed=allowed,
        is_tied_to_cpu=is_tied_to_cpu(folder),
    )


def is_tied_to_cpu(folder: Path) -> bool:
    """Whether a TorchScript file creates tensors on the device of its recording; XCiT and others of timm do."""
    path = folder / "encoder.pt"
    if not path.is_file():
        return False
    graph: Any = load_script(str(path)).inlined_graph  # its nodes do not outlive it
    constants = graph.findAllNodes("prim::Constant")
    return any(constant.output().type().kind() == "DeviceObjType" for constant in constants)


_SCRIPT = """
import sys
import numpy
array = numpy.load(sys.argv[1])
{as_tensor}
{loading}
results = []
for images in (array, array[:1]):
    {use}
    results.append(numpy.asarray({output}))
assert 'ssl_sec' not in sys.modules
numpy.savez(sys.argv[2], *results)
"""
_AS_TENSOR = "import torch; torch.set_grad_enabled(False); array = torch.from_numpy(array)"


def _read_back(form: Format, exportable: Exportable, images: np.ndarray, folder: Path) -> list[np.ndarray] | str:
    """The output of another process for all images and for the first alone; or why it failed."""
    script = _SCRIPT.format(
        as_tensor="" if form.takes_numpy else _AS_TENSOR,
        loading=form.loading(exportable),
        use=form.use(exportable),
        output=exportable.output,
    )
    with tempfile.TemporaryDirectory() as exchange:
        images_path, result_path = Path(exchange) / "images.npy", Path(exchange) / "results.npz"
        np.save(images_path, images)
        # -P: files in the folder are not modules. Our features were computed on the CPU, and so are these.
        command = [sys.executable, "-P", "-c", script, str(images_path), str(result_path)]
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "ignore"}
        try:
            ended = subprocess.run(
                command, cwd=folder, env=environment, capture_output=True, text=True, timeout=_CHECK_TIMEOUT_S
            )
        except subprocess.TimeoutExpired:
            return f"no answer within {_CHECK_TIMEOUT_S} s"
        if ended.returncode != 0:
            errors = ended.stderr.strip().splitlines()
            return errors[-1] if errors else f"exit code {ended.returncode}"
        with np.load(result_path) as results:
            return [results[name] for name in results.files]
