"""What may be imported before a job has read its configuration: anything else delays the help and every message."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Hydra with its imports; Cython's and setuptools' internal names are no packages.
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
# Prints, after each command, its exit code, its message and all that is imported by then.
COMMANDS = """
import contextlib, io, json, sys
from ssl_sec.edges.commands import run_command
before = set(sys.modules)
for arguments in json.loads(sys.argv[1]):
    errors = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(errors):
        try:
            code = run_command(arguments)
        except SystemExit as end:  # argparse's help
            code = end.code
    loaded = {name for name in set(sys.modules) - before if not name.startswith("_")}
    print(json.dumps([code, errors.getvalue(), sorted(loaded)]))
"""
RUNS = ["pretrain", "metric_learning", "face", "ablate", "preview"]
# In this order, since each command finds what those before it have imported.
LIGHT = [
    (["--help"], ""),
    (["nosuch"], "command: found 'nosuch'"),
    *(([job, "--help"], "") for job in ("align", "replay", "report", "submit")),
    *(
        ([job, "outputdir=x"], "did you mean 'output")
        for job in ("align", "replay", "report", "probe", "export", *RUNS)
    ),
    (["finetune", "outputdir=x"], "did you mean 'output_dir'"),
    (["pretrain", "epoch=3"], "did you mean 'epochs'?"),
    (["pretrain", "lr=0.1"], "did you mean 'optimiser.learning_rate'?"),
    (["align", "images=a", "landmarks=b", "output=c", "num_workers=-3"], "num_workers: found -3"),
    (["replay", "folder=https://somewhere"], "folder: found 'https://somewhere', must be a folder, or a URL"),
    (["report", "table=99"], "table: found 99"),
    (["report", "figure=99"], "figure: found 99; of 'Deep Metric Learning"),
    (["report", "table=5", "paper=nosuch"], "paper: found 'nosuch'"),
    (["submit", "nosuch"], "job: found 'nosuch'"),
    (["submit", "status"], "status: found 0 job ids"),
]
WEIGHTY = [
    *(([job, "--help"], "") for job in ("probe", "export", *RUNS)),
    *(([job, "--cfg", "job"], "") for job in RUNS),
    *(([job, "encoder=nosuch"], "encoder: found 'nosuch'") for job in RUNS),
    *(([job, "data=nosuch"], "data: found 'nosuch'") for job in ("probe", "export")),
    *(([job, "encoder.weigths=w"], "did you mean 'encoder.weights'") for job in RUNS),
    *(([job, "seed=-1"], "seed: found -1") for job in RUNS if job != "ablate"),
    (["ablate", "seeds=[-1]"], "seeds[0]: found -1"),
    (["probe", "run=x", "runtime.timeout_s=0"], "runtime.timeout_s: found 0"),
    (["export", "run=x", "format=nosuch"], "format: found 'nosuch'"),
    *(([job, "--help"], "") for job in ("finetune", "embed", "neighbours", "select", "study", "transfer", "tune")),
    *(
        ([job, "outputdir=x"], "did you mean 'output")
        for job in ("embed", "neighbours", "select", "study", "transfer", "tune")
    ),
    (["finetune", "--cfg", "job"], ""),
    (["finetune", "runtime=local"], "data: found null, must be given without run=<id>"),
    (["finetune", "data=digits", "seed=-1"], "seed: found -1"),
    (["ablate", "arms=[nosuch]"], "arms: found 'nosuch'"),
    *((["submit", job, "seed=-1"], "seed: found -1") for job in RUNS[:3]),
]


@pytest.mark.parametrize(("commands", "allowed"), [(LIGHT, WITHOUT_TORCH), (WEIGHTY, WITH_TORCH)])
def test_help_and_errors_of_every_job_need_few_imports(commands, allowed, tmp_path):
    given = json.dumps([arguments for arguments, _ in commands])
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    line = [sys.executable, "-c", COMMANDS, given]
    done = subprocess.run(line, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    for (arguments, message), output in zip(commands, done.stdout.splitlines(), strict=True):
        code, error, loaded = json.loads(output)
        assert code == (2 if message else 0) and message in error, (arguments, error)
        packages = {name.partition(".")[0] for name in loaded}
        assert packages - sys.stdlib_module_names - allowed == set(), arguments
        assert {"torch._dynamo", "torch._inductor", "matplotlib"} & {*loaded} == set(), arguments
