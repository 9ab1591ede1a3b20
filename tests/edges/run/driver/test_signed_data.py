"""Data behind signed URLs: they are read whole, and no record has their secrets."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient

from ssl_sec.edges.embeddings.embed import run_embed
from ssl_sec.edges.run.driver import run_probe, run_training
from ssl_sec.edges.run.job_values import values_of
from ssl_sec.edges.run.summary import Finished
from ssl_sec.errors import ConfigError
from ssl_sec.recipes.registry import PRETRAIN
from tests.data.files import plain, write_parquet
from tests.edges.run.driver.conftest import pretrain_config
from tests.edges.servers import QuietHandler, served
from tests.jobs import configured

SECRETS = ("geheim1", "geheim2", "geheim3")


@pytest.fixture(scope="module")
def signed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The signed URL of a Parquet file, which is the same in any folder; other queries are refused."""
    path = write_parquet(
        tmp_path_factory.mktemp("served") / "images.parquet", [plain(6 * n) for n in range(40)], [0, 1] * 20
    )
    query = f"/?versionId=3&X-Amz-Signature={SECRETS[0]}&Policy={SECRETS[1]}"

    class Handler(QuietHandler):
        def do_GET(self) -> None:
            if not self.path.endswith(query):
                self.send_error(403)
                return
            whole = path.read_bytes()
            first, last = self.headers.get("Range", "bytes=0-").removeprefix("bytes=").split("-")
            part = whole[int(first) : int(last or len(whole)) + 1]
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {first}-{int(first) + len(part) - 1}/{len(whole)}")
            self.send_header("Accept-Ranges", "bytes")
            self.send_header("Content-Length", str(len(part)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(part)

        do_HEAD = do_GET

    with served(Handler) as address:
        yield address.replace("//", f"//ada:{SECRETS[2]}@") + query


@pytest.fixture(scope="module")
def trained(signed: str, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """A run on these images, with its probe."""
    test = signed.replace("/?", "/test/?")
    overrides = ["experiment=digits", "data=parquet", f"data.train=['{signed}']", f"data.test=['{test}']"]
    overrides += ["data.max_images=null", "encoder.width=0.125", "epochs=1", "global_batch_size=8"]
    overrides += ["monitor.neighbours=2", "probe.enabled=true", "probe.epochs=2", "probe.labels_per_class=null"]
    overrides += ["run_name=signed", f"output_dir={tmp_path_factory.mktemp('runs')}", "tracking.system_metrics=false"]
    return run_training(PRETRAIN, pretrain_config(overrides))


def leaks(folder: Path) -> list[str]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert files
    return [f"{path}: {s}" for path in files for s in SECRETS if s.encode() in path.read_bytes()]


def test_no_file_of_a_run_or_of_the_store_has_the_secrets(trained: Finished):
    assert trained.metrics["probe/top1"] >= 0  # the probe has read the images, too
    assert leaks(trained.folder.path.parents[1]) == []
    assert trained.run_id is not None
    run = MlflowClient(trained.uri).get_run(trained.run_id)
    (found,) = run.inputs.dataset_inputs
    assert "?versionId=3&X-Amz-Signature=***&Policy=***" in found.dataset.source
    assert run.data.params["data.train"].endswith("?versionId=3&X-Amz-Signature=***&Policy=***']")


def test_a_later_job_needs_the_url_again(trained: Finished, tmp_path: Path):
    of_run = [f"run={trained.folder.path}", "runtime=local"]
    again = r"^data\.train: its credentials were not kept with the run; give the data again: data=parquet data\.train="
    with pytest.raises(ConfigError, match=again):
        run_probe(configured("probe", of_run))
    with pytest.raises(ConfigError, match=again):
        run_embed(configured("embed", [*of_run, f"output={tmp_path / 'embeddings'}"]))
    with pytest.raises(ConfigError, match=again):
        values_of("finetune", of_run)


def test_embeddings_have_the_places_of_their_images_without_the_secrets(trained: Finished, signed: str, tmp_path: Path):
    overrides = [f"run={trained.folder.path}", f"output={tmp_path / 'embeddings'}", "runtime=local", "split=train"]
    overrides += ["data=parquet", f"data.train=['{signed}']"]
    run_embed(configured("embed", overrides))
    assert leaks(tmp_path / "embeddings") == []
    assert leaks(trained.folder.path.parents[1]) == []
