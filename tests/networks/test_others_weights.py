"""Weights in checkpoints as other libraries lay them out."""

import zipfile
from argparse import Namespace
from typing import Any

import numpy as np
import pytest
import torch

from ssl_sec.networks import load_head_weights, load_weights
from ssl_sec.networks.heads import LinearHead
from tests.networks.test_weights import assert_equal_weights, assert_refused, backbone

CLASSIFIERS = ("fc.", "head.", "classifier.", "head_dist.", "last_linear.", "aux1.fc1.", "aux2.conv.conv.", "features.")


@pytest.mark.parametrize("prefix", ["", "module."])
@pytest.mark.parametrize("wrapped", [False, True])
def test_state_dicts_of_other_libraries_are_understood(tmp_path, prefix, wrapped):
    source = backbone()
    state = {prefix + name: value for name, value in source.state_dict().items()}
    state |= {f"{prefix}{key}weight": torch.ones(2) for key in CLASSIFIERS}
    torch.save({"state_dict": state, "epoch": 3} if wrapped else state, tmp_path / "w.pt")
    target = backbone(1)
    load_weights(target, tmp_path / "w.pt")
    assert_equal_weights(target, source)


def others_checkpoints() -> dict[str, Any]:
    """Checkpoints of other libraries with the weights of `backbone()`, their other weights, and their options."""
    state, copy = backbone().state_dict(), backbone(2).state_dict()
    moco = {f"module.encoder_q.{name}": value for name, value in state.items()}
    return {
        "torch.compile": {f"_orig_mod.{name}": value for name, value in state.items()},
        "both": {f"module._orig_mod.{name}": value for name, value in state.items()},
        "model": {"model": state, "epoch": 3},
        "options": {"model": {f"module.{name}": value for name, value in state.items()}, "opt": Namespace(lr=0.5)},
        "solo-learn": {
            "state_dict": {
                **{f"backbone.{name}": value for name, value in state.items()},
                **{f"momentum_backbone.{name}": value for name, value in copy.items()},
                "projector.0.weight": torch.ones(2, 2),
            }
        },
        "SwAV": {
            **{f"module.{name}": value for name, value in state.items()},
            "module.projection_head.0.weight": torch.ones(2, 2),
            "module.prototypes.weight": torch.ones(2, 2),
        },
        "MoCo": {
            "state_dict": {
                **{name.replace("encoder_q", "encoder_k"): copy[name.split(".", 2)[2]] for name in moco},
                **moco,
                "module.encoder_q.fc.weight": torch.ones(2, 2),
                "module.queue": torch.ones(2, 2),
            },
            "arch": "resnet50",
        },
        "DINO": {
            "student": {
                **{f"module.backbone.{name}": value for name, value in copy.items()},
                "module.head.last_layer.weight_v": torch.ones(2, 2),
            },
            "teacher": {
                **{f"backbone.{name}": value for name, value in state.items()},
                "head.last_layer.weight_v": torch.ones(2, 2),
            },
            # Its script takes the learning rates from an array.
            "optimizer": {
                "state": {0: {"exp_avg": torch.ones(2)}},
                "param_groups": [{"lr": np.float64(0.5), "weight_decay": np.float32(0.5), "amsgrad": False}],
            },
            "epoch": 100,
            "args": Namespace(arch="resnet50"),
            "dino_loss": {"center": torch.zeros(1, 2)},
        },
        "lightly's DINO": {
            "state_dict": {
                **{f"student_backbone.{name}": value for name, value in copy.items()},
                **{f"teacher_backbone.{name}": value for name, value in state.items()},
            }
        },
        "DINOv2": {**state, "mask_token": torch.zeros(1, 2)},
        "VISSL": {
            "phase_idx": 999,
            "iteration": 312,
            "loss": 0.5,
            "classy_state_dict": {
                "train": True,
                "base_model": {
                    "model": {
                        "trunk": {f"_feature_blocks.{name}": value for name, value in state.items()},
                        "heads": {"0.clf.0.weight": torch.ones(2, 2)},
                    },
                    "meters": {},
                },
                "optimizer": {"optim": {"state": {0: {"momentum_buffer": torch.ones(2)}}, "param_groups": []}},
            },
        },
        "timm's training": {"state_dict": state, "state_dict_ema": copy, "arch": "resnet50", "epoch": 3},
        "the best epoch beside the last one": {"model": state, "best_model": copy},
    }


@pytest.mark.parametrize("library", others_checkpoints())
def test_checkpoints_of_other_libraries_are_understood(tmp_path, library):
    source, target = backbone(), backbone(1)
    torch.save(others_checkpoints()[library], tmp_path / "w.pt")
    load_weights(target, tmp_path / "w.pt")
    assert_equal_weights(target, source)


def test_one_line_says_which_network_of_a_file_is_taken(tmp_path, caplog):
    torch.save(others_checkpoints()["DINO"], tmp_path / "w.pt")
    with caplog.at_level("INFO"):
        load_weights(backbone(1), tmp_path / "w.pt")
    assert caplog.messages == [
        "encoder.weights: the weights are those of teacher.backbone.*, not of student.module.backbone.*"
    ]


def test_numbers_that_numpy_1_has_written_are_read(tmp_path):
    torch.save({"model": backbone().state_dict(), "lr": np.float64(0.5)}, tmp_path / "new.pt")
    with zipfile.ZipFile(tmp_path / "new.pt") as new, zipfile.ZipFile(tmp_path / "old.pt", "w") as old:
        for name in new.namelist():
            old.writestr(name, new.read(name).replace(b"numpy._core.multiarray", b"numpy.core.multiarray"))
    load_weights(target := backbone(1), tmp_path / "old.pt")
    assert_equal_weights(target, backbone())


def test_a_checkpoint_of_another_network_names_its_first_difference(tmp_path):
    state = backbone().state_dict()
    torch.save(
        {"teacher": {f"backbone.{name}": value for name, value in state.items() if name != "0.bias"}}, tmp_path / "w.pt"
    )
    assert_refused(tmp_path / "w.pt", "does not fit the encoder: 0.bias is missing$")


def test_a_head_is_read_from_a_checkpoint(tmp_path):
    source, target = LinearHead(4, 3), LinearHead(4, 3)
    torch.save({"model": {f"module.{name}": value for name, value in source.state_dict().items()}}, tmp_path / "w.pt")
    load_head_weights(target, tmp_path / "w.pt")
    assert_equal_weights(target, source)


def test_of_several_networks_none_is_guessed(tmp_path):
    state = backbone().state_dict()
    torch.save({f"{part}.{name}": value for part in ("one", "two") for name, value in state.items()}, tmp_path / "w.pt")
    assert_refused(tmp_path / "w.pt", r"does not fit the encoder: it holds several, one\.\* and two\.\*; allowed: one$")
