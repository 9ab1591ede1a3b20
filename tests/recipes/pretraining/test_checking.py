import io
import json
import logging
import tempfile
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ssl_sec import progress
from ssl_sec.collectives import rank, world_size
from ssl_sec.data.decode import FORMATS, Decoding
from ssl_sec.data.folders.opening import open_folder
from ssl_sec.data.standard_sets import open_digits
from ssl_sec.errors import DataError
from ssl_sec.recipes import assembly
from ssl_sec.recipes.pretraining import checking
from ssl_sec.recipes.pretraining.checking import check, check_images
from ssl_sec.training.config import LocalConfig
from ssl_sec.training.recipe import Computation
from tests.data.files import plain, write_folder, write_parquet
from tests.data.shards.test_tar import write_tar
from tests.data.test_fingerprint import write_image
from tests.fakes import FakeRuntime, assert_identical
from tests.recipes.pretraining.test_pretraining import config, run
from tests.recipes.same_runs import curve
from tests.workers import on_workers

BAD = (b"no image", plain(7)[:40], b"")


def contents(choices: list[int]) -> list[bytes]:
    """Images of a grey value each; those below 0 are damaged."""
    return [BAD[-1 - choice] if choice < 0 else plain(choice) for choice in choices]


def written(folder: Path, kind: str, images: list[bytes], **more: object) -> dict[str, object]:
    """The configuration of a set of these images in files."""
    names = [f"{number:03d}.png" for number in range(len(images))]
    data = {"name": kind, "on_bad_image": "skip", **more}
    if kind == "folder":
        return {**data, "root": str(write_folder(folder / "images", dict(zip(names, images, strict=True))))}
    if kind == "parquet":
        file = write_parquet(folder / "train.parquet", list(images), [0] * len(images))
    else:
        file = write_tar(folder / "train.tar", dict(zip(names, images, strict=True)))
    return {**data, "train": [str(file)], "cache_folder": str(folder / "cache")}


def checked(data: dict[str, object], **changes: object):
    one = config(data=data, global_batch_size=2, **changes)
    return check(one, one.data.open("train"), FakeRuntime(rank(), world_size()))


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("folder", {}),
        ("folder", {"resident_limit_mib": 0}),
        ("parquet", {}),
        ("parquet", {"resident_limit_mib": 0}),
        ("parquet", {"resident_limit_mib": 0, "shuffle_window": 100}),
        ("webdataset", {"resident_limit_mib": 0}),
        ("webdataset", {"resident_limit_mib": 0, "shuffle_window": 100}),
    ],
)
@settings(max_examples=12)
@given(choices=st.lists(st.integers(-3, 4), min_size=1, max_size=24), max_images=st.none() | st.integers(1, 24))
def test_duplicates_and_unreadable_images_are_counted(kind, more, choices, max_images):
    choices = [3, *choices]  # the first one decides the size
    if more:  # a subset of a set in memory is drawn from the readable images alone
        more = {**more, "max_images": max_images}
    with tempfile.TemporaryDirectory() as folder:
        data = written(Path(folder), kind, contents(choices), **more)
        found = checked(data)
        one = config(data=data, global_batch_size=2).data.open("train")
    assert found is not None
    rows = range(len(choices)) if not more or one.rows is None else one.rows.tolist()
    chosen = [choices[row] for row in rows]
    with_bytes = [choice for choice in chosen if choice != -3]
    assert (found.num_images, found.num_checked) == (len(chosen), len(chosen))
    assert found.num_duplicates == len(with_bytes) - len(set(with_bytes))
    assert found.num_unreadable == sum(choice < 0 for choice in chosen)
    assert len(found.duplicates) == found.num_duplicates
    for name, other in found.duplicates:
        assert choices[place_of(name)] == choices[place_of(other)] and place_of(other) < place_of(name)


def place_of(name: str) -> int:
    """Where an image stands in its set, by its name in errors."""
    return int(name[-7:-4]) if name.endswith(".png") else int(name.rpartition(" row ")[2])


def test_findings_are_logged_and_kept(tmp_path, caplog):
    data = written(tmp_path, "folder", contents([1, 2, 1, 3, -1, 2, 1, 1]), resident_limit_mib=0)
    root = tmp_path / "images"
    _, store = run(tmp_path, data=data, global_batch_size=4, epochs=0)
    (record,) = [each for each in caplog.records if "checked" in each.getMessage()]
    assert record.levelno == logging.WARNING
    assert record.getMessage() == (
        f"folder/train: checked 8 images: 4 duplicates, first: {root}/002.png repeats {root}/000.png; "
        f"{root}/005.png repeats {root}/001.png; {root}/006.png repeats {root}/000.png; "
        f"1 unreadable, first: {root}/004.png: not an image; allowed: {', '.join(FORMATS)}, NPY"
    )
    kept = json.loads(store.check_path.read_text())
    assert (kept["num_images"], kept["num_checked"]) == (8, 8)
    assert (kept["num_duplicates"], kept["num_unreadable"]) == (4, 1)
    assert [(place_of(name), place_of(other)) for name, other in kept["duplicates"]] == [(2, 0), (5, 1), (6, 0), (7, 0)]


def test_a_clean_set_gives_no_warning(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    run(tmp_path, data=written(tmp_path, "folder", contents([1, 2, 3, 4])), global_batch_size=4, epochs=0)
    (record,) = [each for each in caplog.records if "checked" in each.getMessage()]
    assert record.levelno == logging.INFO
    assert record.getMessage() == "folder/train: checked 4 images: 0 duplicates; 0 unreadable"


@pytest.mark.parametrize("more", [{}, {"resident_limit_mib": 0}])
def test_unreadable_images_are_an_error_before_the_training(tmp_path, more):
    choices = [1, 2, -1, 3, -2, 4, -1, -1, 5, 6, *[-1] * 8]
    data = {**written(tmp_path, "folder", contents(choices), **more), "on_bad_image": "raise"}
    runtime = FakeRuntime()
    with pytest.raises(DataError) as raised:
        run(tmp_path, runtime, data=data, global_batch_size=2)
    message, root = str(raised.value), tmp_path / "images"
    assert message.startswith(f"folder/train: 12 of 18 images cannot be read, first: {root}/002.png: not an image; ")
    named = [f"{root}/{number:03}.png: " in message for number, choice in enumerate(choices) if choice < 0]
    assert named == [True] * 10 + [False] * 2
    assert message.endswith("; data.on_bad_image=skip leaves such images out and lists them in check.json")
    assert runtime.reports == [] and not (tmp_path / "check.json").exists() and not (tmp_path / "views.pt").exists()


@pytest.mark.parametrize("more", [{}, {"resident_limit_mib": 0}])
def test_a_single_unreadable_image_is_named_alone(tmp_path, more):
    data = {**written(tmp_path, "folder", contents([1, 2, -1, 3]), **more), "on_bad_image": "raise"}
    with pytest.raises(DataError, match=r"^\S+/002\.png: not an image; .*on_bad_image=skip leaves such images out$"):
        run(tmp_path, data=data, global_batch_size=2)


@pytest.mark.parametrize("more", [{}, {"resident_limit_mib": 0}])
def test_all_skipped_images_are_listed(tmp_path, more, caplog):
    data = written(tmp_path, "folder", contents([1, 2, *[-1] * 12, 3, 4]), **more)
    _, store = run(tmp_path, data=data, global_batch_size=2, epochs=0)
    kept = json.loads(store.check_path.read_text())
    assert kept["num_unreadable"] == 12
    names = [reason.partition(":")[0] for reason in kept["unreadable"]]
    assert names == [f"{tmp_path}/images/{number:03}.png" for number in range(2, 14)]
    # A set in memory names them when it is opened, a streamed one when it is checked.
    assert (
        sum(each.count("not an image") for each in caplog.messages if "cannot be read" in each or "checked" in each)
        == 3
    )


def test_a_file_that_is_removed_after_its_folder_was_listed_is_unreadable(tmp_path):
    data = written(tmp_path, "folder", contents([0, 1, 2]), resident_limit_mib=0)
    one = config(data=data, global_batch_size=2)
    image_set = one.data.open("train")
    (tmp_path / "images" / "001.png").unlink()
    found = check(one, image_set, FakeRuntime())
    assert found is not None and (found.num_checked, found.num_unreadable) == (3, 1)
    assert found.unreadable[0].startswith(f"{tmp_path}/images/001.png: cannot be read: ")


def test_an_image_of_another_size_is_named_before_the_training(tmp_path):
    images = [plain(1), plain(2), plain(3, width=9), plain(4)]
    data = written(tmp_path, "folder", images, resident_limit_mib=0)
    runtime = FakeRuntime()
    with pytest.raises(DataError, match=r"002\.png: 9 x 8 pixels found, but the first image has 8 x 8"):
        run(tmp_path, runtime, data=data, global_batch_size=2)
    assert runtime.reports == []


def test_a_set_read_by_blocks_is_checked_within_a_window(tmp_path):
    data = written(tmp_path, "parquet", contents([*range(40), *range(40)]), resident_limit_mib=0, shuffle_window=12)
    one = config(data=data, global_batch_size=4)
    image_set = one.data.open("train")
    found = check(one, image_set, FakeRuntime())
    assert found is not None and (found.num_images, found.num_checked) == (80, 12)
    assert str(found).startswith("checked 12 of 80 images: ")
    assert not image_set.reader._kept  # those that the training reads stay its own


@pytest.mark.parametrize(("most", "expected"), [(5, 5), (20, 20), (30, 20)])
def test_only_the_requested_number_of_images_is_read(tmp_path, monkeypatch, most, expected):
    data = written(tmp_path, "folder", contents(list(range(20))), resident_limit_mib=0)
    seen = []
    decode = checking.decode_image
    monkeypatch.setattr(
        checking, "decode_image", lambda *given, **more: seen.append(given[1]) or decode(*given, **more)
    )
    found = checked(data, check_images=most)
    assert found is not None and found.num_checked == len(set(seen)) == expected
    if most == 5:
        assert sorted(Path(name).stem for name in seen) == ["000", "004", "008", "012", "016"]


def test_published_sets_and_disabled_checks_read_no_images(tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    one = config()
    assert check(one, open_digits("train"), FakeRuntime()) is None
    data = written(tmp_path, "folder", contents([1, 1, 2, 3]))
    _, store = run(tmp_path, data=data, global_batch_size=4, epochs=0, check_images=0)
    assert "duplicates" not in caplog.text and not store.check_path.exists()


def test_a_resumed_run_does_not_check_again(tmp_path, monkeypatch):
    data = written(tmp_path, "folder", contents([1, 1, 2, 3]))
    _, store = run(tmp_path, data=data, global_batch_size=4, epochs=0)
    before = store.check_path.read_text()
    monkeypatch.setattr(checking, "check", lambda *given: pytest.fail("checked again"))
    run(tmp_path, data=data, global_batch_size=4, epochs=0)
    assert store.check_path.read_text() == before


@pytest.mark.slow
def test_the_check_does_not_change_the_run(tmp_path):
    data = written(tmp_path, "folder", contents([*range(12), 3, -1, -2, 5]), resident_limit_mib=0)
    (tmp_path / "one").mkdir(), (tmp_path / "other").mkdir()
    with_check, _ = run(tmp_path / "one", data=data, global_batch_size=4)
    without, _ = run(tmp_path / "other", data=data, global_batch_size=4, check_images=0)
    assert curve(with_check.reports) == curve(without.reports)
    assert_identical(with_check.last_state(), without.last_state())


def test_a_long_check_logs_its_progress(tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(progress, "LOG_EVERY_S", -1.0)
    checked(written(tmp_path, "folder", contents(list(range(10)))))
    messages = [message.partition(" images, ")[0] for message in caplog.messages if message.startswith("checking: ")]
    assert messages == [f"checking: {done} of 10" for done in range(1, 10)]


@pytest.mark.parametrize("kind", ["parquet", "webdataset"])
def test_findings_of_a_file_are_cached_until_it_changes(tmp_path, monkeypatch, kind):
    images = contents([1, 2, 1, -1, 3])
    data = written(tmp_path, kind, images, resident_limit_mib=0, shuffle_window=100)
    first = checked(data)
    look, looked = checking._look, []
    monkeypatch.setattr(checking, "_look", lambda *given: looked.append(given) or look(*given))
    assert checked(data) == first and not looked
    with pytest.raises(DataError, match="not an image"):  # another option, whose error names the images
        checked({**data, "on_bad_image": "raise"})
    assert len(looked) == 5
    assert checked(data, check_images=3).num_checked == 3 and len(looked) == 8
    (kept,) = [
        path for path in (tmp_path / "cache").glob("*.check.json") if json.loads(path.read_text())["num_checked"] == 5
    ]
    kept.write_text("{")  # a damaged file is as none
    assert checked(data) == first and len(looked) == 13
    written(tmp_path, kind, [*images, plain(4)])
    assert checked(data).num_checked == 6 and len(looked) == 19


def test_findings_of_another_decoding_are_not_taken(tmp_path, monkeypatch):
    floats = io.BytesIO()
    np.save(floats, np.zeros((3, 8, 8), np.float32))
    images = [plain(1), plain(2), plain(3, width=9), floats.getvalue()]
    data = written(tmp_path, "parquet", images, resident_limit_mib=0, shuffle_window=100, image_size_px=8)
    assert checked(data).num_unreadable == 1
    assert checked({**data, "value_ranges": [[0, 255]]}).num_unreadable == 0
    with pytest.raises(DataError, match="9 x 8 pixels found, but the first image has 8 x 8"):
        checked({**data, "image_size_px": None})
    look, looked = checking._look, []
    monkeypatch.setattr(checking, "_look", lambda *given: looked.append(given) or look(*given))
    checked({**data, "image_size_px": 4})
    assert not looked
    monkeypatch.setattr(checking, "FORMATS", (*FORMATS, "NEW"))  # as after the installation of its reader
    checked(data)
    assert len(looked) == 4


def test_an_unwritable_cache_does_not_matter(tmp_path):
    data = written(tmp_path, "parquet", contents([1, 2, 1]), resident_limit_mib=0, shuffle_window=100)
    (tmp_path / "cache").write_text("no folder")
    assert checked(data).num_duplicates == 1


def checked_by_this_worker(data, folder):
    one = config(data=data, global_batch_size=4)
    runtime = FakeRuntime(rank(), world_size())
    found = check(one, one.data.open("train"), runtime)
    path = folder / f"{rank()}.json"
    check_images(one, one.data.open("train"), runtime, path)
    return asdict(found), path.exists()


@pytest.mark.distributed
@pytest.mark.parametrize("kind", ["folder", "parquet"])
def test_any_number_of_workers_finds_the_same(tmp_path, kind):
    more = {"shuffle_window": 100} if kind == "parquet" else {}
    images = contents([*range(9), -1, 4, 4, -2, 0, *range(20, 29)])
    data = written(tmp_path, kind, images, resident_limit_mib=0, **more)
    (tmp_path / "alone").mkdir()
    alone, is_kept = checked_by_this_worker(data, tmp_path / "alone")
    assert (alone["num_duplicates"], alone["num_unreadable"], is_kept) == (3, 2, True)
    for place, (found, is_kept) in enumerate(on_workers(3, tmp_path, checked_by_this_worker, data, tmp_path)):
        assert found == alone and is_kept == (place == 0)


def refused_on_this_worker(data):
    try:
        checked(data)
    except DataError as error:
        return str(error)


@pytest.mark.distributed
def test_every_worker_refuses_the_same_images(tmp_path):
    data = written(tmp_path, "folder", contents([1, -1, 2, 3, -2, 4]), resident_limit_mib=0)
    first, second = on_workers(2, tmp_path, refused_on_this_worker, {**data, "on_bad_image": "raise"})
    assert first == second and "2 of 6 images cannot be read" in first


@settings(max_examples=100)
@given(st.lists(st.integers(0, 5), max_size=40))
def test_repeated_digests_are_found_with_their_first(numbers):
    digests = b"".join(bytes(16) if number == 0 else bytes([number, *range(15)]) for number in numbers)
    expected = {
        place: numbers.index(number) for place, number in enumerate(numbers) if number and numbers.index(number) < place
    }
    assert checking._repeated(digests) == expected


def test_many_digests():
    torch.manual_seed(0)
    digests = torch.randint(256, (200_000, 16), dtype=torch.uint8)
    digests[150_000:] = digests[:50_000]
    found = checking._repeated(digests.numpy().tobytes())
    assert len(found) == 50_000 and found[150_123] == 123


def test_workers_with_different_images_do_not_train(monkeypatch):
    images = open_digits("train")
    for others, found in (
        ((len(images) - 1, ""), "1,436 images"),
        ((len(images), "ab"), "other labels or names of files"),
    ):
        monkeypatch.setattr(assembly, "gather_objects", lambda own, others=others: [own, own, (others, "node-b")])
        with pytest.raises(DataError, match=f"^digits/train: worker 2 on node-b has {found}, worker 0 on .* has 1,437"):
            assembly.require_same_images(images)
    monkeypatch.setattr(assembly, "gather_objects", lambda own: [own, own])
    assembly.require_same_images(images)


def test_workers_with_as_many_but_other_files_do_not_train(tmp_path: Path, monkeypatch):
    for node, names in (("a", "xyz"), ("b", "xyw")):
        for name in names:
            write_image(tmp_path / node / f"{name}.png", 0)
    own, other = (open_folder("train", tmp_path / node, Decoding(resident_limit_mib=0)) for node in "ab")
    monkeypatch.setattr(assembly, "world_size", lambda: 2)
    gathered: list[tuple[object, str]] = []

    def gather(found: tuple[object, str]) -> list[tuple[object, str]]:
        gathered.append(found)
        return gathered

    monkeypatch.setattr(assembly, "gather_objects", gather)
    assembly.require_same_images(own)
    assembly.require_same_images(own)
    with pytest.raises(DataError, match=r"^folder/train: worker 2 on .* has other labels or names of files, worker 0"):
        assembly.require_same_images(other)


@pytest.mark.parametrize(
    ("given", "is_short", "expected"), [(None, 0, "bfloat16"), (None, 1, "float32"), ("bfloat16", 1, "bfloat16")]
)
@pytest.mark.parametrize(("compile", "compiled"), [(None, False), (True, True)])
def test_workers_compute_alike(monkeypatch, given, is_short, expected, compile, compiled):
    """One worker's GPU has no bfloat16 if `is_short`, and another has no compiler; this worker's has both."""
    own = Computation(precision="bfloat16", compiled=True)
    options = SimpleNamespace(precision=given, compile=compile, on=lambda device: own)
    others = iter([is_short, 1] if given is None else [1])
    monkeypatch.setattr(assembly, "max_int_over_workers", lambda own, device: max(own, next(others)))
    found = assembly.agreed_computation(options, torch.device("cpu"))
    assert found == Computation(precision=expected, compiled=compiled)


def test_why_nothing_is_compiled_is_logged_once(monkeypatch, caplog, tmp_path):
    monkeypatch.setattr(LocalConfig, "why_not_compiled", lambda self, device: "Triton needs gcc or clang")
    with caplog.at_level(logging.INFO, "ssl_sec"):
        run(tmp_path, epochs=1)
    assert caplog.text.count("the network is not compiled: Triton needs gcc or clang") == 1
