import os
import pickle

import pytest
import torch
import torchvision
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from ssl_sec.errors import MissingDataError, StorageError
from ssl_sec.networks import load_head_weights, load_weights, resnet, save_weights, weights
from ssl_sec.networks.heads import BatchNormLinearHead, LinearBatchNormHead, LinearHead


def backbone(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(3, 2, 3), nn.BatchNorm2d(2))


def assert_equal_weights(one, other):
    torch.testing.assert_close(dict(one.state_dict()), dict(other.state_dict()), rtol=0, atol=0)


def assert_refused(path, pattern, into=None):
    into = into or backbone(1)
    before = {name: value.clone() for name, value in into.state_dict().items()}
    with pytest.raises(StorageError, match=pattern) as caught:
        load_weights(into, path)
    assert str(caught.value).startswith(f"encoder.weights: {path} ")
    assert "\n" not in str(caught.value)
    torch.testing.assert_close(dict(into.state_dict()), before, rtol=0, atol=0)


def test_saved_weights_can_be_loaded(tmp_path):
    path = tmp_path / "encoder.safetensors"
    source = backbone()
    source(torch.randn(4, 3, 5, 5))
    save_weights(source, path, {"recipe": "digits"})
    target = backbone(1)
    load_weights(target, path)
    assert_equal_weights(target, source)
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt", "recipe": "digits"}
        assert set(file.keys()) == set(source.state_dict())
    assert os.listdir(tmp_path) == ["encoder.safetensors"]


def test_channels_last_weights_are_saved(tmp_path):
    path = tmp_path / "encoder.safetensors"
    source = backbone().to(memory_format=torch.channels_last)
    save_weights(source, path)
    target = backbone(1)
    load_weights(target, path)
    assert_equal_weights(target, source)


def test_saving_again_replaces_the_file(tmp_path):
    path = tmp_path / "encoder.safetensors"
    save_weights(backbone(0), path)
    save_weights(backbone(2), path)
    target = backbone(1)
    load_weights(target, path)
    assert_equal_weights(target, backbone(2))


def test_a_state_dict_of_torchvision_fits_with_its_classifier_left_out(tmp_path):
    theirs = torchvision.models.resnet18(weights=None)
    torch.save(theirs.state_dict(), tmp_path / "resnet18.pth")
    ours, _ = resnet(18, "imagenet")
    load_weights(ours, tmp_path / "resnet18.pth")
    torch.testing.assert_close(ours.layer4[1].conv2.weight, theirs.layer4[1].conv2.weight, rtol=0, atol=0)


def test_an_old_torchvision_resnet50_without_batch_counters_loads(tmp_path):
    """resnet50-19c8e357.pth has no counts."""
    torch.manual_seed(0)
    theirs = torchvision.models.resnet50(weights=None)
    state = {name: value for name, value in theirs.state_dict().items() if not name.endswith("num_batches_tracked")}
    assert len(state) == 267
    torch.save(state, tmp_path / "resnet50.pth")
    ours, _ = resnet(50, "imagenet")
    load_weights(ours, tmp_path / "resnet50.pth")
    theirs.fc = nn.Identity()
    assert_equal_weights(ours, theirs)


@pytest.mark.parametrize("name", ["w.pt", "w.safetensors"])
def test_batch_norm_vectors_may_have_an_extra_axis(tmp_path, name):
    source, target = backbone(), backbone(1)
    source(torch.randn(4, 3, 5, 5))
    state = source.state_dict()
    for key in ("weight", "bias", "running_mean", "running_var"):
        state[f"1.{key}"] = state[f"1.{key}"][None]
    save_weights_of(state, tmp_path / name)
    load_weights(target, tmp_path / name)
    assert_equal_weights(target, source)
    save_weights_of({**state, "1.bias": torch.ones(2, 1)}, tmp_path / name)
    assert_refused(tmp_path / name, r"1.bias has shape \(2, 1\), the encoder \(2,\)$")


def test_a_backbone_keeps_a_layer_that_is_called_like_a_classifier(tmp_path):
    source, target = nn.ModuleDict({"head": nn.Linear(2, 2)}), nn.ModuleDict({"head": nn.Linear(2, 2)})
    save_weights(source, tmp_path / "w.safetensors")
    load_weights(target, tmp_path / "w.safetensors")
    assert_equal_weights(target, source)


@pytest.mark.parametrize("name", ["w.pt", "w.safetensors"])
def test_keys_that_do_not_fit_are_named(tmp_path, name):
    path = tmp_path / name

    def save(state):
        save_weights_of(state, path)

    full = backbone().state_dict()
    save({key: value for key, value in full.items() if key != "0.bias"})
    assert_refused(path, "does not fit the encoder: 0.bias is missing$")
    save({**full, "7.extra": torch.ones(2)})
    assert_refused(path, "7.extra is unknown$")
    save({**full, "0.bias": torch.ones(3)})
    assert_refused(path, r"0.bias has shape \(3,\), the encoder \(2,\)$")
    save({"a.weight": torch.ones(3)})
    assert_refused(path, "0.bias is missing and 6 more$")


def save_weights_of(state, path):
    if path.suffix == ".pt":
        torch.save(state, path)
    else:
        holder = nn.Module()
        holder.state_dict = lambda: state
        save_weights(holder, path)


@pytest.mark.parametrize("suffix", ["safetensors", "pt"])
@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        (lambda weight: weight.to(torch.int8), "0.weight has type torch.int8, must be torch.float32$"),
        (lambda weight: weight.to(torch.complex64), "0.weight has type torch.complex64, must be torch.float32$"),
        (lambda weight: weight / 0, "0.weight has values that are not finite$"),
    ],
)
def test_weights_that_no_training_produces_are_refused(tmp_path, suffix, changed, problem):
    tensors = {name: value.clone() for name, value in backbone().state_dict().items()}
    tensors["0.weight"] = changed(tensors["0.weight"])
    path = tmp_path / f"w.{suffix}"
    save_file(tensors, path) if suffix == "safetensors" else torch.save(tensors, path)
    assert_refused(path, f"does not fit the encoder: {problem}")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_precisions_are_accepted(tmp_path, dtype):
    torch.save({name: value.to(dtype) for name, value in backbone().state_dict().items()}, tmp_path / "w.pt")
    into = backbone(1)
    load_weights(into, tmp_path / "w.pt")
    torch.testing.assert_close(into[0].weight, backbone()[0].weight.to(dtype).float(), rtol=0, atol=0)


def test_a_backbone_named_features_is_not_a_classifier(tmp_path):
    save_weights_of({**backbone().state_dict(), "features.0.weight": torch.ones(2)}, tmp_path / "vgg.pt")
    assert_refused(tmp_path / "vgg.pt", "features.0.weight is unknown$")


def test_a_head_loads_only_its_own_layers(tmp_path):
    torch.manual_seed(0)
    source, target = LinearBatchNormHead(4, 3), LinearBatchNormHead(4, 3)
    source(torch.randn(5, 4))
    state = {f"module.{name}": value for name, value in (source.state_dict() | backbone().state_dict()).items()}
    torch.save(state, tmp_path / "w.pt")
    load_head_weights(target, tmp_path / "w.pt")
    assert_equal_weights(target, source)
    for head, problem in (
        (LinearBatchNormHead(4, 2), r"fc.bias has shape \(3,\), the head \(2,\) and 5 more"),
        (BatchNormLinearHead(4, 3), "bn.bias is missing and 8 more"),
    ):
        with pytest.raises(StorageError, match=f"^head.weights: {tmp_path}/w.pt does not fit the head: {problem}$"):
            load_head_weights(head, tmp_path / "w.pt")
    (tmp_path / "w.pt").write_bytes(b"anything")
    with pytest.raises(StorageError, match=f"^head.weights: {tmp_path}/w.pt cannot be read as weights: ."):
        load_head_weights(target, tmp_path / "w.pt")


@pytest.mark.parametrize(("kind", "norm"), [(BatchNormLinearHead, "bn"), (LinearBatchNormHead, "features")])
def test_a_linear_layer_is_not_loaded_without_the_batch_norm_that_it_was_trained_with(tmp_path, kind, norm):
    save_weights(kind(4, 3), tmp_path / "head.safetensors")
    into = LinearHead(4, 3)
    before = into.fc.weight.clone()
    with pytest.raises(StorageError, match=f"does not fit the head: {norm}.bias is unknown and 4 more$"):
        load_head_weights(into, tmp_path / "head.safetensors")
    torch.testing.assert_close(into.fc.weight, before, rtol=0, atol=0)


class Foreign:
    """Creates a file when it is unpickled."""

    def __init__(self, trace):
        self.trace = trace

    def __reduce__(self):
        return open, (self.trace, "w")


@pytest.mark.parametrize("content", ["row,split\n1,train\n", "hello world\n", "{}", "(lp0\n", "\x89PNG"])
def test_a_file_of_another_kind_is_refused(tmp_path, content):
    (tmp_path / "w.csv").write_text(content)
    assert_refused(tmp_path / "w.csv", "it is neither safetensors nor a state dict that torch.save wrote$")


@pytest.mark.parametrize("save", [torch.save, lambda value, path: path.write_bytes(pickle.dumps(value, protocol=2))])
def test_a_pickle_with_a_foreign_object_is_refused_and_not_run(tmp_path, save):
    trace = tmp_path / "trace"
    save({"0.bias": Foreign(str(trace))}, tmp_path / "w.pt")
    reason = (
        f"it needs {open.__module__}.open, whose code is not run; allowed: a file with its state dict alone$"
        if save is torch.save
        else "it is neither safetensors nor a state dict that torch"
    )
    assert_refused(tmp_path / "w.pt", f"cannot be read as weights: {reason}")
    assert not trace.exists()


@pytest.mark.parametrize("value", [[1, 2], {"a": 1}, {"state_dict": {"a": "b"}}, torch.ones(3), {0: torch.ones(2)}])
def test_a_file_without_a_state_dict_is_refused(tmp_path, value):
    torch.save(value, tmp_path / "w.pt")
    assert_refused(tmp_path / "w.pt", "holds no state dict")


def test_torchscript_is_refused_without_torchs_advice_to_skip_its_check(tmp_path, recwarn):
    with pytest.warns(Warning):  # this torch deprecates the format
        torch.jit.save(torch.jit.script(backbone()), tmp_path / "w.pt")
    recwarn.clear()
    assert_refused(tmp_path / "w.pt", "cannot be read as weights: it is TorchScript; allowed: safetensors, or a state")
    assert not recwarn


@pytest.mark.parametrize("name", ["w.pt", "w.safetensors"])
@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.99])
def test_a_truncated_file_is_refused(tmp_path, name, share):
    path = tmp_path / name
    save_weights_of(backbone().state_dict(), path)
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    assert_refused(path, "cannot be read as weights: .")


@given(content=st.binary(max_size=60), is_safetensors=st.booleans())
@settings(max_examples=200)
def test_a_file_of_arbitrary_bytes_is_refused(tmp_path_factory, content, is_safetensors):
    path = tmp_path_factory.getbasetemp() / ("any.safetensors" if is_safetensors else "any.pt")
    path.write_bytes(content)
    with pytest.raises(StorageError, match="cannot be read as weights: .|holds no state dict"):
        load_weights(backbone(), path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(
        MissingDataError, match=rf"^encoder.weights: no file {tmp_path}/none.pt; give encoder.weights=<file>$"
    ):
        load_weights(backbone(), tmp_path / "none.pt")


def test_a_folder_of_weights_names_the_file_in_it(tmp_path):
    with pytest.raises(
        MissingDataError, match=f"^encoder.weights: {tmp_path} is a folder; allowed: a file of weights$"
    ):
        load_weights(backbone(), tmp_path)
    save_weights(backbone(0), tmp_path / "encoder.safetensors")
    with pytest.raises(MissingDataError, match=f"a file of weights, such as {tmp_path}/encoder.safetensors$"):
        load_weights(backbone(), tmp_path)


def test_a_failed_write_keeps_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "encoder.safetensors"
    save_weights(backbone(0), path)
    before = path.read_bytes()

    def full(tensors, file, metadata):
        file.write_bytes(b"half")
        raise SafetensorError("No space left on device")

    monkeypatch.setattr(weights, "save_file", full)
    with pytest.raises(StorageError, match="encoder.safetensors cannot be written: No space left on device"):
        save_weights(backbone(1), path)
    assert path.read_bytes() == before
    assert [item.name for item in tmp_path.iterdir()] == [path.name]


def test_paths_may_be_strings(tmp_path):
    path, target = str(tmp_path / "encoder.safetensors"), backbone(1)
    save_weights(backbone(), path)
    load_weights(target, path)
    assert_equal_weights(target, backbone())
    load_head_weights(other := backbone(1), path)
    assert_equal_weights(other, backbone())


def test_a_weight_of_several_layers_is_saved(tmp_path):
    def tied(seed):
        torch.manual_seed(seed)
        layers = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        layers[1].weight = layers[0].weight
        return layers

    save_weights(tied(0), tmp_path / "tied.safetensors")
    load_weights(target := tied(1), tmp_path / "tied.safetensors")
    assert_equal_weights(target, tied(0))
    assert target[0].weight is target[1].weight
