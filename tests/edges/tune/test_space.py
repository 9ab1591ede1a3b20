"""The space of a search, from Hydra's sweeps."""

import math

import pytest

from ssl_sec.edges.composition.compose import compose
from ssl_sec.edges.tune.space import Choices, Interval, chosen_overrides, read_search
from ssl_sec.edges.tune.trials import Trial, best_first, records_of
from ssl_sec.errors import ConfigError
from ssl_sec.recipes.pretraining.config import MONITORED
from tests.recipes.pretraining.test_pretraining import run

DIGITS = ("experiment=digits", "epochs=16")


def test_sweeps_are_searched_and_other_overrides_are_shared():
    search = read_search(
        [
            *DIGITS,
            "trials=7",
            "constraint=choice(none,sec)",
            "optimiser.learning_rate=tag(log,interval(0.03,3))",
            "loss.temperature=0.1,0.5",
            "head.hidden_dim=int(interval(8,64))",
            "monitor.neighbours=range(5,20,5)",
            "seed=3",
        ]
    )
    assert search.tune.trials == 7
    assert search.space == {
        "constraint": Choices(values=("none", "sec")),
        "optimiser.learning_rate": Interval(low=0.03, high=3.0, is_log=True, is_integer=False),
        "loss.temperature": Choices(values=("0.1", "0.5")),
        "head.hidden_dim": Interval(low=8, high=64, is_log=False, is_integer=True),
        "monitor.neighbours": Choices(values=("5", "10", "15")),
    }
    assert search.shared == (*DIGITS, "seed=3", "runtime=local", "monitor.every_epochs=2")
    assert search.of_trials == ("tracking.register_model=false", *search.shared, "probe.enabled=false")
    assert (search.config.seed, search.config.monitor.every_epochs, search.metric) == (3, 2, "val/knn_top1")
    values = {
        "constraint": "sec",
        "optimiser.learning_rate": 0.123456789,
        "loss.temperature": "0.5",
        "head.hidden_dim": 9,
        "monitor.neighbours": "5",
    }
    chosen = ["constraint=sec", "optimiser.learning_rate=0.123457", "loss.temperature=0.5", "head.hidden_dim=9"]
    assert chosen_overrides(search.space, values) == [*chosen, "monitor.neighbours=5"]


def test_a_dimension_reads_as_its_values():
    swept = ["loss.temperature=choice(0.1,0.5)", "optimiser.learning_rate=tag(log,interval(0.01,1))"]
    search = read_search([*DIGITS, *swept, "head.hidden_dim=int(interval(8,64))"])
    assert [str(dimension) for dimension in search.space.values()] == ["0.1, 0.5", "0.01 to 1.0 (log)", "8 to 64"]


def test_explicit_overrides_are_kept():
    search = read_search([*DIGITS, "monitor.every_epochs=5", "metric=val/rankme", "mode=min", "seed=choice(1,2)"])
    assert search.config.monitor.every_epochs == 5
    assert search.shared == (*DIGITS, "monitor.every_epochs=5", "runtime=local")
    assert (search.metric, search.tune.mode) == ("val/rankme", "min")


@pytest.mark.parametrize("asked", ["probe.enabled=true", "probe.enabled=True", "++probe.enabled=on", "probe=paper"])
def test_trials_are_not_probed_whatever_is_given(asked: str):
    search = read_search([*DIGITS, asked, "optimiser.learning_rate=interval(0.1,1)"])
    assert not search.config.probe.enabled
    trial = compose("pretrain", [*search.of_trials, *chosen_overrides(search.space, {"optimiser.learning_rate": 0.2})])
    assert trial["probe"]["enabled"] is False


@pytest.mark.parametrize(
    ("given", "is_registered"),
    [([], False), (["tracking.register_model=true"], True), (["++tracking.register_model=true"], True)],
)
def test_trials_are_registered_only_where_that_is_asked(given: list[str], is_registered: bool):
    search = read_search([*DIGITS, *given, "optimiser.learning_rate=interval(0.1,1)"])
    assert compose("pretrain", search.of_trials)["tracking"]["register_model"] is is_registered


@pytest.mark.parametrize(
    ("metric", "mode"), [("val/alignment", "min"), ("val/uniformity", "min"), ("val/rankme", "max"), ("null", "max")]
)
def test_the_better_direction_of_a_metric_is_searched(metric, mode):
    assert read_search([*DIGITS, f"metric={metric}", "seed=choice(1,2)"]).tune.mode == mode


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([], "found no key to search, must be one or more"),
        (["optimiser.learning_rat=interval(0.1,1)"], "optimiser.learning_rat: unknown key; did you mean 'optimiser.le"),
        (["optimiser.learning_rate=interval(-1,1)"], "optimiser.learning_rate: found -1.0, must be in"),
        (["loss.temperature=interval(1,0.1)"], r"loss.temperature: found interval\(1,0.1\), must be of two different"),
        (
            ["constraint.eta=tag(log,interval(0,1))"],
            r"constraint.eta: found interval\(0,1\); both ends of a logarithmic",
        ),
        (["constraint=choice(none,sek)"], "constraint: found 'sek'; did you mean 'sec'"),
        (["epochs=choice(5,10)"], "epochs: found several values, must be one: it is the same in all trials"),
        (["probe.enabled=choice(false,true)"], "probe.enabled: found several values, must be one"),
        (["trials=5,10"], "trials: found several values, must be one"),
        (["tracking.uri=choice(a,b)"], "tracking.uri: found several values, must be one"),
        (["seed=1,2", "runtime=ray"], "runtime: found 'ray', must be 'local': a trial is one process"),
        (["seed=1,2", "trials=0"], "trials: found 0"),
        (["seed=1,2", "mode=best"], "mode: found 'best'"),
        (["seed=1,2", "metric=train/loss"], "metric: found 'train/loss', not measured by the monitor; allowed: val/"),
        (
            ["seed=1,2", "metric=val/knn"],
            "metric: found 'val/knn', not measured by the monitor; did you mean 'val/knn_top1",
        ),
        (["optimiser.learning_rate=interval(0.3"], r"optimiser.learning_rate: found 'interval\(0.3'; allowed: choice"),
    ],
)
def test_a_mistake_is_one_line(overrides: list[str], message: str):
    with pytest.raises(ConfigError, match=message) as error:
        read_search([*DIGITS, *overrides])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("mode", "expected"), [("max", [3.0, 2.0, math.nan]), ("min", [2.0, 3.0, math.nan])])
def test_a_trial_with_a_nan_score_is_the_worst(mode: str, expected: list[float]):
    search = read_search([*DIGITS, "seed=1,2", f"mode={mode}"])
    trials = [Trial(name="t-1", overrides=[], values={}, metric=metric, at=1) for metric in (math.nan, 2.0, 3.0)]
    found = [trial.metric for trial in best_first(search, trials)]
    assert found[:2] == expected[:2] and math.isnan(found[2])


@pytest.mark.parametrize("mode", ["max", "min"])
def test_a_trial_that_was_stopped_is_behind_those_that_were_not(mode: str):
    """It was behind them at its last epoch; with training, a metric such as the alignment rises."""
    search = read_search([*DIGITS, "seed=1,2", "metric=val/alignment", f"mode={mode}"])
    measured = [(0.9, 2), (0.5, 16), (0.1, 2), (0.6, 16), (math.nan, 16)]
    trials = [
        Trial(name=f"t-{number}", overrides=[], values={}, metric=metric, at=epoch)
        for number, (metric, epoch) in enumerate(measured)
    ]
    longest, stopped = ([3, 1], [0, 2]) if mode == "max" else ([1, 3], [2, 0])
    assert [trial.name for trial in best_first(search, trials)] == [f"t-{one}" for one in (*longest, *stopped, 4)]
    best = [record["metrics"]["tune/best"] for record in records_of(search, trials)]
    assert best == [0.9, 0.5, 0.5, 0.6 if mode == "max" else 0.5, 0.6 if mode == "max" else 0.5]


def test_trials_are_compared_by_what_the_monitor_measures(tmp_path):
    runtime, _ = run(tmp_path, data={"name": "digits"}, epochs=1)
    assert {name for _, metrics, _ in runtime.reports for name in metrics if name.startswith("val/")} == set(MONITORED)
