"""The holder of a run in object storage: the random id of the process that held its lease last.

The id is in the storage, and in the folders of that process until all is uploaded. So where both are equal, what is
left in a folder is the newest of the run.
"""

import os
from pathlib import Path

from ssl_sec.files import replace_text

# The file with the id, in the storage and in folders.
HOLDER = ".holder"


def holder_of(folder: Path) -> str:
    """The holder to whom a folder on this machine belongs; empty if there is none."""
    try:
        return (folder / HOLDER).read_text(errors="replace")
    except FileNotFoundError:
        return ""


def write_holder(folder: Path, holder: str) -> None:
    """Writes the holder into a folder, or makes its file as new as one just written.

    A cleaner of temporary files takes files that are old, and a run may last for weeks.

    Raises:
        OSError: if it cannot be written.
    """
    path = folder / HOLDER
    if path.exists() and holder_of(folder) == holder:
        os.utime(path)
    else:
        replace_text(path, holder)
