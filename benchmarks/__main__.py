"""All benchmarks of a CPU that together take under ten minutes, one after the other.

    python -m benchmarks        # or: make bench

Each leaves its figures in `results/`. Those that take longer are run alone: benchmarks.throughput at full width,
.options, .launchers, .classes, .invariance and .overhead.
"""

import subprocess
import sys
import time

COMMANDS = (
    "benchmarks.throughput --width 0.5 --rounds 2",
    "benchmarks.losses",
    "benchmarks.growth",
    "benchmarks.evaluation",
)


def main() -> int:
    """Runs them; returns the number of those that failed."""
    failed = 0
    for command in COMMANDS:
        print(f"\npython -m {command}", flush=True)
        start = time.monotonic()
        # A process each: what one leaves in memory and caches is none of the next one's.
        done = subprocess.run([sys.executable, "-m", *command.split()])
        failed += done.returncode != 0
        print(f"({time.monotonic() - start:.0f} s)", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
