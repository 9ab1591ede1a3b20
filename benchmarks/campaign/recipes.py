"""The values of the campaign's training runs, as Hydra composes them, for machines without Hydra.

python -m benchmarks.campaign.recipes              # writes recipes.json; a test holds it equal to configs/
"""

import json
from pathlib import Path
from typing import Any

PATH = Path(__file__).parent / "recipes.json"

EXPERIMENTS = {arm: f"cifar10_{arm}_100" for arm in ("ntxent", "sec", "sec_ema", "l2reg")}
ENCODERS = ("resnet50", "resnet18")


def composed() -> dict[str, dict[str, Any]]:
    """The name of each recipe (`resnet50-ntxent`) -> its values."""
    from ssl_sec.edges.composition.compose import compose  # needs Hydra

    return {
        f"{encoder}-{arm}": compose("pretrain", [f"experiment={experiment}", f"encoder={encoder}", "runtime=local"])
        for encoder in ENCODERS
        for arm, experiment in EXPERIMENTS.items()
    }


def stored() -> dict[str, dict[str, Any]]:
    """The same, as they were composed when the file was written."""
    return json.loads(PATH.read_text())


if __name__ == "__main__":
    PATH.write_text(json.dumps(composed(), indent=1) + "\n")
    print(PATH)
