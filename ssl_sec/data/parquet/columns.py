"""The columns of Parquet files that hold images and their classes."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Columns:
    """The columns of Parquet files.

    Attributes:
        image_column: column of images, struct{bytes, path}; None takes the only one of that type.
        label_column: column of classes, integers ≥ 0 or names. None for images without labels, as are those of files
            without a column `label`.
    """

    image_column: str | None = None
    label_column: str | None = "label"


NAMED_AS_USUAL = Columns()
