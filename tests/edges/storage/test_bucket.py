import logging
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fsspec
import pytest
from botocore.exceptions import ClientError

from ssl_sec.edges.storage import bucket as module
from ssl_sec.edges.storage.bucket import Bucket, RefusedError
from ssl_sec.errors import ConfigError, StorageError

of_s3 = pytest.mark.skipif("SSL_SEC_TEST_STORAGE" in os.environ, reason="the storage may not be S3")


def failing(times: int, error: Exception, value: bytes = b"content"):
    """A request that fails a few times."""
    left = [error] * times

    def request(*arguments, **options):
        if left:
            raise left.pop()
        return value

    return request


@pytest.fixture(autouse=True)
def pauses_are_short(monkeypatch):
    monkeypatch.setattr(module, "_LONGEST_PAUSE_S", 0.01)


def test_files_are_written_listed_read_and_removed(bucket: Bucket, tmp_path: Path):
    (tmp_path / "big").write_bytes(bytes(range(256)) * 4096)
    bucket.write("a/one", b"1")
    bucket.upload(tmp_path / "big", "a/b/big")
    assert bucket.files() == {"a/one": 1, "a/b/big": 1 << 20}
    assert bucket.files("a/b") == {"a/b/big": 1 << 20}
    assert bucket.folder("a").files() == {"one": 1, "b/big": 1 << 20}
    assert bucket.read("a/one") == b"1" and bucket.read("a/two") is None
    bucket.download("a/b/big", tmp_path / "below" / "copy")
    assert (tmp_path / "below" / "copy").read_bytes() == (tmp_path / "big").read_bytes()
    bucket.remove(["a/one", "never/there"])
    assert bucket.files() == {"a/b/big": 1 << 20}
    assert bucket.files("nothing") == {}


def test_one_of_many_writers_creates_a_file(bucket: Bucket):
    with ThreadPoolExecutor(4) as pool:
        created = list(pool.map(lambda number: bucket.create("claim", str(number).encode()), range(4)))
    assert sum(created) == 1
    assert bucket.read("claim") == str(created.index(True)).encode()


def test_downloading_a_missing_file_leaves_nothing(bucket: Bucket, tmp_path: Path):
    with pytest.raises(FileNotFoundError):
        bucket.download("missing", tmp_path / "missing")
    assert list(tmp_path.glob("*missing*")) == []


def test_a_request_is_retried_and_reported_once_when_it_fails_again(bucket: Bucket, monkeypatch, caplog):
    for times, warnings in ((1, 0), (4, 1)):
        caplog.clear()
        monkeypatch.setattr(bucket._fs, "cat_file", failing(times, OSError("503 Slow Down")))
        with caplog.at_level(logging.WARNING):
            assert bucket.read("name") == b"content"
        assert len(caplog.records) == warnings
    failed = f"output_dir: {bucket.url}/name cannot be read: 503 Slow Down"
    assert caplog.messages == [f"{failed}; it is retried for up to 60 s"]


def test_retries_are_limited(bucket: Bucket, monkeypatch):
    monkeypatch.setattr(module, "ANSWER_S", 0.1)
    monkeypatch.setattr(bucket._fs, "cat_file", failing(10**6, ConnectionError("connection refused")))
    with pytest.raises(
        StorageError, match=rf"output_dir: {bucket.url}/name cannot be read: connection refused$"
    ) as caught:
        bucket.read("name")
    assert not isinstance(caught.value, RefusedError)


def test_a_patient_folder_is_retried_for_longer_but_a_refusal_still_ends_at_once(bucket: Bucket, monkeypatch):
    monkeypatch.setattr(module, "ANSWER_S", 0.0)
    told: list[str] = []
    patient = bucket.patient(lambda level, message: told.append(message))
    monkeypatch.setattr(bucket._fs, "cat_file", failing(4, ConnectionError("connection refused")))
    assert patient.read("name") == b"content"
    failed = f"output_dir: {bucket.url}/name cannot be read: connection refused"
    assert told == [f"{failed}; it is retried for up to 600 s"]
    monkeypatch.setattr(bucket._fs, "cat_file", failing(1, PermissionError("Access Denied")))
    with pytest.raises(RefusedError, match="Access Denied"):
        patient.read("name")
    monkeypatch.setattr(bucket._fs, "cat_file", failing(1, ConnectionError("connection refused")))
    with pytest.raises(StorageError, match="connection refused"):
        bucket.read("name")  # as before


def answered(status_code: int, message: str) -> Exception:
    """An error as of Azure's library, which fsspec passes on."""
    error = Exception(message)
    error.status_code = status_code
    return error


@pytest.mark.parametrize(
    "error",
    [
        PermissionError("Access Denied"),
        OSError(28, "No space left on device"),
        OSError("An error occurred (QuotaExceeded) when calling the PutObject operation"),
        FileNotFoundError("The specified bucket does not exist"),
        ClientError({"ResponseMetadata": {"HTTPStatusCode": 507}}, "PutObject"),
        answered(401, "Invalid Credentials"),
        answered(403, "Server failed to authenticate the request"),
        answered(404, "The specified container does not exist"),
    ],
)
def test_permanent_errors_are_not_retried(bucket: Bucket, monkeypatch, error):
    calls = []

    def refuse(*arguments, **options):
        calls.append(arguments)
        raise error

    monkeypatch.setattr(bucket._fs, "pipe_file", refuse)
    with pytest.raises(RefusedError, match=rf"output_dir: {bucket.url}/name cannot be written: "):
        bucket.write("name", b"")
    assert len(calls) == 1


def test_a_bucket_that_does_not_exist_is_named_where_the_library_gives_an_address_alone(bucket: Bucket, monkeypatch):
    missing = FileNotFoundError("https://storage.googleapis.com/upload/storage/v1/b/runs/o")
    monkeypatch.setattr(bucket._fs, "pipe_file", failing(1, missing))
    with pytest.raises(RefusedError, match="name cannot be written: not found; there may be no such bucket$"):
        bucket.write("name", b"")


def test_a_number_in_an_address_is_no_status(bucket: Bucket, monkeypatch):
    """botocore's message has the address: step 507 would have ended a run while the storage was away."""
    write = failing(2, OSError('Could not connect to the endpoint URL: "http://127.0.0.1:5070/runs/step-000000507"'))
    monkeypatch.setattr(bucket._fs, "pipe_file", write)
    bucket.write("name", b"")


@of_s3
def test_missing_credentials_are_refused_without_retries(s3, monkeypatch, tmp_path: Path):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    with pytest.raises(RefusedError, match="cannot be read: Unable to locate credentials"):
        Bucket(f"{s3}/without").read("name")
    fsspec.get_filesystem_class("s3").clear_instance_cache()


def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch):
    def lacks(url, **options):
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(module.fsspec, "url_to_fs", lacks)
    with pytest.raises(ConfigError, match=r"output_dir: found 's3://a/b', which needs pip install 'ssl_sec\[s3\]'"):
        Bucket("s3://a/b")


@of_s3
def test_partial_uploads_are_removed_from_this_folder_only(bucket: Bucket):
    container, _, prefix = bucket._path.partition("/")
    for key in (f"{prefix}/run/state.pt", "of/others"):
        bucket._fs.call_s3("create_multipart_upload", Bucket=container, Key=key)
    bucket.clean()
    assert [upload["Key"] for upload in bucket._fs.list_multipart_uploads(container)] == ["of/others"]


@of_s3
def test_partial_uploads_after_the_first_page_of_the_list_are_removed(bucket: Bucket, monkeypatch):
    container, _, prefix = bucket._path.partition("/")
    keys, removed = [f"{prefix}/a", f"{prefix}/b", f"{prefix}/c"], []

    def call(method: str, **options: str) -> dict[str, object]:
        """A server that lists one upload in an answer."""
        if method == "abort_multipart_upload":
            removed.append((options["Key"], options["UploadId"]))
            return {}
        assert (method, options["Bucket"], options["Prefix"]) == ("list_multipart_uploads", container, f"{prefix}/")
        key = next(key for key in keys if key > options.get("KeyMarker", ""))
        page = {"Uploads": [{"Key": key, "UploadId": "id"}], "IsTruncated": key != keys[-1]}
        return {**page, "NextKeyMarker": key, "NextUploadIdMarker": "id"}

    monkeypatch.setattr(bucket._fs, "call_s3", call)
    bucket.clean()
    assert removed == [(key, "id") for key in keys]
