import pytest

from ssl_sec.losses import SoftmaxLoss
from ssl_sec.training.divergence import DivergenceWarning
from ssl_sec.training.objective import Objective
from tests.fakes import FakeRuntime
from tests.training.test_step import recipe, run


@pytest.mark.parametrize(
    ("losses", "warns"),
    [((5.0, 4.0, 59.0), False), ((5.0, 61.0), True), ((0.0, 9.0), False), ((0.0, 11.0), True), ((-3.0, 39.0), False)],
)
def test_a_loss_that_grows_tenfold_is_named_once(caplog, losses, warns):
    caplog.set_level("WARNING")
    warning = DivergenceWarning()
    for step, loss in enumerate((*losses, losses[-1])):
        warning.check(loss, step)
    last, first = f"{losses[-1]:.4g} at step {len(losses) - 1}", f"{losses[0]:.4g} at first"
    expected = [f"the loss is {last}, and was {first}: the training diverges"]
    assert [record.getMessage().partition(";")[0] for record in caplog.records] == expected * warns


@pytest.mark.parametrize(("rank", "num_warnings"), [(0, 1), (1, 0)])
def test_one_worker_warns_of_a_training_that_diverges(caplog, rank, num_warnings):
    caplog.set_level("WARNING")
    objective = Objective(SoftmaxLoss(num_classes=2, dim=4).double())
    training = recipe(
        objective=objective, learning_rate=lambda step: 1e7, row_labels=lambda batch, rows: batch.labels.repeat(2)
    )
    runtime = run(training, runtime=FakeRuntime(rank, 2))
    assert max(runtime.series("train/loss").values()) > 100
    assert sum("the training diverges" in record.getMessage() for record in caplog.records) == num_warnings
