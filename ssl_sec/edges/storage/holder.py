"""The word that the last process to hold a run in object storage has chosen.

It is in the storage, and in the folders of that process until all is uploaded. So where both are equal, what is left in
a folder is the newest of the run.
"""

import os
from pathlib import Path

from ssl_sec.files import replace_text

# The file with the word, in the storage and in folders.
HOLDER = ".holder"


def holder_of(folder: Path) -> str:
    """The word in a folder on this machine; empty if there is none."""
    try:
        return (folder / HOLDER).read_text(errors="replace")
    except FileNotFoundError:
        return ""


def write_holder(folder: Path, word: str) -> None:
    """Writes the word into a folder, or makes its file as new as one just written.

    A cleaner of temporary files takes files that are old, and a run may last for weeks.

    Raises:
        OSError: if it cannot be written.
    """
    path = folder / HOLDER
    if path.exists() and holder_of(folder) == word:
        os.utime(path)
    else:
        replace_text(path, word)
