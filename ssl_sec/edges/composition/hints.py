"""Suggestions for a mistaken override: other words for keys, keys of other options, sweeps."""

import difflib
from collections.abc import Iterable, Mapping, Sequence

from ssl_sec.edges.packaging import command
from ssl_sec.errors import nearest
from ssl_sec.recipes.registry import PRETRAIN, RECIPES, trainings

# Names in other programs -> the last part of our key.
_SYNONYMS: Mapping[str, Sequence[str]] = {
    "amp": ("precision",),
    "arch": ("encoder",),
    "backbone": ("encoder",),
    "batch": ("global_batch_size",),
    "batch_size": ("global_batch_size",),
    "bf16": ("precision",),
    "bs": ("global_batch_size",),
    "checkpoint": ("weights",),
    "ckpt": ("weights",),
    "clip": ("min_scale",),
    "clip_grad": ("clip_norm",),
    "clip_grad_norm": ("clip_norm",),
    "color_strength": ("colour_strength",),
    "cuda": ("device",),
    "data_dir": ("root",),
    "data_path": ("root",),
    "dataset": ("data",),
    "decay": ("weight_decay",),
    "dtype": ("precision",),
    "embedding_dim": ("dim",),
    "embedding_size": ("dim",),
    "epochs": ("steps",),
    "feat_dim": ("dim",),
    "fp16": ("precision",),
    "gpu": ("device",),
    "gpus": ("num_workers",),
    "grad_clip": ("clip_norm",),
    "gradient_clip_val": ("clip_norm",),
    "image_size": ("image_size_px", "size_px"),
    "img_size": ("image_size_px", "size_px"),
    "init": ("weights",),
    "iterations": ("steps", "epochs"),
    "jitter": ("colour_strength",),
    "log_every_n_steps": ("log_every_steps",),
    "lr": ("learning_rate",),
    "max_epochs": ("epochs", "steps"),
    "max_grad_norm": ("clip_norm",),
    "max_steps": ("steps", "epochs"),
    "model": ("encoder",),
    "name": ("run_name",),
    "network": ("encoder",),
    "num_gpus": ("num_workers",),
    "num_workers": ("num_loader_workers",),
    "optim": ("optimiser",),
    "optimizer": ("optimiser",),
    "out": ("output_dir",),
    "output": ("output_dir",),
    "path": ("root",),
    "precision_bits": ("precision",),
    "print_freq": ("log_every_steps",),
    "project": ("experiment",),
    "resize": ("image_size_px", "size_px"),
    "save_dir": ("output_dir",),
    "size": ("image_size_px", "size_px"),
    "steps": ("epochs",),
    "tau": ("temperature",),
    "temp": ("temperature",),
    "train_dir": ("root",),
    "warmup": ("warmup_epochs",),
    "wd": ("weight_decay",),
    "workers": ("num_workers", "num_loader_workers"),
    "world_size": ("num_workers",),
}


def suggestion(key: str, keys: Iterable[str], others: Sequence[str] = ()) -> str:
    """A clause that suggests keys for an unknown one.

    Args:
        key: the unknown key, dotted.
        keys: the keys that exist, and the groups.
        others: jobs that have the key.

    Returns:
        For example ``did you mean 'optimiser.learning_rate'?``.
    """
    known = list(keys)
    if found := meant(key, known):
        return f"did you mean {listed_names([repr(one) for one in found])}?"
    if others:
        return f"it is a key of {listed_names([f'jobs.{job}' for job in others], 'and')}"
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    return nearest(key, known if close else [one for one in known if "." not in one])


def is_plain(key: str, keys: Iterable[str]) -> bool:
    """Whether these keys alone explain an unknown one: it is another word for one of them, or a typing error."""
    known = list(keys)
    before, point, last = key.rpartition(".")
    found = [one for one in meant(key, known) if one.startswith(before + point)]
    has_word = last in _SYNONYMS and not is_of_probe(key, found)
    return has_word or difflib.get_close_matches(key, known, n=1, cutoff=0.9) != []


def is_of_probe(key: str, found: Sequence[str]) -> bool:
    """Whether all keys that an unknown one may mean belong to the probe at the end of a training, or there are none.

    Such a key more likely belongs to the training, whose chosen options do not have it.
    """
    return not found or not key.startswith("probe.") and all(one.startswith("probe.") for one in found)


def meant(key: str, keys: Iterable[str]) -> list[str]:
    """The keys whose last part is that of `key`, or is another word for it."""
    before, _, last = key.rpartition(".")
    wanted = [last, *_SYNONYMS.get(last, ())]
    found = [
        known
        for known in sorted(keys, key=lambda known: (known not in wanted, known))
        if known != key and (known in wanted or (known.rpartition(".")[2] in wanted and not known.endswith(".name")))
    ]
    alike = [known for known in found if difflib.get_close_matches(before, [known.rpartition(".")[0]])]
    return (alike if before and alike else found)[:3]


def listed_names(names: Sequence[str], last: str = "or") -> str:
    """Names in a row; of many, only the first few."""
    *rest, end = names if len(names) <= 4 else [*names[:3], "others"]
    return f"{', '.join(rest)} {last} {end}" if rest else end


def swept(job: str, override: str, is_list: bool, is_text: bool) -> str:
    """The error about several values for a key of a single run; it says where several values are allowed.

    Args:
        job: name of the job that was given several values.
        override: `key=value,value`.
        is_list: whether the key takes a list.
        is_text: whether it takes a text, which may have a comma.
    """
    key, _, values = override.partition("=")
    found = f"{key}: found several values, {values},"
    if is_list:
        return f"{found} must be one list: '{key}=[{values}]'"
    quoted = f""", or in quotes: '{key}="{values}"'""" if is_text else ""
    found = f"{found} must be one{quoted}"
    ways = [f"{command('submit')} {job} ... {override} sweeps on a Ray cluster"]
    if job in trainings() and key in ("seed", "constraint"):
        here = f"seeds=[{values}]" if key == "seed" else f"arms=[{values}]"
        training = "" if job == PRETRAIN.name else f"job={job} "
        ways.append(f"{command('ablate')} {training}... '{here}' runs one after the other on this machine")
    return f"{found}; {'; '.join(ways)}" if job in RECIPES else found
