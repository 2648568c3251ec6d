"""Taking up a run: what was measured stands as it was, and only the rest is measured."""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from random import Random
from types import SimpleNamespace

import pytest
from msgspec import structs, to_builtins

from bench.analysis.cases import LIFETIMES
from bench.analysis.reading import load
from bench.harness import conditions, executor, isolated_measurements, remaining, run, speed, state
from bench.harness.answers import ColdStart, Configured, Described, Probed, Proof
from bench.harness.conditions import OtherConditions
from bench.harness.durations import Durations
from bench.harness.isolated_measurements import Measurement, Trained
from bench.harness.matches import Match, Played, start_order
from bench.harness.plan import LOOKS, SEED, SEED_LOOKS, Effort, Technique, Variant, Workload
from bench.harness.processes import Failed, Processes
from bench.harness.run import Run, Settings
from bench.harness.run_plan import Plan
from bench.harness.scheduler import WRITING_S
from bench.harness.selection import cases_of
from bench.record import Attempt, Metric, Speed, encode
from tests.harness import command_line
from tests.harness.command_line import ROOT, blocks, interrupt
from tests.harness.fake_plugin import HOLD, STEADY
from tests.records import as_read, find_case

pytestmark = pytest.mark.timeout(240)

# A run whose measurements are made up, interrupted at every point ---------------------------------

# With the others, two baselines and two controls, they are too many for one match.
VARIANTS = tuple(Variant(f"variant{i}") for i in range(3))
TECHNIQUES = {
    "first": Technique(
        "faults",
        "first",
        "First",
        (Variant("plain", role="baseline"), Variant("nan_loss"), Variant("refuses"), *VARIANTS),
        (Workload("digits-cnn", "small", accuracy=True),),
    ),
    "second": Technique(
        "faults",
        "second",
        "Second",
        (Variant("plain", role="baseline"), Variant("faster")),
        (Workload("digits-cnn", "compute"), Workload("digits-cnn", "small", timed=False)),
        cold_starts=2,
        probes=True,
    ),
}
AMOUNT = Effort(blocks=3, rounds=5, seeds=2)
BY_LOOKS = Effort(blocks=LOOKS[-1], rounds=5, looks=LOOKS, seed_looks=SEED_LOOKS)
TIMES = {"faster": 0.5, "variant0": 2.0}
NOISY = ("variant1", "variant2")
CASES = {name: cases_of(t, "nowhere", "default") for name, t in TECHNIQUES.items()}
FAILING = "first/digits-cnn-4/pt/variant1"
PHASES = ("import_bytes", "build_bytes", "first_step_peak_bytes", "steady_peak_bytes")


class MadeUp:
    """Measurements that depend on what is measured alone, and a note of each.

    `stop_at`: the number of the measurement during which Ctrl-C is pressed. `fails`: the ids of
    cases that fail, in a match or in a cold process.
    """

    def __init__(self, stop_at=math.inf, fails=(), cold_fails=()):
        self.stop_at, self.fails, self.cold_fails = stop_at, fails, cold_fails
        self.done = []

    def note(self, *what):
        if len(self.done) >= self.stop_at:
            raise KeyboardInterrupt
        self.done.append(what)

    def play(self, match, rounds):
        self.note("block", match.seed, tuple(sorted(case.id for case in match.cases)))
        played = {case.id: self.block(case, match.seed, rounds) for case in match.cases}
        for result in played.values():
            result.match, result.block = match.number, match.block
        return played

    def block(self, case, seed, rounds):
        if case.variant.name == "refuses":
            return Played(status="UNSUPPORTED", reason="upstream refuses this")
        if case.id in self.fails:
            return Played(status="FAILED", reason="it fell over")
        made = Random(f"{case.id} {seed}")
        losses = [made.random() if case.variant.name == "nan_loss" else 2.0] * 10
        losses[4] = None if case.variant.name == "nan_loss" else losses[4]
        noise = 0.3 if case.variant.name in NOISY else 0.001
        usual = TIMES.get(case.variant.name, 1.0)
        return Played(
            samples=[usual * made.uniform(1 - noise, 1 + noise) for _ in range(rounds)],
            first_call_s=made.random() if seed % 2 else None,
            losses=losses,
            weights_sha256="a" * 64,
            empty_s=made.random() * 1e-6,
            steps=made.randrange(1, 9),
            shortest_s=made.uniform(0.01, 0.02),
            settings=Configured(threads={"intra_op": 2}, keeps_freed_memory=True),
            evidence={"seed": seed} if seed == SEED else None,
        )

    def cold_start(self, processes, case, *given):
        self.note("cold start", case.id)
        if case.id in self.cold_fails:
            raise Failed("it fell over")
        made = Random(f"cold {case.id}")
        answer = ColdStart(
            first_call_s=made.random(),
            memory={name: made.randrange(1 << 30) for name in PHASES},
            parts={"parameters": 1, "gradients": 1, "optimizer": 0},
            device_peak=None,
            modules=[],
            wrote=False,
        )
        return answer, False

    def probes(self, processes, cases, *, done, **given):
        for case in cases:
            self.note("probe", case.id)
            value = Random(f"probe {case.id}").random()
            figure = Metric(value=value, unit="1", samples=[value])
            done(case, Measurement(Probed(metrics={"figure": figure}, evidence={"read": case.id})))

    def train(self, processes, cases, *, trained, seeds, done, **given):
        for case in cases:
            self.note("training", case.id, seeds)
            noise = 4.0 if case.variant.name in NOISY else 0.01
            made = [Random(f"train {case.id} {seed}") for seed in range(seeds)]
            done(case, Trained(per_seed=[90 + each.uniform(-noise, noise) for each in made]))


DESCRIBED = Described(
    versions={"numpy": "2"},
    python="3",
    device="cpu",
    device_info=None,
    keeps_freed_memory=True,
    onednn=True,
    products={"float32": Speed(one=1e9, all=1e9)},
)


def install(patch, made):
    """Put made-up measurements in the place of processes."""
    patch.setattr(executor.Match, "play", lambda match, rounds: made.play(match, rounds))
    for name, value in {
        "describe": lambda *_, **__: DESCRIBED,
        "begin": lambda *_, **__: SimpleNamespace(stop=lambda **_: 0),
        "_cold_start": made.cold_start,
        "_evidence": lambda *_: Proof(),
        "probes": made.probes,
        "train": made.train,
    }.items():
        patch.setattr(isolated_measurements, name, value)
    for name, steady in STEADY.items():
        patch.setattr(speed, name, steady)
    patch.setattr(conditions.machine, "Watch", lambda: SimpleNamespace(stop=Attempt))
    patch.setattr(Processes, "start_parents", lambda self, keys: {})
    patch.setattr(run.datasets, "materialise", lambda *_: Path("nowhere"))
    return made


@pytest.fixture
def made_up(monkeypatch):
    return lambda **settings: install(monkeypatch, MadeUp(**settings))


def run_into(folder, amount=AMOUNT, taken_up=None):
    folder.mkdir(exist_ok=True)
    plan, settings = Plan(CASES, TECHNIQUES, amount), Settings(results=folder.parent)
    return Run(plan, settings, folder, lambda line: None, taken_up)


def take_up(folder, monkeypatch, amount=AMOUNT):
    """The run of `folder` again, as another process would find it."""
    monkeypatch.setattr(state, "is_alive", lambda process: False)
    return run_into(folder, amount, state.load(folder, load(folder).started))


def stop(folder, made, amount=AMOUNT):
    """A run into `folder` that Ctrl-C ends."""
    interrupted = run_into(folder, amount)
    with pytest.raises(KeyboardInterrupt):
        interrupted.measure()
    return interrupted


def measured(record):
    """The record without what tells one run from another of the same figures."""
    record = as_read(record)
    return to_builtins(
        record.but(
            started="",
            resumed=[],
            seconds={},
            environment=record.environment.but(load=None, products_at_end={}),
            passes=[],
            cases=[case.but(seconds={}) for case in record.cases],
            blocks=[block.but(load=None) for block in record.blocks],
        )
    )


OF_SPEED = ("samples_per_s", "share_of_peak", *(f"total_{n}_steps_s" for n in LIFETIMES))


def figures(record, *, but=()):
    """By case what was measured first and what was concluded of it.

    But for times: how fast the machine was in a block is told by all matches of it.
    """
    found = {}
    for case in as_read(record).cases:
        if case.id not in but:
            first = next(iter(case.timing.step_s.values()), {})
            timing = case.timing.but(step_s={"": first}, warm_first_call_s=None)
            timing = timing.but(median_s=None, ci_s=None)
            metrics = {n: m for n, m in case.metrics.items() if n not in OF_SPEED}
            shown = case.but(timing=timing, metrics=metrics, seconds={}, blocks=[])
            found[case.id] = to_builtins(shown)
    return found


def sampled(case):
    """How many samples each block of each match has."""
    matches = case.timing.step_s.values()
    return [len(samples) for blocks in matches for samples in blocks.values()]


def ratios(record, *, but=()):
    """By pair what was concluded of it, without pairs of cases in `but`."""
    return {
        (c.kind, c.numerator, c.denominator): to_builtins(c)
        for c in as_read(record).comparisons
        if not {c.numerator, c.denominator} & set(but)
    }


@pytest.fixture(scope="module", params=[AMOUNT, BY_LOOKS], ids=["blocks", "looks"])
def undisturbed(request, tmp_path_factory):
    """A run that nobody interrupts, and its measurements; in the second contenders leave."""
    return undisturbed_run(tmp_path_factory, request.param)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return undisturbed_run(tmp_path_factory, AMOUNT)


@pytest.fixture(scope="module")
def by_looks(tmp_path_factory):
    return undisturbed_run(tmp_path_factory, BY_LOOKS)


def undisturbed_run(tmp_path_factory, amount):
    with pytest.MonkeyPatch.context() as patch:
        made = install(patch, MadeUp())
        record = run_into(tmp_path_factory.mktemp("undisturbed"), amount).measure()
    return SimpleNamespace(record=record, done=made.done, amount=amount)


def test_contenders_leave_when_they_are_decided_and_what_they_are_compared_with_stays(by_looks):
    blocks = {case.id: len(case.blocks) for case in by_looks.record.cases}
    played = {name.partition("/")[2].partition("/")[2]: n for name, n in blocks.items() if n}
    assert played["pt/faster"] == played["tf/faster"] == LOOKS[0]
    assert max(played[f"{side}/{name}"] for side in ("pt", "tf") for name in NOISY) == LOOKS[-1]
    assert blocks["first/digits-cnn-4/pt/plain"] >= LOOKS[-1]
    seeds = {
        case.variant: len(case.accuracy.per_seed) for case in by_looks.record.cases if case.accuracy
    }
    assert seeds["variant0"] == 4
    assert max(seeds[name] for name in NOISY) == seeds["plain"] == 8


def test_a_run_is_what_the_tests_below_need(whole):
    """Matches in parts, every kind of measurement, and losses that are not numbers."""
    assert {what for what, *_ in whole.done} == {"block", "cold start", "probe", "training"}
    assert len([1 for what, *_ in whole.done if what == "block"]) == 3 * AMOUNT.blocks
    statuses = {case.variant: case.status for case in whole.record.cases}
    assert statuses["refuses"] == "UNSUPPORTED"
    assert {statuses[name] for name in statuses if name != "refuses"} == {"OK"}
    assert None in find_case(whole.record, "first/digits-cnn-4/pt/nan_loss").losses
    assert whole.record.resumed == []


@pytest.mark.parametrize("killed", [False, True], ids=["ctrl-c", "kill -9"])
def test_wherever_a_run_ends_it_is_taken_up_as_if_it_had_not(
    undisturbed, made_up, tmp_path, monkeypatch, killed
):
    """The record is the same to the last digit, and nothing is measured twice.

    Where the process was killed, it did not write what it was at: a technique's training.
    """
    every, amount = undisturbed.done, undisturbed.amount
    for stop_at in range(4 * killed, len(every), 11 if amount is AMOUNT else len(every) // 3):
        folder = tmp_path / f"after {stop_at}"
        before = made_up(stop_at=stop_at)
        interrupted = stop(folder, before, amount)
        blocks_played = [what for what in before.done if what[0] == "block"]
        kept = load(folder)
        assert (kept.finished, len(kept.blocks)) == (False, len(blocks_played))
        if not killed:
            interrupted.recorder.save()  # as bench/conftest.py does
        after = made_up()
        record = take_up(folder, monkeypatch, amount).measure()
        assert measured(record) == measured(undisturbed.record)
        assert len(record.resumed) == 1
        again = [what for what in before.done if what in after.done and what[0] != "cold start"]
        assert {what for what, *_ in again} <= ({"training"} if killed else set())
        done = before.done + [what for what in after.done if what not in again]
        assert sorted(done) == sorted(every)


def test_a_run_can_be_taken_up_again_and_again(whole, made_up, tmp_path, monkeypatch):
    folder = tmp_path / "often"
    stop(folder, made_up(stop_at=0))
    measurements, record = 0, None
    while record is None:
        made = made_up(stop_at=4)
        resumed = take_up(folder, monkeypatch)
        try:
            record = resumed.measure()
        except KeyboardInterrupt:
            resumed.recorder.save()
        measurements += len(made.done)
    assert measured(record) == measured(whole.record)
    assert len(record.resumed) == math.ceil(len(whole.done) / 4)
    assert measurements == len(whole.done)


def test_a_run_that_was_killed_between_its_two_files_loses_nothing(
    whole, made_up, tmp_path, monkeypatch
):
    folder = tmp_path / "between"
    before = made_up(stop_at=5)
    interrupted = stop(folder, before)
    old = (folder / "results.json").read_bytes()
    before.stop_at = math.inf
    (number,) = {n for n in range(3) if (n, 1) not in interrupted.state.played}
    cases = interrupted.scheduler.lacking(1)[0].cases
    cases = interrupted.scheduler.open(start_order(cases, number, 1))
    where = {"data": {}, "threads": 1, "seed": SEED + 1, "evidence": False}
    match = Match(None, cases, number=number, block=1, **where)
    played = before.play(match, AMOUNT.rounds)
    interrupted.state.add_block(played, match.conditions())
    interrupted.recorder.save()
    (folder / "results.json").write_bytes(old)  # the state is a block ahead
    after = made_up()
    assert measured(take_up(folder, monkeypatch).measure()) == measured(whole.record)
    assert not [what for what in after.done if what in before.done and what[0] == "block"]


def test_a_run_whose_minutes_are_over_ends_whatever_it_is_at(made_up, tmp_path, monkeypatch):
    monkeypatch.setattr(Durations, "of", lambda *_: 0.0)
    made = made_up()
    made.play = lambda match, rounds: time.sleep(60)
    plan = Plan(CASES, TECHNIQUES, AMOUNT, Durations(parents_s=0.0))
    settings = Settings(results=tmp_path, minutes=(WRITING_S + 0.2) / 60)
    record = Run(plan, settings, tmp_path, lambda line: None).measure()
    assert (record.finished, record.ended, record.blocks) == (False, "minutes", [])
    assert load(tmp_path).ended == "minutes"


# What failed --------------------------------------------------------------------------------------


@pytest.fixture
def with_failures(made_up, tmp_path, monkeypatch):
    """A run in which a case failed, before and after it was taken up."""

    def measure(**fails):
        folder = tmp_path / "failed"
        made_up(**fails)
        before = run_into(folder).measure()
        made = made_up()
        after = take_up(folder, monkeypatch).measure()
        return SimpleNamespace(before=before, after=after, done=made.done, folder=folder)

    return measure


def test_a_failed_case_is_measured_again_beside_those_it_is_compared_with(with_failures, whole):
    found = with_failures(fails={FAILING})
    company = ("first/digits-cnn-4/pt/plain", FAILING, "first/digits-cnn-4/tf/variant1")
    played = [cases for what, *_, cases in found.done if what == "block"]
    assert played == [tuple(sorted(company))] * AMOUNT.blocks
    assert [what[1] for what in found.done if what[0] != "block"] == [FAILING] * 2
    case, other = (find_case(record, FAILING) for record in (found.after, whole.record))
    assert (case.status, case.reason) == ("OK", None)
    assert case.timing.step_s.keys() == {"3"}  # a match of its own
    assert sampled(case) == [AMOUNT.rounds] * AMOUNT.blocks
    assert ratios(found.after).keys() - ratios(found.before).keys() == {
        ("baseline", FAILING, "first/digits-cnn-4/pt/plain"),
        ("framework", FAILING, "first/digits-cnn-4/tf/variant1"),
    }
    assert {comparison.n for comparison in found.after.comparisons} == {AMOUNT.blocks}
    assert case.timing.step_s["3"] in other.timing.step_s.values()
    for part in ("memory", "accuracy"):
        assert to_builtins(getattr(case, part)) == to_builtins(getattr(other, part))
    # What had not failed stands to the last digit; intervals know of one more that has their noise.
    assert figures(found.after, but={FAILING}) == figures(found.before, but={FAILING})
    after, before = (ratios(r, but={FAILING}) for r in (found.after, found.before))
    assert {pair: (r["ratio"], r["n"]) for pair, r in after.items()} == {
        pair: (r["ratio"], r["n"]) for pair, r in before.items()
    }


def test_what_failed_in_its_own_process_is_measured_again_whole(with_failures):
    """Also in matches: a case that runs out of memory now and then is not half a case."""
    found = with_failures(cold_fails={FAILING})
    assert find_case(found.before, FAILING).reason == "cold start: it fell over"
    assert {what for what, *_ in found.done} == {"block", "cold start", "training"}
    assert {case.status for case in found.after.cases} == {"OK", "UNSUPPORTED"}


def test_a_baseline_that_failed_plays_again_with_all_that_have_it(with_failures):
    failed = "second/digits-cnn-128/pt/plain"
    found = with_failures(fails={failed})
    (played,) = {cases for what, *_, cases in found.done if what == "block"}
    side = {f"second/digits-cnn-128/{name}" for name in ("pt/faster", "pt/control", "tf/plain")}
    assert set(played) == {failed} | side
    new = ratios(found.after).keys() - ratios(found.before).keys()
    assert ("baseline", "second/digits-cnn-128/pt/faster", failed) in new
    assert ("framework", failed, "second/digits-cnn-128/tf/plain") in new
    before, after = figures(found.before), figures(found.after, but={failed})
    assert [after[name] for name in before if name.startswith("first")] == [
        case for name, case in before.items() if name.startswith("first")
    ]


def test_where_a_whole_match_failed_it_is_played_whole(with_failures, whole):
    names = {case.id for case in CASES["second"]}
    found = with_failures(fails=names)
    (played,) = {cases for what, *_, cases in found.done if what == "block"}
    assert set(played) == {name for name in names if "-128/" in name}
    assert numbered_as_before(found.after) == numbered_as_before(whole.record)


def numbered_as_before(record):
    """The record without the numbers of matches: a last one is played in place of an empty one."""
    timings = [case.timing.but(step_s=dict(enumerate(case.timing.step_s.values())))
               for case in record.cases]  # fmt: skip
    cases = [
        case.but(
            timing=timing.but(step_s={str(n): blocks for n, blocks in timing.step_s.items()}),
            blocks=[block.but(match=0) for block in case.blocks],
        )
        for case, timing in zip(record.cases, timings, strict=True)
    ]
    return measured(record.but(cases=cases, matches=[], blocks=[]))


def test_what_fails_again_has_failed_and_can_be_tried_once_more(
    with_failures, made_up, monkeypatch
):
    found = with_failures(fails={FAILING})
    changed("cases", FAILING, status="FAILED", reason="it fell over")(found.folder)
    made_up(fails={FAILING})
    again = take_up(found.folder, monkeypatch).measure()
    case = find_case(again, FAILING)
    assert (case.status, case.reason) == ("FAILED", "it fell over")
    made_up()
    last = take_up(found.folder, monkeypatch).measure()
    assert figures(last) == figures(found.after)
    assert ratios(last) == ratios(found.after)


# Other conditions ---------------------------------------------------------------------------------


@pytest.fixture
def interrupted(made_up, tmp_path):
    """The folder of a run that ended after four measurements."""
    stop(tmp_path / "interrupted", made_up(stop_at=4))
    return tmp_path / "interrupted"


def changed(*place, file="state.json", **values):
    """What changes values at a place of a file in a run's folder."""

    def change(folder):
        data = json.loads((folder / file).read_text("utf-8"))
        inner = data
        for name in place:
            inner = inner[name]
        inner |= values
        (folder / file).write_text(json.dumps(data))

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (changed("environment", onednn="off"), "onednn was off, is PyTorch on"),
        (changed("environment", "packages", "tf", numpy="1"), "packages tf numpy was 1, is 2"),
        (changed("environment", "allocator", pt=False), "allocator pt was False, is True"),
        (changed("environment", "devices", pt="cuda:0"), "devices pt was cuda:0, is cpu"),
        (changed(code="0123"), "code was 0123, is "),
    ],
)
def test_other_conditions_are_refused_by_name(interrupted, made_up, monkeypatch, change, said):
    change(interrupted)
    before = {p.name: p.read_bytes() for p in interrupted.iterdir() if p.is_file()}
    made = made_up()
    with pytest.raises(OtherConditions) as refused:
        take_up(interrupted, monkeypatch).measure()
    message = str(refused.value)
    assert message.startswith("this changed since the run began: ")
    assert said in message
    assert "\n" not in message
    assert made.done == []
    assert {p.name: p.read_bytes() for p in interrupted.iterdir() if p.is_file()} == before


SLOW = {"float32": 5e8}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (changed("environment", cpu="another"), "the processor is "),
        (changed("environment", threads=99), "the number of threads is "),
        (changed("environment", gpu={"name": "some"}), "it computes on the CPU, on some before"),
        (changed("environment", peak_flops=SLOW, products={}), "the new machine computes twice as"),
    ],
)
def test_a_machine_of_another_class_is_refused_by_what_differs(
    interrupted, made_up, monkeypatch, change, said
):
    change(interrupted)
    made = made_up()
    with pytest.raises(OtherConditions) as refused:
        take_up(interrupted, monkeypatch).measure()
    assert str(refused.value).startswith("the run began on another machine: ")
    assert said in str(refused.value)
    assert made.done == []


def test_another_machine_of_the_class_takes_a_run_up(interrupted, made_up, monkeypatch, whole):
    """With another build of the system, and a few bytes of memory more."""
    changed("environment", os="Linux-9", memory_bytes=2**35 + 4096)(interrupted)
    made_up()
    after = take_up(interrupted, monkeypatch).measure()
    assert (after.finished, after.environment.os) == (True, "Linux-9")
    assert measured(after)["cases"] == measured(whole.record)["cases"]


def test_load_and_peaks_may_differ_and_stand_as_they_were(interrupted, made_up, monkeypatch, whole):
    before = load(interrupted).environment
    made_up()
    monkeypatch.setattr(conditions.machine.psutil, "getloadavg", lambda: (77.0, 0, 0))
    faster = structs.replace(DESCRIBED, products={"float32": Speed(one=1.2e9, all=1.2e9)})
    monkeypatch.setattr(isolated_measurements, "describe", lambda *_: faster)
    after = take_up(interrupted, monkeypatch).measure()
    now = as_read(after).environment
    assert to_builtins(now.but(products_at_end={})) == to_builtins(before)
    assert measured(after) == measured(whole.record)


def test_a_run_that_had_not_begun_to_measure_takes_the_conditions_of_today(
    made_up, tmp_path, monkeypatch, whole
):
    made_up()

    def interrupt_it(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(isolated_measurements, "describe", interrupt_it)
    stop(tmp_path / "early", None)
    made_up()
    assert measured(take_up(tmp_path / "early", monkeypatch).measure()) == measured(whole.record)


# The plan and progress of what is left ------------------------------------------------------------


def seconds_left(run):
    return remaining.seconds_left(run.plan, run.state)


def test_what_is_left_is_announced_and_counted(interrupted, made_up, monkeypatch):
    made_up()
    resumed = take_up(interrupted, monkeypatch)
    words = " ".join(resumed.describe().split())
    assert "resumed: about " in words
    new = run_into(interrupted.parent / "new")
    assert 0 < seconds_left(resumed)[0] < seconds_left(new)[0]
    said = []
    resumed.recorder.progress._say = said.append
    resumed.measure()
    parts = dict.fromkeys(
        line.partition("[")[2].partition("]")[0].partition(" ·")[0] for line in said
    )
    assert next(iter(parts)) == "start"
    assert list(parts)[-2:] == ["training, 2 seeds", "end"]
    assert seconds_left(resumed) == (0, 0)


# The command --------------------------------------------------------------------------------------


def copied(folder, to):
    """A copy of a run with its data, whose path says which one it is."""
    shutil.copytree(folder.resolve(), to / folder.resolve().name)
    return to / folder.resolve().name


@pytest.fixture(scope="module")
def stopped(start, tmp_path_factory, results_folder):
    """A run of five blocks that was killed after three of them."""
    results = tmp_path_factory.mktemp("killed")
    if (results_folder / "data").exists():  # made by other tests
        shutil.copytree(results_folder / "data", results / "data")
    found = interrupt(
        start,
        lambda record, logs: blocks(record) == 3,
        *("--blocks=5", "-k=same"),
        results=results,
        by=signal.SIGKILL,
        **{HOLD: "3"},
    )
    found.folder = (results / "latest").resolve()
    found.record = load(found.folder)
    return found


@pytest.fixture(scope="module")
def resumed(run, stopped):
    return run(f"--results={stopped.folder.parent}", f"--resume={stopped.folder}")


def test_a_killed_run_is_taken_up(stopped, resumed):
    before, after = stopped.record, resumed.record
    assert resumed.status == 0, resumed.out + resumed.err
    assert (before.finished, after.finished) == (False, True)
    assert stopped.folder == Path(folder_of(resumed.out))
    for field in ("command", "started", "effort"):
        assert getattr(after, field) == getattr(before, field)
    assert "--resume" not in after.command
    assert len(after.resumed) == 1
    environment = after.environment.but(products_at_end={})
    assert to_builtins(environment) == to_builtins(before.environment)
    assert [case.id for case in after.cases] == [case.id for case in before.cases]
    for old, new in zip(before.cases, after.cases, strict=True):
        done, now = old.timing.step_s["0"], new.timing.step_s["0"]
        assert {block: now[block] for block in done} == done
        assert sampled(new) == [5] * 5
        assert to_builtins(new.certificate) == to_builtins(old.certificate)
        assert new.memory.steady_peak_bytes > 0
        assert len(new.accuracy.per_seed) == 2
    (comparison,) = after.comparisons
    assert comparison.n == 5
    assert "1 passed" in resumed.out  # what was selected, and not its baseline
    assert "[pass 1" not in resumed.err
    assert "[pass 5" in resumed.err
    assert "resumed: about" in " ".join(resumed.err.split())


def folder_of(out):
    """The folder that the output points to."""
    return next(
        str(Path(line).parent) for line in out.splitlines() if line.endswith("/results.json")
    )


def test_a_finished_run_has_nothing_left(run, stopped, resumed, tmp_path):
    folder = copied(stopped.folder, tmp_path)
    before = (folder / "results.json").read_bytes()
    found = run(f"--results={tmp_path}", f"--resume={folder}")
    assert found.status == 0
    assert "is finished: nothing is left to measure" in found.err
    assert "What to use" in found.out
    assert "elapsed" not in found.err
    assert (folder / "results.json").read_bytes() == before
    assert not (folder / "logs-3").exists()


def test_what_failed_fails_again_for_the_same_reason_and_the_rest_stands(run, tmp_path):
    """In earnest, with real processes, in results/latest; a row that was asked for by name too."""
    options = (f"--results={tmp_path}", "--framework=pt", "--variant=same,seldom,raises_late")
    first = run(*options, "--blocks=2")
    again = run(f"--results={tmp_path}", "--resume")
    for found in (first, again):
        assert found.status == 1
        assert "FAILED: ValueError: step 41 is too much" in found.out
    failed = "faulty/digits-cnn-4/pt/raises_late"
    assert figures(again.record, but={failed}) == figures(first.record, but={failed})
    assert "[pass 2" in again.err
    logs = [path.name for path in (tmp_path / "latest" / "logs-2").iterdir()]
    assert not [name for name in logs if name.endswith("-same.log")]


def test_a_run_on_another_machine_is_refused_and_left_as_it_was(run, stopped, tmp_path):
    folder = copied(stopped.folder, tmp_path)
    reopen(folder)
    changed("environment", threads=99, cpu="another")(folder)
    before = (folder / "results.json").read_bytes()
    found = run(f"--results={tmp_path}", f"--resume={folder}")
    assert found.status == pytest.ExitCode.USAGE_ERROR
    (line,) = [line for line in found.err.splitlines() if line.startswith("ERROR")]
    assert "the processor is " in line
    assert "the number of threads is " in line
    assert "Traceback" not in found.out + found.err
    assert (folder / "results.json").read_bytes() == before


# Bad input ----------------------------------------------------------------------------------------


def cut(name):
    def damage(folder):
        text = (folder / name).read_text("utf-8")
        (folder / name).write_text(text[: len(text) // 2])

    return damage


def without(name):
    return lambda folder: (folder / name).unlink()


def blocked(folder):
    """Nothing can be written in its place, whoever asks."""
    (folder / "state.partial").mkdir()


def alive(folder):
    """The process that measures is this one."""
    changed(process=to_builtins(state.this_process()))(folder)


def test_a_run_is_taken_up_by_one_process(stopped, tmp_path):
    folder = shutil.copytree(stopped.folder, tmp_path / "run")
    started = load(folder).started
    state.claim(folder, started)
    with pytest.raises(ValueError, match=f"process {os.getpid()} is still measuring it"):
        state.claim(folder, started)


def renamed_case(folder):
    text = (folder / "state.json").read_text("utf-8")
    (folder / "state.json").write_text(text.replace("pt/same", "pt/gone"))


of_record = partial(changed, file="results.json")

# name -> (what is done to the folder, options, what the line must say)
BAD = {
    "another effort": (None, ["--effort=full"], "began with default as --effort: leave out"),
    "other blocks": (None, ["--blocks=4"], "began with 5 as --blocks: leave out --blocks"),
    "another -k": (None, ["-k=good"], "began with same as -k: leave out -k"),
    "another -m": (None, ["-m=slow"], "began without -m: leave out -m"),
    "a technique": (None, ["--technique=faulty"], "began without --technique: leave"),
    "another variant": (None, ["--variant=good,same"], "began with same as --variant: leave"),
    "a budget": (None, ["--memory-budget=1GB"], "began without --memory-budget: leave"),
    "an interpreter": (None, [f"--pt-python={sys.executable}"], "began without --pt-python"),
    "other results": (None, ["--results={folder}"], "leave out --results"),
    "no results.json": (without("results.json"), [], "has no results.json: give the folder"),
    "no state": (without("state.json"), [], "no state.json beside results.json"),
    "cut state": (cut("state.json"), [], "state.json is cut off"),
    "newer state": (changed(state_version=99), [], "state.json has version 99"),
    "no cases": (changed(cases={}), [], "state.json is damaged: a case of a match is missing"),
    "no passes": (changed(passes=[]), [], "is damaged: a match of a pass is missing"),
    "two runs": (of_record(started="then"), [], "belong to different runs"),
    "not writable": (blocked, [], "state.json can't be written (Is a directory)"),
    "still measured": (alive, [], "is still measuring it"),
    "not collected": (renamed_case, [], "pt/gone was not collected: give the same files"),
}


@pytest.fixture(scope="module")
def refused(stopped, bench_file, tmp_path_factory):
    """Every bad input: exit status, output, errors."""
    given = []
    for number, (damage, options, _) in enumerate(BAD.values()):
        results = tmp_path_factory.mktemp(f"bad{number}")
        folder = copied(stopped.folder, results)
        reopen(folder)
        if damage:
            damage(folder)
        options = [option.format(folder=folder) for option in options]
        common = ["-c", str(ROOT / "pyproject.toml"), *command_line.PLUGINS, str(bench_file)]
        given.append([*common, f"--resume={folder}", *options])
    return dict(zip(BAD, command_line.in_one_process(given, bench_file.parent), strict=True))


def reopen(folder):
    """Make the copy of a run that may be finished by now one that is not."""
    changed(finished=False)(folder)
    of_record(finished=False)(folder)


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_clear_line(refused, name):
    status, out, err = refused[name]
    assert status == pytest.ExitCode.USAGE_ERROR, out + err
    lines = [line for line in err.splitlines() if line]
    assert len(lines) == 1, err
    assert lines[0].startswith("ERROR: --resume: ")
    assert BAD[name][2] in lines[0]
    assert "Traceback" not in out + err


def test_a_process_whose_clock_was_set_is_still_measuring(monkeypatch):
    before, create_time = state.this_process(), state.psutil.Process.create_time
    monkeypatch.setattr(state.psutil.Process, "create_time", lambda self: create_time(self) + 1)
    assert state.is_alive(before)


def test_a_process_that_ended_is_not_measuring():
    """Nor is another one that has its number by now."""
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    this = state.this_process()
    assert state.is_alive(this)
    assert not state.is_alive(state.ProcessId(id=done.pid, started=0.0))
    assert not state.is_alive(structs.replace(this, started=1.0))


def test_a_change_of_what_measures_changes_the_hash(monkeypatch, tmp_path):
    """And a change of what only shows does not."""
    for place in ("bench/harness", "bench/probes", "bench/report", "bench/family", "pt_impl"):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / "some.py").write_text("1")
    (tmp_path / "bench" / "family" / "bench_x.py").write_text("1")
    monkeypatch.setattr(state, "__file__", str(tmp_path / "bench" / "harness" / "state.py"))
    found = {state.code()}
    (tmp_path / "bench" / "report" / "some.py").write_text("2")
    assert state.code() in found
    measure = ("bench/harness/some.py", "bench/probes/some.py", "pt_impl/some.py")
    for changed_file in (*measure, "bench/family/bench_x.py"):
        (tmp_path / changed_file).write_text("2")
        found.add(state.code())
    assert len(found) == 5


def test_nothing_of_the_private_state_stands_in_the_record(stopped):
    """Interpreters are paths of somebody's machine; a record is published."""
    text = encode(stopped.record).decode()
    assert "selected" not in text
    assert os.path.dirname(sys.executable) not in text
