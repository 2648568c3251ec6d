"""Whatever is handed to the commands: one line and the right exit status, nothing half written.

Each property says how many examples it tries in a campaign; together they are more than 300.
Inputs are drawn: a whole one, of which something is changed, cut or replaced, or what is none at
all. Everything runs in this process, and nothing here needs a framework. What an input would do if
it were executed is to write the file `EXECUTED`.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import os
import pickle
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from bench import __main__ as twinbench
from bench import choose, claims, compare, conftest, diagnose, priorities, resume
from bench.harness import state
from bench.ladders import command as ladder
from bench.network import hosts, projection
from bench.report import command as report
from bench.validation import command
from shared import conversion, parallel, runtimes, shards, teacher
from tests import workers
from tests.analysis.planted import planted


def examples(count: int) -> settings:
    """So many in campaigns, else a third of them."""
    return settings(max_examples=count if workers.campaign() else count // 3)


many = examples(40)
EXECUTED = "executed"  # a file that no input may make

JUNK = st.sampled_from(
    [
        *(None, True, False, -1, 0, 1, 2**70, 1e-320, 1e308, "", "x", "\x00\x1b[2J", "../../x"),
        *("<script>", "$(touch executed)", "keras3", "pt", "train", [], [None], [[]], {}, {"": 1}),
    ]
)


@contextlib.contextmanager
def folder() -> Iterator[Path]:
    """An empty folder, which the commands are run in: hypothesis wants one an example."""
    with TemporaryDirectory() as path, pytest.MonkeyPatch.context() as patch:
        patch.chdir(path)
        yield Path(path)


def called(main: Callable, *arguments: object) -> tuple[int, str, str]:
    """The exit status of a command, and what it wrote."""
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", "backslashreplace") for _ in range(2))
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = main([str(each) for each in arguments])
        except SystemExit as end:
            status = end.code
    texts = []
    for stream in (out, err):
        stream.flush()
        texts.append(stream.buffer.getvalue().decode())
    return status, *texts


def one_line(err: str) -> str:
    """The one line that says what is wrong, after a usage where there is one."""
    *before, last = err.splitlines()
    assert last.startswith("twinbench "), err
    assert all(line.startswith(("usage: ", " ")) for line in before), err
    assert len(last) < 1000
    return last


def refused(main: Callable, *arguments: object) -> str:
    """The one line of a command that refuses its input, and leaves no file."""
    before = sorted(Path().rglob("*"))
    status, out, err = called(main, *arguments)
    assert (status, out) == (2, ""), (arguments, out, err)
    assert sorted(Path().rglob("*")) == before
    return one_line(err)


def whole_or_refused(main: Callable, *arguments: object) -> None:
    """Either a whole answer, or one line; never a traceback, a half of either, or a file."""
    before = sorted(Path().rglob("*"))
    status, out, err = called(main, *arguments)
    assert status in (0, 2), (status, err)
    if status == 2:
        assert out == ""
        one_line(err)
    else:
        assert out
    assert sorted(Path().rglob("*")) == before


def in_one_line(error: Exception, begin: object = "") -> None:
    """The error is one line, which begins with the place that it is about."""
    said = str(error)
    assert said.startswith(str(begin))
    assert len(said.splitlines()) == 1


@st.composite
def changed(draw, whole):
    """A JSON value of which one place is another value, or gone."""
    found = copy.deepcopy(whole)
    place = found
    while True:
        keys = sorted(place) if isinstance(place, dict) else range(len(place))
        key = draw(st.sampled_from(list(keys)))
        inner = place[key]
        if not isinstance(inner, dict | list) or not inner or draw(st.integers(0, 3)) == 0:
            break
        place = inner
    if draw(st.booleans()):
        place[key] = draw(JUNK)
    else:
        del place[key]
    return found


@st.composite
def damaged(draw, text: bytes):
    """Bytes that are cut, flipped, doubled or of something else."""
    kind = draw(st.sampled_from(["cut", "flipped", "doubled", "other"]))
    place = draw(st.integers(0, max(0, len(text) - 1)))
    if kind == "cut":
        return text[:place]
    if kind == "flipped":
        return text[:place] + bytes([text[place] ^ draw(st.integers(1, 255))]) + text[place + 1 :]
    return text + text if kind == "doubled" else draw(st.binary(max_size=200))


# Records -----------------------------------------------------------------------------------------

EFFECT = {"time": (0.8, 0.78, 0.82), "accuracy": (0.1, -0.2, 0.3), "memory": 0.9}
EFFECT |= {"seeds": [97.1, 97.2, 97.0, 97.3]}
ROWS = [
    {"technique": "mixed_precision", "variant": "bf16", "framework": name} | EFFECT
    for name in ("pt", "tf")
]
RECORD = planted(*ROWS)
TEXT = json.dumps(RECORD).encode()
READERS = {
    "choose": (choose.main, lambda path: [path]),
    "choose all": (choose.main, lambda path: [path, "--all", "--goal", "train-speed"]),
    "compare": (compare.main, lambda path: [path, path]),
    "claims": (claims.main, lambda path: [path]),
    "claims json": (claims.main, lambda path: [path, "--json"]),
    "priorities": (priorities.main, lambda path: [path]),
    "report": (report.main, lambda path: [path, "--format", "terminal"]),
    "simulate": (command.main, lambda path: ["simulate", path]),
    "replay": (command.main, lambda path: ["replay", path]),
}
readers = st.sampled_from(sorted(READERS))


def read(name: str, path: Path, check: Callable) -> None:
    main, arguments = READERS[name]
    check(main, *arguments(path))


@examples(120)
@given(readers, changed(RECORD))
def test_a_changed_record_gives_a_whole_answer_or_one_line(name, record):
    with folder():
        Path("results.json").write_text(json.dumps(record))
        read(name, Path("results.json"), whole_or_refused)


@examples(60)
@given(readers, damaged(TEXT))
def test_a_damaged_record_gives_a_whole_answer_or_one_line(name, text):
    with folder():
        Path("results.json").write_bytes(text)
        read(name, Path("results.json"), whole_or_refused)


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("kind", ["nothing", "folder", "pickle", "link to itself"])
def test_what_is_no_record_is_refused(name, kind):
    with folder() as here:
        path = Path("results.json")
        if kind == "folder":
            path.mkdir()
        elif kind == "pickle":
            path.write_bytes(payload())
        elif kind == "link to itself":
            path.symlink_to(path)
        read(name, path, refused)
        assert not (here / EXECUTED).exists()


def payload() -> bytes:
    """A pickle that writes `EXECUTED` where it is loaded."""

    class Payload:
        def __reduce__(self):
            return open, (EXECUTED, "w")

    return pickle.dumps(Payload())


# Ladders -----------------------------------------------------------------------------------------

CLIMB = json.loads((diagnose.DOCS / "ladders/domain_adaptation/ladder.json").read_text("utf-8"))
CLIMB["runs"] = [run for run in CLIMB["runs"] if run["framework"] == "pt" and run["block"] == 0]


@examples(150)
@given(changed(CLIMB))
def test_a_changed_climb_gives_a_whole_answer_or_one_line(record):
    with folder():
        Path("ladder.json").write_text(json.dumps(record))
        whole_or_refused(ladder.main, "--show", ".")


@examples(40)
@given(damaged(json.dumps(CLIMB).encode()))
def test_a_damaged_climb_gives_a_whole_answer_or_one_line(text):
    with folder():
        Path("ladder.json").write_bytes(text)
        whole_or_refused(ladder.main, "--show", ".")


# Claims ------------------------------------------------------------------------------------------

LEDGER = {"claims": json.loads(claims.LEDGER.read_text("utf-8"))["claims"][:4]}


@examples(80)
@given(changed(LEDGER))
def test_a_changed_ledger_gives_a_whole_answer_or_one_line(ledger):
    with folder():
        Path("results.json").write_bytes(TEXT)
        Path("claims.json").write_text(json.dumps(ledger))
        whole_or_refused(claims.main, "results.json", "--ledger", "claims.json")


@many
@given(damaged(json.dumps(LEDGER).encode()))
def test_a_damaged_ledger_gives_a_whole_answer_or_one_line(text):
    with folder():
        Path("results.json").write_bytes(TEXT)
        Path("claims.json").write_bytes(text)
        whole_or_refused(claims.main, "results.json", "--ledger", "claims.json")


def test_no_command_shows_them_all(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["twinbench"])
    assert twinbench.main() == 2
    assert "\n  choose      what to use for one aim" in capsys.readouterr().err


def test_an_interrupted_command_is_one_line(capsys, monkeypatch):
    monkeypatch.setattr(diagnose, "newest", mock.Mock(side_effect=KeyboardInterrupt))
    assert twinbench.main(["diagnose", "digits-cnn"]) == 130
    assert capsys.readouterr().err == "\ntwinbench diagnose: interrupted\n"


# Options -----------------------------------------------------------------------------------------

words = st.text(st.characters(codec="utf-8", exclude_categories=["C", "Zl", "Zp"]), max_size=12)
no_number = words.filter(lambda text: not _reads(float, text) and not text.startswith("-"))
no_count = st.one_of(no_number, st.sampled_from(["0", "-1", "1.5", "nan"]))
no_size = st.sampled_from(["", "2", "GB", "-1GB", "nanGB", "1e3GB", "2GiB", "9" * 400 + "GB"])
no_amount = st.one_of(no_number, st.sampled_from(["0", "-1", "nan", "inf", "9" * 400]))


def _reads(kind: type, text: str) -> bool:
    try:
        kind(text)
    except (ValueError, OverflowError):
        return False
    return True


OPTIONS = {
    "goal": (choose.main, ["results.json"], "--goal", no_number),
    "task": (choose.main, ["results.json"], "--task", no_number.filter(bool)),
    "steps": (choose.main, ["results.json"], "--steps", no_count),
    "drop": (choose.main, ["results.json"], "--max-accuracy-drop", st.sampled_from(["nan", "x"])),
    "budget": (choose.main, ["results.json"], "--memory-budget", no_size),
    "fail if": (compare.main, ["results.json"] * 2, "--fail-if", no_number),
    "technique": (claims.main, ["results.json"], "--technique", no_number.filter(bool)),
    "format": (report.main, ["results.json"], "--format", no_number),
    "batch size": (diagnose.main, ["digits-cnn"], "--batch-size", no_count),
    "batch size of a file": (diagnose.main, ["mine.py"], "--batch-size", st.just("8")),
    "profiled steps": (diagnose.main, ["digits-cnn"], "--steps", st.sampled_from(["0", "3"])),
    "pairs": (command.main, ["measure"], "--pairs", no_count),
    "minutes": (command.main, ["measure"], "--minutes", no_amount),
    "framework": (command.main, ["measure"], "--framework", no_number),
    "workloads": (command.main, ["measure"], "--workloads", no_number),
    "resume": (command.main, ["measure"], "--resume", no_number.filter(bool)),
    "hosts": (hosts.main, ["true"], "--hosts", st.one_of(no_count, st.sampled_from(["65"]))),
    "latency": (hosts.main, ["true"], "--latency", st.sampled_from(["5", "-5ms", "9" * 400 + "s"])),
    "bandwidth": (hosts.main, ["true"], "--bandwidth", st.sampled_from(["fast", "1mb", "-1mbit"])),
    "seconds": (hosts.main, ["true"], "--seconds", no_amount),
    "compute": (projection.main, ["show", "x"], "--compute", st.sampled_from(["1", "", "1h"])),
}


@examples(150)
@given(st.data(), st.sampled_from(sorted(OPTIONS)))
def test_an_option_that_makes_no_sense_is_one_line(data, name):
    main, before, option, values = OPTIONS[name]
    value = data.draw(values)
    with folder():
        Path("results.json").write_bytes(TEXT)
        refused(main, *before, f"{option}={value}")


def test_a_folder_that_can_not_be_written_is_one_line():
    with folder():
        Path("results.json").write_bytes(TEXT)
        said = refused(twinbench.main, "validate", "measure", "--results", "results.json/in it")
    assert said.endswith("results.json/in it: Not a directory")


RUN_OPTIONS = {
    "blocks": (conftest._blocks, st.one_of(no_count, st.just("9" * 5000))),
    "minutes": (conftest._minutes, no_amount),
    "memory-budget": (conftest._bytes, no_size),
    "task": (lambda text: conftest._names("task", text, {"digits-cnn"}), no_number),
    "pt-python": (lambda text: conftest._interpreter("pt", text), no_number),
}


@examples(60)
@given(st.data(), st.sampled_from(sorted(RUN_OPTIONS)))
def test_an_option_of_a_run_that_makes_no_sense_is_one_line(data, name):
    read_option, values = RUN_OPTIONS[name]
    with folder(), pytest.raises(pytest.UsageError) as raised:
        read_option(data.draw(values))
    assert str(raised.value).startswith(f"--{name}: ")
    assert len(str(raised.value).splitlines()) == 1


bad_numbers = st.sampled_from([None, True, -1, 1.5, "2", float("nan"), [], {}])


@many
@given(st.sampled_from(["replicas", "global_batch", "steps", "parts", "seed"]), bad_numbers)
def test_a_run_of_replicas_with_odd_numbers_is_refused_before_it_starts(name, value):
    with folder() as here:
        for part in "xy":
            parallel.save_samples(np.zeros(8), here / f"train_{part}")
        run = {"replicas": 2, "global_batch": 4, "steps": 2} | {name: value}
        with pytest.raises(ValueError, match=f"{name} must be an integer"):
            parallel.check(here, parallel.Run(**run), {})


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_a_time_without_end_is_none_to_wait(value):
    with folder() as here:
        for part in "xy":
            parallel.save_samples(np.zeros(8), here / f"train_{part}")
        with pytest.raises(ValueError, match="timeout_s must be"):
            parallel.check(here, parallel.Run(2, 4, 2, timeout_s=value), {})


# What a run left ---------------------------------------------------------------------------------

LEFT = {
    "state_version": state.VERSION,
    "asked": {"options": {"--effort": "quick"}, "selected": ["x"]},
    "process": {"id": 1, "started": 0.0},
    "code": "0",
    "top": {"started": RECORD["started"]},
    "cases": ["x"],
    "matches": [],
    "passes": [],
    "left": [],
    "conditions": [],
    "entries": {},
}


@examples(60)
@given(st.one_of(changed(LEFT).map(json.dumps).map(str.encode), damaged(json.dumps(LEFT).encode())))
def test_a_state_that_is_none_is_one_line_or_is_taken_up(text):
    with folder() as here:
        (here / "results.json").write_bytes(TEXT)
        (here / "state.json").write_bytes(text)
        try:
            found = resume.begun(here)
            found.asked({"--effort": None})
        except ValueError as error:
            in_one_line(error, str(here.resolve()))


# Files of users ----------------------------------------------------------------------------------

SOURCE = b"import torch\nopen('executed', 'w')\ndef make():\n    return step, batches\n"


@examples(60)
@given(st.one_of(damaged(SOURCE), st.sampled_from([b"(" * 5000, b"-" * 100_000, b"\xff", b"\0"])))
def test_a_users_file_is_read_and_not_run_until_it_is_known_whose_it_is(text):
    with folder() as here:
        (here / "model.py").write_bytes(text)
        try:
            assert diagnose.framework_of(Path("model.py")) == "pt"
        except ValueError as error:
            in_one_line(error, "model.py")
        assert not (here / EXECUTED).exists()


# Archives, images, models ------------------------------------------------------------------------


def images(here: Path, *files: bytes) -> Path:
    """A folder of images of one class."""
    (here / "images" / "one").mkdir(parents=True)
    for number, data in enumerate(files):
        (here / "images" / "one" / f"{number}.jpg").write_bytes(data)
    return here / "images"


def jpeg() -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.arange(192, dtype=np.uint8).reshape(8, 8, 3)).save(file, "JPEG")
    return file.getvalue()


@many
@given(st.sampled_from(sorted(shards.SUFFIXES)), damaged(jpeg()))
def test_a_damaged_image_is_stored_or_named_and_no_shard_is_half_written(form, data):
    with folder() as here:
        source = images(here, jpeg(), data)
        arguments = (source, "shards", f"--format={form}", "--workers=1")
        status, out, err = called(conversion.main, *arguments)
        written = {path.name for path in Path("shards").glob("*")} - {".lock", shards.MANIFEST}
        if status == 0:
            assert out.startswith("2 images")
            assert len(written) == len(shards.SUFFIXES[form])
        else:
            said = [line for line in err.splitlines() if "of 1 shards" not in line]
            assert (status, out, len(said)) == (1, "", 1), err
            assert said[0].startswith("twinbench shards: ")
            assert "1.jpg" in said[0]
            assert written == set()


@pytest.fixture(scope="module")
def stored(tmp_path_factory) -> dict[str, dict[str, bytes]]:
    """The files of two images as shards, by form."""
    here, found = tmp_path_factory.mktemp("stored"), {}
    source = images(here, jpeg(), jpeg())
    for form in shards.SUFFIXES:
        conversion.convert(source, here / form, form=form, workers=1)
        found[form] = {p.name: p.read_bytes() for p in (here / form).glob("[!.]*")}
    return found


@examples(80)
@given(st.data(), st.sampled_from(sorted(shards.SUFFIXES)))
def test_shards_that_are_not_what_was_written_are_refused_or_seen(stored, data, form):
    files = dict(stored[form])
    name = data.draw(st.sampled_from(sorted(files)))
    if name == shards.MANIFEST and data.draw(st.booleans()):
        files[name] = json.dumps(data.draw(changed(json.loads(files[name])))).encode()
    else:
        files[name] = data.draw(damaged(files[name]))
    with folder() as here:
        for each, content in files.items():
            (here / each).write_bytes(content)
        try:
            opened = shards.open_shards(here, form)
            damage = [shard.damage() for shard in opened.shards]
        except (ValueError, FileNotFoundError) as error:
            in_one_line(error, str(here))
            return
        changed_file = name != shards.MANIFEST and files[name] != stored[form][name]
        assert any(damage) or not changed_file


@examples(60)
@given(st.data(), st.sampled_from([".pixels.npy", ".index.npy"]))
def test_arrays_that_do_not_fit_are_refused_and_nothing_in_them_is_executed(stored, data, suffix):
    with folder() as here:
        names = {}
        for name, content in stored["arrays"].items():
            if name.endswith(".npy"):
                names[name.removeprefix("shard-00000")] = here / name
                (here / name).write_bytes(content)
        whole = names[suffix].read_bytes()
        odd = np.array([[0.5, 1.0]]), np.arange(4), np.array([[1, 2, -3, 4]]), np.array(["x"])
        other = st.sampled_from([npy(each) for each in odd] + [npy_pickle()])
        names[suffix].write_bytes(data.draw(st.one_of(damaged(whole), other)))
        try:
            pixels, entries = shards.map_arrays(names[".pixels.npy"], names[".index.npy"])
        except ValueError as error:
            in_one_line(error, str(here))
        else:
            assert len(pixels) == int(entries[:, 2:].prod(axis=1).sum()) * 3
        assert not (here / EXECUTED).exists()


def npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def npy_pickle() -> bytes:
    """An array of one object, whose pickle writes `EXECUTED` where it is loaded."""
    file = io.BytesIO()
    header = {"descr": "|O", "fortran_order": False, "shape": (1,)}
    np.lib.format.write_array_header_1_0(file, header)
    return file.getvalue() + payload()


@examples(30)
@given(st.data())
def test_weights_that_are_damaged_are_refused(data):
    whole = teacher.PATH.read_bytes()
    with folder() as here:
        (here / "teacher.npz").write_bytes(data.draw(damaged(whole)))
        try:
            found = teacher.load(here / "teacher.npz")
        except ValueError as error:
            in_one_line(error, str(here))
        else:  # what was changed is no part of what is read
            assert all(np.isfinite(array).all() for array in found.weights.values())
        assert not os.path.exists(EXECUTED)


def onnx_model() -> bytes:
    """A dense layer, by ONNX's own helper."""
    helper = pytest.importorskip("onnx").helper
    weights = helper.make_tensor("w", 1, [4, 2], np.arange(8, dtype=np.float32))
    node = helper.make_node("MatMul", ["x", "w"], ["y"])
    x, y = (helper.make_tensor_value_info(name, 1, [None, n]) for name, n in (("x", 4), ("y", 2)))
    graph = helper.make_graph([node], "dense", [x], [y], [weights])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return model.SerializeToString()


@examples(60)
@given(st.data())
def test_a_damaged_model_predicts_or_is_refused(data):
    whole = onnx_model()
    with folder() as here:
        (here / "model.onnx").write_bytes(data.draw(damaged(whole)))
        try:
            predict = runtimes.load_onnx(here / "model.onnx", threads=1)
            predict(np.ones((3, 4), np.float32))
        except ValueError as error:
            in_one_line(error)
        assert sorted(path.name for path in here.iterdir()) == ["model.onnx"]


# Sweeps of all-reduces ---------------------------------------------------------------------------

SWEEPS = Path(__file__).parents[1] / "docs" / "across_hosts" / "pt.json"


@examples(60)
@given(changed(json.loads(SWEEPS.read_text("utf-8"))))
def test_a_changed_record_of_sweeps_gives_a_whole_answer_or_one_line(record):
    with folder():
        Path("sweeps.json").write_text(json.dumps(record))
        whole_or_refused(projection.main, "show", "sweeps.json")
