"""Writes the model card of an exported network, with the metrics and the origin of its run."""

import platform
from collections.abc import Iterable, Mapping, Sequence

import yaml
from mlflow.entities import Run
from mlflow.utils.mlflow_tags import MLFLOW_GIT_COMMIT

from ssl_sec import __version__
from ssl_sec.edges.export.public import (
    described_data,
    described_measurement,
    described_probe,
    hub_datasets,
    newest_of_each_protocol,
    public_settings,
)
from ssl_sec.edges.folder.record import data_of
from ssl_sec.edges.tables import in_markdown
from ssl_sec.edges.tracking.provenance import DIRTY_TAG
from ssl_sec.edges.tracking.tracker import current_parameters
from ssl_sec.errors import counted, printable
from ssl_sec.exporting import Exportable, Format, versions
from ssl_sec.exporting.checking import Check
from ssl_sec.exporting.mirrored import combining
from ssl_sec.exporting.reading import reading
from ssl_sec.metrics import known_metrics
from ssl_sec.recipes.registry import RECIPES
from ssl_sec.recipes.tracking import Checkpoint

_RECIPE_KEYS = (
    "recipe",
    "seed",
    "epochs",
    "steps",
    "global_batch_size",
    "positives",
    "loss.",
    "constraint.",
    "grad_scale",
    "cut_init",
    "encoder.",
    "head.",
    "transform.",
    "augment.",
    "sampler.",
    "labels_",
    "start_labels",
    "held_out_share",
    "test_share",
    "trained_stages",
    "mixup",
    "evaluated",
    "evaluation.",
    "optimiser.",
)
# Of the training's last step, not of the network.
_LEFT_OUT = ("train/eta", "train/lr", "train/epoch", "train/images_per_s")
_UNPROBED = "The encoder was not evaluated by a linear probe."


def model_card(
    run: Run,
    probes: Sequence[Run] | None,
    form: Format,
    exportable: Exportable,
    check: Check,
    *,
    has_learned_labels: bool = False,
    checkpoint: Checkpoint | str = "last",
    license: str | None = None,
    hub_name: str | None = None,
) -> str:
    """Markdown with the Hugging Face Hub's metadata block.

    Args:
        run: the training run.
        probes: probes of this encoder, newest first; None if they are unknown.
        form: format of the files.
        exportable: the encoder.
        check: check of the files.
        has_learned_labels: whether the encoder has learned from labels.
        checkpoint: the checkpoint, or the registered version, whose weights the files have.
        license: license of the weights, by the Hub's name for it; None if it is not known.
        hub_name: owner and name of the repository that the files are pushed to; None for a folder.
    """
    parameters = current_parameters(run)
    recipe, group = RECIPES[run.data.tags["job"]], parameters.get("recipe", run.data.tags.get("recipe", "custom"))
    inputs = [] if (trained_on := data_of(run)) is None else [trained_on]
    described, task = recipe.network, "image-feature-extraction"
    if exportable.class_names:
        described, task = recipe.classifier, "image-classification"
    metadata = {
        **({} if license is None else {"license": license}),
        "library_name": form.library_of(exportable),
        "pipeline_tag": task,
        "tags": list(
            dict.fromkeys(
                [
                    *(() if has_learned_labels else recipe.hub_tags_without_labels),
                    *recipe.hub_tags,
                    task,
                    form.name,
                ]
            )
        ),
        **({"datasets": ids} if (ids := hub_datasets(inputs)) else {}),
        **({"metrics": ["accuracy"]} if probes or "val/knn_top1" in _own_metrics(run, checkpoint) else {}),
    }
    sections = {
        "Input": _input(form, exportable),
        "Use": _use(form, exportable, hub_name),
        "Results": [_results(run, probes, checkpoint), *_combined(parameters, form, exportable, checkpoint)],
        "Check of this export": [_passed(check, form), *check.remarks],
        "Data": ["\n".join(f"- {printable(described_data(data))}" for data in inputs) or "MLflow has no record."],
        "Recipe": [_table(("key", "value"), public_settings(parameters, _RECIPE_KEYS).items())],
        "Origin": [_table(("what", "value"), _origin(run, parameters, form, checkpoint).items())],
    }
    parts = [
        f"---\n{yaml.safe_dump(metadata, sort_keys=False)}---",
        f"# {printable(group)}: {printable(exportable.architecture.title)}",
        described.format(dim=exportable.dim, labels=f"with{'' if has_learned_labels else 'out'} labels"),
    ]
    for title, paragraphs in sections.items():
        parts += [f"## {title}", *paragraphs]
    return "\n\n".join(parts) + "\n"


def _input(form: Format, exportable: Exportable) -> list[str]:
    channels, height, width = exportable.image_shape
    described = (
        f"float32 [batch, {channels}, {height}, {width}], pixels in [0, 1], any batch size; the training images had "
        f"{height} x {width} pixels. {form.input_contract(exportable)} Output: float32 [batch, {exportable.dim}]."
    )
    code = reading(exportable, form.takes_numpy)
    more = [] if code is None else ["The lines that make `images` of a file:", f"```python\n{code}\n```"]
    return [described, *more]


def _use(form: Format, exportable: Exportable, hub_name: str | None) -> list[str]:
    download = f"```bash\nhf download {hub_name} --local-dir encoder && cd encoder\n```"
    return [
        *([] if hub_name is None else [download]),
        f"In this folder, with `images` as {'a numpy array' if form.takes_numpy else 'a torch tensor'}:",
        f"```python\n{form.loading(exportable)}\n{form.use(exportable)}\n```",
    ]


def _passed(check: Check, form: Format) -> str:
    return (
        "Loaded by the code above in a process without the package that trained it, with "
        f"{counted(check.num_images, 'image')} of its data at once and with one alone: the output differs from the "
        "trained network's by at most "
        f"{check.largest_difference:.3g}. Values are up to {check.largest_value:.3g}; {check.allowed:.3g} "
        f"({form.tolerance:g} of that) is allowed."
    )


def _origin(run: Run, parameters: Mapping[str, str], form: Format, checkpoint: Checkpoint | str) -> dict[str, object]:
    tags = run.data.tags
    used = {"ssl_sec": __version__, **versions(form), "Python": platform.python_version()}
    return {
        "MLflow run": run.info.run_id,
        "run name": run.info.run_name,
        **({} if checkpoint == "last" else {"checkpoint": checkpoint}),
        "seed": parameters.get("seed", "unknown"),
        "commit": tags.get(MLFLOW_GIT_COMMIT, "unknown"),
        "code changed since the commit": tags.get(DIRTY_TAG, "unknown"),
        "trained with ssl_sec": tags.get("ssl_sec.version", "unknown"),
        "exported with": ", ".join(f"{name} {version}" for name, version in used.items()),
    }


def _results(run: Run, probes: Sequence[Run] | None, checkpoint: Checkpoint | str) -> str:
    # Metrics of probes are copied from its probes.
    own = {key: value for key, value in _own_metrics(run, checkpoint).items() if not key.startswith("probe")}
    rows = [(described_measurement(run, name), *row) for name, *row in _metric_rows(own)]
    for probe in newest_of_each_protocol(probes or ()):
        rows += [(described_probe(probe), *row) for _, *row in _metric_rows(probe.data.metrics)]
    remark = ""
    if not probes and RECIPES[run.data.tags["job"]].is_probed:
        remark = "MLflow could not be asked for linear probes." if probes is None else _UNPROBED
        remark += "\n\n"
    if not rows:
        return f"{remark}Not evaluated."
    return f"{remark}The last value of each metric:\n\n{_table(('measured by', 'metric', 'value'), rows)}"


def _combined(
    parameters: Mapping[str, str], form: Format, exportable: Exportable, checkpoint: Checkpoint | str
) -> list[str]:
    """How the scores of faces were measured, where the code of the card alone does not compute that."""
    if checkpoint != "last":  # the card then has no such scores
        return []
    flips, pca = parameters.get("evaluation.flips", "none"), parameters.get("evaluation.pca", "None")
    found: list[str] = []
    if flips in ("sum_of_directions", "sum_of_embeddings"):
        added = "directions of the embeddings" if flips == "sum_of_directions" else "embeddings"
        found += [
            f"The scores are those of the sum of the {added} of each image and its mirror image, which the code above "
            "does not compute. These lines do:",
            f"```python\n{combining(form, exportable, flips)}\n```",
        ]
    if pca != "None":
        found.append(
            f"For pairs, videos and BLUFR, embeddings were reduced to {pca} principal components, which were fitted "
            "on other images of the same set and are not in the files."
        )
    return found


def _own_metrics(run: Run, checkpoint: Checkpoint | str) -> Mapping[str, float]:
    """The last metrics of a training, which are those of its last weights."""
    if checkpoint != "last":
        return {}
    # Of a fine-tuning whose best epoch was saved, this is of the last epoch.
    chosen = {"val/top1", "val/mean_per_class"} if "finetune/val_top1" in run.data.metrics else set[str]()
    return {name: value for name, value in run.data.metrics.items() if name not in chosen}


def _metric_rows(metrics: Mapping[str, float]) -> list[tuple[str, str, str]]:
    """The name of each metric, its meaning and its value."""
    known = known_metrics(name for name in metrics if name not in _LEFT_OUT)
    shown = [(name, found) for name, found in known if found.is_result or not name.startswith("probe/")]
    return [(name, f"{found.meaning} (`{name}`)", f"{metrics[name]:.4g}") for name, found in shown]


def _table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    return in_markdown(header, *([printable(str(cell)) for cell in row] for row in rows))
