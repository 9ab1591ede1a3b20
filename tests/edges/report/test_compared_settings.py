"""What a report counts as a changed setting: the content of files, not their paths."""

import pytest
import torch

from ssl_sec.edges.composition.compose import compose
from ssl_sec.edges.folder.names import weights_digest, weights_tags
from ssl_sec.edges.tracking.comparing import is_expected, telling
from ssl_sec.networks.weights import save_weights
from ssl_sec.recipes.registry import RECIPES
from ssl_sec.settings import flattened, from_values, to_values
from ssl_sec.training.checkpoint import file_sha256
from tests.edges.report.conftest import Store
from tests.jobs import configured

PUBLISHED = "52deb4733" + 55 * "0"


def add(store: Store, job, recipe, seed, metrics, *overrides, weights=None):
    values = to_values(
        from_values(RECIPES[job].config, compose(job, [f"experiment={recipe}", f"seed={seed}", *overrides]))
    )
    tags = {f"{key}.sha256": digest for key, digest in (weights or {}).items()}
    params = flattened(values)
    return store._run(recipe, job, params, {key: [value] for key, value in metrics.items()}, "FINISHED", "a", tags)


def cell(store, recipe, metric, **table):
    (found,) = [row for row in store.report(**table).rows if (row["recipe"], row["metric"]) == (recipe, metric)]
    return found["ours"], found["seeds"], found["changed"]


def test_face_runs_of_several_machines_are_pooled_without_a_shorter_run(store):
    ask = {"recipe": "casia_softmax_wen", "metric": "face/lfw_accuracy", "paper": "normface", "table": 2}
    add(store, "face", "casia_softmax_wen", 0, {"face/lfw_accuracy": 90.0}, "data.root=/a/casia", "epochs=1")
    assert cell(store, **ask)[:2] == (90.0, "0")
    assert cell(store, **ask)[2].startswith("epochs 1.0 (recipe: ")
    for seed, root in ((0, "/a/casia"), (1, "/other/place")):
        add(store, "face", "casia_softmax_wen", seed, {"face/lfw_accuracy": 97.0 + seed}, f"data.root={root}")
    assert cell(store, **ask) == (97.5, "0 1", "")


def test_a_run_without_a_newer_key_has_its_default(store):
    recipe, metric = "cars196_triplet_sec", "retrieval/recall_at_1"
    ask = {"recipe": recipe, "metric": metric, "paper": "sec", "table": 3}
    composed = compose("metric_learning", [f"experiment={recipe}"])
    params = flattened(to_values(from_values(RECIPES["metric_learning"].config, composed)))
    for seed, missing in ((0, "evaluation.neighbours"), (1, "evaluation.neighbours"), (2, "constraint.eta")):
        given = {key: value for key, value in params.items() if key != missing} | {"seed": seed}
        store._run(recipe, "metric_learning", given, {metric: [80.0 + seed]}, "FINISHED", f"seed{seed}", {})
    # SEC's weight has no default: a run that does not say it is none of the recipe's.
    assert cell(store, **ask) == (80.5, "0 1", "")


def test_each_row_of_a_table_may_measure_something_else(store):
    """NormFace, Table 1: one network by two similarities."""
    recipe, metric = "casia_softmax_center_wen", "face/lfw_accuracy_{}".format
    names = [metric(f"{kind}{after}") for after in ("", "_normalised") for kind in ("inner_product", "euclidean")]
    measured = {name: 98.0 + place for place, name in enumerate(names)}
    add(store, "face", recipe, 0, measured, "data.root=x")
    for name in names:
        assert cell(store, recipe, name, paper="normface", table=1) == (measured[name], "0", "")
    rows = store.report(paper="normface", table=1).rows
    assert [(row["row"], row["column"], row["paper_value"], row["ours"]) for row in rows] == [
        ("inner product", "before normalisation", 98.27, 98.0),
        ("inner product", "after normalisation", 98.98, 100.0),
        ("Euclidean distance", "before normalisation", 98.35, 99.0),
        ("Euclidean distance", "after normalisation", 98.95, 101.0),
    ]


def test_face_runs_from_a_users_run_are_pooled_by_its_weights(store):
    recipe, metrics = "casia_normface_wen", {"face/lfw_accuracy": 99.0}
    given = ("data.root=x", "encoder.weights=/a/e.safetensors", "head.weights=/a/h.safetensors")
    ask = {"recipe": recipe, "metric": "face/lfw_accuracy", "paper": "normface", "table": 2}
    add(store, "face", recipe, 0, {"face/lfw_accuracy": 50.0}, *given, weights={"encoder.weights": "c" * 64})
    for seed in (1, 2):
        both = {"encoder.weights": "a" * 64, "head.weights": "b" * 64}
        add(store, "face", recipe, seed, metrics, f"output_dir=/{seed}", *given, weights=both)
    assert cell(store, **ask) == (99.0, "1 2", "")


def test_a_test_set_that_was_added_is_no_change(store):
    """SEC, Table 4: no file with the training set has MegaFace, for which the recipe's comment says what to add."""
    recipe, rank1 = "casia_cosface", "face/megaface_1e6_rank1"
    ask = {"recipe": recipe, "paper": "sec", "table": 4}
    titles = {"lfw": "lfw", "agedb30": "agedb_30", "cfp_fp": "cfp_fp"}
    bins = [f"{{name: bin, title: {title}, path: /d/{file}.bin}}" for title, file in titles.items()]
    places = {key: "/d" for key in ("probes", "probes_root", "distractors", "distractors_root")}
    megaface = ", ".join(["{name: megaface", *(f"{key}: {place}" for key, place in places.items())]) + "}"
    lfw = "face/lfw_accuracy"
    add(store, "face", recipe, 0, {lfw: 98.0}, "data.root=/d")
    add(
        store, "face", recipe, 1, {lfw: 99.0, rank1: 90.0}, "data.root=/d", f"test_sets=[{','.join([*bins, megaface])}]"
    )
    add(
        store,
        "face",
        recipe,
        2,
        {lfw: 50.0, rank1: 50.0},
        "data.root=/d",
        f"test_sets=[{','.join([*bins[1:], megaface])}]",
    )
    assert cell(store, metric=lfw, **ask) == (98.5, "0 1", "")
    assert cell(store, metric=rank1, **ask) == (90.0, "1", "")


def test_retrieval_goes_by_the_content_of_the_published_weights(store):
    recipe, metric = "cars196_triplet_sec", "retrieval/recall_at_1"
    ask = {"recipe": recipe, "metric": metric, "paper": "sec", "table": 3}
    other = {"encoder.weights": "1" * 64}
    add(store, "metric_learning", recipe, 0, {metric: 10.0}, "encoder.weights=/a/bn.pth", weights=other)
    assert cell(store, **ask) == (
        10.0,
        "0",
        "encoder.weights sha256 1111111111111111 (recipe: bn_inception-52deb4733.pth)",
    )
    for seed in (0, 1):
        add(
            store,
            "metric_learning",
            recipe,
            seed,
            {metric: 70.0 + seed},
            f"encoder.weights=/{seed}/bn.pth",
            f"data.root=/{seed}",
            weights={"encoder.weights": PUBLISHED},
        )
    assert cell(store, **ask) == (70.5, "0 1", "")


@pytest.mark.parametrize(
    ("expected", "found", "is_it"),
    [
        ("googlenet-1378be20.pth", "sha256 1378be2000000000", True),
        ("googlenet-1378be20.pth", "sha256 2378be2000000000", False),
        ("googlenet-1378be20.pth", "None", False),
        ("runs/base/encoder.safetensors", "sha256 2378be2000000000", True),
        ("runs/base/encoder.safetensors", "None", False),
        ("None", "sha256 2378be2000000000", False),
        ("None", "None", True),
    ],
)
def test_which_weights_a_recipe_expects(expected, found, is_it):
    assert is_expected("encoder.weights", expected, found) is is_it


def test_a_run_keeps_the_digest_of_the_weights_that_it_starts_from(tmp_path):
    (tmp_path / "bn.pth").write_bytes(b"abc")
    given = ["experiment=cars196_triplet_sec", f"encoder.weights={tmp_path}/bn.pth"]
    config = configured("metric_learning", given)
    # FIPS 180-2, appendix B.1
    digest = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert weights_tags(config, tmp_path / "initial.safetensors") == {"encoder.weights.sha256": digest}
    (tmp_path / "bn.pth").unlink()
    assert weights_tags(config, tmp_path / "initial.safetensors") == {}


def test_the_same_weights_have_one_digest_in_any_safetensors_file(tmp_path):
    backbone = torch.nn.Linear(2, 3)
    run, export, other, broken = (tmp_path / f"{name}.safetensors" for name in ("run", "export", "other", "broken"))
    save_weights(backbone, run)
    save_weights(backbone, export, {"architecture": "a linear layer", "mean": "[0.5]"})
    save_weights(torch.nn.Linear(2, 3), other)
    broken.write_bytes(b"\xff" * 20)
    assert file_sha256(run) != file_sha256(export)
    assert weights_digest(run) == weights_digest(export) != weights_digest(other)
    assert weights_digest(broken) == file_sha256(broken)


PLAIN, SCALED = {"loss.name": "normface", "seed": "0"}, {"loss.name": "cosface", "loss.scale": "30", "seed": "0"}


@pytest.mark.parametrize(
    ("settings", "keys"),
    [
        ([PLAIN, PLAIN], [[], []]),
        # That only one of the losses has a scale follows from its name, unless the scales differ.
        ([PLAIN, SCALED], [["loss.name"], ["loss.name"]]),
        (
            [PLAIN, SCALED, {**SCALED, "loss.scale": "64"}],
            [["loss.name"], ["loss.name", "loss.scale"], ["loss.name", "loss.scale"]],
        ),
        # It does not follow where another run of the same loss has none, as that of an earlier version.
        ([{**PLAIN, "loss.scale": "1"}, PLAIN], [["loss.scale"], ["loss.scale"]]),
        (
            [PLAIN, {**PLAIN, "loss.scale": "30"}, SCALED],
            [["loss.name", "loss.scale"], ["loss.name", "loss.scale"], ["loss.name", "loss.scale"]],
        ),
        ([{"epochs": "1"}, {}], [["epochs"], ["epochs"]]),
    ],
)
def test_the_keys_that_tell_settings_apart_are_those_that_do_not_follow_from_a_name(settings, keys):
    assert [sorted(telling(one, settings)) for one in settings] == keys
