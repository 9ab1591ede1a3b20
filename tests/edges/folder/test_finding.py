import json
from pathlib import Path

import pytest

from ssl_sec.edges.folder.finding import find_folder, folder_at, opened_folder
from ssl_sec.edges.folder.folder import RunFolder
from ssl_sec.edges.storage.bucket import Bucket
from ssl_sec.errors import ConfigError

RUNS = {
    "digits/first": ("0123456789abcdef0123456789abcdef", "pretrain"),
    "digits/first-probe": ("77775678900000000000000000000000", "probe"),
    "digits/second": ("01ff0000000000000000000000000000", "pretrain"),
    "cifar10/second": (None, "pretrain"),
}


@pytest.fixture
def output_dir(tmp_path: Path) -> Path:
    for place, (run_id, job) in RUNS.items():
        folder = RunFolder(tmp_path / "runs" / place)
        folder.start({"epochs": 1})
        folder.identity_path.write_text(json.dumps({"uri": "sqlite:////somewhere.db", "tags": {"job": job}}))
        if run_id is not None:
            folder.run_id_path.write_text(f"{run_id}\n")
    return tmp_path / "runs"


@pytest.mark.parametrize(
    ("word", "place"),
    [
        ("0123456789abcdef0123456789abcdef", "digits/first"),
        ("0123", "digits/first"),
        ("77775678900", "digits/first-probe"),
        ("first", "digits/first"),
        ("first-p", "digits/first-probe"),
        ("{output_dir}/cifar10/second", "cifar10/second"),
        ("runs/digits/second/", "digits/second"),
    ],
)
def test_a_run_is_found_by_its_id_its_name_the_beginning_of_one_or_its_folder(
    word, place, output_dir, monkeypatch, caplog
):
    monkeypatch.chdir(output_dir.parent)
    caplog.set_level("INFO")
    found = find_folder("resume", word.format(output_dir=output_dir), str(output_dir))
    assert found.path == output_dir / place
    shown = {"0123": "first (01234567)", "77775678900": "first-probe (77775678)", "first-p": "first-probe (77775678)"}
    assert caplog.messages == ([f"resume: {word} is short for {shown[word]}"] if word in shown else [])


@pytest.mark.parametrize("linked", ["digits", "digits/first"])
def test_a_run_in_a_linked_folder_belongs_to_the_output_folder_with_the_link(linked, output_dir, tmp_path, monkeypatch):
    (elsewhere := tmp_path / "large disk" / linked).parent.mkdir(parents=True)
    (output_dir / linked).rename(elsewhere)
    (output_dir / linked).symlink_to(elsewhere)
    (tmp_path / "link").symlink_to(output_dir)
    monkeypatch.chdir(tmp_path)
    for word in ("link/digits/first", "runs/digits/../digits/first/"):
        assert find_folder("resume", word, "runs").path == output_dir / "digits" / "first"


def num_open_copies() -> int:
    """The number of copies of runs that this process keeps locked."""
    return sum(path.is_symlink() and path.readlink().name == ".process" for path in Path("/proc/self/fd").iterdir())


def test_a_run_in_a_bucket_is_found_by_its_name_without_reading_the_others(s3, monkeypatch):
    bucket, requests = Bucket(s3), []
    for place, (run_id, job) in RUNS.items():
        bucket.write(f"{place}/config.yaml", b"epochs: 1")
        bucket.write(f"{place}/mlflow.json", json.dumps({"tags": {"job": job}}).encode())
        if run_id is not None:
            bucket.write(f"{place}/mlflow_run_id", run_id.encode())
    attempt = Bucket._try

    def counted(self, what, name, request):
        requests.append(f"{what} {name}")
        return attempt(self, what, name, request)

    monkeypatch.setattr(Bucket, "_try", counted)
    assert find_folder("resume", "first", s3, "pretrain").name == "first"
    # The recipes, where the name is, and its naming files; then the run itself.
    looked_up = ["listed ", *(f"read {recipe}/first/config.yaml" for recipe in ("cifar10", "digits"))]
    assert requests[:5] == [*looked_up, "read digits/first/mlflow.json", "read digits/first/mlflow_run_id"]
    assert not [request for request in requests if "second" in request or "probe" in request]
    num_open = num_open_copies()
    assert find_folder("resume", "0123", f"{s3}/", "pretrain").name == "first"
    with pytest.raises(ConfigError, match="resume: found 'second', which matches 2 runs"):
        find_folder("resume", "second", s3, "pretrain")
    assert 0 < num_open_copies() - num_open <= len(RUNS) - 1


def test_a_run_in_a_bucket_is_read_again_once_it_has_changed(s3, monkeypatch):
    url, bucket, downloads = f"{s3}/digits/first", Bucket(f"{s3}/digits/first"), []
    download = Bucket.download
    monkeypatch.setattr(Bucket, "download", lambda *given: downloads.append(given[1]) or download(*given))
    bucket.write("config.yaml", b"epochs: 1")
    active = folder_at(url)
    assert active is not None and not active.encoder_path.exists()
    for weights in (b"first", b"other"):  # the latter of another run of this name, in a file of the same size
        bucket.write("encoder.safetensors", weights)
        downloads.clear()
        found = [folder_at(url), folder_at(f"{url}/")]
        assert [folder is not None and folder.encoder_path.read_bytes() for folder in found] == [weights, weights]
        assert downloads == ["config.yaml", "encoder.safetensors"]
    bucket.remove(bucket.files())
    assert folder_at(url) is None


def test_of_several_matches_the_run_of_the_job_is_found(output_dir):
    with pytest.raises(
        ConfigError, match=r"resume: found 'fir', which matches 2 runs: first \(01234567\), first-probe"
    ):
        find_folder("resume", "fir", str(output_dir))
    assert find_folder("resume", "fir", str(output_dir), "pretrain").path == output_dir / "digits/first"


def test_runs_of_another_job_are_neither_found_by_a_prefix_nor_offered(output_dir):
    with pytest.raises(ConfigError, match="has no run whose id or name starts with it; .*allowed: first, second$"):
        find_folder("resume", "first-p", str(output_dir), "pretrain")
    by_name = find_folder("resume", "first-probe", str(output_dir), "pretrain")  # whose job is then reported
    assert by_name.path == output_dir / "digits/first-probe"


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("second", r"^resume: found 'second', which matches 2 runs: second \(no id\), second \(01ff0000\); give an id"),
        ("01", "which matches 2 runs"),
        ("secnod", "has no run whose id or name starts with it; did you mean 'second'"),
        ("{output_dir}/digits/none", "digits/none holds no run"),
        ("", "resume: found '', must be a run's id, its name"),
    ],
)
def test_a_word_that_means_no_run_or_several_is_one_line(word, message, output_dir):
    with pytest.raises(ConfigError, match=message):
        find_folder("resume", word.format(output_dir=output_dir), str(output_dir))


def test_a_folder_knows_its_store_unless_its_credentials_were_left_out(output_dir):
    folder = folder_at(str(output_dir / "digits/first"))
    assert folder is not None and folder.identity.known_uri == "sqlite:////somewhere.db"
    folder.identity_path.write_text(json.dumps({"uri": "https://***@mlflow.example", "tags": {}}))
    assert folder.identity.known_uri is None
    folder.identity_path.write_text("{")
    assert folder.identity.known_uri is None


@pytest.mark.parametrize("url", ["hf://me/digits-encoder", "s3://bucket"])
def test_a_url_that_is_too_short_for_a_run_is_none(url):
    assert folder_at(url) is None
    with pytest.raises(ConfigError, match=f"^resume: {url} holds no run; allowed: a run's folder$"):
        find_folder("resume", url, "runs")
    with pytest.raises(ConfigError, match=f"^run: found '{url}'; allowed: a folder, or the URL .*hf download <owner>/"):
        opened_folder(url)
