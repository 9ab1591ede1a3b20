"""GPU tests are collected on a machine with only the core's dependencies."""

import subprocess
import sys
from pathlib import Path

MISSING = (
    *("ray", "mlflow", "hydra", "omegaconf", "pytorch_metric_learning", "lightly", "beartype"),
    *("sklearn", "scipy", "pyarrow", "joblib"),  # too large for the pack of the campaign, as is what they install
)
PROGRAM = f"""
import sys
sys.modules.update(dict.fromkeys({MISSING}))
import pytest
sys.exit(pytest.main(["--collect-only", "-q", "-m", "gpu"]))
"""


def test_gpu_tests_are_collected_without_edge_frameworks_and_peers(monkeypatch):
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # Hydra comes with a plugin
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    found = [line.partition("::")[0] for line in done.stdout.splitlines() if line.startswith("tests/")]
    written = {path.relative_to(root).as_posix() for path in (root / "tests/gpu").glob("test_*.py")} - {
        Path(__file__).relative_to(root).as_posix()
    }
    assert set(found) == written
    assert len(found) > 30
