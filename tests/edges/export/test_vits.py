"""A vision transformer from pretraining to its export, on images smaller than a patch."""

import pytest

from ssl_sec.edges.export.export import run_export
from ssl_sec.edges.run.driver import run_training
from ssl_sec.exporting import FORMATS
from ssl_sec.recipes.registry import PRETRAIN
from tests.edges.conftest import QUICK
from tests.jobs import configured


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory):
    """A probed run with views of another size than the images."""
    quick = [each for each in QUICK if not each.startswith("encoder.")]
    vit = ["encoder=timm", "encoder.model=test_vit", "augment.view_size_px=24", "epochs=1"]
    more = ["runtime=local", "probe.enabled=true", f"output_dir={tmp_path_factory.mktemp('runs')}"]
    return run_training(PRETRAIN, configured("pretrain", [*quick, *vit, *more]))


def test_a_probe_of_its_features_recognises_digits(finished):
    assert finished.metrics["probe/knn_top1"] > 30  # of ten classes; the linear probe has ten steps


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name == "pt2")) for name in FORMATS])
def test_every_format_is_read_without_this_package(finished, name):
    output_dir = finished.folder.path.parent.parent
    overrides = [f"run={finished.run_id}", f"format={name}", f"output_dir={output_dir}"]
    exported = run_export(configured("export", overrides))
    assert exported.check.largest_difference <= exported.check.allowed
    assert exported.check.largest_value > 0
    if name == "safetensors":
        assert "img_size=16, dynamic_img_size=True, dynamic_img_pad=True" in str(exported)
