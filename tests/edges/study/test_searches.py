import math
import re
import shutil

import pytest

from ssl_sec.edges.study.plan import read_study
from ssl_sec.edges.study.searches import KeptSearches, KeptTrial
from ssl_sec.edges.tune.trials import Trial
from ssl_sec.errors import ConfigError, UserError
from tests.edges.study.test_job import parents
from tests.edges.study.test_plan import SEARCHED

DRAWS_PICTURES = True

FILE = """
shared: [experiment=digits, runtime=local, epochs=8]
arms: {none: [constraint=none, 'optimiser.learning_rate=interval(0.1,1)'], sec: [constraint=sec]}
search: [trials=4, metric=val/uniformity, MODE]
seeds: [0]
"""


@pytest.mark.parametrize(("mode", "best"), [("mode=max", 3), ("mode=min", 1)])
def test_the_best_kept_trial_is_that_of_the_searchs_mode(tmp_path, mode, best):
    (tmp_path / "mine.yaml").write_text(FILE.replace("MODE", mode))
    none, sec = read_study([f"study={tmp_path / 'mine.yaml'}"]).arms
    trials = [
        Trial(name=f"s-00{n}", overrides=[f"optimiser.learning_rate=0.{n}"], values={}, metric=metric, at=epoch)
        for n, metric, epoch in (
            *((2, -2.0, 8), (3, -1.0, 8), (1, -3.0, 8), (4, math.nan, 8)),
            *((5, 0.0, 1), (6, -9.0, 1)),  # stopped after an epoch, at which all others were better
        )
    ]
    KeptSearches(tmp_path / "searches.csv").add(none, [KeptTrial.of(none, trial) for trial in trials])
    kept = KeptSearches(tmp_path / "searches.csv")
    assert kept.best(none) == (f"optimiser.learning_rate=0.{best}",)
    assert kept.best(sec) is None


def test_a_search_is_kept_and_its_arm_runs_with_the_best_trial(made, tmp_path, monkeypatch):
    run, runs, folder = made
    (tmp_path / "mine.yaml").write_text(SEARCHED)
    searched = []

    def run_search(search):
        searched.append((search.config.run_name, search.config.tracking.parent_run))
        trials = [
            Trial(name=f"s-00{n}", overrides=[f"optimiser.learning_rate={n / 10}"], values={}, metric=m, at=8)
            for n, m in ((2, 40.0), (1, 39.0), (3, 38.0))
        ]
        return trials, 0, folder

    monkeypatch.setattr("ssl_sec.edges.tune.job.run_search", run_search)
    run()
    assert runs.started == ["none-s0", "sec-s0"]
    assert searched == [("none-search", parents(tmp_path)[0].info.run_id)]
    text = (folder / "cells-searches.csv").read_text()
    kept = "none,,2,40,8,3 trials of optimiser.learning_rate=0.1 .. 1.0,[0-9a-f]{12},optimiser.learning_rate=0.2\n"
    assert re.search(kept, text)
    run()
    assert len(searched) == 1
    (tmp_path / "mine.yaml").write_text(SEARCHED.replace("interval(0.1,1)", "interval(0.1,2)"))
    with pytest.raises(ConfigError, match=r"searches.csv has a search of none over 3 trials of .*1.0 instead of .*2.0"):
        run()
    for change in ("search: [trials=3, seed=100, metric=val/uniformity, mode=min]", "search: [trials=3, seed=101]"):
        (tmp_path / "mine.yaml").write_text(SEARCHED.replace("search: [trials=3, seed=100]", change))
        with pytest.raises(ConfigError, match="has a search of none by another metric or with other settings"):
            run()
    (tmp_path / "mine.yaml").write_text(SEARCHED)
    (folder / "cells-searches.csv").write_text(re.sub("config,|[0-9a-f]{12},", "", text))  # of an earlier version
    run()


def test_a_search_that_failed_and_another_of_its_name_say_what_to_do(made, tmp_path, monkeypatch):
    run, _, folder = made
    (tmp_path / "mine.yaml").write_text(SEARCHED)
    monkeypatch.setattr("ssl_sec.edges.tune.job._run", lambda *given: given[-1].append("no GPU"))
    for _ in range(2):
        with pytest.raises(UserError, match="^all trials failed; the last: no GPU; the same command runs them again$"):
            run()
    (tmp_path / "mine.yaml").write_text(SEARCHED.replace("seed=100", "seed=100, metric=val/uniformity"))
    expected = (
        'study: an unfinished search of none had metric null instead of "val/uniformity"; allowed: the earlier '
        f"settings, another recipe=<name>, or to delete {folder}/none-search*"
    )
    with pytest.raises(ConfigError, match=f"^{re.escape(expected)}$"):
        run()
    for path in folder.glob("none-search*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    with pytest.raises(UserError, match="^all trials failed"):
        run()
