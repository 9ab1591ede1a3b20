"""The data sets of image retrieval in their published layouts: CUB-200-2011, Cars196, SOP and In-Shop.

Training and test classes are disjoint (SEC, Table 1). A list names the images. It is read and checked when the
set is opened, against the folders (one listing of each, nothing for each file) and against the published numbers
of images and classes. The images have no common size and are cut when read. Bounding boxes are never used.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from ssl_sec.data.decode import Decoding
from ssl_sec.data.encoded_images import EncodedImages
from ssl_sec.data.faces.reading import is_number, read_matlab, read_text
from ssl_sec.data.folders.listing import check_paths
from ssl_sec.data.image_set import Split
from ssl_sec.data.selection.class_splits import require_disjoint
from ssl_sec.data.stores import FileStore
from ssl_sec.errors import DataError, MissingDataError, counted, printable

RetrievalSet = Literal["cub", "cars196", "sop", "inshop"]


@dataclass(frozen=True)
class Counts:
    """Numbers of images and of their classes."""

    images: int
    classes: int

    def __str__(self) -> str:
        return f"{counted(self.images, 'image')} of {counted(self.classes, 'class')}"


# Part of a set -> names of its own parts in a list: In-Shop's test split has queries and a gallery.
PARTS = {
    "train": ("train",),
    "test": ("test", "query", "gallery"),
    "query": ("query",),
    "gallery": ("gallery",),
}

CUB_COUNTS = {"train": Counts(5_864, 100), "test": Counts(5_924, 100)}
CARS196_COUNTS = {"train": Counts(8_054, 98), "test": Counts(8_131, 98)}
SOP_COUNTS = {"train": Counts(59_551, 11_318), "test": Counts(60_502, 11_316)}
INSHOP_COUNTS = {
    "train": Counts(25_882, 3_997),
    "query": Counts(14_218, 3_985),
    "gallery": Counts(12_612, 3_985),
    "test": Counts(26_830, 3_985),
}

CUB_SOURCE = (
    "the set is Caltech-UCSD Birds-200-2011 (https://www.vision.caltech.edu/datasets/cub_200_2011); unpack it and set "
    "data.root to CUB_200_2011, which holds images.txt, image_class_labels.txt and images/"
)
CARS196_SOURCE = (
    "the set is the Cars Dataset of the Stanford AI Lab (https://ai.stanford.edu/~jkrause/cars/car_dataset.html), in "
    "one folder with all annotations in one file; set data.root to what holds car_ims/ and cars_annos.mat"
)
SOP_SOURCE = (
    "the set is Stanford Online Products (https://cvgl.stanford.edu/projects/lifted_struct); unpack it and set "
    "data.root to Stanford_Online_Products, which holds Ebay_train.txt, Ebay_test.txt and the folders of images"
)
INSHOP_SOURCE = (
    "the set is DeepFashion's In-shop Clothes Retrieval Benchmark "
    "(https://mmlab.ie.cuhk.edu.hk/projects/DeepFashion/InShopRetrieval.html); unpack Img/img.zip where it lies and "
    "set data.root to what holds Img/ and Eval/list_eval_partition.txt"
)


class Listed(NamedTuple):
    """An image that a list names.

    Attributes:
        path: relative to the root of the set, with slashes.
        class_number: number of its class in the whole set.
        part: a key of PARTS.
        where: list and position in it, for errors.
    """

    path: str
    class_number: int
    part: str
    where: str


@dataclass(frozen=True, kw_only=True)
class Listing:
    """The images of a whole set.

    Attributes:
        name: name of the set.
        root: folder that the paths are relative to.
        images: images of both splits.
        class_names: class names by number.
    """

    name: str
    root: Path
    images: tuple[Listed, ...]
    class_names: Mapping[int, str]

    def check(self, counts: Mapping[str, Counts]) -> "Listing":
        """Checks that the splits are disjoint and the parts have the expected sizes; returns the listing."""
        for part, expected in counts.items():
            of_part = [image.class_number for image in self._of(part)]
            found = Counts(len(of_part), len(set(of_part)))
            if found != expected:
                where = printable(str(self.root))
                raise DataError(f"{self.name}: found {found} in {where}, {part}; expected {expected}, as published")
        require_disjoint(self._classes("train").values(), self._classes("test").values(), self.name)
        return self

    def open(self, split: Split, decoding: Decoding) -> EncodedImages:
        """Opens one split, after a check that its images exist."""
        assert decoding.crop is not None, "the images have no common size"
        chosen = self._of(split)
        _check_paths(chosen, self.root)
        classes = self._classes(split)
        labels = {number: label for label, number in enumerate(classes)}
        queries = torch.tensor([image.part == "query" for image in chosen])
        return EncodedImages(
            store=FileStore.of(self.root, (image.path for image in chosen)),
            labels=torch.tensor([labels[image.class_number] for image in chosen]),
            class_names=tuple(classes.values()),
            image_shape=(decoding.num_channels, decoding.crop.size_px, decoding.crop.size_px),
            crop=decoding.crop,
            name=f"{self.name}/{split}",
            description=f"{Counts(len(chosen), len(classes))} in {self.root}, {split} split of {self.name} by class",
            on_bad_image=decoding.on_bad_image,
            queries=queries if bool(queries.any()) else None,
        )

    def _of(self, part: str) -> list[Listed]:
        return [image for image in self.images if image.part in PARTS[part]]

    def _classes(self, split: Split) -> dict[int, str]:
        """Names of the classes of a split by their numbers, ascending."""
        numbers = {image.class_number for image in self._of(split)}
        return {number: printable(self.class_names[number]) for number in sorted(numbers)}


def open_retrieval_set(name: RetrievalSet, split: Split, root: str | Path, decoding: Decoding) -> EncodedImages:
    """Opens one split of a set; In-Shop's test split has `queries`, which rank the other images.

    Args:
        name: name of the set.
        split: the training or test images.
        root: folder of the set, as for its `read_...`.
        decoding: how images become pixels; it needs a crop.

    Raises:
        MissingDataError: there is no such set.
        DataError: a list is damaged, names a missing file or one outside of `root`, or has other numbers of
            images and classes than were published.
    """
    return read_listing(name, Path(root)).open(split, decoding)


def read_listing(name: RetrievalSet, root: Path) -> Listing:
    """The images that the lists of a set name, in the numbers that were published; whether they exist is not checked.

    Args:
        name: name of the set.
        root: folder of the set, as for its `read_...`.

    Raises:
        MissingDataError: there is no such set.
        DataError: a list is damaged, or has other numbers of images and classes than were published.
    """
    read, counts = RETRIEVAL_SETS[name]
    return read(root, counts)


def read_cub(root: Path, counts: Mapping[str, Counts]) -> Listing:
    """CUB-200-2011: 200 species of birds, the first 100 for training.

    Args:
        root: `CUB_200_2011`, which holds `images.txt`, `image_class_labels.txt` and `images/`.
        counts: images and classes of each part, as published.
    """
    images, labels = root / "images.txt", root / "image_class_labels.txt"
    for path in (images, labels, root / "images"):
        _require(path, CUB_SOURCE)
    numbers: dict[str, int] = {}
    for where, (image_id, class_id) in _rows(labels, 2):
        if image_id in numbers:
            raise DataError(f"{where}: image {printable(image_id)!r} is listed again")
        numbers[image_id] = _class_number(class_id, where)
    listed: list[Listed] = []
    # The name of an image folder is that of its species: 001.Black_footed_Albatross.
    names: dict[int, str] = {}
    for where, (image_id, path) in _rows(images, 2):
        if image_id not in numbers:
            raise DataError(f"{where}: image {printable(image_id)!r} has no label in {labels.name}")
        number = numbers[image_id]
        names.setdefault(number, path.split("/")[0])
        listed.append(Listed(f"images/{path}", number, _part(number, counts), where))
    return Listing(name="cub", root=root, images=tuple(listed), class_names=names).check(counts)


def read_cars196(root: Path, counts: Mapping[str, Counts]) -> Listing:
    """Cars196 (Stanford Cars): 196 models of cars, the first 98 for training.

    The official halves of the set share their classes and are not used: all images are split by class.

    Args:
        root: folder that holds `car_ims/` and `cars_annos.mat`.
        counts: images and classes of each part, as published.
    """
    annotations = root / "cars_annos.mat"
    for path in (annotations, root / "car_ims"):
        _require(path, CARS196_SOURCE)
    paths, class_ids, class_names = _read_cars_annotations(annotations)
    listed: list[Listed] = []
    for place, (path, class_id) in enumerate(zip(paths, class_ids, strict=True), start=1):
        where = f"{printable(str(annotations))} annotation {place}"
        number = _class_number(str(class_id), where)
        if number > len(class_names):
            raise DataError(f"{where}: class {number}, but {len(class_names)} classes have names")
        listed.append(Listed(str(path), number, _part(number, counts), where))
    names = dict(enumerate(class_names, start=1))
    return Listing(name="cars196", root=root, images=tuple(listed), class_names=names).check(counts)


def read_sop(root: Path, counts: Mapping[str, Counts]) -> Listing:
    """Stanford Online Products: 22,634 products; the lists say which are for training.

    Args:
        root: `Stanford_Online_Products`, which holds `Ebay_train.txt`, `Ebay_test.txt` and the images' folders.
        counts: images and classes of each part, as published.
    """
    listed: list[Listed] = []
    for part in ("train", "test"):
        path = root / f"Ebay_{part}.txt"
        _require(path, SOP_SOURCE)
        for where, (_, class_id, _, image_path) in _rows(path, 4, "image_id class_id super_class_id path"):
            listed.append(Listed(image_path, _class_number(class_id, where), part, where))
    names = {image.class_number: str(image.class_number) for image in listed}
    return Listing(name="sop", root=root, images=tuple(listed), class_names=names).check(counts)


def read_inshop(root: Path, counts: Mapping[str, Counts]) -> Listing:
    """In-Shop Clothes Retrieval: 7,982 articles; the list says which are for training, queries and gallery.

    Args:
        root: folder that holds `Eval/list_eval_partition.txt`, or that list itself, and `Img/img/`, or `img/`.
        counts: images and classes of each part, as published.
    """
    name = "list_eval_partition.txt"
    # Copies of the set may lack the two folders that it is published in.
    path = root / name if (root / name).is_file() else root / "Eval" / name
    folder = "" if (root / "img").is_dir() else "Img/"
    _require(path, INSHOP_SOURCE)
    _require(root / f"{folder}img", INSHOP_SOURCE)
    rows = list(_rows(path, 3, "image_name item_id evaluation_status", lines_before=1))
    names = dict(enumerate(sorted({item for _, (_, item, _) in rows})))
    numbers = {item: number for number, item in names.items()}
    listed: list[Listed] = []
    for where, (image_path, item, part) in rows:
        if part not in ("train", "query", "gallery"):
            raise DataError(f"{where}: status {printable(part)!r}; allowed: train, query, gallery")
        listed.append(Listed(folder + image_path, numbers[item], part, where))
    return Listing(name="inshop", root=root, images=tuple(listed), class_names=names).check(counts)


RETRIEVAL_SETS: Mapping[RetrievalSet, tuple[Callable[[Path, Mapping[str, Counts]], Listing], Mapping[str, Counts]]] = {
    "cub": (read_cub, CUB_COUNTS),
    "cars196": (read_cars196, CARS196_COUNTS),
    "sop": (read_sop, SOP_COUNTS),
    "inshop": (read_inshop, INSHOP_COUNTS),
}


def _part(class_number: int, counts: Mapping[str, Counts]) -> Split:
    return "train" if class_number <= counts["train"].classes else "test"


def _require(path: Path, source: str) -> None:
    if not path.exists():
        raise MissingDataError(f"{printable(str(path))}: not there; {source}")


def _rows(path: Path, num_fields: int, header: str = "", lines_before: int = 0) -> Iterator[tuple[str, list[str]]]:
    """The position of each line in the file, and its fields.

    Args:
        path: list with fields separated by spaces.
        num_fields: number of fields that each line must have.
        header: line before the first row; none if empty.
        lines_before: number of lines before the header.
    """
    printed = printable(str(path))
    lines = read_text(path).rstrip().split("\n")
    first = lines_before
    if header:
        found = lines[first] if first < len(lines) else ""
        if found.split() != header.split():
            raise DataError(f"{printed} line {first + 1}: found {printable(found.strip())!r}, expected {header!r}")
        first += 1
    for number, line in enumerate(lines[first:], start=first + 1):
        fields = line.split()
        where = f"{printed} line {number}"
        if len(fields) != num_fields:
            raise DataError(f"{where}: {counted(len(fields), 'field')} found, {num_fields} expected")
        yield where, fields


def _class_number(text: str, where: str) -> int:
    if not is_number(text) or int(text) < 1:
        raise DataError(f"{where}: label {printable(text)!r}; allowed: integers, 1 or more")
    return int(text)


def _read_cars_annotations(path: Path) -> tuple[list[Any], list[Any], list[str]]:
    """Paths, class numbers and the names of the classes, counted from 1."""
    content = read_matlab(path, ("annotations", "class_names"))
    annotations = np.atleast_1d(content.get("annotations", ()))
    fields = annotations.dtype.names or ()
    missing = [field for field in ("relative_im_path", "class") if field not in fields]
    if missing or "class_names" not in content:
        listed = ", ".join([f"annotations.{field}" for field in missing] or ["class_names"])
        raise DataError(f"{printable(str(path))}: no {listed}; needed is cars_annos.mat, which annotates all images")
    class_names = [str(name) for name in np.atleast_1d(content["class_names"])]
    return list(annotations["relative_im_path"]), list(annotations["class"]), class_names


def _check_paths(listed: Collection[Listed], root: Path) -> None:
    """Refuses images that are not below `root`, missing, or listed twice."""
    seen: set[str] = set()
    for image in listed:
        if image.path in seen:
            raise DataError(f"{image.where}: {printable(image.path)} is listed again")
        seen.add(image.path)
    check_paths(((image.path, image.where) for image in listed), root, "data.root")
