"""The values of the campaign's training runs, composed in advance for machines without Hydra.

python -m benchmarks.campaign.recipes              # writes recipes.json; a test compares it with configs/
"""

import json
from pathlib import Path
from typing import Any

PATH = Path(__file__).parent / "recipes.json"

EXPERIMENTS = {arm: f"cifar10_{arm}_100" for arm in ("ntxent", "sec", "sec_ema", "l2reg")}
ENCODERS = ("resnet50", "resnet18")


def compose_recipes() -> dict[str, dict[str, Any]]:
    """Composes the values of each recipe, by name (`resnet50-ntxent`)."""
    from ssl_sec.edges.composition.compose import compose  # needs Hydra

    return {
        f"{encoder}-{arm}": compose("pretrain", [f"experiment={experiment}", f"encoder={encoder}", "runtime=local"])
        for encoder in ENCODERS
        for arm, experiment in EXPERIMENTS.items()
    }


def load_recipes() -> dict[str, dict[str, Any]]:
    """Loads the values of each recipe from recipes.json."""
    return json.loads(PATH.read_text())


if __name__ == "__main__":
    PATH.write_text(json.dumps(compose_recipes(), indent=1) + "\n")
    print(PATH)
