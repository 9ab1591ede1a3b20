import subprocess
import sys

import numpy as np
import pytest
import torch

from ssl_sec.data.decode import FORMATS, decode_image
from ssl_sec.data.faces.alignment import REFERENCE_POINTS
from ssl_sec.edges.align import run_align
from ssl_sec.edges.command_line import run_job
from ssl_sec.edges.config import AlignConfig
from ssl_sec.errors import DataError
from tests.data.faces.test_alignment import POINTS, csv
from tests.data.files import encode, noise, write_folder
from tests.jobs import align

FACE = noise(120, 130)
FILES = {"ann/1.png": encode(FACE), "ann/2.png": encode(FACE), "bo/1.png": b"text", "bo/2.png": encode(FACE)}
LISTED = [f"{path},{POINTS}" for path in FILES]


def given(root, files=FILES, listed=LISTED) -> list[str]:
    """A folder, its landmarks and a command."""
    write_folder(root / "photos", files)
    (root / "landmarks.csv").write_text(csv(*listed))
    return [f"images={root / 'photos'}", f"landmarks={root / 'landmarks.csv'}", f"output={root / 'faces'}"]


def tree(root) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_tree_is_aligned_and_resumed(tmp_path, num_workers, caplog):
    arguments = given(tmp_path, listed=[*LISTED[:3], f"zoe/7.png,{POINTS}"])
    config = AlignConfig(**dict(pair.split("=") for pair in arguments), num_workers=num_workers)
    aligned = run_align(config)
    assert tree(tmp_path / "faces") == ["ann/1.png", "ann/2.png"]
    pixels = decode_image(tmp_path / "faces/ann/2.png", "2", 3)
    assert torch.equal(pixels, torch.from_numpy(np.asarray(FACE)[:112, :112].copy()).permute(2, 0, 1))
    assert str(aligned) == (
        "aligned: 2 images, 112 x 112 pixels; 0 already existed\nleft out: 1 unreadable, 1 without landmarks\n"
        f"folder: {tmp_path / 'faces'}"
    )
    assert sorted(caplog.messages) == sorted(
        [
            "bo/2.png: no landmarks, left out",
            "zoe/7.png: has landmarks, but the image is missing",
            f"{tmp_path / 'photos/bo/1.png'}: not an image; allowed: {', '.join(FORMATS)}, NPY; left out",
        ]
    )
    (tmp_path / "faces/ann/1.png").unlink()
    (tmp_path / "faces/ann/2.png").write_bytes(b"kept as it is")
    again = run_align(config)
    assert (again.num_aligned, again.num_kept, again.num_unreadable) == (1, 1, 1)
    assert (tmp_path / "faces/ann/2.png").read_bytes() == b"kept as it is"


def test_two_images_that_would_be_one_file_are_refused(tmp_path):
    files = {"ann/b.bmp": encode(FACE, "BMP"), "ann/b.bmp.png": encode(FACE)}
    arguments = given(tmp_path, files, [f"{path},{POINTS}" for path in files])
    message = "^images: found ann/b.bmp and ann/b.bmp.png, both aligned to ann/b.bmp.png; rename one$"
    with pytest.raises(DataError, match=message):
        align(arguments)
    assert not (tmp_path / "faces").exists()


@pytest.mark.parametrize(
    ("change", "code", "message"),
    [
        ({"images": "no"}, 3, "/no: no such folder"),
        ({"landmarks": "no.csv"}, 3, "/no.csv: not there"),
        ({"output": "photos"}, 2, "output: found "),
        ({"output": "photos/faces"}, 2, "must be outside of images"),
        ({"output": "landmarks.csv"}, 4, "landmarks.csv/ann/1.png: cannot be written: "),
        ({"images": "."}, 3, "landmarks.csv has none of 4 images in "),
    ],
)
def test_an_error_is_one_line_and_its_exit_code(tmp_path, capsys, change, code, message):
    arguments = dict(argument.split("=") for argument in given(tmp_path))
    if change.get("images") == ".":
        (tmp_path / "photos").rename(tmp_path / "apart")
        arguments["images"] = str(tmp_path / "apart")
        (tmp_path / "landmarks.csv").write_text(csv(f"photos/ann/1.png,{POINTS}"))
    else:
        arguments |= {key: str(tmp_path / value) for key, value in change.items()}
    assert run_job("align", align, [*(f"{key}={value}" for key, value in arguments.items()), "num_workers=0"]) == code
    output = capsys.readouterr().err.strip().splitlines()[-1]
    assert output.startswith("error: ") and message in output


def test_images_at_any_depth_are_aligned(tmp_path):
    arguments = given(tmp_path, {"ann/2019/may/1.png": encode(FACE)}, [f"ann/2019/may/1.png,{POINTS}"])
    aligned = run_align(AlignConfig(**dict(pair.split("=") for pair in arguments), num_workers=0))
    assert aligned.num_aligned == 1 and tree(tmp_path / "faces") == ["ann/2019/may/1.png"]


def test_a_tree_without_readable_images_is_refused(tmp_path, capsys):
    arguments = given(tmp_path, {"ann/1.png": b"text", "ann/2.png": encode(FACE)}, [f"ann/1.png,{POINTS}"])
    assert run_job("align", align, [*arguments, "num_workers=0"]) == 3
    assert "images: 1 image in " in capsys.readouterr().err
    points = ",".join("5" for _ in REFERENCE_POINTS.flatten())
    arguments = given(tmp_path / "b", {"ann/2.png": encode(FACE)}, [f"ann/2.png,{points}"])
    assert run_job("align", align, [*arguments, "num_workers=0"]) == 3


def test_the_command_aligns_a_folder(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "jobs.align", *given(tmp_path), "num_workers=2"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "aligned: 3 images" in done.stdout and len(tree(tmp_path / "faces")) == 3
    assert "bo/1.png: not an image" in done.stderr and "Traceback" not in done.stderr
