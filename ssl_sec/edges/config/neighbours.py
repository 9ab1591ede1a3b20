"""The configuration of jobs.neighbours."""

from dataclasses import dataclass
from math import ceil
from typing import Annotated

from ssl_sec.data.config import DataConfig
from ssl_sec.recipes.tracking import OutputDir
from ssl_sec.rules import Count, CountOrZero, Range
from ssl_sec.settings import Settings
from ssl_sec.training.config import RuntimeConfig

# Of each kind, unless the user gives a number.
_MOST_OUTLIERS = 100


@dataclass(frozen=True, kw_only=True)
class NeighboursConfig(Settings):
    """The neighbours, near-duplicates and outliers of embedded images, by exact search.

    Attributes:
        embeddings: the folder or URL that jobs.embed wrote, or Parquet files of another program with a column
            `embedding`: a folder, or one file.
        output: a folder or a URL, for tables as Parquet and the page index.html.
        queries: the images whose neighbours are searched among the embeddings, given in the same way; None
            searches the neighbours of each image among the others.
        k: number of neighbours of each image.
        centred: whether the mean of the embeddings is subtracted from them, and from the queries, before the cosines
            are computed; cosines of unlike images are then near 0, also with a weakly trained encoder. Norms are those
            of the embeddings as they are.
        duplicates_above: least cosine of near-duplicates.
        max_duplicates: number of pairs of near-duplicates that are listed, the most similar first; all are counted.
        num_outliers: number of the most unusual images that outliers.parquet lists by norm, and as many by distance, in
            order; look at them, since nothing here decides whether one is an error. None takes 1 % of the images,
            at least 1 and at most 100.
        queries_per_part: images in a file of neighbours, which are compared with each block that is read.
        images_shown: images of each kind on the page.
        data: data set of the images on the page, where the one that was embedded has been moved; None takes that one.
    """

    embeddings: OutputDir
    output: OutputDir
    runtime: RuntimeConfig
    queries: OutputDir | None = None
    k: Annotated[int, Range(ge=1, le=10_000)] = 10
    centred: bool = False
    duplicates_above: Annotated[float, Range(gt=-1, le=1)] = 0.95
    max_duplicates: Count = 1_000_000
    num_outliers: CountOrZero | None = None
    queries_per_part: Count = 16_384
    images_shown: CountOrZero = 50
    data: DataConfig | None = None

    def outliers_among(self, num_images: int) -> int:
        """The number of images listed as outliers of each kind."""
        return min(_MOST_OUTLIERS, ceil(num_images / 100)) if self.num_outliers is None else self.num_outliers
