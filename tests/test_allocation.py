import platform
import subprocess
import sys

import pytest

# Tensors of 64 MiB, made and forgotten; how often a page had to be fetched for them.
CODE = """
import resource
import sys
import torch
from ssl_sec.allocation import keep_freed_memory

if sys.argv[1] == "kept":
    keep_freed_memory()
for _ in range(20):
    torch.ones(2**24)  # the heap finds its size
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    torch.ones(2**24)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults(mode: str) -> int:
    done = subprocess.run([sys.executable, "-c", CODE, mode], check=True, capture_output=True, text=True)
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another allocator")
def test_freed_memory_serves_the_next_tensor():
    pages_of_a_tensor = 2**26 // 4096
    assert page_faults("kept") < pages_of_a_tensor
    assert page_faults("default") > 5 * pages_of_a_tensor
