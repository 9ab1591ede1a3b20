from pathlib import Path

import pytest

# A narrow encoder and few steps: the flow is the recipe's, the result is not looked at.
QUICK = (
    "experiment=digits",
    "encoder.width=0.125",
    "epochs=2",
    "probe.epochs=5",
    "probe.decay_epochs=[3]",
    "tracking.register_model=false",
    "tracking.system_metrics=false",
)


@pytest.fixture
def quick(tmp_path: Path) -> list[str]:
    """Overrides of a digits run that takes a second or two."""
    return [*QUICK, f"output_dir={tmp_path / 'runs'}"]


@pytest.fixture(autouse=True)
def own_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """No run of the tests goes to the store that the environment names."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
