"""How a process that trains on CPUs keeps memory, and shares the cores with other workers."""

import contextlib
import ctypes
import os
from pathlib import Path

# What a process needs from its start where another thread than the main one trains, as in Ray's workers: glibc would
# give such a thread a heap of pieces of 64 MiB, and give each piece back as soon as it is empty, whatever it is told.
ENVIRONMENT = {"MALLOC_ARENA_MAX": "1"}

# Of <malloc.h>.
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4


def keep_freed_memory() -> None:
    """Has glibc keep what is freed for the next allocation, instead of giving it back to the system.

    By default each large tensor is mapped anew, and the system clears its pages one by one: a third of the time of a
    step of ResNet-18 with 256 images on two cores. The peak of the memory may grow by a third, as free parts lie among
    used ones. Other threads than the main one need `ENVIRONMENT` as well. Does nothing where there is no glibc.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, -1)


def schedule_as_batch() -> None:
    """Has Linux schedule the threads of this process, and those that they start, as batch work.

    A thread that wakes up then waits for the end of another's slice. Otherwise gloo's threads, which wake up a thousand
    times a second, push the training off its core each time. Threads with a policy of their own keep it. Does nothing
    on other systems, or where it is not permitted.
    """
    if not hasattr(os, "SCHED_BATCH"):
        return
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended
            if os.sched_getscheduler(int(thread.name)) == os.SCHED_OTHER:
                os.sched_setscheduler(int(thread.name), os.SCHED_BATCH, os.sched_param(0))
