"""The table, the metrics and the picture of a search's trials."""

import csv

import numpy as np
import pytest

from ssl_sec.edges.tune import trials as module
from ssl_sec.edges.tune.space import read_search
from ssl_sec.edges.tune.trials import Trial, files_of, records_of, rows_of, table_of
from tests.edges.tune.test_space import DIGITS

SWEEPS = (
    "optimiser.learning_rate=tag(log,interval(0.01,1))",
    "loss.temperature=interval(0.1,0.5)",
    "seed=choice(9,10)",
)


def trial(number, learning_rate, temperature, seed, metric, at=16):
    values = {"optimiser.learning_rate": learning_rate, "loss.temperature": temperature, "seed": seed}
    overrides = [f"{key}={value}" for key, value in values.items()]
    return Trial(name=f"search-2-{number:03d}", overrides=overrides, values=values, metric=metric, at=at)


TRIALS = [trial(1, 0.01, 0.1, "10", 60.123456), trial(3, 0.1, 0.2, "9", 81.5, at=4), trial(4, 1.0, 0.5, "9", 70.0)]
COLUMNS = ["trial", "optimiser.learning_rate", "loss.temperature", "seed", "val/knn_top1", "epochs"]


@pytest.fixture(scope="module")
def search():
    return read_search([*DIGITS, *SWEEPS])


def test_a_row_has_the_values_the_metric_and_the_epochs_of_its_trial(search):
    assert rows_of(TRIALS, search) == [
        COLUMNS,
        ["search-2-001", "0.01", "0.1", "10", "60.12", "16"],
        ["search-2-003", "0.1", "0.2", "9", "81.5", "4"],
        ["search-2-004", "1.0", "0.5", "9", "70", "16"],
    ]
    assert table_of(TRIALS, search).splitlines()[2].split() == ["search-2-001", "0.01", "0.1", "10", "60.12", "16"]


def test_records_have_the_number_of_their_trial_and_the_best_so_far(search):
    found = [(each["step"], *each["metrics"].values()) for each in records_of(search, TRIALS)]
    assert found == [(1, 60.123456, 60.123456), (3, 81.5, 60.123456), (4, 70.0, 70.0)]  # the second was stopped


def test_the_files_have_every_digit_and_the_picture_its_axes(search, tmp_path, monkeypatch):
    drawn, draw = [], module.tuning_figure

    def keep(*arguments):
        drawn.append(arguments)
        return draw(*arguments)

    monkeypatch.setattr(module, "tuning_figure", keep)
    table, picture = files_of(search, TRIALS, tmp_path / "search")
    assert list(csv.reader(table.read_text().splitlines())) == [
        COLUMNS,
        ["search-2-001", "0.01", "0.1", "10", "60.123456", "16"],
        ["search-2-003", "0.1", "0.2", "9", "81.5", "4"],
        ["search-2-004", "1.0", "0.5", "9", "70.0", "16"],
    ]
    assert (table.name, picture.name) == ("trials.csv", "parallel.png")
    assert picture.read_bytes().startswith(b"\x89PNG")
    ((axes, metric, figures, order, numbers),) = drawn
    places = {axis.name: axis.places()[0] for axis in axes}
    assert places.keys() == {"optimiser.learning_rate", "loss.temperature", "seed"}
    np.testing.assert_allclose(places["optimiser.learning_rate"], [0, 0.5, 1])
    np.testing.assert_allclose(places["loss.temperature"], [0, 0.25, 1])
    np.testing.assert_allclose(places["seed"], [1, 0, 0])
    assert (metric, figures, order, numbers) == ("val/knn_top1", [60.123456, 81.5, 70.0], [2, 0, 1], [1, 3, 4])
