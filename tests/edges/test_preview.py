import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from matplotlib.figure import Figure
from PIL import Image

from ssl_sec.data.standard_sets import open_digits
from ssl_sec.edges.command_line import run_job
from ssl_sec.recipes.pretraining.examples import first_views
from ssl_sec.recipes.pretraining.preview import preview
from ssl_sec.recipes.pretraining.recipe import build_recipe
from tests.data.files import encode, write_folder, write_parquet
from tests.data.shards.test_tar import write_tar
from tests.edges.conftest import half_a_picture
from tests.fakes import FakeRuntime, assert_identical
from tests.jobs import configured
from tests.jobs import preview as job

DRAWS_PICTURES = True

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Digits as images in a folder, in Parquet and in a shard."""
    root = tmp_path_factory.mktemp("digits")
    digits = open_digits("train")
    encoded = [encode(Image.fromarray(image[0].numpy())) for image in digits.images[:60]]
    write_folder(root / "images", {f"{number:02d}.png": image for number, image in enumerate(encoded)})
    write_parquet(root / "train.parquet", encoded, digits.labels[:60].tolist())
    write_tar(root / "train.tar", {f"{number:02d}.png": image for number, image in enumerate(encoded)})
    return root


def of(files: Path, tmp_path: Path, data: str) -> list[str]:
    where = {
        "folder": [f"data.root={files}/images"],
        "parquet": [f"data.train=[{files}/train.parquet]", f"data.cache_folder={tmp_path}/cache"],
        "webdataset": [f"data.train=[{files}/train.tar]", f"data.cache_folder={tmp_path}/cache"],
        "digits": ["augment=digits"],
    }
    grey = [] if data == "digits" else ["data.num_channels=1"]
    return [f"data={data}", *where[data], *grey, "global_batch_size=16", "encoder.width=0.125", "runtime=local"]


@pytest.mark.parametrize(
    ("data", "more"),
    [
        ("digits", ["augment.num_views=3", "seed=4"]),
        ("folder", []),
        ("folder", ["data.resident_limit_mib=0", "data.max_images=40"]),
        ("parquet", ["augment.view_size_px=6"]),
        ("parquet", ["data.shuffle_window=20"]),
        ("parquet", ["data.shuffle_window=20", "data.resident_limit_mib=0"]),
        ("parquet", ["data.shuffle_window=20", "data.resident_limit_mib=0", "data.max_images=40"]),
        ("webdataset", []),
        ("webdataset", ["data.shuffle_window=20", "data.resident_limit_mib=0"]),
        ("folder", ["data.image_size_px=7", "augment.from_original=true"]),
        ("parquet", ["data.image_size_px=7", "augment.from_original=true", "data.shuffle_window=20"]),
    ],
)
def test_the_preview_equals_the_runs_picture(files, tmp_path, data, more):
    config = configured("pretrain", [*of(files, tmp_path, data), *more])
    found = preview(config, num_images=5)
    image_set = config.augment.crops(config.trained_data.open("train"))
    recipe = build_recipe(config, image_set, FakeRuntime())
    expected = first_views(image_set, recipe.sampler, (recipe.views,), torch.device("cpu"), 5, recipe.draws)
    assert len(expected["images"]) == 5
    assert_identical(found.pictures, expected)
    assert len(found.image_set) == len(image_set)


def test_a_preview_writes_a_picture_and_neither_tracks_nor_trains(tmp_path):
    arguments = ["experiment=digits", f"output={tmp_path}/new/some.png", "num_images=3"]
    code = (
        "import json, sys\nfrom ssl_sec.edges.commands import run_command\n"
        f"code = run_command(['preview', *{arguments}])\n"
        "print(json.dumps([code, sorted({'ray', 'mlflow'} & set(sys.modules))]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    *lines, imported = done.stdout.splitlines()
    assert json.loads(imported) == [0, []], done.stderr
    assert lines == [
        "data: digits/train, 1,437 images of 1 x 8 x 8, 10 classes",
        "shown: 3 images of the first step, 2 views of each, 8 x 8 pixels",
        f"picture: {tmp_path}/new/some.png",
    ]
    with Image.open(tmp_path / "new/some.png") as picture:
        assert picture.format == "PNG" and min(picture.size) > 300
    assert [path.name for path in tmp_path.rglob("*")] == ["new", "some.png"]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["output=picture.jpg"], 2, "output: found 'picture.jpg', must be a file named .png"),
        (["output=s3://bucket/picture.png"], 2, "output: found 's3://bucket/picture.png', a URL; "),
        (["num_images=0"], 2, "num_images: found 0, must be in [1, 64]"),
        (["num_image=3"], 2, "num_image: unknown key; did you mean 'num_images'?"),
        (["augment.num_views=1"], 2, "augment.num_views: found 1, must be in [2, 64]"),
        (["experiment=cars196_triplet_sec"], 2, "experiment: found 'cars196_triplet_sec', which is run by jobs.metric"),
        (["data=folder", "data.root=nosuch"], 3, "nosuch: no such folder"),
        (["output=/proc/nosuch/picture.png"], 4, "output: /proc/nosuch/picture.png cannot be written: "),
    ],
)
def test_a_mistake_is_one_line(arguments, code, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run_job("preview", job, arguments) == code
    output = capsys.readouterr().err
    assert output.startswith(f"error: {message}") and output.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_leaves_no_half_picture_and_the_earlier_one(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(Figure, "savefig", half_a_picture)
    (tmp_path / "old.png").write_bytes(b"earlier")
    for name in ("new", "old"):
        assert run_job("preview", job, ["experiment=digits", f"output={tmp_path}/{name}.png"]) == 4
        message = f"error: output: {tmp_path}/{name}.png cannot be written: No space left on device\n"
        assert capsys.readouterr().err == message
    assert [path.name for path in tmp_path.iterdir()] == ["old.png"]
    assert (tmp_path / "old.png").read_bytes() == b"earlier"


@pytest.mark.parametrize(("batch_size", "shown"), [(4, 4), (256, 8)])
def test_a_small_set_or_batch_is_shown_as_far_as_it_goes(files, tmp_path, capsys, caplog, batch_size, shown):
    root = tmp_path / "images"
    pictures = sorted((files / "images").iterdir())[:12]
    write_folder(root, {f"{number}.png": path.read_bytes() for number, path in enumerate(pictures)})
    place = ["data=folder", f"data.root={root}", "data.num_channels=1", f"output={tmp_path}/a.png"]
    assert run_job("preview", job, [*place, f"global_batch_size={batch_size}"]) == 0
    assert f"shown: {shown} images of the first step" in capsys.readouterr().out
    warning = "found 12 images, fewer than global_batch_size = 256: a pretraining needs global_batch_size ≤ 12"
    assert (warning in caplog.messages) == (batch_size == 256)


def test_an_unreadable_image_that_is_not_shown_does_not_matter(tmp_path, files, capsys):
    write_folder(
        tmp_path / "images",
        {f"{number}.png": path.read_bytes() for number, path in enumerate(sorted((files / "images").iterdir())[:20])},
    )
    arguments = ["data=folder", f"data.root={tmp_path}/images", f"output={tmp_path}/a.png", "num_images=2"]
    arguments += ["global_batch_size=16", "data.num_channels=1"]
    config = configured("pretrain", arguments[:2] + arguments[4:])
    shown = build_recipe(config, config.data.open("train"), FakeRuntime()).sampler.indices(0)[:2].tolist()
    paths = sorted((tmp_path / "images").iterdir())
    hidden = next(number for number in range(1, 20) if number not in shown)
    paths[hidden].write_bytes(b"nothing")
    assert run_job("preview", job, arguments) == 0
    paths[shown[0]].write_bytes(b"nothing")
    assert run_job("preview", job, arguments) == 3
    assert f"error: {paths[shown[0]]}: not an image" in capsys.readouterr().err
