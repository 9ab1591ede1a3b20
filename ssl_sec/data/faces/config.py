"""The options of the sets of pairs on which face verification is measured."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ssl_sec.data.decode import Decoding
from ssl_sec.data.faces.pairs import (
    NamedPair,
    VerificationPairs,
    open_bin,
    open_lfw_pairs,
    open_pair_table,
    read_bin_pairs,
    read_lfw_pairs,
    read_pair_table,
    require_folds,
)
from ssl_sec.data.parquet.columns import Columns
from ssl_sec.effects import NoEffect
from ssl_sec.rules import CountOrZero, Local, PlainName
from ssl_sec.settings import Settings


@dataclass(frozen=True, kw_only=True)
class _PairsConfig(Settings, key="test_sets"):
    """The options of every set of pairs; its images have the size and the channels of the training images.

    Attributes:
        title: its name in metrics and plots; None takes that of the file of pairs.
        resident_limit_mib: images that are no larger once decoded are kept in memory.
    """

    title: str | None = None
    resident_limit_mib: NoEffect[CountOrZero] = Decoding.resident_limit_mib

    def __post_init__(self) -> None:
        super().__post_init__()
        PlainName().check("test_sets.title", self.shown_title)

    @property
    def shown_title(self) -> str:
        """The name of the set in metrics and plots."""
        return self.title or Path(self._list).stem

    @property
    @abstractmethod
    def _list(self) -> str:
        """The file that lists the pairs."""

    @abstractmethod
    def require_list(self) -> None:
        """Checks the list of the pairs, without decoding images.

        Raises:
            DataError: it is damaged, a line is malformed, or there are too few pairs, or those of one kind or one fold.
        """

    @abstractmethod
    def open(self, decoding: Decoding) -> VerificationPairs:
        """The pairs with their images."""

    def _require_folds(self, pairs: Sequence[NamedPair]) -> None:
        require_folds((pair.fold for pair in pairs), f"test set {self.shown_title}")


@dataclass(frozen=True, kw_only=True)
class BinPairsConfig(_PairsConfig):
    """A .bin of InsightFace.

    Attributes:
        path: the .bin file.
    """

    name: Literal["bin"] = "bin"
    path: Local

    @property
    def _list(self) -> str:
        return self.path

    def require_list(self) -> None:
        """Reads the file, some tens of MB in a tenth of a second, and checks the pairs."""
        read_bin_pairs(Path(self.path).expanduser())

    def open(self, decoding: Decoding) -> VerificationPairs:
        """The pairs with their images."""
        return open_bin(Path(self.path).expanduser(), self.title, decoding)


@dataclass(frozen=True, kw_only=True)
class LFWPairsConfig(_PairsConfig):
    """A list of pairs in LFW's format.

    Attributes:
        pairs: the file that lists the pairs, in the format of LFW's pairs.txt.
        root: the folder of the images.
    """

    name: Literal["lfw_pairs"] = "lfw_pairs"
    pairs: Local
    root: Local

    @property
    def _list(self) -> str:
        return self.pairs

    def require_list(self) -> None:
        """Checks the lines of the list."""
        self._require_folds(read_lfw_pairs(Path(self.pairs).expanduser()))

    def open(self, decoding: Decoding) -> VerificationPairs:
        """The pairs with their images."""
        return open_lfw_pairs(Path(self.pairs).expanduser(), Path(self.root).expanduser(), self.title, decoding)


@dataclass(frozen=True, kw_only=True)
class PairTableConfig(_PairsConfig):
    """A CSV file of pairs; see `ssl_sec.data.faces.pairs.open_pair_table`.

    Attributes:
        pairs: the CSV file of the pairs.
        images: the folder of the images, at any depth, or a list of Parquet files that hold them.
        image_column: the column of the images in Parquet files; None finds the one that holds images.
        label_column: the column of the person in Parquet files.
    """

    name: Literal["pairs"] = "pairs"
    pairs: Local
    images: Local | tuple[str, ...]
    image_column: str | None = Columns.image_column
    label_column: str | None = Columns.label_column

    @property
    def _list(self) -> str:
        return self.pairs

    def require_list(self) -> None:
        """Checks the lines of the table."""
        self._require_folds(read_pair_table(Path(self.pairs).expanduser()))

    def open(self, decoding: Decoding) -> VerificationPairs:
        """The pairs with their images."""
        images = Path(self.images).expanduser() if isinstance(self.images, str) else list(self.images)
        table = Path(self.pairs).expanduser()
        columns = Columns(image_column=self.image_column, label_column=self.label_column)
        return open_pair_table(table, images, self.title, decoding, columns)


PairsConfig = BinPairsConfig | LFWPairsConfig | PairTableConfig
