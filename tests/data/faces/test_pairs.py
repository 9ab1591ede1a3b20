import pickle

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from ssl_sec.data.decode import Decoding
from ssl_sec.data.encoded_images import EncodedImages
from ssl_sec.data.faces.bins import read_bin
from ssl_sec.data.faces.config import BinPairsConfig, LFWPairsConfig, PairsConfig, PairTableConfig
from ssl_sec.data.faces.pairs import VerificationPairs, open_bin, open_lfw_pairs, open_pair_table, read_lfw_pairs
from ssl_sec.data.folders.opening import open_folder
from ssl_sec.data.image_set import ResidentImages
from ssl_sec.data.selection.class_splits import without_people
from ssl_sec.errors import MissingDataError
from tests.data.faces.test_bins import IMAGES, SAME
from tests.data.files import plain, write_folder, write_parquet
from tests.data.test_image_set import values
from tests.data.test_sources import line


def shown(pairs: VerificationPairs) -> list[tuple[int, int, bool, int]]:
    """Grey values of both images of each pair, whether they are the same, and the fold."""
    first, second = (values(pairs.images.read(positions)) for positions in (pairs.first, pairs.second))
    return list(zip(first, second, pairs.same.tolist(), pairs.folds.tolist(), strict=True))


def test_bin(tmp_path):
    path = tmp_path / "lfw.bin"
    path.write_bytes(pickle.dumps((IMAGES, SAME), protocol=pickle.HIGHEST_PROTOCOL))
    for limit in (0, 1):
        pairs = open_bin(path, decoding=Decoding(resident_limit_mib=limit))
        assert isinstance(pairs.images, ResidentImages if limit else EncodedImages)
        # As scikit-learn's KFold does it: the first folds have one more.
        folds = [0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
        pixels = [1, 2, 3, 1, *range(5, 23)]
        assert shown(pairs) == list(zip(pixels[::2], pixels[1::2], SAME, folds, strict=True))
        assert (pairs.name, pairs.images.name, pairs.people) == ("lfw", "lfw/pairs", frozenset())
        assert len(pairs.images) == 21
        assert torch.equal(pickle.loads(pickle.dumps(pairs)).first, pairs.first)
    assert open_bin(path, "other", Decoding(image_size_px=4, num_channels=1)).images.image_shape == (1, 4, 4)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ((IMAGES, SAME, []), "not a pair of images"),
        ([1], "not a pair of images"),
        ((3, SAME), "not a list of images"),
        ((["text"] * 22, SAME), "image 0: found str; allowed: encoded images"),
        ((IMAGES, [2] * 11), "pair 0: found int; allowed: booleans"),
        ((IMAGES, [None] * 11), "pair 0: found NoneType; allowed: booleans"),
        (([np.zeros(9, np.int64)] * 22, SAME), "holds an array of 'i8'; allowed: encoded images and booleans"),
        (([np.array([print], object)] * 22, SAME), "holds an array of 'O8'; allowed: encoded"),
        ((IMAGES[:-1], SAME), "21 images and 11 pairs; needed: two for each, 10 pairs or more"),
        ((IMAGES[:18], SAME[:9]), "18 images and 9 pairs; needed: two for each, 10 pairs or more"),
        ((IMAGES, [True] * 11), "all 11 pairs show one person; both are needed"),
        ((IMAGES, [False] * 11), "all 11 pairs show two; both are needed"),
        (([b"no image"] * 22, SAME), "image 0: not an image"),
        (([plain(1), plain(2, 9), *IMAGES[2:]], SAME), "image 1: 9 x 8 pixels found, but the first image has 8 x 8"),
    ],
)
def test_wrong_bins(tmp_path, content, message):
    path = tmp_path / "a.bin"
    path.write_bytes(pickle.dumps(content, 4))
    output = line(lambda: open_bin(path))
    assert output.startswith(str(path)) and message in output


def test_a_missing_or_damaged_bin(tmp_path):
    path = tmp_path / "a.bin"
    assert line(lambda: open_bin(path), MissingDataError) == f"{path}: not there"
    whole = pickle.dumps((IMAGES, SAME), 4)
    for content in (b"", whole[:-1], whole[: len(whole) // 2], b"\x80\x04no pickle", b"\x80\x04]]b.", b"\x80\x04)R."):
        path.write_bytes(content)
        assert line(lambda: read_bin(path)).startswith(f"{path}: ")


FACES = {
    "Ann_Li/Ann_Li_0001.jpg": plain(1),
    "Ann_Li/Ann_Li_0002.png": plain(2),
    "Bo/Bo_0003.jpg": plain(3),
    "Bo/Bo_0012.jpg": plain(12),
    "Cy/Cy_0001.jpg": plain(4),
    "Cy/Cy_0002.jpg": b"no image, but nobody asks for it",
}
TWO_FOLDS = "2\t1\nAnn_Li\t1\t2\nAnn_Li\t2\tBo\t3\nBo\t3\t12\nBo\t3\tCy\t1\n"


def write_lfw(root, pairs=TWO_FOLDS):
    write_folder(root / "lfw", FACES)
    (root / "pairs.txt").write_text(pairs)
    return root / "pairs.txt", root / "lfw"


def test_lfw(tmp_path):
    pairs = open_lfw_pairs(*write_lfw(tmp_path))
    assert shown(pairs) == [(1, 2, True, 0), (2, 3, False, 0), (3, 12, True, 1), (3, 4, False, 1)]
    assert pairs.people == {"Ann_Li", "Bo", "Cy"} == set(pairs.images.class_names) and pairs.name == "pairs"
    assert len(pairs.images) == 5
    people = [pairs.images.class_names[label] for label in pairs.images.labels.tolist()]
    assert people == ["Ann_Li", "Ann_Li", "Bo", "Bo", "Cy"]
    development = "2\nAnn_Li 1 2\nBo 3 12\nAnn_Li 2 Bo 3\nBo 3 Cy 1\n"
    decoding = Decoding(num_channels=1, resident_limit_mib=0)
    pairs = open_lfw_pairs(*write_lfw(tmp_path, development), "dev", decoding)
    assert shown(pairs) == [(1, 2, True, 0), (3, 12, True, 0), (2, 3, False, 0), (3, 4, False, 0)]
    assert pairs.name == "dev" and isinstance(pairs.images, EncodedImages) and pairs.images.image_shape == (1, 8, 8)


@pytest.mark.parametrize("end", ["\n", "\r\n", "\t\n"])
def test_names_in_a_list_of_lfw_may_have_spaces(tmp_path, end):
    lines = ["1\t2", "Ana de la Rosa\t1\t12", "Bo 2\t3\t4", "Ana de la Rosa\t1\tBo 2\t3", "Cy\t1\tBo 2 \t 4"]
    (tmp_path / "pairs.txt").write_bytes("".join(line + end for line in lines).encode())
    assert [(pair.first, pair.second) for pair in read_lfw_pairs(tmp_path / "pairs.txt")] == [
        ("Ana de la Rosa/Ana de la Rosa_0001", "Ana de la Rosa/Ana de la Rosa_0012"),
        ("Bo 2/Bo 2_0003", "Bo 2/Bo 2_0004"),
        ("Ana de la Rosa/Ana de la Rosa_0001", "Bo 2/Bo 2_0003"),
        ("Cy/Cy_0001", "Bo 2/Bo 2_0004"),
    ]


def test_the_published_list_of_lfw_has_ten_folds(tmp_path):
    same = "".join(f"A\t{number}\t{number + 1}\n" for number in range(1, 301))
    different = "".join(f"A\t{number}\tB\t{number}\n" for number in range(1, 301))
    (tmp_path / "pairs.txt").write_text("10\t300\n" + (same + different) * 10)
    pairs = read_lfw_pairs(tmp_path / "pairs.txt")
    assert len(pairs) == 6000 and [pair.fold for pair in pairs] == [fold for fold in range(10) for _ in range(600)]
    assert [pair.same for pair in pairs[:1200]] == ([True] * 300 + [False] * 300) * 2
    assert pairs[1499][:2] == ("A/A_0300", "A/A_0301") and pairs[1500][:2] == ("A/A_0001", "B/B_0001")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "2\t1\n",
            "two\n",
            "pairs.txt line 1: found 'two'; allowed: the numbers of folds and of their pairs of a kind",
        ),
        ("2\t1\n", "0 1\n", "pairs.txt line 1: found '0 1'; allowed"),
        ("Bo\t3\t12", "Bo\t3", "pairs.txt line 4: found 'Bo 3'; allowed: name number number, with tabs"),
        ("Bo\t3\t12", "Bo\t3\tCy\t1", "pairs.txt line 4: found 'Bo 3 Cy 1'; allowed: name number number"),
        ("Bo\t3\t12", "Bo\t3\tx", "pairs.txt line 4: found 'Bo 3 x'; allowed"),
        ("Ann_Li\t2\tBo\t3", "Ann_Li\t2\t3", "pairs.txt line 3: found 'Ann_Li 2 3'; allowed: name number name num"),
        ("Bo\t3\tCy\t1\n", "", "pairs.txt: 3 pairs found, 4 announced in line 1"),
        ("Bo\t3\tCy\t1\n", "Bo\t3\tCy\t1\nBo 3 12\n", "pairs.txt: 5 pairs found, 4 announced in line 1"),
        ("Bo\t3\t12", "Bo\t3\t4", "pairs.txt line 4: no image 'Bo/Bo_0004' in "),
        ("Cy\t1", "Cy\t2", "Cy_0002.jpg: not an image"),
        ("Cy\t1", "../Cy\t1", "pairs.txt line 5: no image '../Cy/../Cy_0001' in "),
    ],
)
def test_wrong_lists_of_lfw(tmp_path, old, new, message):
    assert old in TWO_FOLDS
    paths = write_lfw(tmp_path, TWO_FOLDS.replace(old, new, 1))
    assert message in line(lambda: open_lfw_pairs(*paths))


def test_missing_lists_and_folders(tmp_path):
    pairs, root = write_lfw(tmp_path)
    assert (
        line(lambda: open_lfw_pairs(tmp_path / "no.txt", root), MissingDataError) == f"{tmp_path / 'no.txt'}: not there"
    )
    assert "no: no such folder" in line(lambda: open_lfw_pairs(pairs, tmp_path / "no"), MissingDataError)
    assert "no.csv: not there" in line(lambda: open_pair_table(tmp_path / "no.csv", root), MissingDataError)


TABLE = "first,second,same,fold\nAnn_Li_0001.jpg,Ann_Li/Ann_Li_0002.png,1,3\nBo/Bo_0003.jpg,Cy_0001.jpg,0,7\n"


def write_table(root, table=TABLE):
    write_folder(root / "lfw", FACES)
    (root / "pairs.csv").write_bytes(table.encode())
    return root / "pairs.csv", root / "lfw"


def test_a_table_of_a_folder(tmp_path):
    pairs = open_pair_table(*write_table(tmp_path))
    assert shown(pairs) == [(1, 2, True, 0), (3, 4, False, 1)]
    assert pairs.people == {"Ann_Li", "Bo", "Cy"} and len(pairs.images) == 4
    unfolded = "\ufeffsame,second,first\r\n1,Ann_Li_0002.png,Ann_Li_0001.jpg\r\n0,Cy_0001.jpg,Bo_0003.jpg\r\n"
    for table in (unfolded, f"{unfolded}\r\n\n"):
        assert shown(open_pair_table(*write_table(tmp_path, table))) == [(1, 2, True, 0), (3, 4, False, 0)]


def test_a_folder_without_people(tmp_path):
    root = write_folder(tmp_path / "flat", {"a.png": plain(1), "b.png": plain(2), "c/d.png": plain(3)})
    (tmp_path / "pairs.csv").write_text("first,second,same\na.png,b.png,0\na.png,d.png,1\n")
    pairs = open_pair_table(tmp_path / "pairs.csv", root, "flat", Decoding(num_channels=1))
    assert shown(pairs) == [(1, 2, False, 0), (1, 3, True, 0)]
    assert pairs.people == frozenset() and pairs.images.labels.tolist() == [0, 0, 0]


def test_images_at_any_depth_are_of_the_people_whose_folders_are_above(tmp_path):
    files = {"ann/2019/a.png": plain(1), "ann/b.png": plain(2), "bo/x/y/c.png": plain(3)}
    root = write_folder(tmp_path / "team", files)
    (tmp_path / "pairs.csv").write_text("first,second,same\na.png,ann/b.png,1\nann/2019/a.png,c.png,0\n")
    pairs = open_pair_table(tmp_path / "pairs.csv", root)
    assert shown(pairs) == [(1, 2, True, 0), (1, 3, False, 0)] and pairs.people == {"ann", "bo"}


def test_a_folder_that_holds_everyone_is_no_person(tmp_path):
    table, root = write_table(
        tmp_path, "first,second,same\nAnn_Li_0001.jpg,Ann_Li_0002.png,1\nBo_0003.jpg,Cy_0001.jpg,0\n"
    )
    assert open_pair_table(table, root).people == {"Ann_Li", "Bo", "Cy"}
    above = open_pair_table(table, root.parent)
    assert shown(above) == [(1, 2, True, 0), (3, 4, False, 0)] and above.people == frozenset()


def write_faces(path, class_names=None):
    """Parquet files with the images of the folder."""
    labels = [0, 0, 2, 2, 1, 1]
    write_parquet(path, list(FACES.values()), labels, class_names)
    table = pq.read_table(path)
    images = [{"bytes": image, "path": name} for name, image in FACES.items()]
    column = pa.array(images, pa.struct({"bytes": pa.binary(), "path": pa.string()}))
    pq.write_table(table.set_column(0, "image", column), path)
    return path


@pytest.mark.parametrize("resident_limit_mib", [0, 1])
def test_a_table_of_parquet_files(tmp_path, resident_limit_mib):
    table, _ = write_table(tmp_path)
    path = write_faces(tmp_path / "a.parquet", ["Ann_Li", "Cy", "Bo"])
    pairs = open_pair_table(table, [path], decoding=Decoding(resident_limit_mib=resident_limit_mib))
    assert shown(pairs) == [(1, 2, True, 0), (3, 4, False, 1)]
    assert pairs.people == {"Ann_Li", "Bo", "Cy"} and len(pairs.images) == 4
    assert [pairs.images.class_names[label] for label in pairs.images.labels] == ["Ann_Li", "Ann_Li", "Bo", "Cy"]
    assert open_pair_table(table, [write_faces(tmp_path / "b.parquet")]).people == frozenset()
    assert f"{path} row 5: not an image" in line(
        lambda: open_pair_table(*write_table(tmp_path, TABLE.replace("Cy_0001", "Cy_0002"))[:1], [path])
    )


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("first,", "one,", "line 1: columns 'one, second, same, fold'; needed: first, second, same and"),
        (TABLE, "", "line 1: columns ''; needed"),
        ("1,3\n", "1\n", "line 2: 3 fields found, 4 expected"),
        (",1,3", ",yes,3", "line 2: same 'yes'; allowed: 0, 1"),
        (",1,3", ",2,3", "line 2: same '2'; allowed: 0, 1"),
        ("0,7", "0,-7", "line 3: fold '-7'; allowed: integers, 0 or more"),
        ("0,7", '0,"7', "line 3: unexpected end of data"),
        ("Cy_0001.jpg", "Bo_0003.jpg", "line 3: Bo/Bo_0003.jpg is compared with itself"),
        ("Cy_0001.jpg", "Cy_0009.jpg", "line 3: no image 'Cy_0009.jpg' in "),
        ("Cy_0001.jpg", "../pairs.csv", "line 3: no image '../pairs.csv' in "),
        ("Cy_0001.jpg,0", "Bo_0012.jpg,1", "all 2 pairs show one person; both are needed"),
        (TABLE[TABLE.index("\n") :], "\n", "pairs.csv: no pairs"),
    ],
)
def test_wrong_tables(tmp_path, old, new, message):
    assert old in TABLE
    table, root = write_table(tmp_path, TABLE.replace(old, new, 1))
    for images in (root, [write_faces(tmp_path / "a.parquet")]):
        output = line(lambda images=images: open_pair_table(table, images))
        assert output.startswith(str(table)) and message in output


@pytest.mark.parametrize(
    ("verdict", "people", "other"), [(1, "one person", "two people"), (0, "two people", "one person")]
)
def test_a_pair_with_two_verdicts_is_refused(tmp_path, verdict, people, other):
    root = write_folder(tmp_path / "lfw", {"a/1.png": plain(1), "b/1.png": plain(2), "b/2.png": plain(3)})
    table = tmp_path / "pairs.csv"
    rows = ["first,second,same", f"a/1.png,b/1.png,{1 - verdict}", "b/1.png,b/2.png,1", f"b/1.png,a/1.png,{verdict}"]
    table.write_text("\n".join(rows) + "\n")
    expected = f"{table} line 4: b/1.png and a/1.png are of {people}, but of {other} in {table} line 2"
    assert line(lambda: open_pair_table(table, root)) == expected


def test_a_name_of_two_images(tmp_path):
    root = write_folder(tmp_path / "lfw", {"a/1.png": plain(1), "b/1.png": plain(2), "1.png": plain(3)})
    table = tmp_path / "pairs.csv"
    table.write_text("first,second,same\n1.png,a/1.png,0\n1.png,b/1.png,1\n")
    assert shown(open_pair_table(table, root)) == [(3, 1, False, 0), (3, 2, True, 0)]
    (root / "1.png").unlink()
    assert "line 2: several images '1.png' in" in line(lambda: open_pair_table(table, root))


def test_a_link_out_of_the_folder_is_refused(tmp_path):
    table, root = write_table(tmp_path)
    outside = write_folder(tmp_path / "outside", {"1.png": plain(1)})
    (root / "Dee").symlink_to(outside)
    assert f"{outside} and leads out of {root}; copy the file into it" in line(lambda: open_pair_table(table, root))


def test_people_of_the_pairs_are_left_out_of_the_training_set(tmp_path):
    pairs = open_lfw_pairs(*write_lfw(tmp_path))
    root = write_folder(tmp_path / "faces", {f"train/{who}/1.png": plain(9) for who in ("Bo", "Dee", "Ann_Li", "Eve")})
    train = without_people(open_folder("train", root), pairs.people)
    assert train.class_names == ("Dee", "Eve") and train.labels.tolist() == [0, 1]


def test_a_person_whose_name_is_not_utf_8_is_left_out_too(tmp_path):
    people = ("Jos\udce9", "Bo", "Eve")  # in Latin-1
    root = write_folder(tmp_path / "train", {f"{who}/{who}_000{n}.png": plain(9) for who in people for n in (1, 2)})
    (tmp_path / "pairs.txt").write_bytes(b"1\t1\nBo\t1\t2\nJos\xe9\t1\tBo\t1\n")
    pairs = open_lfw_pairs(tmp_path / "pairs.txt", root)
    assert without_people(open_folder("train", tmp_path), pairs.people).class_names == ("Eve",)


def test_configs_open_their_sets(tmp_path):
    (tmp_path / "a.bin").write_bytes(pickle.dumps((IMAGES, SAME), 4))
    lfw, root = map(str, write_lfw(tmp_path))
    table, _ = map(str, write_table(tmp_path))
    parquet = str(write_faces(tmp_path / "a.parquet"))
    opened: dict[str, PairsConfig] = {
        "a": BinPairsConfig(path=str(tmp_path / "a.bin")),
        "lfw": LFWPairsConfig(pairs=lfw, root=root, title="lfw"),
        "pairs": PairTableConfig(pairs=table, images=root),
        "files": PairTableConfig(pairs=table, images=(parquet,), title="files"),
    }
    for name, config in opened.items():
        pairs = config.open(Decoding(image_size_px=4, num_channels=1))
        assert pairs.name == name and pairs.images.image_shape == (1, 4, 4)


def test_lists_of_pairs_are_checked_without_their_images(tmp_path):
    file = tmp_path / "a.bin"
    file.write_bytes(pickle.dumps(([b"not decoded"] * 22, SAME), 4))
    BinPairsConfig(path=str(file)).require_list()
    for content, message in ((IMAGES[:-1], "21 images and 11 pairs"), (["text"] * 22, "image 0: found str")):
        file.write_bytes(pickle.dumps((content, SAME), 4))
        assert message in line(BinPairsConfig(path=str(file)).require_list)
    table, root = map(str, write_table(tmp_path, "first,second,same\na.png,b.png,1\n"))
    assert line(PairTableConfig(pairs=table, images=root).require_list) == (
        f"{table}: the only pair shows one person; both are needed"
    )
