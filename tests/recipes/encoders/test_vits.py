"""Pretraining of vision transformers on images and views of sizes that they were not made for."""

import pytest
import torch
from safetensors.torch import load_file

from ssl_sec.errors import ConfigError, Stopped
from tests.fakes import FakeRuntime, assert_identical
from tests.recipes.test_pretraining import run


def changes(view_size_px=None, **encoder):
    """Of the digits' run, whose images have 8 pixels, less than a patch of 16."""
    return {
        "encoder": encoder or {"name": "timm", "model": "test_vit"},
        "augment": {"min_scale": 0.4, "view_size_px": view_size_px},
        "runtime": {"name": "local", "device": "cpu", "precision": "float32"},
    }


@pytest.mark.parametrize("view_size_px", [None, 24, 40])
def test_a_resumed_run_with_views_of_any_size_ends_bit_equal(view_size_px, tmp_path):
    whole, store = run(tmp_path, **changes(view_size_px))
    assert len(whole.series("val/knn_top1")) == 2
    embeddings = load_file(store.encoder_path)["pos_embed"]
    assert embeddings.shape == (1, 2, 64)  # a class token and one padded patch: the images' size
    runtime = FakeRuntime(stop_at=4)
    with pytest.raises(Stopped):
        run(tmp_path, runtime, **changes(view_size_px))
    torch.manual_seed(99)
    resumed, _ = run(tmp_path, state=runtime.last_state(), **changes(view_size_px))
    assert_identical(resumed.last_state(), whole.last_state())


def test_views_that_an_encoder_cannot_take_are_refused_by_their_key(tmp_path):
    with pytest.raises(ConfigError, match="^augment.view_size_px: found 24, which the encoder cannot take") as refused:
        run(tmp_path, **changes(24, name="ir18", width=0.0625))
    assert "\n" not in str(refused.value)
