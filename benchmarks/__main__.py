"""Runs the CPU benchmarks that together take under ten minutes, one after the other.

    python -m benchmarks        # or: make bench

Each writes its results to `results/`. The longer ones are run separately: benchmarks.throughput at full width,
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
    """Runs the benchmarks; returns the number that failed."""
    failed = 0
    for command in COMMANDS:
        print(f"\npython -m {command}", flush=True)
        start = time.monotonic()
        # One process each, so that memory and caches of one do not affect the next.
        process = subprocess.run([sys.executable, "-m", *command.split()])
        failed += process.returncode != 0
        print(f"({time.monotonic() - start:.0f} s)", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
