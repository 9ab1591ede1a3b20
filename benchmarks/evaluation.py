"""Evaluation compared with other libraries: features, linear probe, kNN, Recall@K and k-means.

    CUDA_VISIBLE_DEVICES= python -m benchmarks.evaluation                     # a minute on two CPU cores
    CUDA_VISIBLE_DEVICES= python -m benchmarks.evaluation --images 60502      # at the size of SOP's test set

Ours and the peer take turns in one process, on the same rows and with the same number of threads:

features    ResNet-18 at a quarter of its width; peer: a DataLoader with torchvision's ToTensor over PIL images
probe       the paper's four learning rates at once; peers: one fit of scikit-learn's SGDClassifier for each rate and
            the same number of epochs (it steps after each row, ours after 256), and four fits of its LogisticRegression
kNN         peer: lightly's, k = 200
Recall@K    peer: faiss's exact search for the neighbours that the protocol needs: 1,000 for SOP, 8 for CUB
k-means     peer: scikit-learn's KMeans from the same initial centres, 20 iterations

The table has the times, the results, and the limit: the time of the matrix products alone at this machine's best rate.
Writes benchmarks/results/evaluation-{cpu,gpu}.json; with --images 60502, evaluation-60502-….
"""

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from math import log, sqrt
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset
from torch.utils.flop_counter import FlopCounterMode
from torchvision.transforms.functional import to_pil_image, to_tensor

from benchmarks.measure import (
    choose_device,
    describe_environment,
    describe_error,
    format_table,
    make_parser,
    measure_peak_rate,
    median_ratio,
    save_results,
    time_in_turns,
)
from benchmarks.simclr import draw_images
from ssl_sec.data.image_set import ResidentImages
from ssl_sec.evaluation.classification.knn import knn_top1
from ssl_sec.evaluation.classification.linear_probe import shuffled, train_linear_probes
from ssl_sec.evaluation.classification.scores import top_k_accuracy
from ssl_sec.evaluation.clustering import kmeans_assignments, nmi_f1
from ssl_sec.evaluation.config import ProbeConfig
from ssl_sec.evaluation.feature_table import FeatureTable
from ssl_sec.evaluation.features import extract_features
from ssl_sec.evaluation.retrieval import recall_at_k
from ssl_sec.networks.config import ResNetConfig
from ssl_sec.training.config import LocalConfig

NUM_IMAGES, DIM = 10_000, 512
NOISE = 2.3  # the length of a row's offset from its class centre, where centres have length 1
IMAGES_PER_CLASS = 5.35  # in SOP's test set
PROTOCOLS = {"SOP": (1, 10, 100, 1000), "CUB": (1, 2, 4, 8)}
RATES, PROBE_EPOCHS = (1.0, 2.0, 5.0, 10.0), 10
NEIGHBOURS = 200
ITERATIONS = 20  # of k-means


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A part of evaluation and its peer.

    Attributes:
        part: the part of evaluation.
        size: size of its input, for the table.
        peer: the peer's name.
        result: name of the result of both functions, for the table.
        operations: least number of operations in matrix products.
        ours: function that computes the result, in percent.
        theirs: the peer's function for the same result.
        needs: the package that the peer imports; without it the comparison is left out.
    """

    part: str
    size: str
    peer: str
    result: str
    operations: float
    ours: Callable[[], float]
    theirs: Callable[[], float]
    needs: str = "torch"


def main() -> None:
    """Measures every part, prints the table and writes the results."""
    parser = make_parser("evaluation", __doc__)
    parser.add_argument("--images", type=int, default=NUM_IMAGES, help="number of rows")
    parser.add_argument("--rounds", type=int, default=1, help="turns of each")
    options = parser.parse_args()
    rows = measure(options.images, options.rounds)
    print(format_table([format_row(row) for row in rows]))
    name = "evaluation" if options.images == NUM_IMAGES else f"evaluation-{options.images}"
    values = {"environment": describe_environment(), "images": options.images, "rows": rows}
    print(f"\n{save_results(name, values)}")


def measure(num_images: int, rounds: int) -> list[dict[str, Any]]:
    """Measures every part whose peer is installed."""
    warnings.filterwarnings("ignore")  # scikit-learn warns that so few epochs do not converge
    device = choose_device()
    if find_spec("faiss"):
        import faiss

        faiss.omp_set_num_threads(torch.get_num_threads())
    peak = measure_peak_rate(device, "float32")
    return [
        _measure(each, rounds, peak)
        for each in (
            _compare_features(num_images, device),
            *_compare_probes(num_images, device),
            _compare_knn(num_images, device),
            *_compare_recalls(num_images, device),
            _compare_kmeans(num_images),
        )
        if find_spec(each.needs)
    ]


def _measure(comparison: Comparison, rounds: int, peak: float) -> dict[str, Any]:
    results: dict[str, float] = {}
    row = {"part": comparison.part, "size": comparison.size, "peer": comparison.peer}
    try:
        seconds = time_in_turns(
            {
                "ours": lambda: results.update(ours=comparison.ours()),
                "peer": lambda: results.update(peer=comparison.theirs()),
            },
            rounds,
            warm_up=False,
        )
    except (RuntimeError, ImportError) as error:  # out of memory, or the peer lacks a library
        return {**row, "error": describe_error(error)}
    print(".", end="", flush=True)
    return {
        **row,
        "ours_s": median(seconds["ours"]),
        "peer_s": median(seconds["peer"]),
        "times_as_fast": median_ratio(seconds["peer"], seconds["ours"]),
        "limit_s": comparison.operations / peak,
        "result": comparison.result,
        "ours_result": results["ours"],
        "peer_result": results["peer"],
    }


class _PilImages(Dataset[Tensor]):
    """Images in memory, loaded as torchvision's data sets do."""

    def __init__(self, images: ResidentImages) -> None:
        self._images = [to_pil_image(image) for image in images.images]

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> Tensor:
        return to_tensor(self._images[index])


def _compare_features(num_images: int, device: torch.device) -> Comparison:
    images = draw_images(num_images, 32)
    encoder = ResNetConfig(name="resnet18", width=0.25).build(3, 32).to(device).eval()
    our_encoder = copy.deepcopy(encoder)
    if LocalConfig().on(device).channels_last:
        our_encoder.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    resident, loader = images.to(device), DataLoader(_PilImages(images), 512)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        encoder(torch.zeros(1, *images.image_shape, device=device))

    def ours() -> float:
        rows, _ = extract_features(our_encoder, resident, torch.arange(num_images), device)
        return 100 * rows.norm(dim=1).mean().item()

    @torch.no_grad()
    def theirs() -> float:
        rows = torch.cat([encoder(batch.to(device)) for batch in loader])
        return 100 * rows.norm(dim=1).mean().item()

    return Comparison(
        part="features",
        size=f"{num_images:,} images, 3 x 32 x 32",
        peer="torch's DataLoader",
        result="mean norm, hundredths",
        operations=num_images * counter.get_total_flops(),
        ours=ours,
        theirs=theirs,
    )


def _draw_rows(num_images: int, num_classes: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Draws rows around one random centre per class, and their labels; classes of equal size, in random order."""
    generator = torch.Generator().manual_seed(0)
    labels = (torch.arange(num_images) % num_classes)[torch.randperm(num_images, generator=generator)]
    centres = torch.randn(num_classes, DIM, generator=generator) / sqrt(DIM)
    rows = centres[labels] + NOISE * torch.randn(num_images, DIM, generator=generator) / sqrt(DIM)
    return rows.to(device), labels.to(device)


def _compare_probes(num_images: int, device: torch.device) -> list[Comparison]:
    num_classes = 10
    features, labels = _draw_rows(num_images, num_classes, device)
    train, test = slice(0, num_images * 9 // 10), slice(num_images * 9 // 10, None)

    def ours() -> float:
        batches = shuffled(FeatureTable(features[train], labels[train]), 256, seed=0)
        config = ProbeConfig(epochs=PROBE_EPOCHS)
        probes = train_linear_probes(batches, config, RATES, num_classes=num_classes, dim=DIM, device=device)
        return max(100 * top_k_accuracy(logits, labels[test], 1) for logits in probes.logits(features[test]))

    def fit(make: Callable[[float], Any]) -> float:
        rows, classes = features.cpu().numpy(), labels.cpu().numpy()
        fits = [make(rate).fit(rows[train], classes[train]) for rate in RATES]
        return max(100 * fit.score(rows[test], classes[test]) for fit in fits)

    def fit_sgd() -> float:
        from sklearn.linear_model import SGDClassifier

        return fit(
            lambda rate: SGDClassifier(
                loss="log_loss",
                alpha=1e-12,
                learning_rate="constant",
                eta0=rate / 256,  # SGDClassifier steps after each row
                max_iter=PROBE_EPOCHS,
                tol=None,  # pyright: ignore[reportArgumentType]
                random_state=0,
            )
        )

    def fit_lbfgs() -> float:
        from sklearn.linear_model import LogisticRegression

        return fit(lambda rate: LogisticRegression(C=rate, max_iter=100))

    size = f"{num_images:,} x {DIM}, {num_classes} classes, 4 rates"
    peers = {"scikit-learn's SGD": fit_sgd, "scikit-learn's L-BFGS": fit_lbfgs}
    products = 2 * PROBE_EPOCHS * train.stop + num_images - train.stop  # forward and backward passes, and the test
    return [
        Comparison(
            part="linear probe",
            size=size,
            peer=peer,
            result="best top-1, %",
            operations=2 * DIM * num_classes * len(RATES) * products,
            ours=ours,
            theirs=theirs,
            needs="sklearn",
        )
        for peer, theirs in peers.items()
    ]


def _compare_knn(num_images: int, device: torch.device) -> Comparison:
    num_classes = 100
    rows, labels = _draw_rows(num_images, num_classes, device)
    num_queries = num_images // 5
    bank, queries = slice(num_queries, None), slice(0, num_queries)

    def ours() -> float:
        return 100 * knn_top1(
            rows[bank], labels[bank], rows[queries], labels[queries], num_classes=num_classes, k=NEIGHBOURS
        )

    def theirs() -> float:
        from lightly.utils.benchmarking import knn_predict

        # As in lightly's callback: normalised features, the bank transposed, the queries in batches.
        directions = functional.normalize(rows)
        bank_columns = directions[bank].T.contiguous()
        predicted = [
            knn_predict(batch, bank_columns, labels[bank], num_classes, NEIGHBOURS)[:, 0]
            for batch in directions[queries].split(256)
        ]
        return 100 * (torch.cat(predicted) == labels[queries]).double().mean().item()

    return Comparison(
        part="kNN",
        size=f"{num_images - num_queries:,} x {DIM}, {num_queries:,} queries, k = {NEIGHBOURS}",
        peer="lightly",
        result="top-1, %",
        operations=2 * DIM * num_queries * (num_images - num_queries),
        ours=ours,
        theirs=theirs,
        needs="pytorch_lightning",  # imported by lightly's kNN
    )


def _compare_recalls(num_images: int, device: torch.device) -> list[Comparison]:
    rows, labels = _draw_rows(num_images, round(num_images / IMAGES_PER_CLASS), device)
    for recall in (recall_at_k, *([_compute_recall_by_faiss] if find_spec("faiss") else [])):
        recall(rows[:2000], labels[:2000], (1,))  # starts the threads before the first turn
    return [
        Comparison(
            part=f"Recall@K, K of {protocol}",
            size=f"{num_images:,} x {DIM}, K to {max(ks):,}",
            peer="faiss",
            result="R@1, %",
            operations=DIM * num_images**2,  # each pair once
            ours=lambda ks=ks: 100 * recall_at_k(rows, labels, ks)[1],
            theirs=lambda ks=ks: 100 * _compute_recall_by_faiss(rows, labels, ks)[1],
            needs="faiss",
        )
        for protocol, ks in PROTOCOLS.items()
    ]


def _compute_recall_by_faiss(embeddings: Tensor, labels: Tensor, ks: tuple[int, ...]) -> dict[int, float]:
    """Computes Recall@K by faiss's exact search."""
    import faiss

    labels = labels.cpu()
    rows = functional.normalize(embeddings).cpu().numpy()
    index = faiss.IndexFlatIP(rows.shape[1])
    index.add(rows)
    _, nearest = index.search(rows, min(max(ks) + 1, len(rows)))
    neighbours = torch.from_numpy(nearest)
    is_other = neighbours != torch.arange(len(rows)).unsqueeze(1)
    is_right = (labels[neighbours] == labels.unsqueeze(1)) & is_other
    position = is_other.cumsum(1)
    return {k: (is_right & (position <= k)).any(1).double().mean().item() for k in ks}


def _compare_kmeans(num_images: int) -> Comparison:
    num_classes = 100
    rows, labels = _draw_rows(num_images, num_classes, torch.device("cpu"))

    def theirs() -> float:
        from sklearn.cluster import KMeans, kmeans_plusplus

        directions = functional.normalize(rows).numpy()
        centres, _ = kmeans_plusplus(directions, num_classes, random_state=0)
        options: dict[str, Any] = {"init": centres, "n_init": 1, "max_iter": ITERATIONS, "tol": 0}
        kmeans = KMeans(num_classes, **options).fit(directions)
        return 100 * nmi_f1(torch.from_numpy(kmeans.labels_), labels)[0]

    return Comparison(
        part="k-means",
        size=f"{num_images:,} x {DIM}, {num_classes} clusters",
        peer="scikit-learn",
        result="NMI, %",
        operations=2 * DIM * num_images * num_classes * (2 + int(log(num_classes)) + ITERATIONS + 1),
        ours=lambda: 100 * nmi_f1(kmeans_assignments(rows, num_classes, seed=0, num_iterations=ITERATIONS), labels)[0],
        theirs=theirs,
        needs="sklearn",
    )


def format_row(row: dict[str, Any]) -> dict[str, str]:
    """Formats a row of the table."""
    head = {"part": row["part"], "size": row["size"], "peer": row["peer"]}
    if "error" in row:
        return {**head, "result": row["error"]}
    return {
        **head,
        "ours, s": f"{row['ours_s']:.2f}",
        "peer, s": f"{row['peer_s']:.2f}",
        "times as fast": f"{row['times_as_fast']:.2f}",
        "limit, s": f"{row['limit_s']:.2f}",
        "result": row["result"],
        "ours": f"{row['ours_result']:.3f}",
        "peer's": f"{row['peer_result']:.3f}",
    }


if __name__ == "__main__":
    main()
