import os

import pytest
import torch
from jaxtyping import install_import_hook

os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.1")

# Without a GPU, Triton's kernels run in its interpreter; it looks at the variable when it is imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Every shape that a signature states is checked at every call of the tests.
install_import_hook("ssl_sec", "beartype.beartype")


@pytest.fixture(scope="session", autouse=True)
def no_worker_outlives_the_tests():
    """Ends the warm workers while coverage still listens to them."""
    yield
    from tests.workers import end_workers

    end_workers()
