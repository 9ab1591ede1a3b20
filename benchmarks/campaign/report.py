"""The documentation's numbers of GPUs, made from a campaign's results, so that no number is copied by hand.

Only the text between `<!-- campaign: <name> -->` and `<!-- end -->` is replaced.
"""

import json
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.campaign.cells import keep_cells
from benchmarks.campaign.recipes import EXPERIMENTS, OPEN, load_trials
from benchmarks.campaign.scale import FULL
from benchmarks.campaign.sheet import COMMITTED
from benchmarks.campaign.study import LONG, LONG_EPOCHS, SEARCHED
from ssl_sec.edges.study.cells import KeptCell
from ssl_sec.edges.study.comparison import Comparison
from ssl_sec.edges.tables import in_markdown, mean_and_std
from ssl_sec.errors import ConfigError
from ssl_sec.papers import find_reported

ROOT = Path(__file__).parents[2]
# The pages with numbers of a campaign.
PAGES = ("benchmarks/README.md", "benchmarks/LOG.md", "docs/results.md", "docs/study.md")
NOT_YET = "not yet run"
NETWORKS = {"resnet50": "ResNet-50", "resnet18": "ResNet-18"}
ARMS = {
    "ntxent": "NT-Xent",
    "sec": "NT-Xent + SEC",
    "sec_ema": "NT-Xent + SEC-EMA",
    "l2reg": "NT-Xent + L²-reg",
    "ntxent_tuned": "NT-Xent, tuned",
    "sec_tuned": "NT-Xent + SEC, tuned",
    "dcl_tuned": "DCL, tuned",
}
# Images per second at batch 256, and the allowed difference of an accuracy from the paper's, in points.
GOALS, WITHIN = {"resnet50": 10_000, "resnet18": 35_000}, 0.5
BATCHES = (256, 1024)

Results = Mapping[str, Mapping[str, Any]]


def report(folder: Path, root: Path = ROOT, committed: Path = COMMITTED) -> int:
    """Copies a campaign's results into the repository and writes the regions; returns the exit code.

    A part that is not done does not replace one that is.

    Args:
        folder: the campaign's folder, or its results; those in the repository write the regions again.
        root: the repository.
        committed: the folder of the results in the repository.

    Raises:
        ConfigError: the folder has no results, or is a rehearsal.
    """
    found = folder / "results" if (folder / "results").is_dir() else folder
    results = read(found)
    is_committed = found.resolve() == committed.resolve()
    if not results and not is_committed:
        raise ConfigError(f"--report: {folder} has no results; allowed: the --output of a campaign")
    if any(each.get("rehearsal") for each in results.values()):
        raise ConfigError(f"--report: {folder} is a rehearsal; its numbers are not results")
    if not is_committed:
        committed.mkdir(parents=True, exist_ok=True)
        kept = read(committed)
        for name, result in results.items():
            if kept.get(name, {}).get("state") == "done" and result.get("state") != "done":
                print(f"{name}: {result.get('state')}; the repository keeps the result of another campaign")
            else:
                shutil.copy(found / f"{name}.json", committed)
    for path in keep_cells(results, root / "docs" / "studies"):
        print(path)
    for path in (root / page for page in PAGES):
        path.write_text(filled(path.read_text(), read(committed)))
        print(path)
    return 0


def read(folder: Path) -> dict[str, dict[str, Any]]:
    """Reads the results of the parts in a folder, by name."""
    files = sorted(folder.glob("*.json")) if folder.is_dir() else []
    return {path.stem: json.loads(path.read_text()) for path in files}


def filled(text: str, results: Results) -> str:
    """Replaces the regions of a text."""

    def made(found: re.Match[str]) -> str:
        return f"{found[1]}\n\n{REGIONS[found[2]](results)}\n\n<!-- end -->"

    return re.sub(r"(<!-- campaign: (\w+) -->).*?<!-- end -->", made, text, flags=re.DOTALL)


def _hardware(results: Results, names: Sequence[str]) -> str:
    """Describes the hardware and versions of the parts that were run."""
    found = [results[name]["environment"] for name in names if "environment" in results.get(name, {})]
    each = dict.fromkeys(
        f"{env['gpu'] or env['processor']}, {env['cores']} cores, torch {env['torch']}, {env['date']}, "
        f"commit {env['commit'] or 'unknown'}"
        for env in found
    )
    return "; ".join(each) or NOT_YET


def _rate(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return NOT_YET
    return f"{row['images_per_s']:,.0f}" if "images_per_s" in row else row["error"]


def _speed_rows(results: Results, encoder: str, batch: int) -> dict[str, Mapping[str, Any]]:
    return {row["contender"]: row for row in results.get(f"speed-{encoder}-{batch}", {}).get("rows", [])}


def speed(results: Results) -> str:
    """Makes the table of pretraining speed, compared with the peers."""
    rows = []
    for encoder, shown in NETWORKS.items():
        for batch in BATCHES:
            found = _speed_rows(results, encoder, batch)
            ours = found.get("ours")
            times = (ours or {}).get("times_as_fast_as", {})
            waits = (ours or {}).get("waits_per_step")
            rows.append(
                [
                    f"{shown}, batch {batch:,}",
                    _rate(ours),
                    f"≥ {GOALS[encoder]:,}" if batch == BATCHES[0] else "",
                    _rate(found.get("plain loop")),
                    _rate(found.get("lightly")),
                    f"{times['lightly']:.1f}" if "lightly" in times else NOT_YET,
                    NOT_YET if waits is None else f"{waits:g}",
                ]
            )
    heading = ["pretraining, bfloat16", "ours, images/s", "goal", "plain loop", "lightly's recipe"]
    names = [f"speed-{encoder}-{batch}" for encoder in NETWORKS for batch in BATCHES]
    return (
        in_markdown([*heading, "times lightly's (goal 10)", "waits a step (goal 0)"], *rows)
        + f"\n\nHardware: {_hardware(results, names)}."
    )


def _runs(results: Results, encoder: str, arm: str, figure: str = "probe/top1") -> list[Mapping[str, Any]]:
    """Returns the runs of an arm that have a figure, one per seed."""
    names = [name for name in results if re.fullmatch(rf"train-{encoder}-{arm}-s\d+", name)]
    return [results[name] for name in sorted(names) if figure in results[name]]


def _over_seeds(results: Results, encoder: str, arm: str, figure: str = "probe/top1") -> str:
    """Returns the mean and the standard deviation of a figure over an arm's runs; "failed" if every run failed."""
    runs = _runs(results, encoder, arm, figure)
    if not runs:
        return "failed" if _failed(results, encoder, arm) else NOT_YET
    return mean_and_std([run[figure] for run in runs])


def _failed(results: Results, encoder: str, arm: str) -> list[Mapping[str, Any]]:
    """Returns the runs of an arm that failed."""
    return [each for each in _runs(results, encoder, arm, "error") if each["state"] == "failed"]


def _failures(results: Results, encoder: str, arms: Mapping[str, str]) -> str:
    """Lists the failed runs of a table's arms with their errors, below the table."""
    failures = [
        f"- {shown}, seed {run['seed']}: {run['error'].removeprefix('UserError: ')}"
        for arm, shown in arms.items()
        for run in _failed(results, encoder, arm)
    ]
    return "\n\n" + "\n".join(failures) if failures else ""


def recipes(results: Results) -> str:
    """Makes the table of the paper's recipe with ResNet-50, compared with the paper's numbers."""
    rows = []
    papers = {arm: (f"`{EXPERIMENTS[arm]}`", EXPERIMENTS[arm]) for arm in ("ntxent", "sec")}
    for arm, overrides in OPEN.items():
        shown = "`cifar10_supcontrast`" + (f" with `{' '.join(overrides)}`" if overrides else "")
        papers[arm] = (shown, EXPERIMENTS[arm.partition("_")[0]])
    for arm, (shown, experiment) in papers.items():
        runs = _runs(results, "resnet50", arm)
        paper = find_reported(experiment)["probe/top1"]
        assert isinstance(paper, float)
        top1 = _over_seeds(results, "resnet50", arm)
        rows.append(
            [
                shown,
                top1,
                f"{paper:.2f}",
                f"{mean(run['probe/top1'] for run in runs) - paper:+.2f}" if runs else top1,
                _over_seeds(results, "resnet50", arm, "probe/logistic_top1"),
                _over_seeds(results, "resnet50", arm, "probe/knn_top1"),
                str(len(runs)),
            ]
        )
    paper_heading = ["the paper's", f"difference (goal: within {WITHIN})"]
    heading = ["recipe", "linear probe, top-1 %", *paper_heading, "logistic regression, %", "kNN, %", "seeds"]
    names = [name for name in results if name.startswith("train-resnet50-")]
    failures = _failures(results, "resnet50", {arm: shown for arm, (shown, _) in papers.items()})
    return in_markdown(heading, *rows) + f"{failures}\n\nHardware: {_hardware(results, names)}."


def resnet18(results: Results) -> str:
    """Makes the table of the same recipes with ResNet-18, over the seeds that have each figure."""
    keys = ("probe/top1", "probe/top5", "probe/logistic_top1", "probe/knn_top1", "val/probe_top1", "val/knn_top1")
    rows = [
        [
            shown,
            *(_over_seeds(results, "resnet18", arm, key) for key in keys),
            str(len(_runs(results, "resnet18", arm, keys[-1]))),
        ]
        for arm, shown in ARMS.items()
    ]
    names = [name for name in results if name.startswith("train-resnet18-")]
    held_out = ["online probe, held-out images, %", "kNN, held-out images, %"]
    of_test = ["linear probe, top-1 %", "top-5 %", "logistic regression, %", "kNN, %"]
    heading = ["ResNet-18, 100 epochs", *of_test, *held_out, "seeds"]
    failures = _failures(results, "resnet18", ARMS)
    return in_markdown(heading, *rows) + f"{failures}\n\nHardware: {_hardware(results, names)}."


def study(results: Results) -> str:
    """Makes the tables of the study, the best of each search, and the goals at its end."""
    parts: list[str] = []
    for encoder in FULL.studied:
        runs = _study_cells(results, encoder)
        arms = [arm for group in FULL.arms for arm in group]
        if runs:
            runs.sort(key=lambda run: (arms.index(run.arm), run.seed))
            compared = Comparison.of(runs, _TOP1, arms[0], (len(arms) - 1) * len(FULL.studied))
            table = in_markdown(*compared.table())
        else:
            table = f"{NOT_YET}."
        names = [f"study-{encoder}-{run.arm}-s{run.seed}" for run in runs]
        parts.append(
            f"{NETWORKS[encoder]}, 100 epochs, {len(runs)} of {len(arms) * len(FULL.study_seeds)} runs: "
            + (f"\n\n{table}\n\nSearched: {_searched(results, encoder, arms)}." if runs else table)
            + f"\n\nHardware: {_hardware(results, names)}."
        )
    return "\n\n".join([*parts, _goals(results)])


_TOP1 = "probe/top1"


def _study_cells(results: Results, encoder: str) -> list[KeptCell]:
    """The finished runs of the study."""
    found: list[KeptCell] = []
    for name, each in results.items():
        match = re.fullmatch(rf"study-{encoder}-(\w+)-s(\d+)", name)
        if match is not None and _TOP1 in each:
            metrics = {key: value for key, value in each.items() if key.startswith("probe/")}
            minutes = each["train_s"] / 60
            found.append(
                KeptCell(
                    arm=match[1], point="", seed=int(match[2]), digest="", minutes=minutes, run_id="", metrics=metrics
                )
            )
    return found


def _searched(results: Results, encoder: str, arms: Sequence[str]) -> str:
    """The best values of each search, with the accuracy by kNN on held-out training images."""
    shown: list[str] = []
    for arm in arms:
        names = [name for name in results if re.fullmatch(rf"search-{encoder}-{arm}-\d+", name)]
        trials = [results[name] for name in names if results[name]["state"] == "done"]
        if trials:
            best = max(trials, key=lambda trial: trial[SEARCHED])
            values = ", ".join(f"`{key}={best['changes'][key]}`" for key in load_trials()[f"{encoder}-{arm}"][0])
            shown.append(f"{arm} {values} ({best[SEARCHED]:.2f} % of {len(trials)} trials)")
    return "; ".join(shown) or NOT_YET


def _goals(results: Results) -> str:
    paper = find_reported(EXPERIMENTS["sec"])[_TOP1]
    assert isinstance(paper, float)
    runs = _study_cells(results, "resnet50")
    of_arms = {arm: [run.metrics[_TOP1] for run in runs if run.arm == arm] for arm in {run.arm for run in runs}}
    best = max(of_arms, key=lambda arm: mean(of_arms[arm]), default=None)
    long = results.get(LONG, {})
    above = NOT_YET if best is None else f"{best}, {mean(of_arms[best]):.2f}, {mean(of_arms[best]) - paper:+.2f}"
    minutes = f"{long['probe/knn_top1']:.2f} in {long['train_s'] / 60:.0f} min" if "probe/knn_top1" in long else NOT_YET
    return in_markdown(
        ["goal", "found"],
        [f"ResNet-50, 100 epochs: a point or more above the paper's SEC, {paper:.2f}", above],
        [f"ResNet-18, {LONG_EPOCHS} epochs: 90 % by kNN in less than 99 minutes", minutes],
    )


def details(results: Results) -> str:
    """Makes the section of LOG.md: every contender, and the parts that the other pages leave out."""
    return "\n\n".join([_tests(results), _contenders(results), *(_listed(results, name) for name in _LISTED)])


def _tests(results: Results) -> str:
    found = results.get("gpu-tests", {})
    if "collected" not in found:
        return f"Tests that need a GPU: {found.get('error', NOT_YET)}."
    failed = "".join(f"\n- {name}: {why}" for name, why in found["failed"].items())
    stopped = f"; {found['error']}" if "error" in found else ""
    return (
        f"Tests that need a GPU: {found['collected']} collected, {found['passed']} passed, "
        f"{len(found['failed'])} failed, {len(found['skipped'])} skipped{stopped}.{failed}"
    )


def _contenders(results: Results) -> str:
    heading = ["pretraining", "contender", "images/s", "times lightly's", "of peak", "peak MiB", "waits a step"]
    rows = []
    for encoder, shown in NETWORKS.items():
        for batch in BATCHES:
            name = f"{shown}, batch {batch:,}"
            found = _speed_rows(results, encoder, batch)
            rows += [
                [
                    name,
                    row["contender"],
                    _rate(row),
                    f"{row['times_as_fast_as']['lightly']:.2f}" if "lightly" in row.get("times_as_fast_as", {}) else "",
                    f"{100 * row['mfu']:.0f} %" if "mfu" in row else "",
                    f"{row['peak_mib']:,.0f}" if row.get("peak_mib") is not None else "",
                    f"{row['waits_per_step']:g}" if "waits_per_step" in row else "",
                    ", ".join(f"{part} {100 * share:.0f} %" for part, share in row.get("shares", {}).items()),
                ]
                for row in found.values()
            ] or [[name, "", results.get(f"speed-{encoder}-{batch}", {}).get("error", NOT_YET), *[""] * 5]]
    return in_markdown([*heading, "where a step's time goes"], *rows)


# Part -> its lists of rows -> the keys shown.
_LISTED: Mapping[str, Mapping[str, Sequence[str]]] = {
    "options": {"rows": ("choice", "images_per_s", "times_as_fast")},
    "views": {"rows": ("choice", "images_per_s", "times_as_fast")},
    "growth": {
        "rows": ("rows", "ours_ms", "ours_mib", "dense_ms", "dense_mib", "limit_ms", "error"),
        "classes": ("classes", "ours_ms", "ours_mib", "dense_ms", "dense_mib", "limit_ms", "error"),
    },
    "evaluation": {"rows": ("part", "size", "peer", "ours_s", "peer_s", "times_as_fast", "limit_s", "error")},
}


def _listed(results: Results, part: str) -> str:
    found = results.get(part, {})
    tables = [
        in_markdown(
            [key.replace("_", " ") for key in keys], *([_cell(row.get(key)) for key in keys] for row in found[name])
        )
        for name, keys in _LISTED[part].items()
        if found.get(name)
    ]
    return f"{part.capitalize()}: " + ("\n\n" + "\n\n".join(tables) if tables else found.get("error", NOT_YET) + ".")


def _cell(value: Any) -> str:
    if isinstance(value, int | float):
        return f"{value:,.2f}" if isinstance(value, float) else f"{value:,}"
    return "" if value is None else str(value)


REGIONS: Mapping[str, Callable[[Results], str]] = {
    "speed": speed,
    "recipes": recipes,
    "resnet18": resnet18,
    "study": study,
    "details": details,
}
