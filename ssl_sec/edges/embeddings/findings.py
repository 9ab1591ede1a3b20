"""The results of a search of neighbours, in words."""

from collections import Counter
from dataclasses import dataclass
from functools import cached_property

import pyarrow as pa

from ssl_sec.embeddings.tables import grouped_images
from ssl_sec.errors import counted

# A group of more images, and of more than this share of them, is hardly of near-duplicates.
_LARGE_GROUP, LARGE_SHARE = 10, 0.1
# Nor are the pairs, if there are more of them for each image on average, and more than this share of all pairs.
_MANY_PAIRS, _LARGE_SHARE_OF_PAIRS = 10, 0.01
# The split of images whose files name none.
_UNNAMED = "unnamed"


@dataclass(frozen=True, kw_only=True)
class Findings:
    """The results of a search.

    Attributes:
        output: the folder or URL of the files.
        num_images: number of images whose neighbours were searched.
        num_searched: number of images among which they were searched.
        k: number of neighbours of each image.
        images_per_s: speed of the newly searched parts; None if there were none.
        nearest_of_same_label: share of the images whose nearest neighbour has their label, in [0, 1]; None without
            labels that can be compared.
        is_one_set: whether the images were searched among themselves.
        is_centred: whether the mean of the embeddings was subtracted.
        duplicates_above: the least cosine of near-duplicates.
        separating: the cosine with their nearest neighbour that 10 % of the images have or exceed.
        num_pairs: number of pairs of near-duplicates.
        num_conflicts: number of listed pairs with different labels; None without labels that can be compared.
        num_redundant: number of images that others of their group make redundant.
        num_redundant_train: number of those that `data.leave_out` leaves out: of the split `train`, or of none.
        duplicates: the listed pairs, the most similar first.
        outliers: the most unusual images, by norm and by distance.
        examples: the neighbours of some images, k rows for each image.
    """

    output: str
    num_images: int
    num_searched: int
    k: int
    images_per_s: float | None
    nearest_of_same_label: float | None
    is_one_set: bool
    is_centred: bool
    duplicates_above: float
    separating: float
    num_pairs: int
    num_conflicts: int | None
    num_redundant: int
    num_redundant_train: int
    duplicates: pa.Table
    outliers: pa.Table
    examples: pa.Table

    @property
    def pairs_by_split(self) -> dict[tuple[str, str], int]:
        """Number of listed pairs for each pair of splits, in the order of their names."""
        columns = (self.duplicates[name].to_pylist() for name in ("split", "neighbour_split"))
        splits = zip(*([split or _UNNAMED for split in column] for column in columns), strict=True)
        return dict(sorted(Counter((min(pair), max(pair)) for pair in splits).items()))

    @cached_property
    def group_sizes(self) -> list[int]:
        """Number of images of each group of near-duplicates that the listed pairs form, the largest first."""
        images = grouped_images(self.duplicates, self.is_one_set)
        return sorted(Counter(images["group"].to_pylist()).values(), reverse=True)

    @property
    def doubt(self) -> str | None:
        """Why the pairs are hardly near-duplicates, and what to do; None if they may be."""
        num_all = self.num_images if self.is_one_set else self.num_images + self.num_searched
        largest = max(self.group_sizes, default=0)
        others = (self.num_images - 1) / 2 if self.is_one_set else self.num_searched
        if largest > max(_LARGE_GROUP, LARGE_SHARE * num_all):
            found = f"one group of near-duplicates has {largest:,} of {num_all:,} images"
        elif self.num_pairs > self.num_images * max(_MANY_PAIRS, _LARGE_SHARE_OF_PAIRS * others):
            found = f"{self.num_pairs / (self.num_images * others):.0%} of all pairs are near-duplicates"
        else:
            return None
        advice: list[str] = []
        if self.separating > self.duplicates_above:  # else a few queries have most of the pairs
            advice.append(
                f"duplicates_above={self.separating:.6g} leaves {LARGE_SHARE:.0%} of the images with a near-duplicate"
            )
        if not self.is_centred:
            advice.append("centred=true may separate better")
        doubt = f"{found}: cosines of {self.duplicates_above:g} or more do not separate them with this encoder"
        return "; ".join([doubt, *([", and ".join(advice)] if advice else [])])

    @property
    def tables(self) -> list[str]:
        """The names of the tables of which there is one each."""
        return ["duplicates.parquet", *(["redundant.parquet"] if self.is_one_set else []), "outliers.parquet"]

    @property
    def num_outliers(self) -> dict[str, int]:
        """Number of images that are listed as outliers by `norm` and by `distance`."""
        kinds = Counter(self.outliers["by"].to_pylist())
        return {kind: kinds[kind] for kind in ("norm", "distance")}

    def lines(self) -> list[str]:
        """The results, one line each."""
        speed = "" if self.images_per_s is None else f", {self.images_per_s:,.0f} images/s"
        found = [f"searched: the {self.k} nearest of {self.num_images:,} images among {self.num_searched:,}{speed}"]
        if self.nearest_of_same_label is not None:
            found.append(f"same label as the nearest neighbour: {self.nearest_of_same_label:.1%} of the images")
        found.append(f"near-duplicates: {counted(self.num_pairs, 'pair')} of cosine {self.duplicates_above:g} or more")
        if self.num_pairs:
            sizes = self.group_sizes
            found[-1] += (
                f" in {counted(len(sizes), 'group')} of {counted(sum(sizes), 'image')}, the largest of {sizes[0]:,}"
            )
            if len(self.duplicates) < self.num_pairs:
                found[-1] += f"; listed and grouped are the {len(self.duplicates):,} most similar"
            counts = [f"{count:,} {a} and {b}" for (a, b), count in self.pairs_by_split.items()]
            if set(self.pairs_by_split) != {(_UNNAMED, _UNNAMED)}:
                found.append(f"splits of the pairs: {', '.join(counts)}")
            if self.num_conflicts is not None:
                found.append(f"pairs with different labels: {self.num_conflicts:,}")
            if self.num_redundant and self.doubt is None:
                found.append(f"made redundant by them: {counted(self.num_redundant, 'image')}")
                if self.num_redundant_train:
                    is_all = self.num_redundant_train == self.num_redundant
                    whom = "them" if is_all else f"the {self.num_redundant_train:,} of the train split"
                    found[-1] += f"; data.leave_out=[{self.output}/redundant.parquet] trains without {whom}"
        listed = " and ".join(f"{count:,} by {kind}" for kind, count in self.num_outliers.items())
        found.append(f"outliers: listed are the most unusual images, {listed}, to be looked at, in order")
        return found

    def __str__(self) -> str:
        return "\n".join(
            [
                *self.lines(),
                f"tables: {self.output}/neighbours-*.parquet, images-*.parquet, {', '.join(self.tables)}",
                f"page: {self.output}/index.html",
            ]
        )
