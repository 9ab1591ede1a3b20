"""The encoded images of a training set, whether or not a run holds them in memory as pixels."""

from dataclasses import replace

from ssl_sec.data.config import DataConfig, FolderConfig, ParquetConfig, RecordsConfig, WebDatasetConfig
from ssl_sec.data.image_set import EncodedImages
from ssl_sec.data.shards.streamed import StreamedImages

# Images of which blocks are kept in memory where a run would not read by blocks.
_WINDOW = 4096


def open_encoded(data: DataConfig) -> EncodedImages | StreamedImages | None:
    """The training set with images that are decoded when they are read; None for a published set.

    Nothing is decoded but the first image, and nothing is laid out on the disk.

    Raises:
        DataError: as the data set's opener says.
    """
    if isinstance(data, ParquetConfig | WebDatasetConfig):
        encoded = replace(data, resident_limit_mib=0, shuffle_window=data.shuffle_window or _WINDOW).open("train")
    elif isinstance(data, FolderConfig | RecordsConfig):
        encoded = replace(data, resident_limit_mib=0).open("train")
    else:
        return None
    assert isinstance(encoded, EncodedImages | StreamedImages)
    return encoded
