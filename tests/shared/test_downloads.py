"""Downloads from a local server that cuts, corrupts, stalls, changes files and answers errors."""

import errno
import gzip
import hashlib
import io
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import tarfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared import downloads
from shared.downloads import DownloadError, Remote, fetch, load_cifar10, load_fashion_mnist

ROOT = Path(downloads.__file__).parent.parent
DATA = np.random.default_rng(0).bytes(300_000)
OTHER = np.random.default_rng(1).bytes(300_000)
DATE = "Wed, 21 Oct 2015 07:28:00 GMT"

pytestmark = pytest.mark.timeout(60)


@dataclass(frozen=True)
class Answer:
    """How the server treats one request; by default as it should."""

    status: int | None = None  # an error instead of the file
    location: str | None = None  # a redirection there
    ranges: bool = True  # False: sends the whole file whatever was asked for
    conditions: bool = True  # False: sends the range whatever If-Range says
    shift: int = 0  # sends a range that starts so much later
    length: bool = True  # says how long the body is
    chunked: bool = False
    cut: int | None = None  # closes the connection after so many bytes of the body
    reset: bool = False  # closes it as a crash would
    corrupt: bool = False  # flips a bit in the last byte
    extra: bytes = b""  # sent after the file
    stall: bool = False  # then sends nothing further
    drip: bool = False  # sends a byte now and then


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *args):
        pass

    def do_GET(self):
        server = self.server
        server.requests.append((self.headers["Range"], self.headers["If-Range"]))
        answer = server.answers.pop(0) if server.answers else server.usual
        if answer.status:
            self.send_error(answer.status)
            return
        if answer.location:
            self.send_response(302)
            self.send_header("Location", answer.location)
            self.end_headers()
            return
        if not self._headers(answer):
            return
        body = self.data[self.start :] + answer.extra
        if answer.corrupt:
            body = body[:-1] + bytes([body[-1] ^ 1])
        self._body(body if answer.cut is None else body[: answer.cut], answer)

    def _headers(self, answer) -> bool:
        server, self.start, self.data = self.server, 0, self.server.files[self.path]
        asked = re.fullmatch(r"bytes=(\d+)-", self.headers["Range"] or "")
        known = self.headers["If-Range"] in (None, server.etag, server.date)
        if asked and answer.ranges and (known or not answer.conditions):
            self.start = int(asked[1]) + answer.shift
            if self.start >= len(self.data):
                self.send_error(416)
                return False
            self.send_response(206)
            last = len(self.data) - 1
            self.send_header("Content-Range", f"bytes {self.start}-{last}/{len(self.data)}")
        else:
            self.send_response(200)
        for name, value in (("ETag", server.etag), ("Last-Modified", server.date)):
            if value:
                self.send_header(name, value)
        if answer.length and not answer.chunked:
            self.send_header("Content-Length", str(len(self.data) - self.start))
        if answer.chunked:
            self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        return True

    def _body(self, body, answer):
        self.server.sent.append(len(body))
        if answer.drip:
            for byte in body[:200]:
                self.wfile.write(bytes([byte]))
                if self.server.released.wait(0.02):
                    return
        elif answer.chunked:
            for start in range(0, len(body), 50_000):
                chunk = body[start : start + 50_000]
                self.wfile.write(b"%x\r\n" % len(chunk) + chunk + b"\r\n")
            if answer.cut is None:
                self.wfile.write(b"0\r\n\r\n")
        else:
            self.wfile.write(body)
        if answer.stall:
            self.server.released.wait(20)
        if answer.reset:
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def shutdown_request(self, request):
        self.close_request(request)  # without a farewell, so that a reset is one

    def handle_error(self, request, address):
        pass  # clients that hang up are what this is about

    def reset(self) -> "Server":
        self.files = {"/file.bin": DATA}
        self.etag, self.date = '"one"', None
        self.answers: list[Answer] = []
        self.usual = Answer()
        self.requests: list[tuple[str | None, str | None]] = []
        self.sent: list[int] = []
        return self

    def change(self, data: bytes, *, etag: str | None = '"two"', date: str | None = None):
        self.files["/file.bin"], self.etag, self.date = data, etag, date

    def url(self, path: str = "/file.bin") -> str:
        return f"http://127.0.0.1:{self.server_port}{path}"


@pytest.fixture(scope="module")
def running():
    server = Server(("127.0.0.1", 0), Handler)
    server.released = threading.Event()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("no_proxy", "127.0.0.1")
        yield server
    server.released.set()
    server.shutdown()
    server.server_close()
    thread.join(10)
    assert not thread.is_alive()


@pytest.fixture
def server(running):
    return running.reset()


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def get(server: Server, folder: Path, data: bytes = DATA, **given) -> bytes:
    """Fetch the file, which must come out as `data`."""
    usual = {"sha256": digest(data), "size": len(data), "timeout": 10.0, "pause": 0.0}
    path = fetch(server.url(), folder / "file.bin", **usual | given)
    assert path == folder / "file.bin"
    return path.read_bytes()


def left(folder: Path) -> dict[str, int]:
    """Size of each file but the lock."""
    return {p.name: p.stat().st_size for p in folder.iterdir() if p.name != ".downloads.lock"}


def ranges(server: Server) -> list[int | None]:
    """Where each request asked to begin, None for the whole file."""
    return [asked and int(asked.removeprefix("bytes=")[:-1]) for asked, _ in server.requests]


# What goes well ------------------------------------------------------------------------------


def test_a_file_is_downloaded_once(server, tmp_path):
    folder = tmp_path / "new" / "cäche 写真"
    assert get(server, folder) == DATA
    assert left(folder) == {"file.bin": len(DATA)}
    assert get(server, folder) == DATA
    assert ranges(server) == [None]


@pytest.mark.parametrize("answer", [Answer(length=False), Answer(chunked=True)])
def test_a_body_of_unknown_length(server, tmp_path, answer):
    server.usual = answer
    assert get(server, tmp_path) == DATA


def test_a_redirection_keeps_the_range(server, tmp_path):
    server.answers = [Answer(cut=1000), Answer(location=server.url())]
    assert get(server, tmp_path) == DATA
    assert ranges(server) == [None, 1000, 1000]


def test_a_damaged_file_in_the_cache_is_replaced(server, tmp_path):
    for damaged in (DATA[:-1], DATA[:-1] + b"?", b""):
        (tmp_path / "file.bin").write_bytes(damaged)
        assert get(server, tmp_path) == DATA
    assert len(server.requests) == 3


# Taken up again ------------------------------------------------------------------------------


@given(cuts=st.lists(st.integers(0, len(DATA)), max_size=6), known=st.booleans())
@settings(max_examples=40)
def test_no_byte_comes_twice_however_often_the_connection_ends(running, cuts, known):
    server = running.reset()
    server.etag = '"one"' if known else None
    server.answers = [Answer(cut=cut) for cut in cuts]
    with TemporaryDirectory() as folder:
        assert get(server, Path(folder), attempts=len(cuts) + 1) == DATA
        assert left(Path(folder)) == {"file.bin": len(DATA)}
    assert sum(server.sent) == len(DATA)
    asked = [condition for _, condition in server.requests if condition]
    assert set(asked) <= ({'"one"'} if known else set())


@pytest.mark.parametrize(
    "broken",
    [
        Answer(cut=200_000, reset=True),
        Answer(cut=200_000, chunked=True),
        Answer(cut=200_000, length=False),
        Answer(cut=200_000, stall=True),
    ],
    ids=["reset", "chunked", "unknown length", "stalled"],
)
def test_ways_in_which_a_connection_ends(server, tmp_path, broken):
    server.answers = [broken]
    start = time.monotonic()
    assert get(server, tmp_path, timeout=0.5) == DATA
    assert time.monotonic() - start < 5
    first, second = ranges(server)
    assert first is None
    assert second is None or 0 < second <= 200_000  # a reset may take along what was on its way
    if not broken.reset:
        assert second == 200_000


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
def test_passing_errors_are_tried_again(server, tmp_path, status):
    server.answers = [Answer(status=status), Answer(cut=9), Answer(status=status)]
    assert get(server, tmp_path) == DATA
    assert ranges(server) == [None, None, 9, 9]


def test_the_next_call_takes_up_what_is_left(server, tmp_path):
    server.answers = [Answer(cut=100), Answer(cut=200)]
    with pytest.raises(DownloadError, match=r"ended after 300 of 300000 .* 2 of 2, 300 of 300000"):
        get(server, tmp_path, attempts=2)
    assert left(tmp_path) == {".file.bin.partial": 300, ".file.bin.version": len('"one"')}
    assert get(server, tmp_path) == DATA
    assert ranges(server) == [None, 100, 300]
    assert left(tmp_path) == {"file.bin": len(DATA)}


def test_an_interruption_is_taken_up(server, tmp_path, monkeypatch):
    chunks = downloads._chunks

    def interrupted(response, timeout):
        yield next(chunks(response, timeout))
        raise KeyboardInterrupt

    monkeypatch.setattr(downloads, "_chunks", interrupted)
    with pytest.raises(KeyboardInterrupt):
        get(server, tmp_path)
    monkeypatch.undo()
    kept = left(tmp_path)[".file.bin.partial"]
    assert 0 < kept < len(DATA)
    assert get(server, tmp_path) == DATA
    assert ranges(server) == [None, kept]


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no such signal here")
def test_a_killed_process_is_taken_up(server, tmp_path):
    """It holds the lock while it hangs, and the lock ends with it."""
    program = """
import sys
from pathlib import Path
from shared.downloads import fetch

fetch(sys.argv[1], Path(sys.argv[2]), sha256=sys.argv[3], size=int(sys.argv[4]))
"""
    server.answers = [Answer(cut=200_000, stall=True)]
    arguments = [server.url(), str(tmp_path / "file.bin"), digest(DATA), str(len(DATA))]
    process = subprocess.Popen([sys.executable, "-c", program, *arguments], cwd=ROOT)
    try:
        until = time.monotonic() + 40
        while left(tmp_path).get(".file.bin.partial", 0) < 100_000:
            assert time.monotonic() < until
            assert process.poll() is None
            time.sleep(0.02)
    finally:
        process.kill()
        process.wait(10)
    kept = left(tmp_path)[".file.bin.partial"]
    assert get(server, tmp_path) == DATA
    assert ranges(server) == [None, kept]


def test_a_process_killed_before_the_last_step_downloads_nothing(server, tmp_path):
    (tmp_path / ".file.bin.partial").write_bytes(DATA)
    assert get(server, tmp_path) == DATA
    assert server.requests == []


def test_a_part_longer_than_the_file_is_dropped(server, tmp_path):
    (tmp_path / ".file.bin.partial").write_bytes(DATA + b"?")
    assert get(server, tmp_path) == DATA
    assert ranges(server) == [None]


def test_two_at_once_download_once(server, tmp_path):
    server.answers = [Answer(cut=200_000, stall=True)]
    with ThreadPoolExecutor() as pool:
        calls = [pool.submit(get, server, tmp_path, timeout=0.5) for _ in range(3)]
        assert [call.result() for call in calls] == [DATA] * 3
    assert sum(server.sent) == len(DATA)


# Begun anew ----------------------------------------------------------------------------------


def test_a_server_that_ignores_ranges(server, tmp_path):
    server.usual = Answer(ranges=False)
    server.answers = [Answer(cut=100_000)]
    assert get(server, tmp_path) == DATA
    assert ranges(server) == [None, 100_000]
    assert server.sent == [100_000, len(DATA)]


@pytest.mark.parametrize(
    ("before", "after", "condition"),
    [
        ({"etag": '"one"'}, {"etag": '"two"'}, '"one"'),
        ({"etag": None, "date": DATE}, {"etag": None, "date": DATE.replace("21", "22")}, DATE),
        ({"etag": 'W/"one"', "date": DATE}, {"etag": 'W/"two"', "date": None}, DATE),
    ],
    ids=["ETag", "date", "a weak ETag and a date"],
)
def test_a_file_that_changes_in_between(server, tmp_path, before, after, condition):
    server.change(OTHER, **before)
    server.answers = [Answer(cut=100_000)]
    with pytest.raises(DownloadError, match="ended after 100000"):
        get(server, tmp_path, attempts=1)
    server.change(DATA, **after)
    assert get(server, tmp_path, attempts=1) == DATA
    assert server.requests == [(None, None), ("bytes=100000-", condition)]
    assert server.sent == [100_000, len(DATA)]


@pytest.mark.parametrize(
    ("etag", "answer"),
    [(None, Answer()), ('W/"weak"', Answer()), ('"one"', Answer(conditions=False))],
    ids=["no version", "a weak ETag", "conditions ignored"],
)
def test_a_changed_file_that_nobody_tells_of(server, tmp_path, etag, answer):
    """Then the checksum finds it, and the whole file comes anew."""
    server.change(OTHER, etag=etag)
    server.answers = [Answer(cut=100_000)]
    server.usual = answer
    with pytest.raises(DownloadError):
        get(server, tmp_path, attempts=1)
    server.change(DATA, etag=etag and etag.replace("one", "two"))
    assert get(server, tmp_path) == DATA
    assert ranges(server) == [None, 100_000, None]


def test_contents_that_are_wrong_once(server, tmp_path):
    server.answers = [Answer(corrupt=True)]
    assert get(server, tmp_path) == DATA
    assert ranges(server) == [None, None]


def test_another_range_than_asked_for(server, tmp_path):
    server.answers = [Answer(cut=1000), Answer(shift=5)]
    assert get(server, tmp_path) == DATA
    assert ranges(server) == [None, 1000, None]


def test_a_range_that_is_refused(server, tmp_path):
    server.answers = [Answer(cut=1000), Answer(status=416)]
    assert get(server, tmp_path) == DATA
    assert ranges(server) == [None, 1000, None]


# What fails ----------------------------------------------------------------------------------


def fails(server: Server, folder: Path, says: str, **given) -> None:
    with pytest.raises(DownloadError, match=says) as raised:
        get(server, folder, **given)
    assert str(raised.value).startswith(f"{server.url()}: ")
    assert "\n" not in str(raised.value)
    assert not (folder / "file.bin").exists()


@pytest.mark.parametrize("status", [400, 401, 403, 404, 410])
def test_final_errors_are_not_tried_again(server, tmp_path, status):
    server.answers = [Answer(status=status)]
    fails(server, tmp_path, f"the server answers {status}")
    assert len(server.requests) == 1


def test_what_has_arrived_outlives_a_final_error(server, tmp_path):
    server.answers = [Answer(cut=1000), Answer(status=404)]
    fails(server, tmp_path, "404")
    assert get(server, tmp_path) == DATA
    assert ranges(server) == [None, 1000, 1000]


def test_a_lasting_error_ends_after_the_last_attempt(server, tmp_path):
    server.usual = Answer(status=503)
    fails(server, tmp_path, "the server answers 503 .* attempt 3 of 3", attempts=3)
    assert len(server.requests) == 3


def test_pauses_double(server, tmp_path, monkeypatch):
    pauses = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    server.usual = Answer(status=500)
    fails(server, tmp_path, "attempt 4 of 4", attempts=4, pause=0.5)
    assert pauses == [0.5, 1.0, 2.0]


def test_contents_that_stay_wrong(server, tmp_path):
    server.usual = Answer(corrupt=True)
    fails(server, tmp_path, f"do not have the SHA-256 {digest(DATA)}; attempt 2 of 5, 0 of 300000")
    assert len(server.requests) == 2
    assert left(tmp_path) == {}


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (Answer(cut=200_000, stall=True), "no answer for 0.3 s; attempt 2 of 2, 200000 of 300000"),
        (Answer(cut=0, stall=True), "no answer for 0.3 s; attempt 2 of 2, 0 of 300000"),
        (Answer(drip=True), r"bytes in .* s are too slow; attempt 2 of 2, \d+ of 300000"),
    ],
    ids=["stalls", "stalls at once", "drips"],
)
def test_a_server_that_stalls(server, tmp_path, answer, says):
    server.answers = [answer, replace(answer, cut=0 if answer.cut is not None else None)]
    start = time.monotonic()
    fails(server, tmp_path, says, timeout=0.3, attempts=2)
    assert time.monotonic() - start < 5


@pytest.mark.parametrize("answer", [Answer(), Answer(ranges=False)])
def test_a_file_of_another_size(server, tmp_path, answer):
    """Such as the page of a hotel's network: what has arrived before stays."""
    server.answers = [Answer(cut=1000), answer]
    server.change(DATA, etag=None)
    with pytest.raises(DownloadError):
        get(server, tmp_path, attempts=1)
    server.change(DATA[:200_000], etag=None)
    fails(server, tmp_path, "has 200000 bytes, not the 300000 expected")
    assert len(server.requests) == 2
    server.change(DATA, etag=None)
    assert get(server, tmp_path) == DATA
    assert ranges(server)[2] == 1000


def test_more_than_the_file(server, tmp_path):
    server.usual = Answer(length=False, extra=b"more" * 99_999)
    fails(server, tmp_path, "sends more than the 300000 bytes expected")
    assert len(server.requests) == 1
    assert sum(left(tmp_path).values()) <= len(DATA) + 10
    server.usual = Answer()
    assert get(server, tmp_path) == DATA


def test_nobody_answers(server, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(DownloadError, match=r"[Rr]efused; attempt 2 of 2"):
        fetch(
            f"http://127.0.0.1:{port}/x",
            tmp_path / "x",
            **{"sha256": "0", "size": 1, "attempts": 2, "pause": 0.0},
        )


def test_a_connection_that_ends_without_an_answer(server, tmp_path, monkeypatch):
    monkeypatch.setattr(Handler, "do_GET", lambda self: self.server.requests.append((None, None)))
    fails(server, tmp_path, "without response; attempt 3 of 3", attempts=3)
    assert len(server.requests) == 3


def test_a_full_disk_is_not_the_server_s_fault(server, tmp_path, monkeypatch):
    class Full(io.FileIO):
        def write(self, chunk):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    opened = {".file.bin.partial": Full}
    monkeypatch.setattr(
        downloads, "open", lambda p, mode: opened.get(p.name, open)(p, mode), raising=False
    )
    with pytest.raises(OSError, match="No space left"):
        get(server, tmp_path)
    assert len(server.requests) == 1


@pytest.mark.parametrize("url", ["file:///etc/hostname", "ftp://127.0.0.1/x", "x.bin"])
def test_addresses_of_other_kinds(tmp_path, url):
    with pytest.raises(ValueError, match="only http and https"):
        fetch(url, tmp_path / "x", sha256="0", size=1)
    assert list(tmp_path.iterdir()) == []


def test_at_least_one_attempt(server, tmp_path):
    with pytest.raises(ValueError, match="attempts must be at least 1, not 0"):
        get(server, tmp_path, attempts=0)


# Data sets -----------------------------------------------------------------------------------


def publish(server: Server, path: str, data: bytes) -> Remote:
    server.files[path] = data
    return Remote(server.url(path), digest(data), len(data))


@pytest.fixture
def cifar(server, monkeypatch):
    """A small CIFAR-10 in the form of the real one: its rows, label first."""
    random = np.random.default_rng(0)
    rows = random.integers(0, 256, (6, 20, 3073), dtype=np.uint8)
    rows[..., 0] = random.integers(0, 10, (6, 20))
    names = [*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin"]
    files = {name: part.tobytes() for name, part in zip(names, rows, strict=True)}
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        folder = tarfile.TarInfo("cifar-10-batches-bin")
        folder.type = tarfile.DIRTYPE
        archive.addfile(folder)
        for name, data in {**files, "readme.html": b"<html>"}.items():
            member = tarfile.TarInfo(f"cifar-10-batches-bin/{name}")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    monkeypatch.setattr(downloads, "CIFAR10_ROWS", 20)
    remote = publish(server, "/cifar-10-binary.tar.gz", buffer.getvalue())
    monkeypatch.setattr(downloads, "CIFAR10", remote)
    return rows


def test_cifar10_is_loaded(server, cifar, tmp_path):
    server.answers = [Answer(cut=10_000)]
    loaded = load_cifar10(tmp_path / "cache")
    assert list(loaded) == ["train", "test"]
    for split, rows in (("train", cifar[:5].reshape(100, 3073)), ("test", cifar[5])):
        x, y = loaded[split]
        assert (x.shape, x.dtype, y.dtype) == ((len(rows), 32, 32, 3), np.uint8, np.int64)
        assert np.array_equal(y, rows[:, 0])
        # Row-major planes: red, then green, then blue.
        assert x[3, 4, 5].tolist() == [rows[3, 1 + p * 1024 + 4 * 32 + 5] for p in range(3)]
        assert np.array_equal(x.transpose(0, 3, 1, 2).reshape(len(rows), -1), rows[:, 1:])
    (tmp_path / "cache" / "cifar-10-binary.tar.gz").unlink()
    again = load_cifar10(tmp_path / "cache")
    assert np.array_equal(again["train"][0], loaded["train"][0])
    assert len(server.requests) == 2


def test_two_processes_may_unpack_cifar10(cifar, tmp_path, monkeypatch):
    unpack = downloads.unpack

    def slower_than_another(archive, folder, **limits):
        unpack(archive, folder, **limits)
        return unpack(archive, folder, **limits)

    monkeypatch.setattr(downloads, "unpack", slower_than_another)
    assert np.array_equal(load_cifar10(tmp_path)["test"][1], cifar[5, :, 0])


def test_a_damaged_cifar10_is_found(cifar, tmp_path):
    load_cifar10(tmp_path)
    (path,) = tmp_path.glob("*/*/data_batch_3.bin")
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with pytest.raises(ValueError, match=r"data_batch_3\.bin: has 61459 bytes, not 61460"):
        load_cifar10(tmp_path)
    path.write_bytes(b"\x0a" + whole[1:])
    with pytest.raises(ValueError, match=r"data_batch_3\.bin: has labels above 9"):
        load_cifar10(tmp_path)


def idx(array: np.ndarray) -> bytes:
    sizes = b"".join(struct.pack(">I", size) for size in array.shape)
    return bytes([0, 0, 8, array.ndim]) + sizes + array.tobytes()


@pytest.fixture
def fashion(server, monkeypatch):
    """A small Fashion-MNIST: images and labels of each split, and a way to publish others."""
    random = np.random.default_rng(0)
    arrays = {
        split: (
            random.integers(0, 256, (count, 28, 28), dtype=np.uint8),
            random.integers(0, 10, count, dtype=np.uint8),
        )
        for split, count in (("train", 30), ("test", 10))
    }

    def offer(split: str, images: bytes, labels: bytes) -> None:
        files = {"images": images, "labels": labels}
        remotes = [publish(server, f"/{split}-{n}.gz", gzip.compress(d)) for n, d in files.items()]
        monkeypatch.setitem(downloads.FASHION_MNIST, split, tuple(remotes))
        monkeypatch.setitem(downloads.FASHION_MNIST_ROWS, split, len(arrays[split][0]))

    for split, (images, labels) in arrays.items():
        offer(split, idx(images), idx(labels))
    return arrays, offer


def test_fashion_mnist_is_loaded(server, fashion, tmp_path):
    arrays, _ = fashion
    loaded = load_fashion_mnist(tmp_path)
    assert list(loaded) == ["train", "test"]
    for split, (images, labels) in arrays.items():
        x, y = loaded[split]
        assert (x.dtype, y.dtype) == (np.uint8, np.int64)
        assert np.array_equal(x, images[..., None])
        assert np.array_equal(y, labels)
    x[0, 0, 0, 0] = 1  # an array of one's own
    load_fashion_mnist(tmp_path)
    assert len(server.requests) == 4


@pytest.mark.parametrize(
    "wrong",
    [
        lambda images: idx(images[:-1]),
        lambda images: idx(images)[:-1],
        lambda images: idx(images) + b"?",
        lambda images: idx(images.reshape(-1, 784)),
        lambda images: b"\0\0\x0d" + idx(images)[3:],
        lambda images: b"",
    ],
    ids=["too few", "truncated", "too many", "other axes", "floats", "empty"],
)
def test_a_file_that_is_not_what_its_name_says(fashion, tmp_path, wrong):
    arrays, offer = fashion
    images, labels = arrays["test"]
    offer("test", wrong(images), idx(labels))
    says = r"test-images\.gz: is no IDX file of uint8 \(10, 28, 28\)"
    with pytest.raises(ValueError, match=says):
        load_fashion_mnist(tmp_path)


def test_what_is_published_is_named_completely():
    remotes = [downloads.CIFAR10, *sum(downloads.FASHION_MNIST.values(), ())]
    assert len({remote.url for remote in remotes}) == len({r.sha256 for r in remotes}) == 5
    assert all(re.fullmatch("[0-9a-f]{64}", remote.sha256) for remote in remotes)
