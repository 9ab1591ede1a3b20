"""Tests. This runs before torch is imported, since torch reads its number of threads from the environment once."""

import os

# Tests are small and run side by side with workers; more threads than cores make them wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
