"""Archives are unpacked complete or not at all, and never outside their target."""

import gzip
import io
import os
import stat
import struct
import tarfile
import threading
import time
import warnings
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shared import archives
from shared.archives import ArchiveError, unpack

KINDS = ("tar", "tar.gz", "zip")
EVERY_KIND = pytest.mark.parametrize("kind", KINDS)
FILES = {"a/one.txt": b"one" * 100, "a/b/two.bin": bytes(range(256)) * 9, "ä ö/三.txt": b""}
ROOM = {"max_files": 20, "max_bytes": 100_000}


def packed(kind: str, files: dict[str, bytes]) -> bytes:
    """An archive with `files`; a name that ends with a slash is a folder."""
    buffer = io.BytesIO()
    if kind == "zip":
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, data in files.items():
                archive.writestr(zipfile.ZipInfo(name), data, zipfile.ZIP_DEFLATED)
        return buffer.getvalue()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, data in files.items():
            add_to_tar(archive, name, data)
    return compressed(kind, buffer.getvalue())


def add_to_tar(archive: tarfile.TarFile, name: str, data: bytes = b"", **fields) -> None:
    member = tarfile.TarInfo(name)
    member.type = tarfile.DIRTYPE if name.endswith("/") else tarfile.REGTYPE
    member.size = len(data)
    for field, value in fields.items():
        setattr(member, field, value)
    archive.addfile(member, io.BytesIO(data))


def tar_of(name: str, data: bytes = b"", **fields) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        add_to_tar(archive, "before.txt", b"before")
        add_to_tar(archive, name, data, **fields)
    return buffer.getvalue()


def compressed(kind: str, tar: bytes) -> bytes:
    return gzip.compress(tar, mtime=0) if kind == "tar.gz" else tar


def contents(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def everything(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*")}


def refused(folder: Path, data: bytes, says: str, **room) -> None:
    """`data` is refused with one line that says why, and nothing is left behind."""
    archive = folder / "archive"
    archive.write_bytes(data)
    with pytest.raises(ArchiveError, match=says) as raised:
        unpack(archive, folder / "target", **ROOM | room)
    assert str(raised.value).startswith(f"{archive}: ")
    assert "\n" not in str(raised.value)
    assert everything(folder) == {"archive"}


# What comes out ------------------------------------------------------------------------------


@EVERY_KIND
def test_files_come_out_as_they_were(tmp_path, kind):
    archive = tmp_path / "any name"
    archive.write_bytes(packed(kind, {"a/": b"", "empty/": b"", **FILES}))
    target = unpack(archive, tmp_path / "new" / "tärget", **ROOM)
    assert target == tmp_path / "new" / "tärget"
    assert contents(target) == FILES
    assert (target / "empty").is_dir()
    assert sorted(path.name for path in target.parent.iterdir()) == ["tärget"]


@pytest.mark.parametrize("size", [0, 1, 511, 512, 513, 10_239, 10_240, 65_536, 65_537])
@EVERY_KIND
def test_files_of_any_size_come_out(tmp_path, kind, size):
    """Around the sizes of a block, a record and a chunk."""
    files = {"first": os.urandom(size), "second": os.urandom(size), "third": b"end"}
    (tmp_path / "archive").write_bytes(packed(kind, files))
    target = unpack(tmp_path / "archive", tmp_path / "t", max_files=3, max_bytes=2 * size + 3)
    assert contents(target) == files


def test_the_folder_itself_may_be_a_member(tmp_path):
    """As `tar c .` writes it."""
    (tmp_path / "archive").write_bytes(packed("tar", {"./": b"", "./x": b"x"}))
    assert contents(unpack(tmp_path / "archive", tmp_path / "target", **ROOM)) == {"x": b"x"}


def test_long_names_come_out(tmp_path):
    files = {"/".join(["folder" * 10] * 8 + ["name" * 30]): b"x"}
    for number, form in enumerate((tarfile.PAX_FORMAT, tarfile.GNU_FORMAT)):
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w", format=form) as archive:
            add_to_tar(archive, next(iter(files)), b"x")
        (tmp_path / "archive").write_bytes(buffer.getvalue())
        target = unpack(tmp_path / "archive", tmp_path / f"target{number}", **ROOM)
        assert contents(target) == files


def test_modes_are_not_taken_over(tmp_path):
    data = tar_of("run", b"#!", mode=0o6777)
    (tmp_path / "archive").write_bytes(data)
    target = unpack(tmp_path / "archive", tmp_path / "target", **ROOM)
    mode = (target / "run").stat().st_mode
    assert stat.S_IMODE(mode) & (stat.S_ISUID | stat.S_ISGID | 0o111) == 0


def test_an_existing_target_is_left_alone(tmp_path):
    (tmp_path / "archive").write_bytes(packed("zip", FILES))
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "mine").write_text("mine")
    with pytest.raises(FileExistsError, match="exists already"):
        unpack(tmp_path / "archive", tmp_path / "target", **ROOM)
    assert contents(tmp_path / "target") == {"mine": b"mine"}


def test_an_interruption_leaves_nothing(tmp_path, monkeypatch):
    read = gzip.GzipFile.read

    def interrupted(self, size):
        if self.tell():
            raise KeyboardInterrupt
        return read(self, size)

    monkeypatch.setattr(gzip.GzipFile, "read", interrupted)
    big = {"big": os.urandom(50_000)}
    (tmp_path / "archive").write_bytes(packed("tar.gz", big))
    with pytest.raises(KeyboardInterrupt):
        unpack(tmp_path / "archive", tmp_path / "target", **ROOM)
    assert everything(tmp_path) == {"archive"}


def test_the_target_is_never_seen_half_full(tmp_path):
    files = {str(number): b"x" for number in range(400)}
    (tmp_path / "archive").write_bytes(packed("tar", files))
    target, seen = tmp_path / "target", []

    def watch():
        while not target.exists():
            pass
        seen.append(len(list(target.iterdir())))

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    unpack(tmp_path / "archive", target, max_files=400, max_bytes=400)
    watcher.join(10)
    assert seen == [400]


# What is refused: paths ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("../out", r"member '\.\./out': has '\.\.'"),
        ("a/../../out", r"has '\.\.'"),
        ("a/../b", r"has '\.\.'"),
        ("..", r"has '\.\.'"),
        ("..\\out", r"has '\.\.'"),
        ("/out", "member '/out': has an absolute path"),
        ("//host/share/out", "absolute"),
        ("C:out", "absolute"),
        ("C:\\out", "absolute"),
        ("\\out", "absolute"),
        (".", "without a name"),
        ("x" * 300, "name too long"),
    ],
)
@EVERY_KIND
def test_paths_that_lead_elsewhere(tmp_path, kind, name, says):
    refused(tmp_path, packed(kind, {"before": b"x", name: b"y"}), says)


PARTS = st.sampled_from(["..", ".", "", "a", "b", "C:", "...", ".. ", "~", "a b", "ä", "\u2024."])
NAMES = st.builds(
    lambda parts, slashes: "".join(p + s for p, s in zip(parts, slashes, strict=False)),
    st.lists(PARTS | st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=4)),
    st.lists(st.sampled_from(["/", "\\", "//", ""]), min_size=8, max_size=8),
)


@given(kind=st.sampled_from(KINDS), names=st.lists(NAMES.filter(bool), min_size=1, unique=True))
def test_whatever_the_names_nothing_lands_outside(kind, names):
    """Complete below the target, or refused and absent."""
    with TemporaryDirectory() as folder:
        root = Path(folder) / "root"
        root.mkdir()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # a zip with a name twice
            files = {name: b"" if name.endswith("/") else b"data" for name in names}
            (root / "archive").write_bytes(packed(kind, files))
        try:
            target = unpack(root / "archive", root / "target", max_files=99, max_bytes=9_999)
        except ArchiveError:
            assert everything(Path(folder)) == {"root", "root/archive"}
            return
        assert sorted(path.name for path in root.iterdir()) == ["archive", "target"]
        assert len(list(Path(folder).iterdir())) == 1
        for path in target.rglob("*"):
            assert path.resolve().is_relative_to(target.resolve())
        assert sum(path.is_file() for path in target.rglob("*")) == sum(map(bool, files.values()))


# What is refused: kinds of members -----------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"type": tarfile.SYMTYPE, "linkname": "before.txt"}, "member 'it': is a link"),
        ({"type": tarfile.SYMTYPE, "linkname": "/etc"}, "member 'it': is a link"),
        ({"type": tarfile.LNKTYPE, "linkname": "before.txt"}, "member 'it': is a link"),
        ({"type": tarfile.CHRTYPE, "devmajor": 1, "devminor": 5}, "is no regular file"),
        ({"type": tarfile.BLKTYPE}, "is no regular file"),
        ({"type": tarfile.FIFOTYPE}, "is no regular file"),
        ({"type": b"Z"}, "is no regular file"),
        (
            {"pax_headers": {"GNU.sparse.map": "0,1", "GNU.sparse.size": "99999999"}},
            "is a sparse file",
        ),
        ({"pax_headers": {"size": "-600"}}, "negative size|damaged"),
    ],
    ids=lambda value: str(value)[:40],
)
@pytest.mark.parametrize("kind", ["tar", "tar.gz"])
def test_members_of_a_tar_that_are_no_plain_files(tmp_path, kind, fields, says):
    refused(tmp_path, compressed(kind, tar_of("it", **fields)), says)


@pytest.mark.parametrize("mode", [stat.S_IFLNK, stat.S_IFIFO, stat.S_IFCHR, stat.S_IFBLK])
def test_members_of_a_zip_that_are_no_plain_files(tmp_path, mode):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        member = zipfile.ZipInfo("it")
        member.external_attr = (mode | 0o777) << 16
        archive.writestr(member, "before.txt")
    refused(tmp_path, buffer.getvalue(), "member 'it': is a link or a device")


def patched_zip(files: dict[str, bytes], *, local: int, central: int, form: str, value) -> bytes:
    """The zip with a field of its first member changed in both of its headers."""
    data = bytearray(packed("zip", files))
    struct.pack_into(form, data, local, value)
    struct.pack_into(form, data, data.index(b"PK\1\2") + central, value)
    return bytes(data)


def test_an_encrypted_member(tmp_path):
    data = patched_zip(FILES, local=6, central=8, form="<H", value=1)
    refused(tmp_path, data, "member 'a/one.txt': is encrypted")


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_compression_that_can_not_be_limited(tmp_path, method):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as archive:
        archive.writestr("it", b"x")
    refused(tmp_path, buffer.getvalue(), "member 'it': is compressed by another method")


@pytest.mark.parametrize(
    "names", [("x", "x"), ("x", "./x"), ("x", "x/y"), ("x/y", "x"), ("x", "x/y/z"), ("x/y", "x/")]
)
@EVERY_KIND
def test_a_name_that_is_there_twice(tmp_path, kind, names):
    buffer = io.BytesIO()
    if kind == "zip":
        with zipfile.ZipFile(buffer, "w") as archive, warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            for name in names:
                archive.writestr(name, b"" if name.endswith("/") else b"1")
        data = buffer.getvalue()
    else:
        with tarfile.open(fileobj=buffer, mode="w") as archive:
            for name in names:
                add_to_tar(archive, name, b"" if name.endswith("/") else b"1")
        data = compressed(kind, buffer.getvalue())
    if names == ("x/y", "x/"):  # a folder after what is in it is no second one
        (tmp_path / "archive").write_bytes(data)
        assert contents(unpack(tmp_path / "archive", tmp_path / "t", **ROOM)) == {"x/y": b"1"}
    else:
        refused(tmp_path, data, "is there twice|Not a directory")


# What is refused: sizes ----------------------------------------------------------------------


@EVERY_KIND
def test_the_limits_are_exact(tmp_path, kind):
    files = {"one": b"1" * 1000, "two": b"2" * 1000}
    data = packed(kind, files)
    refused(tmp_path, data, "member 'two': is one more than 1 members", max_files=1)
    refused(tmp_path, data, "member 'two': goes beyond 1999 bytes", max_bytes=1999)
    target = unpack(tmp_path / "archive", tmp_path / "target", max_files=2, max_bytes=2000)
    assert contents(target) == files


@EVERY_KIND
def test_folders_count_too(tmp_path, kind):
    folders = {f"{number}/": b"" for number in range(30)}
    refused(tmp_path, packed(kind, folders), "member '20/?': is one more than 20 members")


@pytest.mark.parametrize("kind", ["tar.gz", "zip"])
def test_a_bomb_is_not_expanded(tmp_path, kind, monkeypatch):
    """100 MB of zeros in 100 kB: no more than the limit is ever written."""
    data = packed(kind, {"bomb": bytes(100_000_000)})
    assert len(data) < 200_000
    written = []

    class Counted(io.FileIO):
        def write(self, chunk):
            written.append(len(chunk))
            return super().write(chunk)

    def opened(path, mode):
        return Counted(path, mode) if mode == "xb" else open(path, mode)

    monkeypatch.setattr(archives, "open", opened, raising=False)
    start = time.monotonic()
    refused(tmp_path, data, "member 'bomb': goes beyond 100000 bytes")
    assert 0 < sum(written) <= 100_000
    assert time.monotonic() - start < 5


def test_a_zip_whose_header_lies_about_the_size(tmp_path):
    """Sizes in headers are claims: too small a one lets no more out, and is found."""
    data = patched_zip({"it": b"x" * 9_000}, local=22, central=24, form="<I", value=10)
    refused(tmp_path, data, "member 'it': Bad CRC", max_bytes=5_000)
    data = patched_zip({"it": b"x" * 9_000}, local=22, central=24, form="<I", value=99_000)
    refused(tmp_path, data, "member 'it': has 9000 bytes, not the 99000")


def test_headers_of_a_tar_are_limited(tmp_path):
    """tarfile would read all of it into memory before anybody sees a member."""
    data = tar_of("it", pax_headers={"comment": "x" * 5_000_000})
    refused(tmp_path, gzip.compress(data), "more headers or padding than fit")


def test_endless_padding_of_a_tar(tmp_path):
    data = packed("tar", FILES) + bytes(5_000_000)
    refused(tmp_path, gzip.compress(data), "more headers or padding than fit")
    # While that of large records is nothing unusual.
    (tmp_path / "archive").write_bytes(packed("tar", FILES) + bytes(500_000))
    assert contents(unpack(tmp_path / "archive", tmp_path / "target", **ROOM)) == FILES


# What is refused: damage ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "data", [b"", b"x", b"no archive at all" * 99, bytes(10_240), b"7z\xbc\xaf\x27\x1c" * 200]
)
def test_what_is_no_archive(tmp_path, data):
    refused(tmp_path, data, r"is no \.tar, \.tar\.gz or \.zip archive")


def test_a_missing_archive(tmp_path):
    with pytest.raises(FileNotFoundError, match="gone"):
        unpack(tmp_path / "gone", tmp_path / "new" / "target", **ROOM)
    assert everything(tmp_path) == set()


@pytest.mark.parametrize(
    "data",
    [packed("zip", {}), gzip.compress(b"no tar"), gzip.compress(b""), gzip.compress(bytes(10_240))],
    ids=["empty zip", "gzip of text", "gzip of nothing", "gzip of an empty tar"],
)
def test_an_archive_without_members(tmp_path, data):
    refused(tmp_path, data, "has no members|is damaged|is truncated")


PACKED = {kind: packed(kind, FILES) for kind in KINDS}


@given(kind=st.sampled_from(KINDS), share=st.floats(0, 1, exclude_max=True))
def test_a_truncated_archive_is_refused(kind, share):
    data = PACKED[kind]
    data = data[: int(len(data) * share)]
    outcome = result(data)
    # A tar that lacks only zeros is complete: one block of them says that it ends here.
    complete = kind == "tar" and len(data.rstrip(b"\0")) < len(data) - 512 and outcome == FILES
    assert outcome is None or complete


@example(kind="zip", place=0.830078125, bit=6)  # a comment that holds the next member's header
@given(kind=st.sampled_from(KINDS), place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_a_flipped_bit_is_noticed_or_changes_nothing(kind, place, bit):
    data = bytearray(PACKED[kind])
    data[int(place * len(data))] ^= 1 << bit
    outcome = result(bytes(data))
    if kind == "tar" and outcome is not None:  # which has few checksums, see shared/archives.py
        assert sorted(map(len, outcome.values())) == sorted(map(len, FILES.values()))
    else:
        assert outcome in (None, FILES)


@given(st.sampled_from([b"PK\3\4", b"\x1f\x8b\x08", b""]), st.binary(max_size=2000))
def test_noise_is_refused(start, noise):
    assert result(start + noise) is None


def result(data: bytes) -> dict[str, bytes] | None:
    """What comes out, or None if it is refused and nothing is left."""
    with TemporaryDirectory() as folder:
        folder = Path(folder)
        (folder / "archive").write_bytes(data)
        try:
            return contents(unpack(folder / "archive", folder / "target", **ROOM))
        except ArchiveError:
            assert everything(folder) == {"archive"}
            return None
