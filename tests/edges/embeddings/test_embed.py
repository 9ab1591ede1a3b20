"""Embeddings of digits by a run: the files, their continuation, and what is refused."""

import io
import json
import shutil
import signal
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray
import torch
from mlflow.tracking import MlflowClient
from PIL import Image

from ssl_sec.data.config import DigitsConfig
from ssl_sec.data.standard_sets import open_digits
from ssl_sec.edges.embeddings.embed import EmbeddingWork, EmbedResult, run_embed
from ssl_sec.edges.folder.encoder import load_encoder
from ssl_sec.edges.run.driver import run_training
from ssl_sec.embeddings.parts import origin_of
from ssl_sec.errors import ConfigError, DataError, Stopped
from ssl_sec.evaluation.features import extract_features
from ssl_sec.recipes.registry import PRETRAIN
from tests.edges.conftest import QUICK
from tests.jobs import configured
from tests.test_library import blocks


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished pretraining."""
    overrides = [*QUICK, "runtime=local", "run_name=whole", f"output_dir={tmp_path_factory.mktemp('runs')}"]
    return run_training(PRETRAIN, configured("pretrain", overrides)).folder.path


def embed(run: Path, output: Path | str, *overrides: str) -> EmbedResult:
    given = [f"run={run}", f"output={output}", "runtime=local", "split=test", "rows_per_part=100", *overrides]
    return run_embed(configured("embed", given))


@pytest.fixture(scope="module")
def embedded(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the embeddings of the 360 test digits."""
    output = tmp_path_factory.mktemp("embeddings")
    embed(run, output)
    return output


def test_the_files_hold_the_features_that_evaluation_uses_in_the_order_of_the_set(run: Path, embedded: Path):
    assert sorted(path.name for path in embedded.iterdir()) == [f"test-0000{n}-of-00004.parquet" for n in range(4)]
    table, digits = pq.read_table(embedded), open_digits("test")
    features, labels = extract_features(load_encoder(run), digits)
    assert table["row"].to_pylist() == list(range(len(digits)))
    assert table["label"].to_pylist() == labels.tolist()
    assert table["path"].null_count == len(digits)  # they come from no files
    assert pa.types.is_fixed_size_list(table.schema.field("embedding").type)
    found = torch.from_numpy(np.stack(table["embedding"].to_numpy(zero_copy_only=False)))
    torch.testing.assert_close(found, features, rtol=1e-4, atol=1e-5)
    norms = torch.from_numpy(table["norm"].to_numpy(zero_copy_only=False).copy())
    torch.testing.assert_close(norms, found.norm(dim=1), rtol=1e-5, atol=0)


def test_the_columns_are_described_as_the_datasets_library_does(embedded: Path):
    schema = pq.read_schema(embedded / "test-00000-of-00004.parquet")
    features = json.loads(schema.metadata[b"huggingface"])["info"]["features"]
    assert list(features) == schema.names
    assert features["label"] == {"names": [str(digit) for digit in range(10)], "_type": "ClassLabel"}
    assert features["embedding"]["length"] == schema.field("embedding").type.list_size
    types = {name: str(schema.field(name).type).replace("float", "float32") for name in ("row", "path", "norm")}
    assert {name: each.get("dtype") for name, each in features.items() if name in types} == types


def test_the_files_are_read_as_documented(embedded: Path, monkeypatch: pytest.MonkeyPatch):
    (embedded.parent / "embeddings").symlink_to(embedded)
    monkeypatch.chdir(embedded.parent)
    names: dict[str, Any] = {}
    by_pandas, by_duckdb, by_faiss = blocks("evaluation.md")[-4:-1]
    exec(by_pandas, names)
    table = names["embeddings"]
    assert list(table.columns) == ["row", "path", "label", "embedding", "norm"]
    assert table["row"].tolist() == list(range(360))
    exec(by_duckdb, names)
    norms = names["lengths"].set_index("label").sort_index()
    assert norms["images"].tolist() == table.groupby("label").size().tolist()
    np.testing.assert_allclose(norms["norm"], table.groupby("label")["norm"].mean(), rtol=1e-5)
    exec(by_faiss, names)
    vectors = names["vectors"]
    cosines = vectors @ vectors.T
    np.testing.assert_allclose(names["cosines"], -np.sort(-cosines, axis=1)[:, :6], atol=1e-5)
    assert vectors.dtype == np.float32 and names["neighbours"].shape == (360, 6)


def test_the_job_is_a_child_of_the_run_in_mlflow_with_its_metrics_and_origin(run: Path, tmp_path: Path):
    client = MlflowClient(f"sqlite:///{run.parents[1]}/mlflow.db")
    done = embed(run, tmp_path / "all", "tracking.tags={team: vision}")
    record = client.get_run(str(done.run_id))
    assert record.info.status == "FINISHED" and f"/runs/{done.run_id}" in str(done)
    assert record.data.tags["mlflow.parentRunId"] == (run / "mlflow_run_id").read_text().strip()
    assert record.data.tags["folder"] == str(tmp_path / "all")
    assert (record.data.tags["job"], record.data.tags["team"], record.data.tags["data"]) == (
        "embed",
        "vision",
        "digits",
    )
    metrics = {name.removeprefix("embed/"): value for name, value in record.data.metrics.items()}
    assert metrics.pop("images_per_s") > 0
    whole = {"images": 360, "images_embedded": 360, "images_left_out": 0, "dim": 64, "files": 4, "files_written": 4}
    assert metrics == whole
    assert (record.data.params["rows_per_part"], record.data.params["data.name"]) == ("100", "digits")
    (data,) = record.inputs.dataset_inputs
    origin = client.download_artifacts(record.info.run_id, "origin.json", str(tmp_path))
    schema = pq.read_schema(tmp_path / "all" / "test-00000-of-00004.parquet")
    assert json.loads(Path(origin).read_text()) == json.loads(schema.metadata[b"ssl_sec"])
    assert data.dataset.digest == json.loads(Path(origin).read_text())["digest"]
    assert embed(run, tmp_path / "all").run_id is None  # there was nothing to compute


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_mlflow_shows_a_stopped_job_as_killed_with_its_files(sent, run: Path, tmp_path: Path, monkeypatch):
    client, start = MlflowClient(f"sqlite:///{run.parents[1]}/mlflow.db"), EmbeddingWork.start

    def interrupted(self, *arguments, **named):
        do = start(self, *arguments, **named)

        def part(number: int) -> int:
            if number == 2:
                signal.raise_signal(sent)
            return do(number)

        return part

    monkeypatch.setattr(EmbeddingWork, "start", interrupted)
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which nohup ignores
    with pytest.raises(Stopped, match="stopped; whole files are kept"):
        embed(run, tmp_path)
    signal.signal(signal.SIGHUP, before)
    (record,) = client.search_runs(["1"], f"tags.folder = '{tmp_path}'")
    assert record.info.status == "KILLED"
    assert record.data.metrics["embed/files_written"] == 2
    assert record.data.metrics["embed/images_embedded"] == 200
    assert "embed/images_left_out" not in record.data.metrics


def test_images_are_embedded_while_mlflow_is_unreachable(run: Path, tmp_path: Path, caplog):
    done = embed(run, tmp_path, "tracking.uri=http://127.0.0.1:9")
    assert (done.num_parts, done.run_id) == (4, None)
    assert [each for each in caplog.messages if each.endswith("; the job is not recorded in MLflow")]


def test_one_process_says_that_it_opens_the_images_and_opens_them_once(run: Path, tmp_path: Path, monkeypatch, caplog):
    caplog.set_level("INFO", "ssl_sec")
    said: list[str] = []
    open_to_embed = DigitsConfig.open_to_embed

    def opened(self: DigitsConfig, *arguments: Any) -> Any:
        said.extend(caplog.messages[-1:])
        return open_to_embed(self, *arguments)

    monkeypatch.setattr(DigitsConfig, "open_to_embed", opened)
    embed(run, tmp_path / "out")
    assert said == ["opening the test images of digits"]


def test_a_stopped_job_continues_with_the_missing_files(run: Path, embedded: Path, tmp_path: Path):
    first = embed(run, tmp_path)
    assert (first.num_parts, first.num_kept) == (4, 0)
    missing = tmp_path / "test-00002-of-00004.parquet"
    missing.unlink()
    kept = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    again = embed(run, tmp_path)
    assert (again.num_parts, again.num_kept) == (4, 3)
    assert all((tmp_path / name).stat().st_mtime_ns == time for name, time in kept.items())
    assert missing.read_bytes() == (embedded / missing.name).read_bytes()


def test_object_storage_gets_the_files_of_a_folder_and_a_stopped_job_continues_there(
    run: Path, embedded: Path, s3: str
):
    output, store = f"{s3}/digits", fsspec.filesystem("s3")
    assert embed(run, output).num_kept == 0
    names = sorted(path.name for path in embedded.iterdir())
    assert sorted(Path(str(path)).name for path in store.ls(output)) == names
    assert all(store.cat_file(f"{output}/{name}") == (embedded / name).read_bytes() for name in names)
    store.rm_file(f"{output}/{names[2]}")
    assert embed(run, output).num_kept == 3
    store.invalidate_cache()
    assert store.cat_file(f"{output}/{names[2]}") == (embedded / names[2]).read_bytes()


def test_a_folder_takes_another_split_but_no_other_embeddings(run: Path, tmp_path: Path):
    embed(run, tmp_path)
    embed(run, tmp_path, "split=train", "rows_per_part=1000")
    names = {path.name.partition("-")[0] for path in tmp_path.iterdir()}
    assert names == {"test", "train"}
    with pytest.raises(ConfigError, match="holds other embeddings of the test split, with rows_per_part 100 instead"):
        embed(run, tmp_path, "rows_per_part=50")


def test_the_images_are_those_of_a_set_that_is_split_by_class(run: Path, tmp_path: Path):
    done = embed(run, tmp_path / "digits", "data=digits", "data.num_train_classes=6", "rows_per_part=1000")
    table = pq.read_table(tmp_path / "digits")
    assert done.num_images == len(table) == int((open_digits("train").labels >= 6).sum())
    assert set(table["label"].to_pylist()) == {0, 1, 2, 3}
    for place in ("train/a", "train/b", "test/c", "test/d"):
        (tmp_path / "photos" / place).mkdir(parents=True)
        (tmp_path / "photos" / place / "1.png").write_bytes(_png())
    embed(run, tmp_path / "photo", "data=folder", f"data.root={tmp_path / 'photos'}", "data.num_channels=1")
    schema = pq.read_schema(tmp_path / "photo/test-00000-of-00001.parquet")
    features = json.loads(schema.metadata[b"huggingface"])["info"]["features"]
    assert features["label"]["names"] == ["c", "d"]


def test_a_limit_of_the_images_is_refused_as_all_are_embedded(run: Path, tmp_path: Path):
    with pytest.raises(ConfigError, match="^data.max_images: found 100, must be null: all images of the split are em"):
        embed(run, tmp_path / "out", "data=digits", "data.max_images=100")
    with pytest.raises(ConfigError, match=r"^data.leave_out: found \['a.csv'\], must be \[\]: all images of the split"):
        embed(run, tmp_path / "out", "data=digits", "data.leave_out=[a.csv]")


def test_incomplete_files_are_computed_again(run: Path, embedded: Path, tmp_path: Path, caplog):
    for path in embedded.iterdir():
        shutil.copy(path, tmp_path)
    cut = tmp_path / "test-00001-of-00004.parquet"
    cut.write_bytes(cut.read_bytes()[:3000])
    (tmp_path / "test-00002-of-00004.parquet").write_bytes(b"")
    assert embed(run, tmp_path).num_kept == 2
    assert caplog.text.count("is not a whole Parquet file; it is computed again") == 2
    assert all((tmp_path / path.name).read_bytes() == path.read_bytes() for path in embedded.iterdir())


def test_files_of_another_precision_are_not_mixed_in(run: Path, tmp_path: Path):
    embed(run, tmp_path)
    origin = origin_of(pq.read_schema(tmp_path / "test-00000-of-00004.parquet"))
    assert origin["precision"] == "float32"
    for name in (None, "test-00003-of-00004.parquet"):  # whole, and with a file missing
        if name is not None:
            (tmp_path / name).unlink()
        with pytest.raises(
            ConfigError, match="holds embeddings in float32, and bfloat16 is asked for; allowed: another"
        ):
            embed(run, tmp_path, "runtime.precision=bfloat16")


def test_images_that_the_encoder_does_not_take_are_refused_before_anything_is_written(run: Path, tmp_path: Path):
    photos = tmp_path / "photos"
    photos.mkdir()
    for number in range(3):
        Image.new("RGB", (8, 8), (number, 0, 0)).save(photos / f"{number}.png")
    output = tmp_path / "output"
    with pytest.raises(ConfigError, match="^data: found images of 3 x 8 x 8, .*; allowed: .* data.num_channels=1$"):
        embed(run, output, "data=folder", f"data.root={photos}", "split=train")
    assert not output.exists()
    grey = ("data=folder", f"data.root={photos}", "data.num_channels=1", "split=train")
    embed(run, output, *grey)
    assert pq.read_table(output)["path"].to_pylist() == [str(photos / f"{number}.png") for number in range(3)]
    Image.new("L", (8, 8)).save(photos / "3.png")
    with pytest.raises(ConfigError, match="holds other embeddings of the train split, with images 3 instead of 4"):
        embed(run, output, *grey)
    (photos / "3.png").unlink()
    (photos / "1.png").write_bytes(b"no image")
    skipping = embed(run, tmp_path / "skipped", *grey, "data.on_bad_image=skip")
    assert skipping.num_left_out == 1
    assert pq.read_table(tmp_path / "skipped")["row"].to_pylist() == [0, 2]


def test_a_continued_job_counts_the_images_that_it_left_out_before(run: Path, tmp_path: Path):
    (tmp_path / "photos").mkdir()
    for number in range(6):
        (tmp_path / "photos" / f"{number}.png").write_bytes(b"no image" if number in (0, 3) else _png())
    place = ["data=folder", f"data.root={tmp_path / 'photos'}", "split=train", "rows_per_part=2"]
    given = [*place, "data.num_channels=1", "data.image_size_px=8", "data.on_bad_image=skip"]
    output = tmp_path / "output"
    first = embed(run, output, *given)
    (output / "train-00001-of-00003.parquet").unlink()
    for again, num_kept in ((embed(run, output, *given), 2), (embed(run, output, *given), 3)):
        assert (again.num_left_out, again.num_kept) == (first.num_left_out, num_kept) == (2, num_kept)
        assert str(again).startswith("embedded: 4 images in 64 dimensions")
        assert "; 2 that cannot be read were left out" in str(again)


def test_an_image_of_another_size_is_refused(run: Path, tmp_path: Path):
    (tmp_path / "photos").mkdir()
    for number in range(600):  # of which the first and every other are hashed
        (tmp_path / "photos" / f"{number:03}.png").write_bytes(_png())
    place = ["data=folder", f"data.root={tmp_path / 'photos'}", "split=train", "rows_per_part=300"]
    given = [*place, "data.num_channels=1", "data.image_size_px=8"]
    embed(run, tmp_path / "output", *given)
    (tmp_path / "photos" / "001.png").write_bytes(_png() + b"0")
    with pytest.raises(ConfigError, match="holds other embeddings of the train split, with file_sizes "):
        embed(run, tmp_path / "output", *given)


@pytest.mark.slow
@pytest.mark.distributed
def test_two_workers_of_ray_write_the_files_of_one_process(run: Path, embedded: Path, tmp_path: Path):
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        whole = embed(run, tmp_path / "cluster", "runtime=ray", "runtime.num_workers=2")
        with pytest.raises(DataError, match=r"photos.*1.png: not an image") as refused:
            photos = tmp_path / "photos"
            photos.mkdir()
            for number in range(2):
                (photos / f"{number}.png").write_bytes(b"no image" if number else _png())
            grey = ("data=folder", f"data.root={photos}", "data.num_channels=1", "data.image_size_px=8", "split=train")
            embed(run, tmp_path / "damaged", "runtime=ray", *grey)
    finally:
        ray.shutdown()
    assert (whole.num_parts, whole.num_kept, refused.value.exit_code) == (4, 0, 3)
    one, two = pq.read_table(embedded), pq.read_table(tmp_path / "cluster")
    assert one.drop(["embedding", "norm"]) == two.drop(["embedding", "norm"])
    first, second = (np.stack(table["embedding"].to_numpy(zero_copy_only=False)) for table in (one, two))
    np.testing.assert_allclose(second, first, rtol=1e-4, atol=1e-5)


def _png() -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (8, 8)).save(file, "png")
    return file.getvalue()
