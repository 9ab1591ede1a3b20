"""The description of a run in MLflow, in Markdown: its command, data, code and machine, and how it ended."""

from collections.abc import Mapping

from ssl_sec.edges.tracking.provenance import COMMAND_TAG, COMMIT_TAG, DIRTY_TAG, WHERE_TAG

_ENDED = "- ended: "
_WORDS = {"FINISHED": "finished", "FAILED": "failed", "KILLED": "stopped"}
_LONGEST = 1_000


def describe_end(status: str, reason: str | None) -> str:
    """The end of a run in words, with the reason if there is one."""
    word = _WORDS.get(status, status.lower())
    return f"{word}: {reason}"[:_LONGEST] if reason else word


def description(tags: Mapping[str, str]) -> str:
    """The description of a run with these tags."""
    return "\n".join(_lines(tags))


def resumed(note: str, tags: Mapping[str, str]) -> str:
    """The description of a resumed run: without its end, and with the command and the code of the resume."""
    kept = [line for line in note.splitlines() if not line.startswith(_ENDED)]
    if any(line not in note for line in _lines(tags) if line.startswith(("- command:", "- code:"))):
        kept.append(f"- resumed: {'; '.join(line.removeprefix('- ') for line in _lines(tags))}")
    return "\n".join(dict.fromkeys(kept))


def with_end(note: str, ended: str) -> str:
    """The description of a run that has ended; the end comes first, and text added by users stays."""
    return "\n".join([f"{_ENDED}{ended}", *(line for line in note.splitlines() if not line.startswith(_ENDED))])


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
        lines.append(f"- ran on: {where}")
    return lines
