"""What a campaign keeps: the outcomes of its tests, and the pages filled with its results."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import measure
from benchmarks.campaign import outcomes, report
from ssl_sec.errors import ConfigError

ROOT = Path(__file__).parents[2]


TESTS = """
import os, pytest

def test_one():
    pass

def test_two():
    assert 1 == 2, "by design"

@pytest.fixture
def torn():
    yield
    raise OSError("its end")

def test_three(torn):
    pass

@pytest.mark.skip(reason="needs Triton")
def test_four():
    pass

def test_five():
    os._exit(9)
"""


def test_the_outcomes_of_tests_are_known_also_if_pytest_dies(tmp_path):
    path = tmp_path / "outcomes.jsonl"
    (tmp_path / "test_some.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-q", "-p", outcomes.__name__, "--rootdir", str(tmp_path), str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, outcomes.FILE: str(path)}, capture_output=True)
    assert done.returncode == 9
    assert outcomes.count_outcomes(path) == {
        "collected": 5,
        "passed": 1,
        "failed": {
            "test_some.py::test_two": "AssertionError: by design",
            "test_some.py::test_three": "OSError: its end",
        },
        "skipped": {"test_some.py::test_four": "needs Triton"},
    }
    assert outcomes.count_outcomes(tmp_path / "none")["collected"] == 0


def test_a_file_that_cannot_be_imported_is_a_failure(tmp_path):
    path = tmp_path / "outcomes.jsonl"
    (tmp_path / "test_some.py").write_text("import there_is_no_such_module")
    command = [sys.executable, "-m", "pytest", "-q", "-p", outcomes.__name__, "--rootdir", str(tmp_path), str(tmp_path)]
    subprocess.run(command, cwd=ROOT, env={**os.environ, outcomes.FILE: str(path)}, capture_output=True)
    assert outcomes.count_outcomes(path)["failed"].keys() == {"test_some.py"}


def test_the_regions_match_the_committed_results():
    pages = [ROOT / page for page in report.PAGES]
    for path in pages:
        assert report.filled(path.read_text(), report.read(report.COMMITTED)) == path.read_text(), (
            "python -m benchmarks.campaign --report benchmarks/results/campaign"
        )
    regions = "".join(path.read_text() for path in pages)
    assert all(f"<!-- campaign: {name} -->" in regions for name in report.REGIONS)


def write_results(folder, rehearsal=False):
    environment = {"gpu": "NVIDIA H200", "cores": 16, "torch": "2.11", "date": "2026-12-01", "commit": "abc"}
    row = {"contender": "ours", "images_per_s": 12345.6, "times_as_fast_as": {"lightly": 2.04}, "waits_per_step": 0.0}
    written = {
        "speed-resnet50-256": {"rows": [row, {"contender": "lightly", "error": "out of memory"}]},
        **{
            f"train-resnet18-sec-s{seed}": {
                "probe/top1": 80.0 + seed,
                "probe/top5": 99.0,
                "probe/logistic_top1": 80.5 + seed,
                "probe/knn_top1": 77.0,
                "val/probe_top1": 81.0,
                "val/knn_top1": 76.0,
            }
            for seed in range(3)
        },
        "train-resnet18-sec-s3": {"val/probe_top1": 85.0, "val/knn_top1": 76.0},  # its probe was stopped
        **{
            f"study-resnet18-{arm}-s{seed}": {
                "probe/top1": 85.0 + seed + gain,
                "probe/knn_top1": 80.0,
                "train_s": 150.0,
            }
            for seed in range(3)
            for arm, gain in (("none", 0.0), ("sec", 1.0 + 0.1 * seed))
        },
        "study-resnet50-none-s0": {"probe/top1": 88.0, "train_s": 600.0},
        "long-resnet18": {"probe/knn_top1": 90.5, "train_s": 900.0},
        "search-resnet18-sec-0": {
            "val/knn_top1": 70.0,
            "changes": {"optimiser.learning_rate": 0.1, "constraint.eta": 0.5},
        },
        "train-resnet50-ntxent-s0": {"probe/top1": 84.5, "probe/top5": 99.0, "probe/knn_top1": 80.0},
        "train-resnet50-sec-s0": {"steps": 100},
        "train-resnet50-sec_supcontrast-s0": {"state": "failed", "seed": 0, "error": "training diverged"},
        "gpu-tests": {"collected": 5, "passed": 4, "failed": {"a::b": "why"}, "skipped": {}},
        "growth": {
            "rows": [{"rows": 512, "ours_ms": 1.25}],
            "classes": [{"classes": 10_000, "error": "out of memory"}],
        },
    }
    for name, figures in written.items():
        measure.write_json(
            folder / "results" / f"{name}.json",
            {"part": name, "state": "done", "rehearsal": rehearsal, "environment": environment, **figures},
        )


def test_a_report_copies_the_results_and_fills_the_regions(tmp_path):
    for page in report.PAGES:
        (tmp_path / page).parent.mkdir(exist_ok=True)
        (tmp_path / page).write_text((ROOT / page).read_text())
    write_results(tmp_path / "campaign")
    committed = tmp_path / "results"
    assert report.report(tmp_path / "campaign", tmp_path, committed) == 0
    speed, log, results, study = written = [(tmp_path / page).read_text() for page in report.PAGES]
    assert "| ResNet-50, batch 256 | 12,346 | ≥ 10,000 | not yet run | out of memory | 2.0 | 0 |" in speed
    assert "| `cifar10_ntxent_100` | 84.50 | 84.76 | -0.26 | not yet run | 80.00 | 1 |" in results
    assert "| `cifar10_supcontrast` | not yet run | 84.76 | not yet run | not yet run | not yet run | 0 |" in results
    row = "| `cifar10_supcontrast` with `constraint=sec` | failed | 86.87 | failed | failed | failed | 0 |"
    failure = "- `cifar10_supcontrast` with `constraint=sec`, seed 0: training diverged"
    assert row in results and f" | 0 |\n\n{failure}\n\nHardware" in results
    assert "| `cifar10_sec_100` | not yet run | 86.87 | not yet run | not yet run | not yet run | 0 |" in results
    of_test, held_out = "81.00 ± 1.00 | 99.00 ± 0.00 | 81.50 ± 1.00 | 77.00 ± 0.00", "82.00 ± 2.00 | 76.00 ± 0.00"
    assert f"| NT-Xent + SEC | {of_test} | {held_out} | 4 |" in results
    assert "Hardware: NVIDIA H200, 16 cores, torch 2.11, 2026-12-01, commit abc." in speed and "commit abc." in results
    assert "| sec | 3 | 87.10 ± 1.10 | 80.00 ± 0.00 | +1.10 [+0.85, +1.35] | 0.033 | +0.00 |" in study
    assert "Searched: sec `optimiser.learning_rate=0.1`, `constraint.eta=0.5` (70.00 % of 1 trials)." in study
    assert "above the paper's SEC, 86.87 | none, 88.00, +1.13 |" in study and "| 90.50 in 15 min |" in study
    assert "5 collected, 4 passed, 1 failed, 0 skipped.\n- a::b: why" in log
    assert report.report(committed, tmp_path, committed) == 0  # from the committed results
    assert [(tmp_path / page).read_text() for page in report.PAGES] == written
    for state, top1 in (("failed", 10.0), ("stopped", 10.0), ("done", 85.0)):  # of a later campaign
        name = "train-resnet50-ntxent-s0"
        part = {"part": name, "state": state, "probe/top1": top1, "probe/top5": 99.0, "probe/knn_top1": 80.0}
        measure.write_json(tmp_path / "later" / "results" / f"{name}.json", part)
        assert report.report(tmp_path / "later", tmp_path, committed) == 0
        shown = "85.00 | 84.76 | +0.24" if state == "done" else "84.50 | 84.76 | -0.26"
        assert (
            f"| `cifar10_ntxent_100` | {shown} | not yet run | 80.00 | 1 |"
            in (tmp_path / "docs/results.md").read_text()
        )


def test_a_rehearsal_is_refused(tmp_path):
    write_results(tmp_path, rehearsal=True)
    with pytest.raises(ConfigError, match="rehearsal"):
        report.report(tmp_path, tmp_path, tmp_path / "results")
    with pytest.raises(ConfigError, match="no results"):
        report.report(tmp_path / "nothing", tmp_path, tmp_path / "results")
