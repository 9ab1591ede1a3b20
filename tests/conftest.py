import atexit
import errno
import gc
import os
import stat
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import jaxtyping
import pytest
import torch
from hypothesis import settings
from jaxtyping import install_import_hook

from tests.exporting.warm_reader import WarmReader

GPU_TESTS = Path(__file__).parent / "gpu"
PACKAGE = Path(__file__).parents[1] / "ssl_sec"

os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.1")

# Without a GPU, Triton's kernels run in its interpreter; it looks at the variable when it is imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# No deadline, for busy machines; the examples are the same in every run.
settings.register_profile("tests", deadline=None, derandomize=True)
settings.load_profile("tests")

# Hundreds of tests open the digits, a file of text; `open_digits` copies what it takes of them.
if find_spec("sklearn") is not None:
    import sklearn.datasets

    sklearn.datasets.load_digits = cache(sklearn.datasets.load_digits)

# Every shape that a signature states is checked at every call of the tests. Other modules are imported as they are,
# since the hook triples the time of an import; so is `seeding`, whose mixer is called so often that its checks took 3 %
# of the time.
if find_spec("beartype") is not None:
    files = [path for path in PACKAGE.rglob("*.py") if "jaxtyping" in path.read_text(encoding="utf-8")]
    files.remove(PACKAGE / "seeding.py")
    modules = [".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts) for path in files]
    install_import_hook([module.removesuffix(".__init__") for module in modules], "beartype.beartype")


def pytest_ignore_collect(collection_path, config):
    """`-m gpu` imports only the tests in `gpu`: a machine with a GPU may lack what the others import."""
    if config.getoption("markexpr") != "gpu":
        return None
    is_wanted = GPU_TESTS.is_relative_to(collection_path) or collection_path.is_relative_to(GPU_TESTS)
    return None if is_wanted else True


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Without collections of garbage, which take a third of the time, since all that is imported here stays."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.fixture
def unchecked_types(monkeypatch):
    """Without the checks of types, as outside of the tests: where the code has checks of its own."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


@pytest.fixture(scope="session")
def warm_reader() -> Iterator[WarmReader]:
    """Reads exports back in forks of one process."""
    reader = WarmReader()
    yield reader
    reader.close()


@pytest.fixture(scope="session", autouse=True)
def no_worker_outlives_the_tests():
    """Ends the warm workers while coverage still listens to them."""
    yield
    from tests.workers import end_workers

    end_workers()


# Else nanobind takes what Triton still holds for leaks, and lists them.
atexit.register(gc.unfreeze)


@pytest.fixture(scope="module", autouse=True)
def garbage_is_not_sought_in_libraries():
    """Else each collection of garbage looks at all that was imported, which takes a fifth of the time in `edges`."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture
def mounted_bucket(monkeypatch):
    """Files are as in a bucket that is mounted as a folder: without modes, renames of folders and syncs of them."""
    chmod, fsync, rename = os.chmod, os.fsync, os.rename

    def refusing(call, refuses, code):
        def called(*arguments, **options):
            if refuses(*arguments):
                raise OSError(code, os.strerror(code))
            return call(*arguments, **options)

        return called

    monkeypatch.setattr(os, "chmod", refusing(chmod, lambda *_: True, errno.ENOTSUP))
    monkeypatch.setattr(os, "fsync", refusing(fsync, lambda file: stat.S_ISDIR(os.fstat(file).st_mode), errno.EINVAL))
    monkeypatch.setattr(os, "rename", refusing(rename, lambda path, to: os.path.isdir(path), errno.EMFILE))
