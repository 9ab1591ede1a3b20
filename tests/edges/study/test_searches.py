import math

import pytest

from ssl_sec.edges.study.plan import read_study
from ssl_sec.edges.study.searches import KeptSearches, KeptTrial
from ssl_sec.edges.tune.trials import Trial

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
