import yaml

from ssl_sec.edges.folder.stored_config import stored_values, training_config
from ssl_sec.recipes.registry import FACE

STORED = {
    "data": {"name": "digits"},
    "encoder": {"name": "ir18"},
    "head": {"name": "fc_bn"},
    "loss": {"name": "arcface"},
    "constraint": {"name": "none"},
    "augment": {"flip_probability": 0.5},
    "sampler": {"name": "shuffled"},
    "optimiser": {"name": "sgd_epochs"},
    "runtime": {"name": "local"},
    "global_batch_size": 100,
    "epochs": 1,
    "benchmarks": [{"name": "bin", "path": "lfw.bin", "title": None}],
}


def test_the_test_sets_of_version_0_1_had_another_name(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(STORED))
    assert "benchmarks" not in stored_values(path)
    (test_set,) = training_config(FACE, path).test_sets
    assert (test_set.name, test_set.shown_title) == ("bin", "lfw")
