"""The model card of an exported network, from what MLflow knows of its run."""

import json
import platform
from collections.abc import Iterable, Mapping, Sequence

import yaml
from mlflow.entities import Run
from mlflow.utils.mlflow_tags import MLFLOW_GIT_COMMIT

from ssl_sec import __version__
from ssl_sec.edges.run.summary import FIGURES
from ssl_sec.edges.tracking.provenance import DIRTY_TAG
from ssl_sec.errors import printable
from ssl_sec.exporting import Exportable, Format, versions
from ssl_sec.exporting.checking import Check
from ssl_sec.recipes.registry import RECIPES

_RECIPE_KEYS = (
    "recipe",
    "seed",
    "epochs",
    "global_batch_size",
    "loss.",
    "constraint.",
    "encoder.",
    "head.",
    "augment.",
    "optimiser.",
)
_FIGURES = {
    **FIGURES,
    "train/metric_loss": "the loss without the constraint",
    "train/constraint": "the constraint",
    "train/norm_mean": "mean norm of the embeddings",
    "train/norm_std": "standard deviation of the norms",
}
_UNPROBED = "The encoder was not evaluated by a linear probe."


def model_card(run: Run, probes: Sequence[Run] | None, form: Format, exportable: Exportable, check: Check) -> str:
    """Markdown with the Hugging Face Hub's metadata block.

    Args:
        run: the training.
        probes: of its encoder, newest first; None if they are not known.
        form: of the files.
        exportable: the encoder.
        check: what reading the files back gave.
    """
    tags, parameters = run.data.tags, run.data.params
    group = parameters.get("recipe", tags.get("recipe", "custom"))
    recipe = RECIPES[tags["job"]]
    inputs = [item.dataset for item in run.inputs.dataset_inputs] if run.inputs else []
    channels, height, width = exportable.image_shape
    metadata = {
        "library_name": form.library,
        "pipeline_tag": "image-feature-extraction",
        "tags": [*recipe.hub_tags, "image-feature-extraction", form.name],
        **({"datasets": list(dict.fromkeys(data.name.partition("/")[0] for data in inputs))} if inputs else {}),
        **({"metrics": ["accuracy"]} if probes or "val/knn_top1" in run.data.metrics else {}),
    }
    kept = {key: value for key, value in sorted(parameters.items()) if key.startswith(_RECIPE_KEYS)}
    parts = [
        f"---\n{yaml.safe_dump(metadata, sort_keys=False)}---",
        f"# {_cell(group)}: {_cell(exportable.architecture.title)}",
        recipe.network.format(exportable.dim),
        "## Input",
        f"float32 [batch, {channels}, {height}, {width}], pixels in [0, 1], any batch size; the images of the training "
        f"had {height} x {width} pixels. {form.input_contract(exportable)} Output: float32 [batch, {exportable.dim}].",
        "## Use",
        f"In this folder, with `images` as {'a numpy array' if form.takes_numpy else 'a torch tensor'}:",
        f"```python\n{form.loading(exportable)}\n{form.use(exportable)}\n```",
        "## Results",
        _results(run, probes),
        "## Check of this export",
        f"Read back by the lines above in a process without the package that trained it, on {check.num_images} images "
        "of its data at once and on one alone: the largest difference of a value from the trained network's is "
        f"{check.largest_difference:.3g}. Values are up to {check.largest_value:.3g}; {check.allowed:.3g} "
        f"({form.tolerance:g} of that) was allowed.",
        "## Data",
        "\n".join(_told_of_data(data.name, data.source, data.profile) for data in inputs) or "MLflow has no record.",
        "## Recipe",
        _table(("key", "value"), kept.items()),
        "## Origin",
        _table(
            ("what", "value"),
            {
                "MLflow run": run.info.run_id,
                "run name": run.info.run_name,
                "seed": parameters.get("seed", "unknown"),
                "commit": tags.get(MLFLOW_GIT_COMMIT, "unknown"),
                "code changed since the commit": tags.get(DIRTY_TAG, "unknown"),
                "trained with ssl_sec": tags.get("ssl_sec.version", "unknown"),
                "exported with": ", ".join(
                    f"{name} {version}"
                    for name, version in {
                        "ssl_sec": __version__,
                        **versions(form),
                        "Python": platform.python_version(),
                    }.items()
                ),
            }.items(),
        ),
    ]
    return "\n\n".join(parts) + "\n"


def _results(run: Run, probes: Sequence[Run] | None) -> str:
    own = {
        key: value for key, value in run.data.metrics.items() if not key.startswith("probe")
    }  # those are its probes'
    rows = [("training", *row) for row in _figures(own)]
    for probe in probes or ():
        labels = probe.data.params.get("probe.labels_per_class", "None")
        what = f"probe {probe.info.run_id[:8]}, {'all labels' if labels == 'None' else f'{labels} labels a class'}"
        rows += [(what, *row) for row in _figures(probe.data.metrics)]
    told = ""
    if not probes and RECIPES[run.data.tags["job"]].is_probed:
        told = "MLflow was not asked for linear probes." if probes is None else _UNPROBED
        told += "\n\n"
    if not rows:
        return f"{told}Not evaluated."
    return f"{told}Last values of each figure:\n\n{_table(('run', 'figure', 'value'), rows)}"


def _figures(metrics: Mapping[str, float]) -> list[tuple[str, str]]:
    told = {f"{label} (`{key}`)": metrics[key] for key, label in _FIGURES.items() if key in metrics}
    told |= {f"`{key}`": value for key, value in sorted(metrics.items()) if key.startswith("face/")}
    return [(label, f"{value:.4g}") for label, value in told.items()]


def _told_of_data(name: str, source: str, profile: str | None) -> str:
    counts = json.loads(profile) if profile else {}
    told = "".join(f", {value} {key.replace('_', ' ')}" for key, value in counts.items())
    return f"- {_cell(name)}: {_cell(source)}{told}"


def _table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(_cell(cell) for cell in line)} |" for line in lines)


def _cell(value: object) -> str:
    return printable(str(value)).replace("|", "\\|")
