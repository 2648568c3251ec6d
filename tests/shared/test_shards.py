"""Shards: what their files hold, and a conversion that is interrupted, taken up and refused."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import tarfile
import time
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import numpy as np
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from shared import conversion, shards
from shared.conversion import convert, crc32c, main
from shared.images import decode_rgb, list_images
from shared.photos import make_photos
from shared.shards import MANIFEST, map_arrays, open_shards, read_tar

ROOT = Path(__file__).resolve().parents[2]
FORMS = ("tar", "tfrecord", "arrays")
IMAGES, SAMPLES = 14, 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return make_photos(tmp_path_factory.mktemp("photos"), images=IMAGES, size=48, seed=2)


@pytest.fixture(scope="module", params=FORMS)
def made(request, folder, tmp_path_factory):
    """Form, folder and shards of a whole conversion."""
    target = tmp_path_factory.mktemp("shards") / request.param
    return (
        request.param,
        target,
        convert(folder, target, form=request.param, samples=SAMPLES, workers=1),
    )


def contents(target: Path) -> dict[str, bytes]:
    """All that is not hidden."""
    return {p.name: p.read_bytes() for p in target.iterdir() if not p.name.startswith(".")}


def samples_of(form: str, shard: shards.Shard) -> list[tuple[int, int, bytes]]:
    """Rows, labels and images of a shard, read without the code under test where that is short."""
    if form == "arrays":
        pixels, entries = map_arrays(*shard.files)
        ends = np.cumsum(entries[:, 2:].prod(1) * 3)
        parts = np.split(np.asarray(pixels), ends)
        return [
            (row, label, part.reshape(height, width, 3).tobytes())
            for (row, label, height, width), part in zip(entries.tolist(), parts, strict=False)
        ]
    if form == "tfrecord":
        return [parse_example(record) for record in parse_records(shard.files[0].read_bytes())]
    with tarfile.open(shard.files[0], "r:") as archive:
        files = [(member.name, archive.extractfile(member).read()) for member in archive]
    return [
        (int(image[0].removesuffix(".jpg")), int(label[1]), image[1])
        for image, label in zip(files[::2], files[1::2], strict=True)
    ]


def parse_records(data: bytes) -> list[bytes]:
    records = []
    while data:
        (size,) = struct.unpack_from("<Q", data)
        for part, crc in ((data[:8], data[8:12]), (data[12 : 12 + size], data[12 + size :][:4])):
            masked = (int.from_bytes(crc, "little") - 0xA282EAD8) % 2**32
            assert (masked << 15 | masked >> 17) % 2**32 == slow_crc(part)
        records.append(data[12 : 12 + size])
        data = data[16 + size :]
    return records


def slow_crc(data: bytes) -> int:
    """CRC-32C bit by bit."""
    crc = 2**32 - 1
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 2**32 - 1


def parse_example(record: bytes) -> tuple[int, int, bytes]:
    """The three features, found by their names; TensorFlow reads them in another test."""
    image = record[record.index(b"\xff\xd8\xff") : record.index(b"\xff\xd9") + 2]
    numbers = []
    for name in (b"image/row", b"image/class/label"):
        value = record[record.index(name) + len(name) :]
        numbers.append(varint(value[value.index(b"\x0a") + 2 :]))
    return *numbers, image


def varint(data: bytes) -> int:
    value = shift = 0
    for byte in data:
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value
    raise AssertionError


# What the files hold ----------------------------------------------------------------------------


def test_every_image_is_there_once_with_the_label_of_its_folder(made, folder):
    form, _, manifest = made
    paths, labels, classes = list_images(folder)
    samples = {row: rest for s in manifest.shards for row, *rest in samples_of(form, s)}
    assert sorted(samples) == list(range(IMAGES))
    assert sum(len(samples_of(form, shard)) for shard in manifest.shards) == IMAGES
    for row, (path, label) in enumerate(zip(paths, labels, strict=True)):
        image = decode_rgb(path).tobytes() if form == "arrays" else path.read_bytes()
        assert samples[row] == [label, image]
    assert manifest.classes == tuple(classes)
    assert (manifest.size, manifest.skipped) == (IMAGES, ())


def test_shards_have_their_size_and_mix_classes(made):
    form, _, found = made
    assert [len(shard.rows) for shard in found.shards] == [4, 4, 4, 2]
    for shard in found.shards:
        samples = samples_of(form, shard)
        assert [row for row, *_ in samples] == shard.rows.tolist()
        assert sorted(shard.rows) != shard.rows.tolist()
        assert len({label for _, label, _ in samples}) > 1
        assert shard.damage() is None


def test_several_processes_write_the_same_bytes(made, folder, tmp_path):
    form, target, _ = made
    convert(folder, tmp_path / "x", form=form, samples=SAMPLES, workers=2)
    assert contents(tmp_path / "x") == contents(target)


def test_a_tar_is_as_the_webdataset_convention_has_it(folder, tmp_path):
    manifest = convert(folder, tmp_path / "x", form="tar", samples=IMAGES, workers=1)
    path = manifest.shards[0].files[0]
    assert path.name == "shard-00000.tar"
    assert path.stat().st_size % 512 == 0
    with tarfile.open(path, "r:") as archive:
        members = archive.getmembers()
        assert archive.format is not None
        assert archive.pax_headers == {}
    assert all(re.fullmatch(r"\d{9}\.(jpg|cls)", member.name) for member in members)
    assert {(m.mode, m.uid, m.gid, m.mtime, m.uname, m.type) for m in members} == {
        (0o644, 0, 0, 0, "", tarfile.REGTYPE)
    }
    assert list(read_tar(path)) == samples_of("tar", manifest.shards[0])


@pytest.mark.parametrize(
    ("data", "crc"),
    [  # RFC 3720, appendix B.4, and the check value of the catalogue of CRCs
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (bytes(range(31, -1, -1)), 0x113FDB5C),
        (b"123456789", 0xE3069283),
        (b"", 0),
    ],
)
def test_the_checksum_is_crc32c(data, crc):
    assert crc32c(data) == crc


@given(st.binary(max_size=70))
def test_the_checksum_is_that_of_the_slow_way(data):
    assert crc32c(data) == slow_crc(data)


@given(value=st.integers(0, 2**63 - 1))
def test_numbers_are_varints(value):
    assert varint(conversion._varint(value)) == value


# A tar from elsewhere ---------------------------------------------------------------------------


def tar(*members: tuple[str, bytes, dict]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for name, data, changes in members:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            for key, value in changes.items():
                setattr(member, key, value)
            archive.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


GOOD = (("000000003.jpg", b"image", {}), ("000000003.cls", b"7", {}))


def test_a_tar_by_another_writer_is_read(tmp_path):
    path = tmp_path / "x.tar"
    path.write_bytes(tar(*GOOD))
    assert list(read_tar(path)) == [(3, 7, b"image")]


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (tar(("../000000003.jpg", b"image", {})), "is no sample's .jpg"),
        (tar(("/000000003.jpg", b"image", {})), "is no sample's .jpg"),
        (
            tar(("000000003.jpg", b"", {"type": tarfile.SYMTYPE, "linkname": "/etc/hostname"})),
            "is no sample's .jpg",
        ),
        (tar(("000000003.jpg", b"", {"type": tarfile.FIFOTYPE})), "is no sample's .jpg"),
        (tar(("000000003.jpg", b"", {})), "is no sample's .jpg"),
        (tar(GOOD[1], GOOD[0]), "member '000000003.cls' is no sample's .jpg"),
        (tar(GOOD[0], ("000000004.cls", b"7", {})), "sample 000000003 has no label"),
        (tar(GOOD[0], ("000000003.cls", b"seven", {})), "sample 000000003 has no label"),
        (tar(GOOD[0]), "at byte 1024: end of file header"),
        (tar(*GOOD)[:1024], "at byte 1024: empty header"),
        (tar(*GOOD)[:900], "is truncated within '000000003.jpg'"),
        (tar(*GOOD)[:2048], "at byte 2048: empty header"),
        (tar(*GOOD).replace(b"000000003.jpg", b"000000004.jpg"), "at byte 0: bad checksum"),
        (b"", "at byte 0: empty header"),
        (b"\x1f\x8b" + bytes(600), "at byte 0: "),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_no_tar_of_samples_is_refused(tmp_path, data, says):
    path = tmp_path / "x.tar"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=re.escape(says)) as raised:
        list(read_tar(path))
    assert str(raised.value).startswith(f"{path}: ")


def test_a_header_that_claims_too_much_takes_no_memory(tmp_path):
    member = tarfile.TarInfo("000000003.jpg")
    member.size = 1 << 29
    (tmp_path / "x.tar").write_bytes(member.tobuf(tarfile.USTAR_FORMAT))
    with pytest.raises(ValueError, match=r"is no sample's \.jpg"):
        list(read_tar(tmp_path / "x.tar"))


# Interrupted ------------------------------------------------------------------------------------

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
MANY, FEW = 240, 8  # images, and of a shard


@pytest.fixture(scope="module")
def many(tmp_path_factory) -> Path:
    """Enough work for a conversion to be caught in the middle."""
    return make_photos(tmp_path_factory.mktemp("many"), images=MANY, size=300, seed=3)


@pytest.fixture(scope="module")
def whole(many, tmp_path_factory) -> dict[str, bytes]:
    target = tmp_path_factory.mktemp("whole") / "shards"
    convert(many, target, form="tfrecord", samples=FEW)
    return contents(target)


def begin(many: Path, target: Path) -> tuple[subprocess.Popen, list[psutil.Process]]:
    """A conversion with one finished shard at least and all workers at work; its processes."""
    command = ["-m", "bench", "shards", many, target, "--format", "tfrecord", "--samples", str(FEW)]
    process = subprocess.Popen(
        [sys.executable, *command, "--workers", "2"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    until, started = time.monotonic() + 60, psutil.Process(process.pid)
    while not finished(target) or len(busy(started)) < 2:
        assert time.monotonic() < until
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.01)
    return process, started.children(recursive=True)


def busy(process: psutil.Process) -> list[psutil.Process]:
    """The workers that have begun: they leave Ctrl-C to their parent."""
    working = []
    for child in process.children():
        status = Path(f"/proc/{child.pid}/status").read_text()
        ignored = int(re.search(r"SigIgn:\s*(\w+)", status)[1], 16)
        if "spawn_main" in " ".join(child.cmdline()) and ignored & 1 << signal.SIGINT - 1:
            working.append(child)
    return working


def finished(target: Path) -> dict[str, int]:
    """Files of the shards that the manifest calls finished, and when they were written."""
    if not (target / MANIFEST).exists():
        return {}
    entries = json.loads((target / MANIFEST).read_text())["shards"]
    names = [name for entry in entries if entry for name in entry["files"]]
    return {name: (target / name).stat().st_mtime_ns for name in names}


@linux
def test_a_killed_conversion_leaves_no_process_and_is_taken_up(many, whole, tmp_path):
    process, children = begin(many, tmp_path / "x")
    process.kill()
    process.communicate()
    _, alive = psutil.wait_procs(children, timeout=20)
    assert alive == []
    before = finished(tmp_path / "x")
    assert 0 < len(before) < MANY / FEW
    with pytest.raises(ValueError, match="shards are missing: run the conversion again"):
        open_shards(tmp_path / "x", "tfrecord")
    convert(many, tmp_path / "x", form="tfrecord", samples=FEW)
    assert contents(tmp_path / "x") == whole
    assert before.items() <= finished(tmp_path / "x").items()  # not written again
    assert list((tmp_path / "x").glob(".*.partial")) == []


@linux
def test_an_interrupted_conversion_says_how_far_it_is(many, whole, tmp_path):
    process, children = begin(many, tmp_path / "x")
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert re.search(
        rf"interrupted: \d+ of {MANY // FEW} shards are finished, the same command goes on", errors
    )
    assert "Traceback" not in errors
    _, alive = psutil.wait_procs(children, timeout=20)
    assert alive == []
    before = finished(tmp_path / "x")
    assert 0 < len(before) < MANY / FEW
    convert(many, tmp_path / "x", form="tfrecord", samples=FEW)
    assert contents(tmp_path / "x") == whole
    assert before.items() <= finished(tmp_path / "x").items()


def test_what_is_finished_is_verified_and_damage_mended(made, folder, tmp_path):
    form, target, _ = made
    again = tmp_path / "again"
    shutil.copytree(target, again)
    hurt = [open_shards(again, form).shards[number].files[0] for number in (0, 1, 3)]
    hurt[0].write_bytes(hurt[0].read_bytes()[:-1])
    hurt[1].write_bytes(bytes([hurt[1].read_bytes()[0] ^ 1]) + hurt[1].read_bytes()[1:])
    hurt[2].unlink()
    (again / ".shard-00002.tar.partial").write_bytes(b"half")
    kept = open_shards(again, form).shards[2].files[0]
    os.utime(kept, (1, 1))
    counts = []
    convert(
        folder,
        again,
        form=form,
        samples=SAMPLES,
        workers=1,
        progress=lambda *count: counts.append(count),
    )
    assert counts == [(1, 4, 0), (2, 4, 0), (3, 4, 0), (4, 4, 0)]
    assert contents(again) == contents(target)
    assert kept.stat().st_mtime == 1  # not written again
    assert list(again.glob(".*.partial")) == []


def test_two_at_once_are_refused(made, folder, tmp_path):
    form, _, _ = made
    with (
        conversion._alone(tmp_path / "x"),
        pytest.raises(RuntimeError, match="another process writes"),
    ):
        convert(folder, tmp_path / "x", form=form)


def test_a_full_disk_leaves_no_shard_that_is_not_whole(folder, tmp_path, monkeypatch):
    def full(form, files, samples):
        files[0].write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(conversion, "write", full)
    with pytest.raises(OSError, match="No space left"):
        convert(folder, tmp_path / "x", form="tar", samples=SAMPLES, workers=1)
    assert list(contents(tmp_path / "x")) == [MANIFEST]
    monkeypatch.undo()
    assert len(convert(folder, tmp_path / "x", form="tar", samples=SAMPLES, workers=1).shards) == 4


# Refused ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "what"),
    [({"seed": 1}, "seed"), ({"samples": 5}, "samples")],
)
def test_a_target_with_other_settings_is_refused(made, folder, change, what):
    form, target, _ = made
    before = contents(target)
    with pytest.raises(ValueError, match=f"holds shards of another {what}: choose a new folder"):
        convert(folder, target, **{"form": form, "samples": SAMPLES} | change)
    assert contents(target) == before


def test_a_target_of_another_source_is_refused(made, folder, tmp_path):
    form, target, _ = made
    for change in ("more", "newer", "renamed"):
        other = tmp_path / change
        shutil.copytree(folder, other)  # with its times
        convert(other, target, form=form, samples=SAMPLES)
        first = list_images(other)[0][0]
        if change == "more":
            shutil.copy(first, first.with_name("another.jpg"))
        elif change == "newer":
            os.utime(first, (1, 1))
        else:
            first.rename(first.with_name("another.jpg"))
        with pytest.raises(ValueError, match="holds shards of another source: choose a new"):
            convert(other, target, form=form, samples=SAMPLES)


def test_a_target_with_other_files_is_refused(folder, tmp_path):
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(ValueError, match=r"holds no shards, but 'thesis\.tex': choose a new"):
        convert(folder, tmp_path, form="tar")
    assert list(contents(tmp_path)) == ["thesis.tex"]


def test_a_target_within_the_source_is_refused(folder):
    with pytest.raises(ValueError, match="lies within the source"):
        convert(folder, folder / "shards", form="tar")
    assert not (folder / "shards").exists()


def test_a_worker_that_dies_is_said_with_what_it_may_be(folder, tmp_path, monkeypatch):
    def dies(*_):
        raise BrokenProcessPool

    monkeypatch.setattr(conversion, "_written", dies)
    with pytest.raises(RuntimeError, match=r"for lack of memory; .*`if __name__ == '__main__'"):
        convert(folder, tmp_path / "x", form="tar", samples=SAMPLES)


@pytest.mark.parametrize(
    "settings", [{"form": "zip"}, {"samples": 0}, {"workers": -1}, {"on_error": "ignore"}]
)
def test_settings_that_can_not_be(folder, tmp_path, settings):
    with pytest.raises(ValueError, match="must be"):
        convert(folder, tmp_path / "x", **{"form": "tar"} | settings)
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("form", ["tar", "arrays"])
def test_bad_images_are_named_or_counted(folder, tmp_path, form):
    source = tmp_path / "Bilder 图 ß"
    shutil.copytree(folder, source)
    paths = list_images(source)[0]
    paths[2].write_bytes(paths[2].read_bytes()[:500])
    paths[5].write_bytes(b"")
    Image.open(paths[7]).save(paths[7].with_suffix(".png"))
    paths[7].unlink()
    bad = {paths[2]: "truncated", paths[5]: "empty"}
    if form == "tar":
        bad[paths[7].with_suffix(".png")] = (
            "is not a JPEG: only --format arrays stores other images"
        )
    for workers in (1, 2):
        with pytest.raises(ValueError, match=r"truncated|empty|is not a JPEG") as raised:
            convert(source, tmp_path / f"raise-{workers}", form=form, samples=3, workers=workers)
        assert str(raised.value) in {f"{path}: {reason}" for path, reason in bad.items()}
    # What ended at a bad image goes on without it, and not back.
    settings = {"form": form, "samples": 3, "workers": 1}
    manifest = convert(source, tmp_path / "raise-1", **settings, on_error="skip")
    with pytest.raises(ValueError, match="holds shards of another on_error"):
        convert(source, tmp_path / "raise-1", **settings)
    assert sorted(manifest.skipped) == sorted(f"{path}: {reason}" for path, reason in bad.items())
    paths, labels, _ = list_images(source)
    expected = {row: label for row, label in enumerate(labels) if paths[row] not in bad}
    rows = {row: label for s in manifest.shards for row, label, _ in samples_of(form, s)}
    assert rows == expected
    assert manifest.size == IMAGES


def test_arrays_take_every_kind_of_image(tmp_path):
    """As `images.decode_rgb` has them: upper eight bits, first frames, three channels."""
    folder = tmp_path / "in" / "a"
    folder.mkdir(parents=True)
    noise = np.random.default_rng(0).integers(0, 2**16, (20, 30), dtype=np.uint16)
    photo, other = (Image.new("RGB", (30, 20), colour) for colour in ("red", "blue"))
    frames = {"save_all": True, "append_images": [other], "duration": 50}
    Image.fromarray(noise).save(folder / "16 bits.png")
    photo.save(folder / "animated.gif", **frames)
    photo.save(folder / "animated.webp", **frames)
    photo.convert("CMYK").save(folder / "cmyk.jpg")
    photo.convert("L").save(folder / "gray.jpg")
    photo.save(folder / "really a png.jpg", "PNG")
    manifest = convert(folder.parent, tmp_path / "out", form="arrays", workers=1)
    images = shards.MappedImages(manifest)
    paths = list_images(folder.parent)[0]
    assert len(paths) == manifest.samples == 6
    for row, path in enumerate(paths):
        assert np.array_equal(images.image(row)[0], decode_rgb(path))
    assert np.array_equal(images.image(0)[0][..., 1], noise >> 8)
    for row in (1, 2):
        assert np.abs(images.image(row)[0].mean((0, 1)) - (255, 0, 0)).max() < 8


def test_a_folder_without_a_good_image_makes_no_shards(tmp_path):
    (tmp_path / "in" / "a").mkdir(parents=True)
    (tmp_path / "in" / "a" / "x.jpg").write_bytes(b"")
    with pytest.raises(ValueError, match="has no samples: none of its images could be stored"):
        convert(tmp_path / "in", tmp_path / "out", form="tar", on_error="skip", workers=1)


def test_one_class_is_enough(tmp_path):
    (tmp_path / "in" / "only").mkdir(parents=True)
    Image.new("RGB", (9, 7)).save(tmp_path / "in" / "only" / "x.jpg")
    found = convert(tmp_path / "in", tmp_path / "out", form="arrays", workers=1)
    assert (found.classes, found.size, len(found.shards)) == (("only",), 1, 1)


# Manifests --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data[:-20],
        lambda data: b"[]",
        lambda data: b"\xff" + data,
        lambda data: data.replace(b'"shard-00001', b'"../shard-00001'),
        lambda data: data.replace(b'"shard-00001', b'"/shard-00001'),
        lambda data: data.replace(b'"sha256"', b'"sha"'),
        lambda data: data.replace(b'"rows"', b'"lines"'),
    ],
)
def test_a_damaged_manifest_is_one_line(made, folder, tmp_path, change):
    form, target, _ = made
    again = tmp_path / "again"
    shutil.copytree(target, again)
    path = again / MANIFEST
    path.write_bytes(change(path.read_bytes()))
    for call in (
        lambda: open_shards(again, form),
        lambda: convert(folder, again, form=form, samples=SAMPLES),
    ):
        with pytest.raises(ValueError, match="make the shards again") as raised:
            call()
        assert str(raised.value).startswith(f"{path}: ")
        assert "\n" not in str(raised.value)


def test_a_manifest_of_another_version(made, tmp_path):
    form, target, _ = made
    shutil.copytree(target, tmp_path / "x")
    path = tmp_path / "x" / MANIFEST
    path.write_text(path.read_text().replace('"version": 1', '"version": 2'))
    with pytest.raises(ValueError, match="has version 2, this is 1: make the shards again"):
        open_shards(tmp_path / "x", form)


# The command ------------------------------------------------------------------------------------


def test_the_command_converts_and_goes_on(folder, tmp_path, capsys):
    command = [str(folder), str(tmp_path / "x"), "--format", "tar", "--samples", "4"]
    for shards_before in (0, 4):
        assert main([*command, "--workers", "1"]) == 0
        printed = capsys.readouterr()
        assert printed.out == "14 images in 4 shards\n"
        assert printed.err.startswith(f"{shards_before} of 4 shards, 0 images skipped\n")
        assert printed.err.endswith("4 of 4 shards, 0 images skipped\n")


def test_the_command_says_in_one_line_what_is_wrong(folder, tmp_path, capsys):
    assert main([str(tmp_path / "gone"), str(tmp_path / "x"), "--format", "tar"]) == 1
    assert capsys.readouterr().err == f"twinbench shards: {tmp_path / 'gone'}: no such folder\n"
    source = tmp_path / "source"
    shutil.copytree(folder, source)
    bad = list_images(source)[0][0]
    bad.write_bytes(b"")
    command = [str(source), str(tmp_path / "y"), "--format", "tar", "--workers", "1"]
    assert main(command) == 1
    assert capsys.readouterr().err.splitlines()[-1] == f"twinbench shards: {bad}: empty"
    command[1] = str(tmp_path / "z")
    assert main([*command, "--on-error", "skip"]) == 0
    assert f"skipped {bad}: empty\n" in capsys.readouterr().err
