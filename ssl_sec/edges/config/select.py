"""The configuration of jobs.select."""

from dataclasses import dataclass
from typing import Annotated, Literal

from ssl_sec.data.config import DataConfig
from ssl_sec.recipes.tracking import OutputDir
from ssl_sec.rules import Count, CountOrZero, Name, Range
from ssl_sec.settings import Settings


@dataclass(frozen=True, kw_only=True)
class SelectConfig(Settings):
    """The images to label first, of embedded images without labels: typical ones of all regions (TypiClust).

    Attributes:
        embeddings: the folder or URL that jobs.embed wrote, or Parquet files of another program with a column
            `embedding`: a folder, or one file.
        output: a folder or a URL, for the list as CSV and Parquet, and the page index.html.
        count: number of images to choose.
        split: the split to choose from; None if there is only one.
        labelled: lists of images that have labels already, as .csv or .parquet with a column `row` (and `split`) or
            `path`, as this job writes them; the chosen ones complement them.
        k: nearest images that define how typical an image is of its cluster.
        seed: seed of the clustering.
        device: device of the computation; auto takes a GPU if there is one.
        images_shown: images on the page.
        data: data set of the images on the page, where the one that was embedded has been moved; None takes that one.
    """

    embeddings: OutputDir
    output: OutputDir
    count: Count
    split: Name | None = None
    labelled: tuple[str, ...] = ()
    k: Annotated[int, Range(ge=1, le=1000)] = 20
    seed: Annotated[int, Range(ge=0, lt=2**32)] = 0
    device: Literal["auto", "cpu", "cuda"] = "auto"
    images_shown: CountOrZero = 500
    data: DataConfig | None = None
