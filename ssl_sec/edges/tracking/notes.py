"""The description of a run in MLflow, in Markdown.

It contains the run's command, data, code, machine and cluster, its end, and the commands that follow it.
"""

from collections.abc import Mapping

from ssl_sec.edges.folder.commands import command_line
from ssl_sec.edges.masking import masked
from ssl_sec.edges.tracking.provenance import COMMAND_TAG, COMMIT_TAG, DIRTY_TAG, WHERE_TAG
from ssl_sec.recipes.registry import PROBE, RECIPES

_ENDED = "- ended: "
_WHERE = "- ran on: "
_CLUSTER = "- cluster: "
_RESUMED = "- resumed: "
_WORDS = {"FINISHED": "finished", "FAILED": "failed", "KILLED": "stopped"}
_LONGEST = 1_000


def describe_end(status: str, reason: str | None) -> str:
    """The end of a run in words, with the reason if there is one."""
    word = _WORDS.get(status, status.lower())
    return f"{word}: {reason}"[:_LONGEST] if reason else word


def description(tags: Mapping[str, str]) -> str:
    """The description of a run with these tags."""
    return "\n".join([*_lines(tags), *_next_lines(tags)])


def resumed(note: str, tags: Mapping[str, str]) -> str:
    """The description of a resumed run: without its end, and with the command and the code of the resume.

    The commands that follow the run are those for its folder, which may have been moved.
    """
    kept = [line for line in note.splitlines() if not line.startswith(_ENDED)]
    if any(line not in note for line in _lines(tags) if line.startswith(("- command:", "- code:"))):
        kept.append(f"{_RESUMED}{'; '.join(line.removeprefix('- ') for line in _lines(tags))}")
    following = {_label(line): line for line in _next_lines(tags)}
    return "\n".join(dict.fromkeys(following.get(_label(line), line) for line in kept))


def with_cluster(note: str, cluster: str) -> str:
    """The description of a run on this cluster, which follows the machine, or the resume."""
    lines, added = note.splitlines(), f"{_CLUSTER}{masked(cluster)}"
    if added in lines:
        return note
    before = (_WHERE, _RESUMED, _CLUSTER)
    place = max((number for number, line in enumerate(lines, 1) if line.startswith(before)), default=len(lines))
    return "\n".join([*lines[:place], added, *lines[place:]])


def with_end(note: str, ended: str) -> str:
    """The description of a run that has ended; the end comes first, and text added by users is kept."""
    return "\n".join([f"{_ENDED}{ended}", *(line for line in note.splitlines() if not line.startswith(_ENDED))])


def with_table(note: str, table: str) -> str:
    """The description that begins with a table in Markdown; an earlier table is removed."""
    rest = "\n".join(line for line in note.splitlines() if not line.startswith("|")).strip("\n")
    return f"\n{table}\n\n{rest}"


def _lines(tags: Mapping[str, str]) -> list[str]:
    lines: list[str] = []
    if command := tags.get(COMMAND_TAG):
        lines.append(f"- command: `{command}`")
    if data := tags.get("data"):
        lines.append(f"- data: {data}")
    if commit := tags.get(COMMIT_TAG):
        dirty = ", changed: see `code.diff`" if tags.get(DIRTY_TAG) == "true" else ""
        lines.append(f"- code: commit {commit}{dirty}")
    if where := tags.get(WHERE_TAG):
        lines.append(f"{_WHERE}{where}")
    return lines


def _next_lines(tags: Mapping[str, str]) -> list[str]:
    """The commands that resume, probe and export a training."""
    recipe, folder = RECIPES.get(tags.get("job", "")), tags.get("folder")
    if recipe is None or not recipe.is_training or folder is None:
        return []
    probe = [("probe", PROBE.name, "run")] if recipe.is_probed else []
    commands = [("resume", recipe.name, "resume"), *probe, ("export", "export", "run")]
    shown = {what: command_line(job, key, masked(folder)) for what, job, key in commands}
    shown["export"] += " format=safetensors"
    return [f"- {what}: `{command}`" for what, command in shown.items()]


def _label(line: str) -> str:
    """What is in front of the command of a line."""
    return line.partition("`")[0]
