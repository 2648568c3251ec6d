"""What a run measures next, who leaves it and what ends in time: without any process."""

import re
from dataclasses import replace
from types import SimpleNamespace

import pytest

from bench.harness import executor, progress, remaining, scheduler, speed
from bench.harness.durations import Durations
from bench.harness.executor import Executor
from bench.harness.isolated_measurements import Trained
from bench.harness.matches import Played
from bench.harness.plan import Effort, Technique, Variant, Workload
from bench.harness.recorder import Recorder
from bench.harness.scheduler import (
    CHECKS,
    COLD_STARTS,
    PASS,
    PROBES,
    TRAINING,
    WRITING_S,
    Scheduler,
    take_up,
)
from bench.harness.selection import cases_of
from bench.record import Conditions
from tests.harness.fake_plugin import STEADY
from tests.harness.runs import plan_of, state_of

TECHNIQUE = Technique(
    family="faults",
    name="made_up",
    title="Made up",
    variants=(Variant("plain", role="baseline"), Variant("first"), Variant("second")),
    workloads=(Workload("digits-cnn", "small", accuracy=True),),
    probes=True,
)
PREDICTIONS = replace(
    TECHNIQUE, name="predicted", workloads=(Workload("digits-cnn", "small", mode="predict"),)
)
LARGE = replace(
    TECHNIQUE,
    workloads=(replace(TECHNIQUE.workloads[0], task="text-gpt-10m"), TECHNIQUE.workloads[0]),
)
LOOKS = Effort(blocks=5, rounds=3, seeds=1, looks=(3, 5))


def scheduled(*techniques, amount=LOOKS, seconds=1.0, left=None, **how):
    """A scheduler of these techniques' cases; each block and start is expected to take so long.

    `left`: seconds until the deadline, but for what the end of a run takes.
    """
    cases = [case for one in techniques for case in cases_of(one, "nowhere", "default")]
    took = {case.id: seconds for case in cases}
    known = {part: dict(took) for part in ("block", "cold", "probe", "training")}
    plan = plan_of(cases, amount, *techniques, durations=Durations(seconds=known, parents_s=0.0))
    if left is not None:
        how |= {"deadline": left + WRITING_S, "clock": lambda: 0.0}
    return Scheduler(plan, state_of(plan), **how)


def play(made, block, **fields):
    """Note a block of every match of its pass."""
    for match in made.lacking(block):
        made.state.add_block(
            {case.id: Played(match=match.number, block=block, **fields) for case in match.cases},
            Conditions(match=match.number, block=block),
        )


def steps(made, after=lambda step: None):
    """The steps of a run in words; those of a pass are played, and then `after` is called."""
    taken = []
    for step in made.steps():
        if step.kind == PASS:
            play(made, step.number)
        taken.append(f"{step.kind} {step.number}" if step.kind in (PASS, TRAINING) else step.kind)
        after(step)
    return taken


def modes(matches):
    return [match.cases[0].workload.mode for match in matches]


# The order of the steps -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("of_user", "isolated"),
    [
        (False, [COLD_STARTS, PROBES, CHECKS, "training 1", COLD_STARTS]),
        (True, [PROBES, CHECKS, "training 1", COLD_STARTS]),
    ],
)
def test_intervals_come_before_what_has_processes_of_its_own(of_user, isolated):
    passes = [f"{PASS} {number}" for number in range(5)]
    taken = steps(scheduled(TECHNIQUE, of_user=of_user))
    assert taken == [*passes[:3], *isolated, passes[3], passes[4], "training 0", COLD_STARTS]


def test_each_look_at_the_seeds_trains_more():
    amount = replace(LOOKS, blocks=8, looks=(3, 5, 8), seeds=8, seed_looks=(4, 6, 8))
    taken = [step for step in steps(scheduled(TECHNIQUE, amount=amount)) if TRAINING in step]
    assert taken == ["training 4", "training 6", "training 8"]


def test_cheap_work_comes_first_and_of_a_user_s_file_the_train_step():
    for of_user, order in ((False, ["predict", "train"]), (True, ["train", "predict"])):
        made = scheduled(TECHNIQUE, PREDICTIONS, of_user=of_user)
        for case in made.plan.cases["made_up"]:
            made.plan.durations.seconds["block"][case.id] = 60.0
        assert modes(made.lacking(0)) == order


def test_large_models_follow_all_others():
    made = scheduled(LARGE)
    for case in made.plan.every:
        if not case.task.blocks:
            made.plan.durations.seconds["block"][case.id] = 60.0
    assert [match.cases[0].task.name for match in made.lacking(0)] == [
        "digits-cnn",
        "text-gpt-10m",
    ]


def test_a_block_that_was_played_is_lacking_no_more():
    made = scheduled(TECHNIQUE, PREDICTIONS)
    play(made, 0)
    assert made.lacking(0) == []


def test_contenders_of_the_second_block_start_one_by_one():
    made = scheduled(TECHNIQUE)
    made.state.passes *= 3
    assert [made.lacking(block)[0].alone for block in range(3)] == [False, True, False]


# Who leaves -------------------------------------------------------------------------------------


def test_who_is_decided_or_has_failed_leaves_at_a_look(monkeypatch):
    made = scheduled(TECHNIQUE)
    decided, failed = "made_up/digits-cnn-4/pt/first", "made_up/digits-cnn-4/tf/second"
    monkeypatch.setattr(scheduler, "leaving", lambda measured: {decided})
    made.state.cases[failed].status = "FAILED"
    playing = {}

    def note(step):
        if step.kind == PASS:
            playing[step.number] = {
                name for number in made.state.passes[-1] for name in made.state.matches[number]
            }

    steps(made, note)
    assert playing[2] == {case.id for case in made.plan.every}
    assert playing[3] == playing[2] - {decided, failed}
    assert made.state.left == {decided}


def test_a_run_without_anybody_left_to_decide_plays_no_more_passes(monkeypatch):
    everybody = {case.id for case in cases_of(TECHNIQUE, "nowhere", "default")}
    monkeypatch.setattr(scheduler, "leaving", lambda measured: everybody)
    assert [step for step in steps(scheduled(TECHNIQUE)) if PASS in step] == [
        f"{PASS} {number}" for number in range(3)
    ]


def test_whose_accuracy_is_decided_is_trained_no_further():
    """With the baseline, which is, as long as one is open that is held to it."""
    amount = replace(LOOKS, seeds=8, seed_looks=(4, 6, 8))
    made = scheduled(TECHNIQUE, amount=amount)
    figures = {"plain": [90.0, 90.1, 89.9, 90.0], "first": [80.0, 80.1, 79.9, 80.0]}
    figures["second"] = [90.0, 95.0, 85.0, 91.0]
    for case in made.training(4):
        per_seed = figures[case.variant.name]
        made.state.cases[case.id].trained = Trained(per_seed=list(per_seed))
    assert made.training(4) == []
    assert {case.variant.name for case in made.training(6)} == {"plain", "second"}
    for case in made.training(6):
        made.state.cases[case.id].trained.reason = "its time was over"
    assert made.training(6) == []


# Time -------------------------------------------------------------------------------------------


def test_what_fits_into_the_time_is_played_where_the_first_does_not():
    made = scheduled(TECHNIQUE, PREDICTIONS, of_user=True, left=100.0)
    for case in made.plan.cases["made_up"]:
        made.plan.durations.seconds["block"][case.id] = 600.0
    in_time = [made.in_time(made.plan.durations.of_match(m.cases)) for m in made.lacking(0)]
    assert (in_time, made.cut) == ([False, True], True)


@pytest.mark.parametrize(("left", "count"), [(2.5, 2), (0.5, 0), (1000.0, None)])
def test_what_has_processes_of_its_own_ends_in_time_the_cheapest_first(left, count):
    made = scheduled(TECHNIQUE, left=left)
    every = scheduled(TECHNIQUE).cold_starts()
    cheap = {case.id for case in every[-2:]}
    cold = made.plan.durations.seconds["cold"]
    cold |= {name: 0.9 if name in cheap else 1.1 for name in cold}
    chosen = made.cold_starts()
    assert len(chosen) == (len(every) if count is None else count)
    assert {case.id for case in chosen} >= (cheap if count != 0 else set())
    assert made.cut == (count is not None)


@pytest.mark.parametrize(("left", "again"), [(1000.0, True), (0.5, False)])
def test_a_pass_is_played_again_if_it_ends_in_time(left, again):
    made = scheduled(TECHNIQUE, left=left)
    matches = scheduled(TECHNIQUE).lacking(0)
    assert made.plays_again(matches) == again
    assert not made.cut  # what it had counts


def test_no_pass_is_begun_of_which_nothing_would_end():
    made = scheduled(TECHNIQUE, left=0.5)
    assert made.lacking(0) == []
    assert made.cut


def test_after_a_pass_that_was_cut_there_are_those_until_the_first_look_alone():
    """And nothing is stacked: what is cheap has its intervals, though another had no time."""
    stacks = replace(TECHNIQUE, variants=(*TECHNIQUE.variants, Variant("stack", later=True)))
    made = scheduled(stacks)

    def cut(step):
        made.cut = True

    assert steps(made, cut) == [
        *(f"{PASS} {number}" for number in range(3)),
        *(COLD_STARTS, PROBES, CHECKS, "training 1", COLD_STARTS, COLD_STARTS),
    ]
    assert not made.state.settled


@pytest.mark.parametrize("slower", [0.5, 1.0, 2.5])
def test_what_blocks_took_is_in_the_time_that_is_left_and_not_counted_once_more(
    monkeypatch, slower
):
    """Blocks take so many times as long as planned, and what follows as long as that."""
    made = scheduled(TECHNIQUE, PREDICTIONS, amount=replace(LOOKS, looks=()))
    now, said = [0.0], []
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    shown, told = progress.Progress(said.append), []

    def left():
        by_plan = remaining.seconds_left(made.plan, made.state)[0]
        shown.at("pass", "match", by_plan, remaining.whole_s(made.plan, made.state))
        minutes, seconds = re.search(r"about (?:(\d+) min )?(\d+) s left", said[-1]).groups()
        return 60 * int(minutes or 0) + int(seconds)

    told.append((now[0], left()))
    for block in range(5):
        made.state.passes += [list(made.state.passes[0])] * (block > 0)
        for match in made.lacking(block):
            now[0] += slower * len(match.cases)
            made.plan.durations.note_match(match.cases, slower * len(match.cases))
            nothing = {c.id: Played(match=match.number, block=block) for c in match.cases}
            where = Conditions(match=match.number, block=block)
            made.state.add_block(nothing, where)
            told.append((now[0], left()))
    isolated = remaining.seconds_left(made.plan, made.state)[0]
    for when, seconds in told[2:]:  # the first match says nothing of the other
        truth = now[0] - when + isolated
        assert seconds == pytest.approx(truth, rel=0.35, abs=5), told


# Rows that stack what was faster ------------------------------------------------------------------


@pytest.fixture
def stacks(monkeypatch):
    """A scheduler of which a row stacks what was faster: in PyTorch something, else nothing."""
    monkeypatch.setattr(
        scheduler,
        "stacked",
        lambda record, row: ({"fused": True}, None) if row.framework == "pt" else ({}, "nothing"),
    )
    row = Variant("stack", {}, later=True)
    return scheduled(replace(TECHNIQUE, variants=(*TECHNIQUE.variants, row)))


def test_what_is_stacked_plays_the_blocks_that_others_have(stacks):
    settled, refused = (f"made_up/digits-cnn-4/{side}/stack" for side in ("pt", "tf"))
    steps(stacks)
    assert stacks.state.settled == {settled: {"fused": True}}
    assert stacks.plan.by_id[settled].variant.settings == {"fused": True}
    blocks = [played.block for played in stacks.state.cases[settled].blocks]
    assert blocks == [0, 1, 2, 3, 4]
    assert (stacks.state.cases[refused].status, stacks.state.cases[refused].reason) == (
        "UNSUPPORTED",
        "nothing",
    )


def test_what_was_settled_stands_when_a_run_is_taken_up(stacks):
    settled = "made_up/digits-cnn-4/pt/stack"
    stacks.state.settled[settled] = {"fused": True}
    assert not stacks.plan.by_id[settled].settled
    take_up(stacks.plan, stacks.state)
    assert stacks.plan.by_id[settled].settled


# Memory -----------------------------------------------------------------------------------------


def test_who_finds_no_memory_plays_beside_the_baselines_and_then_fails():
    made = scheduled(TECHNIQUE)
    (match,) = made.lacking(0)
    others = [case for case in match.cases if case.variant.name == "second"]
    (smaller,) = made.split(match, 0, others, free=1e9)
    assert smaller.alone
    assert {case.variant.name for case in smaller.cases} == {"plain", "second"}
    assert made.state.passes[0] == [match.number, smaller.number]
    left = {made.plan.by_id[name].variant.name for name in made.state.matches[match.number]}
    assert left == {"plain", "first", "control"}
    assert made.split(smaller, 0, others, free=0.6e9) == []
    for case in others:
        found = made.state.cases[case.id]
        assert found.status == "FAILED"
        assert found.reason == (
            "needs 0.7 GB of memory in addition to its baseline, but 0.6 GB are free"
        )


# Tables on the way --------------------------------------------------------------------------------


@pytest.mark.parametrize("left", [10.0, 1000.0])
def test_a_table_is_there_before_large_models_are_measured_and_then_one_with_intervals(
    tmp_path, monkeypatch, left
):
    made, seen = scheduled(LARGE), []
    monkeypatch.setattr("bench.harness.recorder.seconds_left", lambda *_: (left, left))

    def show(record, reached):
        seen.append(reached or "no news")

    def match(processes, cases, *, number, block, **given):
        seen.append(cases[0].task.name)
        conditions = Conditions(match=number, block=block)
        return SimpleNamespace(
            play=lambda rounds: {}, conditions=lambda: conditions, seconds={}, left_out=[]
        )

    monkeypatch.setattr(executor, "Match", match)
    monkeypatch.setattr(speed, "sentinel", STEADY["sentinel"])
    processes = SimpleNamespace(
        forks=True, stop_parents=lambda: None, start_parents=lambda keys: {}
    )
    recorder = Recorder(tmp_path, made.plan, made.state, say=lambda line: None, show=show)
    running = Executor(processes, made, recorder, data={}, threads=1)
    running.play_pass(0)
    assert seen == ["digits-cnn", "first_table", "text-gpt-10m", "no news"]
    seconds = made.state.seconds
    for block in (1, 2):
        assert seconds["intervals"] is None
        made.state.passes.append(made.state.passes[0])
        running.play_pass(block)
    # Who waits for the end anyway needs no table before it.
    assert seen[4:] == [
        *("digits-cnn", "text-gpt-10m", "no news"),
        *("digits-cnn", "text-gpt-10m", "intervals" if left > 180 else "no news"),
    ]
    assert 0 < seconds["first_table"] < seconds["intervals"]
