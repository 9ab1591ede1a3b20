"""What is uploaded at the end of a run."""

import pytest
from matplotlib.figure import Figure

from ssl_sec.edges.run.uploading import save_figures
from tests.edges.conftest import half_a_picture


def test_a_full_disk_leaves_no_half_plot(tmp_path, monkeypatch):
    monkeypatch.setattr(Figure, "savefig", half_a_picture)
    with pytest.raises(OSError, match="No space left"):
        save_figures(tmp_path, {"curves": Figure()})
    assert list((tmp_path / "plots").iterdir()) == []
