"""Trains a classifier on the images that jobs.select chooses, and on as many drawn at random.

    python -m benchmarks.accuracy.selection --train embeddings --test embeddings_of_test_images

Both folders are of jobs.embed, of labelled images and with one encoder. The classifier is scikit-learn's logistic
regression (C = 10) on the embeddings' directions; its accuracy is that on the test images. A seed draws the random
images, and the clusters' initial centres.

Writes benchmarks/results/selection-{cpu,gpu}.json.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float32, Int64
from sklearn.linear_model import LogisticRegression

from benchmarks.measure import choose_device, describe_environment, format_table, make_parser, save_results
from ssl_sec.edges.embeddings.opened import embeddings_at
from ssl_sec.edges.tables import mean_and_std
from ssl_sec.embeddings.reading import EmbeddingSet
from ssl_sec.embeddings.selection import select_typical
from ssl_sec.evaluation.arrays import unit_rows


def main() -> None:
    """Measures both for each number of labels, prints the table and writes the results."""
    parser = make_parser("accuracy.selection", __doc__)
    parser.add_argument("--train", type=Path, required=True, help="embeddings of the images to choose from")
    parser.add_argument("--test", type=Path, required=True, help="embeddings of the test images")
    parser.add_argument("--labels", type=int, nargs="+", default=[10, 20, 50, 100, 200, 500], help="images to choose")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    options = parser.parse_args()
    base, test = (
        embeddings_at(str(folder), name) for folder, name in ((options.train, "train"), (options.test, "test"))
    )
    rows: list[dict[str, Any]] = []
    for count in options.labels:
        for seed in options.seeds:
            found = {name: accuracy(base, test, choose(base, name, count, seed)) for name in ("typical", "random")}
            rows.append({"labels": count, "seed": seed, **found})
        print(format_table([summarise(count, rows)]), flush=True)
    print(format_table([summarise(count, rows) for count in options.labels]))
    save_results("selection", {"runs": rows, "environment": describe_environment()})


def choose(base: EmbeddingSet, name: str, count: int, seed: int) -> Int64[np.ndarray, " chosen"]:
    """Positions of the images to label, typical or random ones."""
    if name == "random":
        return np.sort(np.random.default_rng(seed).choice(len(base), count, replace=False))
    everything, nothing = np.ones(len(base), dtype=bool), np.zeros(len(base), dtype=bool)
    chosen = select_typical(base.blocks, everything, nothing, count, seed=seed, device=choose_device())
    return np.sort(chosen.positions)


def accuracy(base: EmbeddingSet, test: EmbeddingSet, positions: Int64[np.ndarray, " chosen"]) -> float:
    """Top-1 accuracy on the test images of a classifier that was trained on the images at some positions, percent."""
    (rows, labels), (test_rows, test_labels) = directions(base), directions(test)
    if len(set(labels[positions])) == 1:
        return 100 * float((test_labels == labels[positions][0]).mean())
    classifier = LogisticRegression(C=10, max_iter=1000).fit(rows[positions], labels[positions])
    return 100 * float((classifier.predict(test_rows) == test_labels).mean())


def directions(embeddings: EmbeddingSet) -> tuple[Float32[np.ndarray, "images dim"], Int64[np.ndarray, " images"]]:
    """All unit embeddings and their labels."""
    rows = torch.cat([unit_rows(block) for _, block in embeddings.blocks()])
    return rows.numpy(), embeddings.about(0, len(embeddings))["label"].to_numpy()


def summarise(count: int, rows: list[dict[str, Any]]) -> dict[str, str]:
    """The mean and standard deviation over the seeds of each choice and of their difference."""
    of_count = [row for row in rows if row["labels"] == count]
    differences = [row["typical"] - row["random"] for row in of_count]
    return {
        "labels": str(count),
        "typical": mean_and_std([row["typical"] for row in of_count]),
        "random": mean_and_std([row["random"] for row in of_count]),
        "difference": mean_and_std(differences),
    }


if __name__ == "__main__":
    main()
