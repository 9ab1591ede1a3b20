"""The origin of a run: the commit, changes to it, the command line and the installed packages."""

import json
import os
import re
import socket
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import distributions
from pathlib import Path

from ssl_sec.edges.folder.text import text_of
from ssl_sec.edges.masking import masked, masked_code, masked_command
from ssl_sec.edges.packaging import CODE_STATE, JOB_ID_VARIABLE, TRAVELS, checkout, git
from ssl_sec.files import replace_text

COMMIT_TAG = "mlflow.source.git.commit"  # MLflow's own; importing it would take seconds
DIRTY_TAG = "git.dirty"
COMMAND_TAG = "command"
WHERE_TAG = "ran_on"

# The environment variable with the commit of a container image, with `-dirty` if the checkout had changes.
IMAGE_COMMIT_VARIABLE = "SSL_SEC_COMMIT"

_COMMIT = re.compile("[0-9a-f]{40,64}")
_CHANGED_IMAGE = "The image was built from a checkout with changes to this commit, which it does not have.\n"
_DIFF_LIMIT = 2**20
_CODE_SUFFIXES = (".py", ".yaml", ".yml", ".sh", ".toml")


@dataclass(frozen=True, kw_only=True, slots=True)
class CodeState:
    """The state of a checkout.

    Attributes:
        commit: the commit that is checked out.
        diff: changes of tracked files, and new files of code, as a patch; without secrets, and cut off if it is very
            long. Empty without changes.
    """

    commit: str
    diff: str

    @property
    def is_dirty(self) -> bool:
        """Whether the code differs from the commit."""
        return bool(self.diff)


def code_state(root: Path | None = None) -> CodeState | None:
    """The state of a checkout, or the one that was sent with a job to a cluster, or made an image; None if unknown.

    Args:
        root: root of the checkout; None takes the checkout of this package.
    """
    root = root or checkout()
    if root is None:
        commit, _, dirty = os.environ.get(IMAGE_COMMIT_VARIABLE, "").partition("-")
        return CodeState(commit=commit, diff=_CHANGED_IMAGE if dirty else "") if _COMMIT.fullmatch(commit) else None
    sent = root / CODE_STATE
    if sent.is_file():
        return CodeState(**json.loads(sent.read_text()))
    top = git(root, "rev-parse", "--show-toplevel")
    commit = git(root, "rev-parse", "HEAD")
    if not commit or not top or Path(top.strip()).resolve() != root.resolve():
        return None  # installed inside another repository, whose commit says nothing about this code
    changed = git(root, "diff", "HEAD", "--no-color", "--no-ext-diff") or ""
    listed = git(root, "ls-files", "-z", "-o", "--exclude-standard", "--", *TRAVELS) or ""
    new = [name for name in listed.split("\0") if name.endswith(_CODE_SUFFIXES)]
    diff = masked_code(changed + "".join(_new_file(root, name) for name in new))
    if len(diff) > _DIFF_LIMIT:
        diff = f"{diff[:_DIFF_LIMIT]}\n[cut off here: the whole has {len(diff)} characters]\n"
    return CodeState(commit=commit.strip(), diff=diff)


def write_code_state(root: Path, folder: Path) -> None:
    """Writes the state of a checkout to the folder that is sent to a cluster."""
    state = code_state(root)
    if state is not None:
        (folder / CODE_STATE).write_text(json.dumps(asdict(state)))


def process_tags(state: CodeState | None) -> dict[str, str]:
    """Tags that describe this process: its command line without secrets, where it runs, and its code."""
    program, *arguments = sys.orig_argv
    tags = {COMMAND_TAG: masked_command([Path(program).name, *arguments]), WHERE_TAG: _place()}
    code = {} if state is None else {COMMIT_TAG: state.commit, DIRTY_TAG: str(state.is_dirty).lower()}
    return {**tags, **code}


def keep_code(folder: Path) -> dict[str, str]:
    """Writes the installed packages and the changes of the code to a run's folder; returns `process_tags`.

    A resume with other code adds a file.
    """
    state = code_state()
    (folder / "packages.txt").write_text(_installed_packages())
    kept = sorted(folder.glob("code*.diff"))
    if state is not None and state.is_dirty and all(text_of(path) != state.diff for path in kept):
        count = len(kept) + 1
        replace_text(folder / ("code.diff" if count == 1 else f"code-{count}.diff"), state.diff)
    return process_tags(state)


def code_files(folder: Path) -> list[Path]:
    """The files that `keep_code` wrote."""
    return [path for path in (folder / "packages.txt", *sorted(folder.glob("code*.diff"))) if path.is_file()]


def _place() -> str:
    """The machine, and the job of a cluster, in which this process runs."""
    parts = [socket.gethostname()]
    known: Mapping[str, str] = {"Ray job": JOB_ID_VARIABLE, "Slurm job": "SLURM_JOB_ID"}
    parts += [f"{what} {os.environ[name]}" for what, name in known.items() if os.environ.get(name)]
    address = os.environ.get("RAY_ADDRESS")
    return ", ".join([*parts, *([f"Ray cluster {masked(address)}"] if address else [])])


@cache
def _installed_packages() -> str:
    """The installed packages with their versions, in pip's format."""
    found = {each.metadata["Name"] or "": each.version for each in distributions()}
    return "".join(f"{name}=={version}\n" for name, version in sorted(found.items(), key=lambda one: one[0].lower()))


def _new_file(root: Path, name: str) -> str:
    """A patch that creates a file which git does not track."""
    try:
        lines = text_of(root / name).splitlines()
    except OSError:
        return ""
    head = (
        f"diff --git a/{name} b/{name}\nnew file mode 100644\n--- /dev/null\n+++ b/{name}\n@@ -0,0 +1,{len(lines)} @@\n"
    )
    return head + "".join(f"+{line}\n" for line in lines)
