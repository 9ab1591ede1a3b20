"""GPU tests are collected on a machine with only the core's dependencies, or with what a campaign packs."""

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import sys
sys.modules.update(dict.fromkeys(sys.argv[1:]))
import pytest
sys.exit(pytest.main(["--collect-only", "-q", "-m", "gpu"]))
"""


def test_gpu_tests_are_collected_without_edge_frameworks_and_peers(monkeypatch):
    from tests.gpu.packed import missing_modules  # which needs more than the tests that are collected

    missing = missing_modules() | {"lightly", "beartype"}  # these are packed, and the tests do without them
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # Hydra comes with a plugin
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", PROGRAM, *missing], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    found = [line.partition("::")[0] for line in done.stdout.splitlines() if line.startswith("tests/")]
    written = {path.relative_to(root).as_posix() for path in (root / "tests/gpu").glob("test_*.py")} - {
        Path(__file__).relative_to(root).as_posix()
    }
    assert set(found) == written
    assert len(found) > 30
