"""What a mistaken override was meant to be: other words for keys, keys of other options, sweeps."""

import difflib
from collections.abc import Iterable, Mapping, Sequence

from ssl_sec.errors import nearest

# What other programs call our keys -> the last part of ours.
_SYNONYMS: Mapping[str, Sequence[str]] = {
    "amp": ("precision",),
    "arch": ("encoder",),
    "backbone": ("encoder",),
    "batch": ("global_batch_size",),
    "batch_size": ("global_batch_size",),
    "bf16": ("precision",),
    "bs": ("global_batch_size",),
    "checkpoint": ("weights",),
    "clip": ("min_scale",),
    "color_strength": ("colour_strength",),
    "cuda": ("device",),
    "data_dir": ("root",),
    "dataset": ("data",),
    "decay": ("weight_decay",),
    "dtype": ("precision",),
    "embedding_dim": ("dim",),
    "epochs": ("steps",),
    "fp16": ("precision",),
    "gpu": ("device",),
    "gpus": ("num_workers",),
    "image_size": ("image_size_px", "size_px"),
    "img_size": ("image_size_px", "size_px"),
    "init": ("weights",),
    "iterations": ("steps", "epochs"),
    "jitter": ("colour_strength",),
    "lr": ("learning_rate",),
    "max_epochs": ("epochs", "steps"),
    "max_steps": ("steps", "epochs"),
    "model": ("encoder",),
    "name": ("run_name",),
    "network": ("encoder",),
    "num_gpus": ("num_workers",),
    "optim": ("optimiser",),
    "optimizer": ("optimiser",),
    "out": ("output_dir",),
    "output": ("output_dir",),
    "path": ("root",),
    "precision_bits": ("precision",),
    "project": ("experiment",),
    "resize": ("image_size_px", "size_px"),
    "save_dir": ("output_dir",),
    "size": ("image_size_px", "size_px"),
    "steps": ("epochs",),
    "tau": ("temperature",),
    "warmup": ("warmup_epochs",),
    "wd": ("weight_decay",),
    "workers": ("num_workers", "num_loader_workers"),
    "world_size": ("num_workers",),
}


def suggestion(key: str, keys: Iterable[str], elsewhere: Mapping[str, Sequence[str]]) -> str:
    """A clause with the keys that an unknown one was meant to be.

    Args:
        key: the unknown one, dotted.
        keys: those that there are, and the groups.
        elsewhere: keys that there would be with other options -> those options, as `group=option`.

    Returns:
        For example ``did you mean 'optimiser.learning_rate'?``.
    """
    there = _meant(key, keys)
    if there:
        return f"did you mean {' or '.join(map(repr, there))}?"
    possible = _meant(key, elsewhere)
    if possible:
        return f"did you mean {possible[0]!r}, with {in_words(elsewhere[possible[0]])}?"
    return nearest(key, keys)


def in_words(options: Sequence[str]) -> str:
    """Options, the first few of many."""
    *rest, last = options if len(options) <= 4 else [*options[:3], "others"]
    return f"{', '.join(rest)} or {last}" if rest else last


def swept(job: str, override: str, is_list: bool) -> str:
    """The error about several values for a key of a single run, and where they can be given.

    Args:
        job: that was asked for one run.
        override: `key=value,value`.
        is_list: whether the key takes a list.
    """
    key, _, values = override.partition("=")
    found = f"{key}: found several values, {values},"
    if is_list:
        return f"{found} must be one list: '{key}=[{values}]'"
    ways = [f"python -m jobs.submit {job} ... {override} sweeps on a Ray cluster"]
    if job == "pretrain" and key in ("seed", "constraint"):
        here = f"seeds=[{values}]" if key == "seed" else f"arms=[{values}]"
        ways.append(f"python -m jobs.ablate ... '{here}' runs one after the other on this machine")
    sweeps = job in ("pretrain", "metric_learning", "face", "probe")
    return f"{found} must be one; {'; '.join(ways)}" if sweeps else f"{found} must be one"


def _meant(key: str, keys: Iterable[str]) -> list[str]:
    """The keys whose last part is that of `key`, or is another word for it."""
    before, _, last = key.rpartition(".")
    wanted = (last, *_SYNONYMS.get(last, ()))
    found = [
        known
        for word in dict.fromkeys(wanted)
        for known in sorted(keys)
        if known != key and (known == word or (known.endswith(f".{word}") and word != "name"))
    ]
    alike = [known for known in found if difflib.get_close_matches(before, [known.rpartition(".")[0]])]
    return (alike if before and alike else found)[:3]
