import pytest
import torch

from ssl_sec.data.decode import Decoding
from ssl_sec.data.encoded_images import EncodedImages
from ssl_sec.data.faces.listed_images import frames_of_videos, open_listed, paths_by_stem
from ssl_sec.data.folders.listing import image_paths
from ssl_sec.data.image_set import ResidentImages
from ssl_sec.errors import MissingDataError
from tests.data.files import plain, write_folder
from tests.data.test_image_set import values
from tests.data.test_sources import line


@pytest.fixture
def root(tmp_path):
    images = {"ann/a_1.jpg": 1, "ann/a_2.png": 2, "bo/deep/b.png": 3, "ann/note.txt": 9}
    return write_folder(tmp_path / "faces", {path: plain(value) for path, value in images.items()})


def opened(root, *paths, **options):
    return open_listed(paths, torch.arange(len(paths)), paths, root, "l.txt line", "faces", Decoding(**options))


@pytest.mark.parametrize("limit", [0, 1])
def test_images_are_those_of_the_list_in_its_order(root, limit):
    images = opened(root, "bo/deep/b.png", "ann/a_1.jpg", "bo/deep/b.png", resident_limit_mib=limit)
    assert isinstance(images, ResidentImages if limit else EncodedImages)
    assert values(images.read(torch.arange(3))) == [3, 1, 3] and images.labels.tolist() == [0, 1, 2]
    assert images.description == f"3 images of l.txt in {root}"
    assert opened(root, "ann/a_1.jpg", image_size_px=4, num_channels=1).image_shape == (1, 4, 4)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("ann/a_9.jpg", "ann/a_9.jpg is not there"),
        ("none/a_1.jpg", "none/a_1.jpg is not there"),
        ("ann/a_1.jpg/x", "ann/a_1.jpg/x is not there"),
        ("../outside.png", "../outside.png leads out of ROOT; allowed: paths below it"),
        ("/outside.png", "/outside.png leads out of ROOT; allowed: paths below it"),
        ("ann/link.png", "ann/link.png leads out of ROOT; copy the file into it"),
        ("away/outside.png", "away/outside.png leads out of ROOT; copy the files into it"),
        ("ann/\n", "ann/\\n is not there"),
    ],
)
def test_a_wrong_path_is_named_with_its_line(root, path, message):
    write_folder(root.parent, {"outside.png": plain(1)})
    (root / "ann" / "link.png").symlink_to(root.parent / "outside.png")
    (root / "away").symlink_to(root.parent)
    found = line(lambda: opened(root, "ann/a_1.jpg", path))
    assert found == f"l.txt line 2: {message}".replace("ROOT", str(root))


def test_a_file_that_is_no_image(root):
    (root / "ann/note.txt").write_text("no image")
    assert line(lambda: opened(root, "ann/note.txt")).startswith(f"{root}/ann/note.txt: ")


def test_names_without_their_folder_and_with_another_extension(root):
    assert paths_by_stem(["a_2.jpg", "a_1", "x/a_1.png"], root, "") == ["ann/a_2.png", "ann/a_1.jpg", "ann/a_1.jpg"]
    message = line(lambda: paths_by_stem(["a_1.jpg", "a_3.jpg"], root, "l.mat image"))
    assert message == f"l.mat image 2: no image 'a_3.jpg' in {root}"
    write_folder(root, {"bo/a_1.png": plain(1)})
    message = line(lambda: paths_by_stem(["a_1.jpg"], root, "l.mat image"))
    assert message == f"l.mat image 1: several images 'a_1.jpg' in {root}"
    line(lambda: paths_by_stem(["a"], root / "none", ""), MissingDataError)


def test_images_are_found_at_any_depth(root):
    assert paths_by_stem(["b", "a_1"], root, "") == ["bo/deep/b.png", "ann/a_1.jpg"]
    write_folder(root, {"bo/first.png": plain(4), "bo/deep/er/c.png": plain(5)})
    paths, video = frames_of_videos(["ann", "bo"], root, "l.txt")
    assert paths[2:] == ["bo/first.png", "bo/deep/b.png", "bo/deep/er/c.png"] and video.tolist() == [0, 0, 1, 1, 1]
    (root / "bo/deep/out").symlink_to(root.parent)
    assert f"leads out of {root}; copy the file into it" in line(lambda: frames_of_videos(["bo"], root, "l.txt"))


def test_the_order_of_images_is_that_of_folders_then_names(root):
    write_folder(root, {name: plain(1) for name in ("z.png", "ann b/1.png", "ann/10.png", "ann.d/1.png")})
    expected = ["z.png", "ann/10.png", "ann/a_1.jpg", "ann/a_2.png", "ann b/1.png", "ann.d/1.png", "bo/deep/b.png"]
    assert image_paths(root) == expected


def test_frames_of_videos(root):
    paths, video = frames_of_videos(["bo/deep", "ann"], root, "l.txt")
    assert paths == ["bo/deep/b.png", "ann/a_1.jpg", "ann/a_2.png"] and video.tolist() == [0, 1, 1]
    assert line(lambda: frames_of_videos(["ann", "bo/none"], root, "l.txt")) == "l.txt: bo/none is not there"
    assert line(lambda: frames_of_videos(["../faces/ann"], root, "l.txt")).startswith("l.txt: ../faces/ann leads out")
    (root / "cy").mkdir()
    told = line(lambda: frames_of_videos(["cy"], root, "l.txt"))
    assert told.startswith(f"{root}/cy: no images in it or below it; allowed: .avif, .bmp")
    told = line(lambda: frames_of_videos(["ann/a_1.jpg"], root, "l.txt"), MissingDataError)
    assert told.startswith(f"{root}/ann/a_1.jpg: is a file, must be a folder")
    line(lambda: frames_of_videos(["ann"], root / "none", "l.txt"), MissingDataError)
