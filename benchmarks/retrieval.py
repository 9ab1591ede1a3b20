"""Recall@K at the size of SOP's test set, beside faiss's exact search.

    CUDA_VISIBLE_DEVICES= python -m benchmarks.retrieval        # about 3 minutes on one CPU core

60,502 rows of 512 values in 11,316 classes; all take turns in one process on the same rows, with as many threads.
faiss's IndexFlatIP searches for the neighbours that SOP's protocol needs (1,000 and the query itself) and for those of
CUB's (8), whose labels are then compared. Prints a table and writes benchmarks/results/retrieval-cpu.json.
"""

import os
from collections.abc import Callable
from math import sqrt
from statistics import median
from typing import Any

import faiss
import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.measure import environment, in_turn, peak_memory, ratio, save, table
from ssl_sec.evaluation.retrieval import recall_at_k

NUM_IMAGES = 60_502
NUM_CLASSES = 11_316
DIM = 512
NOISE = 2.3  # of a row about its class's centre, both as vectors of about that length
PROTOCOLS = {"SOP": [1, 10, 100, 1000], "CUB": [1, 2, 4, 8]}
ROUNDS = 1


def main() -> None:
    """Measures both protocols, prints the table and writes the figures."""
    where = environment() | {"load_before": os.getloadavg()[0]}
    print(", ".join(f"{key} {value}" for key, value in where.items() if value is not None), flush=True)
    rows = measure()
    print("\n" + table([shown(figures) for figures in rows]))
    print(f"\n{save('retrieval', {'environment': where | {'load_after': os.getloadavg()[0]}, 'rows': rows})}")


def measure() -> list[dict[str, Any]]:
    """The figures of each protocol."""
    faiss.omp_set_num_threads(torch.get_num_threads())
    embeddings, labels = made_up()
    found: dict[str, dict[int, float]] = {}

    def turn(name: str, recall: Callable[[Tensor, Tensor, list[int]], dict[int, float]], ks: list[int]) -> None:
        found[name] = recall(embeddings, labels, ks)

    # Both once at a small size, so that no turn pays for starting threads.
    for recall in (recall_at_k, searched_recall):
        recall(embeddings[:2000], labels[:2000], [1])
    turns: dict[str, Callable[[], object]] = {}
    for name, ks in PROTOCOLS.items():
        turns[f"{name}, ours"] = lambda name=name, ks=ks: turn(f"{name}, ours", recall_at_k, ks)
        turns[f"{name}, faiss"] = lambda name=name, ks=ks: turn(f"{name}, faiss", searched_recall, ks)
    seconds = in_turn(turns, ROUNDS, warm_up=False)
    # It depends on the sizes alone; of faiss's memory the profiler sees nothing.
    peak = peak_memory(lambda: recall_at_k(embeddings, labels, [1])) / 2**20
    return [
        {
            "protocol": name,
            "ks": ks,
            "ours_s": median(seconds[f"{name}, ours"]),
            "faiss_s": median(seconds[f"{name}, faiss"]),
            "times_as_fast": ratio(seconds[f"{name}, faiss"], seconds[f"{name}, ours"]),
            "ours_peak_mib": peak,
            "ours_recall": [found[f"{name}, ours"][k] for k in ks],
            "faiss_recall": [found[f"{name}, faiss"][k] for k in ks],
        }
        for name, ks in PROTOCOLS.items()
    ]


def made_up() -> tuple[Tensor, Tensor]:
    """Embeddings of classes of like sizes, each about a centre of its own, in random order; and their labels."""
    generator = torch.Generator().manual_seed(0)
    labels = (torch.arange(NUM_IMAGES) % NUM_CLASSES)[torch.randperm(NUM_IMAGES, generator=generator)]
    centres = torch.randn(NUM_CLASSES, DIM, generator=generator) / sqrt(DIM)
    return centres[labels] + NOISE * torch.randn(NUM_IMAGES, DIM, generator=generator) / sqrt(DIM), labels


def searched_recall(embeddings: Tensor, labels: Tensor, ks: list[int]) -> dict[int, float]:
    """Recall@K by faiss's exact search."""
    rows = functional.normalize(embeddings).numpy()
    index = faiss.IndexFlatIP(rows.shape[1])
    index.add(rows)
    _, neighbours = index.search(rows, max(ks) + 1)
    neighbours = torch.from_numpy(neighbours)
    is_other = neighbours != torch.arange(len(rows)).unsqueeze(1)
    is_right = (labels[neighbours] == labels.unsqueeze(1)) & is_other
    position = is_other.cumsum(1)
    return {k: (is_right & (position <= k)).any(1).double().mean().item() for k in ks}


def shown(figures: dict[str, Any]) -> dict[str, str]:
    """A row of the table."""
    differs = max(abs(a - b) for a, b in zip(figures["ours_recall"], figures["faiss_recall"], strict=True))
    return {
        "protocol": f"{figures['protocol']}, K to {max(figures['ks']):,}",
        "ours, s": f"{figures['ours_s']:.1f}",
        "faiss, s": f"{figures['faiss_s']:.1f}",
        "times as fast": f"{figures['times_as_fast']:.1f}",
        "ours, MiB": f"{figures['ours_peak_mib']:,.0f}",
        "R@1, %": f"{100 * figures['ours_recall'][0]:.3f}",
        "recall differs by, %": f"{100 * differs:.4f}",
    }


if __name__ == "__main__":
    main()
