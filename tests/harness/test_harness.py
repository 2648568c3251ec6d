"""The harness with real processes and a NumPy kit: faults, planted differences, leftovers."""

import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Pipe
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import psutil
import pytest

from bench.harness import (
    accuracy,
    folders,
    isolated_measurements,
    machine,
    matches,
    memory,
    plan,
    processes,
    sizes,
    timing,
    wire,
    worker,
)
from bench.harness.answers import Sample, TrainedSeed
from bench.harness.conditions import not_started
from bench.harness.durations import USUAL_BYTES
from bench.harness.matches import Match, configure, parent_key
from bench.harness.plan import FRAMEWORKS, Effort, Prepared, Workload
from bench.harness.processes import Failed, ParentFailed, ParentKey, Processes
from bench.harness.selection import cases_of
from bench.record import Attempt
from shared import datasets
from shared.specs import TASKS, forward_flops, layers, parameter_count, parameter_shapes
from tests.conftest import LIMITS
from tests.harness import faulty
from tests.harness.command_line import MARK, marked
from tests.harness.fake_impl.kit.runtime import Clock

ROOT = Path(__file__).resolve().parents[2]
KEY = ParentKey("pt", None, "tuned", "main", 1)
pytestmark = [pytest.mark.timeout(240), pytest.mark.usefixtures("fakes")]
linux = pytest.mark.skipif(sys.platform != "linux", reason="figures of the Linux kernel")


@pytest.fixture(scope="module")
def faults(fakes_in_module, measure):
    """One block with every fault, side by side with cases that are fine."""
    return measure(
        *faulty.FAULTS, "as_installed", "needs_compiler", "needs_gpu", "control",
        amount=Effort(blocks=1, rounds=6, seeds=2),
    )  # fmt: skip


@pytest.fixture(scope="module")
def planted(fakes_in_module, measure):
    """Enough blocks to find a difference of a tenth, on a clock that work alone moves."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FAKE_CLOCK", "1")
        amount = Effort(blocks=4, rounds=8, seeds=3)
        return measure(*faulty.DEVICE_SHARES, technique=faulty.PLANTED, amount=amount)


@pytest.fixture
def started(tmp_path):
    """Processes of one test."""
    with Processes(tmp_path / "logs", limits=LIMITS) as found:
        yield found


def own(found, variant):
    """The comparison of a variant with its own baseline."""
    (one,) = [
        c
        for c in found.comparisons
        if c.kind == "baseline" and c.numerator.endswith(f"/pt/{variant}")
    ]
    return one


def rounds_of(case):
    """How many samples each block of each match has."""
    matches = case.timing.step_s.values()
    return [len(samples) for blocks in matches for samples in blocks.values()]


def until(condition, seconds):
    """Wait until `condition()` holds, `seconds` at most; its last value."""
    deadline = time.monotonic() + seconds
    while not (value := condition()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return value


# Faults -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variant", "status", "reason"),
    [
        ("raises", "FAILED", "RuntimeError: this is wrong"),
        ("raises_late", "FAILED", "ValueError: step 41 is too much"),
        ("exits", "FAILED", "the worker exited with status 3 during build"),
        ("sys_exits", "FAILED", "SystemExit: 3"),
        ("killed", "FAILED", "the worker was killed by SIGKILL during build"),
        ("killed_late", "FAILED", "the worker was killed by SIGKILL during sample"),
        ("out_of_memory", "FAILED", "MemoryError: Unable to allocate 1.00 GiB"),
        ("refuses", "UNSUPPORTED", "upstream refuses this model"),
        ("not_applied", "NOT_APPLIED", "nothing happened"),
        ("retraces", "FAILED", "traced again in steady state: "),
        ("burns_cpu", "FAILED", "a waiting worker used "),
        ("unsynchronised", "FAILED", "not synchronised: its result came "),
        ("odd_evidence", "FAILED", "TypeError: Object of type int64 is not JSON"),
        ("fails_as_installed", "FAILED", "cold start: RuntimeError: works with the tuned"),
        ("fails_in_training", "FAILED", "training: RuntimeError: this is wrong"),
        ("needs_gpu", "UNSUPPORTED", "needs a CUDA GPU"),
    ],
)
def test_a_fault_gets_its_status_and_a_reason_of_one_line(faults, variant, status, reason):
    case = faults.cases["pt", variant]
    assert case.status == status, case.reason
    assert case.reason.startswith(reason)
    assert "\n" not in case.reason
    assert case.timing.median_s is None
    assert not any(case.id in (c.numerator, c.denominator) for c in faults.comparisons)


FINE = ("good", "prints", "synchronised", "leaves_a_child", "leaks", "as_installed", "control")


@pytest.mark.parametrize("variant", FINE)
def test_the_others_are_measured_whole(faults, variant):
    case = faults.cases["pt", variant]
    assert (case.status, case.reason) == ("OK", None)
    assert set(rounds_of(case)) == {6}
    assert case.timing.median_s > 0
    assert len(case.certificate.losses) == 10
    assert case.evidence["operator_dtypes"] == {"matmul": {"float32": 1}}
    if variant != "control":
        assert case.timing.cold_first_call_s > 0
        assert case.memory.import_bytes > 0
        assert len(case.accuracy.per_seed) == 2


def test_every_fault_was_tried(faults):
    assert {variant for _, variant in faults.cases} >= set(faulty.FAULTS)
    assert faults.results.finished is True


def test_a_case_that_fails_after_its_match_keeps_what_was_measured(faults):
    for variant in ("fails_as_installed", "fails_in_training"):
        case = faults.cases["pt", variant]
        assert rounds_of(case) == [6]


def test_where_a_file_s_own_figure_fails_what_was_timed_stands(faults):
    """The fault is not the row's."""
    case = faults.cases["pt", "has_no_figure"]
    reason = "accuracy not measured: mine.py:3: in evaluate KeyError: 'labels'"
    assert (case.status, case.reason) == ("OK", reason)
    assert case.timing.median_s > 0
    assert case.accuracy is None or case.accuracy.per_seed == []
    assert own(faults, "has_no_figure").ratio > 0


@pytest.mark.parametrize(
    ("variant", "reason"),
    [
        ("wrong_weight", "initial weights differ"),
        ("shuffled_batch", "loss of step 3 differs by "),
        ("nan_loss", "loss of step 1 differs by inf"),
    ],
)
def test_other_work_is_not_comparable(faults, variant, reason):
    assert faults.cases["pt", variant].status == "OK"
    comparison = own(faults, variant)
    assert comparison.verdict == "not comparable"
    assert comparison.reason.startswith(reason)
    assert own(faults, "prints").reason is None  # and equal work is


def test_what_a_worker_prints_is_in_its_log_alone(faults):
    logs = {path.name: path.read_text() for path in (faults.folder / "logs").iterdir()}
    printed = [text for name, text in logs.items() if "prints" in name]
    assert len(printed) == 3  # match, cold start, training
    for text in printed:
        assert "a line on standard output" in text
        assert "and bytes on its descriptor" in text
        assert "and on standard error" in text
    assert any("this is wrong" in text for name, text in logs.items() if "raises" in name)


def test_no_process_is_left_after_a_run(faults):
    assert marked(faults.mark) == []
    mine = {child.pid for child in psutil.Process().children(recursive=True)}
    assert not [p for p in mine if str(faults.folder) in " ".join(psutil.Process(p).cmdline())]


def test_a_leak_of_50_mb_shows_within_a_tenth(faults):
    def steady(variant):
        memory = faults.cases["pt", variant].memory
        return memory.steady_peak_bytes - memory.import_bytes

    assert steady("leaks") - steady("good") == pytest.approx(faulty.LEAK, rel=0.1)
    assert abs(steady("synchronised") - steady("good")) < 0.1 * faulty.LEAK


def test_memory_is_split_into_its_parts(faults):
    memory = faults.cases["pt", "good"].memory
    assert memory.parameters_bytes == memory.gradients_bytes > 0
    above = memory.steady_peak_bytes - memory.import_bytes
    parts = memory.parameters_bytes + memory.gradients_bytes + memory.optimizer_bytes
    assert memory.rest_bytes == above - parts
    assert memory.device_peak is None


@linux
def test_threads_and_allocator_are_read_back(faults):
    threads = machine.usable_threads()
    tuned, plain = (faults.cases["pt", v].process for v in ("good", "as_installed"))
    assert tuned["threads"] == {"intra_op": threads, "inter_op": threads}
    if "glibc" in " ".join(os.confstr("CS_GNU_LIBC_VERSION").split()):
        assert tuned["keeps_freed_memory"] is True
        assert plain["keeps_freed_memory"] is False


@pytest.mark.campaign  # on a busy machine anything may take longer
def test_the_harness_costs_at_most_one_percent(faults):
    floor = faults.results.noise_floor
    assert 0 < floor.empty_sample_share["pt"] <= 0.01
    assert floor.shortest_sample_s >= timing.SAMPLE_S


def test_the_record_tells_how_long_each_part_took(faults):
    seconds = dict(faults.results.seconds)
    total, first = seconds.pop("total"), seconds.pop("first_table")
    assert seconds.pop("intervals") is None  # of one block
    parts = {"describe", "parents", "start", "build", "first_call", "first_steps", "warm", "rounds"}
    assert seconds.keys() == parts | {"data", "cold", "training", "writing", "sentinel"}
    assert min(seconds.values()) > 0
    assert 0.9 * total < sum(seconds.values()) <= total
    assert 0 < first < total
    own = faults.cases["pt", "good"].seconds
    assert own.keys() == parts - {"describe", "parents"} | {"cold", "training"}
    assert min(own.values()) > 0


def test_the_record_tells_under_which_conditions_each_block_was_played(faults):
    played = {(found.match, found.block): found for found in faults.results.blocks}
    assert sorted(played) == [(number, 0) for number in range(len(faults.results.matches))]
    for (match, _), block in played.items():
        contenders = {i for i in faults.results.matches[match] if not i.endswith("/needs_gpu")}
        assert set(block.order) == contenders
        assert 1 <= len(block.tries) <= matches.MOST_TRIES
        assert block.seconds["rounds"] > 0
    orders = [block.order for block in played.values()]
    assert len({order.index(next(i for i in order if i.endswith("/good"))) for order in orders}) > 1


def test_a_worker_that_hangs_is_a_time_out(measure, monkeypatch):
    usual = processes.Worker.ask

    def ask(worker, timeout, op, **given):
        hangs = op == "build" and given["case"].variant == "hangs"
        return usual(worker, 0.5 if hangs else timeout, op, **given)

    monkeypatch.setattr(processes.Worker, "ask", ask)
    found = measure("hangs", "same", amount=Effort(1, 3, 1, first_pass_alone=True))
    hung = found.cases["pt", "hangs"]
    assert (hung.status, hung.reason) == ("FAILED", "timeout: no answer to build within 0.5 s")
    assert found.cases["pt", "same"].reason is None
    assert marked(found.mark) == []


@pytest.mark.parametrize(
    ("times", "status", "reason"),
    [
        (0.1, "FAILED", "needs 0.7 GB of memory in addition to its baseline, but 0.6 GB are free"),
        (1.5, "OK", None),  # one by one
    ],
)
def test_who_finds_no_memory_plays_later_or_fails(measure, monkeypatch, times, status, reason):
    free = matches.RESERVE + int(times * USUAL_BYTES)
    monkeypatch.setattr(machine, "free_memory", lambda: free)
    monkeypatch.setattr(machine, "usable_threads", lambda: 2)
    found = measure("same", "prints", amount=Effort(1, 3, 1, first_pass_alone=True))
    for name in ("same", "prints"):
        assert (found.cases["pt", name].status, found.cases["pt", name].reason) == (
            status,
            reason,
        )
    assert found.cases["pt", "good"].status == "OK"
    assert len(found.results.matches) == 2


def test_logs_may_lie_beside_whoever_starts_the_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with Processes(Path("logs"), limits=LIMITS) as started:
        started.execute(KEY, "one").stop(kill=True)
    assert [log.name for log in (tmp_path / "logs").iterdir()] == ["0001-one.log"]


def test_a_worker_that_can_not_be_forked_says_why(tmp_path):
    """The parent's answer, where the system has no more processes."""
    said = "BlockingIOError: [Errno 11] Resource temporarily unavailable"
    parent = SimpleNamespace(ask=lambda *_, **__: wire.Reply(error=said))
    with Processes(tmp_path) as started, pytest.raises(ParentFailed, match="Resource temporarily"):
        started._fork(None, parent, "row")


def test_a_worker_that_was_forked_after_the_end_is_ended(tmp_path):
    """Ctrl-C comes while it is forked."""
    stopped = []

    class Late:
        key = SimpleNamespace(framework="pt", threads=1)

        def stop(self, kill):
            stopped.append(kill)

        def ask(self, *_, **__):
            assert stopped
            raise Failed("it has ended")

    every = cases_of(faulty.TECHNIQUE, "nowhere", "default")
    (case,) = [case for case in every if case.id.endswith("pt/same")]
    starts = SimpleNamespace(fork=lambda *_: Late(), limits=LIMITS)
    match = Match(starts, [case], data={}, threads=1, seed=0, evidence=False)
    match._stopped = True
    with pytest.raises(Failed):
        match._fork(case)
    assert stopped == [True]


def test_a_folder_with_a_long_name_holds_no_socket(tmp_path, monkeypatch):
    """A socket's path has 108 characters at most."""
    (folder := tmp_path / ("long" * 30)).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    with Processes(folder / "logs") as started:
        place = Path(started._listener.address)
        assert place.is_socket()
    assert not place.parent.exists()


# Planted differences ----------------------------------------------------------------------------


def test_a_tenth_slower_is_found(planted):
    comparison = own(planted, "slower_by_a_tenth")
    assert comparison.verdict == "slower", comparison
    assert comparison.ratio == pytest.approx(1.1, abs=0.01)
    assert comparison.n == 4


def test_a_win_that_costs_accuracy_is_none(planted):
    comparison = own(planted, "faster_less_accurate")
    assert comparison.verdict == "faster, less accurate", comparison
    case = planted.cases["pt", "faster_less_accurate"]
    assert case.accuracy.difference.verdict == "worse"
    assert case.accuracy.difference.mean == pytest.approx(-5, abs=1e-6)


def test_the_same_is_neither_faster_nor_slower(planted):
    assert own(planted, "the_same").verdict == "equivalent"


# Frameworks, compilers and devices that are not there -------------------------------------------


@pytest.fixture
def broken_kit(tmp_path, monkeypatch):
    """Make a kit whose framework fails to import in the given way."""

    def make(statement):
        package = tmp_path / "broken_impl"
        (package / "kit").mkdir(parents=True)
        for name in worker.KIT:
            (package / f"{name.replace('.', '/')}.py").write_text(statement)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        broken = replace(plan.FRAMEWORKS["pt"], package="broken_impl", module="no_such_framework")
        monkeypatch.setitem(plan.FRAMEWORKS, "pt", broken)

    return make


def test_one_framework_missing(broken_kit, measure):
    broken_kit("import no_such_framework")
    found = measure("same", frameworks=("pt", "tf"), amount=Effort(1, 3, 1))
    for variant in ("good", "same"):
        gone, there = found.cases["pt", variant], found.cases["tf", variant]
        assert gone.status == "UNSUPPORTED"
        assert "No module named 'no_such_framework'" in gone.reason
        assert "pip install -e '.[torch]'" in gone.reason
        assert "\n" not in gone.reason
        assert there.status == "OK"
        assert there.memory.steady_peak_bytes > 0
        assert there.accuracy.mean > 0
    (comparison,) = found.comparisons
    assert comparison.kind == "baseline"


@pytest.mark.parametrize(
    ("statement", "reason"),
    [
        ("raise ImportError('libcudart.so.13: no such file\\nmore')", "libcudart.so.13: no such"),
        ("import os; os._exit(9)", "exited with status 9"),
    ],
)
def test_a_framework_that_is_broken_says_how_in_a_line(broken_kit, started, statement, reason):
    broken_kit(statement)
    with pytest.raises(Failed) as failed:
        isolated_measurements.describe(started, "pt", threads=1)
    assert reason in str(failed.value)
    assert "\n" not in str(failed.value)


def test_a_module_that_only_the_parent_needs_is_missing(monkeypatch, measure):
    """For example one Keras flavour of two."""
    fake = replace(plan.FRAMEWORKS["pt"], preload=("no_such_keras",))
    monkeypatch.setitem(plan.FRAMEWORKS, "pt", fake)
    case = measure("good", amount=Effort(1, 3, 1)).cases["pt", "good"]
    assert case.status == "UNSUPPORTED"
    assert "No module named 'no_such_keras'" in case.reason
    assert "pip install -e '.[torch]'" in case.reason


@linux
def test_a_parent_whose_imports_start_a_thread_is_not_forked(monkeypatch, started):
    """A fork has the caller's thread alone, and whatever lock another one held for ever."""
    preload = ("tests.harness.fake_impl.threaded",)
    threaded = replace(plan.FRAMEWORKS["pt"], preload=preload)
    monkeypatch.setitem(plan.FRAMEWORKS, "pt", threaded)
    (failure,) = started.start_parents([KEY]).values()
    assert "started a thread: no fork is safe" in str(failure)


def test_twins_start_from_the_same_weights_in_every_block_and_training(measure):
    """The fake's accuracy follows from a seed's weights alone."""
    amount, frameworks = Effort(2, 3, 3), ("pt", "tf")
    found = measure("good", technique=faulty.TRAINED, frameworks=frameworks, amount=amount)
    at_end = found.results.environment.products_at_end
    assert {name: speeds["float32"].all for name, speeds in at_end.items()} == {
        "pt": 4e9,
        "tf": 4e9,
    }
    ours, theirs = (found.cases[name, "good"] for name in ("pt", "tf"))
    for name in ("weights_sha256", "losses"):
        first, twin = ([getattr(block, name) for block in case.blocks] for case in (ours, theirs))
        assert first == twin
        assert first[0] != first[1]  # each block has its own
    assert ours.accuracy.per_seed == theirs.accuracy.per_seed
    assert len(set(ours.accuracy.per_seed)) == 3


def test_an_interpreter_without_the_framework(measure, tmp_path):
    """It starts, so that the usage check passes, but NumPy is not there."""
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S -E "$@"\n')
    bare.chmod(0o755)
    amount, frameworks = Effort(1, 3, 1, first_pass_alone=True), ("pt", "tf")
    found = measure("good", frameworks=frameworks, amount=amount, interpreters={"tf": str(bare)})
    assert found.cases["tf", "good"].status == "UNSUPPORTED"
    assert "pip install -e '.[tensorflow]'" in found.cases["tf", "good"].reason
    assert found.cases["pt", "good"].status == "OK"


@pytest.mark.parametrize(
    ("reason", "missing"),
    [
        ("ModuleNotFoundError: No module named 'torch'", True),
        ("the worker exited with status 1 before it answered", True),
        ("AttributeError: module 'torch._C' has no attribute 'driver'", False),
    ],
)
def test_a_framework_that_fails_by_itself_is_not_said_to_be_missing(reason, missing):
    said = not_started(FRAMEWORKS["pt"], reason)
    assert said.startswith(f"PyTorch could not be started ({reason})")
    assert said.endswith("; install it with: pip install -e '.[torch]'") == missing


def test_no_compiler_but_a_gpu(measure, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("FAKE_DEVICE", "cuda:0")
    found = measure("needs_compiler", "needs_gpu", amount=Effort(1, 3, 1))
    compiled = found.cases["pt", "needs_compiler"]
    assert compiled.status == "UNSUPPORTED"
    assert "install" in compiled.reason
    assert "compiler" in compiled.reason
    assert found.cases["pt", "needs_gpu"].status == "OK"
    assert found.cases["pt", "needs_gpu"].memory.device_peak["allocated"] == 1 << 20
    assert found.results.environment.gpu == {"name": "fake"}
    assert found.results.environment.compiler is False


@pytest.mark.skipif(not machine.compiler(), reason="no compiler on this machine")
def test_a_compiler_is_used_where_there_is_one(faults):
    assert faults.cases["pt", "needs_compiler"].status == "OK"


def test_threads_that_did_not_take_effect_are_an_error(started, monkeypatch):
    monkeypatch.setenv("FAKE_THREADS", "7")
    peer = started.execute(KEY, "threads")
    with pytest.raises(Failed, match="1 threads were asked for, the framework reports"):
        configure(peer, LIMITS, seed=0)


# Parents ----------------------------------------------------------------------------------------


@pytest.fixture
def mortal(tmp_path, monkeypatch):
    """Let the first parents of PyTorch die at a certain point; returns how many were started."""

    def make(lives, at):
        counter = tmp_path / "lives"
        monkeypatch.setenv("MORTAL", str(counter))
        monkeypatch.setenv("MORTAL_LIVES", str(lives))
        monkeypatch.setenv("MORTAL_AT", str(at))
        dying = replace(plan.FRAMEWORKS["pt"], module="tests.harness.fake_impl.mortal")
        monkeypatch.setitem(plan.FRAMEWORKS, "pt", dying)
        return lambda: len(counter.read_text())

    return make


@linux
@pytest.mark.parametrize("at", ["import", 2])
def test_a_parent_that_dies_is_started_once_more(mortal, measure, at):
    """Before its second fork a worker of its is alive, and stays in the match."""
    starts = mortal(lives=1, at=at)
    found = measure("same", "prints", technique=faulty.TRAINED, amount=Effort(1, 3, 1))
    for variant in ("good", "same", "prints"):
        case = found.cases["pt", variant]
        assert (case.status, case.reason) == ("OK", None)
        assert rounds_of(case) == [3]
    assert starts() == 3  # dead, again, and the parent for training
    assert marked(found.mark) == []


@linux
def test_a_parent_that_always_dies_fails_its_own_cases_alone(mortal, measure):
    starts = mortal(lives=100, at=1)
    amount, frameworks = Effort(2, 3, 1), ("pt", "tf")
    found = measure("good", technique=faulty.TRAINED, frameworks=frameworks, amount=amount)
    case = found.cases["pt", "good"]
    assert case.status == "FAILED"
    assert case.reason.startswith("its parent ")
    assert starts() == 2  # once and once more, and not again in the next block
    assert found.cases["tf", "good"].status == "OK"
    assert len(rounds_of(found.cases["tf", "good"])) == 2


def test_where_forking_is_unsafe_workers_are_executed(faults, measure, monkeypatch):
    monkeypatch.setattr(processes, "FORKS", False)
    found = measure("raises", "prints", "leaks", amount=Effort(1, 6, 2))
    logs = [path.name for path in (found.folder / "logs").iterdir()]
    assert not [name for name in logs if "parent" in name]

    def shape(value):
        if isinstance(value, dict):
            return {key: shape(item) for key, item in value.items()}
        return [shape(item) for item in value] if isinstance(value, list) else type(value)

    def played_once(case):  # with more company a baseline plays more matches
        step_s = {"0": next(iter(case.timing.step_s.values()), None)}
        once = case.but(blocks=case.blocks[:1], timing=case.timing.but(step_s=step_s))
        return msgspec.to_builtins(once)

    for variant in ("good", "raises", "prints", "leaks"):
        executed, forked = found.cases["pt", variant], faults.cases["pt", variant]
        assert (executed.status, executed.reason) == (forked.status, forked.reason)
        assert shape(played_once(executed)) == shape(played_once(forked))
    assert own(found, "prints").reason is None
    assert marked(found.mark) == []


@linux
def test_arms_of_a_control_come_from_parents_of_their_own():
    baseline, control = (
        next(c for c in cases_of(faulty.TECHNIQUE, "m", "default") if c.variant.role == role)
        for role in ("baseline", "control")
    )
    ours, theirs = parent_key(baseline, 2), parent_key(control, 2)
    assert ours != theirs
    assert replace(ours, arm="control") == theirs


# Workers ----------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def digits(results_folder):
    """The digits as the workers read them."""
    return str(datasets.materialise(TASKS["digits-cnn"].dataset, results_folder / "data"))


def prepare(peer, data, variant="good"):
    """Bring a worker to where it is sampled; what `warm` answers."""
    case = next(
        c
        for c in cases_of(faulty.TECHNIQUE, "tests.harness.faulty", "default")
        if c.variant.name == variant
    )
    configure(peer, LIMITS, seed=0)
    peer.ask(30, "build", case=case.message(), data=data, weights_seed=0)
    peer.ask(30, "first_call")
    peer.ask(30, "next_steps")
    return peer.ask(30, "warm")


def test_what_a_case_is_composed_of_is_imported_with_it(monkeypatch, tmp_path):
    """By what the case says: the module of a ladder, or of a check, has no technique to ask."""
    package = tmp_path / "composed_impl"
    package.mkdir()
    for name in ("__init__", "part"):
        (package / f"{name}.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    technique = replace(faulty.TECHNIQUE, composed_of=("part",))
    case = cases_of(technique, "tests.ladders.planted", "default")[0]
    bench = worker.Operations()
    bench.impl = importlib.import_module(package.name)
    bench._import(case.message())
    assert "composed_impl.part" in sys.modules


@pytest.mark.parametrize(
    ("mode", "how", "zeros"),
    [("train", {}, 8), ("predict", {}, 0), ("predict", {"trains": True}, 8)],
)
def test_only_what_trains_has_the_scales_of_zero_that_training_begins_with(mode, how, zeros):
    """A file of predictions would be smaller by every convolution behind which one stands."""
    workload = Workload("photos-resnet18", "small", mode=mode)
    technique = replace(faulty.TECHNIQUE, workloads=(workload,))
    case = cases_of(technique, "tests.harness.faulty", "default")[0]
    bench = worker.Operations()
    bench.impl = importlib.import_module("tests.harness.fake_impl")
    bench._find_work(case.message(), 0, **how)
    scales = [value for name, value in bench.work.weights.items() if name.endswith("gamma")]
    assert sum(not value.any() for value in scales) == zeros


def test_a_waiting_worker_uses_no_cpu(started, digits):
    peer = started.execute(KEY, "waits")
    prepare(peer, digits)
    process = psutil.Process(peer.peer.pid)
    peer.ask(30, "sample")
    before = process.cpu_times()
    time.sleep(1.5)
    after = process.cpu_times()
    assert after.user + after.system - before.user - before.system <= 0.02
    answer = peer.ask(30, "sample")
    assert answer.waited_s >= 1.5
    assert answer.waiting_cpu_s <= 0.01 * answer.waited_s


@pytest.mark.parametrize(("alone_s", "in_a_row_s"), [(2e-3, 2e-3), (8e-3, 1e-3), (30e-3, 30e-3)])
def test_a_sample_lasts_ten_milliseconds(bench, clock, monkeypatch, alone_s, in_a_row_s):
    """Sized in a row: alone a step may cost more."""
    waited = []

    def step(x, y):
        clock.sleep(alone_s if waited else in_a_row_s)
        waited.clear()
        return 0.0

    monkeypatch.setattr(bench.kit.runtime, "synchronize", lambda: waited.append(1))
    bench.prepared = Prepared(step, None, None, None)
    bench._op_warm()
    for _ in range(10):
        sample = bench._op_sample()
        assert 10e-3 <= sample.seconds * sample.steps < max(50e-3, 2 * alone_s)


def test_a_caller_that_dies_while_it_calls_shuts_nobody_out(started):
    """Out of memory, for example, between its connection and its name."""
    for _ in range(3):
        Client(started._listener.address).close()  # no answer to the challenge
    with pytest.raises(AuthenticationError):
        Client(started._listener.address, authkey=b"not the key")
    silent = Client(started._listener.address, authkey=bytes.fromhex(started._key))
    silent.close()  # no name
    assert configure(started.execute(KEY, "later"), LIMITS, seed=0).threads


def test_a_worker_that_dies_before_it_answers_is_a_failure_at_once(started, monkeypatch):
    started.start_parents([KEY])
    (started.logs / "0002-early.log").mkdir()  # its log can't be opened
    with pytest.raises(Failed, match="the worker exited with status 1 before it answered"):
        started.fork(KEY, "early")  # which a time-out would not say
    assert configure(started.fork(KEY, "next"), LIMITS, seed=0).threads


def test_an_answer_that_nobody_waited_for_is_not_taken_for_another(started, monkeypatch):
    started.start_parents([KEY])
    first = started.fork(KEY, "first")
    parent = started._parents[KEY][1]

    def interrupt(timeout, kind):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(parent, "reply", interrupt)
        with pytest.raises(KeyboardInterrupt):
            started.fork(KEY, "second")
    assert first.stop(kill=True) == "ended with its parent"


@pytest.mark.parametrize(
    "text",
    [
        *('{"answer": {"steps": "many", "empty_s": 0.0}}', '{"answer": {"steps": 3}}'),
        *('{"answer": null}', "{}", "[]", '{"answer":'),
    ],
)
def test_an_answer_that_is_damaged_or_of_another_kind_is_one_line(monkeypatch, text):
    monkeypatch.setattr(processes, "_kill", lambda pid: None)
    ours, theirs = Pipe()
    asked = processes.Worker(KEY, processes.Peer(ours, pid=0), lambda: "ended")
    theirs.send_bytes(text.encode())
    with pytest.raises(Failed, match="the worker's answer to warm can't be read: ") as failed:
        asked.ask(1, "warm")
    assert "\n" not in str(failed.value)


@linux
def test_variables_of_a_row_reach_its_processes(started):
    key = replace(KEY, environment=(("LIBRARY", "1"),))
    started.start_parents([KEY, key])
    for one, has in ((KEY, False), (key, True)):
        for peer in (started.fork(one, "forked"), started.execute(one, "executed")):
            variables = Path(f"/proc/{peer.peer.pid}/environ").read_bytes().split(b"\0")
            assert (b"LIBRARY=1" in variables) is has
            peer.stop(kill=True)


def test_workers_end_with_what_they_started(started, digits):
    started.start_parents([KEY])
    for peer in (started.fork(KEY, "forked"), started.execute(KEY, "executed")):
        prepare(peer, digits, "leaves_a_child")
        (child,) = psutil.Process(peer.peer.pid).children()
        assert child.name() == "sleep"
        peer.stop(kill=True)
        assert until(lambda child=child: not child.is_running(), 60)


# Rounds and samples -----------------------------------------------------------------------------


class Sampled:
    """A worker that notes when it is asked."""

    def __init__(self, case_id, asked, busy=0.0, waited=1.0, late=0.0, seconds=1e-3):
        self.case_id, self.asked = case_id, asked
        self.answer = Sample(
            seconds=seconds,
            steps=10,
            late_s=late,
            energy_j=None,
            waiting_cpu_s=busy,
            waited_s=waited,
        )

    def ask(self, timeout, op):
        self.asked.append(self.case_id)
        return self.answer

    def stop(self, kill):
        pass


QUIET = Attempt(stolen=0.01, others=0.04)
STOLEN, BUSY = Attempt(stolen=0.03, others=0.0), Attempt(others=0.2)


@pytest.fixture
def play(monkeypatch):
    """Sample stand-ins for four contenders for ten rounds.

    Who was asked, the blocks, and the conditions; each try is as `disturbed` as it is said.
    """

    def sample(seed=0, number=0, disturbed=(QUIET,), **answers):
        watches = iter(disturbed)
        monkeypatch.setattr(machine.Watch, "stop", lambda _: next(watches))
        cases = cases_of(faulty.TECHNIQUE, "tests.harness.faulty", "default")[:4]
        limited = SimpleNamespace(limits=LIMITS)
        match = Match(limited, cases, data={}, threads=1, seed=seed, number=number, evidence=False)
        asked = []
        match.workers = {case.id: Sampled(case.id, asked) for case in cases}
        match.workers[cases[0].id] = Sampled(cases[0].id, asked, **answers)
        match._rounds(10)
        return asked, [match.played[case.id] for case in cases], match.conditions()

    return sample


def test_every_round_asks_everyone_once_in_an_order_of_its_own(play):
    asked, blocks, _ = play()
    rounds = [tuple(asked[i : i + 4]) for i in range(0, 40, 4)]
    assert {tuple(sorted(order)) for order in rounds} == {tuple(sorted(rounds[0]))}
    assert len(set(rounds)) > 3
    assert {order[0] for order in rounds} == set(rounds[0])  # nobody is always last
    assert [len(block.samples) for block in blocks] == [10] * 4
    assert {block.shortest_s for block in blocks} == {10 * 1e-3}
    assert play(seed=0)[0] == asked
    assert play(seed=1)[0] != asked
    assert play(number=1)[0] != asked  # another match of the same block


@pytest.mark.parametrize(("step_s", "rounds"), [(1e-3, 10), (5.4e-3, 7), (9e-3, 5), (1.0, 3)])
def test_longer_steps_are_sampled_in_fewer_rounds(play, monkeypatch, step_s, rounds):
    """As many as make 0.375 s of whoever is sampled the least, but three at least."""
    usual = Sampled.__init__
    monkeypatch.setattr(
        Sampled, "__init__", lambda *given, **others: usual(*given, **{"seconds": step_s} | others)
    )
    assert [len(block.samples) for block in play()[1]] == [rounds] * 4
    assert [len(block.samples) for block in play(seconds=1e-3)[1]] == [10] * 4


def test_slow_contenders_end_a_block_early_but_not_before_the_fewest_rounds(play, monkeypatch):
    monkeypatch.setattr(matches, "SAMPLING_S", 0.0)
    assert [len(block.samples) for block in play()[1]] == [matches.FEWEST_ROUNDS] * 4


@pytest.mark.parametrize(
    ("disturbed", "tries"),
    [
        ((QUIET,), 1),
        ((Attempt(),), 1),
        ((STOLEN, QUIET), 2),
        ((BUSY, STOLEN), 2),
    ],
)
def test_rounds_that_others_disturbed_are_played_once_more(play, disturbed, tries):
    """Before anybody looks at a sample, and at most once; the least disturbed ones count."""
    asked, blocks, conditions = play(disturbed=disturbed, late=0.01e-3)
    assert len(asked) == 40 * tries
    assert [len(block.samples) for block in blocks] == [10] * 4
    assert conditions.tries == list(disturbed)
    assert (conditions.stolen, conditions.others) == (disturbed[-1].stolen, disturbed[-1].others)


def test_what_disturbed_a_try_less_counts(play, monkeypatch):
    """Also where that was the first."""
    taken = iter(range(1, 81))
    monkeypatch.setattr(
        Sampled,
        "ask",
        lambda self, *_: msgspec.structs.replace(self.answer, seconds=next(taken) * 1e-5),
    )
    for disturbed, kept in (((STOLEN, BUSY), range(1, 41)), ((BUSY, STOLEN), range(41, 81))):
        taken = iter(range(1, 81))
        _, blocks, _ = play(disturbed=disturbed)
        found = sorted(round(1e5 * each) for block in blocks for each in block.samples)
        assert found == list(kept)


@linux
def test_what_others_take_of_the_cores_is_seen():
    """A process that is not this one's child uses a core; this one's own work does not count."""
    spin = (
        "import os, time\nif os.fork(): os._exit(0)\n"
        "end = time.time() + 3\nwhile time.time() < end: pass"
    )
    watch = machine.Watch()
    subprocess.run([sys.executable, "-c", spin], check=True)  # its child belongs to nobody here
    time.sleep(1.5)
    found = watch.stop()
    cores = len(os.sched_getaffinity(0))
    assert found.others > 0.5 / cores
    assert found.seconds >= 1.5


@pytest.mark.parametrize("count", [2, 4, 7, 8])
def test_start_order_is_a_balanced_latin_square(count):
    """Everybody has each place, and each other before it, equally often."""
    cases = [SimpleNamespace(id=number) for number in range(count)]
    blocks = count * (1 + count % 2)
    orders = [[c.id for c in matches.start_order(cases, 0, block)] for block in range(blocks)]
    for place in range(count):
        assert Counter(order[place] for order in orders) == dict.fromkeys(
            range(count), blocks // count
        )
    neighbours = Counter(pair for order in orders for pair in pairwise(order))
    assert len(neighbours) == count * (count - 1)
    assert len(set(neighbours.values())) == 1


def test_another_match_starts_in_another_order():
    cases = [SimpleNamespace(id=number) for number in range(8)]
    first = [[c.id for c in matches.start_order(cases, match, 0)] for match in range(20)]
    assert len({tuple(order) for order in first}) > 15
    assert matches.start_order(cases, 3, 2) == matches.start_order(cases, 3, 2)


@pytest.mark.parametrize(
    ("answers", "reason"),
    [
        ({"busy": 0.09}, None),
        ({"busy": 0.12}, "a waiting worker used 12% of a core"),
        ({"busy": 0.0009, "waited": 0.002}, None),  # alone in a match: it hardly waits
        ({"busy": 0.009, "waited": 0.02}, "a waiting worker used 40% of a core"),
        ({"late": 0.04e-3}, None),
        ({"late": 0.06e-3}, "not synchronised: its result came 6% of a sample"),
    ],
)
def test_bounds_of_waiting_and_lateness(play, answers, reason):
    _, (judged, *others), _ = play(**answers)
    assert (judged.status, bool(judged.samples)) == (("FAILED", False) if reason else ("OK", True))
    assert judged.reason is None if reason is None else judged.reason.startswith(reason)
    if reason and "late" in answers:
        assert judged.reason.endswith("a busy machine does that, too")
    assert {block.status for block in others} == {"OK"}


STEP_S = 2**-9  # of which sums are exact


@pytest.fixture
def clock(monkeypatch):
    found = Clock()
    monkeypatch.setattr(timing, "time", found)
    return found


@pytest.fixture
def bench(clock):
    """A worker in this process, whose step takes two milliseconds and notes each call."""
    found = worker.Operations()
    for name in worker.KIT:
        importlib.import_module(f"tests.harness.fake_impl.{name}")
    found.impl = importlib.import_module("tests.harness.fake_impl")
    found.kit = found.impl.kit
    found.batches = [(i, i) for i in range(worker.RESIDENT_BATCHES)]
    found.calls = []

    def step(x, y):
        found.calls.append(x)
        clock.sleep(STEP_S)
        return 0.0

    found.work = SimpleNamespace(mode="train")
    found.prepared = Prepared(step, None, None, None)
    yield found
    gc.enable()
    gc.unfreeze()


def test_an_untimed_step_precedes_each_sample(bench):
    bench._op_warm()
    assert not gc.isenabled()
    bench.steps = steps = 12  # of two milliseconds: no sample is too short
    bench.calls.clear()
    answer = bench._op_sample()
    assert len(bench.calls) == steps + 1
    assert answer.seconds == STEP_S  # of one step, not of twelve
    bench._op_sample()
    assert bench.calls == [
        (bench.calls[0] + i) % worker.RESIDENT_BATCHES for i in range(2 * (steps + 1))
    ]


@pytest.mark.parametrize(("slow_s", "untimed"), [(1.0, 1), (1e-3, 0)])
def test_before_a_sample_of_slow_steps_there_is_none(bench, monkeypatch, slow_s, untimed):
    monkeypatch.setattr("bench.harness.timing.SLOW_S", slow_s)
    bench._op_next_steps()
    bench._op_warm()
    bench.steps = steps = 12
    bench.calls.clear()
    bench._op_sample()
    assert len(bench.calls) == steps + untimed


def test_where_the_framework_owns_the_loop_it_times_all_but_the_first_batch(bench):
    given = []

    def loop(batches):
        given.append(len(batches))
        return 2e-3 * (len(batches) - 1), 0.0

    bench.prepared = replace(bench.prepared, loop=loop)
    steps = bench._op_warm().steps
    assert steps == 5  # of 2 ms
    assert bench._op_sample().seconds == pytest.approx(2e-3)
    assert given[-1] == steps + 1
    assert bench.calls == []


def test_warm_up_ends_when_steps_stop_trending(bench, clock):
    """A step that gets faster for a while, like one that is traced, then tuned."""
    speeds = iter([20e-3] * 3 + [10e-3] * 6 + [5e-3] * 12)

    def step(x, y):
        bench.calls.append(x)
        clock.sleep(next(speeds, 2e-3))
        return 0.0

    bench.prepared = Prepared(step, None, None, None)
    assert 3 <= bench._op_warm().steps <= 6  # as fast as it became


def test_warm_up_goes_on_while_steps_get_faster(bench, clock):
    """By 15% with each chunk, until a step takes an eighth: what is timed then has settled."""
    slept = 0.0

    def step(x, y):
        nonlocal slept
        seconds = max(2e-3, 16e-3 * 0.85 ** (slept / timing.WARM_S))
        clock.sleep(seconds)
        slept += seconds
        return seconds

    bench.prepared = Prepared(step, None, None, None)
    bench._op_warm()
    assert step(None, None) == 2e-3


@pytest.mark.parametrize(("last_s", "steps", "known"), [(0.002, 7, 7), (0.3, None, 1), (0.3, 2, 2)])
def test_there_is_no_warm_up_where_it_is_known_how_many_steps_make_a_sample(
    bench, last_s, steps, known
):
    bench.last_s = last_s
    assert bench._op_warm(steps=steps).steps == known
    assert bench.calls == []
    bench._op_sample()
    assert len(bench.calls) >= known


# Predictions, probes, and what limits a run -------------------------------------------------------


@pytest.fixture(scope="module")
def predicted(measure, fakes_in_module, tmp_path_factory):
    """Predictions of files; `written` are the variants whose files were written."""
    writes = tmp_path_factory.mktemp("predicted") / "writes"
    writes.touch()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WRITES", str(writes))
        found = measure(
            *("good", "same", "control", "raises_in_probe"),
            technique=faulty.PREDICTED,
            memory_budget=5_000_000,
            amount=Effort(2, 3, 1),
        )
    found.written = Counter(writes.read_text().split())
    return found


def test_predictions_are_timed_and_certified(predicted):
    """Their step raises: had it run, they would have failed."""
    good, same = predicted.cases["pt", "good"], predicted.cases["pt", "same"]
    assert good.id == "predicted/digits-cnn-4-predict/pt/good"
    assert (good.mode, good.status) == ("predict", "OK")
    assert rounds_of(good) == [3, 3]
    losses = good.certificate.losses
    assert len(set(losses)) == worker.RESIDENT_BATCHES
    assert losses == same.certificate.losses


def test_memory_of_predictions_has_no_training_in_it(predicted):
    memory = predicted.cases["pt", "good"].memory
    assert memory.gradients_bytes == memory.optimizer_bytes == 0


@linux
def test_a_model_that_only_the_preparation_holds_is_none_of_the_prediction():
    """A file is made from it, say. Its memory is free before the prediction's is taken."""
    held = np.ones(160 << 20, np.uint8)  # a megabyte more or less comes and goes
    bench = worker.Operations()
    bench.prepared = Prepared(held.sum, len, held, object(), write=held.max)
    before = memory.resident()
    del held
    bench._forget_training()
    assert before - memory.resident() > 158 << 20
    assert bench.prepared.predict is len


def test_models_tell_their_size(predicted):
    metrics = predicted.cases["pt", "good"].metrics
    spec = TASKS["digits-cnn"].model
    assert metrics["parameters"].value == parameter_count(spec)
    assert metrics["macs"].value == forward_flops(spec, 1) / 2e6


@pytest.mark.parametrize("name", [n for n, t in TASKS.items() if parameter_count(t.model) < 2e7])
def test_the_size_of_a_model_follows_its_kernels(name):
    spec = TASKS[name].model
    weights = {n: np.ones(shape, np.float32) for n, shape in parameter_shapes(spec).items()}
    whole = sizes.model_size(spec, weights)
    assert whole["parameters"]["value"] == whole["parameters_not_zero"]["value"]
    assert whole["parameters"]["value"] == parameter_count(spec)
    assert whole["macs"] == {"value": forward_flops(spec, 1) / 2e6, "unit": "M"}
    kernel = weights["head.kernel"]
    kernel[..., 1:] = 0
    zeros = kernel.size - kernel[..., 0].size
    pruned = sizes.model_size(spec, weights)
    assert pruned["parameters_not_zero"]["value"] == parameter_count(spec) - zeros
    assert pruned["macs"] == whole["macs"]
    weights["head.kernel"] = kernel[..., : kernel.shape[-2] // 2, :]
    head = next(layer.macs for layer in layers(spec) if layer.name == "head")
    smaller = sizes.model_size(spec, weights)
    assert smaller["macs"]["value"] == pytest.approx(whole["macs"]["value"] - head / 2e6)


def test_an_artifact_s_size_is_kept_and_the_artifact_is_not(predicted):
    good = predicted.cases["pt", "good"]
    assert good.artifact_bytes == good.metrics["artifact"].value == faulty.ARTIFACT
    assert 0 < good.metrics["compressed_artifact"].value < faulty.ARTIFACT / 100


@pytest.fixture
def writes(tmp_path, monkeypatch):
    """The variants whose files were written, one for each time, in order."""
    path = tmp_path / "writes"
    path.touch()
    monkeypatch.setenv("WRITES", str(path))
    return lambda: path.read_text().split()


def test_a_file_is_written_once_for_all_blocks_and_cold_starts(predicted):
    for name in ("good", "same", "control"):
        case = predicted.cases["pt", name]
        assert (case.status, rounds_of(case)) == ("OK", [3, 3])
        assert len(case.cold_starts) == (0 if name == "control" else 2)
        one, other = [(block.weights_sha256, block.losses) for block in case.blocks]
        assert other == one
    written = predicted.written
    assert written["same"] == 1
    # Its control is one more that looks for it, perhaps while the first one writes.
    assert written["good"] in (1, 2)
    assert written.keys() == {"good", "same", "raises_in_probe"}


def test_training_writes_the_file_of_its_own_weights(fakes, writes, digits, tmp_path, monkeypatch):
    monkeypatch.setattr(
        worker.Operations,
        "_evaluate",
        lambda self, folder, predict: float(predict(np.zeros(1))[0, 0]),
    )
    case = predicted_case("good").message()
    bench = worker.Operations()
    bench._op_configure("tests.harness.fake_impl", threads=1, seed=0, imports=[])
    bench._op_build(case, digits, weights_seed=0, files=str(tmp_path / "files"))
    stages, values = str(tmp_path / "stages"), []
    for seed in (0, 1, 0):
        found = bench._op_train(case, digits, seed=seed, stages=stages, prove=False)
        values.append(found.value)
        assert found.artifact.bytes == faulty.ARTIFACT
    assert len(writes()) == 4
    assert values[0] == values[2] != values[1]


def predicted_case(name):
    """A case whose predictions are those of a file."""
    every = cases_of(faulty.PREDICTED, "tests.harness.faulty", "default")
    return next(case for case in every if case.variant.name == name)


def built(started, case, data, seed=0):
    """What a new worker that looks for the file of weights of `seed` answers."""
    peer = started.fork(KEY, case.variant.name)
    try:
        configure(peer, LIMITS, seed=0)
        files = matches.files_of(started, case, seed)
        work = {"case": case.message(), "data": data, "weights_seed": seed, "files": files}
        return peer.ask(30, "build", **work)
    finally:
        peer.stop(kill=True)


def test_a_worker_that_is_killed_while_it_writes_leaves_nothing_to_be_found(
    started, digits, writes
):
    started.start_parents([KEY])
    case = predicted_case("killed_writing")
    with pytest.raises(Failed, match="was killed by SIGKILL during build"):
        built(started, case, digits)
    assert [built(started, case, digits).wrote for _ in range(2)] == [True, False]
    assert writes() == ["killed_writing"] * 2


def test_other_weights_have_a_file_of_their_own(started, digits, writes):
    started.start_parents([KEY])
    case = predicted_case("same")
    wrote = [built(started, case, digits, seed=seed).wrote for seed in (0, 1, 0, 1)]
    assert wrote == [True, True, False, False]
    assert len(writes()) == 2


def test_those_who_write_at_once_do_not_write_into_one_path(tmp_path):
    """Both files are whole, and one of them is found from then on."""
    paths, inner = [], []

    def write(path):
        path.touch()
        paths.append(path)

    def write_while_another_does(path):
        inner.append(folders.written_once(tmp_path / "place", write))
        write(path)

    outer = folders.written_once(tmp_path / "place", write_while_another_does)
    found = folders.written_once(tmp_path / "place", write)
    assert [wrote for _, wrote in (outer, *inner, found)] == [True, True, False]
    assert len(set(paths)) == len(paths) == 2
    assert found[0] in paths


@linux
def test_a_cold_start_reads_a_file_and_holds_nothing_of_writing_it(started, digits, writes):
    """Whether a match has written it before or, as where a run is taken up, it is not there."""
    cases = [predicted_case(name) for name in ("same", "leaves_much", "leaves_much")]
    plain, *large = (found.memory for found in cold_starts(started, cases, digits))
    assert Counter(writes()) == {"same": 1, "leaves_much": 1}
    for phase in ("build_bytes", "first_step_peak_bytes", "steady_peak_bytes"):
        for each in large:
            above = [found[phase] - found["import_bytes"] for found in (plain, each)]
            assert abs(above[1] - above[0]) < faulty.LEAK / 5, phase


@pytest.fixture(scope="module")
def untimed(measure, fakes_in_module):
    """A run in which all is measured apart; `beside`: what others did during each request."""
    at_work, beside, lock = [], [], threading.Lock()

    def noting(name, does):
        def noted(*arguments, **given):
            what = [name(*arguments), set()]
            with lock:
                for other in at_work:
                    other[1].add(what[0])
                    what[1].add(other[0])
                at_work.append(what)
            try:
                return does(*arguments, **given)
            finally:
                with lock:
                    at_work[:] = [other for other in at_work if other is not what]
                    beside.append(what)

        return noted

    begin, ask = isolated_measurements.begin, isolated_measurements.Worker.ask
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(isolated_measurements, "begin", noting(lambda *_: "begin", begin))
        patch.setattr(
            isolated_measurements.Worker, "ask", noting(lambda worker, limit, op: op, ask)
        )
        found = measure(
            *("good", "same", "not_applied"), technique=faulty.UNTIMED, amount=Effort(2, 3, 1)
        )
    found.beside = beside
    return found


def test_nothing_starts_while_something_is_measured_apart(untimed):
    assert {untimed.cases["pt", name].status for name in ("good", "same")} == {"OK"}
    starts = len(untimed.cases) + 2  # three of the baseline
    calls = [others for op, others in untimed.beside if op == "memory"]
    assert calls == [set()] * starts  # nothing is late: no rehearsals


def test_a_probe_runs_apart_and_its_failure_is_its_case_s_alone(predicted):
    metrics = predicted.cases["pt", "good"].metrics
    assert metrics["budget"].value == 5_000_000
    assert metrics["first_pixels"].unit == "1"
    assert len(metrics["cold_first_calls_s"].samples) == 2
    failed = predicted.cases["pt", "raises_in_probe"]
    assert failed.status == "FAILED"
    assert failed.reason == "probe: RuntimeError: the probe is wrong"
    assert predicted.cases["pt", "good"].evidence["sent"] == ["a", "b"]  # of the probe


def test_what_is_not_timed_proves_itself_in_its_own_process(untimed):
    good, failed = (untimed.cases["pt", name] for name in ("good", "not_applied"))
    assert (good.status, good.timing.step_s) == ("OK", {})
    assert good.evidence["operator_dtypes"]["matmul"]
    assert good.memory.import_bytes > 0
    assert (failed.status, failed.reason) == ("NOT_APPLIED", "nothing happened")


def train(started, cases, data, seeds, trained=()):
    """What training gave each case, by variant."""
    found = {}
    isolated_measurements.train(
        *(started, cases),
        trained={case.id: each for case, each in zip(cases, trained, strict=False)},
        seeds=seeds,
        data={"digits-cnn": data},
        threads=1,
        budget=None,
        done=lambda case, result: found.update({case.variant.name: result}),
    )
    return found


def test_rows_share_stages_of_their_training(started, digits):
    """Seeds are added to those that are there; a row that failed or had its time gets no more."""
    cases = [one_case(name=name) for name in ("plain", "plain_too", "goes_on", "raises")]
    first = train(started, cases, digits, seeds=2)
    assert [first[name].epochs for name in ("plain", "plain_too", "goes_on")] == [8, 0, 4]
    assert first["plain"].per_seed == first["plain_too"].per_seed
    assert len(set(first["plain"].per_seed)) == len(first["goes_on"].per_seed) == 2
    assert first["raises"].status == "FAILED"
    first["plain_too"].reason = "its time was over"
    again = train(started, cases, digits, seeds=3, trained=first.values())
    assert again["plain"].per_seed[:2] == first["plain"].per_seed
    assert [len(again[name].per_seed) for name in ("plain", "plain_too", "goes_on")] == [3, 2, 3]
    assert [again[name].epochs for name in ("plain", "plain_too", "goes_on")] == [12, 0, 6]
    assert again["raises"] == first["raises"]


def test_trainings_that_end_at_once_are_noted_by_the_thread_that_asked(started, digits):
    """Who notes one writes the record, which two threads at once would tear."""
    first = one_case()
    cases = [
        replace(first, framework=side, variant=replace(first.variant, name=name))
        for name in ("good", "same")
        for side in ("pt", "tf")
    ]
    noted = []

    def note(case, found):
        noted.append((case.id, found.status, threading.get_ident()))

    given = {"trained": {}, "seeds": 1, "data": {"digits-cnn": digits}, "budget": None}
    isolated_measurements.train(started, cases, threads=2, done=note, **given)
    assert sorted(noted) == sorted((case.id, "OK", threading.get_ident()) for case in cases)


@pytest.mark.parametrize(
    ("times", "trained", "reason"),
    [
        (1.0, 2, "accuracy: 2 of 3 seeds trained in 1.5 s; --effort full trains all"),
        (4.0, 3, None),
    ],
)
def test_training_ends_with_the_budget_of_its_workload_and_says_so(
    tmp_path, monkeypatch, times, trained, reason
):
    """Each seed takes 0.6 seconds of a planted clock."""
    clock = Clock()
    monkeypatch.setattr(isolated_measurements, "time", clock)

    class Trains:
        key = SimpleNamespace(framework="pt", threads=1)

        def ask(self, timeout, op, **given):
            if op == "configure":
                return None
            clock.sleep(min(timeout, 0.6))
            if timeout < 0.6:
                raise Failed(processes.TIMED_OUT.format(op, timeout))
            return TrainedSeed(value=90.0, epochs=1)

        def stop(self, kill):
            pass

    case = one_case()
    case = replace(case, workload=replace(case.workload, training=times))
    starts = SimpleNamespace(limits=LIMITS, scratch=tmp_path, fork=lambda *_: Trains())
    result = isolated_measurements.Trained()
    isolated_measurements._train(starts, KEY, case, result, 3, "data", budget=1.5)
    assert (result.status, len(result.per_seed), result.reason) == ("OK", trained, reason)


def test_accuracy_is_that_of_samples_that_were_not_trained_on(digits):
    splits = {name: datasets.load(Path(digits), name) for name in ("train", "test")}
    trained, evaluated = [], []
    training = SimpleNamespace(
        fit=lambda step, x, y, **_: trained.append((x, y)),
        evaluate_task=lambda predict, x, y, task, **_: evaluated.append((x, y)) or 0.0,
    )
    data = SimpleNamespace(to_device=lambda x, y: (x, y))
    bench = worker.Operations()
    bench.impl = bench.kit = SimpleNamespace(training=training, data=data)
    bench.work = SimpleNamespace(task=TASKS["digits-cnn"])
    bench.prepared = Prepared(None, None, None, None)
    bench._fit(Path(digits), 0, None, 1)
    bench._evaluate(Path(digits), None)
    for (found,), name in ((trained, "train"), (evaluated, "test")):
        assert all(map(np.array_equal, found, splits[name]))


@pytest.mark.parametrize(("samples", "batch"), [(1_797, 599), (512, 512), (600, 600), (601, 301)])
def test_evaluation_cuts_few_and_even_batches(samples, batch):
    assert accuracy.even_batch(samples) == batch


@pytest.mark.parametrize("threads", [1, 2])
def test_first_calls_are_timed_one_by_one_after_the_first_block(
    measure, fakes, monkeypatch, threads
):
    """Side by side they would disturb each other, and the first block may fill a cache."""
    seen, given, calibrated = [], [], []
    play = matches.Match.play

    def watched(self, rounds):
        played = play(self, rounds)
        seen.append((self.side_by_side, {b.first_call_s is None for b in played.values()}))
        given.append(dict(self.steps))
        calibrated.append({name: block.steps for name, block in played.items()})
        return played

    monkeypatch.setattr(matches.Match, "play", watched)
    monkeypatch.setattr(machine, "usable_threads", lambda: threads)
    found = measure("good", "same", amount=Effort(3, 3, 1, first_pass_alone=True))
    assert seen == [(threads, {True}), (1, {False}), (threads, {threads > 1})]
    assert given == [{}, *calibrated[:2]]  # steps of a sample are those of the block before
    assert found.cases["pt", "good"].timing.warm_first_call_s > 0


def test_a_single_block_has_no_warm_first_call(faults):
    timing = faults.cases["pt", "good"].timing
    assert timing.warm_first_call_s is None
    assert timing.cold_first_call_s > 0


# The harness itself is killed -------------------------------------------------------------------

DOOMED = """
import json, sys
from pathlib import Path
from bench.harness import processes, run
from bench.harness.plan import Effort
from bench.harness.selection import cases_of, choose, with_baselines
from tests.harness import fake_plugin, faulty
fake_plugin.install()
processes.FORKS = json.loads(sys.argv[2])
every = cases_of(faulty.TECHNIQUE, "tests.harness.faulty", "default")
names = {"same", "leaves_a_child", "hangs"}
cases = with_baselines(choose(every, tasks=set(), variants=names, frameworks={"pt"}), every)
plan = run.Plan({"faulty": cases}, {"faulty": faulty.TECHNIQUE}, Effort(1, 3, 1))
results = Path(sys.argv[1])
folder = results / sys.argv[3]
folder.mkdir()
run.Run(plan, run.Settings(results=results), folder, print).measure()
"""


@linux
@pytest.mark.parametrize("forks", [True, False])
def test_nothing_outlives_a_harness_that_is_killed(results_folder, forks):
    """Not even a worker that hangs."""
    mark = uuid.uuid4().hex
    main = subprocess.Popen(
        [sys.executable, "-c", DOOMED, results_folder, json.dumps(forks), mark],
        cwd=ROOT,
        env=os.environ | {MARK: mark},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        logs = results_folder / mark / "logs"

        def hangs():
            return any("hangs from now" in log.read_text() for log in logs.glob("*-hangs.log"))

        assert until(hangs, 120), "the run did not get there"
        assert len(marked(mark)) >= 2  # of executed ones those that started before it, if any
        main.send_signal(signal.SIGKILL)
        assert main.wait() == -signal.SIGKILL
        left = until(lambda: not [p for p in marked(mark) if p.name() != "sleep"], 60)
        assert left, marked(mark)
    finally:
        main.kill()
        main.wait()
        for process in marked(mark):
            process.kill()


# Probes -----------------------------------------------------------------------------------------


def test_describe_says_what_is_there(started):
    found = isolated_measurements.describe(started, "pt", threads=1)
    assert found.versions["numpy"]
    assert found.device == "cpu"
    speeds = {dtype: (speed.one, speed.all) for dtype, speed in found.products.items()}
    assert speeds == {"float32": (4e9, 4e9), "bfloat16": (8e9, 8e9), "int8": (1.6e10, 1.6e10)}
    assert found.python == sys.version.split()[0]


@pytest.mark.parametrize("how", ["ABORTS", "REFUSES"])
def test_a_product_that_there_is_not_leaves_the_other(started, monkeypatch, how):
    monkeypatch.setenv(how, "bfloat16")
    found = isolated_measurements.describe(started, "pt", threads=1)
    assert found.products["float32"].all == 4e9
    assert "bfloat16" not in found.products


def cold_starts(started, cases, data):
    """What each start found, in order."""
    found = []
    isolated_measurements.cold_starts(
        *(started, cases),
        imports={case.id: [] for case in cases},
        data={"digits-cnn": data},
        threads=1,
        seed=0,
        done=lambda case, result: found.append(result),
    )
    assert [result.status for result in found] == ["OK"] * len(cases), found
    return [result.answer for result in found]


def one_case(**fields):
    """The first case, with some of its variant's fields changed."""
    case = cases_of(faulty.TECHNIQUE, "tests.harness.faulty", "default")[0]
    return replace(case, variant=replace(case.variant, **fields))


@pytest.mark.parametrize("in_a_match", [False, True])
def test_a_cold_start_has_a_cache_without_its_program_and_the_plain_allocator(
    started, digits, monkeypatch, in_a_match
):
    """Whether its worker is forked or, as a compiler's is, executed.

    What the first program of a machine finds out is found out apart: at once where a match has
    compiled one, or else as soon as a cold start does, which is made once more.
    """
    if in_a_match:
        started.compiled("pt").mkdir()
        (started.compiled("pt") / "program").touch()
    begun, folders = [], []
    fork, execute, new_folder = started.fork, started.execute, started.new_folder
    monkeypatch.setattr(
        *(started, "fork"), lambda key, label: begun.append(key.allocator) or fork(key, label)
    )
    monkeypatch.setattr(
        *(started, "execute"),
        lambda key, label: begun.append(f"{key.allocator} executed") or execute(key, label),
    )
    monkeypatch.setattr(
        *(started, "new_folder"), lambda: folders.append(new_folder()) or folders[-1]
    )
    cases = [
        one_case(name="good"),
        one_case(name="compiles"),  # which fails where its program is there already
        one_case(name="compiles", allocator="tuned"),
        one_case(name="compiles", requires="compiler"),
    ]
    assert all(found.first_call_s > 0 for found in cold_starts(started, cases, digits))
    if started.forks and memory.adopts_pages():
        first = ["as installed executed", "as installed"]
        first = ["as installed", *first] if in_a_match else ["as installed", "as installed", *first]
        assert begun == [*first, "tuned", "as installed executed"]
    kept = [set(os.listdir(folder)) for folder in folders]
    assert kept[-3:] == [{"machine", "program"}] * 3
    assert kept[:-3] == ([{"machine"}] if in_a_match else [set(), {"program"}])
    assert started.first_compile_s == {"pt": 0.5}
    started.__exit__()
    assert not any(map(os.path.exists, folders))  # gone with the run


@linux
def test_what_a_framework_imports_late_is_no_memory_of_a_case(
    started, digits, tmp_path, monkeypatch
):
    (tmp_path / "late.py").write_text("held = b'x' * 40_000_000")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    case = one_case()
    imported, above = [], []
    for preload in ((), ("late",)):
        framework = replace(plan.FRAMEWORKS["pt"], preload=preload)
        monkeypatch.setitem(plan.FRAMEWORKS, "pt", framework)
        (found,) = (found.memory for found in cold_starts(started, [case], digits))
        imported.append(found["import_bytes"])
        above.append(found["steady_peak_bytes"] - found["import_bytes"])
    assert imported[1] - imported[0] > 35_000_000
    assert abs(above[1] - above[0]) < 5_000_000


@linux
def test_what_the_row_s_own_code_imports_is_no_memory_of_it(measure, tmp_path, monkeypatch, fakes):
    """Wherever it imports it: it is seen in a match, or where there is none, in a rehearsal."""
    (tmp_path / "library.py").write_text("held = b'x' * 40_000_000")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    for technique in (faulty.TECHNIQUE, faulty.UNTIMED):
        found = measure("imports_late", technique=technique, amount=Effort(1, 3, 1))
        plain, late = (found.cases["pt", n].memory for n in ("good", "imports_late"))
        assert late.import_bytes - plain.import_bytes > 35_000_000
        assert abs(late.above_import_bytes - plain.above_import_bytes) < 5_000_000
