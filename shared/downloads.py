"""CIFAR-10 and Fashion-MNIST from their canonical archives, and the download that they need.

`fetch` downloads one file with a known size and checksum. What has arrived stays when a connection
breaks or the process dies, and the next attempt, of this process or a later one, asks for the rest
alone. The file appears under its name only when its checksum is right.

Nothing here executes what it loads: CIFAR-10 comes in its binary version, not the pickled one.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import re
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPException, HTTPResponse
from math import prod
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

import numpy as np

from shared.archives import unpack

try:
    import fcntl
except ImportError:  # Windows: there, two processes must not fetch one file at the same time
    fcntl = None

_CHUNK = 1 << 16
_SLOWEST = 1024  # bytes a second; slower than this over the time-out is as good as stalled
_PASSING = {408, 425, 429, 500, 502, 503, 504}  # HTTP statuses after which another try makes sense


@dataclass(frozen=True)
class Remote:
    """A file as it was published: where, and what proves that it is the same."""

    url: str
    sha256: str
    size: int


# SHA-256 and sizes are those that TensorFlow Datasets records (url_checksums/cifar10.txt and
# fashion_mnist.txt); torchvision has the same SHA-256 of Fashion-MNIST (in
# prototype/datasets/_builtin/mnist.py). The publishers give MD5 alone, on
# https://www.cs.toronto.edu/~kriz/cifar.html and https://github.com/zalandoresearch/fashion-mnist.
CIFAR10 = Remote(
    "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
    "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
    170_052_171,
)
_FASHION_MNIST = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com"  # has no https
FASHION_MNIST = {
    "train": (
        Remote(
            f"{_FASHION_MNIST}/train-images-idx3-ubyte.gz",
            "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
            26_421_880,
        ),
        Remote(
            f"{_FASHION_MNIST}/train-labels-idx1-ubyte.gz",
            "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
            29_515,
        ),
    ),
    "test": (
        Remote(
            f"{_FASHION_MNIST}/t10k-images-idx3-ubyte.gz",
            "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
            4_422_102,
        ),
        Remote(
            f"{_FASHION_MNIST}/t10k-labels-idx1-ubyte.gz",
            "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
            5_148,
        ),
    ),
}
CIFAR10_FILES = {
    "train": tuple(f"data_batch_{number}.bin" for number in range(1, 6)),
    "test": ("test_batch.bin",),
}
CIFAR10_ROWS = 10_000  # in each file
FASHION_MNIST_ROWS = {"train": 60_000, "test": 10_000}


# Data sets ----------------------------------------------------------------------------------


def load_cifar10(cache: Path) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return "train" (50,000) and "test" (10,000): x uint8 (n, 32, 32, 3), y int64 (n,).

    The archive is downloaded and unpacked into the folder `cache` on the first call, 350 MB in all.
    Krizhevsky (2009), "Learning Multiple Layers of Features from Tiny Images".

    Raises DownloadError, ArchiveError, and ValueError for files that are not what was unpacked.
    """
    folder = Path(cache) / f"cifar-10-binary-{CIFAR10.sha256[:12]}"
    if not folder.is_dir():
        archive = _fetch(CIFAR10, Path(cache))
        with suppress(FileExistsError):  # another process was faster
            unpack(archive, folder, max_files=16, max_bytes=200_000_000)
    splits = {}
    for split, names in CIFAR10_FILES.items():
        rows = np.concatenate([_cifar_rows(folder / "cifar-10-batches-bin" / n) for n in names])
        x = rows[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
        splits[split] = np.ascontiguousarray(x), rows[:, 0].astype(np.int64)
    return splits


def _cifar_rows(path: Path) -> np.ndarray:
    """Label and 3 x 32 x 32 values of each image, uint8 (rows, 3073)."""
    width = 1 + 3 * 32 * 32
    data = np.fromfile(path, np.uint8)
    if data.size != CIFAR10_ROWS * width:
        raise ValueError(f"{path}: has {data.size} bytes, not {CIFAR10_ROWS * width}: remove it")
    rows = data.reshape(-1, width)
    if rows[:, 0].max() > 9:
        raise ValueError(f"{path}: has labels above 9: remove it")
    return rows


def load_fashion_mnist(cache: Path) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return "train" (60,000) and "test" (10,000): x uint8 (n, 28, 28, 1), y int64 (n,).

    Four files are downloaded into the folder `cache` on the first call, 31 MB in all, and their
    checksums compared on every call. Xiao, Rasul and Vollgraf (2017), arXiv:1708.07747.

    Raises DownloadError, and ValueError for a file that is not what its name says.
    """
    splits = {}
    for split, (images, labels) in FASHION_MNIST.items():
        count = FASHION_MNIST_ROWS[split]
        x = _read_idx(_fetch(images, Path(cache)), (count, 28, 28))
        y = _read_idx(_fetch(labels, Path(cache)), (count,))
        splits[split] = x[..., None], y.astype(np.int64)
    return splits


def _read_idx(path: Path, shape: tuple[int, ...]) -> np.ndarray:
    """Read gzipped IDX: two zeros, type 8 (uint8), number of axes, their big-endian lengths, data.

    As described with the original MNIST, http://yann.lecun.com/exdb/mnist/.
    """
    header = struct.pack(f">HBB{len(shape)}I", 0, 8, len(shape), *shape)
    expected = len(header) + prod(shape)
    with gzip.open(path) as file:
        data = file.read(expected + 1)
    if not data.startswith(header) or len(data) != expected:
        raise ValueError(f"{path}: is no IDX file of uint8 {shape}")
    return np.frombuffer(data, np.uint8, offset=len(header)).reshape(shape).copy()


def _fetch(remote: Remote, cache: Path) -> Path:
    target = cache / remote.url.rpartition("/")[2]
    return fetch(remote.url, target, sha256=remote.sha256, size=remote.size)


# Download -----------------------------------------------------------------------------------


class DownloadError(RuntimeError):
    """A file that could not be downloaded: which, and the last reason."""


class _Interrupted(Exception):
    """Why an attempt ended; another one may succeed."""


def fetch(
    url: str,
    target: Path,
    *,
    sha256: str,
    size: int,
    timeout: float = 30.0,
    attempts: int = 5,
    pause: float = 1.0,
) -> Path:
    """Download `url` to the file `target` unless it is there, and return its path.

    sha256, size (bytes): of the whole file. A `target` that has them is left alone; any other is
    replaced. timeout: seconds without an answer, or with less than 1 KiB/s, after which an attempt
    ends. attempts: in all; before the second one passes `pause` seconds, before each further one
    twice as many.

    An attempt takes up what the last one left (`.<name>.partial` beside the target), with the
    file's ETag or date as a condition: if the server ignores ranges or the file has changed since,
    it begins anew. Wrong contents are downloaded a second time, not a third.

    Processes that fetch into one folder take turns; a lock ends with its process.

    Raises DownloadError with the reason: at once for what another attempt would not mend (404, a
    file of another size), else after the last attempt. What has arrived is kept for the next call.
    ValueError for a URL that is neither http nor https, and for attempts below 1. OSError where
    files can't be written.
    """
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"{url}: only http and https are downloaded")
    if attempts < 1:
        raise ValueError(f"attempts must be at least 1, not {attempts}")
    target = Path(target)
    if _is(target, sha256, size):
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with _alone(target.parent):
        if not _is(target, sha256, size):  # else another process was faster
            _download(url, target, sha256, size, timeout, attempts, pause)
    return target


def _download(
    url: str, target: Path, sha256: str, size: int, timeout: float, attempts: int, pause: float
) -> None:
    part = _Partial(target)
    wrong = 0
    for attempt in range(attempts):
        if attempt:
            time.sleep(pause * 2 ** (attempt - 1))
        try:
            _receive(url, part, size, timeout)
        except _Interrupted as interrupted:
            reason = str(interrupted)
            continue
        if _is(part.path, sha256, size):
            os.replace(part.path, target)
            part.forget()
            return
        reason, wrong = f"the contents do not have the SHA-256 {sha256}", wrong + 1
        part.forget()
        if wrong == 2:
            break
    raise DownloadError(
        f"{url}: {reason}; attempt {attempt + 1} of {attempts}, "
        f"{part.size()} of {size} bytes are kept for the next"
    )


class _Partial:
    """What has arrived of a file, and what the server said to recognise this version of it by."""

    def __init__(self, target: Path):
        self.path = target.with_name(f".{target.name}.partial")
        self.note = target.with_name(f".{target.name}.version")

    def size(self) -> int:
        return self.path.stat().st_size if self.path.exists() else 0

    def forget(self) -> None:
        self.path.unlink(missing_ok=True)
        self.note.unlink(missing_ok=True)

    def begin(self, response: HTTPResponse) -> None:
        """Start anew; the order matters to a process that is killed in between."""
        self.forget()
        etag = response.headers.get("ETag", "")
        # A weak ETag does not promise equal bytes, and a range must not be asked for with it.
        strong = etag if etag.startswith('"') else ""
        self.note.write_text(strong or response.headers.get("Last-Modified", ""), "utf-8")

    def conditions(self) -> dict[str, str]:
        """Headers that ask for the rest. Without a version the checksum alone has to decide."""
        if not self.size():
            return {}
        version = self.note.read_text("utf-8") if self.note.exists() else ""
        return {"Range": f"bytes={self.size()}-"} | ({"If-Range": version} if version else {})


def _receive(url: str, part: _Partial, size: int, timeout: float) -> None:
    """One attempt: ask for what is missing and append it."""
    if part.size() > size:
        part.forget()
    if part.size() == size:
        return
    with _answer(Request(url, headers=part.conditions()), part, timeout) as response:
        _check(url, response, part, size)
        if response.status == 200:
            part.begin(response)
        with open(part.path, "ab") as file:
            for chunk in _chunks(response, timeout):
                if file.tell() + len(chunk) > size:
                    raise DownloadError(f"{url}: sends more than the {size} bytes expected")
                file.write(chunk)
    if part.size() < size:
        raise _Interrupted(f"the connection ended after {part.size()} of {size} bytes")


def _answer(request: Request, part: _Partial, timeout: float) -> HTTPResponse:
    try:
        return urlopen(request, timeout=timeout)
    except HTTPError as error:
        error.close()
        reason = f"the server answers {error.code} {error.reason}"
        if error.code == 416:  # this range does not exist: what is here is no part of that file
            part.forget()
        elif error.code not in _PASSING:
            raise DownloadError(f"{request.full_url}: {reason}") from None
        raise _Interrupted(reason) from None
    except URLError as error:
        raise _Interrupted(_words(error.reason, timeout)) from None
    except (OSError, HTTPException) as error:
        raise _Interrupted(_words(error, timeout)) from None


def _check(url: str, response: HTTPResponse, part: _Partial, size: int) -> None:
    """Compare what the answer promises with what was asked for."""
    if response.status == 206:
        found = re.fullmatch(
            r"bytes (\d+)-\d+/(\d+|\*)", response.headers.get("Content-Range", "").strip()
        )
        if not found or int(found[1]) != part.size():
            part.forget()
            raise _Interrupted("the server sends another range than was asked for")
        total = found[2]
    elif response.status == 200:
        total = response.headers.get("Content-Length", "*")
    else:
        raise DownloadError(f"{url}: the server answers {response.status}, not 200")
    if total not in ("*", str(size)):
        raise DownloadError(
            f"{url}: has {total} bytes, not the {size} expected: it is another file by now, or "
            "something else answers in its place"
        )


def _chunks(response: HTTPResponse, timeout: float) -> Iterator[bytes]:
    """What arrives, as it arrives, as long as that is not too slow."""
    since, received = time.monotonic(), 0
    try:
        while chunk := response.read1(_CHUNK):
            yield chunk
            received += len(chunk)
            passed = time.monotonic() - since
            if passed > timeout:
                if received < _SLOWEST * passed:
                    raise _Interrupted(f"{received} bytes in {passed:.0f} s are too slow")
                since, received = time.monotonic(), 0
    except (OSError, HTTPException) as error:
        raise _Interrupted(_words(error, timeout)) from None


def _words(error: Exception | str, timeout: float) -> str:
    if isinstance(error, TimeoutError):
        return f"no answer for {timeout:g} s"
    return str(error) or type(error).__name__


def _is(path: Path, sha256: str, size: int) -> bool:
    if not path.is_file() or path.stat().st_size != size:
        return False
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == sha256


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    if fcntl is None:
        yield
        return
    with open(folder / ".downloads.lock", "ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
