import json

import pytest
import torch

from benchmarks import losses, measure, retrieval


def test_functions_take_turns():
    turns = []
    seconds = measure.in_turn({"a": lambda: turns.append("a"), "b": lambda: turns.append("b")}, rounds=2, calls=2)
    assert turns == ["a", "b", *"aabb", *"aabb"]
    assert {name: len(taken) for name, taken in seconds.items()} == {"a": 2, "b": 2}
    assert all(taken > 0 for rounds in seconds.values() for taken in rounds)


def test_the_ratio_is_the_median_over_rounds():
    assert measure.ratio([4.0, 9.0, 100.0], [2.0, 3.0, 1.0]) == 3.0


def test_peak_memory_counts_what_is_held_at_once():
    def held():
        first = torch.empty(2**20, dtype=torch.uint8)
        del first
        second, third = torch.empty(2**20, dtype=torch.uint8), torch.empty(2**21, dtype=torch.uint8)
        return second, third

    assert measure.peak_memory(held) == 3 * 2**20


def test_figures_are_saved_with_where_they_were_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(measure, "RESULTS", tmp_path / "results")
    path = measure.save("some", {"environment": measure.environment(), "rows": [1.5]})
    values = json.loads(path.read_text())
    assert values["rows"] == [1.5]
    assert values["environment"]["cores"] >= 1
    assert values["environment"]["torch"] == torch.__version__


def test_every_loss_and_its_peer_are_measured_at_a_small_size(monkeypatch):
    monkeypatch.setattr(losses, "SECONDS_A_TURN", 0.0)
    monkeypatch.setattr(losses, "FACES", 50)
    small = [comparison for comparison in losses.comparisons() if len(comparison.labels) <= 256]
    assert len(small) == 15
    for comparison in small:
        figures = losses.measure(comparison, torch.device("cpu"))
        assert figures["ours_ms"] > 0 and figures["times_as_fast"] > 0 and figures["ours_peak_mib"] > 0
        assert losses.shown(figures)["loss"] == comparison.name


def test_retrieval_and_faiss_are_measured_at_a_small_size(monkeypatch):
    monkeypatch.setattr(retrieval, "NUM_IMAGES", 1500)
    monkeypatch.setattr(retrieval, "NUM_CLASSES", 300)
    rows = retrieval.measure()
    assert [row["protocol"] for row in rows] == ["SOP", "CUB"]
    for row in rows:
        assert row["ours_s"] > 0 and row["times_as_fast"] > 0 and row["ours_peak_mib"] > 0
        assert 0 < row["ours_recall"][0] < 1
        assert row["ours_recall"] == pytest.approx(row["faiss_recall"], abs=2e-3)
        assert retrieval.shown(row)["R@1, %"] == f"{100 * row['ours_recall'][0]:.3f}"
