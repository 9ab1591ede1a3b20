from pathlib import Path

import pytest

from tests.data.files import write_digit_pairs

# A narrow encoder and few steps: the flow is the recipe's, the result is not looked at.
QUICK = (
    "experiment=digits",
    "encoder.width=0.125",
    "epochs=2",
    "probe.epochs=5",
    "probe.decay_at=[0.6]",
    "tracking.register_model=false",
    "tracking.system_metrics=false",
)

# The same of faces: eight steps, four an epoch; SEC-EMA, whose μ a resume must restore.
QUICK_FACE = (
    "recipe=digits",
    "encoder=ir18",
    "encoder.width=0.0625",
    "head.dim=16",
    "loss.scale=16",
    "constraint=sec_ema",
    "optimiser.decay_at_epochs=[1.5]",
    "epochs=2",
    "global_batch_size=300",
    "log_every_steps=1",
    "monitor.max_pairs=40",
    "tracking.register_model=false",
    "tracking.system_metrics=false",
)


@pytest.fixture
def quick(tmp_path: Path) -> list[str]:
    """Overrides of a digits run that takes a second or two."""
    return [*QUICK, f"output_dir={tmp_path / 'runs'}"]


@pytest.fixture(scope="session")
def benchmarks(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A benchmark of pairs of test digits, as the command line has it."""
    table, images = write_digit_pairs(tmp_path_factory.mktemp("people"))
    return f"benchmarks=[{{name:pairs,title:digits,pairs:{table},images:{images}}}]"


@pytest.fixture(autouse=True)
def own_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """No run of the tests goes to the store that the environment names."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
