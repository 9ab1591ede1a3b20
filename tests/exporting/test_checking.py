"""What the check of an export says of its files."""

import pytest

from ssl_sec.exporting import FORMATS, check_export, checking
from ssl_sec.exporting.checking import is_tied_to_cpu
from tests.exporting.test_exporting import exportable_timm, some_images


@pytest.mark.parametrize(
    ("model", "is_tied"), [("xcit_nano_12_p16_224", True), pytest.param("test_vit", False, marks=pytest.mark.slow)]
)
def test_a_recording_that_makes_tensors_on_the_cpu_is_noticed(model, is_tied, tmp_path, monkeypatch, warm_reader):
    monkeypatch.setattr(checking, "subprocess", warm_reader)
    exportable = exportable_timm(model, 3, 32)
    images = some_images(exportable)
    FORMATS["torchscript"].write(exportable, images, tmp_path)
    check = check_export(FORMATS["torchscript"], exportable, images, tmp_path)
    assert is_tied_to_cpu(tmp_path) == check.is_tied_to_cpu == is_tied
    assert ["may fail on a GPU" in remark for remark in check.remarks] == [True] * is_tied


def test_formats_without_a_recording_are_not_tied(tmp_path):
    exportable = exportable_timm("xcit_nano_12_p16_224", 3, 32)
    FORMATS["safetensors"].write(exportable, some_images(exportable), tmp_path)
    assert not is_tied_to_cpu(tmp_path)
