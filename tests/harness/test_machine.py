"""What machine a run is on: what it may use of it, how fast it is, and when it changes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from itertools import chain
from types import SimpleNamespace

import pytest

from bench.analysis.machine_class import gain
from bench.analysis.passes import said
from bench.analysis.reading import load
from bench.harness import conditions, executor, products, record, speed
from bench.harness.executor import Executor
from bench.harness.isolated_measurements import PEAK_DTYPES
from bench.harness.matches import Played
from bench.harness.plan import EFFORT, FRAMEWORKS, Effort
from bench.harness.processes import Processes
from bench.harness.products import best_products
from bench.harness.recorder import Recorder
from bench.harness.scheduler import PASS, Scheduler
from bench.harness.selection import cases_of
from bench.record import Conditions, Speed
from shared import cgroups
from tests.conftest import LIMITS
from tests.harness import faulty
from tests.harness.runs import plan_of, state_of
from tests.workers import ROOT

PROCESSORS = sorted(cgroups.processors())
SENTINEL = speed.sentinel
TWO = pytest.mark.skipif(
    len(PROCESSORS) < 2, reason="this machine has one processor, or tells none"
)
CLASS = """
import json, os, sys
os.sched_setaffinity(0, set(json.loads(sys.argv[1])))
from bench.analysis.machine_class import words
from bench.harness import machine
print(words(machine.describe(machine.usable_threads())))
"""
CHAIN = """
import json, os, sys
os.sched_setaffinity(0, set(json.loads(sys.argv[1])))
from bench.analysis.machine_class import gain
from bench.analysis.passes import said
from bench.analysis.reading import load
from bench.harness import speed
print(gain(speed.chain(2)))
"""


def pinned(program, processors):
    """What a program prints that runs on these processors."""
    command = [sys.executable, "-c", program, json.dumps(processors)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()


@TWO
def test_one_processor_and_two_are_told_apart_by_the_class():
    one, two = (pinned(CLASS, PROCESSORS[:count]) for count in (1, 2))
    assert f"1 of {os.cpu_count()} processors" in one
    assert one != two


@TWO
@pytest.mark.campaign
def test_one_processor_and_two_are_told_apart_by_measurement():
    assert float(pinned(CHAIN, PROCESSORS[:1])) < 1.3
    assert float(pinned(CHAIN, PROCESSORS[:2])) > 1.6


@TWO
def test_threads_are_on_one_processor_for_a_while_and_then_where_they_were():
    stop = threading.Event()
    other = threading.Thread(target=stop.wait)
    other.start()
    try:
        with cgroups.one_processor():
            within = [os.sched_getaffinity(thread) for thread in (0, other.native_id)]
        after = [os.sched_getaffinity(thread) for thread in (0, other.native_id)]
    finally:
        stop.set()
        other.join()
    assert within == [{PROCESSORS[0]}] * 2
    assert after == [set(PROCESSORS)] * 2


def test_a_system_without_such_a_call_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr(cgroups, "THREADS", tmp_path / "nothing")
    with pytest.raises(NotImplementedError, match="bind threads"), cgroups.one_processor():
        pass


# How fast it is -----------------------------------------------------------------------------------


class Runtime:
    """Of a kit whose products have a rate for each dtype; it notes their sizes and threads."""

    def __init__(self, **rates):
        self.rates, self.sizes, self.threads = rates, {}, 2

    def matmul_flops(self, *, size, dtype, seconds):
        if dtype not in self.rates:
            raise TypeError(f"no product of {dtype}")
        self.sizes[dtype] = size
        return self.rates[dtype] * self.threads / 2

    def one_thread(self):
        return self

    def __enter__(self):
        self.threads = 1

    def __exit__(self, *_):
        self.threads = 2


def test_products_are_measured_on_one_thread_and_on_all():
    found = best_products(Runtime(float32=2e11, int8=8e11), ["float32", "int8"], on_cpu=True)
    assert {name: (s.one, s.all) for name, s in found.items()} == {
        "float32": (1e11, 2e11),
        "int8": (4e11, 8e11),
    }


def test_a_dtype_that_is_emulated_has_small_products():
    runtime = Runtime(float32=2e11, bfloat16=1e9)
    best_products(runtime, ["float32", "bfloat16"], on_cpu=True)
    assert runtime.sizes == {"float32": products.LARGEST, "bfloat16": products.SMALLEST}


def test_a_dtype_that_is_refused_is_left_out_but_for_float32():
    found = best_products(Runtime(float32=2e11), ["float32", "int8"], on_cpu=True)
    assert list(found) == ["float32"]
    with pytest.raises(TypeError, match="float32"):
        best_products(Runtime(), ["float32"], on_cpu=True)


def test_a_gpu_has_no_product_of_one_thread():
    found = best_products(Runtime(float32=5e13), ["float32"], on_cpu=False)
    assert (found["float32"].one, found["float32"].all) == (None, 5e13)


@pytest.mark.parametrize("measured", [speed.bandwidth, speed.chain])
def test_memory_and_chains_have_a_speed_on_one_thread_and_on_all(monkeypatch, measured):
    for name in ("COPIED", "MOST_COPIED"):
        monkeypatch.setattr(speed, name, 1 << 20)
    found = measured(2)
    assert found.one > 1e6
    assert found.all > 1e6


def test_the_best_round_counts(monkeypatch):
    took = iter([3.0, 2.0, 1.0, 4.0])  # of one and two threads in turns
    monkeypatch.setattr(speed, "_seconds", lambda parts: next(took))
    found = speed._speed(lambda count: [None] * count, 2, 2, lambda count: 12.0 * count)
    assert (found.one, found.all, gain(found)) == (12.0, 12.0, 1.0)
    assert isinstance(found, Speed)


def test_a_sentinel_is_of_the_fastest_third(monkeypatch):
    rounds = chain([5.0, 1.0, 9.0, 5.0, 3.0, 5.0], [100.0] * 3)
    monkeypatch.setattr(speed, "_seconds", lambda parts: next(rounds))
    monkeypatch.setattr(speed.time, "monotonic", chain([0.0] * 4, [1.0] * 9).__next__)
    monkeypatch.setattr(speed, "SENTINEL_S", 0.5)
    work = speed.CALLS * speed.STACK * 2 * speed.SIDE**3
    assert speed.sentinel(1) in (work / 1.0, work / 2.0)


def test_watching_the_machine_costs_at_most_one_percent_of_a_default_run():
    """With its products, which are measured once."""
    total = load(ROOT / "docs" / "results.json").seconds["total"]
    watched = 2 * EFFORT["default"].blocks * speed.SENTINEL_S
    measured = len(PEAK_DTYPES) * len(FRAMEWORKS) * 2 * products.SECONDS
    assert watched <= 5
    assert watched + measured <= 0.01 * total


# When it changes ----------------------------------------------------------------------------------

FAST, SLOW = 1e11, 5e10
THREE = Effort(blocks=3, rounds=3, seeds=1)


CASES = cases_of(faulty.SMALL, "nowhere", "default")


class FakeMatch:
    """It takes no time, and the machine has another speed afterwards."""

    def __init__(self, processes, cases, *, number, block, **given):
        self.cases, self.number, self.block = cases, number, block
        self.seconds, self.left_out = {}, []

    def play(self, rounds):
        given = {"match": self.number, "block": self.block, "samples": [1.0] * rounds}
        given |= {"losses": [1.0] * 10, "weights_sha256": "", "empty_s": 1e-6, "shortest_s": 1.0}
        return {case.id: Played(**given) for case in self.cases}

    def conditions(self):
        return Conditions(match=self.number, block=self.block)


@pytest.fixture
def blocks_of(monkeypatch, tmp_path):
    """Which blocks count of a run, and its passes.

    `after`: the machine's speed from when each pass has been played, and again.
    """
    monkeypatch.setattr(executor, "PAUSE_S", 0.0)
    monkeypatch.setattr(executor, "Match", FakeMatch)

    def run(*after, amount=THREE, of_device=False):
        now, later = SimpleNamespace(speed=FAST), iter(after)
        monkeypatch.setattr(speed, "sentinel", lambda threads: FAST if of_device else now.speed)
        device = SimpleNamespace(float32_product=lambda: now.speed) if of_device else None
        plan = plan_of(CASES, amount, faulty.SMALL)
        scheduler = Scheduler(plan, state_of(plan))
        recorder = Recorder(tmp_path, plan, scheduler.state, say=lambda line: None)
        parents = {"start_parents": lambda keys: {}}
        parents |= {"stop_parents": lambda: setattr(now, "speed", next(later)), "forks": True}
        running = Executor(
            SimpleNamespace(**parents),
            scheduler,
            recorder,
            data={"digits-cnn": ""},
            threads=1,
            device=device,
        )
        for step in scheduler.steps():
            if step.kind == PASS:
                running.carry_out(step)
        made = record.measured(plan, scheduler.state)
        counted = {int(b) for case in made.cases for m in case.timing.step_s.values() for b in m}
        return counted, made.passes

    return run


@pytest.mark.parametrize("of_device", [False, True])
@pytest.mark.parametrize(
    ("after", "counted", "numbers"),
    [
        ([FAST, 0.9 * FAST, FAST], {0, 1, 2}, [0, 1, 2]),
        # What is played again counts where the machine was then the same at both ends,
        ([FAST, SLOW, SLOW, FAST, FAST], {0, 2}, [0, 1, 1, 2, 2]),
        # but not if it is then another one than in most passes.
        ([SLOW, SLOW, SLOW, SLOW], {0, 1, 2}, [0, 0, 1, 2]),
        ([FAST, SLOW, FAST, FAST], {0, 2}, [0, 1, 1, 2]),
    ],
)
def test_a_pass_under_which_the_machine_changed_is_played_again_once_or_left_out(
    blocks_of, after, counted, numbers, of_device
):
    blocks, passes = blocks_of(*after, of_device=of_device)
    assert blocks == counted
    assert [played.number for played in passes] == numbers
    again = [played for played in passes if played.again]
    assert len(again) == len(numbers) - 3
    assert all(played.matches for played in again)


def test_a_pass_is_played_again_only_where_there_is_time_for_all_of_it(blocks_of, monkeypatch):
    left = []

    def no_time(self, matches):
        left.append(self.plan.durations.of_pass([match.cases for match in matches]))
        return False

    monkeypatch.setattr(Scheduler, "plays_again", no_time)
    counted, passes = blocks_of(FAST, SLOW, FAST)
    assert left[0] > 0
    assert [played.number for played in passes] == [0, 1, 2]
    assert counted == {0}


def test_a_run_of_one_block_is_played_once_and_says_that_the_machine_changed(blocks_of):
    blocks, (played,) = blocks_of(SLOW, amount=Effort(blocks=1, rounds=3, seeds=1))
    assert blocks == {0}
    assert (played.before, played.after) == (FAST, SLOW)


@pytest.mark.parametrize(
    ("tries", "speed_after"), [([SLOW, SLOW, FAST], FAST), ([SLOW, 0.9 * SLOW, 0.6 * FAST], 0.6e11)]
)
def test_a_speed_that_differs_is_measured_again_before_it_counts(monkeypatch, tries, speed_after):
    left = iter(tries)
    monkeypatch.setattr(executor, "PAUSE_S", 0.0)
    assert executor._nearest(FAST, lambda: next(left)) == pytest.approx(speed_after)


def test_a_device_without_a_figure_leaves_the_machine_s():
    assert executor._nearest(FAST, lambda: None) is None
    assert executor._nearest(None, lambda: SLOW) == SLOW


def test_a_worker_waits_between_the_products_of_a_device(tmp_path, fakes):
    on_gpu = SimpleNamespace(devices={"tf": "CPU:0", "pt": "cuda"}, threads=1)
    with Processes(tmp_path, limits=LIMITS) as processes:
        device = conditions.device(processes, on_gpu)
        assert device.float32_product() == device.float32_product() == 4e9
        assert len(list(tmp_path.glob("*describe-pt*"))) == 1
        device._worker.stop(kill=True)
        assert device.float32_product() is None
    assert conditions.device(None, SimpleNamespace(devices={"pt": "cpu"})) is None


@pytest.mark.campaign
@TWO
def test_a_neighbour_for_a_third_of_a_run_is_noticed(measure, fakes, monkeypatch):
    play, watched, neighbours = Executor._play_matches, Executor._watched_pass, []

    def playing(self, block, matches):
        if block == 1 and not neighbours:
            burn = [sys.executable, "-c", "while True: pass"]
            neighbours.extend(subprocess.Popen(burn) for _ in range(2 * len(PROCESSORS)))
        play(self, block, matches)

    def then_alone(self, block, matches, again=False):
        played = watched(self, block, matches, again)
        for process in neighbours:
            process.kill()
            process.wait()
        return played

    monkeypatch.setattr(Executor, "_play_matches", playing)
    monkeypatch.setattr(Executor, "_watched_pass", then_alone)
    given = {"technique": faulty.TRAINED, "machine": {"sentinel": SENTINEL}}
    found = measure("same", amount=THREE, **given)
    assert [(p.number, p.again) for p in found.results.passes] == [
        *((0, False), (1, False), (1, True), (2, False)),
    ]
    assert found.results.passes[1].matches == []  # the samples of the first try are gone
    assert "Pass 2 was played again." in said(found.results.passes)
