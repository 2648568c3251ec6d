"""`twinbench try` as its users call it: the example that it writes, with both frameworks."""

import html
import importlib
import io
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType, SimpleNamespace

import numpy as np
import pytest
from _pytest._io import TerminalWriter

from bench import choose, conftest, resume, try_model, user_answer, user_code, user_task
from bench.analysis.ranking import TRAIN
from bench.analysis.reading import load
from bench.harness import machine
from bench.harness.run_plan import techniques
from bench.record import Timing
from bench.user_task import OF_A_FAMILY, UserModel, left_out
from shared import user_model
from shared.specs import TASKS
from shared.user_model import BadFile
from tests import records, workers

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.timeout(600)


def try_(folder, *arguments):
    """Run the command in a fork of what has imported it; users need no plugin of hypothesis."""
    given = {"CI": "", "PYTEST_ADDOPTS": "-p no:hypothesispytest", "PYTHONPATH": str(ROOT)}
    return workers.parent("commands").run("bench", "try", *arguments, folder=folder, **given)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("own")
    done = try_(place, "--example", "my_model.py")
    assert done.returncode == 0, done.stderr
    file = place / "my_model.py"
    text = file.read_text("utf-8").replace("size=64", "size=8")
    file.write_text(text.replace("32, 32, 3", "8, 8, 3"), encoding="utf-8")
    return place


@pytest.fixture(scope="module")
def tried(folder):
    """A quick run on the example: one block of what needs no compiler."""
    asked = ("--technique=gradient_clipping,bottleneck", "--variant=clip,plain")
    done = try_(folder, "my_model.py", "--effort=quick", *asked)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done


@pytest.fixture(scope="module")
def record(folder, tried):
    return load(folder / "results")


@pytest.fixture
def model(folder, tried):
    """The file as a run finds it checked."""
    return model_of(folder)


def model_of(folder):
    (data,) = (folder / "results" / "data").glob("own-my_model-*")
    about = user_model.about(data)
    return UserModel(user_model.look(folder / "my_model.py"), user_model.task(about), about, {})


def test_the_example_is_written_over_nothing(folder):
    done = try_(folder, "--example", "my_model.py")
    assert done.returncode == 2
    assert "exists: give another name" in done.stderr


def test_a_bad_file_is_one_line_and_nothing_is_measured(tmp_path):
    (tmp_path / "bad.py").write_text("def pytorch(): return None\n")
    done = try_(tmp_path, "bad.py")
    assert done.returncode == 2
    assert done.stderr.strip().startswith("twinbench try: bad.py has no batch(size, seed)")
    assert len(done.stderr.strip().splitlines()) == 1
    assert list(tmp_path.iterdir()) == [tmp_path / "bad.py"]


def test_options_may_stand_before_the_file(monkeypatch, folder):
    ran = []
    monkeypatch.setattr(
        try_model.subprocess,
        "Popen",
        lambda command: ran.append(command) or SimpleNamespace(wait=lambda: 0),
    )
    path = str(folder / "my_model.py")
    assert try_model.main(["--technique", "compilation", "--plan", path, "-k", "bf16"]) == 0
    (command,) = ran
    asked = command[command.index("--benchmark-only") + 1 :]
    assert asked == (
        [
            "--model",
            path,
            "--minutes",
            "12",
            "--technique",
            "compilation",
            "--why",
            "--plan",
            "-k",
            "bf16",
        ]
    )


def test_ctrl_c_lets_the_run_keep_what_it_has(monkeypatch, folder):
    """A terminal sends it to both; the run ends with what it has, however long that takes."""

    class Run:
        def __init__(self, command):
            pass

        def wait(self):
            os.kill(os.getpid(), signal.SIGINT)
            return 2

    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(try_model.subprocess, "Popen", Run)
    assert try_model.main([str(folder / "my_model.py")]) == 2
    assert signal.getsignal(signal.SIGINT) is before


def test_a_technique_that_is_not_measured_of_a_file_is_refused_at_once(folder):
    done = try_(folder, "my_model.py", "--technique=compilation,pruning")
    assert done.returncode == 2
    assert "--technique: pruning can't be measured on a file: zeros make" in done.stderr
    assert "checking" not in done.stderr


def test_what_quick_does_not_measure_is_refused_before_the_check(monkeypatch):
    monkeypatch.setattr(conftest.user_task, "prepare", lambda *_: pytest.fail("it was checked"))
    asked = {"--framework": None, "--model": "mine.py", "--effort": "quick"}
    asked["--technique"] = ["compilation", "post_training_quantization"]
    said = (
        "--effort quick leaves out --technique post_training_quantization: give --effort ordinary"
    )
    with pytest.raises(pytest.UsageError, match=f"^{said}$"):
        conftest._checked_model(asked, SimpleNamespace())


def test_settings_of_the_user_that_are_not_obeyed_are_said(monkeypatch):
    for name in machine.THREAD_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert machine.overruled(2, None) == machine.overruled(2, "tensorflow") == []
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("MKL_NUM_THREADS", "2")
    threads, backend = machine.overruled(2, "torch")
    assert threads.startswith("OMP_NUM_THREADS=1 is ignored: every row uses 2 threads, one per")
    assert backend.startswith("KERAS_BACKEND=torch is ignored: Keras is measured on TensorFlow")


@pytest.mark.parametrize(
    ("sides", "by_file", "before", "asked"),
    [
        (["pt", "tf"], "tensorflow", "torch", "torch"),
        (["tf"], "torch", None, "torch"),
        (["tf"], "tensorflow", None, None),
        (["pt"], "torch", "torch", None),
    ],
)
def test_the_backend_of_keras_is_that_of_the_file_or_of_the_user(
    monkeypatch, sides, by_file, before, asked
):
    monkeypatch.delenv("KERAS_BACKEND", raising=False)
    if before:
        monkeypatch.setenv("KERAS_BACKEND", before)
    about = {"sides": {side: {"keras_backend": by_file} for side in sides}}
    of_both, of_tensorflow = (SimpleNamespace(is_keras=known) for known in (True, False))
    assert UserModel(of_tensorflow, None, about, {}).keras_backend == asked
    assert UserModel(of_both, None, about, {}).keras_backend is None  # it has one on each side


def test_keras_has_tensorflow_as_its_backend_where_tensorflow_is_measured(monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    for flavour, backend in ((None, "torch"), ("keras3", "tensorflow"), ("tf_keras", "tensorflow")):
        found = machine.process_environment(threads=1, flavour=flavour, allocator="tuned")
        assert found["KERAS_BACKEND"] == backend


def test_micro_batches_are_refused_where_the_loss_is_no_mean_over_samples():
    """Before a model is built; one batch is what it always is."""
    bench = importlib.import_module("bench.train_step.bench_gradient_accumulation")
    impl = SimpleNamespace(parts_apart=1.3e-3)
    four = SimpleNamespace(settings={"micro_batches": 4}, batch_size=16)
    said = r"change the loss, by 1.3e-03 \(allowed: 1e-05\). If it is a mean over tokens, weight"
    with pytest.raises(NotImplementedError, match=said):
        bench.prepare(impl, four)
    impl.parts_apart = 1e-7
    with pytest.raises(AttributeError, match="kit"):  # it goes on to build the model
        bench.prepare(impl, four)


def test_a_place_that_can_not_be_written_is_one_line(tmp_path, capsys):
    assert try_model.main(["--example", str(tmp_path / "nowhere" / "my_model.py")]) == 2
    said = capsys.readouterr().err
    assert said.endswith("nowhere/my_model.py can't be written (No such file or directory)\n")


def test_the_way_on_of_a_run_that_was_cut_short_is_a_command(folder, tmp_path):
    model = SimpleNamespace(file=user_model.look(folder / "my_model.py"))
    results = SimpleNamespace(finished=False)
    state = SimpleNamespace(model=model, folder=tmp_path, results=results)
    lines = conftest._way_on(state, skipped=False)
    (words,) = [line.split() for line in lines if line.startswith("twinbench try ")]
    assert Path(words[2]).resolve() == (folder / "my_model.py").resolve()
    assert words[3:5] == ["--resume", os.path.relpath(tmp_path)]


def test_results_that_can_not_be_written_are_one_line(folder):
    done = try_(folder, "my_model.py", "--results=my_model.py/below")
    assert done.returncode == 2
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
    assert line.endswith("can't be written (Not a directory): give another folder, --results DIR")


def test_a_log_that_goes_with_the_check_is_quoted(tmp_path):
    (tmp_path / "0001-check-pt.log").write_text("first\nSegmentation fault\n")
    said = "the worker was killed by SIGSEGV before it answered (see 0001-check-pt.log)"
    found = user_task._with_log(said, tmp_path)
    assert found == said.replace("see 0001-check-pt.log", "Segmentation fault")
    assert user_task._with_log("timeout", tmp_path) == "timeout"
    assert user_task._with_log("it ended (see gone.log)", tmp_path) == "it ended"


@pytest.mark.parametrize(
    "content",
    [
        "\ufeff{0}",
        "# coding: latin-1\n# \xe9\n{0}",
        "if True:\n    {0}\n",
        "try:\n    {0}\nfinally:\n    pass\n",
    ],
)
def test_whatever_python_reads_is_looked_at(tmp_path, content):
    encoding = "latin-1" if "latin" in content else "utf-8"
    (tmp_path / "model.py").write_text(
        content.format("from others import pytorch, batch"), encoding=encoding
    )
    assert user_model.look(tmp_path / "model.py").sides == ["pt"]


def test_the_code_of_a_row_that_no_few_lines_show_is_named(monkeypatch, tmp_path):
    """Micro-batches are the fastest; bfloat16 has lines of its own."""
    rows = [
        records.case("micro_4", technique="gradient_accumulation"),
        records.case("bf16", technique="mixed_precision"),
    ]
    monkeypatch.setattr(user_code, "gaining", lambda made, side, kind: rows * (kind == TRAIN))
    texts = {"bf16": "print('lines')\n"}
    monkeypatch.setattr(user_code, "_code", lambda model, kind, row, name: texts.get(row.variant))
    monkeypatch.setattr(user_code, "run", lambda path, model, side: None)
    said = "\n".join(user_code.shown(tmp_path, [], SimpleNamespace(sides=["pt"])))
    assert "its best train step is micro 4; how to get it:" in " ".join(said.split())
    assert "pt_impl/train_step/gradient_accumulation.py" in said
    assert "PyTorch: the code of bf16 (use_pytorch.py)" in said
    assert "print('lines')" in said
    texts.clear()
    (_, *lines) = user_code.shown(tmp_path, [], SimpleNamespace(sides=["pt"]))
    assert "gradient_accumulation.py" in "".join(lines)


def test_ctrl_c_while_code_is_tried_leaves_the_answer(monkeypatch, tmp_path):
    def interrupted(path, model, side):
        assert path.is_file()
        raise KeyboardInterrupt

    monkeypatch.setattr(user_code, "run", interrupted)
    monkeypatch.setattr(user_code, "gaining", lambda made, side, kind: [records.case("row")])
    monkeypatch.setattr(user_code, "_code", lambda model, kind, row, name: "step = 1")
    (_, said) = user_code.shown(tmp_path, [], SimpleNamespace(sides=["pt", "tf"]))
    assert said == "No code: it was not tried, since you interrupted; --resume tries it."
    assert list(tmp_path.iterdir()) == []


def test_code_that_fails_in_no_encoding_has_its_line(tmp_path):
    path = tmp_path / "use.py"
    path.write_text("import sys\nsys.stderr.buffer.write(b'no \\xff')\nsys.exit(3)\n")
    assert user_code.run(path, UserModel(None, None, {}, {}), "pt") == "no \ufffd"


def test_a_run_keeps_its_data_while_another_of_the_same_file_begins(monkeypatch, tmp_path):
    path, results = tmp_path / "mine.py", tmp_path / "results"
    path.write_text("from others import pytorch, tensorflow, batch\n")
    side = {"parameters": [], "state": []}
    found = {"path": str(path), "name": "mine", "batch_size": 8, "paired": False}
    found |= {"margin": 1.0, "parity": 1e-5}

    def check(processes, file, sides, folder, say):
        return found | {"sides": dict.fromkeys(sides, side)}

    monkeypatch.setattr(user_task, "_check", check)
    left = [results / "data" / f"own-{name}-of_a_run_that_ended" for name in ("mine", "other")]
    for each in left:
        each.mkdir(parents=True, mode=0o700)

    def prepared(*wanted):
        about = user_task.prepare(str(path), results, {}, set(wanted), print).about
        return user_model.about(results / "data" / about["folder"])

    first, second = prepared(), prepared("pt")
    del TASKS["mine"]
    assert not any(each.exists() for each in left)
    assert first == user_model.about(results / "data" / first["folder"])
    assert (list(first["sides"]), list(second["sides"])) == (["pt", "tf"], ["pt"])


def test_paths_of_modules_are_where_the_user_is(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"lib{os.pathsep}{os.pathsep}{ROOT}")
    found = machine.process_environment(threads=1, flavour=None, allocator="tuned")
    expected = [str(tmp_path / "lib"), str(tmp_path), str(ROOT)]
    assert found["PYTHONPATH"].split(os.pathsep) == expected


def test_a_machine_without_a_temporary_folder_is_one_line(monkeypatch):
    def nowhere():
        raise FileNotFoundError("no usable temporary directory")

    monkeypatch.setattr(conftest.tempfile, "gettempdir", nowhere)
    with pytest.raises(pytest.UsageError, match="set TMPDIR to one that can"):
        conftest.pytest_configure(None)


def test_ctrl_c_while_a_file_is_checked_says_that_nothing_was_measured(monkeypatch, tmp_path):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(conftest.user_task, "prepare", interrupted)
    asked = {"--framework": None, "--technique": None, "--model": "mine.py"}
    settings = SimpleNamespace(results=tmp_path, interpreters={})
    with pytest.raises(pytest.UsageError, match="before anything was measured"):
        conftest._checked_model(asked, settings)


def test_a_console_without_utf_8_loses_no_line(monkeypatch):
    console = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", console)
    monkeypatch.setattr(conftest, "techniques", lambda: 1 / 0)  # no more of it
    with pytest.raises(ZeroDivisionError):
        conftest.pytest_configure(SimpleNamespace(getoption=None))
    TerminalWriter(console).line("1.2 ± 0.1\nmore")
    console.flush()
    assert console.buffer.getvalue() == b"1.2 \\xb1 0.1\nmore\n"


def test_a_python_without_tensorflow_copies_no_weights(monkeypatch, tmp_path):
    """Each framework has an environment of its own: the models are no twins, and both measured."""
    path = tmp_path / "pair.py"
    path.write_text("from others import pytorch, tensorflow, batch, copy_weights\n")
    side = {"batch_size": 8, "labels_sha256": "a", "weights_sha256": "b", "scatter": 0.0}
    side |= {"margin": 1.0, "train_steps": 1}

    def ask(processes, file, name, op, folder):
        if op == "check_pair":
            raise BadFile("pair.py: ModuleNotFoundError: No module named 'tensorflow'")
        return side

    monkeypatch.setattr(user_task, "_ask", ask)
    said = []
    about = user_task._check(None, user_model.look(path), ["pt", "tf"], tmp_path, said.append)
    assert (about["paired"], about["pairs"], list(about["sides"])) == (False, {}, ["pt", "tf"])
    assert "weights can't be copied: PyTorch's Python has no TensorFlow" in said


def test_a_framework_that_is_missing_has_the_command_that_installs_it(monkeypatch, tmp_path):
    path = tmp_path / "pair.py"
    path.write_text("from others import pytorch, tensorflow, batch\n")
    side = {"batch_size": 8, "labels_sha256": "a", "weights_sha256": "b", "scatter": 0.0}
    side |= {"margin": 1.0, "train_steps": 1}

    def ask(processes, file, name, op, folder):
        if name == "tf":
            raise user_task._Missing("No module named 'tensorflow'")
        return side

    monkeypatch.setattr(user_task, "_ask", ask)
    about = user_task._check(None, user_model.look(path), ["pt", "tf"], tmp_path, print)
    assert list(about["sides"]) == ["pt"]
    assert about["missing"]["tf"].endswith("install it with: pip install -e '.[tensorflow]'")


def test_the_twins_do_the_same_work(record):
    assert record.tasks["my_model"].paired
    baselines = [
        case
        for case in record.cases
        if case.technique == "gradient_clipping" and case.role == "baseline"
    ]
    ours, theirs = (case.certificate for case in baselines)
    assert ours.weights_sha256 == theirs.weights_sha256
    between = [c for c in record.comparisons if c.kind == "framework"]
    assert between
    plain = next(c for c in between if c.variant == "plain")
    assert plain.reason is None
    assert plain.ratio > 0


def test_every_row_has_figures_or_a_reason(record):
    assert {case.framework for case in record.cases} == {"pt", "tf"}
    for case in record.cases:
        if case.status != "OK":
            assert case.reason, case.id
        elif case.timed:
            assert case.timing.median_s > 0, case.id
    clipped = [c for c in record.cases if c.variant == "clip"]
    assert len(clipped) == 2
    assert all(case.changes_math for case in clipped)


def test_where_the_time_goes_is_said(record, tried):
    seen = [c for c in record.cases if c.technique == "bottleneck" and c.status == "OK"]
    assert len(seen) == 2
    for case in seen:
        parts = case.evidence["parts"]
        assert sum(parts.values()) == pytest.approx(1, abs=0.05)
        assert parts["forward"] > 0
        assert parts["backward"] > 0
    assert re.search(r"PyTorch, a step of [\d.]+ ms:", tried.stdout)
    assert "the frameworks start from equal weights" in tried.stdout


def test_its_check_says_how_far_it_is(tried):
    said = [line for line in tried.stderr.splitlines() if line.startswith("checking ")]
    ends = (" in PyTorch ...", " into TensorFlow's model ...", " in TensorFlow ...")
    assert [line.endswith(end) for line, end in zip(said, ends, strict=True)] == [True] * 3


def test_what_is_printed_as_code_ran(folder, tried):
    latest = folder / "results" / "latest"
    answer = (latest / "answer.txt").read_text("utf-8")
    assert answer.rstrip() in tried.stdout
    assert "did not run" not in answer
    for path in latest.glob("use_*.py"):
        assert path.read_text("utf-8").rstrip() in answer


def test_the_page_begins_with_the_answer_and_its_code(folder, tried):
    latest = folder / "results" / "latest"
    page = (latest / "report.html").read_text("utf-8")
    shown = re.search(r'<pre class="own"[^>]*>(.*?)</pre>', page, re.DOTALL)
    assert html.unescape(shown[1]) == (latest / "answer.txt").read_text("utf-8").rstrip()
    assert "a step of" in shown[1]


@pytest.mark.parametrize(
    ("side", "route", "file"),
    [
        ("pt", "onnx", "model.onnx"),
        pytest.param("tf", "litert", "model.tflite", marks=pytest.mark.campaign),
    ],
)
def test_the_code_of_a_prediction_runs(folder, model, tmp_path, side, route, file):
    named = tmp_path / "my-model 2.py"  # no name for an import
    shutil.copy(folder / "my_model.py", named)
    model = replace(model, file=user_model.look(named))
    row = records.case(route, technique="export", framework=side, settings={"route": route})
    path = tmp_path / "predict.py"
    code = user_code.predict_code(model, row, path.name)
    path.write_text(code + "assert output.shape == (8, 10)\n")
    workers.run("example_worker", (side,), lambda _: [path])
    assert (tmp_path / file).stat().st_size > 20_000  # it has the weights


def test_why_there_is_no_accuracy_of_what_was_timed_is_said():
    row = records.case("bf16", technique="stacking", timed=False)
    assert user_answer._not_measured(records.record([row])) == []
    untold = row.but(reason="accuracy not measured: mine.py:3: in evaluate")
    failed = row.but(status="FAILED", reason="it fell over")
    said = user_answer._not_measured(records.record([untold, failed]))
    assert said[0] == "Not measured:"
    assert "bf16 (stacking): accuracy not measured: mine.py:3: in evaluate" in " ".join(said)
    assert "bf16 (stacking): FAILED: it fell over" in " ".join(said)


LISTS = """
import numpy as np
def pytorch():
    from torch import nn
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(6, 5), nn.Linear(4, 3)
        def forward(self, left, right):
            return self.a(left)[:, :3] * self.b(right)
    return Two(), nn.CrossEntropyLoss()
def drawn(size, seed):
    draw = np.random.default_rng(seed).standard_normal
    return [draw((size, 6), dtype=np.float32), draw((size, 4), dtype=np.float32)], [0] * size
"""
BATCH = "def batch(size=8, seed=0):\n    return drawn(size, seed)\n"
BATCHES = "def batches():\n    for seed in range(3):\n        yield list(drawn(8, seed))\n"


def test_code_runs_where_it_lies_on_batches_with_lists(tmp_path, monkeypatch):
    """A DataLoader gives two inputs as a list. A module of Python's may have the file's name."""
    monkeypatch.setattr(sys, "path", [*sys.path])  # who is started later must find Python's own
    monkeypatch.delenv("PYTHONPATH", raising=False)
    models, place = tmp_path / "models", tmp_path / "run"
    models.mkdir()
    place.mkdir()
    of = {"has_optimizer": False, "targets_first": False, "named": False, "as_given": False}
    for name, more in (("lists", BATCH), ("json", BATCHES)):
        file = models / f"{name}.py"
        file.write_text(LISTS + more)
        module = user_model.load(file)
        x, y = module.drawn(8, 0)
        assert not user_model.keeps_structure(x)
        assert not user_model.keeps_structure(y)
        model = UserModel(user_model.look(file), None, {"batch_size": 8, "sides": {"pt": of}}, {})
        row, path = records.case("winners", technique="stacking"), place / f"use_{name}.py"
        path.write_text(f"{user_code.train_code(model, row, path.name)}assert loss.isfinite()\n")
    both = place / "both.py"  # in one process, most of which is an import
    both.write_text(
        "import pathlib, runpy, sys\n"
        "for path in sorted(map(str, pathlib.Path(__file__).parent.glob('use_*.py'))):\n"
        "    runpy.run_path(path)\n"
        "sys.stdout.buffer.write(b'\\xfc')\n"  # as old consoles have it
    )
    assert user_code.run(both, model, "pt") is None


@pytest.mark.parametrize(
    ("tree", "kept"),
    [
        (np.zeros(2), True),
        ({"a": (np.zeros(2), 3)}, True),
        ((1, 2), False),
        ([np.zeros(2)], False),
        ({"a": [np.zeros(2)]}, False),
        ({1: np.zeros(2)}, False),
        (MappingProxyType({"a": np.zeros(2)}), False),
    ],
)
def test_what_becomes_another_structure_is_known(tree, kept):
    assert user_model.keeps_structure(tree) is kept


def test_an_answer_of_a_run_that_ended_early_is_written(model, record, tmp_path):
    model.about["sides"]["tf"]["own_step"] = "train_step"
    cases = [
        case.but(blocks=[], evidence=None, metrics={}, timing=Timing()) for case in record.cases
    ]
    cases.append(cases[0].but(technique="batch_size_finder", id="batch_size_finder"))
    user_answer.write(tmp_path, record.but(cases=cases, comparisons=[]), model)
    said = user_answer.read(tmp_path)
    assert "where a step's time goes was not measured" in said
    assert "TensorFlow: the model's train_step is not used. A step is the forward pass" in said
    assert "PyTorch: the model's own" not in said
    assert "train step, batch 8: not timed within --minutes; give more" in said
    assert "argest batch" not in said
    assert not list(tmp_path.glob("*.py"))
    named = [case for case in cases if case.technique == "gradient_clipping"]
    user_answer.write(tmp_path, record.but(cases=named, comparisons=[]), model)
    assert "where a step's time goes" not in user_answer.read(tmp_path)


def test_an_interrupted_run_has_its_answer_at_once(monkeypatch, model, record, tmp_path):
    monkeypatch.setattr(user_code, "run", lambda *given: pytest.fail("code was run"))
    monkeypatch.setattr(user_code, "gaining", lambda *given: pytest.fail("code was written"))
    for name in ("use_pytorch.py", "predict_tensorflow.py"):
        (tmp_path / name).touch()  # of the answer before, where the run was taken up
    user_answer.write(tmp_path, record.but(ended="interrupted"), model)
    assert user_answer.read(tmp_path).endswith("since you interrupted; --resume tries it.")
    assert [path.name for path in tmp_path.iterdir()] == ["answer.txt"]


def test_a_run_of_a_file_that_was_changed_is_not_taken_up(folder, tried, tmp_path):
    changed = tmp_path / "my_model.py"
    changed.write_text((folder / "my_model.py").read_text("utf-8") + "# mended\n")
    begun = resume.begun(folder / "results" / "latest")
    begun.check_file(folder / "my_model.py")
    with pytest.raises(ValueError, match=r"my_model\.py changed since .* start a new run"):
        begun.check_file(changed)
    environment = begun.record.environment.but(peak_flops=None)
    early = replace(begun, record=begun.record.but(environment=environment))
    early.check_file(changed)  # it ended before it had measured anything


def test_what_the_compiler_left_out_is_said(record):
    case = next(case for case in record.cases if case.status == "OK")
    left = case.but(evidence={"graphs": 2, "not_compiled": ["lstm", "zeros"]})
    whole = case.but(evidence={"graphs": 1, "not_compiled": []})
    (_, said, _) = user_answer._partly_compiled(record.but(cases=[whole, left]))
    assert said.endswith("batch 8: 2 graphs; not compiled: lstm, zeros")


def test_code_says_how_to_start_it_as_the_rows_were(model, tmp_path):
    row = records.case("winners", technique="stacking")
    code = user_code.train_code(model, row, "use.py")
    (tmp_path / "use.py").write_text("import json, os; print(json.dumps(dict(os.environ)))")
    command = [line.strip("# ") for line in code.splitlines() if line[:6] == "#     "]
    said = "\n".join(command).replace("python ", f"{shlex.quote(sys.executable)} ")
    done = subprocess.run(said, shell=True, cwd=tmp_path, capture_output=True, check=True)
    assert json.loads(done.stdout).items() >= machine.TUNED_ALLOCATOR.items()


@pytest.mark.parametrize(
    ("verdict", "said"),
    [("slower", "1.606 (1.502–1.717) times as long without the allocator's settings"), (None, "")],
)
def test_what_the_allocator_costs_as_installed_is_said(verdict, said):
    case = records.case("as_installed", technique="baseline")
    one = records.comparison(case, case, 1.606, 1.502, 1.717, verdict=verdict)
    record = records.record([case], [one])
    assert " ".join(user_answer._allocator(record, "pt")).strip().startswith(said)
    assert user_answer._allocator(record, "tf") == []


def test_other_commands_read_its_record(folder, tried, capsys):
    record = str(folder / "results" / "latest")
    assert choose.main([record, "--goal", "train-speed"]) == 0
    assert "my_model, batch 8, train step" in capsys.readouterr().out
    assert (folder / "results" / "latest" / "report.html").is_file()


def test_what_is_not_measured_of_a_file_has_a_reason():
    every = techniques()
    measured = {name for name, one in every.items() if one.is_measured_of_users}
    assert len(measured) > 10
    assert left_out(every).keys() == every.keys() - measured
    assert all(left_out(every).values())
    assert OF_A_FAMILY.keys() <= {one.family for one in every.values()}
