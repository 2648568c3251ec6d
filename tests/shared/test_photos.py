"""Folders of images: made, listed, decoded, and what is wrong with those that can't be."""

import contextlib
import io
import os
import pickle
import struct
import tempfile
import warnings
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from shared import images, photos
from shared.images import ImageError, decode_rgb, list_images
from shared.photos import CLASSES, make_photos
from tests.input.pipelines import folder_for_all, ordinary_user


def picture(height: int = 24, width: int = 32) -> np.ndarray:
    """Smooth colours, which every format keeps about as they are."""
    rows, columns = np.mgrid[:height, :width]
    planes = [rows * 255 // height, columns * 255 // width, np.full_like(rows, 90)]
    return np.stack(planes, axis=-1).astype(np.uint8)


def encoded(image: Image.Image | np.ndarray, form: str, **settings) -> bytes:
    image = image if isinstance(image, Image.Image) else Image.fromarray(image)
    buffer = io.BytesIO()
    image.save(buffer, form, **settings)
    return buffer.getvalue()


def reason(path: Path) -> str:
    """Why a file can't be decoded."""
    with pytest.raises(ImageError) as raised:
        decode_rgb(path)
    return raised.value.reason


def png(rows: list[bytes], width: int, depth: int, color: int, *chunks: tuple[bytes, bytes]):
    """A PNG by hand, for the kinds that Pillow can't write. `chunks` go before the pixels."""

    def chunk(name: bytes, data: bytes) -> bytes:
        checksum = struct.pack(">I", zlib.crc32(name + data))
        return struct.pack(">I", len(data)) + name + data + checksum

    header = struct.pack(">IIBBBBB", width, len(rows), depth, color, 0, 0, 0)
    pixels = zlib.compress(b"".join(b"\0" + row for row in rows))
    found = chunk(b"IHDR", header) + b"".join(chunk(*each) for each in chunks)
    return b"\x89PNG\r\n\x1a\n" + found + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


# Made from photos ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    return make_photos(tmp_path_factory.mktemp("made"), images=20, size=64, seed=3)


def test_photos_are_real_jpegs_of_varying_size_in_classes(made):
    paths, labels, classes = list_images(made)
    assert classes == sorted(CLASSES)
    assert np.bincount(labels).tolist() == [4, 4, 3, 3, 3, 3]
    assert all(path.read_bytes().startswith(b"\xff\xd8\xff") for path in paths)
    sizes = [decode_rgb(path).shape for path in paths]
    assert all(48 <= length <= 80 for size in sizes for length in size[:2])
    assert len(set(sizes)) > 10


def test_photos_are_what_their_name_says(made):
    """Each is the part of its photo that was drawn, at quality 90."""
    originals = photos._photos()
    for number, (name, photo, box) in enumerate(photos._crops(20, 64, 3)):
        left, _, right, _ = box
        side = (left / (640 - (right - left))) * 3
        assert abs(side - 0.5 - photos.SIDES.index(name.split("-")[1])) <= 0.52
        part = originals[photo].crop(box)
        pixels = decode_rgb(made / name / f"{number:06}.jpg")
        again = encoded(part, "JPEG", quality=90, subsampling="4:2:0")
        assert np.array_equal(pixels, decode_rgb(again))
        assert np.abs(pixels - np.asarray(part).astype(int)).mean() < 8
    reference = Image.open(io.BytesIO(encoded(picture(), "JPEG", quality=90)))
    with Image.open(made / CLASSES[0] / "000000.jpg") as image:
        assert image.quantization == reference.quantization


def test_no_photo_comes_twice(made):
    data = [path.read_bytes() for path in list_images(made)[0]]
    assert len(set(data)) == len(data)


def test_same_settings_same_bytes(made, tmp_path):
    again = make_photos(tmp_path, images=20, size=64, seed=3)
    assert again.name == made.name
    for path in list_images(made)[0]:
        assert (again / path.relative_to(made)).read_bytes() == path.read_bytes()


@pytest.mark.parametrize("change", [{"images": 21}, {"size": 65}, {"seed": 4}])
def test_other_settings_have_another_folder(made, tmp_path, change):
    other = make_photos(tmp_path, **{"images": 20, "size": 64, "seed": 3} | change)
    assert other.name != made.name
    if "seed" in change:
        old, new = (
            {path.read_bytes() for path in list_images(folder)[0]} for folder in (made, other)
        )
        assert not old & new


def test_photos_are_made_once(made, monkeypatch):
    monkeypatch.setattr(photos, "_photos", lambda: pytest.fail("made again"))
    assert make_photos(made.parent, images=20, size=64, seed=3) == made


def test_another_pillow_makes_another_folder(made, tmp_path, monkeypatch):
    """Another encoder may write other bytes."""
    monkeypatch.setattr(photos, "version", lambda name: "0")
    assert make_photos(tmp_path, images=20, size=64, seed=3).name != made.name


@pytest.mark.parametrize("change", [{"images": 5}, {"size": 7}, {"size": 343}])
def test_settings_that_can_not_be(tmp_path, change):
    (name,) = change
    with pytest.raises(ValueError, match=f"{name} must be"):
        make_photos(tmp_path, **{"images": 20, "size": 64, "seed": 3} | change)
    assert list(tmp_path.iterdir()) == []


def test_the_largest_size_fits_the_photos(tmp_path):
    folder = make_photos(tmp_path, images=6, size=342, seed=0)
    assert len(list_images(folder)[0]) == 6


def test_a_full_disk_leaves_nothing(tmp_path, monkeypatch):
    save, calls = Image.Image.save, []

    def full(self, path, *args, **settings):
        calls.append(path)
        if len(calls) == 3:
            Path(path).write_bytes(b"half")
            raise OSError("No space left on device")
        save(self, path, *args, **settings)

    monkeypatch.setattr(Image.Image, "save", full)
    with pytest.raises(OSError, match="No space left"):
        make_photos(tmp_path, images=20, size=64, seed=3)
    assert list(tmp_path.iterdir()) == []


# Any folder ----------------------------------------------------------------------------------


def tree(root: Path, *names: str) -> Path:
    """A folder with these files; a name that ends with a slash is a folder."""
    root.mkdir(parents=True, exist_ok=True)
    for name in names:
        path = root / name
        if name.endswith("/"):
            path.mkdir(parents=True, exist_ok=True)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"listed, not opened")
    return root


def test_images_are_sorted_and_labelled(tmp_path):
    names = ["кошка/b.JPG", "кошка/a.jpeg", "dog 犬/z.png", "dog 犬/deep/er/y.WebP"]
    names += ["dog 犬/A.gif", "éclair/1.bmp"]
    others = ["dog 犬/notes.txt", "readme.md", "éclair/jpg", "éclair/x.jpg.part"]
    folder = tree(tmp_path / "my photos, фото 写真", *names, *others)
    paths, labels, classes = list_images(folder)
    assert classes == ["dog 犬", "éclair", "кошка"]
    assert paths == [folder / name for name in sorted(names)]
    assert labels.tolist() == [0, 0, 0, 1, 2, 2]
    assert labels.dtype == np.int64
    assert list_images(str(folder))[0] == paths


@given(
    st.dictionaries(
        st.tuples(
            st.sampled_from(["a", "a b", "a-b", "B", "ab", "é", "10", "9"]),
            st.sampled_from(["1", "10", "2", "x/1", "x1", "x-/1"]),
        ),
        st.sampled_from(images.SUFFIXES),
        min_size=1,
    )
)
def test_every_image_has_the_label_of_its_folder(images):
    with tempfile.TemporaryDirectory() as root:
        names = [f"{kind}/{name}{suffix}" for (kind, name), suffix in images.items()]
        paths, labels, classes = list_images(tree(Path(root), *names))
        listed = [path.relative_to(root) for path in paths]
        assert sorted(path.as_posix() for path in listed) == sorted(names)
        assert paths == sorted(paths)
        assert classes == sorted({kind for kind, _ in images})
        assert [classes[label] for label in labels] == [path.parts[0] for path in listed]


def test_what_is_hidden_is_ignored(tmp_path):
    tree(tmp_path, ".git/x.jpg", "a/.thumb.jpg", "a/._x.jpg", "a/.deep/y.jpg", "a/x.jpg", ".z.jpg")
    paths, _, classes = list_images(tmp_path)
    assert paths == [tmp_path / "a" / "x.jpg"]
    assert classes == ["a"]


def test_one_class_is_allowed(tmp_path):
    paths, labels, classes = list_images(tree(tmp_path, "only/1.jpg", "only/2.jpg"))
    assert len(paths) == 2
    assert labels.tolist() == [0, 0]
    assert classes == ["only"]


def test_links_are_followed_and_end(tmp_path):
    elsewhere = tree(tmp_path / "elsewhere", "x.jpg", "deep/y.jpg")
    folder = tree(tmp_path / "images", "a/1.jpg")
    (folder / "linked").symlink_to(elsewhere)
    (folder / "a" / "back").symlink_to(folder / "a")
    (elsewhere / "up").symlink_to(elsewhere)
    (elsewhere / "again").symlink_to(elsewhere / "deep")
    (elsewhere / "itself").symlink_to("itself")
    (folder / "itself").symlink_to("itself")
    (folder / "a" / "2.jpg").symlink_to(elsewhere / "x.jpg")
    paths, labels, _ = list_images(folder)
    assert [path.relative_to(folder).as_posix() for path in paths[:2]] == ["a/1.jpg", "a/2.jpg"]
    assert labels.tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize(
    ("names", "error", "says"),
    [
        ([], ValueError, "is empty"),
        ([".hidden/x.jpg"], ValueError, "is empty"),
        (["notes.txt"], ValueError, "has no sub-folder"),
        (["x.jpg", "y.PNG"], ValueError, "2 images such as 'x.jpg' are in no class"),
        (["a/x.jpg", "y.png"], ValueError, "1 images such as 'y.png' are in no class"),
        (["a/x.jpg", "b/", "c/note.txt"], ValueError, "2 of 3 classes without images, such as 'b'"),
        (["a/.x.jpg"], ValueError, r"such as 'a' \(an image ends with .jpg, .jpeg, .png"),
    ],
)
def test_folders_that_can_not_be(tmp_path, names, error, says):
    folder = tree(tmp_path / "images", *names)
    with pytest.raises(error, match=says) as raised:
        list_images(folder)
    assert str(raised.value).startswith(f"{folder}: ")
    assert "\n" not in str(raised.value)


def test_a_folder_that_is_missing_or_none(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"gone: no such folder"):
        list_images(tmp_path / "gone")
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError, match=r"file: is not a folder"):
        list_images(tmp_path / "file")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes here")
def test_a_pipe_or_a_broken_link_named_as_an_image(tmp_path):
    """Opening a pipe would hang."""
    pipes, links, loops = (tree(tmp_path / name, "a/1.jpg") for name in ("p", "links", "loops"))
    os.mkfifo(pipes / "a" / "2.jpg")
    (links / "a" / "2.jpg").symlink_to("gone")
    (loops / "a" / "2.jpg").symlink_to("2.jpg")
    for folder in (pipes, links, loops):
        with pytest.raises(ValueError, match=r"2\.jpg: is named like an image, but is not a file"):
            list_images(folder)
    assert reason(pipes / "a" / "2.jpg") == "not a regular file"


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="permissions are others here")
def test_permissions_are_named():
    with folder_for_all() as root:
        folder = tree(Path(root), "a/1.jpg", "b/closed/2.jpg", "c/3.jpg")
        (folder / "c" / "3.jpg").write_bytes(encoded(picture(), "JPEG"))
        (folder / "c" / "3.jpg").chmod(0)
        for closed in (folder / "b" / "closed", folder):
            before = closed.stat().st_mode
            closed.chmod(0o311)
            with ordinary_user(), pytest.raises(PermissionError) as raised:
                list_images(folder)
            assert str(raised.value) == f"{closed}: no permission to read this folder"
            closed.chmod(before)
        with ordinary_user():
            assert len(list_images(folder)[0]) == 3
            assert reason(folder / "c" / "3.jpg") == "Permission denied"
        (folder / "c" / "3.jpg").chmod(0o644)
        assert decode_rgb(folder / "c" / "3.jpg").shape == (24, 32, 3)


# Decoding: kinds of images -------------------------------------------------------------------


@pytest.mark.parametrize("form", ["PNG", "BMP"])
def test_lossless_formats_come_out_exactly(tmp_path, form):
    data = encoded(picture(), form)
    decoded = decode_rgb(data)
    assert decoded.dtype == np.uint8
    assert np.array_equal(decoded, picture())
    path = tmp_path / "with spaces, 写真.png"
    path.write_bytes(data)
    for source in (path, str(path)):
        assert np.array_equal(decode_rgb(source), picture())
    decoded[0, 0, 0] = 7  # a copy of one's own


@pytest.mark.parametrize(("form", "bar"), [("JPEG", 2), ("WEBP", 6), ("GIF", 12)])
def test_lossy_formats_come_out_about_right(form, bar):
    settings = {"quality": 95, "subsampling": 0} if form == "JPEG" else {}
    found = decode_rgb(encoded(picture(), form, **settings))
    assert found.shape == picture().shape
    assert np.abs(found.astype(int) - picture()).mean() < bar


def test_the_jpeg_decoder_is_the_one_documented():
    """Accurate DCT, smooth upsampling: what Pillow gives when nothing is drafted."""
    data = encoded(picture(50, 70), "JPEG", quality=90, subsampling="4:2:0")
    assert np.array_equal(decode_rgb(data), np.asarray(Image.open(io.BytesIO(data))))


@pytest.mark.parametrize("form", ["PNG", "JPEG", "BMP"])
def test_grayscale_goes_into_three_channels(form):
    gray = picture()[..., 1]
    settings = {"quality": 100} if form == "JPEG" else {}
    decoded = decode_rgb(encoded(Image.fromarray(gray), form, **settings))
    assert decoded.shape == (*gray.shape, 3)
    assert (decoded == decoded[..., :1]).all()
    assert np.abs(decoded[..., 0].astype(int) - gray).max() <= (2 if form == "JPEG" else 0)


def test_black_and_white_goes_into_three_channels():
    found = decode_rgb(encoded(Image.fromarray(picture()[..., 0] > 100), "PNG"))
    assert np.array_equal(found[..., 2], (picture()[..., 0] > 100) * 255)


VALUES = np.array([[0, 255, 256, 0x7FFF], [0x80FF, 0xAB12, 0xFF00, 0xFFFF]], ">u2")


@pytest.mark.parametrize(
    ("color", "channels"), [(0, 1), (2, 3), (4, 2), (6, 4)], ids=["gray", "rgb", "gray+a", "rgba"]
)
def test_the_upper_half_of_16_bits_is_kept(color, channels):
    rows = [np.repeat(row, channels).astype(">u2").tobytes() for row in VALUES]
    found = decode_rgb(png(rows, VALUES.shape[1], 16, color))
    assert np.array_equal(found, np.repeat((VALUES >> 8).astype(np.uint8)[..., None], 3, axis=2))


def test_16_bit_grayscale_as_pillow_writes_it():
    values = np.arange(0, 65_536, 97, dtype=np.uint16)[:600].reshape(20, 30)
    found = decode_rgb(encoded(Image.fromarray(values), "PNG"))
    assert np.array_equal(found[..., 0], values >> 8)


def test_a_palette_gives_its_colours():
    colours = np.array([[250, 10, 20], [0, 200, 30], [7, 8, 9]], np.uint8)
    places = np.random.default_rng(0).integers(0, 3, (5, 6)).astype(np.uint8)
    rows = [row.tobytes() for row in places]
    palette = (b"PLTE", colours.tobytes())
    for transparent in (b"", b"\x00\x80\xff", b"\x00"):
        chunks = [palette, (b"tRNS", transparent)][: 2 if transparent else 1]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found = decode_rgb(png(rows, 6, 8, 3, *chunks))
        assert np.array_equal(found, colours[places])


@pytest.mark.parametrize("form", ["PNG", "WEBP"])
def test_alpha_is_dropped_not_blended(form):
    alpha = np.full(picture().shape[:2], 128, np.uint8)
    image = Image.fromarray(np.dstack([picture(), alpha]))
    found = decode_rgb(encoded(image, form, **{"lossless": True} if form == "WEBP" else {}))
    assert np.array_equal(found, picture())


def test_a_transparent_colour_is_one_like_the_others():
    transparent = (b"tRNS", struct.pack(">HHH", *map(int, picture()[0, 0])))
    rows = [row.tobytes() for row in picture()]
    assert np.array_equal(decode_rgb(png(rows, 32, 8, 2, transparent)), picture())


@pytest.mark.parametrize(
    "cmyk", [(0, 0, 0, 0), (255, 0, 0, 0), (0, 0, 0, 255), (200, 100, 50, 30), (10, 250, 128, 90)]
)
def test_cmyk_is_converted(cmyk):
    data = encoded(Image.new("CMYK", (16, 16), cmyk), "JPEG", quality=100)
    expected = [(255 - ink) * (255 - cmyk[3]) / 255 for ink in cmyk[:3]]
    found = decode_rgb(data)
    assert found.shape == (16, 16, 3)
    assert np.abs(found.mean((0, 1)) - expected).max() <= 3


@pytest.mark.parametrize("form", ["GIF", "WEBP", "PNG"])
def test_of_an_animation_the_first_frame_is_taken(form):
    frames = [Image.new("RGB", (16, 12), colour) for colour in ((200, 0, 0), (0, 0, 200))]
    data = encoded(frames[0], form, save_all=True, append_images=frames[1:], duration=100)
    with Image.open(io.BytesIO(data)) as image:
        assert image.n_frames == 2
    found = decode_rgb(data)
    assert found.shape == (12, 16, 3)
    assert np.abs(found.mean((0, 1)) - (200, 0, 0)).max() < 8


@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation_is_ignored(orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    turned = encoded(picture(), "JPEG", exif=exif)
    with Image.open(io.BytesIO(turned)) as image:
        assert image.getexif()[0x0112] == orientation
    assert np.array_equal(decode_rgb(turned), decode_rgb(encoded(picture(), "JPEG")))


def test_the_content_decides_not_the_name(tmp_path):
    path = tmp_path / "really a png.jpg"
    path.write_bytes(encoded(picture(), "PNG"))
    assert np.array_equal(decode_rgb(path), picture())


# Decoding: what can't be ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "empty"),
        (b"\0", "none of JPEG, PNG, BMP, GIF, WEBP"),
        (b"hello, I am text" * 50, "none of JPEG, PNG, BMP, GIF, WEBP"),
        (b"<html><body>404</body></html>", "none of JPEG, PNG, BMP, GIF, WEBP"),
        (encoded(picture(), "TIFF"), "none of JPEG, PNG, BMP, GIF, WEBP"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "none of JPEG, PNG"),
        (b"\xff\xd8\xff\xe0", "its header is damaged"),
        (encoded(picture(), "PNG")[:20], "truncated"),
    ],
    ids=["empty", "a byte", "text", "html", "tiff", "postscript", "jpeg's start", "png's start"],
)
def test_what_is_no_image(tmp_path, data, reason):
    path = tmp_path / "named so.jpg"
    path.write_bytes(data)
    with pytest.raises(ImageError) as raised:
        decode_rgb(path)
    assert str(raised.value).startswith(f"{path}: {reason}")
    with pytest.raises(ImageError, match=f"these bytes: {reason}"):
        decode_rgb(data)


NOISE = np.random.default_rng(0).integers(0, 256, (40, 60, 3), dtype=np.uint8)
COMPLETE = {form: encoded(NOISE, form) for form in images.FORMATS}


@pytest.mark.parametrize("share", [0.2, 0.5, 0.9, 0.99])
@pytest.mark.parametrize("form", images.FORMATS)
def test_truncated_images_are_found(form, share):
    data = COMPLETE[form][: int(len(COMPLETE[form]) * share)]
    with pytest.raises(ImageError) as raised:
        decode_rgb(data)
    if form in ("JPEG", "PNG", "BMP") and share >= 0.5:  # not within the header
        assert raised.value.reason == "truncated"


def test_corrupt_pixels_are_found():
    first = COMPLETE["PNG"].index(b"IDAT") + 4
    for place in range(first, len(COMPLETE["PNG"]) - 16, 501):
        data = bytearray(COMPLETE["PNG"])
        data[place] ^= 1
        with pytest.raises(ImageError, match="these bytes: damaged"):
            decode_rgb(bytes(data))


@given(
    form=st.sampled_from(images.FORMATS),
    flips=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(1, 255)), max_size=4),
    length=st.floats(0, 1),
)
def test_whatever_the_damage_there_are_pixels_or_a_reason(form, flips, length):
    data = bytearray(COMPLETE[form])
    for place, change in flips:
        data[int(place * len(data))] ^= change
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("ignore")
        patch.setattr(images, "MAX_PIXELS", 10**6)
        with contextlib.suppress(ImageError):
            decoded = decode_rgb(bytes(data[: int(len(data) * length)]))
            assert decoded.dtype == np.uint8
            assert decoded.ndim == 3
            assert decoded.shape[2] == 3


def test_a_small_file_may_not_hold_a_huge_image(monkeypatch):
    bomb = png([b""], 30_000, 8, 2).replace(
        struct.pack(">IIBBBBB", 30_000, 1, 8, 2, 0, 0, 0),
        struct.pack(">IIBBBBB", 30_000, 30_000, 8, 2, 0, 0, 0),
    )
    header = bomb[12:29]
    bomb = bomb.replace(bomb[29:33], struct.pack(">I", zlib.crc32(header)), 1)
    assert len(bomb) < 200
    with pytest.raises(ImageError, match="far more pixels, 89,478,485 at most"):
        decode_rgb(bomb)
    data = encoded(picture(), "PNG")
    monkeypatch.setattr(images, "MAX_PIXELS", 24 * 32)
    assert decode_rgb(data).shape == (24, 32, 3)
    monkeypatch.setattr(images, "MAX_PIXELS", 24 * 32 - 1)
    with pytest.raises(ImageError, match="32 x 24 pixels, 767 at most"):
        decode_rgb(data)


def test_files_that_are_none(tmp_path):
    assert reason(tmp_path / "gone.jpg") == "No such file or directory"
    assert reason(tmp_path) == "not a regular file"


def test_an_error_survives_the_way_between_processes():
    error = pickle.loads(pickle.dumps(ImageError("x.jpg", "empty")))
    assert isinstance(error, ImageError)
    assert str(error) == "x.jpg: empty"
    assert error.reason == "empty"
