"""Archives from elsewhere, unpacked without trusting them: .tar, .tar.gz and .zip.

Only regular files and folders come out, below the target and nowhere else; what an archive says
about modes, owners and times is not taken over. Both limits count what really comes out, since the
sizes in an archive's headers are claims. The target appears complete or not at all.

The checks are made here and not by tarfile's "data" filter (PEP 706): that lets links through which
stay inside, knows no limits and nothing of .zip, and came with Python 3.11.4 only.

A damaged .tar.gz or .zip is found by its checksums. A .tar has them for its plain headers alone: a
flipped bit within a file of it, or within a name that is long or not ASCII, goes unnoticed here.
"""

from __future__ import annotations

import gzip
import stat
import tarfile
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import BinaryIO

from shared.atomic import whole_folder

_CHUNK = 1 << 16
_END = 22 + 0xFFFF  # bytes: the last record of a zip, and a comment
_MORE = 0xFFFF  # members, or that many: a larger record has the number
_RECORD = tarfile.RECORDSIZE  # tarfile reads ahead by so much
_HEADERS = 1 << 16  # bytes that the headers of one member may take; long names need 4 KiB
_PADDING = 1 << 20  # bytes of zeros that may end a tar


class ArchiveError(ValueError):
    """An archive that is damaged or refused: which member, and why."""


class _Refused(Exception):
    """Why, before it is known which archive."""


def unpack(archive: Path, target: Path, *, max_files: int, max_bytes: int) -> Path:
    """Unpack `archive` into the new folder `target` and return it.

    The first bytes decide what kind of archive it is. max_files: members at most, folders included.
    max_bytes: bytes at most that the files have together, unpacked.

    Raises ArchiveError, naming the member and the reason, for a path that is absolute or contains
    "..", for links, devices, sparse and encrypted files, for a member that is there twice, for
    compression other than deflate within .zip, for more than a limit allows, for damage and for an
    archive without any member; FileExistsError where `target` exists. Then nothing is left behind.
    """
    archive, target = Path(archive), Path(target)
    if target.exists():
        raise FileExistsError(f"{target}: exists already, archives are unpacked into a new folder")
    with open(archive, "rb") as file:
        read = _reader(file.read(512))
        if read is None:
            raise ArchiveError(f"{archive}: is no .tar, .tar.gz or .zip archive")
        file.seek(0)
        with whole_folder(target) as folder:
            out = _Output(folder, max_files, max_bytes)
            try:
                read(file, out)
            except _Refused as refused:
                raise ArchiveError(f"{archive}: {refused}") from None
            except Exception as error:  # damaged headers may raise anything in tarfile and zipfile
                raise ArchiveError(f"{archive}: is damaged: {_words(error)}") from error
            if not out.files:
                raise ArchiveError(f"{archive}: has no members")
    return target


def _reader(start: bytes) -> Callable[[BinaryIO, _Output], None] | None:
    if start.startswith((b"PK\3\4", b"PK\5\6")):
        return _read_zip
    if start.startswith(b"\x1f\x8b"):
        return _read_tar_gz
    if start[257:262] == b"ustar":
        return _read_tar
    return None


class _Output:
    """What has come out of an archive, kept within its folder and its limits."""

    def __init__(self, folder: Path, max_files: int, max_bytes: int):
        self.folder = folder
        self.max_files, self.max_bytes = max_files, max_bytes
        self.files = self.bytes = 0

    def add(self, name: str, size: int, opened: Callable[[], BinaryIO] | None) -> None:
        """Write a file of `size` bytes, or make a folder where `opened` is None."""
        self.files += 1
        if self.files > self.max_files:
            raise _Refused(f"member {name!r}: is one more than {self.max_files} members")
        parts = _parts(name)
        path = self.folder.joinpath(*parts)
        try:
            if opened is None:
                path.mkdir(parents=True, exist_ok=True)
            elif not parts:
                raise _Refused(f"member {name!r}: is a file without a name")
            else:
                path.parent.mkdir(parents=True, exist_ok=True)
                with opened() as source, open(path, "xb") as file:
                    self._copy(name, size, source, file)
        except FileExistsError:
            raise _Refused(f"member {name!r}: is there twice") from None
        except _Refused:
            raise
        except Exception as error:  # damaged data may raise anything in tarfile and zipfile
            raise _Refused(f"member {name!r}: {_words(error)}") from error

    def _copy(self, name: str, size: int, source: BinaryIO, file: BinaryIO) -> None:
        written = 0
        while chunk := source.read(_CHUNK):
            written += len(chunk)
            self.bytes += len(chunk)
            if self.bytes > self.max_bytes:
                raise _Refused(f"member {name!r}: goes beyond {self.max_bytes} bytes in all")
            file.write(chunk)
        if written != size:
            raise _Refused(f"member {name!r}: has {written} bytes, not the {size} of its header")


def _parts(name: str) -> tuple[str, ...]:
    """The parts of a member's path, none of which leads elsewhere on any operating system."""
    windows = PureWindowsPath(name)  # it parts at "/" as well as at "\\"
    if windows.anchor:
        raise _Refused(f"member {name!r}: has an absolute path")
    if ".." in windows.parts:
        raise _Refused(f"member {name!r}: has '..' in its path")
    return PurePosixPath(name).parts


def _words(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


# Zip ----------------------------------------------------------------------------------------


def _read_zip(file: BinaryIO, out: _Output) -> None:
    with zipfile.ZipFile(file) as archive:
        found, listed = len(archive.infolist()), _listed(file)
        if listed not in (found, _MORE):  # zipfile takes a header that swallows the next for whole
            raise _Refused(f"its directory lists {listed} members, and {found} are there")
        for member in archive.infolist():
            name = member.filename
            if stat.S_IFMT(member.external_attr >> 16) not in (0, stat.S_IFREG, stat.S_IFDIR):
                raise _Refused(f"member {name!r}: is a link or a device")
            if member.flag_bits & 1:
                raise _Refused(f"member {name!r}: is encrypted")
            # zipfile expands a chunk of any other kind whole, whatever size that comes to.
            if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise _Refused(f"member {name!r}: is compressed by another method than deflate")
            opened = None if member.is_dir() else partial(archive.open, member)
            out.add(name, member.file_size, opened)


def _listed(file: BinaryIO) -> int:
    """How many members the end of a zip says that there are; _MORE where that is told elsewhere."""
    file.seek(max(0, file.seek(0, 2) - _END))
    end = file.read().rpartition(b"PK\5\6")[2]
    return int.from_bytes(end[6:8], "little")


# Tar ----------------------------------------------------------------------------------------


class _Metered:
    """A stream of which no more than `allowed` further bytes may be read.

    tarfile reads whatever a header claims into memory, for long names say, and a few bytes of gzip
    expand to a thousand times as many.
    """

    def __init__(self, file: BinaryIO):
        self.file, self.count, self.allowed = file, 0, 0
        self.last = b""

    def allow(self, size: int) -> None:
        self.allowed = size + 2 * _RECORD

    def read(self, size: int) -> bytes:
        data = self.file.read(size)
        self.count += len(data)
        self.allowed -= len(data)
        if self.allowed < 0:
            raise _Refused(f"more headers or padding than fit, at byte {self.count}")
        self.last = (self.last + data)[-4 * _RECORD :]
        return data

    def since(self, offset: int) -> bytes:
        """What was read from `offset` on, which must be in the last few records."""
        return self.last[len(self.last) - (self.count - offset) :]


def _read_tar_gz(file: BinaryIO, out: _Output) -> None:
    with gzip.GzipFile(fileobj=file) as plain:
        _read_tar(plain, out)


def _read_tar(file: BinaryIO, out: _Output) -> None:
    stream = _Metered(file)
    stream.allow(_HEADERS)
    with tarfile.open(fileobj=stream, mode="r|", encoding="utf-8") as archive:
        while member := archive.next():
            opened = None
            if not member.isdir():
                _check_tar_file(member)
                opened = partial(archive.extractfile, member)
                stream.allow(member.size)
            out.add(member.name, member.size, opened)
            stream.allow(_HEADERS)
        # tarfile takes a damaged header for the end. At the true one there is nothing but zeros,
        # and reading all of them lets gzip compare its checksum.
        rest = stream.since(archive.offset)
        stream.allow(_PADDING)
        while chunk := stream.read(_CHUNK):
            rest += chunk
    if len(rest) < tarfile.BLOCKSIZE or rest.strip(b"\0"):
        raise _Refused(f"is truncated or damaged at byte {archive.offset}")


def _check_tar_file(member: tarfile.TarInfo) -> None:
    if member.issym() or member.islnk():
        raise _Refused(f"member {member.name!r}: is a link")
    if not member.isreg():
        raise _Refused(f"member {member.name!r}: is no regular file")
    if member.issparse():
        raise _Refused(f"member {member.name!r}: is a sparse file")
    if member.size < 0:
        raise _Refused(f"member {member.name!r}: has a negative size")
