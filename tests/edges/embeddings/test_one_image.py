from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ssl_sec.errors import ConfigError, DataError
from tests.edges.embeddings.test_neighbours import find


def test_one_image_has_no_neighbours_but_may_be_one(tmp_path: Path):
    one, other = tmp_path / "one.parquet", tmp_path / "other.parquet"
    for path, embedding in ((one, [1.0, 0.0]), (other, [1.0, 0.1])):
        pq.write_table(pa.table({"embedding": [embedding]}), path)
    with pytest.raises(DataError, match=r"^embeddings: found 1 image in .*one.parquet, must be two or more, or give q"):
        find(one, tmp_path / "output")
    with pytest.raises(ConfigError, match="^k: found 2, must be 1 to 1"):
        find(one, tmp_path / "output", f"queries={other}", "k=2")
