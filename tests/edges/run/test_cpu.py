import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from types import MappingProxyType

import pytest

from ssl_sec.edges.run.cpu import ENVIRONMENT

# Tensors of 64 MiB, made and forgotten; how often a page had to be fetched for them.
CODE = """
import resource
import sys
import threading
import torch
from ssl_sec.edges.run.cpu import keep_freed_memory

def count():
    if "kept" in sys.argv:
        keep_freed_memory()
    for _ in range(20):
        torch.ones(2**24)  # the heap finds its size
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        torch.ones(2**24)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)

if "in a thread" in sys.argv:
    thread = threading.Thread(target=count)
    thread.start()
    thread.join()
else:
    count()
"""
PAGES_OF_A_TENSOR = 2**26 // 4096


def page_faults(*modes: str, environment: Mapping[str, str] = MappingProxyType({})) -> int:
    command = [sys.executable, "-c", CODE, *modes]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env={**os.environ, **environment})
    return int(done.stdout)


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another allocator")
def test_freed_memory_serves_the_next_tensor():
    assert page_faults("kept") < PAGES_OF_A_TENSOR
    assert page_faults() > 5 * PAGES_OF_A_TENSOR


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another allocator")
def test_freed_memory_serves_the_next_tensor_in_a_thread():
    assert page_faults("kept", "in a thread", environment=ENVIRONMENT) < PAGES_OF_A_TENSOR


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="another system")
def test_threads_and_those_they_start_are_batch_work():
    code = """
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from ssl_sec.edges.run.cpu import schedule_as_batch

with ThreadPoolExecutor(1) as before, ThreadPoolExecutor(1) as chosen:
    policy = lambda: os.sched_getscheduler(threading.get_native_id())
    before.submit(policy).result()
    chosen.submit(lambda: os.sched_setscheduler(threading.get_native_id(), os.SCHED_IDLE, os.sched_param(0))).result()
    schedule_as_batch()
    with ThreadPoolExecutor(1) as after:
        policies = [policy(), before.submit(policy).result(), after.submit(policy).result()]
    assert policies == [os.SCHED_BATCH] * 3
    assert chosen.submit(policy).result() == os.SCHED_IDLE
"""
    subprocess.run([sys.executable, "-c", code], check=True)
