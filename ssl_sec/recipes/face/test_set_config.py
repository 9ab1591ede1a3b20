"""Which test sets a run of face recognition is measured on, and where their files are."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import torch
from jaxtyping import Float64, Int64
from torch import Tensor

from ssl_sec.data.decode import Decoding
from ssl_sec.data.faces.config import PairsConfig
from ssl_sec.data.faces.listed_images import frames_of_videos, open_listed, paths_by_stem
from ssl_sec.data.faces.lists import (
    MegaFaceList,
    OpenSetProtocol,
    OpenSetTrial,
    TemplateFaces,
    TemplatePairs,
    VideoPairs,
    read_blufr,
    read_detected_faces,
    read_megaface_list,
    read_template_faces,
    read_template_pairs,
    read_video_pairs,
)
from ssl_sec.data.faces.pairs import UNKNOWN, VerificationPairs, require_both_kinds, require_folds
from ssl_sec.data.faces.reading import rows_by_name
from ssl_sec.data.folders.listing import display, image_paths, top_folder
from ssl_sec.effects import NoEffect
from ssl_sec.errors import DataError, counted, printable
from ssl_sec.evaluation.faces.identification import random_open_set_trials
from ssl_sec.recipes.face.test_sets import (
    FaceTestSet,
    MegaFaceTestSet,
    OpenSetTestSet,
    PairsTestSet,
    TemplatesTestSet,
    VideosTestSet,
)
from ssl_sec.rules import Count, CountOrZero, Local, Name, NotEmpty, Range, Seed, check
from ssl_sec.settings import Settings

FalseAcceptRate = Annotated[float, Range(gt=0, lt=1)]


@dataclass(frozen=True, kw_only=True)
class _TestSetConfig(Settings, key="test_sets"):
    """The options of every test set except pairs; its images have the size and the channels of the training images.

    Attributes:
        title: its name in metrics and plots.
        resident_limit_mib: images that are no larger once decoded are kept in memory.
    """

    title: Name
    resident_limit_mib: NoEffect[CountOrZero] = Decoding.resident_limit_mib

    @property
    def shown_title(self) -> str:
        """Its name in metrics and plots."""
        return self.title

    @abstractmethod
    def require_list(self) -> None:
        """Checks the lists that name its images, without looking for these.

        Raises:
            DataError: one is malformed, or nothing can be measured with it.
        """


@dataclass(frozen=True, kw_only=True)
class BLUFRConfig(_TestSetConfig):
    """LFW by BLUFR; see `ssl_sec.recipes.face.test_sets.OpenSetTestSet`.

    Attributes:
        root: the folder of LFW's images, with one folder for each person, in and below which the person's images are.
        lists: BLUFR's `blufr_lfw_config.mat`; None draws similar trials of any people, by the other options.
        seed: seed of the draws.
        num_trials: trials that are drawn, ≥ 1.
        num_gallery: people in the gallery of a drawn trial, ≥ 1.
        num_training_people: people excluded from a drawn trial, ≥ 0.
    """

    name: Literal["blufr"] = "blufr"
    title: Name = "blufr"
    root: Local
    lists: Local | None = None
    seed: Seed = 0
    num_trials: Annotated[int, Range(ge=1, le=1000)] = 10
    num_gallery: Count = 1000
    num_training_people: CountOrZero = 1500

    def require_list(self) -> None:
        """Checks the trials of BLUFR's lists; drawn ones depend on the folder."""
        if self.lists is not None:
            self._read_protocol(self.lists)

    def open(self, decoding: Decoding) -> OpenSetTestSet:
        """The images and the trials."""
        root, where = Path(self.root).expanduser(), f"test_sets.root of {self.title}, image"
        if self.lists is None:
            # An image beside the folders belongs to nobody.
            paths = [path for path in image_paths(root) if top_folder(path)]
            names, labels = _numbered([top_folder(path) for path in paths])
            drawn = random_open_set_trials(
                labels,
                self.seed,
                num_trials=self.num_trials,
                num_gallery=self.num_gallery,
                num_training_people=self.num_training_people,
            )
            trials = tuple(drawn)
            _require_known_and_unknown(trials, labels, f"test set {self.title}")
        else:
            where = _each(self.lists, "image")
            protocol = self._read_protocol(self.lists)
            paths, trials = paths_by_stem(protocol.images, root, where), protocol.trials
            numbers, labels = protocol.labels.unique(return_inverse=True)
            names = tuple(map(str, numbers.tolist()))
        folders = [display(top_folder(path)) for path in paths]
        shown = {(folder, label) for folder, label in zip(folders, labels.tolist(), strict=True) if folder}
        people = frozenset(folder for folder, _ in shown)
        # A folder of several people is none of them.
        known = len(people) == len(shown)
        images = open_listed(paths, labels, names, root, where, self.title, decoding)
        return OpenSetTestSet(images=images, trials=trials, people=people if known else frozenset())

    def _read_protocol(self, lists: str) -> OpenSetProtocol:
        protocol = read_blufr(Path(lists).expanduser())
        _require_known_and_unknown(protocol.trials, protocol.labels, f"test set {self.title}")
        return protocol


@dataclass(frozen=True, kw_only=True)
class MegaFaceConfig(_TestSetConfig):
    """MegaFace's Challenge 1; see `ssl_sec.recipes.face.test_sets.MegaFaceTestSet`.

    Attributes:
        probes: the list of FaceScrub's images to identify, with the person on each.
        probes_root: the folder of the probes.
        distractors: the list of the distractors.
        distractors_root: the folder of the distractors.
        sizes: numbers of distractors, each ≥ 1.
        seed: seed of the choice of distractors.
    """

    name: Literal["megaface"] = "megaface"
    title: Name = "megaface"
    probes: Local
    probes_root: Local
    distractors: Local
    distractors_root: Local
    sizes: Annotated[tuple[Count, ...], NotEmpty()] = (10**3, 10**4, 10**5, 10**6)
    seed: Seed = 0

    def require_list(self) -> None:
        """Checks both lists."""
        self._read_lists()

    def open(self, decoding: Decoding) -> MegaFaceTestSet:
        """The probes and the distractors."""
        probes, distractors = self._read_lists()
        names, labels = _numbered(probes.ids)
        return MegaFaceTestSet(
            probes=open_listed(
                probes.paths,
                labels,
                names,
                Path(self.probes_root).expanduser(),
                _each(self.probes, "image"),
                f"{self.title}/probes",
                decoding,
            ),
            distractors=open_listed(
                distractors,
                torch.zeros(len(distractors), dtype=torch.int64),
                (UNKNOWN,),
                Path(self.distractors_root).expanduser(),
                _each(self.distractors, "image"),
                f"{self.title}/distractors",
                decoding,
            ),
            sizes=self.sizes,
            seed=self.seed,
        )

    def _read_lists(self) -> tuple[MegaFaceList, tuple[str, ...]]:
        """The probes, and the names of the distractors' images."""
        probes = read_megaface_list(Path(self.probes).expanduser())
        num_people = len(set(probes.ids))
        if num_people == len(probes.ids):
            raise DataError(
                f"{printable(self.probes)}: {counted(len(probes.paths), 'image')} of {counted(num_people, 'person')}; "
                "needed: two of one"
            )
        distractors = read_megaface_list(Path(self.distractors).expanduser()).paths
        if len(distractors) < max(self.sizes):
            raise DataError(
                f"{printable(self.distractors)}: {counted(len(distractors), 'image')}, but test_sets.sizes asks for "
                f"{max(self.sizes)}"
            )
        return probes, distractors


@dataclass(frozen=True, kw_only=True)
class TemplatesConfig(_TestSetConfig):
    """IJB-C's verification, or IJB-B's; see `ssl_sec.recipes.face.test_sets.TemplatesTestSet`.

    Attributes:
        faces: images with templates and media, `ijbc_face_tid_mid.txt`.
        pairs: the list of the pairs of templates, `ijbc_template_pair_label.txt`.
        root: the folder of the images.
        weights: weights of the faces: norms of embeddings, scores of a detector, or both multiplied, as by InsightFace.
        scores: the detector's scores, `ijbc_name_5pts_score.txt`.
        fars: the false accept rates at which true accept rates are reported, each in (0, 1).
    """

    name: Literal["templates"] = "templates"
    title: Name = "ijbc"
    faces: Local
    pairs: Local
    root: Local
    weights: Literal["none", "norms", "scores", "both"] = "none"
    scores: Local | None = None
    fars: tuple[FalseAcceptRate, ...] = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1)

    def __post_init__(self) -> None:
        super().__post_init__()
        needs_scores = self.weights in ("scores", "both")
        allowed = f"{'a file' if needs_scores else 'null'} with weights={self.weights}"
        check(needs_scores == (self.scores is not None), "test_sets.scores", self.scores, allowed)

    def require_list(self) -> None:
        """Checks all lists; the 16 million pairs of IJB-C take some seconds."""
        self._read_lists()

    def open(self, decoding: Decoding) -> TemplatesTestSet:
        """The faces and the pairs."""
        faces, pairs, scores = self._read_lists()
        images = open_listed(
            faces.paths,
            torch.zeros(len(faces.paths), dtype=torch.int64),
            (UNKNOWN,),
            Path(self.root).expanduser(),
            _each(self.faces, "line"),
            self.title,
            decoding,
        )
        return TemplatesTestSet(
            images=images,
            faces=faces,
            pairs=pairs,
            by_norm=self.weights in ("norms", "both"),
            scores=scores,
            fars=self.fars,
        )

    def _read_lists(self) -> tuple[TemplateFaces, TemplatePairs, Float64[Tensor, " faces"] | None]:
        """The faces, the pairs, and the detector's scores if they are asked for."""
        faces = read_template_faces(Path(self.faces).expanduser())
        pairs = read_template_pairs(Path(self.pairs).expanduser())
        require_both_kinds(pairs.same, printable(self.pairs))
        faceless = (~torch.isin(torch.stack([pairs.first, pairs.second], 1), faces.templates.unique())).nonzero()
        if len(faceless):
            line, side = faceless[0].tolist()
            raise DataError(
                f"{_each(self.pairs, 'line')} {line + 1}: no face of template {int(pairs[side][line])} in "
                f"{printable(self.faces)}"
            )
        scores = None if self.scores is None else self._scores(faces.paths, Path(self.scores).expanduser())
        return faces, pairs, scores

    def _scores(self, faces: Sequence[str], file: Path) -> Float64[Tensor, " faces"]:
        detected = read_detected_faces(file)
        rows = rows_by_name(detected.paths, printable(str(file)))
        if (missing := next((path for path in faces if path not in rows), None)) is not None:
            raise DataError(
                f"{printable(str(file))}: no line of {printable(missing)}, a face of {printable(self.faces)}"
            )
        return detected.scores[[rows[path] for path in faces]]


@dataclass(frozen=True, kw_only=True)
class VideosConfig(_TestSetConfig):
    """YouTube Faces; see `ssl_sec.recipes.face.test_sets.VideosTestSet`.

    Attributes:
        splits: YouTube Faces' `splits.txt`.
        root: the folder of the videos, <person>/<number>/, in and below each of which the images of its frames are.
    """

    name: Literal["videos"] = "videos"
    title: Name = "ytf"
    splits: Local
    root: Local

    def require_list(self) -> None:
        """Checks the pairs of videos."""
        self._read_pairs()

    def open(self, decoding: Decoding) -> VideosTestSet:
        """The frames and the pairs."""
        pairs = self._read_pairs()
        root = Path(self.root).expanduser()
        paths, video = frames_of_videos(pairs.videos, root, printable(self.splits))
        frames = open_listed(
            paths,
            video,
            pairs.videos,
            root,
            _each(self.splits, "frame"),
            self.title,
            decoding,
        )
        return VideosTestSet(frames=frames, pairs=pairs)

    def _read_pairs(self) -> VideoPairs:
        pairs = read_video_pairs(Path(self.splits).expanduser())
        require_both_kinds(pairs.same, printable(self.splits))
        require_folds(pairs.folds.tolist(), printable(self.splits))
        for split in pairs.folds.unique():
            # The SVM is trained on them.
            require_both_kinds(pairs.same[pairs.folds != split], f"{printable(self.splits)} without split {split}")
        return pairs


TestSetConfig = PairsConfig | BLUFRConfig | MegaFaceConfig | TemplatesConfig | VideosConfig


def open_test_set(config: TestSetConfig, decoding: Decoding) -> FaceTestSet:
    """Reads a test set's files; whether its images are kept in memory is up to the test set.

    Raises:
        MissingDataError: a list or a folder is not there.
        DataError: a list is malformed, or it names an image that is not there.
    """
    opened = config.open(replace(decoding, resident_limit_mib=config.resident_limit_mib))
    if isinstance(opened, VerificationPairs):
        require_folds(opened.folds.tolist(), f"test set {opened.name}")
        return PairsTestSet(pairs=opened)
    return opened


def _numbered(people: Sequence[str]) -> tuple[tuple[str, ...], Int64[Tensor, " images"]]:
    """The names of the people on some images, and for each image the number of its person."""
    numbers = {person: number for number, person in enumerate(dict.fromkeys(people))}
    return tuple(map(printable, numbers)), torch.tensor([numbers[person] for person in people], dtype=torch.int64)


def _each(path: str, unit: str) -> str:
    """The name of a list's entry in errors, before its number."""
    return f"{printable(path)} {unit}"


def _require_known_and_unknown(trials: Sequence[OpenSetTrial], labels: Int64[Tensor, " images"], where: str) -> None:
    for number, (gallery, probes) in enumerate(trials, start=1):
        num_known = int(torch.isin(labels[probes], labels[gallery]).sum())
        if not 0 < num_known < len(probes):
            raise DataError(
                f"{where}: trial {number} looks up {counted(num_known, 'image')} of people in the gallery and "
                f"{len(probes) - num_known} of others; needed: 1 or more of each"
            )
