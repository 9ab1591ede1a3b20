from types import SimpleNamespace

import pytest

from ssl_sec.figures.runs import training_figures


def curves_of(**metrics: list[float]) -> list[str]:
    """Labels of the curves of a run with these metrics at its steps."""
    named = {f"train/{name}": values for name, values in metrics.items()}
    steps = range(len(next(iter(named.values()))))
    records = [{"step": step, "metrics": {name: values[step] for name, values in named.items()}} for step in steps]
    run = SimpleNamespace(records=lambda: records, histograms=lambda: [])
    return [axes.get_ylabel() for axes in training_figures(run)["curves"].axes]


@pytest.mark.parametrize(("metric_loss", "is_shown"), [([2.0, 1.0], False), ([1.5, 1.0], True)])
def test_a_metric_loss_that_is_the_total_loss_is_drawn_once(metric_loss, is_shown):
    assert curves_of(loss=[2.0, 1.0], metric_loss=metric_loss) == ["total loss", *(["metric loss"] if is_shown else [])]
