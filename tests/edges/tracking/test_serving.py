"""A registered encoder, loaded by MLflow and served by `mlflow models serve`."""

import json
import os
import shlex
import sys
import urllib.error
import urllib.request
from pathlib import Path

import mlflow
import numpy as np
import pytest
import torch

from ssl_sec.data.standard_sets import open_digits
from ssl_sec.edges.folder.encoder import load_encoder
from ssl_sec.edges.run.driver import run_training
from ssl_sec.recipes.registry import PRETRAIN
from tests.edges.conftest import QUICK
from tests.edges.servers import mlflow_server
from tests.jobs import configured
from tests.test_library import DOCS, blocks

pytestmark = pytest.mark.slow

ADDRESS = "http://127.0.0.1:5000"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory):
    """A run with a scaled encoder in the registry."""
    given = ["tracking.register_model=true", "encoder.mean=[0.3]", "encoder.std=[0.2]", "run_name=served"]
    overrides = [*QUICK, *given, "runtime=local", f"output_dir={tmp_path_factory.mktemp('runs')}"]
    return run_training(PRETRAIN, configured("pretrain", overrides))


@pytest.fixture(scope="module")
def images() -> np.ndarray:
    return (open_digits("test").read(torch.arange(5)).images.float() / 255).numpy()


@pytest.fixture(scope="module")
def features(finished, images) -> np.ndarray:
    """By the encoder in this process."""
    with torch.no_grad():
        return load_encoder(finished.folder.path)(torch.from_numpy(images)).numpy()


def command() -> list[str]:
    """The words of the documented command that serves."""
    (line,) = (
        each for each in (DOCS / "tracking.md").read_text().splitlines() if each.startswith("mlflow models serve")
    )
    return shlex.split(line)


@pytest.fixture(scope="module")
def server(finished, tmp_path_factory: pytest.TempPathFactory):
    """The address of the documented server, on a free port."""
    words = command()
    place = words.index("--host")
    assert words[place:] == ["--host", "127.0.0.1", "--port", "5000"]
    programs = Path(sys.executable).parent
    environment = {"MLFLOW_TRACKING_URI": finished.uri, "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"}
    log = tmp_path_factory.mktemp("serve") / "log"
    with mlflow_server("models serve", *words[3:place], log=log, environment=environment, page="ping") as address:
        yield address


@pytest.mark.parametrize("flavour", ["pyfunc", "pytorch"])
def test_it_is_loaded_by_mlflow(finished, images, features, flavour, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", finished.uri)
    address = "models:/digits-encoder@best"
    if flavour == "pyfunc":
        found = mlflow.pyfunc.load_model(address).predict(images)
    else:
        with torch.no_grad():
            found = mlflow.pytorch.load_model(address)(torch.from_numpy(images)).numpy()
    np.testing.assert_allclose(found, features, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("count", [1, 5])
def test_images_posted_as_documented_are_answered_by_their_features(server, images, features, count):
    (posting,) = (block for block in blocks("tracking.md") if ADDRESS in block)
    names = {"images": images[:count]}
    exec(posting.replace(ADDRESS, server), names)
    np.testing.assert_allclose(names["features"], features[:count], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("key", ["inputs", "instances"])
def test_both_forms_of_tensors_are_accepted(server, images, features, key):
    assert np.asarray(post(server, {key: images.tolist()})["predictions"]).shape == features.shape


def test_images_of_another_shape_are_refused_with_the_one_that_is_expected(server):
    with pytest.raises(urllib.error.HTTPError) as raised:
        post(server, {"inputs": np.zeros((2, 3, 8, 8)).tolist()})
    assert raised.value.code == 400
    assert "does not match expected shape (-1, 1, 8, 8)" in json.load(raised.value)["message"]


def post(server: str, body: object):
    data = json.dumps(body).encode()
    request = urllib.request.Request(f"{server}/invocations", data, {"Content-Type": "application/json"})
    return json.load(urllib.request.urlopen(request, timeout=60))
