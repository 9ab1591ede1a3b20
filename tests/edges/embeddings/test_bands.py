"""An encoder of images of five channels, whose values have a range, from its training to its use."""

from pathlib import Path

import numpy as np
import pytest

from ssl_sec.edges.export.export import run_export
from ssl_sec.edges.run.driver import run_training
from ssl_sec.edges.run.job_values import values_of
from ssl_sec.edges.run.summary import Finished
from ssl_sec.errors import ConfigError
from ssl_sec.exporting.record import read_record
from ssl_sec.recipes.registry import PRETRAIN
from tests.edges.conftest import QUICK
from tests.edges.embeddings.test_exported import embeddings
from tests.jobs import configured

RANGES = [[0, 3000], *[[500, 2500]] * 4]
GIVEN = ["data.num_channels=5", f"data.value_ranges={str(RANGES).replace(' ', '')}"]


def written(root: Path, num_images: int, seed: int) -> Path:
    random = np.random.default_rng(seed)
    for number in range(num_images):
        place = root / ("train" if number % 4 else "test") / str(number % 3)
        place.mkdir(parents=True, exist_ok=True)
        np.save(place / f"{number}.npy", random.integers(0, 3000, (5, 8, 8), dtype=np.int16))
    return root


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("bands") / "images", 96, seed=0)


@pytest.fixture(scope="module")
def trained(folder: Path) -> Finished:
    """One epoch."""
    settings = [each for each in QUICK if not each.startswith(("experiment=", "data"))]
    place = ["data=folder", f"data.root={folder}", "runtime=local", f"output_dir={folder.parent / 'runs'}"]
    sizes = ["encoder.width=0.125", "global_batch_size=16", "epochs=1", "run_name=bands"]
    return run_training(PRETRAIN, configured("pretrain", [*settings, *place, *GIVEN, *sizes]))


def test_other_files_are_read_with_the_range_of_the_run_and_of_its_export(trained, folder, tmp_path):
    run, others = trained.folder.path, written(tmp_path / "others", 12, seed=1)
    data = ["data=folder", f"data.root={others}", "data.num_channels=5"]
    expected = embeddings(run, tmp_path / "given", *data, GIVEN[1])
    run_export(configured("export", [f"run={run}", "format=safetensors", f"output={tmp_path / 'export'}"]))
    _, record = read_record(tmp_path / "export")
    assert record.value_ranges == tuple(map(tuple, RANGES))
    assert 'numpy.load("image.npy")  # [5, height, width]' in (tmp_path / "export" / "README.md").read_text()
    for word in (run, tmp_path / "export"):
        np.testing.assert_array_equal(embeddings(word, tmp_path / f"of {word.name}", *data), expected)
    with pytest.raises(ConfigError, match="other embeddings of the test split, with value_ranges"):
        embeddings(run, tmp_path / "given", *data, "data.value_ranges=[[0,30000]]", "data.resident_limit_mib=0")
    np.testing.assert_array_equal(embeddings(run, tmp_path / "given", *data), expected)  # nothing is left to do
    other = embeddings(run, tmp_path / "other", *data, "data.value_ranges=[[0,30000]]")
    assert np.abs(other - expected).max() > 1e-3


@pytest.mark.parametrize("job", ["probe", "finetune"])
def test_probes_and_fine_tunings_read_other_files_as_the_run(trained, job):
    given = [f"run={trained.folder.path}", "data=folder", "data.root=photos", "runtime=local"]
    data = values_of(job, given)["data"]
    assert (data["num_channels"], data["value_ranges"]) == (5, RANGES)
    data = values_of(job, [*given, "data.value_ranges=[[0,9]]"])["data"]
    assert data["value_ranges"] == [[0, 9]]
