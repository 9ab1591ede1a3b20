"""Where configs are looked for: those of the package, and a user's own.

The user's own configs are in the folder given by `--config-dir` and in the folder `configs` of the current directory.
Each has experiments and options as the package has them: `experiment/mine.yaml`, `data/mine.yaml`. A name in the
package takes precedence: a user's file of that name is refused when it is used, unless its content is the same.
"""

import itertools
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ssl_sec.errors import ConfigError, first_line, printable

_PACKAGED = Path(__file__).parents[2] / "configs"
CONFIG_FOLDER = _PACKAGED if _PACKAGED.is_dir() else Path(__file__).parents[3] / "configs"
OPTION = "--config-dir"

_given: ContextVar[Path | None] = ContextVar("config folder", default=None)


@dataclass(frozen=True, kw_only=True, slots=True)
class ConfigFile:
    """A file of experiments or options."""

    path: Path
    is_own: bool

    @property
    def shown(self) -> str:
        """Its name in messages: the path, relative to the current directory if the file is below it."""
        path = self.path
        return printable(str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path))

    @property
    def comment(self) -> list[str]:
        """The comment lines at its beginning; none if it cannot be read."""
        try:
            lines = self.path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError):
            return []
        comment = itertools.takewhile(lambda line: line.startswith("#"), lines)
        return [line[1:].strip() for line in comment if not line.startswith("# @package")]

    @property
    def explanation(self) -> str:
        """The first sentence of that comment; empty if there is none."""
        paragraph = " ".join(itertools.takewhile(bool, self.comment))
        return re.split(r"(?<=\.) (?=[A-Z])", paragraph)[0]

    def read(self) -> dict[str, Any]:
        """Its values, with interpolations unresolved.

        Raises:
            ConfigError: if it cannot be read, or is not YAML with keys and values.
        """
        if not self.is_own:  # OmegaConf reads the same values, twenty times slower
            return yaml.load(self.path.read_text(encoding="utf-8"), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        try:
            node = OmegaConf.load(self.path)
        except yaml.MarkedYAMLError as error:
            raise ConfigError(f"{self.shown}: {first_line(error)}") from error
        except (OSError, UnicodeDecodeError, yaml.YAMLError, OmegaConfBaseException) as error:
            raise ConfigError(f"{self.shown}: cannot be read: {first_line(error)}") from error
        if not isinstance(node, DictConfig):
            raise ConfigError(f"{self.shown}: found a list, must be keys and values")
        return as_mapping(node)


def as_mapping(config: DictConfig, *, resolve: bool = False) -> dict[str, Any]:
    """Nested values, with `???` left in."""
    values = OmegaConf.to_container(config, resolve=resolve)
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


@contextmanager
def own_configs(folder: str | None) -> Iterator[None]:
    """Also looks for configs in this folder until the context ends.

    Raises:
        ConfigError: if there is no such folder.
    """
    path = None if folder is None else Path(folder).expanduser()
    if path is not None and not path.is_dir():
        raise ConfigError(f"{OPTION}: found {printable(str(folder))!r}, must be a folder that exists")
    before = _given.set(path or _given.get())
    try:
        yield
    finally:
        _given.reset(before)


def without_folder(arguments: Sequence[str]) -> tuple[str | None, list[str]]:
    """The folder that `--config-dir` names, and the other arguments.

    Raises:
        ConfigError: if no folder is named.
    """
    folder, rest = None, list[str]()
    remaining = iter(arguments)
    for argument in remaining:
        option, equals, value = argument.partition("=")
        if option != OPTION:
            rest.append(argument)
            continue
        folder = value if equals else next(remaining, "")
        if not folder:
            raise ConfigError(f"{OPTION}: found nothing, must be a folder that exists")
    return folder, rest


def own_folders() -> list[Path]:
    """The user's folders: the one that was given, then the one in the current directory."""
    found = [_given.get(), Path("configs")]
    ours = CONFIG_FOLDER.resolve()
    folders = [folder.resolve() for folder in found if folder is not None and folder.is_dir()]
    return [folder for folder in dict.fromkeys(folders) if folder != ours]


def own_options(group: str) -> dict[str, ConfigFile]:
    """The user's own options of a group by name."""
    found: dict[str, ConfigFile] = {}
    for folder in own_folders():
        for path in sorted((folder / group).glob("*.yaml")):
            if not (CONFIG_FOLDER / group / path.name).is_file():
                found.setdefault(path.stem, ConfigFile(path=path, is_own=True))
    return found


def config_file(group: str, name: str) -> ConfigFile | None:
    """The file of an option or an experiment; None if there is none.

    Raises:
        ConfigError: if the package and the user have different ones.
    """
    packaged = CONFIG_FOLDER / group / f"{name}.yaml"
    try:
        if not packaged.is_file():
            return own_options(group).get(name)
    except OSError:  # no file can have that name
        return None
    for path in (folder / group / f"{name}.yaml" for folder in own_folders()):
        if path.is_file() and path.read_bytes() != packaged.read_bytes():
            raise doubled(group, name, ConfigFile(path=path, is_own=True))
    return ConfigFile(path=packaged, is_own=False)


def doubled(group: str, name: str, file: ConfigFile) -> ConfigError:
    """The error about a user's file whose name is also in the package."""
    return ConfigError(f"{group}: found {name!r} in the package and in {file.shown}; give your file another name")
