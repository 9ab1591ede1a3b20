"""Settings of a process that trains on CPUs: it keeps freed memory, and shares the cores with other workers."""

import contextlib
import ctypes
import os
from pathlib import Path

from ssl_sec.edges.environment import SPINS

# Needed from the start of a process that trains in another thread than the main one, as Ray's workers do: glibc gives
# such a thread a heap of 64 MiB pieces, and releases each piece as soon as it is empty, whatever the settings.
ENVIRONMENT = {"MALLOC_ARENA_MAX": "1", **SPINS}

# From <malloc.h>.
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4


def keep_freed_memory() -> None:
    """Makes glibc keep freed memory for the next allocation, instead of returning it to the system.

    By default each large tensor is mapped again, and the system clears its pages one by one: a third of the time of a
    step of ResNet-18 with 256 images on two cores. Peak memory may grow by a third through fragmentation. Other threads
    than the main one need `ENVIRONMENT` too. Does nothing without glibc.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, -1)


def schedule_as_batch() -> None:
    """Makes Linux schedule the threads of this process, and those that they start, as batch work.

    A thread that wakes up then waits for the end of another one's time slice. Otherwise gloo's threads, which wake up a
    thousand times a second, interrupt the training each time. Threads with their own policy keep it. Does nothing on
    other systems, or if it is not permitted.
    """
    if not hasattr(os, "SCHED_BATCH"):
        return
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended
            if os.sched_getscheduler(int(thread.name)) == os.SCHED_OTHER:
                os.sched_setscheduler(int(thread.name), os.SCHED_BATCH, os.sched_param(0))
