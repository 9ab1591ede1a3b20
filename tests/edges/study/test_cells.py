import errno
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssl_sec.edges.study.cells import KeptCell, KeptCells, as_csv, metrics_of
from ssl_sec.edges.study.plan import read_study
from ssl_sec.errors import ConfigError, StorageError

NAMES = st.text(st.characters(codec="utf-8", exclude_categories=("Cs", "Cc")), max_size=8)


def kept(arm="sec", point="", seed=0, digest="abc", **metrics):
    return KeptCell(
        arm=arm,
        point=point,
        seed=seed,
        digest=digest,
        minutes=6.25,
        run_id="r1",
        metrics=metrics or {"probe/top1": 1.5},
    )


@given(
    arms=st.lists(NAMES.filter(str.strip), min_size=1, max_size=3, unique=True), point=NAMES, value=st.floats(-1e6, 1e6)
)
def test_added_cells_are_in_the_file(tmp_path_factory, arms, point, value):
    path = tmp_path_factory.mktemp("cells") / "new" / "cells.csv"
    added = [kept(arm, point, seed, **{"probe/top1": value}) for arm in arms for seed in (1, 0)]
    cells = KeptCells(path)
    for one in added:
        cells.add(one)
    read = {cell.key: cell for cell in KeptCells(path)}
    assert set(read) == {one.key for one in added}
    for one in added:
        found = read[one.key]
        assert (found.digest, found.minutes, found.run_id) == (one.digest, 6.25, "r1")
        assert found.metrics["probe/top1"] == pytest.approx(value, rel=1e-5, abs=1e-9)
    assert as_csv(read.values()) == path.read_text()


def test_the_file_is_sorted_and_a_metric_that_a_run_lacks_is_an_empty_field():
    cells = [kept("sec", "b", 1, loss=2.0), kept("none", "b", 0, top1=0.123456789), kept("sec", "a", 0, loss=1.0)]
    assert as_csv(cells).splitlines() == [
        "arm,point,seed,config,minutes,run_id,loss,top1",
        "sec,a,0,abc,6.25,r1,1,",
        "none,b,0,abc,6.25,r1,,0.123457",
        "sec,b,1,abc,6.25,r1,2,",
    ]


def test_a_cell_is_found_by_arm_point_and_seed_and_refused_with_another_configuration(tmp_path):
    none, sec = read_study(["study=digits", "arms=[sec]"]).cells({})[:2]
    cells = KeptCells(tmp_path / "cells.csv")
    cells.add(kept("none", digest=none.digest))
    assert cells.find(none).metrics == {"probe/top1": 1.5}
    assert cells.find(sec) is None
    assert [cell.key for cell in cells.of([sec, none])] == [none.key]  # those that have ended
    cells.add(kept("sec", digest="another"))
    expected = r"cells.csv has sec, seed 0, with another configuration \(another instead of .*\); allowed: another file"
    with pytest.raises(ConfigError, match=expected):
        KeptCells(tmp_path / "cells.csv").find(sec)


@pytest.mark.parametrize(
    "text", ["arm,seed\nsec,0\n", "nonsense\n1\n", "arm,point,seed,config,minutes,run_id\na,,x,,1,\n"]
)
def test_a_file_without_cells_is_refused(tmp_path, text):
    path = tmp_path / "cells.csv"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"cells: .*cells.csv is not a file of cells .*columns arm, point, seed"):
        KeptCells(path)
    assert path.read_text() == text


def test_studies_that_run_at_once_add_to_one_file(tmp_path):
    """As two parts of a study with seeds=[0] and seeds=[1]."""
    path = tmp_path / "cells.csv"
    one, other = KeptCells(path), KeptCells(path)
    for number, cells in enumerate([one, other, one]):
        cells.add(replace(kept(), seed=number))
    assert [cell.seed for cell in KeptCells(path)] == [0, 1, 2]


def test_threads_add_to_one_file_at_once(tmp_path):
    cells = KeptCells(tmp_path / "cells.csv")
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda seed: cells.add(kept(seed=seed)), range(40)))
    assert [cell.seed for cell in KeptCells(cells.path)] == list(range(40))


@pytest.mark.slow
def test_names_with_accents_are_read_in_any_locale(tmp_path):
    cells = KeptCells(tmp_path / "cells.csv")
    cells.add(kept(arm="größer"))
    code = "import pathlib, sys; from ssl_sec.edges.study.cells import *; " + (
        "print(ascii([cell.arm for cell in KeptCells(pathlib.Path(sys.argv[1]))]))"
    )
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-c", code, str(cells.path)]
    assert subprocess.check_output(command, env=environment, text=True).strip() == ascii(["größer"])


def test_a_file_that_cannot_be_written_is_a_storage_error(tmp_path):
    cells = KeptCells(tmp_path / "folder" / "cells.csv")
    (tmp_path / "folder").write_text("a file instead")
    with pytest.raises(StorageError, match=r"^cells: .*/folder/cells.csv cannot be written: File exists$"):
        cells.add(kept())
    with pytest.raises(ConfigError, match=r"^cells: .*/folder/cells.csv is not a file of cells "):
        KeptCells(cells.path)


def test_a_full_disk_is_a_storage_error_and_keeps_the_file(tmp_path, monkeypatch):
    def fail(path, text):
        raise OSError(errno.ENOSPC, "No space left on device")

    path = tmp_path / "cells.csv"
    cells = KeptCells(path)
    cells.add(kept())
    before = path.read_text()
    monkeypatch.setattr("ssl_sec.edges.study.cells.replace_text", fail)
    with pytest.raises(StorageError, match=r"^cells: .*/cells.csv cannot be written: No space left on device$"):
        cells.add(kept(seed=1))
    assert path.read_text() == before


def test_the_metrics_of_a_run_are_its_last_its_means_and_those_of_its_probe():
    records = [
        {"step": 0, "metrics": {"train/loss": 5.0, "train/norm_mean": 2.0, "train/lr": 0.1}},
        {"step": 5, "metrics": {"train/loss": 4.5, "train/norm_mean": 3.0}},
        {"step": 9, "metrics": {"train/loss": 4.0, "train/norm_mean": 4.0, "val/knn_top1": 30.0}},
    ]
    kept = {"train/loss": 4.0, "mean/train/norm_mean": 3.5, "val/knn_top1": 30.0, "probe/top1": 50.0}
    probe = {"probe/top1": 50.0, "probe/learning_rate": 0.1, "probe/held_out_top1_lr_0.1": 49.0}
    assert metrics_of(records, probe) == kept
    decided = metrics_of(records, probe, "probe/held_out_top1_lr_0.1")
    assert decided == {**kept, "probe/held_out_top1_lr_0.1": 49.0}


def test_a_run_of_one_report_has_its_figures_as_means():
    assert metrics_of([{"step": 0, "metrics": {"train/norm_std": 2.0}}], {}) == {"mean/train/norm_std": 2.0}
