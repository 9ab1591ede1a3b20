"""A comparison of two runs: settings, last values and curves."""

import math
from collections.abc import Mapping
from typing import Any

from ssl_sec.edges.report.files import Report
from ssl_sec.edges.tables import in_markdown, in_table
from ssl_sec.edges.tracking.runs import ArchivedRun, RunArchive
from ssl_sec.edges.tracking.tracker import MACHINES
from ssl_sec.figures.training import Curve, compared_curves_figure
from ssl_sec.metrics import known_metrics

_NONE = "-"


def compare_runs(archive: RunArchive, first: str, second: str, *, shows_all: bool) -> Report:
    """Makes a report that compares two runs.

    Raises:
        ConfigError: for a run that does not exist or is ambiguous.
        StorageError: if the store cannot be used.
    """
    runs = archive.find(first, "compare"), archive.find(second, "compare")
    names = _make_names(*runs)
    settings = _compare_settings(*runs, shows_all=shows_all)
    metrics = _compare_metrics(*runs)
    title = f"{names[0]} and {names[1]}"
    overview = [
        ["run id", *(run.run_id for run in runs)],
        ["state", *(run.status for run in runs)],
        ["recipe", *(run.recipe or _NONE for run in runs)],
    ]
    blocks = {
        "": (["", *names], overview),
        "settings" if shows_all else "settings that differ": (["setting", *names], settings or [["none", "", ""]]),
        "last values": (["metric", *names, "difference"], metrics),
    }
    text = [title]
    markdown = [f"## {title}"]
    for heading, (header, lines) in blocks.items():
        text += ["", *([f"{heading}:"] if heading else []), in_table(header, *lines)]
        markdown += ["", *([f"### {heading.capitalize()}", ""] if heading else []), in_markdown(header, *lines)]
    return Report(
        name=f"compare-{runs[0].run_id[:8]}-{runs[1].run_id[:8]}",
        text="\n".join(text),
        markdown="\n".join(markdown),
        rows=_make_rows(*runs),
        figure=compared_curves_figure(_load_panels(archive, dict(zip(names, runs, strict=True))), title),
    )


def _make_names(first: ArchivedRun, second: ArchivedRun) -> tuple[str, str]:
    """Returns the runs' names, with their ids if the names are equal or missing."""
    if first.name != second.name and first.name and second.name:
        return first.name, second.name
    return f"{first.name} {first.run_id[:8]}".strip(), f"{second.name} {second.run_id[:8]} ".strip()


def _compare_settings(first: ArchivedRun, second: ArchivedRun, *, shows_all: bool) -> list[list[str]]:
    keys = sorted(first.params.keys() | second.params.keys())
    pairs = [(key, first.params.get(key, _NONE), second.params.get(key, _NONE)) for key in keys]
    return [[key, mine, other] for key, mine, other in pairs if shows_all or mine != other]


def _compare_metrics(first: ArchivedRun, second: ArchivedRun) -> list[list[str]]:
    lines: list[list[str]] = []
    for key in sorted(first.metrics.keys() | second.metrics.keys()):
        mine, other = first.metrics.get(key), second.metrics.get(key)
        difference = "" if mine is None or other is None else f"{other - mine:+.4g}"
        lines.append([key, *(_NONE if value is None else f"{value:.4g}" for value in (mine, other)), difference])
    return lines


def _load_panels(archive: RunArchive, runs: Mapping[str, ArchivedRun]) -> dict[str, dict[str, Curve]]:
    """Loads metric -> run -> curve, loss and scores first, for metrics with more than one point.

    Left out are the epoch and the utilisation of machines, whose steps are numbers of samples.
    """
    panels: dict[str, dict[str, Curve]] = {}
    found = {key for run in runs.values() for key in run.metrics}
    keys = {key for key in found if not key.endswith("/epoch") and not key.startswith(MACHINES)}
    results_first = sorted(known_metrics(keys), key=lambda known: not known[1].is_result)
    places = {key: place for place, (key, _) in enumerate(results_first)}
    for key in sorted(keys, key=lambda key: (places.get(key, len(places)), key)):
        histories = {name: archive.history(run, key) for name, run in runs.items() if key in run.metrics}
        if max(map(len, histories.values())) > 1:
            panels[key] = {
                name: Curve([step for step, _ in points], [value for _, value in points])
                for name, points in histories.items()
                if any(math.isfinite(value) for _, value in points)
            }
    return panels


def _make_rows(first: ArchivedRun, second: ArchivedRun) -> list[dict[str, Any]]:
    def compare(kind: str, mine: Mapping[str, Any], other: Mapping[str, Any]) -> list[dict[str, Any]]:
        keys = sorted(mine.keys() | other.keys())
        pairs = [{"kind": kind, "key": key, "first": mine.get(key), "second": other.get(key)} for key in keys]
        return [{**pair, "equal": pair["first"] == pair["second"]} for pair in pairs]

    return [
        *compare("run", {"id": first.run_id}, {"id": second.run_id}),
        *compare("setting", first.params, second.params),
        *compare("metric", first.metrics, second.metrics),
    ]
