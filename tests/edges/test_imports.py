"""What may be imported before a job has read its configuration: anything else delays the help and every message."""

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Hydra, with what it imports; what stands in Cython's and setuptools' names is no package of its own.
WITHOUT_TORCH = {
    "ssl_sec",
    "hydra",
    "omegaconf",
    "antlr4",
    "yaml",
    "tqdm",
    "attr",
    "attrs",
    "packaging",
    "cython_runtime",
}
# Torch, with what it imports; what the configuration's own annotations and data sets import.
WITH_TORCH = WITHOUT_TORCH | {
    *("torch", "functorch", "torchgen", "numpy", "typing_extensions", "cloudpickle", "cuda", "pynvml"),
    *("jaxtyping", "wadler_lindig", "pyarrow", "fsspec", "PIL", "safetensors"),
}
COMMAND = """
import json, sys
before = set(sys.modules)
from ssl_sec.edges.commands import run_command
code = run_command(sys.argv[1:])
print("\\n" + json.dumps(sorted(set(sys.modules) - before)), file=sys.stderr)
sys.exit(code)
"""


@pytest.mark.parametrize(
    ("arguments", "code", "allowed"),
    [
        (["--help"], 0, WITHOUT_TORCH),
        (["pretrain", "epoch=3"], 2, WITHOUT_TORCH),
        (["face", "--cfg", "job"], 0, WITH_TORCH),
        (["pretrain", "--help"], 0, WITH_TORCH),
        (["pretrain", "epochs=-3"], 2, WITH_TORCH),
        (["face", "epochs=-3"], 2, WITH_TORCH),
    ],
)
def test_help_and_mistakes_wait_for_few_imports(arguments, code, allowed):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-c", COMMAND, *arguments], capture_output=True, text=True, cwd=ROOT)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == code, done.stderr
    loaded = json.loads(done.stderr.splitlines()[-1])
    packages = {name.partition(".")[0] for name in loaded if not name.startswith("_")}
    assert packages - sys.stdlib_module_names - allowed == set()
    assert [name for name in loaded if name in ("torch._dynamo", "torch._inductor")] == []
    # Processor time, which a busy machine stretches too: 3 s on an idle one, most of it torch.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 9
