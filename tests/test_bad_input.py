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
import itertools
import json
import os
import pickle
import re
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
from bench.doctor import gains
from bench.harness import state
from bench.ladders import command as ladder
from bench.network import command as network
from bench.record import encode
from bench.report import command as report
from bench.validation import command as validate
from shared import conversion, parallel, runtimes, shards, teacher
from tests import records, workers


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
            status = main(list(map(str, arguments)))
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
    assert str(error).startswith(str(begin))
    assert len(str(error).splitlines()) == 1


@st.composite
def changed(draw, whole):
    """A JSON value of which one place is another value, or gone."""
    place = result = copy.deepcopy(whole)
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
    return result


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


# What was published: records, climbs, claims, sweeps ----------------------------------------------

DOCS = gains.DOCS
EFFECT = {"time": (0.8, 0.78, 0.82), "accuracy": (0.1, -0.2, 0.3), "memory": 0.9}
EFFECT |= {"seeds": [97.1, 97.2, 97.0, 97.3]}
ROWS = [
    {"technique": "mixed_precision", "variant": "bf16", "framework": name} | EFFECT
    for name in ("pt", "tf")
]
TEXT = encode(records.planted(*ROWS))  # of results.json, which is in the folder of each command
CLIMB = json.loads((DOCS / "ladders/domain_adaptation/ladder.json").read_text("utf-8"))
CLIMB["runs"] = [run for run in CLIMB["runs"] if run["framework"] == "pt" and run["block"] == 0]
LEDGER = {"claims": json.loads(claims.LEDGER.read_text("utf-8"))["claims"][:4]}
SWEEPS = json.loads((DOCS / "across_hosts" / "pt.json").read_text("utf-8"))

READERS = {
    "choose": (choose.main, ["results.json"]),
    "choose all": (choose.main, ["results.json", "--all", "--goal", "train-speed"]),
    "compare": (compare.main, ["results.json", "results.json"]),
    "claims": (claims.main, ["results.json"]),
    "claims json": (claims.main, ["results.json", "--json"]),
    "priorities": (priorities.main, ["results.json"]),
    "report": (report.main, ["results.json", "--format", "terminal"]),
    "simulate": (validate.main, ["simulate", "results.json"]),
    "replay": (validate.main, ["replay", "results.json"]),
}
OTHERS = {
    "ladder": ("ladder.json", CLIMB, ladder.main, ["--show", "."]),
    "ledger": ("claims.json", LEDGER, claims.main, ["results.json", "--ledger", "claims.json"]),
    "sweeps": ("sweeps.json", SWEEPS, network.main, ["projection", "sweeps.json"]),
}
FILES = {name: ("results.json", json.loads(TEXT), *READERS[name]) for name in READERS} | OTHERS

GROUPS = {"records": list(READERS)} | {name: [name] for name in OTHERS}


def read(name: str, content: bytes) -> None:
    """The command that reads this file answers whole, or refuses it in one line."""
    file, _, main, arguments = FILES[name]
    with folder():
        Path("results.json").write_bytes(TEXT)
        Path(file).write_bytes(content)
        whole_or_refused(main, *arguments)


@pytest.mark.parametrize("names", GROUPS.values(), ids=GROUPS)
@examples(100)
@given(st.data())
def test_a_changed_file_gives_a_whole_answer_or_one_line(names, data):
    name = data.draw(st.sampled_from(names))
    read(name, json.dumps(data.draw(changed(FILES[name][1]))).encode())


@pytest.mark.parametrize("names", GROUPS.values(), ids=GROUPS)
@many
@given(st.data())
def test_a_damaged_file_gives_a_whole_answer_or_one_line(names, data):
    name = data.draw(st.sampled_from(names))
    read(name, data.draw(damaged(json.dumps(FILES[name][1]).encode())))


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("kind", ["nothing", "folder", "pickle", "link to itself"])
def test_what_is_no_record_is_refused(name, kind):
    main, arguments = READERS[name]
    with folder() as here:
        path = Path("results.json")
        if kind == "folder":
            path.mkdir()
        elif kind == "pickle":
            path.write_bytes(payload())
        elif kind == "link to itself":
            path.symlink_to(path)
        refused(main, *arguments)
        assert not (here / EXECUTED).exists()


def payload() -> bytes:
    """A pickle that writes `EXECUTED` where it is loaded."""

    class Payload:
        def __reduce__(self):
            return open, (EXECUTED, "w")

    return pickle.dumps(Payload())


# Commands ----------------------------------------------------------------------------------------


def test_no_command_shows_them_all(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["twinbench"])
    assert twinbench.main() == 2
    assert "\n  choose      choose a framework and a technique" in capsys.readouterr().err


@pytest.mark.parametrize("name", twinbench.COMMANDS)
def test_help_explains_each_option_within_80_columns(capsys, monkeypatch, name):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit, match="0"):
        twinbench.main([name, "--help"])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    for line, below in itertools.pairwise([*lines, ""]):
        alone = re.fullmatch(r"  --[\w-]+( \S+)?", line)
        assert not alone or below.startswith(" " * 8), f"{line} has no explanation"


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


HOSTS = ["hosts", "true"]
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
    "pairs": (validate.main, ["measure"], "--pairs", no_count),
    "minutes": (validate.main, ["measure"], "--minutes", no_amount),
    "framework": (validate.main, ["measure"], "--framework", no_number),
    "workloads": (validate.main, ["measure"], "--workloads", no_number),
    "resume": (validate.main, ["measure"], "--resume", no_number.filter(bool)),
    "hosts": (network.main, HOSTS, "--hosts", st.one_of(no_count, st.just("65"))),
    "latency": (network.main, HOSTS, "--latency", st.sampled_from(["5", "-5ms", "9" * 400 + "s"])),
    "bandwidth": (network.main, HOSTS, "--bandwidth", st.sampled_from(["fast", "1mb", "-1mbit"])),
    "seconds": (network.main, HOSTS, "--seconds", no_amount),
    "compute": (network.main, ["projection", "x"], "--compute", st.sampled_from(["1", "", "1h"])),
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
        reason = refused(twinbench.main, "validate", "measure", "--results", "results.json/in it")
    assert reason.endswith("results.json/in it: Not a directory")


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

STATE = {
    "state_version": state.VERSION,
    "asked": {"options": {"--effort": "quick"}, "selected": ["x"]},
    "process": {"id": 1, "started": 0.0},
    "code": "0",
    "command": "pytest bench/",
    "effort": "quick",
    "started": json.loads(TEXT)["started"],
    "environment": {},
    "cases": {"x": {}},
    "matches": [["x"]],
    "passes": [[0]],
    "conditions": [{"match": 0, "block": 0}],
}


def test_a_whole_state_is_taken_up():
    with folder() as here:
        (here / "results.json").write_bytes(TEXT)
        (here / "state.json").write_text(json.dumps(STATE))
        assert resume.begun(here).asked({"--effort": None}) == {"--effort": "quick"}


@examples(60)
@given(
    st.one_of(changed(STATE).map(json.dumps).map(str.encode), damaged(json.dumps(STATE).encode()))
)
def test_a_state_that_is_none_is_one_line_or_is_taken_up(text):
    with folder() as here:
        (here / "results.json").write_bytes(TEXT)
        (here / "state.json").write_bytes(text)
        try:
            resume.begun(here).asked({"--effort": None})
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
            (line,) = [line for line in err.splitlines() if "of 1 shards" not in line]
            assert (status, out, written) == (1, "", set()), err
            assert line.startswith("twinbench shards: ")
            assert "1.jpg" in line


@pytest.fixture(scope="module")
def stored(tmp_path_factory) -> dict[str, dict[str, bytes]]:
    """The files of two images as shards, by form."""
    here, files = tmp_path_factory.mktemp("stored"), {}
    source = images(here, jpeg(), jpeg())
    for form in shards.SUFFIXES:
        conversion.convert(source, here / form, form=form, workers=1)
        files[form] = {p.name: p.read_bytes() for p in (here / form).glob("[!.]*")}
    return files


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
        for place, content in files.items():
            (here / place).write_bytes(content)
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
        other = st.sampled_from([*map(npy, odd), npy_pickle()])
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
            read = teacher.load(here / "teacher.npz")
        except ValueError as error:
            in_one_line(error, str(here))
        else:  # what was changed is no part of what is read
            assert all(np.isfinite(array).all() for array in read.weights.values())
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
