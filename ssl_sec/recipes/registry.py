"""The table of all recipes, one row each: the edges know a recipe by its row and its package alone.

A package has `config.CONFIG`, the dataclass of a run; `recipe.run`, which each worker calls; and `figures.draw`. If a
run has figures as soon as it trains, `figures` has `draw_at_start`, too; if reports compare its runs by more than norms
and a curve, `measure` and `COMPARISONS`. They are imported when they are first used: this module itself imports neither
torch nor matplotlib.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from inspect import signature
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal

from ssl_sec.errors import ConfigError, nearest

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ssl_sec.figures.comparing import ComparisonFigure
    from ssl_sec.figures.runs import RunRecord
    from ssl_sec.recipes.config import RunConfig, TrainingConfig
    from ssl_sec.training.step import Runtime

    Run = Callable[[Any, Runtime, Any], None]
    Draw = Callable[[RunRecord], dict[str, Figure]]
    Measure = Callable[[RunRecord], dict[str, Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class RecipeRow:
    """A recipe, as the edges know it.

    Attributes:
        name: name of its command, of `configs/<name>.yaml` and of the tag `job` of its runs.
        about: a line for the help.
        package: the package with its `config`, `recipe` and `figures`.
        examples: command lines, without the command, each with its purpose.
        usage: the arguments of the command in its help.
        is_training: whether it trains an encoder, which can be resumed, probed, exported and registered.
        unit: unit of the run's length; the key of the length is its plural.
        last_artifact: the file that is sent to MLflow last.
        leaves_head: whether the head belongs to the trained network.
        score: the metric that ranks checkpoints during training.
        score_without_labels: the metric that does so if the images have no labels.
        view_metrics: the metrics that MLflow's view of the scores shows; runs are sorted by the first.
        test_metrics: the metrics of a trained network by which runs are compared, beside those of the view; a key of
            `METRICS` with variable parts stands for all of its metrics.
        tags: the tags that the view shows beside constraint and seed.
        paper_figure: the metric that the help shows for an experiment, and its title there.
        network: a description of the trained network for its model card; {dim} is its dimension, {labels} `with labels`
            or `without labels`, as it has learned.
        classifier: likewise, of the network with the classifier that a run keeps beside it, in head.safetensors; {dim}
            is the number of classes. Empty if it keeps none.
        hub_tags: tags of the model card.
        hub_tags_without_labels: more of them for an encoder that has learned without labels.
        curves: the metrics that reports draw as curves: the first one that most of the runs have.
        is_probed: whether linear probes evaluate the encoder.
    """

    name: str
    about: str
    package: str
    examples: tuple[tuple[str, str], ...]
    usage: str = "[group=option ...] [key=value ...]"
    is_training: bool = True
    unit: Literal["epoch", "step"] = "epoch"
    last_artifact: str = "encoder.safetensors"
    leaves_head: bool = False
    score: str | None = None
    score_without_labels: str | None = None
    view_metrics: tuple[str, ...] = ()
    test_metrics: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    paper_figure: tuple[str, str] | None = None
    network: str = ""
    classifier: str = ""
    hub_tags: tuple[str, ...] = ()
    hub_tags_without_labels: tuple[str, ...] = ()
    curves: tuple[str, ...] = ()
    is_probed: bool = False

    @property
    def length(self) -> str:
        """The key of the run's length."""
        return f"{self.unit}s"

    @property
    def network_files(self) -> tuple[str, ...]:
        """The files that hold the trained network."""
        return ("encoder.safetensors", "head.safetensors") if self.leaves_head else ("encoder.safetensors",)

    @property
    def config(self) -> "type[RunConfig]":
        """The dataclass of a run."""
        return import_module(f"{self.package}.config").CONFIG

    @property
    def training(self) -> "type[TrainingConfig]":
        """The dataclass of a run that trains."""
        from ssl_sec.recipes.config import TrainingConfig

        assert issubclass(self.config, TrainingConfig)
        return self.config

    @property
    def probes_itself(self) -> bool:
        """Whether a run can probe its encoder at its end, by its key `probe.enabled`."""
        return "probe" in signature(self.config).parameters

    @property
    def run(self) -> "Run":
        """The function that each worker calls with the configuration, its runtime, and the store of the results."""
        return import_module(f"{self.package}.recipe").run

    @property
    def draw(self) -> "Draw":
        """The function that draws the figures of a finished run, by the name of their file."""
        return import_module(f"{self.package}.figures").draw

    @property
    def draw_at_start(self) -> "Draw | None":
        """Likewise for those that exist from the first step of a run on; it draws none before. None: there are none."""
        return getattr(import_module(f"{self.package}.figures"), "draw_at_start", None)

    @property
    def measure(self) -> "Measure | None":
        """The function that computes what comparisons of finished runs need, by their names; None: nothing."""
        return getattr(import_module(f"{self.package}.figures"), "measure", None)

    @property
    def comparisons(self) -> "Mapping[str, ComparisonFigure]":
        """The comparisons of several runs that reports draw, beside curves."""
        common = {"norms": import_module("ssl_sec.figures.comparing").NORMS} if self.is_training else {}
        return {**common, **getattr(import_module(f"{self.package}.figures"), "COMPARISONS", {})}


PRETRAIN = RecipeRow(
    name="pretrain",
    about="Contrastive pretraining, with a linear probe if asked for.",
    package="ssl_sec.recipes.pretraining",
    examples=(
        ("experiment=digits runtime=local", "in seconds on a CPU"),
        ("data=folder data.root=<folder> data.image_size_px=64", "your images"),
        ("experiment=cifar10_sec_100 probe.enabled=true", "a row of SEC's Table 5"),
        ("data=folder encoder=timm --help", "the keys of some options"),
    ),
    score="val/knn_top1",
    score_without_labels="val/rankme",
    view_metrics=("probe/top1", "probe/knn_top1", "val/knn_top1", "val/probe_top1", "val/rankme"),
    tags=("probe.protocol",),
    paper_figure=("probe/top1", "top-1 %"),
    network="An image encoder, pretrained {labels} by a contrastive loss; {dim} features an image.",
    hub_tags=("contrastive-learning",),
    hub_tags_without_labels=("self-supervised-learning",),
    curves=("val/knn_top1",),
    is_probed=True,
)
PROBE = RecipeRow(
    name="probe",
    about="Linear evaluation of a pretrained or fine-tuned encoder.",
    package="ssl_sec.recipes.probing",
    examples=(
        ("run=<id>", "the run's own data set"),
        ("run=<id> data=cifar100 data.root=<folder>", "another one"),
    ),
    usage="run=<id, name or folder> [group=option ...] [key=value ...]",
    is_training=False,
    last_artifact="confusion.json",
    test_metrics=(
        "probe/top1",
        "probe/top5",
        "probe/knn_top1",
        "probe/logistic_top1",
        "probe/logistic_mean_per_class",
        "probe/few_shot_{labels}",
    ),
)
METRIC_LEARNING = RecipeRow(
    name="metric_learning",
    about="Deep metric learning, measured on classes that it has not seen.",
    package="ssl_sec.recipes.metric_learning",
    examples=(
        ("experiment=digits_retrieval runtime=local", "in under a minute on a CPU"),
        ("experiment=cars196_triplet_sec data.root=<folder>", "a row of SEC's Table 10"),
        ("data=folder encoder=timm --help", "the keys of some options"),
    ),
    unit="step",
    leaves_head=True,
    score="val/recall_at_1",
    view_metrics=("retrieval/recall_at_1", "retrieval/nmi", "val/recall_at_1"),
    tags=("loss",),
    paper_figure=("retrieval/recall_at_1", "R@1 %"),
    network="An embedding of images by deep metric learning, in {dim} dimensions: two images of one class should have "
    "a greater cosine than two of different classes, including classes that it was not trained on.",
    hub_tags=("metric-learning", "image-retrieval"),
    curves=("test/recall_at_1", "val/recall_at_1", "train/recall_at_1"),
)
FACE = RecipeRow(
    name="face",
    about="Face recognition, measured on test sets of verification and identification.",
    package="ssl_sec.recipes.face",
    examples=(
        ("experiment=casia_arcface_sec data.root=<folder>", "a row of SEC's Table 11"),
        ("data=folder encoder=ir50 --help", "the keys of some options"),
    ),
    leaves_head=True,
    score="val/verification_accuracy",
    view_metrics=("val/verification_accuracy", "train/verification_accuracy"),
    test_metrics=(
        "face/{test_set}_accuracy",
        "face/{test_set}_tar_at_far_{far}",
        "face/{test_set}_dir_at_far_{far}",
        "face/{test_set}_{size}_rank1",
    ),
    tags=("loss",),
    paper_figure=("face/lfw_accuracy", "LFW %"),
    network="An embedding of aligned faces in {dim} dimensions: two images of one person should have a greater cosine "
    "than two of different people, including people whom it was not trained on.",
    hub_tags=("metric-learning", "face-recognition"),
    curves=("val/verification_accuracy", "train/verification_accuracy"),
)

FINETUNE = RecipeRow(
    name="finetune",
    about="Fine-tuning of a trained encoder on few labels or all.",
    package="ssl_sec.recipes.finetuning",
    examples=(
        ("run=<id> labels_share=0.1", "all weights, on a tenth of the labels of the run's data set"),
        ("run=<id> data=cifar100 data.root=<folder> trained_stages=1", "the last stage, on other images"),
        ("experiment=digits_finetune run=<id> runtime=local", "in seconds on a CPU"),
        ("experiment=digits_finetune runtime=local", "the same network from random weights"),
    ),
    usage="[run=<id, name or folder>] [group=option ...] [key=value ...]",
    score="val/top1",
    view_metrics=("finetune/top1", "val/top1"),
    test_metrics=("finetune/top1", "finetune/top5", "finetune/mean_per_class"),
    tags=("labels", "start"),
    paper_figure=("finetune/top1", "top-1 %"),
    network="An image encoder, trained as the features of a classifier; {dim} features an image.",
    classifier="A classifier of images into {dim} classes: its output is a logit for each, in the order of "
    "classes.json. Their softmax gives the probabilities.",
    hub_tags=("image-classification",),
    curves=("val/top1", "train/top1"),
    is_probed=True,
)

RECIPES: Mapping[str, RecipeRow] = {row.name: row for row in (PRETRAIN, PROBE, FINETUNE, METRIC_LEARNING, FACE)}

# Metrics on held-out training images that rank checkpoints and models: the first that a run has, label-free ones last.
LABEL_FREE_SCORES = tuple(row.score_without_labels for row in RECIPES.values() if row.score_without_labels is not None)
SCORES = (*(row.score for row in RECIPES.values() if row.score is not None), *LABEL_FREE_SCORES)


def trainings() -> tuple[str, ...]:
    """The names of the recipes that train an encoder."""
    return tuple(name for name, row in RECIPES.items() if row.is_training)


def require_training(name: str) -> None:
    """Raises a ConfigError that names the key `job` if no such recipe trains an encoder."""
    if name not in trainings():
        raise ConfigError(f"job: found {name!r}; {nearest(name, trainings())}")


def probed() -> tuple[str, ...]:
    """The names of the recipes whose encoders linear probes evaluate."""
    return tuple(name for name, row in RECIPES.items() if row.is_probed)


def compared_metrics() -> tuple[str, ...]:
    """The metrics by which tables and plots compare runs of any recipe: those of trained networks first."""
    rows = RECIPES.values()
    return tuple(dict.fromkeys(chain(*(row.test_metrics for row in rows), *(row.view_metrics for row in rows))))
