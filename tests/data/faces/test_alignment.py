import os

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import ExifTags, Image

from ssl_sec.data.crops import Crop
from ssl_sec.data.decode import decode_image
from ssl_sec.data.faces.alignment import (
    COORDINATES,
    REFERENCE_POINTS,
    FaceAlignment,
    align_file,
    aligned_path,
    read_landmarks,
    similarity_transform,
)
from ssl_sec.errors import DataError, MissingDataError, StorageError
from tests.data.files import encode, noise
from tests.data.test_sources import line

SEEDS = st.integers(0, 2**32 - 1)


def moved(points, scale: float, radians: float, shift) -> np.ndarray:
    """Points turned, scaled and shifted."""
    turn = np.array([[np.cos(radians), -np.sin(radians)], [np.sin(radians), np.cos(radians)]])
    return scale * points @ turn.T + shift


@given(SEEDS, st.integers(2, 9), st.floats(0.01, 100), st.floats(-3.2, 3.2))
@settings(max_examples=60)
def test_a_similarity_is_recovered(seed, num_points, scale, radians):
    rng = np.random.default_rng(seed)
    points, shift = rng.normal(size=(num_points, 2)) * 50, rng.normal(size=2) * 100
    targets = moved(points, scale, radians, shift)
    transform = similarity_transform(points, targets)
    assert np.allclose(transform[:, :2], moved(np.eye(2), scale, radians, 0).T, rtol=1e-7, atol=1e-7 * scale)
    assert np.allclose(transform[:, 2], shift, rtol=0, atol=1e-6 * scale * 50 + 1e-9)


@given(SEEDS, st.floats(0, 30))
@settings(max_examples=60)
def test_the_transform_is_that_of_least_squares(seed, spread):
    # In the plane a similarity is linear in its four parameters: x' = a x − b y + u, y' = b x + a y + v.
    rng = np.random.default_rng(seed)
    points = moved(REFERENCE_POINTS, 2, rng.uniform(-3, 3), rng.normal(size=2) * 40) + rng.normal(size=(5, 2)) * spread
    one, zero = np.ones(5), np.zeros(5)
    x, y = points.T
    equations = np.concatenate([np.stack([x, -y, one, zero], 1), np.stack([y, x, zero, one], 1)])
    a, b, u, v = np.linalg.lstsq(equations, REFERENCE_POINTS.T.flatten())[0]
    expected = np.array([[a, -b, u], [b, a, v]])
    assert np.allclose(similarity_transform(points, REFERENCE_POINTS), expected, rtol=1e-6, atol=1e-6)


def test_a_mirrored_face_is_not_mirrored_back():
    transform = similarity_transform(REFERENCE_POINTS * (-1, 1), REFERENCE_POINTS)
    assert np.linalg.det(transform[:, :2]) > 0


def test_points_that_are_not_a_face():
    for points in (np.full((5, 2), 7.0), REFERENCE_POINTS * 0):
        assert "not those of a face" in line(lambda points=points: similarity_transform(points, REFERENCE_POINTS))


def alignment(points) -> FaceAlignment:
    return FaceAlignment(transform=similarity_transform(points, REFERENCE_POINTS))


def test_points_in_place_leave_the_pixels():
    image = noise(112, 112)
    assert isinstance(alignment(REFERENCE_POINTS), Crop)
    assert np.array_equal(np.asarray(alignment(REFERENCE_POINTS)(image)), np.asarray(image))


@pytest.mark.parametrize("radians", [0, np.pi / 2, np.pi])
def test_a_shifted_and_turned_face_comes_back_exactly(radians):
    image = noise(150, 150)
    centre = 74.5
    upright = np.asarray(alignment(REFERENCE_POINTS + (7, 11))(image))
    assert np.array_equal(upright, np.asarray(image)[11:123, 7:119])
    turned = image.rotate(-np.degrees(radians))
    points = moved(REFERENCE_POINTS + (7, 11) - centre, 1, radians, centre)
    again = np.asarray(alignment(points)(turned)).astype(int)
    # A turn is not exact in floating point, which shows where a pixel lies halfway between two.
    assert np.abs(again - upright).max() <= 1


def test_a_face_is_sampled_bilinearly_and_black_beyond_the_border():
    image = noise(90, 70)
    pixels = np.asarray(image).astype(float)
    points = moved(REFERENCE_POINTS, 0.9, 0.4, (-20, -30))
    aligned = np.asarray(alignment(points)(image))
    back = similarity_transform(REFERENCE_POINTS, points)
    inside, outside = 0, 0
    for row in range(0, 112, 5):
        for column in range(0, 112, 5):
            x, y = back @ (column, row, 1)
            if 0 <= x <= 88 and 0 <= y <= 68:
                left, top = int(x), int(y)
                right, below = x - left, y - top
                upper = (1 - right) * pixels[top, left] + right * pixels[top, left + 1]
                lower = (1 - right) * pixels[top + 1, left] + right * pixels[top + 1, left + 1]
                expected = (1 - below) * upper + below * lower
                assert np.abs(aligned[row, column] - expected).max() <= 1
                inside += 1
            elif not (-1 <= x <= 90 and -1 <= y <= 70):
                assert (aligned[row, column] == 0).all()
                outside += 1
    assert inside > 50 and outside > 50


def csv(*faces: str) -> str:
    return "\n".join([",".join(("path", *COORDINATES)), *faces, ""])


POINTS = ",".join(str(value) for value in REFERENCE_POINTS.flatten())


def test_landmarks(tmp_path):
    path = tmp_path / "landmarks.csv"
    path.write_text(csv(f"a/1.jpg,{POINTS}", f"b/2.jpg,{POINTS.replace('38.2946', '-40')}"))
    landmarks = read_landmarks(path)
    assert landmarks.rows == {"a/1.jpg": 0, "b/2.jpg": 1}
    assert np.array_equal(landmarks.points[0], REFERENCE_POINTS) and landmarks.points[1, 0, 0] == -40
    # Columns of a detector may have another order, and there may be more of them.
    columns = ["score", *reversed(COORDINATES), "path"]
    values = ["0.9", *reversed(POINTS.split(",")), "a/1.jpg"]
    path.write_text(f"{','.join(columns)}\n{','.join(values)}\n")
    assert np.array_equal(read_landmarks(path).points[0], REFERENCE_POINTS)


def test_landmarks_of_a_list_without_a_header(tmp_path):
    path = tmp_path / "ijbc_name_5pts_score.txt"
    points = POINTS.replace(",", " ")
    path.write_text(f"1.jpg {points} 0.99\n2.jpg {points.replace('38.2946', '-40')} 0.5\n")
    landmarks = read_landmarks(path)
    assert landmarks.rows == {"1.jpg": 0, "2.jpg": 1}
    assert np.array_equal(landmarks.points[0], REFERENCE_POINTS) and landmarks.points[1, 0, 0] == -40
    path.write_text(f"1.jpg {points} 0.99\n1.jpg {points} 0.5\n")
    assert line(lambda: read_landmarks(path)) == f"{path}: 1.jpg is listed twice"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "cannot be read: Empty CSV file"),
        ("path,x1\na,1\n", "Column 'y1' is missing; needed: path, x1, y1, x2, y2, …, x5, y5"),
        (csv(f"a,{POINTS}", "b,1,2"), "cannot be read: CSV parse error: Row #3: Expected 11 columns, got 3"),
        (csv(f"a,{POINTS}", f"b,x{POINTS}"), "Row #3: CSV conversion error to double: invalid value 'x38.2946'"),
        (csv(f"a,{POINTS}", f"b,{POINTS}", f"a,{POINTS}"), "a is listed twice"),
        (csv(f"a,{POINTS}", f"b,{POINTS.replace('38.2946', 'inf')}"), "b has a point that is not finite"),
    ],
)
def test_wrong_landmarks(tmp_path, content, message):
    path = tmp_path / "landmarks.csv"
    assert line(lambda: read_landmarks(path), MissingDataError) == f"{path}: not there"
    path.write_text(content)
    output = line(lambda: read_landmarks(path))
    assert output.startswith(f"{path}: ") and message in output


@pytest.mark.parametrize(("suffix", "largest"), [(".png", 0), (".jpg", 40)])
def test_a_file_is_aligned(tmp_path, suffix, largest):
    source, target = tmp_path / "a.png", tmp_path / "faces" / "ann" / f"a{suffix}"
    smooth = noise(6, 6).resize((150, 140), Image.Resampling.BICUBIC)
    source.write_bytes(encode(smooth))
    align_file(source, target, REFERENCE_POINTS + 5)
    aligned = decode_image(target, "a", 3).to(torch.int64)
    expected = torch.from_numpy(np.asarray(smooth).copy())[5:117, 5:117].permute(2, 0, 1).to(torch.int64)
    assert (aligned - expected).abs().max() <= largest and (aligned - expected).abs().float().mean() <= largest / 20
    assert os.listdir(target.parent) == [target.name]


def test_images_that_cannot_be_aligned_are_named(tmp_path):
    source, target = tmp_path / "a.png", tmp_path / "b.png"
    source.write_bytes(b"text")
    assert line(lambda: align_file(source, target, REFERENCE_POINTS)).startswith(f"{source}: not an image")
    source.write_bytes(encode(noise(90, 90)))
    output = line(lambda: align_file(source, target, REFERENCE_POINTS * 0), DataError)
    assert output == f"{source}: the points are not those of a face: no rotation brings them close to the template"
    output = line(lambda: align_file(source, target, REFERENCE_POINTS + 100), DataError)
    assert output == f"{source}: the points are around (156, 172), but the upright image has 90 x 90 pixels"
    align_file(source, tmp_path / "c.png", REFERENCE_POINTS)  # some of its points are beside the image
    (tmp_path / "c.png").unlink()
    beside = tmp_path / "a.png" / "b.png"
    assert line(lambda: align_file(source, beside, REFERENCE_POINTS), StorageError).startswith(f"{beside}: cannot be")
    assert sorted(os.listdir(tmp_path)) == ["a.png"]


def test_points_are_those_of_the_upright_image(tmp_path):
    upright, turned = noise(300, 200), noise(300, 200).transpose(Image.Transpose.ROTATE_90)
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6  # turned clockwise when shown
    (tmp_path / "a.png").write_bytes(encode(upright))
    (tmp_path / "b.png").write_bytes(encode(turned, exif=exif))
    for name in "ab":
        align_file(tmp_path / f"{name}.png", tmp_path / f"{name}_out.png", REFERENCE_POINTS + (180, 80))
    assert torch.equal(*(decode_image(tmp_path / f"{name}_out.png", name, 3) for name in "ab"))


def test_names_of_aligned_images():
    assert [aligned_path(path) for path in ("a/1.JPG", "2.jpeg", "b/3.png", "c.d/4.bmp")] == [
        "a/1.JPG",
        "2.jpeg",
        "b/3.png",
        "c.d/4.bmp.png",
    ]
