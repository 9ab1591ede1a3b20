"""The settings of the papers' tables."""

import re
from dataclasses import replace

import pytest

from ssl_sec.data.crops import NUMBERS_PER_BOX, CentreCrop
from ssl_sec.edges.composition.compose import experiments, job_of
from ssl_sec.edges.composition.config_folders import CONFIG_FOLDER
from ssl_sec.edges.composition.experiments import explanations
from ssl_sec.edges.tracking.comparing import is_expected
from ssl_sec.losses.config import CONFIGS, CombinedConfig
from ssl_sec.papers import load
from ssl_sec.recipes.face.config import FaceConfig
from ssl_sec.recipes.face.test_sets import power_of_ten
from ssl_sec.recipes.metric_learning.config import MetricLearningConfig
from ssl_sec.settings import from_values
from ssl_sec.training.schedules import epochs_at
from tests.edges.composition.test_compose import composed, given_for
from tests.jobs import configured

# SEC, Tables 5 and 12: (constraint, epochs) -> (η, top-1) on CIFAR-10 and on CIFAR-100.
PAPER = {
    ("ntxent", 100): ((None, 84.76), (None, 58.43)),
    ("l2reg", 100): ((5e-3, 86.64), (1e-3, 61.43)),
    ("sec", 100): ((0.25, 86.87), (0.01, 61.66)),
    ("sec_ema", 100): ((0.5, 86.82), (0.05, 61.88)),
    ("ntxent", 200): ((None, 89.05), (None, 65.73)),
    ("l2reg", 200): ((5e-3, 90.14), (1e-3, 66.57)),
    ("sec", 200): ((0.25, 90.35), (0.01, 66.25)),
    ("sec_ema", 200): ((1.0, 90.21), (0.05, 66.59)),
}
CIFAR_ROWS = [
    (f"{data}_{constraint}_{epochs}", data, constraint, epochs, *PAPER[constraint, epochs][column])
    for column, data in enumerate(("cifar10", "cifar100"))
    for constraint, epochs in PAPER
]


@pytest.mark.parametrize(("name", "data", "constraint", "epochs", "eta", "top1"), CIFAR_ROWS)
def test_cifar_experiments_are_the_papers(name, data, constraint, epochs, eta, top1):
    config = configured("pretrain", [f"experiment={name}"])
    assert (config.recipe, config.data.name, config.epochs) == (name, data, epochs)
    assert config.constraint.name == {"ntxent": "none"}.get(constraint, constraint)
    if eta is not None:
        assert (config.constraint.eta, config.constraint.ramp) == (eta, "linear")
        assert config.constraint.rho == (0.2 if constraint == "sec_ema" else 1.0)
        assert config.constraint.radius == (0.0 if constraint == "l2reg" else None)
    assert (config.encoder.name, config.encoder.stem, config.encoder.width) == ("resnet50", "cifar", 1.0)
    assert (config.head.num_layers, config.head.dim, config.loss.temperature) == (2, 128, 0.5)
    assert (config.global_batch_size, config.optimiser.name) == (256, "sgd")
    assert (config.optimiser.learning_rate, config.optimiser.momentum) == (0.5, 0.9)
    assert (config.optimiser.weight_decay, config.optimiser.warmup_epochs) == (1e-4, 0)
    assert (config.augment.min_scale, config.augment.flip_probability, config.augment.colour_strength) == (
        0.08,
        0.5,
        0.5,
    )
    assert (config.probe.epochs, config.probe.batch_size) == (100, 256)
    paper, lower = (1, 2, 5, 10), (0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3)
    assert config.probe.learning_rates == (*lower, *paper)
    assert (epochs_at(config.probe.decay_at, config.probe.epochs), config.probe.decay_factor) == ((60, 75, 90), 5)
    assert f"top1 {top1}," in explanations()[name]


def test_the_recipe_of_supcontrast_differs_only_where_the_paper_states_nothing():
    papers, other = (
        configured("pretrain", [f"experiment={name}"]) for name in ("cifar10_ntxent_100", "cifar10_supcontrast")
    )
    assert (other.augment.min_scale, other.head.batch_norm, other.probe.augment) == (0.2, False, True)
    assert (other.probe.min_scale, other.optimiser.decay_all) == (0.2, True)
    assert (other.encoder.mean, other.encoder.std) == ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.201))
    assert other == replace(
        papers,
        recipe=other.recipe,
        augment=replace(papers.augment, min_scale=0.2),
        encoder=replace(papers.encoder, mean=other.encoder.mean, std=other.encoder.std),
        head=replace(papers.head, batch_norm=False),
        optimiser=replace(papers.optimiser, decay_all=True),
        probe=replace(papers.probe, augment=True, min_scale=0.2),
    )


TABLE_6_LOSSES = {
    "triplet and semihard triplet": ("triplet", "semihard"),
    "normalized N-pair": ("npair_normalized",),
    "multi-similarity": ("multi_similarity",),
    "all four losses": ("triplet", "semihard", "npair_normalized", "multi_similarity"),
}
DATA = {"CUB200-2011": "cub", "Cars196": "cars196", "SOP": "sop", "In-Shop": "inshop"}
IMAGES_PER_CLASS = {"triplet": 3, "semihard": 3, "npair_normalized": 2, "multi_similarity": 5}
CONSTRAINTS = ("", "_l2reg", "_sec", "_sec_ema")


def retrieval_config(name: str) -> MetricLearningConfig:
    return from_values(MetricLearningConfig, composed("metric_learning", f"experiment={name}", *given_for(name)))


@pytest.mark.parametrize("constraint", CONSTRAINTS)
@pytest.mark.parametrize("row", load("sec").table(6).rows, ids=lambda row: f"{row.section} {row.label}")
def test_retrieval_experiments_have_the_rates_of_table_6(row, constraint):
    for loss in TABLE_6_LOSSES[row.label]:
        config = retrieval_config(f"{DATA[row.section]}_{loss}{constraint}")
        steps, head, backbone, factor, decay_at = row.values
        optimiser = config.optimiser
        assert (config.data.name, config.loss.name, config.encoder.name) == (DATA[row.section], loss, "bn_inception")
        assert config.encoder.freeze_batch_norm
        assert (config.steps, config.global_batch_size, config.held_out_share) == (steps, 120, 0)
        assert (optimiser.name, optimiser.learning_rate, optimiser.backbone_learning_rate) == ("adam", head, backbone)
        assert optimiser.decay_factor == factor
        assert " and ".join(f"{step:,}" for step in optimiser.decay_at_steps) == decay_at
        assert optimiser.weight_decay == (2.5e-3 if config.data.name in ("cub", "cars196") else 1e-5)
        assert config.sampler.images_per_class == IMAGES_PER_CLASS[loss]
        bare = loss == "multi_similarity" and constraint in ("", "_l2reg")
        assert (config.head.name, config.head.dim) == ("fc" if bare else "bn_fc", 512)


def test_the_readme_of_the_authors_changes_two_settings_of_multi_similarity():
    for data, head, backbone in (("cub", 1e-5, 0.5e-5), ("cars196", 2e-5, 2e-5)):
        papers = retrieval_config(f"{data}_multi_similarity")
        optimiser = replace(papers.optimiser, learning_rate=head, backbone_learning_rate=backbone)
        name = f"{data}_multi_similarity_lr_{head:.0e}".replace("e-0", "e-")
        assert retrieval_config(name) == replace(papers, recipe=name, optimiser=optimiser)
    for data in DATA.values():
        papers = retrieval_config(f"{data}_multi_similarity_l2reg")
        config = retrieval_config(f"{data}_multi_similarity_l2reg_bn_fc")
        assert (papers.head.name, config.head.name) == ("fc", "bn_fc")
        assert config == replace(papers, recipe=config.recipe, head=config.head)


@pytest.mark.parametrize("paper", ["angular", "sec", "sft"])
def test_retrieval_experiments_start_from_weights(paper):
    """All three papers pretrain on ImageNet; a table does not call the weights that a run was given a change."""
    names = {
        recipe for table in load(paper).tables for recipe in table.recipes() if job_of(recipe) == "metric_learning"
    }
    for name in sorted(names):
        weights = retrieval_config(name).encoder.weights
        assert weights is not None, name
        published = re.search(r"-([0-9a-f]{8,})\.pth$", weights)
        assert is_expected("encoder.weights", weights, f"sha256 {published[1] if published else ''}0123456789"), name


@pytest.mark.parametrize("name", sorted(load("angular").table(1).recipes()))
def test_angular_experiments_crop_a_fixed_size_from_a_square(name):
    augment = retrieval_config(name).augment
    assert augment.centre_crop() == CentreCrop(short_side_px=256, keep_aspect=False, size_px=227)
    crop = augment.random_crop()
    assert (crop.keep_aspect, crop.short_side_px, crop.size_px) == (False, 256, 227)
    for number in (0.0, 0.5, 0.999):
        left, top, right, bottom = crop.box(256, 256, [number] * NUMBERS_PER_BOX)
        assert (right - left, bottom - top) == (227, 227)
        assert left == top == int(30 * number)


@pytest.mark.parametrize(
    "name",
    ["cub_triplet", "cars196_ranked_list_sft", "cars196_npair_dvml", "cub_angular_googlenet", "sop_npair_sft"],
)
def test_kmeans_is_that_of_the_authors(name):
    evaluation = retrieval_config(name).evaluation
    assert evaluation.clustering
    assert (evaluation.kmeans_starts, evaluation.kmeans_iterations) == (10, 300)


@pytest.mark.parametrize("row", load("sec").table(7).rows, ids=lambda row: row.label)
def test_retrieval_experiments_have_the_weights_of_table_7(row):
    for place, loss in enumerate(IMAGES_PER_CLASS):
        data, sec, l2reg = DATA[row.label], row.values[2 * place], row.values[2 * place + 1]
        assert retrieval_config(f"{data}_{loss}").constraint.name == "none"
        found = {name: retrieval_config(f"{data}_{loss}_{name}").constraint for name in ("l2reg", "sec", "sec_ema")}
        assert {name: constraint.name for name, constraint in found.items()} == {name: name for name in found}
        assert {constraint.ramp for constraint in found.values()} == {"constant"}
        assert (found["l2reg"].eta, found["l2reg"].radius) == (l2reg, 0.0)
        assert (found["sec"].eta, found["sec"].rho, found["sec"].radius) == (sec, 1.0, None)
        assert (found["sec_ema"].eta, found["sec_ema"].rho) == (sec, 0.01)


def test_similar_rows_differ_only_as_stated():
    like, own = retrieval_config("cars196_triplet_sec"), retrieval_config("cars196_triplet_sec_eta_1.5")
    assert (like.constraint.eta, own.constraint.eta) == (0.5, 1.5)
    assert replace(own, recipe=like.recipe, constraint=like.constraint) == like


def test_the_angle_of_the_angular_loss_is_36_degrees_on_sop():
    angles = {
        name: retrieval_config(name).loss.alpha_degrees for name in experiments("metric_learning") if "_angular" in name
    }
    assert {name: angle for name, angle in angles.items() if "alpha" not in name} == {
        f"{data}_{loss}_googlenet": 36 if data == "sop" else 45
        for data in ("cub", "cars196", "sop")
        for loss in ("angular", "npair_angular")
    }
    assert all(angle == int(name.rpartition("_")[2]) for name, angle in angles.items() if "alpha" in name)


def test_triplet_1_of_the_angular_loss_has_disjoint_triplets():
    for data in ("cub", "cars196", "sop"):
        first, second = (retrieval_config(f"{data}_triplet_{number}_googlenet") for number in (1, 2))
        assert (first.loss.name, first.sampler.name, first.global_batch_size) == ("triplet_disjoint", "triplets", 126)
        assert (second.loss.name, second.sampler.images_per_class, second.global_batch_size) == ("triplet", 2, 128)
        assert first.evaluation.neighbours == second.evaluation.neighbours == 5  # Fig. 5


@pytest.mark.parametrize("name", load("sft").table(5).recipes())
def test_head_and_tail_classes_are_sfts(name):
    """SFT, Section 4.2, "Effect on Unbalanced Datasets"."""
    config = face_config(name)
    split = config.split
    assert (split.more_than, split.num_head, split.head_images) == (100, 1500, 50)
    assert (split.num_head + split.num_tail, split.num_tail, split.tail_images) == (2445, 945, 5)
    assert (config.encoder.name, config.encoder.units) == ("sphereface_net", (1, 1, 1, 1))
    num_images = split.num_head * split.head_images + split.num_tail * split.tail_images
    assert choose_step(config, num_images) == pytest.approx([70_000, 90_000, 110_000, 120_000], rel=1e-4)
    transform = {"baseline": ("none", None), "balanced": ("sft", None), "unbalanced": ("sft", 15)}
    found = config.transform
    assert (found.name, getattr(found, "tail_below", None)) == transform[name.rpartition("_")[2]]


FACE_RECIPES = [
    recipe
    for paper, numbers in (("sec", (4, 11)), ("normface", (1, 2, 3, 4, 5)), ("sft", (2, 4)))
    for recipe in dict.fromkeys(recipe for number in numbers for recipe in load(paper).table(number).recipes())
]
# SEC, Table 11: η of L²-reg, SEC and SEC-EMA. Section 4.1: the margins.
TABLE_11 = {"sphereface": (5e-3, 5.0, 1.0), "cosface": (5e-3, 5.0, 1.0), "arcface": (1e-3, 5.0, 1.0)}
MARGINS = {"sphereface": ("margin", 3), "cosface": ("margin", 0.35), "arcface": ("margin_radians", 0.45)}
# Images of InsightFace's CASIA-WebFace and of SFT's part of MS-Celeb-1M.
CASIA, MS1M = 490_623, 3_000_000


def face_config(name: str) -> FaceConfig:
    return from_values(FaceConfig, composed("face", f"experiment={name}", *given_for(name)))


def choose_step(config: FaceConfig, num_images: int) -> list[float]:
    """Where the rate falls, and the end, by global step."""
    steps_per_epoch = num_images // config.global_batch_size
    return [epochs * steps_per_epoch for epochs in (*config.optimiser.decay_at_epochs, config.epochs)]


@pytest.mark.parametrize("name", FACE_RECIPES)
def test_face_experiments_have_what_their_papers_share(name):
    config = face_config(name)
    assert (config.recipe, job_of(name)) == (name, "face")
    assert name in experiments("face")
    assert (config.data.name, config.sampler.name) == ("records", "shuffled")
    assert config.head.dim == (256 if name.endswith("_wu") else 512)
    assert (config.global_batch_size, config.augment.flip_probability, config.held_out_share) == (256, 0.5, 0)
    assert config.optimiser.momentum == 0.9
    assert config.optimiser.decay_factor == 0.1 or name == "casia_softmax_wu"
    assert config.optimiser.weight_decay == 5e-4
    assert [test_set.shown_title for test_set in config.test_sets][0] == "lfw"
    assert config.test_sets[0].path == "x/lfw.bin"


@pytest.mark.parametrize("name", load("sec").table(11).recipes())
def test_face_experiments_have_the_weights_of_table_11(name):
    config = face_config(name)
    _, loss, constraint = [*name.split("_", 2), "none"][:3]
    assert (config.loss.name, config.constraint.name) == (loss, constraint)
    if loss != "softmax":
        key, margin = MARGINS[loss]
        assert (config.loss.scale, getattr(config.loss, key)) == (64, margin)
    if constraint != "none":
        eta = TABLE_11[loss][("l2reg", "sec", "sec_ema").index(constraint)]
        ramp = "capped" if constraint == "sec_ema" else "face"
        assert (config.constraint.eta, config.constraint.ramp) == (eta, ramp)
        assert config.constraint.rho == (0.4 if constraint == "sec_ema" else 1.0)
        assert config.constraint.radius == (0.0 if constraint == "l2reg" else None)
    assert (config.encoder.name, config.encoder.width, config.head.name) == ("se_ir50", 1.0, "fc_bn")
    assert (config.optimiser.learning_rate, config.optimiser.decay_at_epochs, config.epochs) == (0.1, (10, 14), 16)
    assert config.transform.name == "none"
    verified = {column.metric for column in load("sec").table(11).columns if column.group == "verification"}
    assert {f"face/{test_set.shown_title}_accuracy" for test_set in config.test_sets} == verified


@pytest.mark.parametrize("name", load("normface").table(2).recipes())
def test_face_experiments_are_normfaces(name):
    config = face_config(name)
    assert (config.encoder.name, config.encoder.units, config.head.name) == ("sphereface_net", (1, 2, 5, 3), "fc")
    assert (config.evaluation.flips, config.evaluation.pca) == ("sum_of_embeddings", 512)
    assert config.head.dropout == (0.5 if name == "casia_softmax_dropout_wen" else 0)
    assert config.evaluation.similarities == (name in load("normface").table(1).recipes())
    if name in ("casia_softmax_wen", "casia_softmax_dropout_wen", "casia_softmax_center_wen"):
        assert config.optimiser.learning_rate == 0.1
        assert choose_step(config, CASIA) == pytest.approx([16_000, 24_000, 28_000], rel=1e-3)
        assert (config.encoder.weights, config.head.weights) == (None, None)
    else:
        base = "runs/casia_softmax_center_wen/base"
        assert config.optimiser.learning_rate == 1e-3
        assert choose_step(config, CASIA) == pytest.approx([10_000], rel=1e-3)
        assert config.encoder.weights == f"{base}/encoder.safetensors"
        assert config.head.weights == f"{base}/head.safetensors"
    first, second, weight = (
        (config.loss.first, config.loss.second, config.loss.weight)
        if isinstance(config.loss, CombinedConfig)
        else (config.loss, None, None)
    )
    described = name.removeprefix("casia_").removesuffix("_wen")
    assert described.startswith(first.name)
    assert getattr(first, "add_center", False) == (described == "c_triplet_center")
    assert getattr(first, "margin", None) == {"c_contrastive": 1.0, "c_triplet": 0.8}.get(first.name)
    assert (second, weight) == {
        "softmax_center": (CONFIGS["center"](), 0.008),
        "normface_center": (CONFIGS["c_contrastive"](margin=0.0), 0.01),
        "normface_c_contrastive": (CONFIGS["c_contrastive"](margin=1.0), 0.01),
    }.get(described, (None, None))


def test_the_test_sets_of_normfaces_tables_are_added_as_documented():
    lines = (CONFIG_FOLDER / "table" / "normface.yaml").read_text().splitlines()
    comment = " ".join(line.removeprefix("#").strip() for line in lines if line.startswith("#"))
    (override,) = re.findall(r"'(test_sets=.*?)'", comment)
    values = composed("face", "experiment=casia_normface_wen", *given_for("casia_normface_wen"), override)
    test_sets = from_values(FaceConfig, values).test_sets
    assert test_sets[0] == face_config("casia_normface_wen").test_sets[0]
    columns = [column for number in (2, 3, 5) for column in load("normface").table(number).columns]
    assert {one.shown_title for one in test_sets} == {re.split("[/_]", column.metric)[1] for column in columns}


@pytest.mark.parametrize("name", load("normface").table(4).recipes())
def test_face_experiments_on_wus_network_are_normfaces(name):
    config = face_config(name)
    assert (config.encoder.name, config.encoder.width, config.head.name) == ("light_cnn", 1.0, "maxout")
    assert (config.data.num_channels, config.data.image_size_px) == (1, 128)
    assert config.head.dropout == (0.7 if name == "casia_softmax_wu" else 0)
    described = name.removeprefix("casia_").removesuffix("_wu")
    if described == "softmax":
        assert (config.loss.name, config.evaluation.flips, config.evaluation.pca) == ("softmax", "none", None)
        optimiser = config.optimiser
        assert optimiser.learning_rate == 1e-3
        assert 1e-3 * optimiser.decay_factor ** len(optimiser.decay_at_epochs) == pytest.approx(5e-5, rel=0.01)
        assert (config.encoder.weights, config.head.weights) == (None, None)
        return
    base = "runs/casia_softmax_wu/base"
    assert config.encoder.weights == f"{base}/encoder.safetensors"
    assert config.head.weights == f"{base}/head.safetensors"
    assert (config.evaluation.flips, config.evaluation.pca) == ("sum_of_embeddings", config.head.dim)
    if described == "softmax_mirrored":
        assert config.epochs == 0
        return
    assert config.optimiser.learning_rate == 1e-4
    assert choose_step(config, CASIA) == pytest.approx([10_000], rel=1e-3)
    if described == "normface_c_contrastive":
        assert config.loss.first.name == "normface"
        assert (config.loss.second, config.loss.weight) == (CONFIGS["c_contrastive"](margin=1.0), 0.01)
    else:
        assert config.loss.name == described


@pytest.mark.parametrize("name", load("sft").table(2).recipes())
def test_face_experiments_are_sfts(name):
    config = face_config(name)
    _, loss, transform = name.split("_", 2)
    assert config.loss.name == loss
    assert config.loss.scale == {"l2softmax": 24, "cosface": 64}[loss]
    assert (config.encoder.name, config.encoder.units, config.head.name) == ("sphereface_net", (3, 4, 6, 3), "fc")
    if transform == "sft_baseline":
        assert config.transform.name == "none"
    else:
        found = config.transform
        assert (found.name, found.weight, found.tail_below) == (transform, 0.2, 15)
    assert config.optimiser.learning_rate == 0.1
    assert choose_step(config, MS1M) == pytest.approx([70_000, 90_000, 110_000, 120_000], rel=1e-3)
    accepted = {column.metric for column in load("sft").table(4).columns if column.metric}
    assert {f"face/ijbc_tar_at_far_{power_of_ten(far)}" for far in config.evaluation.fars} == accepted
