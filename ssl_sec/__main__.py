"""`python -m ssl_sec <command> ...` is `ssl-sec <command> ...`."""

import os
import signal
import sys
from typing import NoReturn


def main(*before: str) -> NoReturn:
    """Runs the command of this process's command line and ends the process.

    Args:
        before: arguments to put before those of the command line.
    """
    if sys.platform == "win32":
        print("error: Windows is not supported; allowed: Linux, also in WSL 2 on Windows", file=sys.stderr)
        sys.exit(2)
    is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_default:  # and not ignored, as by a script that starts the command in the background
        # During the imports, a KeyboardInterrupt would be a traceback, or be taken for another error by a library.
        signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    from ssl_sec.edges import commands

    if is_default:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    commands.main(*before)


if __name__ == "__main__":
    main()
