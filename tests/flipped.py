"""A zip archive with one bit changed inside its largest member."""

import io
import struct
import zipfile


def flipped(whole: bytes) -> bytes:
    """The archive, whose directory and headers are as they were."""
    with zipfile.ZipFile(io.BytesIO(whole)) as archive:
        member = max(archive.infolist(), key=lambda info: info.compress_size)
    names = struct.unpack("<HH", whole[member.header_offset + 26 : member.header_offset + 30])
    changed = bytearray(whole)
    changed[member.header_offset + 30 + sum(names) + member.compress_size // 2] ^= 1
    return bytes(changed)
