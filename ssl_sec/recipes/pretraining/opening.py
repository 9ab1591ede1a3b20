"""The encoded images of a set, whether or not a run holds them in memory as pixels."""

from dataclasses import replace

from ssl_sec.data.config import DataConfig, FolderConfig, ParquetConfig, RecordsConfig, WebDatasetConfig
from ssl_sec.data.encoded_images import DecodedImages
from ssl_sec.data.image_set import Split

# Number of images in the window of a set that a run would not read by blocks.
_WINDOW = 4096


def open_encoded(data: DataConfig, split: Split = "train") -> DecodedImages | None:
    """The set with images that are decoded when they are read; None for a published set.

    Only the first image is decoded, and no pixels are written to disk.

    Args:
        data: the set.
        split: the part of the set.

    Raises:
        DataError: the data set cannot be opened; see its opener.
    """
    if isinstance(data, ParquetConfig | WebDatasetConfig):
        encoded = replace(data.undecoded(), shuffle_window=data.shuffle_window or _WINDOW).open(split)
    elif isinstance(data, FolderConfig | RecordsConfig):
        encoded = data.undecoded().open(split)
    else:
        return None
    assert isinstance(encoded, DecodedImages)
    return encoded
