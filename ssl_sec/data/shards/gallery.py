"""Test files of queries and of a gallery, as the retrieval of products has them (the protocol of In-Shop)."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ssl_sec.data.image_set import Locations


@dataclass(frozen=True, kw_only=True)
class QueriesAndGallery:
    """Test files in two groups: each query ranks the images of the gallery, and no other query.

    Attributes:
        query: path, glob or fsspec URL of the files of the queries, or a list of them.
        gallery: the same for the files of the gallery.
    """

    query: Locations
    gallery: Locations


def all_locations(locations: Locations | QueriesAndGallery) -> Locations:
    """The locations of all files, those of the queries first."""
    if isinstance(locations, QueriesAndGallery):
        return [*_listed(locations.query), *_listed(locations.gallery)]
    return locations


def _listed(locations: Locations) -> Sequence[str | Path]:
    return [locations] if isinstance(locations, str | Path) else locations
