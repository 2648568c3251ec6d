"""Planted bottlenecks are each named, and a healthy step is called healthy."""

from __future__ import annotations

import importlib
import json
import re
import shlex
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

from bench import diagnose as command
from bench.analysis.questions import REMEDIES, remedies
from bench.analysis.reading import load
from bench.analysis.table import TIME
from bench.harness.run_plan import techniques
from bench.record import Attempt, encode
from shared.bottlenecks import BOTTLENECKS, diagnose
from shared.profiles import Breakdown, Operator
from tests.diagnosis.naps import forget, late_batches
from tests.records import whole_run
from tests.workers import ROOT, parent

FRAMEWORKS = ("pt", "tf")
MODELS = "steps"
RECORD = ROOT / "docs"


def made_up(operators=(), **parts) -> Breakdown:
    """A breakdown of a step of one second."""
    seconds = dict.fromkeys(("waiting", "transfer", "forward", "backward", "optimizer"), 0.0)
    seconds |= dict.fromkeys(("communication", "overhead", "idle"), 0.0) | parts
    return Breakdown(1.0, 1.05, 1.05, **seconds, operators=tuple(operators), gaps=(), memory=())


PRODUCT = Operator("aten::addmm", 10, 0.7, 0.7)
UPDATE = Operator("aten::add_", 10, 0.7, 0.7)
SMALL = Operator("aten::mul", 1e5, 0.3, 0.3)
ENLARGED = [Operator(name, 10, 0.5, 0.5) for name in ("upsample_bilinear2d", "ResizeBilinear")]
LINEAR = Operator("aten::linear", 10, 0.7, 0.7)


@pytest.mark.parametrize(
    ("breakdown", "named"),
    [
        (made_up([PRODUCT, SMALL], forward=1.0), "arithmetic"),
        (made_up([LINEAR, SMALL], forward=1.0), "arithmetic"),
        (made_up([UPDATE, SMALL], forward=1.0), "memory bandwidth"),
        (made_up(ENLARGED, forward=1.0), "memory bandwidth"),
        (made_up([PRODUCT], waiting=0.4, forward=0.6), "input"),
        (made_up([PRODUCT], transfer=0.4, forward=0.6), "input"),
        (made_up([PRODUCT], communication=0.4, forward=0.6), "communication"),
        (made_up([PRODUCT], overhead=0.5, forward=0.5), "overhead"),
        (made_up([PRODUCT, SMALL], overhead=0.2, forward=0.8), "overhead"),
        (made_up([PRODUCT], waiting=0.2, overhead=0.1, forward=0.7), "arithmetic"),
    ],
)
def test_shares_name_the_bottleneck(breakdown, named):
    diagnosis = diagnose(breakdown, full=0.5, faults=0)
    assert diagnosis.bottleneck == named
    assert diagnosis.healthy == (named == "arithmetic")
    total = sum(share for name, share in diagnosis.shares.items() if name != "memory size")
    assert total == pytest.approx(1.0)


@pytest.mark.parametrize(("full", "faults"), [(0.95, 0), (0.5, 100)])
def test_a_full_memory_comes_first(full, faults):
    found = diagnose(made_up([PRODUCT], waiting=0.9, forward=0.1), full=full, faults=faults)
    assert found.bottleneck == "memory size"
    assert f"{full:.0%} of the memory" in found.evidence[0]


def healthy(models):
    return models.plain_step(models.dense(512, 512, 512, 512, 2))


def with_metric(models):
    small = models.dense(8, 8, 2)
    return models.with_metric(models.plain_step(small), small)


def looked_up(models):
    return models.codes(200_000, 32, 4), models.batch(4, 32)[1]


# A step, its batches, and what holds it back.
PLANTED = {
    "slow loader": (healthy, lambda m: late_batches(m.batch(512, 256), 0.05), "input"),
    "tiny model": (
        lambda m: m.plain_step(m.dense(4, 4, 4, 4, 4, 2)),
        lambda m: [m.batch(4, 2)],
        "overhead",
    ),
    "huge embedding": (
        lambda m: m.plain_step(m.table(200_000, 64), "adam"),
        lambda m: [looked_up(m)],
        "memory bandwidth",
    ),
    "blocked exchange": (
        lambda m: m.exchanging(healthy(m), 0.06),
        lambda m: [m.batch(512, 256)],
        "communication",
    ),
    "synchronising metric": (with_metric, lambda m: [m.batch(8, 64)], "overhead"),
    "healthy": (healthy, lambda m: [m.batch(512, 256)], "arithmetic"),
}


@pytest.mark.parametrize("planted", PLANTED)
def test_what_was_planted_is_named(models, planted):
    make_step, make_batches, named = PLANTED[planted]
    step, batches = make_step(models), make_batches(models)
    forget()
    diagnosis = models.bottleneck.find_bottleneck(step, batches, steps=8)
    assert diagnosis.bottleneck == named, str(diagnosis)
    assert diagnosis.healthy == (planted == "healthy")
    assert len(diagnosis.evidence) >= 2


def test_a_tasks_step_trains_on_its_data_and_files_are_refused(models, agrees, monkeypatch, capsys):
    step, batches = models.examples.train_step("digits-cnn", 4)
    assert [len(y) for _, y in batches] == [4, 4, 4, 4]
    agrees("a task", {"losses": [float(step(*batch)) for batch in batches]}, 1e-4)
    refused = "'photos' is no task with data in memory; these are: digits-cnn"
    with pytest.raises(ValueError, match=refused):
        models.examples.train_step("photos")
    arguments = ["program", "digits-cnn", "--batch-size", "4", "--steps", "4", "--json"]
    monkeypatch.setattr(sys, "argv", arguments)
    models.bottleneck.main()
    assert_trains(json.loads(capsys.readouterr().out)["breakdown"])


def assert_trains(breakdown: dict) -> None:
    assert min(breakdown[part] for part in ("forward", "backward", "optimizer")) > 0


@pytest.mark.only("tf")
@pytest.mark.parametrize(
    ("keras", "made"),
    [
        ("keras", "loop"),
        ("keras", "compiled"),
        ("tf_keras", "loop"),
        ("tf_keras", "loop_of_an_old_optimizer"),
        ("tf_keras", "compiled"),
    ],
)
def test_either_keras_is_diagnosed(models, keras, made):
    """A loop of one's own, and what `compile` makes of a model."""
    step, batch = getattr(models, made)(importlib.import_module(keras)), models.batch(64, 64)
    with mock.patch.object(models.profiling, "_TURNS", 1):  # nobody looks at the seconds
        assert_trains(
            models.bottleneck.find_bottleneck(step, [batch], steps=4).as_json()["breakdown"]
        )


# The command --------------------------------------------------------------------------------------


def test_records_of_equal_names_are_told_apart():
    here, there = (command.shown(Path(place, "results/latest")) for place in ("here", "there"))
    assert here != there
    assert command.shown(RECORD) == "docs"


def test_a_quick_run_does_not_hide_what_the_published_one_shows(tmp_path, monkeypatch):
    """One block has no interval, and shows no gain."""
    (latest := tmp_path / "results" / "latest").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    for effort, found in (("quick", "docs"), ("default", "results/latest")):
        (latest / "results.json").write_bytes(encode(whole_run(effort)))
        assert list(command.newest()) == [found]


@pytest.mark.parametrize("framework", ["pt", "tf"])
def test_remedies_are_rows_that_gained(framework):
    record = load(RECORD)
    compared = {(c.ratio, c.ci) for c in record.comparisons if c.kind == "baseline" and c.ci}
    proposed = remedies(record, framework, "overhead")
    assert proposed
    for one in proposed:
        assert "overhead" in techniques()[one.row.case.technique].remedies
        assert one.goal.figure == TIME
        assert (one.gain.value, one.gain.bounds) in compared
        assert one.gain.high < 1
    assert [one.gain.value for one in proposed] == sorted(one.gain.value for one in proposed)


def test_every_bottleneck_has_techniques_that_exist():
    assert REMEDIES.keys() == set(BOTTLENECKS)
    assert {name for one in techniques().values() for name in one.remedies} == set(BOTTLENECKS)


@pytest.mark.parametrize(
    ("source", "answer"),
    [
        ("import torch", "pt"),
        ("from keras import layers", "tf"),
        ("import torch, tensorflow", "imports both torch and tensorflow"),
        ("import numpy", "imports neither torch nor tensorflow"),
        ("import (", "model.py:1"),
    ],
)
def test_a_file_is_run_by_the_framework_that_it_imports(tmp_path, source, answer):
    path = tmp_path / "model.py"
    path.write_text(source)
    if answer in ("pt", "tf"):
        assert command.framework_of(path) == command.framework_of(path, answer) == answer
        other = {"pt": "tf", "tf": "pt"}[answer]
        with pytest.raises(ValueError, match="only: leave out --framework"):
            command.framework_of(path, other)
    else:
        if "imports" in answer:
            assert command.framework_of(path, "tf") == "tf"
        with pytest.raises(ValueError, match=answer):
            command.framework_of(path)


MODEL = """
import torch

def make():
    linear = torch.nn.Linear(4, 4)
    return lambda x: linear(x).sum().backward(), [(torch.ones(2, 4),)]
"""


SWITCHED = """
import os
os.environ["TF_USE_LEGACY_KERAS"] = "1"
import tensorflow as tf

def make():
    model = tf.keras.Sequential([tf.keras.layers.Dense(4)])
    assert type(model).__module__.startswith("tf_keras"), type(model)
    model.compile("sgd", "mse")
    return model.train_on_batch, [(tf.ones((2, 4)), tf.ones((2, 4)))]
"""


def test_a_file_chooses_its_flavour_of_keras(tmp_path, capsys):
    path = tmp_path / "model.py"
    path.write_text(SWITCHED)
    assert command.main([str(path), "--steps", "4"]) == 0, capsys.readouterr().err
    assert capsys.readouterr().out.startswith("TensorFlow: ")  # it asserts its flavour itself


def test_the_terminal_is_left_to_the_diagnosis(tmp_path):
    """Of torch's profiler there is nothing, unless a user asks for it."""
    path = tmp_path / "model.py"
    path.write_text(MODEL)
    run = partial(parent("pt").run, "pt_impl.diagnosis.bottleneck", path, "--steps=4")
    quiet, loud = run(), run(KINETO_LOG_LEVEL="0")
    assert quiet.returncode == loud.returncode == 0
    assert quiet.stdout.partition("\n")[0].split(":")[0] in (*BOTTLENECKS, "healthy")
    kineto = re.compile(r"^(VERBOSE|INFO|WARNING|STAGE|ERROR|USDT):", re.M)
    assert not kineto.search(quiet.stderr)
    assert kineto.search(loud.stderr)


def test_what_a_file_prints_as_it_ends_is_not_its_verdict(monkeypatch):
    given = SimpleNamespace(what="model.py", steps=8, batch_size=None, folder=None)

    def diagnosed(*lines):
        done = SimpleNamespace(returncode=0, stdout="\n".join(lines), stderr="")
        monkeypatch.setattr(command.subprocess, "run", lambda *words, **settings: done)
        return command.diagnosed("pt", given)

    assert diagnosed("begun", '{"bottleneck": "input"}', "7", "bye") == {"bottleneck": "input"}
    with pytest.raises(ValueError, match=r"model\.py exited before"):
        diagnosed("not here")


@pytest.mark.parametrize(
    ("code", "lines", "reason"),
    [
        (3, "", "in PyTorch: it exited with status 3"),
        (-9, "a warning\n", "in PyTorch: a warning; it was killed by SIGKILL"),
        (1, "model.py:3: KeyError: 7\nof what else ends\n", "model.py:3: KeyError: 7"),
    ],
)
def test_how_a_file_ended_is_said(monkeypatch, code, lines, reason):
    given = SimpleNamespace(what="a/model.py", steps=8, batch_size=None, folder=None)
    done = SimpleNamespace(returncode=code, stdout="", stderr=lines)
    monkeypatch.setattr(command.subprocess, "run", lambda *words, **settings: done)
    with pytest.raises(ValueError, match=f"{reason}$"):
        command.diagnosed("pt", given)


def test_a_profiler_that_cost_less_than_the_noise_cost_nothing():
    diagnosis = diagnose(made_up([PRODUCT], forward=1.0), full=0.5, faults=0).as_json()
    for cost, shown in ((-0.27, "0.0%"), (0.05, "5.0%")):
        diagnosis["breakdown"]["cost"] = cost
        text = "\n".join(command.text("pt", diagnosis, {}))
        assert f"  the profiler cost {shown} of the step" in text


def test_a_file_without_make_is_not_run(tmp_path, capsys):
    path = tmp_path / "train.py"
    path.write_text(f"import torch\nopen({str(tmp_path / 'executed')!r}, 'w')\n")
    assert command.main([str(path)]) == 2
    assert f"{path} has no function make() that returns (step, batches)" in capsys.readouterr().err
    assert not (tmp_path / "executed").exists()


def test_a_file_for_try_is_told_what_diagnoses_it(tmp_path, capsys):
    path = tmp_path / "my_model.py"
    path.write_text("def pytorch():\n    return 1\n\ndef batch(size=2, seed=0):\n    return 1, 2\n")
    assert command.main([str(path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"twinbench try {shlex.quote(str(path))} --technique bottleneck" in line


def test_a_users_file_is_diagnosed_from_the_command_line(tmp_path, capsys, monkeypatch):
    """By a fork; the test of flavours above starts a process, as the command does.

    Whatever holds the step back on a machine that does other work, overhead is said to.
    """

    def run(words, **settings):
        done = parent("pt").run(*words[2:])
        done.stderr = done.stderr.partition("nanobind: ")[0]  # says of a fork what it leaves
        *before, last = done.stdout.splitlines() or [""]
        if last.startswith("{"):
            planted = {"bottleneck": "overhead", "healthy": False}
            done.stdout = "\n".join([*before, json.dumps(json.loads(last) | planted)])
        return done

    monkeypatch.setattr(command.subprocess, "run", run)
    quiet = SimpleNamespace(stop=lambda: Attempt(others=0.0))
    monkeypatch.setattr(command.machine, "Watch", lambda: quiet)
    path = tmp_path / "model.py"
    path.with_name("beside.py").write_text("SIZE = 4\n")
    path.write_text(f"from beside import SIZE\n{MODEL}")
    arguments = [str(path), "--record", str(RECORD), "--steps", "8"]
    assert command.main([*arguments, "--folder", str(tmp_path / "files")]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("PyTorch: bottleneck: overhead\n")
    assert "what helped against overhead (docs):" in printed
    assert "times as fast" in " ".join(printed.split())
    assert (tmp_path / "files" / "pt" / "trace.json").is_file()
    path.write_text("import torch\n\ndef make():\n    raise KeyError('no such thing')\n")
    assert command.main(arguments) == 2
    assert "diagnose: model.py:4: in make KeyError: 'no such thing'" in capsys.readouterr().err
    assert json.loads((tmp_path / "files" / "pt" / "trace.json").read_text())["traceEvents"]
