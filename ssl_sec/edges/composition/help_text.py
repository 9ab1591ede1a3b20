"""What a job prints for `--help`: examples, experiments, groups, and every key of the options that are chosen."""

import re
import shutil
import textwrap
from collections.abc import Mapping, Sequence
from itertools import groupby, zip_longest
from typing import Any

from ssl_sec import papers
from ssl_sec.edges.composition.compose import (
    chosen_experiment,
    chosen_options,
    composed,
    config_of,
    experiments,
    options_of,
    refusal_of_key,
)
from ssl_sec.edges.composition.config_folders import CONFIG_FOLDER, OPTION, ConfigFile
from ssl_sec.edges.composition.experiments import Experiment, as_typed, explanations, load, value_text
from ssl_sec.edges.composition.keys import (
    OF,
    Key,
    keys_of,
    keys_of_entry,
    kind_of,
    listed_kinds,
    summary_of,
    unknown_keys,
)
from ssl_sec.edges.composition.options import EXPERIMENT
from ssl_sec.edges.packaging import command
from ssl_sec.errors import ConfigError
from ssl_sec.recipes.registry import PRETRAIN, RECIPES

_FIRST_GROUPS = ("data", "runtime")
_WITHOUT_OPTIONS = ("align", "replay", "report")
# The column in which explanations of keys begin.
_COLUMN = 38
# A range in an explanation, which the allowed values repeat.
_RANGE = re.compile(r", (?:in [(\[][-\d., ]+[)\]]|[≥>] [-\d.]*\d)(?=[;.]|$)")
# A space at which no line is broken.
_FIXED = "\N{NO-BREAK SPACE}"
_USAGES: Mapping[str, str] = {
    "ablate": "[group=option ...] [key=value ...]",
    "align": "images=<folder> landmarks=<csv> output=<folder>",
    "embed": "run=<id, name or folder> output=<folder or URL> [group=option ...] [key=value ...]",
    "export": "run=<id, name or folder> format=<format> [key=value ...]",
    "preview": "[group=option ...] [key=value ...]",
    "neighbours": "embeddings=<folder or URL> output=<folder or URL> [key=value ...]",
    "replay": "folder=<the run's folder>",
    "select": "embeddings=<folder or URL> output=<folder or URL> count=<number> [key=value ...]",
    "study": "study=<name or file> [group=option ...] [key=value ...]",
    "transfer": "run=<id, name or folder> 'sets=[...]' [key=value ...]",
    "tune": "experiment=<name> '<key>=interval(<low>,<high>)' '<key>=choice(<a>,<b>)' [key=value ...]",
    "report": "table=<n> | figure=<n> | compare <run> <run> [...]",
}
_EXAMPLES: Mapping[str, Sequence[tuple[str, str]]] = {
    "ablate": (
        ("experiment=digits runtime=local", "random, none and SEC, in a minute or two on a CPU"),
        ("experiment=cifar10_cpu 'seeds=[0,1,2]' 'arms=[none,sec]'", "mean and spread of three seeds"),
        ("experiment=digits_retrieval runtime=local 'arms=[loss=triplet,loss=circle]'", "two losses for retrieval"),
        ("job=face --help", "the keys of another training"),
    ),
    "align": (("images=lfw landmarks=points.csv output=lfw_aligned", "faces of 112 x 112 pixels"),),
    "embed": (
        ("run=<id> output=embeddings", "the training images of the run"),
        ("run=<id> output=s3://bucket/photos data=folder data.root=<folder>", "your images, into object storage"),
    ),
    "export": (
        ("run=<id> format=safetensors", "weights, and the Python that loads them"),
        ("run=<id> format=onnx output=encoder", "an ONNX graph, in the folder encoder"),
    ),
    "neighbours": (
        ("embeddings=embeddings output=neighbours", "what jobs.embed wrote; open neighbours/index.html"),
        ("embeddings=embeddings output=leaks duplicates_above=0.9 k=1", "pairs of training and test images, too"),
        ("embeddings=embeddings queries=photos.parquet output=found", "those nearest to other images"),
    ),
    "preview": (
        ("experiment=digits", "some digits with their views"),
        ("data=folder data.root=<folder> data.image_size_px=64", "your images"),
        ("data=folder data.root=<folder> data.image_size_px=64 augment.min_scale=0.5", "larger crops"),
    ),
    "replay": (("folder=runs/digits/<name>", "after an outage of the MLflow server"),),
    "select": (
        ("embeddings=embeddings output=selected count=200", "what jobs.embed wrote; open selected/index.html"),
        (
            "embeddings=embeddings output=more count=200 'labelled=[selected/selected.csv]'",
            "200 more, in other regions",
        ),
    ),
    "study": (
        ("study=digits concurrent=2", "SEC and others beside NT-Xent, five seeds, in some minutes on a CPU"),
        ("study=digits run=false", "what there is so far"),
        ("study=mine.yaml cells=mine.csv", "your own study; its metrics in a file that continues it anywhere"),
    ),
    "transfer": (
        ("run=<id> 'sets=[digits]'", "a set by its name"),
        ("run=<id> 'sets=[{name: cifar10, root: <folder>},{name: folder, root: <photos>}]'", "with the keys of each"),
    ),
    "tune": (
        ("experiment=digits 'optimiser.learning_rate=tag(log,interval(0.03,3))'", "one key, by its logarithm"),
        ("experiment=cifar10_cpu 'loss.temperature=interval(0.1,0.7)' 'constraint=choice(none,sec)'", "two keys"),
        ("experiment=digits_retrieval 'constraint.eta=tag(log,interval(0.01,1))'", "a key of metric learning"),
    ),
    "report": (
        ("table=5", "our results beside a table of the paper; paper=angular for another"),
        ("figure=6 'recipes=[a,b]'", "a figure of a paper, drawn from our runs"),
        ("compare <run> <run>", "two runs side by side, by id, name or the beginning of one"),
    ),
}
_EXIT_CODES = "Exit codes: 0, 2 configuration, 3 data, 4 storage, 130 stopped, 1 failed."


def help_text(job: str, overrides: Sequence[str]) -> str:
    """The help of a job.

    Args:
        job: name of the job.
        overrides: the overrides given with `--help`; they choose the options whose keys are explained.

    Raises:
        ConfigError: for an override that the job would refuse.
    """
    config = config_of(job, overrides)
    values, options = composed(config, overrides), chosen_options(config, overrides)
    experiment = chosen_experiment(config, overrides)
    for key in unknown_keys(kind_of(config), values):  # added, as by +key=value
        raise ConfigError(refusal_of_key(config, key, values))
    sections = [_head(job), _choices(job)]
    if EXPERIMENT in options:
        sections.append(_experiments(config) if experiment is None else _chosen(experiment))
    sections += [_groups(config, options), _keys(config, values, options), _entries(config, values), _EXIT_CODES]
    return "\n\n".join(section for section in sections if section)


def _head(job: str) -> str:
    program, recipe = command(job), RECIPES.get(job)
    flags = {
        "--help": "explains the keys of the options that stand beside it",
        "--cfg job": "prints the configuration and stops",
    }
    if job not in _WITHOUT_OPTIONS:
        flags[f"{OPTION} <folder>"] = "takes experiments and options of yours, too, as from a folder ./configs"
    lines = [f"usage: {program} {_USAGES[job] if recipe is None else recipe.usage}", "", *_listed(flags)]
    about = ConfigFile(path=CONFIG_FOLDER / f"{job}.yaml", is_own=False).explanation.partition(": python")[0]
    given = _EXAMPLES[job] if recipe is None else recipe.examples
    examples = [line for example, why in given for line in (f"  {why}:", f"    {program} {example}")]
    return "\n".join([*lines, "", *_wrapped(f"{about}.", ""), "", "examples:", *examples])


def _choices(job: str) -> str:
    """The values of one key with their descriptions, for jobs that have such a key."""
    if job == "export":
        # Not for the other jobs to import.
        from ssl_sec.exporting import FORMATS

        explained = {
            name: f"{str(form.__doc__).splitlines()[0]} Needs {', '.join(form.packages)}."
            for name, form in FORMATS.items()
        }
        return "\n".join(["format=", *_listed(explained)])
    if job == "report":
        found = {name: papers.load(name) for name in papers.list_papers()}
        explained = {
            name: f"{paper.title} ({paper.reference}); tables {', '.join(str(table.number) for table in paper.tables)}"
            for name, paper in found.items()
        }
        return "\n".join(["paper=", *_listed(explained)])
    return ""


def _experiments(job: str) -> str:
    """All experiments by the file that defines them; those of a paper's table have the paper's figure."""
    alone: dict[str, str] = {}
    tables: dict[str, list[str]] = {}
    metric, figure = RECIPES.get(job.rpartition(OF)[2], PRETRAIN).paper_figure or ("", "")
    for name, explanation in experiments(job).items():
        experiment = load(name)
        assert experiment is not None
        if experiment.is_row:
            value = papers.find_reported(name).get(metric)
            tables.setdefault(experiment.file.explanation, []).append(
                name if value is None else f"{name} {value_text(value)}".replace(" ", _FIXED)
            )
        else:
            alone[name] = explanation
    lines = ["experiment=", *_listed(alone)]
    for title, cells in tables.items():
        lines += [
            "",
            *_wrapped(f"{title.rstrip('.')} (the paper's {figure}):", "  "),
            *_wrapped(", ".join(cells), "    "),
        ]
    return "\n".join(lines)


def _chosen(experiment: Experiment) -> str:
    """The comment in the file of an experiment."""
    comment = experiment.file.comment
    if experiment.is_row:
        comment = [*comment[:1], explanations()[experiment.name]]
    lines = [line for text in comment for line in _wrapped(text, "  ", hanging="            ") or [""]]
    return "\n".join([f"experiment={experiment.name}, of {experiment.file.shown}", *lines])


def _groups(job: str, options: Mapping[str, str]) -> str:
    """The groups with their options; the chosen ones are marked."""
    lines: list[str] = []
    for group, names in sorted(options_of(job).items(), key=lambda item: (item[0] not in _FIRST_GROUPS, item[0])):
        if group != EXPERIMENT:
            lines += [f"{group}=", *_listed(names, options[group])]
    return "\n".join(["groups, with * where an option is chosen:", "", *lines]) if lines else ""


def _keys(job: str, values: Mapping[str, Any], options: Mapping[str, str]) -> str:
    """Every key with its value and explanation, those of a group under its option."""
    sections: dict[str, list[Key]] = {"": []}
    for key in keys_of(kind_of(job), values):
        group = key.name.partition(".")[0] if "." in key.name else ""
        sections.setdefault(group, []).append(key)
    lines = ["keys, with the values that they have now:"]
    for group, keys in sections.items():
        if keys:
            title = f"{group}={options[group]}" if group in options else group
            lines += ["", *([title] if title else []), *(line for key in keys for line in _key(key))]
    return "\n".join(lines)


def _entries(job: str, values: Mapping[str, Any]) -> str:
    """The keys of the entries that a list may hold; those that an earlier entry has alike are only named."""
    lines: list[str] = []
    for name in values:
        earlier: list[Key] = []
        for place, kind in enumerate(listed_kinds(kind_of(job), name)):
            keys = keys_of_entry(kind)
            (named,) = [key for key in keys if key.name == "name"]
            chosen = named.allowed if named.value == "???" else as_typed(named.value)
            if place == 0:
                lines += [f"{name}=[{{name: {chosen}, ...}}, ...] is a list of:"]
            alike, new = ([key for key in keys if (key in earlier) == known] for known in (True, False))
            shared = f" As above: {', '.join(key.name for key in alike)}." if alike else ""
            lines += ["", *_wrapped(f"{{name: {chosen}}}  {summary_of(kind)}{shared}", "  ")]
            lines += [line for key in new if key.name != "name" for line in _key(key, ": ")]
            earlier += new
    return "\n".join(lines)


def _key(key: Key, between: str = "=") -> list[str]:
    is_needed = key.value == "???"
    shown = f"  {key.name}{between}{'<needed>' if is_needed else as_typed(key.value)}"
    explanation = _RANGE.sub("", key.explanation) if re.search("[<>≤≥]", key.allowed) else key.explanation
    text = f"{explanation.rstrip('.')} [{key.allowed}]"
    if len(shown) > _COLUMN - 2:
        return [shown, *_wrapped(text, " " * _COLUMN)]
    first, *rest = _wrapped(text, " " * _COLUMN)
    return [f"{shown:<{_COLUMN}}{first.strip()}", *rest]


def _listed(explained: Mapping[str, str], chosen: str | None = None) -> list[str]:
    """Names with their explanations; names that follow each other share one that they have in common."""
    width = max(map(len, explained), default=0)
    lines: list[str] = []
    for explanation, names in groupby(explained, key=lambda name: explained[name]):
        wrapped = [line.strip() for line in _wrapped(explanation, " " * (width + 6))]
        for name, line in zip_longest(names, wrapped, fillvalue=""):
            lines.append(f"  {'*' if name and name == chosen else ' '} {name:<{width}}  {line}".rstrip())
    return lines


def _wrapped(text: str, indent: str, hanging: str | None = None) -> list[str]:
    # A sign stays on the line of its number.
    lines = textwrap.wrap(
        re.sub(r"([<>≤≥]) (?=[-\d])", rf"\1{_FIXED}", text),
        min(100, max(80, shutil.get_terminal_size().columns)),
        initial_indent=indent,
        subsequent_indent=indent if hanging is None else hanging,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [line.replace(_FIXED, " ") for line in lines]
