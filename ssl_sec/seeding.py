"""Seeds derived from the run's seed and their purpose, so that no draw depends on another."""

import hashlib

import torch
from jaxtyping import Float, Int64
from torch import Tensor


def derived_seed(seed: int, *parts: int | str) -> int:
    """A 63-bit seed that is a function of its arguments alone, the same on every machine and version.

    Args:
        seed: the run's seed.
        parts: purpose of the draws, for example ("views", step).
    """
    text = ":".join(map(str, (seed, *parts)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def mix(x: Int64[Tensor, "*shape"]) -> Int64[Tensor, "*shape"]:
    """The finaliser of splitmix64 (Steele, Lea and Flood, 2014): a bijection that looks random, on any device."""
    # The constants of splitmix64 as signed numbers: int64 products wrap to the same bits as unsigned ones.
    # The first `^` keeps Inductor from adding the constant to another one, to more than 64 bits.
    x = (x ^ 0) - 0x61C8864680B583EB
    x = (x ^ _shift_right(x, 30)) * -0x40A7B892E31B1A47
    x = (x ^ _shift_right(x, 27)) * -0x6B2FB644ECCEEE15
    return x ^ _shift_right(x, 31)


def uniform(draw: int, count: int) -> list[float]:
    """Numbers in [0, 1) that are a function of `draw`, any int64, alone."""
    bits = mix(mix(torch.tensor([draw])) + torch.arange(count))
    return (_shift_right(bits, 11).double() / 2**53).tolist()


def normal(keys: Int64[Tensor, "*shape"], dtype: torch.dtype) -> Float[Tensor, "*shape"]:
    """Standard normal numbers that are functions of their keys alone (Box and Muller 1958), on any device.

    Args:
        keys: distinct keys give independent numbers; they need not look random.
        dtype: float32 or float64.
    """
    bits = mix(keys)
    # Halves are exact in float32, and the logarithm's argument is never 0.
    radius, turn = ((_shift_right(each, 41).to(dtype) + 0.5) / 2**23 for each in (bits, mix(bits)))
    return (-2 * radius.log()).sqrt() * (2 * torch.pi * turn).cos()


def kept_in_place(drawn: Tensor, before: Tensor | None) -> Tensor:
    """A step's draw, in the memory of the earlier one of the same shape and device: recorded steps read it there."""
    if before is None or before.shape != drawn.shape or before.device != drawn.device:
        return drawn
    return before.copy_(drawn)


def _shift_right(x: Int64[Tensor, "*shape"], bits: int) -> Int64[Tensor, "*shape"]:
    # torch's >> repeats the sign; the mixer needs zeros.
    return (x >> bits) & ((1 << (64 - bits)) - 1)
