from pathlib import Path

from ssl_sec.edges.storage.files import LocalPlace


def test_a_file_that_is_removed_while_its_folder_is_listed_hides_no_other(tmp_path: Path, monkeypatch):
    place = LocalPlace(folder=tmp_path)
    for number in range(3):
        place.write(f"{number}.parquet", b"four")
    is_file = Path.is_file

    def removed(path: Path) -> bool:
        """As if another process renamed its temporary file after it was seen."""
        found = is_file(path)
        if path.name == "1.parquet":
            path.unlink()
        return found

    monkeypatch.setattr(Path, "is_file", removed)
    assert place.files() == {"0.parquet": 4, "2.parquet": 4}
    assert LocalPlace(folder=tmp_path / "none").files() == {}
