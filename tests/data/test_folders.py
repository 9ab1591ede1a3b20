from dataclasses import replace

import pytest
import torch

from ssl_sec.data.decode import Decoding
from ssl_sec.data.folders import open_folder
from tests.data.files import plain, write_folder
from tests.data.test_image_set import values
from tests.data.test_sources import line


@pytest.mark.parametrize("resident_limit_mib", [0, 1])
def test_a_link_to_itself_is_an_image_that_cannot_be_read(tmp_path, resident_limit_mib):
    write_folder(tmp_path, {"train/cat/1.png": plain(1), "train/dog/3.png": plain(3)})
    (tmp_path / "train/cat/2.png").symlink_to("2.png")
    (tmp_path / "train/cat/again").symlink_to("again")
    decoding = Decoding(image_size_px=8, on_bad_image="raise", resident_limit_mib=resident_limit_mib)
    told = line(lambda: open_folder("train", tmp_path, decoding).read(torch.arange(3)))
    assert "2.png: cannot be decoded: [Errno 40]" in told
    images = open_folder("train", tmp_path, replace(decoding, on_bad_image="skip"))
    read = images.read(torch.arange(len(images)))
    assert values(read) == ([1, 3] if resident_limit_mib else [1, 3, 3]) and images.num_bad_images == 1
