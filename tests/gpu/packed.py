"""The modules that a machine without a network has for a campaign: torch and torchvision, and what is packed for it."""

import re
from importlib.metadata import PackageNotFoundError, distribution, packages_distributions

from benchmarks.campaign.packing import WHEELS


def missing_modules() -> set[str]:
    """The installed modules, top-level, that such a machine lacks."""
    there = _with_dependencies("torch", "torchvision") | {_normalised(name) for name in WHEELS}
    return {
        module
        for module, names in packages_distributions().items()
        if there.isdisjoint(_normalised(name) for name in names)
    }


def _with_dependencies(*names: str) -> set[str]:
    found = set[str]()
    waiting = [_normalised(name) for name in names]
    while waiting:
        name = waiting.pop()
        try:
            requirements = distribution(name).requires or []
        except PackageNotFoundError:  # of another platform, or without CUDA
            continue
        needed = {_normalised(_name(each)) for each in requirements if "extra ==" not in each}
        waiting += needed - found
        found |= {name} | needed
    return found


def _name(requirement: str) -> str:
    match = re.match(r"[\w.-]+", requirement)
    assert match is not None
    return match[0]


def _normalised(name: str) -> str:
    """A project's name as PEP 503 compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()
