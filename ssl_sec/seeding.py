"""Seeds derived from the run's seed and from what they are for, so that no draw depends on another."""

import hashlib


def derived_seed(seed: int, *parts: int | str) -> int:
    """A 63-bit seed that is a function of its arguments alone, the same on every machine and version.

    Args:
        seed: the run's seed.
        parts: what the draws are for, for example ("views", step).
    """
    text = ":".join(map(str, (seed, *parts)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
