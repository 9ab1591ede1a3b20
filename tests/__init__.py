"""Tests; what stands here comes before torch is imported, which reads its threads from the environment once."""

import os

# Tests are small and run side by side with workers; more threads than cores make them wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
