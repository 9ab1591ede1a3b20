"""Evaluation beside its peers: features, linear probe, kNN, Recall@K and k-means.

    CUDA_VISIBLE_DEVICES= python -m benchmarks.evaluation                     # a minute on two CPU cores
    CUDA_VISIBLE_DEVICES= python -m benchmarks.evaluation --images 60502      # at the size of SOP's test set

Ours and the peer take turns in one process on the same rows, with as many threads:

features    ResNet-18 of a quarter of the width; against a DataLoader with torchvision's ToTensor over PIL images
probe       the paper's four rates at once; against scikit-learn's SGDClassifier, a fit for each rate, as many epochs
            (it steps after each row, ours after 256), and against four fits of its LogisticRegression
kNN         against lightly's, k = 200
Recall@K    against faiss's exact search for as many neighbours as the protocol needs: 1,000 for SOP, 8 for CUB
k-means     against scikit-learn's KMeans from the same start, 20 iterations

What each finds is shown beside its time, and the limit: the time that the products of matrices alone would take at the
best rate of this machine. Writes benchmarks/results/evaluation-{cpu,gpu}.json; with --images 60502, evaluation-60502-….
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

from benchmarks.measure import command_line, environment, in_turn, peak_rate, ratio, save, table, told
from benchmarks.simclr import random_images
from ssl_sec.data.image_set import ResidentImages
from ssl_sec.evaluation.clustering import kmeans_assignments, nmi_f1
from ssl_sec.evaluation.features import extract_features
from ssl_sec.evaluation.knn import knn_top1
from ssl_sec.evaluation.linear_probe import shuffled, top_k_accuracy, train_linear_probes
from ssl_sec.evaluation.retrieval import recall_at_k
from ssl_sec.networks.config import ResNetConfig
from ssl_sec.training.config import LocalConfig

NUM_IMAGES, DIM = 10_000, 512
NOISE = 2.3  # of a row about its class's centre, both as vectors of about that length
RETRIEVED_A_CLASS = 5.35  # images of a class in SOP's test set
PROTOCOLS = {"SOP": (1, 10, 100, 1000), "CUB": (1, 2, 4, 8)}
RATES, PROBE_EPOCHS = (1.0, 2.0, 5.0, 10.0), 10
NEIGHBOURS = 200
ITERATIONS = 20  # of k-means


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A part of evaluation and its peer; both return what they found, in percent.

    Attributes:
        part: of evaluation.
        size: what it is measured on, for people.
        peer: who it is compared with.
        finding: what both return.
        operations: of the products of matrices alone, as few as will do.
        needs: what must be installed; the comparison is left out where it is not.
    """

    part: str
    size: str
    peer: str
    finding: str
    operations: float
    ours: Callable[[], float]
    theirs: Callable[[], float]
    needs: str = "torch"


def main() -> None:
    """Measures every part, prints the table and writes the figures."""
    parser = command_line("evaluation", __doc__)
    parser.add_argument("--images", type=int, default=NUM_IMAGES)
    parser.add_argument("--rounds", type=int, default=1)
    options = parser.parse_args()
    rows = measure(options.images, options.rounds)
    print(table([shown(row) for row in rows]))
    name = "evaluation" if options.images == NUM_IMAGES else f"evaluation-{options.images}"
    print(f"\n{save(name, {'environment': environment(), 'images': options.images, 'rows': rows})}")


def measure(num_images: int, rounds: int) -> list[dict[str, Any]]:
    """The figures of every part whose peer is there."""
    warnings.filterwarnings("ignore")  # scikit-learn's, that so few epochs do not converge
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if find_spec("faiss"):
        import faiss

        faiss.omp_set_num_threads(torch.get_num_threads())
    peak = peak_rate(device, "float32")
    return [
        _measured(each, rounds, peak)
        for each in (
            _features(num_images, device),
            *_probes(num_images, device),
            _neighbours(num_images, device),
            *_recalls(num_images, device),
            _clusters(num_images),
        )
        if find_spec(each.needs)
    ]


def _measured(comparison: Comparison, rounds: int, peak: float) -> dict[str, Any]:
    found: dict[str, float] = {}
    row = {"part": comparison.part, "size": comparison.size, "peer": comparison.peer}
    try:
        seconds = in_turn(
            {
                "ours": lambda: found.update(ours=comparison.ours()),
                "peer": lambda: found.update(peer=comparison.theirs()),
            },
            rounds,
            warm_up=False,
        )
    except (RuntimeError, ImportError) as error:  # out of memory, a library that the peer lacks
        return {**row, "error": told(error)}
    print(".", end="", flush=True)
    return {
        **row,
        "ours_s": median(seconds["ours"]),
        "peer_s": median(seconds["peer"]),
        "times_as_fast": ratio(seconds["peer"], seconds["ours"]),
        "limit_s": comparison.operations / peak,
        "finding": comparison.finding,
        "ours_finding": found["ours"],
        "peer_finding": found["peer"],
    }


class _PilImages(Dataset[Tensor]):
    """Images that lie in memory, as torchvision's data sets hand them on."""

    def __init__(self, images: ResidentImages) -> None:
        self._images = [to_pil_image(image) for image in images.images]

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> Tensor:
        return to_tensor(self._images[index])


def _features(num_images: int, device: torch.device) -> Comparison:
    images = random_images(num_images, 32)
    encoder = ResNetConfig(name="resnet18", width=0.25).build(3, 32).to(device).eval()
    laid_out = copy.deepcopy(encoder)
    if LocalConfig().on(device).channels_last:
        laid_out.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    resident, loader = images.to(device), DataLoader(_PilImages(images), 512)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        encoder(torch.zeros(1, *images.image_shape, device=device))

    def ours() -> float:
        rows, _ = extract_features(laid_out, resident, torch.arange(num_images), device)
        return 100 * rows.norm(dim=1).mean().item()

    @torch.no_grad()
    def theirs() -> float:
        rows = torch.cat([encoder(batch.to(device)) for batch in loader])
        return 100 * rows.norm(dim=1).mean().item()

    return Comparison(
        part="features",
        size=f"{num_images:,} images, 3 x 32 x 32",
        peer="torch's DataLoader",
        finding="mean norm, hundredths",
        operations=num_images * counter.get_total_flops(),
        ours=ours,
        theirs=theirs,
    )


def _made_up(num_images: int, num_classes: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Rows of classes of like sizes, each about a centre of its own, in random order; and their labels."""
    generator = torch.Generator().manual_seed(0)
    labels = (torch.arange(num_images) % num_classes)[torch.randperm(num_images, generator=generator)]
    centres = torch.randn(num_classes, DIM, generator=generator) / sqrt(DIM)
    rows = centres[labels] + NOISE * torch.randn(num_images, DIM, generator=generator) / sqrt(DIM)
    return rows.to(device), labels.to(device)


def _probes(num_images: int, device: torch.device, num_classes: int = 10) -> list[Comparison]:
    features, labels = _made_up(num_images, num_classes, device)
    train, test = slice(0, num_images * 9 // 10), slice(num_images * 9 // 10, None)

    def ours() -> float:
        batches = shuffled(features[train], labels[train], 256, seed=0)
        probes = train_linear_probes(
            batches, num_classes=num_classes, dim=DIM, learning_rates=RATES, epochs=PROBE_EPOCHS, device=device
        )
        return max(100 * top_k_accuracy(logits, labels[test], 1) for logits in probes.logits(features[test]))

    def fitted(make: Callable[[float], Any]) -> float:
        rows, classes = features.cpu().numpy(), labels.cpu().numpy()
        fits = [make(rate).fit(rows[train], classes[train]) for rate in RATES]
        return max(100 * fit.score(rows[test], classes[test]) for fit in fits)

    def theirs_by_sgd() -> float:
        from sklearn.linear_model import SGDClassifier

        return fitted(
            lambda rate: SGDClassifier(
                loss="log_loss",
                alpha=1e-12,
                learning_rate="constant",
                eta0=rate / 256,  # of steps after each row
                max_iter=PROBE_EPOCHS,
                tol=None,  # pyright: ignore[reportArgumentType]
                random_state=0,
            )
        )

    def theirs_by_lbfgs() -> float:
        from sklearn.linear_model import LogisticRegression

        return fitted(lambda rate: LogisticRegression(C=rate, max_iter=100))

    size = f"{num_images:,} x {DIM}, {num_classes} classes, 4 rates"
    peers = {"scikit-learn's SGD": theirs_by_sgd, "scikit-learn's L-BFGS": theirs_by_lbfgs}
    products = 2 * PROBE_EPOCHS * train.stop + num_images - train.stop  # forward and backward; and the test
    return [
        Comparison(
            part="linear probe",
            size=size,
            peer=peer,
            finding="best top-1, %",
            operations=2 * DIM * num_classes * len(RATES) * products,
            ours=ours,
            theirs=theirs,
            needs="sklearn",
        )
        for peer, theirs in peers.items()
    ]


def _neighbours(num_images: int, device: torch.device, num_classes: int = 100) -> Comparison:
    rows, labels = _made_up(num_images, num_classes, device)
    held = num_images // 5
    bank, queries = slice(held, None), slice(0, held)

    def ours() -> float:
        return 100 * knn_top1(
            rows[bank], labels[bank], rows[queries], labels[queries], num_classes=num_classes, k=NEIGHBOURS
        )

    def theirs() -> float:
        from lightly.utils.benchmarking import knn_predict

        # As lightly's callback does: normalised features, the bank transposed, the queries in batches.
        directions = functional.normalize(rows)
        of_bank = directions[bank].T.contiguous()
        predicted = [
            knn_predict(batch, of_bank, labels[bank], num_classes, NEIGHBOURS)[:, 0]
            for batch in directions[queries].split(256)
        ]
        return 100 * (torch.cat(predicted) == labels[queries]).double().mean().item()

    return Comparison(
        part="kNN",
        size=f"{num_images - held:,} x {DIM}, {held:,} queries, k = {NEIGHBOURS}",
        peer="lightly",
        finding="top-1, %",
        operations=2 * DIM * held * (num_images - held),
        ours=ours,
        theirs=theirs,
        needs="pytorch_lightning",  # which lightly's kNN asks for
    )


def _recalls(num_images: int, device: torch.device) -> list[Comparison]:
    rows, labels = _made_up(num_images, round(num_images / RETRIEVED_A_CLASS), device)
    for recall in (recall_at_k, *([_searched_recall] if find_spec("faiss") else [])):
        recall(rows[:2000], labels[:2000], (1,))  # so that no turn pays for starting threads
    return [
        Comparison(
            part=f"Recall@K, K of {protocol}",
            size=f"{num_images:,} x {DIM}, K to {max(ks):,}",
            peer="faiss",
            finding="R@1, %",
            operations=DIM * num_images**2,  # each pair once
            ours=lambda ks=ks: 100 * recall_at_k(rows, labels, ks)[1],
            theirs=lambda ks=ks: 100 * _searched_recall(rows, labels, ks)[1],
            needs="faiss",
        )
        for protocol, ks in PROTOCOLS.items()
    ]


def _searched_recall(embeddings: Tensor, labels: Tensor, ks: tuple[int, ...]) -> dict[int, float]:
    """Recall@K by faiss's exact search."""
    import faiss

    labels = labels.cpu()
    rows = functional.normalize(embeddings).cpu().numpy()
    index = faiss.IndexFlatIP(rows.shape[1])
    index.add(rows)
    _, found = index.search(rows, min(max(ks) + 1, len(rows)))
    neighbours = torch.from_numpy(found)
    is_other = neighbours != torch.arange(len(rows)).unsqueeze(1)
    is_right = (labels[neighbours] == labels.unsqueeze(1)) & is_other
    position = is_other.cumsum(1)
    return {k: (is_right & (position <= k)).any(1).double().mean().item() for k in ks}


def _clusters(num_images: int, num_classes: int = 100) -> Comparison:
    rows, labels = _made_up(num_images, num_classes, torch.device("cpu"))

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
        finding="NMI, %",
        operations=2 * DIM * num_images * num_classes * (2 + int(log(num_classes)) + ITERATIONS + 1),
        ours=lambda: 100 * nmi_f1(kmeans_assignments(rows, num_classes, seed=0, num_iterations=ITERATIONS), labels)[0],
        theirs=theirs,
        needs="sklearn",
    )


def shown(row: dict[str, Any]) -> dict[str, str]:
    """A row of the table."""
    head = {"part": row["part"], "size": row["size"], "peer": row["peer"]}
    if "error" in row:
        return {**head, "found": row["error"]}
    return {
        **head,
        "ours, s": f"{row['ours_s']:.2f}",
        "peer, s": f"{row['peer_s']:.2f}",
        "times as fast": f"{row['times_as_fast']:.2f}",
        "limit, s": f"{row['limit_s']:.2f}",
        "found": row["finding"],
        "ours": f"{row['ours_finding']:.3f}",
        "peer's": f"{row['peer_finding']:.3f}",
    }


if __name__ == "__main__":
    main()
