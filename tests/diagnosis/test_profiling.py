"""The breakdown adds up to the step, and its parts are those that are known."""

from __future__ import annotations

import json
import queue
import re
import threading
import time
from statistics import fmean
from unittest import mock

import numpy as np
import pytest

from shared import profiles
from shared.profiles import (
    PARTS,
    STEP,
    WAITING,
    Span,
    Taken,
    break_down,
    convolution_flops,
    endless,
    product_flops,
    run_steps,
    settle,
    write_chrome_trace,
    write_stacks,
)
from shared.specs import TASKS, train_step_flops
from tests import workers
from tests.diagnosis.naps import BACKWARD, FORWARD, SLEPT, forget, nap

FRAMEWORKS = ("pt", "tf")
MODELS = "steps"
LATE = 0.015
PRODUCTS = re.compile(r"matmul|addmm$|::mm$", re.IGNORECASE)
COMPUTES = re.compile(r"matmul|mm$|conv", re.IGNORECASE)


# Of spans that are made up: no framework ----------------------------------------------------------


def span(name, start, end, part=None, thread="main", operator=True, device=False):
    return Span(name, start, end, thread, part, operator, device)


def marked(*spans, waiting=1.0, step=10.0):
    """The spans in one step that begins at 0 and waits before."""
    marks = [
        span(WAITING, -waiting, 0.0, operator=False),
        span(STEP, 0.0, step, operator=False),
    ]
    return [*marks, *spans]


def broken_down(spans, step=10.0, profiled=10.0, waiting=1.0, cpu=10.0, memory=(), peaks=None):
    plain, with_profiler = Taken(waiting, step, cpu), Taken(waiting, profiled, cpu)
    return break_down(spans, [plain], [with_profiler], list(memory), peaks or {})


def test_the_parts_are_times_that_passed():
    breakdown = broken_down(
        marked(
            span("a", 0.0, 4.0, "forward"),
            span("inner", 1.0, 2.0),
            span("b", 4.0, 7.0, "backward"),
            span("all_reduce", 6.0, 8.5, "communication", thread="other"),
            span("copy", 8.0, 9.0, "transfer", thread="third"),
        )
    )
    assert breakdown.forward == pytest.approx(4.0)
    assert breakdown.backward == pytest.approx(3.0)
    assert breakdown.communication == pytest.approx(1.5)  # as far as nothing is computed beside it
    assert breakdown.transfer == pytest.approx(0.5)
    assert breakdown.overhead == pytest.approx(1.0)
    assert breakdown.waiting == pytest.approx(1.0)
    assert breakdown.step == pytest.approx(11.0)
    assert breakdown.gaps[0] == (pytest.approx(1.0), "copy", "end of the step")
    seconds = {one.name: one.seconds for one in breakdown.operators}
    assert seconds["a"] == pytest.approx(3.0)  # without what it called


def test_operators_at_the_same_time_share_it():
    breakdown = broken_down(
        marked(
            span("a", 0.0, 10.0, "backward"),
            span("b", 0.0, 10.0, "optimizer", thread="other"),
        )
    )
    assert (breakdown.backward, breakdown.optimizer) == (pytest.approx(5.0), pytest.approx(5.0))


def test_sleep_is_idle_and_work_in_python_is_not():
    spans = marked(span("a", 0.0, 4.0, "forward"))
    assert broken_down(spans, cpu=4.0).idle == pytest.approx(6.0)
    assert broken_down(spans, cpu=10.0).idle == pytest.approx(0.0)
    assert broken_down(spans, cpu=10.0).overhead == pytest.approx(6.0)


def test_what_the_profiler_added_is_taken_where_it_recorded():
    us = 1e-6
    many = [span(f"op{n}", (5 + n / 2) * us, (5.4 + n / 2) * us, "forward") for n in range(10)]
    spans = marked(span("large", 0.0, 5 * us, "backward"), *many, waiting=us, step=10 * us)
    breakdown = broken_down(spans, step=8 * us, profiled=10 * us, waiting=us, cpu=10 * us)
    assert breakdown.profiler_cost == pytest.approx(2 / 9)
    assert breakdown.traced == pytest.approx(11 * us)
    assert sum(getattr(breakdown, part) for part in PARTS) == pytest.approx(breakdown.step)
    # Of 13 events the ten small ones are forward, the marks between operators.
    assert breakdown.backward == pytest.approx((5 - 2 / 13) * us, rel=0.02)
    assert breakdown.forward == pytest.approx((4 - 20 / 13) * us, rel=0.02)


def test_on_a_device_only_what_it_does_counts():
    spans = marked(
        span("launch", 0.0, 9.0, "forward"),
        span("kernel", 2.0, 5.0, "forward", thread="stream", device=True),
    )
    breakdown = broken_down(spans)
    assert breakdown.forward == pytest.approx(3.0)
    assert breakdown.overhead + breakdown.idle == pytest.approx(7.0)
    assert [one.name for one in breakdown.operators] == ["kernel"]


def test_a_products_share_of_the_peak_is_its_operations_over_its_time():
    spans = marked(
        Span("mm", 0.0, 2.0, "main", "forward", True, flops=3e9, dtype="float32"),
        Span("mm", 2.0, 4.0, "main", "backward", True, flops=1e9, dtype="bfloat16"),
        Span("relu", 4.0, 5.0, "main", "forward", True),
        Span("sometimes", 5.0, 6.0, "main", "forward", True, flops=1e9, dtype="float32"),
        Span("sometimes", 6.0, 7.0, "main", "forward", True),
        Span("half", 7.0, 8.0, "main", "forward", True, flops=1e9, dtype="float16"),
    )
    breakdown = broken_down(spans, peaks={"float32": 2e9, "bfloat16": 4e9, "float16": 0.0})
    told = {one.name: (one.flops, one.of_peak) for one in breakdown.operators}
    assert told == {
        "mm": (4e9, (3e9 / 2e9 + 1e9 / 4e9) / 4.0),
        "relu": (None, None),
        "sometimes": (None, None),  # a call of it is not known
        "half": (1e9, None),  # nor is the machine's peak
    }
    lines = str(breakdown).splitlines()
    rows = {line.split()[0]: line.split()[1:] for line in lines if line}
    assert rows["mm"] == ["2.0", "4000.000", "50.0%", "44%"]
    assert rows["relu"] == ["1.0", "1000.000", "12.5%"]
    assert lines[-1] == "peak, of a large product: float32 2 GFLOP/s, bfloat16 4 GFLOP/s"
    assert all(len(line) <= 80 for line in lines)


def test_operations_follow_from_shapes():
    assert product_flops((3, 4), (4, 5), 4) == 2 * 3 * 4 * 5
    assert product_flops((4, 3), (5, 4), 4) == 2 * 3 * 4 * 5
    assert product_flops((7, 1, 3, 4), (2, 4, 5), 4) == 7 * 2 * 2 * 3 * 4 * 5  # one is broadcast
    assert product_flops((3, 0), (0, 5), 0) == 0
    assert convolution_flops((3, 3, 8, 16), 2 * 6 * 6) == 2 * (3 * 3 * 8 * 16) * (2 * 6 * 6)


def test_what_runs_between_steps_is_not_counted():
    spans = marked(span("a", 0.0, 4.0, "forward"), span("later", 20.0, 30.0, "forward"))
    assert [one.name for one in broken_down(spans).operators] == ["a"]


def test_what_a_loader_computes_while_the_step_waits_is_not_the_steps():
    spans = marked(
        span("decode", -0.9, -0.2), span("inner", -0.5, -0.4), span("a", 0.0, 4.0, "forward")
    )
    breakdown = broken_down(spans, cpu=4.0)
    assert [one.name for one in breakdown.operators] == ["a"]
    assert breakdown.operators[0].share == 1.0
    assert breakdown.waiting == pytest.approx(1.0)
    assert breakdown.idle == pytest.approx(6.0)


def test_a_trace_without_marks_is_refused():
    with pytest.raises(ValueError, match="lacks the marks"):
        broken_down([span("a", 0.0, 1.0)])


def test_files_of_spans(tmp_path):
    spans = marked(span("a", 0.0, 4.0, "forward"), span("b;c", 1.0, 2.0))
    write_chrome_trace(spans, tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {"a", "b;c", STEP} <= {event["name"] for event in events}
    write_stacks(spans, tmp_path / "stacks.txt")
    assert (tmp_path / "stacks.txt").read_text().splitlines() == [
        f"{STEP} 6000000",
        f"{STEP};a 3000000",
        f"{STEP};a;b,c 1000000",
        f"{WAITING} 1000000",
    ]


def test_batches_begin_again_and_an_empty_loader_is_named():
    batches = endless([(1,), (2,)])
    seen = []
    run_steps(seen.append, batches, count=5)
    run_steps(seen.append, endless([{"x": 1}]), count=1)  # what is no tuple is handed over whole
    assert seen == [1, 2, 1, 2, 1, {"x": 1}]
    with pytest.raises(ValueError, match="no batches"):
        next(endless([]))


@pytest.mark.parametrize(
    ("pause", "count"),
    [(0, 1), (1, 2), (3, 6), (60, 10)],  # of half a second each, for 5 s at most
)
def test_more_untimed_steps_follow_a_longer_pause(monkeypatch, pause, count):
    seconds = [100.0]

    def step(more):
        seconds.append(seconds[-1] + more)

    with monkeypatch.context() as clock:
        clock.setattr(time, "perf_counter", lambda: seconds[-1])
        settle(step, since=100.0 - pause, batches=endless([(0.5,)]))
    assert len(seconds) - 1 == count


# Of either framework ------------------------------------------------------------------------------


def one_turn(models, step, batches, steps=4):
    """The breakdown of one turn, which has the same operators as four."""
    with mock.patch.object(models.profiling, "_TURNS", 1):
        return models.profiling.profile_steps(step, batches, steps=steps)


@pytest.fixture(scope="module")
def small(models):
    """A step of a small model, and its batch."""
    return models.plain_step(models.dense(8, 8, 2)), models.batch(8, 16)


def test_known_times_are_found_and_add_up_to_the_step_that_another_clock_saw(models, framework):
    batch, inner = models.batch(8, 16), models.sleeping_step(models.dense(8, 8, 2))
    begins, ends = [], []

    def batches():
        while True:
            begins.append(time.perf_counter())
            nap(LATE, "waiting")
            yield batch

    def step(x, y):
        inner(x, y)
        ends.append(time.perf_counter())

    with mock.patch.object(profiles, "SETTLING", 0.0):  # nothing is made ahead
        profile = models.profiling.profile_steps(step, batches(), steps=20, warmup=5)
    taken = [end - begin for begin, end in zip(begins, ends, strict=True)]
    # After the warm-up and the profiler's first use four turns of 1 + 5 plain and 1 + 5 profiled;
    # TensorFlow's end with one that gives the last step's threads time to say that they ran.
    length = {"pt": 12, "tf": 13}[framework]
    assert len(taken) == 5 + 1 + 4 * length
    turns = [taken[6 + length * turn :][:length] for turn in range(4)]
    plain = fmean(seconds for turn in turns for seconds in turn[1:6])
    profiled = fmean(seconds for turn in turns for seconds in turn[7:12])
    total = sum(getattr(profile, part) for part in PARTS)
    assert total == pytest.approx(profile.step, rel=1e-6)
    assert total == pytest.approx(plain, rel=0.05)
    assert profile.profiled == pytest.approx(profiled, rel=0.05)
    assert profile.traced == pytest.approx(profiled, rel=0.05)
    # As a busy machine wakes late: of all steps, not of the plain alone.
    slept = {part: fmean(naps[6:]) for part, naps in SLEPT.items()}
    for part, least in (("waiting", LATE), ("forward", FORWARD), ("backward", BACKWARD)):
        assert slept[part] >= least
        assert getattr(profile, part) == pytest.approx(slept[part], rel=0.15)
    assert 0 < profile.optimizer < FORWARD / 2
    assert profile.transfer == profile.communication == 0


def test_steps_wait_as_they_do_where_nothing_was_made_ahead(models, small):
    """A loader that is slower than the step fills a queue while nothing is taken of it."""
    plain, batch = small
    made, full, ended = queue.Queue(16), threading.Event(), threading.Event()

    def make():
        while not ended.wait(LATE):
            try:
                made.put_nowait(batch)
            except queue.Full:
                full.set()

    def step(x, y):  # the first one lasts until there is no room for more, as if it compiled
        assert full.wait(60), "the loader made nothing ahead"
        return plain(x, y)

    thread = threading.Thread(target=make)
    thread.start()
    try:
        profile = one_turn(models, step, iter(made.get, None), steps=8)
    finally:
        ended.set()
        thread.join()
    assert profile.step > 0.012  # a batch comes every 15 ms
    assert profile.waiting > 0.6 * profile.step


def test_sleep_and_python_between_operators_are_told_apart(models, small):
    plain, batch = small
    robbed = []  # seconds in which others had the core

    def asleep(x, y):
        nap(0.01, "asleep")
        return plain(x, y)

    def busy(x, y):
        begin, start = time.perf_counter(), time.thread_time()
        while time.thread_time() < start + 0.01:
            pass
        robbed.append(time.perf_counter() - begin - 0.01)
        return plain(x, y)

    sleeps, works = (
        models.profiling.profile_steps(step, [batch], steps=8) for step in (asleep, busy)
    )
    lost = fmean(robbed)
    slept = fmean(SLEPT["asleep"])
    # While others have the core, what works is idle too.
    assert 0.75 * slept < sleeps.idle < 1.25 * slept + lost
    assert sleeps.idle > works.idle - lost
    assert works.overhead > sleeps.overhead
    if workers.campaign():
        assert works.overhead > 0.009
        assert works.idle < 0.003 + 1.5 * lost


def test_products_are_counted_forward_and_backward(models):
    """Of three dense layers: three products forward, five backward."""
    step = models.plain_step(models.dense(64, 64, 64, 2))
    profile = one_turn(models, step, [models.batch(64, 32)])
    products = [one for one in profile.operators if PRODUCTS.search(one.name)]
    assert sum(one.calls for one in products) == 3 + 5
    assert sum(one.share for one in profile.operators) == pytest.approx(1.0)
    costs = [one.seconds for one in profile.operators]
    assert costs == sorted(costs, reverse=True)
    assert min(profile.forward, profile.backward, profile.optimizer) > 0


ONE = 2 * 96 * 160 * 224
KNOWN = {
    "product": ONE,
    "transposed": ONE,
    "batch": 5 * ONE,
    "einsum": 5 * ONE,
    "bfloat16": ONE,
    "large": 2 * 768**3,
}
MORE = {
    "pt": {"compiled": ONE, "integers": None},
    "tf": {
        "fused": ONE,
        "called in a loop": 3 * ONE,
        "alike": 2 * 96 * 160 * 96,
        "integers": None,
        "without a graph": None,
        "of any length": None,
    },
}


def counted(profile) -> list:
    return [one for one in profile.operators if one.flops is not None]


def test_a_products_operations_are_exact_and_their_share_of_the_peak_follows(models, framework):
    forget()
    made, known = models.products(), KNOWN | MORE[framework]
    assert made.keys() == known.keys()
    for name, (step, batch) in made.items():
        profile = one_turn(models, step, [batch])
        tries = 5 if workers.campaign() else 0  # again where others had the cores
        while tries and any(one.of_peak >= 1.3 for one in counted(profile)):
            profile, tries = models.profiling.profile_steps(step, [batch], steps=40), tries - 1
        flops = [] if known[name] is None else [known[name]]  # of what is not known there is none
        assert [one.flops for one in counted(profile)] == flops, name
        kinds = ["bfloat16" if name == "bfloat16" else "float32"] if flops else []
        assert list(profile.peaks) == kinds, name
        for one in counted(profile):
            peak = profile.peaks[kinds[0]]
            assert one.of_peak == pytest.approx(one.flops / one.seconds / peak), name
            if workers.campaign():
                assert (0.2 if name == "large" else 0) < one.of_peak < 1.3, name


def test_a_networks_operations_are_those_of_its_layers_forward_and_backward(models):
    images = np.random.default_rng(0).normal(size=(4, 16, 16, 3)).astype(np.float32)
    batch = models.data.to_device(images, np.arange(4) % 2)
    profile = one_turn(models, models.plain_step(models.convolutional()), [batch])
    strided = 2 * (3 * 3 * 3 * 8) * (4 * 8 * 8)
    grouped = 2 * (3 * 3 * 8) * (4 * 4 * 4)
    transposed = 2 * (2 * 2 * 8 * 4) * (4 * 4 * 4)  # each weight once at each of its inputs
    dense = 2 * (4 * 8 * 8) * 2 * 4
    total = 2 * strided + 3 * (grouped + transposed + dense)  # images have no gradient
    assert sum(one.flops for one in counted(profile)) == pytest.approx(total, rel=1e-9)
    assert all(COMPUTES.search(one.name) for one in counted(profile))
    rest = [one for one in profile.operators if not COMPUTES.search(one.name)]
    assert len(rest) > 3
    assert all(one.flops is None and one.of_peak is None for one in rest)


def test_a_tasks_operations_are_those_of_its_description(models):
    step, batches = models.examples.train_step("digits-cnn", 4)
    flops = sum(one.flops for one in counted(one_turn(models, step, batches)))
    assert flops == pytest.approx(train_step_flops(TASKS["digits-cnn"].model, 4), rel=1e-9)


@pytest.mark.only("tf")
def test_what_prepares_batches_in_the_background_is_not_the_steps(models, small):
    step, batch = small
    with mock.patch.object(profiles, "SETTLING", 0.0):  # or there are not enough
        profile = one_turn(models, lambda number: step(*batch), models.prepared_batches(), steps=8)
    names = {one.name for one in profile.operators}
    assert "Cholesky" not in names
    assert any(PRODUCTS.search(name) for name in names)


@pytest.mark.only("tf")
def test_operators_without_a_graph_are_counted_once(models):
    profile = one_turn(models, *models.without_a_graph())
    calls = {one.name: one.calls for one in profile.operators}
    assert sum(calls[name] for name in calls if PRODUCTS.search(name)) == 3
    assert calls["Tanh"] == 1
    assert "IteratorGetNext" not in calls  # which waits
    assert profile.forward > 0


@pytest.fixture(scope="module")
def files(models, small, tmp_path_factory):
    """The folder of a profile, its log for TensorBoard, and the profile."""
    folder = tmp_path_factory.mktemp("profile")
    profile = models.profiling.profile_steps(small[0], [small[1]], steps=4, folder=folder)
    (log,) = [path for path in (folder / "tensorboard").rglob("*") if path.is_file()]
    return folder, log, profile


def test_the_files_are_opened_by_their_readers(models, framework, files):
    folder, log, profile = files
    trace = json.loads((folder / "trace.json").read_text())["traceEvents"]
    assert log.name.endswith({"pt": ".pt.trace.json", "tf": ".xplane.pb"}[framework])
    assert models.read_log(log) >= {STEP, WAITING}
    marks = [event for event in trace if event.get("name") == STEP and event.get("ph") == "X"]
    assert marks
    assert all({"ts", "dur", "pid", "tid"} <= event.keys() for event in marks)
    stacks = (folder / "stacks.txt").read_text().splitlines()
    assert all(re.fullmatch(r"\S.* \d+", line) for line in stacks)
    assert any(line.startswith(f"{STEP};") for line in stacks)
    assert bool(profile.memory) == (framework == "pt")  # TensorFlow's has those of a GPU alone


def test_tensorboard_s_plug_in_finds_the_operators(models, framework, files):
    product = {"pt": "addmm", "tf": "MatMul"}[framework]
    assert any(product in name for name in models.opened(files[1]))


def test_what_can_not_be_profiled_is_said(models, framework, small):
    step, batch = small
    profile_steps = models.profiling.profile_steps
    with pytest.raises(ValueError, match="there are no batches"):
        profile_steps(step, [])
    with pytest.raises(ValueError, match="profiling needs 4 steps"):
        profile_steps(step, [batch], steps=2)
    if framework == "tf":
        with pytest.raises(NotImplementedError, match="XLA runs the whole step"):
            profile_steps(models.by_xla(), [batch])
