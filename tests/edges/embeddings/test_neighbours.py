"""Neighbours of embedded digits and photos: the tables, the page, continuation, and what is refused."""

import base64
import io
import re
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import fsspec
import numpy as np
import pyarrow.parquet as pq
import pytest
import ray
import torch
from PIL import Image

from ssl_sec.data.fingerprint import fingerprint
from ssl_sec.data.standard_sets import open_digits
from ssl_sec.edges.composition.help_text import help_text
from ssl_sec.edges.embeddings import neighbours as module
from ssl_sec.edges.embeddings.findings import Findings
from ssl_sec.edges.embeddings.neighbours import run_neighbours
from ssl_sec.embeddings.parts import Rows, encoded
from ssl_sec.errors import ConfigError, DataError, Stopped, StorageError
from ssl_sec.evaluation.retrieval import nearest
from tests.jobs import configured


def find(embeddings: Path | str, output: Path | str, *overrides: str) -> Findings:
    given = [f"embeddings={embeddings}", f"output={output}", "runtime=local", "queries_per_part=150", *overrides]
    return run_neighbours(configured("neighbours", given))


@pytest.fixture(scope="module")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the pixels of the test digits as their embeddings, with two of them twice."""
    folder, digits = tmp_path_factory.mktemp("embeddings"), open_digits("test")
    pixels = _pixels()
    pixels[7], pixels[200] = 2 * pixels[3], pixels[100]
    origin = {"weights": "w", "data": {"name": "digits"}, "split": "test", "image_shape": [1, 8, 8]}
    origin["digest"] = fingerprint(digits)
    labels = digits.labels.numpy()
    for part, rows in enumerate((range(200), range(200, 360))):
        found = Rows(
            rows=np.array(rows),
            paths=[None] * len(rows),
            labels=labels[rows],
            embeddings=pixels[rows.start : rows.stop],
        )
        (folder / f"test-0000{part}-of-00002.parquet").write_bytes(encoded(found, digits.class_names, origin))
    return folder


def _pixels() -> np.ndarray:
    digits = open_digits("test")

    return digits.read(torch.arange(len(digits))).images.flatten(1).float().numpy()


@pytest.fixture(scope="module")
def found(embedded: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Findings, Path]:
    """The findings of a search, and its folder."""
    output = tmp_path_factory.mktemp("neighbours")
    return find(embedded, output, "k=5", "duplicates_above=0.999"), output


def test_the_neighbours_are_those_of_retrieval(embedded: Path, found: tuple[Findings, Path]):
    findings, output = found
    embeddings = np.stack(pq.read_table(embedded)["embedding"].to_numpy(zero_copy_only=False))
    table = pq.read_table([output / f"neighbours-0000{part}-of-00003.parquet" for part in range(3)])
    assert (table["rank"].to_pylist(), len(table)) == ([1, 2, 3, 4, 5] * 360, 1800)
    assert table["row"].to_pylist() == np.repeat(np.arange(360), 5).tolist()
    units = embeddings.astype(np.float64) / np.linalg.norm(embeddings, axis=1, keepdims=True)
    expected = nearest(embeddings, np.arange(360), 5).numpy()
    cosines = (units[:, None] * units[expected]).sum(axis=2)
    np.testing.assert_allclose(table["cosine"].to_numpy().reshape(360, 5), cosines, atol=1e-6)
    rows = table["neighbour_row"].to_numpy().reshape(360, 5)
    np.testing.assert_allclose((units[:, None] * units[rows]).sum(axis=2), cosines, atol=1e-6)
    labels = open_digits("test").labels.numpy()
    assert table["neighbour_label"].to_pylist() == labels[rows].ravel().tolist()
    assert findings.nearest_of_same_label == pytest.approx((labels[rows[:, 0]] == labels).mean())


def test_copies_are_found_and_grouped(found: tuple[Findings, Path]):
    findings, output = found
    pairs = pq.read_table(output / "duplicates.parquet").to_pylist()
    assert [(pair["row"], pair["neighbour_row"]) for pair in pairs] == [(3, 7), (100, 200)]
    assert [pair["group"] for pair in pairs] == [0, 1]
    assert findings.num_pairs == 2
    labels = open_digits("test").labels
    assert findings.num_conflicts == int(labels[3] != labels[7]) + int(labels[100] != labels[200])
    assert findings.pairs_by_split == {("test", "test"): 2}
    assert not list(output.glob("pairs-*"))


def test_the_outliers_have_the_most_unusual_norms_and_distances(embedded: Path, found: tuple[Findings, Path]):
    outliers = pq.read_table(found[1] / "outliers.parquet").to_pandas()
    norms = pq.read_table(embedded)["norm"].to_numpy().astype(np.float64)
    scores = np.abs(norms - norms.mean()) / norms.std()
    by_norm = outliers[outliers["by"] == "norm"]
    assert by_norm["row"].tolist()[0] == 7  # twice as bright
    np.testing.assert_allclose(np.abs(by_norm["norm_z"]), np.sort(scores)[::-1][:4], rtol=1e-4)
    by_distance = outliers[outliers["by"] == "distance"]
    assert len(by_distance) == 4
    assert by_distance["mean_cosine"].is_monotonic_increasing


def test_one_percent_of_the_images_are_outliers_of_each_kind_unless_a_number_is_given(embedded: Path, tmp_path: Path):
    for given, number in ((), 4), (("num_outliers=30",), 30), (("num_outliers=0",), 0):
        findings = find(embedded, tmp_path, *given)
        listed = pq.read_table(tmp_path / "outliers.parquet")["by"].to_pylist()
        assert (listed.count("norm"), listed.count("distance"), len(listed)) == (number, number, 2 * number)
        line = f"outliers: listed are the most unusual images, {number} by norm and {number} by distance"
        assert f"{line}, to be looked at, in order" in findings.lines()


def test_the_help_says_how_many_outliers_are_listed_and_what_for():
    told = " ".join(help_text("neighbours", []).partition("num_outliers")[2].partition("queries_per_part")[0].split())
    assert "look at them" in told and "takes 1 % of the images, at least 1 and at most 100" in told


@pytest.mark.parametrize(("num_images", "number"), [(1, 1), (100, 1), (101, 2), (253, 3), (9_901, 100), (10**7, 100)])
def test_the_number_of_outliers_is_one_percent_between_1_and_100(num_images: int, number: int):
    config = configured("neighbours", ["embeddings=a", "output=b", "runtime=local"])
    assert config.outliers_among(num_images) == number
    assert replace(config, num_outliers=250).outliers_among(num_images) == 250


def test_the_page_shows_the_images_themselves(found: tuple[Findings, Path]):
    page = (found[1] / "index.html").read_text()
    assert "Pictures are missing" not in page
    assert "http" not in page  # it opens without a network
    duplicates = page.partition("<h2>Near-duplicates</h2>")[2].partition("<h2>")[0]
    pictures = re.findall(r'base64,([^"]+)', duplicates)
    shown = [np.asarray(Image.open(io.BytesIO(base64.b64decode(picture)))) for picture in pictures]
    pixels = open_digits("test")

    expected = pixels.read(torch.tensor([3, 7, 100, 200])).images[:, 0].numpy()
    np.testing.assert_array_equal(np.stack(shown), expected)


def test_a_stopped_search_continues_with_the_same_result(
    embedded: Path, found: tuple[Findings, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    options = ("k=5", "duplicates_above=0.999")
    searched: list[int] = []
    search = module.search

    def stopping(queries, *arguments, **options):
        if len(searched) == 2:
            signal.raise_signal(signal.SIGTERM)
        searched.append(len(queries))
        return search(queries, *arguments, **options)

    monkeypatch.setattr(module, "search", stopping)
    with pytest.raises(Stopped, match="whole parts are kept"):
        find(embedded, tmp_path, *options)
    assert not (tmp_path / "duplicates.parquet").exists()
    monkeypatch.setattr(module, "search", search)
    again = find(embedded, tmp_path, *options)
    files = sorted(path.name for path in found[1].iterdir())
    assert files == sorted(path.name for path in tmp_path.iterdir())
    for name in files:
        if name.endswith(".parquet"):
            assert (tmp_path / name).read_bytes() == (found[1] / name).read_bytes()
    assert str(again).splitlines()[1:-2] == str(found[0]).splitlines()[1:-2]
    # Nothing is left to search, but the pages may show more.
    monkeypatch.setattr(module, "search", stopping)
    assert find(embedded, tmp_path, *options, "images_shown=1").images_per_s is None
    with pytest.raises(ConfigError, match="holds another search, with k 5 instead of 4"):
        find(embedded, tmp_path, "k=4", "duplicates_above=0.999")


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("neighbours-00001-of-00003.parquet", "cut"),
        ("images-00001-of-00003.parquet", "removed"),
        ("duplicates.parquet", "cut"),
        ("duplicates.parquet", "removed"),
    ],
)
def test_a_damaged_file_is_computed_again(name, damage, embedded: Path, found, tmp_path: Path, caplog):
    output = tmp_path / "output"
    shutil.copytree(found[1], output)
    if damage == "cut":
        (output / name).write_bytes((output / name).read_bytes()[:-100])
    else:
        (output / name).unlink()
    again = find(embedded, output, "k=5", "duplicates_above=0.999")
    assert (f"{output}/{name} is not a whole Parquet file; it is computed again" in caplog.text) == (damage == "cut")
    assert again.num_pairs == found[0].num_pairs and again.duplicates.equals(found[0].duplicates)
    assert sorted(path.name for path in output.iterdir()) == sorted(path.name for path in found[1].iterdir())
    assert pq.read_table(output / name).equals(pq.read_table(found[1] / name))


def test_a_file_with_a_damaged_content_is_named_with_what_to_do(embedded: Path, found, tmp_path: Path):
    output = tmp_path / "output"
    shutil.copytree(found[1], output)
    path = output / "images-00001-of-00003.parquet"
    content = bytearray(path.read_bytes())
    content[4:200] = bytes(196)
    path.write_bytes(content)
    with pytest.raises(StorageError, match=f"output: {path} cannot be read: .* computes it again once it is deleted"):
        find(embedded, output, "k=5", "duplicates_above=0.999")


def test_queries_are_searched_among_others(embedded: Path, tmp_path: Path):
    mine = tmp_path / "mine.parquet"
    pixels = _pixels()[[5, 9]]
    mine.write_bytes(
        encoded(Rows(rows=np.arange(2), paths=["a.png"] * 2, labels=np.array([-1, 1]), embeddings=pixels), (), {})
    )
    findings = find(embedded, tmp_path / "found", f"queries={mine}", "k=2", "duplicates_above=0.9999")
    table = pq.read_table(tmp_path / "found/neighbours-00000-of-00001.parquet").to_pylist()
    assert [(row["split"], row["row"], row["neighbour_row"]) for row in table[::2]] == [(None, 0, 5), (None, 1, 9)]
    assert findings.pairs_by_split == {("test", "unnamed"): 2}
    page = (tmp_path / "found/index.html").read_text()
    assert "Pictures are missing:</b> the files do not say which images they are of" in page
    assert page.count("no picture") > 0


def test_pictures_come_from_files_if_the_data_set_is_missing(tmp_path: Path):
    long = "the first day of the expedition, taken at noon 0.png"
    names = {long: 0, "80.png": 80, "160.png": 160, "240.png": 240}
    for name, shade in names.items():
        Image.new("L", (200, 100), shade).save(tmp_path / name)
    rows = Rows(
        rows=np.arange(4),
        paths=[str(tmp_path / name) for name in names],
        labels=np.full(4, -1),
        embeddings=np.eye(4, dtype=np.float32) + 0.1,
    )
    data = {"name": "folder", "root": str(tmp_path / "gone"), "image_size_px": 32}
    origin = {"weights": "w", "data": data, "split": "train", "image_shape": [3, 32, 32], "digest": "0"}
    (tmp_path / "train-00000-of-00001.parquet").write_bytes(encoded(rows, (), origin))
    findings = find(tmp_path, tmp_path / "out", "k=1")
    page = (tmp_path / "out/index.html").read_text()
    assert "Pictures are missing" not in page
    captions = dict(re.findall(r'title="([^"]+)"><img[^>]+><figcaption>([^<]+<br>[^<]+)<', page))
    assert captions[f"{tmp_path}/240.png"] == "240.png<br>train 3"
    assert captions[f"{tmp_path}/{long}"] == "the first day of…n at noon 0.png<br>train 0"
    picture = re.findall(r'base64,([^"]+)', page)[0]
    assert Image.open(io.BytesIO(base64.b64decode(picture))).size == (96, 48)
    assert findings.nearest_of_same_label is None
    assert "label" not in str(findings).partition("tables:")[0]


def test_object_storage_is_searched_and_gets_the_tables_and_the_page(
    embedded: Path, found: tuple[Findings, Path], s3: str
):
    store, output = fsspec.filesystem("s3"), f"{s3}/neighbours"
    store.put(str(embedded), f"{s3}/digits", recursive=True)
    findings = find(f"{s3}/digits", output, "k=5", "duplicates_above=0.999")
    assert f"{output}/index.html" in str(findings)
    assert replace(findings, images_per_s=None).lines() == replace(found[0], images_per_s=None).lines()
    names = sorted(path.name for path in found[1].iterdir())
    assert sorted(Path(str(path)).name for path in store.ls(output)) == names
    for name in names:
        if name.endswith(".parquet"):
            assert pq.read_table(io.BytesIO(store.cat_file(f"{output}/{name}"))) == pq.read_table(found[1] / name)


def test_bad_input_is_refused_before_anything_is_written(embedded: Path, tmp_path: Path):
    output = tmp_path / "output"
    with pytest.raises(ConfigError, match=r"k: found 360, must be 1 to 359, the number of other images"):
        find(embedded, output, "k=360")
    with pytest.raises(DataError, match=r"embeddings: found no Parquet files in .*empty; python -m jobs.embed writes"):
        (tmp_path / "empty").mkdir()
        find(tmp_path / "empty", output)
    with pytest.raises(DataError, match=r"embeddings: found .*nothing: no such file or folder"):
        find(tmp_path / "nothing", output)
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(DataError, match=r"embeddings: found .*a\.txt, must be a folder of Parquet files, or one such"):
        find(tmp_path / "a.txt", output)
    with pytest.raises(ConfigError, match=r"duplicates_above: found 1.5"):
        find(embedded, output, "duplicates_above=1.5")
    assert not output.exists()


@pytest.mark.parametrize("given", ["folder", "file", "link", "url"])
def test_a_folder_of_embeddings_is_no_output(embedded: Path, tmp_path: Path, given: str):
    mine = tmp_path / "mine"
    shutil.copytree(embedded, mine)
    (tmp_path / "link").symlink_to(mine)
    names = {path.name for path in mine.iterdir()}
    output = {"link": tmp_path / "link", "url": f"file://{mine}/"}.get(given, mine)
    embeddings = mine / "test-00000-of-00002.parquet" if given == "file" else mine
    with pytest.raises(ConfigError) as caught:
        find(embeddings, output)
    assert str(caught.value) == f"output: found {mine}, the folder of the embeddings; must be another"
    with pytest.raises(ConfigError, match=r"^output: found .*/mine, the folder of the queries; must be another$"):
        find(embedded, output, f"queries={embeddings}")
    assert {path.name for path in mine.iterdir()} == names


def test_a_folder_of_embeddings_in_object_storage_is_no_output(embedded: Path, s3: str):
    url = f"{s3}/kept"
    fsspec.filesystem("s3").put(str(embedded), url, recursive=True)
    with pytest.raises(ConfigError) as caught:
        find(url, f"{url}/")
    assert str(caught.value) == f"output: found {url}, the folder of the embeddings; must be another"


@pytest.mark.slow
@pytest.mark.distributed
def test_two_workers_of_ray_write_the_tables_of_one_process(
    embedded: Path, found: tuple[Findings, Path], tmp_path: Path
):
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        findings = find(embedded, tmp_path, "k=5", "duplicates_above=0.999", "runtime=ray", "runtime.num_workers=2")
    finally:
        ray.shutdown()
    assert replace(findings, output="", images_per_s=None).lines() == replace(found[0], images_per_s=None).lines()
    for name in ("duplicates.parquet", "outliers.parquet", "neighbours-00002-of-00003.parquet"):
        assert pq.read_table(tmp_path / name) == pq.read_table(found[1] / name)


def _write(folder: Path, embeddings: np.ndarray) -> Path:
    """Embeddings as a file of a folder, which is made."""
    folder.mkdir()
    count = len(embeddings)
    rows = Rows(rows=np.arange(count), paths=[None] * count, labels=np.full(count, -1), embeddings=embeddings)
    (folder / "train-00000-of-00001.parquet").write_bytes(encoded(rows, (), {}))
    return folder


def test_images_of_one_name_are_told_apart_on_the_page(tmp_path: Path):
    for name in ("one", "other"):
        paths = [f"/data/{name}/{folder}/1.png" for folder in "ab"]
        rows = Rows(rows=np.arange(2), paths=paths, labels=np.full(2, -1), embeddings=np.eye(2, dtype=np.float32))
        (tmp_path / name).mkdir()
        (tmp_path / name / "train-00000-of-00001.parquet").write_bytes(encoded(rows, (), {}))
    find(tmp_path / "one", tmp_path / "alone", "k=1")
    page = (tmp_path / "alone/index.html").read_text()
    assert "<figcaption>a/1.png<br>train 0" in page and "<figcaption>b/1.png<br>train 1" in page
    find(tmp_path / "one", tmp_path / "both", "k=1", f"queries={tmp_path / 'other'}")
    page = (tmp_path / "both/index.html").read_text()
    assert "<figcaption>other/a/1.png<br>query, train 0" in page
    assert "<figcaption>one/a/1.png<br>searched, train 0" in page


def _narrow() -> np.ndarray:
    """Embeddings as of a weakly trained encoder, close to one direction, of which row 2n + 1 < 40 is almost row 2n."""
    generator = np.random.default_rng(0)
    embeddings = np.concatenate([np.full((400, 1), 3.0), generator.normal(size=(400, 16)) / 8], axis=1)
    embeddings[1:40:2] = embeddings[:40:2] + generator.normal(size=(20, 17)) / 1000
    return embeddings.astype(np.float32)


def test_a_limit_that_all_pairs_exceed_is_reported_with_another(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    folder = _write(tmp_path / "narrow", _narrow())
    findings = find(folder, tmp_path / "many")
    assert findings.group_sizes == [400]
    assert "in 1 group of 400 images, the largest of 400" in str(findings)
    (warning,) = [record.getMessage() for record in caplog.records if "duplicates_above" in record.getMessage()]
    assert warning.startswith("one group of near-duplicates has 400 of 400 images: cosines of 0.95 or more do not")
    assert f"<b>Warning:</b> {warning}" in (tmp_path / "many/index.html").read_text()
    caplog.clear()
    limit = re.findall(r"duplicates_above=[\d.]+", warning)[0]
    findings = find(folder, tmp_path / "few", limit)
    assert findings.group_sizes == [2] * 20 and findings.num_pairs == 20
    assert "duplicates_above" not in caplog.text


def test_images_of_two_sets_with_one_name_are_two_images_of_a_group(tmp_path: Path):
    folders = [_write(tmp_path / name, np.eye(4, dtype=np.float32)) for name in ("one", "other")]
    findings = find(folders[0], tmp_path / "out", f"queries={folders[1]}", "k=1")
    assert findings.group_sizes == [2] * 4


def test_centred_cosines_are_those_of_the_deviations_from_the_mean(tmp_path: Path):
    embeddings = _narrow()
    folder = _write(tmp_path / "narrow", embeddings)
    findings = find(folder, tmp_path / "centred", "centred=true", "k=3")
    assert findings.group_sizes == [2] * 20 and findings.doubt is None
    units = embeddings - embeddings.mean(axis=0, dtype=np.float64)
    units /= np.linalg.norm(units, axis=1, keepdims=True)
    cosines = units @ units.T
    np.fill_diagonal(cosines, -1)
    table = pq.read_table(sorted((tmp_path / "centred").glob("neighbours-*")))
    expected = np.sort(cosines, axis=1)[:, :-4:-1]
    np.testing.assert_allclose(table["cosine"].to_numpy().reshape(-1, 3), expected, atol=1e-6)
    whole = find(folder, tmp_path / "whole", "centred=true", "k=3", "queries_per_part=400")
    assert whole.duplicates.equals(findings.duplicates)
    others = _write(tmp_path / "others", embeddings[:5] + np.float32(1e-4))
    among = find(folder, tmp_path / "among", "centred=true", "k=1", f"queries={others}").duplicates
    assert among["row"].to_pylist()[:5] and among["cosine"].to_numpy().min() > 0.95
    with pytest.raises(ConfigError, match="holds another search, with centred True instead of False"):
        find(folder, tmp_path / "centred", "k=3")
