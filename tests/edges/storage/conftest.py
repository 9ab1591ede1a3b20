import pytest

from ssl_sec.edges.storage.bucket import Bucket


@pytest.fixture
def bucket(s3) -> Bucket:
    """An empty folder in object storage."""
    return Bucket(s3)
