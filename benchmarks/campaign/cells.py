"""Copies the runs of small studies from a campaign's results to the CSV files of docs/studies."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.campaign.recipes import list_small_arms, load_trials
from benchmarks.campaign.scale import SMALL_STUDIES
from benchmarks.campaign.small import part_name
from benchmarks.campaign.study import SEARCHED
from ssl_sec.edges.study.cells import MEANS, KeptCell, KeptCells, metrics_of
from ssl_sec.edges.study.plan import ArmAt
from ssl_sec.edges.study.searches import KeptSearches, KeptTrial
from ssl_sec.edges.study.uploaded import searches_path
from ssl_sec.edges.tune.trials import Trial


def keep_cells(results: Mapping[str, Mapping[str, Any]], folder: Path) -> list[Path]:
    """Adds the runs and trials that have ended to the files of their studies; returns the files.

    A run that a file has with the same configuration stays as it is: another machine may have repeated it.

    Args:
        results: the results of each part, by name.
        folder: the folder docs/studies.
    """
    written: list[Path] = []
    searched = load_trials()
    for study in SMALL_STUDIES:
        found = results.get(part_name(study))
        if found is None or not found.get("runs"):
            continue
        cells = KeptCells(folder / f"{study}.csv")
        known = {(*cell.key, cell.digest) for cell in cells}
        for own, arm in list_small_arms(study):
            if trials := [one for one in found["trials"] if one["arm"] == own and "last" in one]:
                KeptSearches(searches_path(cells.path)).add(arm, _kept_trials(arm, trials, searched[own]))
            for run in found["runs"]:
                if run["arm"] != own or "last" not in run:
                    continue
                cell = _kept_cell(arm, run)
                if (*cell.key, cell.digest) not in known:
                    cells.add(cell)
        written.append(cells.path)
    return written


def _kept_trials(
    arm: ArmAt, trials: Sequence[Mapping[str, Any]], values: Sequence[Mapping[str, float]]
) -> list[KeptTrial]:
    """The trials of an arm, the best first; without a digest, since they are not of a search by `jobs.tune`."""
    kept = [
        KeptTrial.of(
            arm,
            Trial(
                name=f"search-{one['trial']}",
                overrides=[f"{key}={value}" for key, value in values[one["trial"]].items()],
                values=values[one["trial"]],
                metric=one["last"][SEARCHED],
                at=round(one["last"]["train/epoch"]),
            ),
        )
        for one in trials
    ]
    return sorted((replace(trial, digest="") for trial in kept), key=lambda trial: trial.metric, reverse=True)


def _kept_cell(arm: ArmAt, run: Mapping[str, Any]) -> KeptCell:
    means = {name: run["mean"][name] for name in MEANS if name in run["mean"]}
    return KeptCell(
        arm=arm.arm,
        point=arm.point.name,
        seed=run["seed"],
        digest=run["config"],
        minutes=run["minutes"],
        run_id="",
        metrics=metrics_of([{"metrics": {**run["last"], **means}}], run["probe"]),
    )
