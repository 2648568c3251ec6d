"""Which cases a run has, how they are chosen, and how they are split into matches."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise, product

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.analysis import bounds
from bench.harness import progress, remaining
from bench.harness.command import without_folders
from bench.harness.durations import Durations
from bench.harness.plan import (
    EFFORT,
    EFFORTS,
    LOOKS,
    WARM,
    CaseMessage,
    Effort,
    Measure,
    Technique,
    Variant,
    Workload,
)
from bench.harness.progress import clock
from bench.harness.run_plan import Plan, techniques
from bench.harness.selection import (
    MOST_ALIVE,
    at_a_glance,
    cases_of,
    choose,
    programs,
    spare_controls,
    with_baselines,
)
from bench.harness.selection import matches as matches_of
from shared.specs import TASKS
from tests.harness import runs

TECHNIQUE = Technique(
    family="faults",
    name="made_up",
    title="Made up",
    variants=(
        Variant("plain", role="baseline", flavours=(None, "keras3", "tf_keras")),
        Variant("first"),
        Variant("second", flavours=(None, "tf_keras")),
        Variant("only_pt", frameworks=("pt",)),
        Variant("common", effort="ordinary"),
        Variant("rare", effort="full"),
    ),
    workloads=(
        Workload("digits-cnn", "small"),
        Workload("text-gpt", "compute", accuracy=True),
        Workload("digits-resnet20", "compute", effort="full"),
    ),
)
DEFAULT = cases_of(TECHNIQUE, "module", "default")
PREDICTED = Workload("digits-cnn", "small", mode="predict")
NOTHING = {"tasks": set(), "variants": set(), "frameworks": set()}


def many_variants(count, *, flavours=(None, "keras3")):
    variants = (
        Variant("plain", role="baseline", flavours=(None, "keras3", "tf_keras")),
        *(Variant(f"variant{i}", flavours=flavours) for i in range(count)),
    )
    return replace(TECHNIQUE, variants=variants, workloads=TECHNIQUE.workloads[:2])


def own_programs(cases):
    return {case.id: case.id for case in cases}


def matches(cases, **how):
    return matches_of(cases, own_programs(cases), **how)


def plan_of(cases, amount=EFFORT["default"], technique=TECHNIQUE, **known):
    return runs.plan_of(cases, amount, technique, **known)


def seconds_of(plan):
    return remaining.seconds_left(plan, runs.begun(plan))


def names(cases):
    return [case.id.removeprefix("made_up/") for case in cases]


# Cases ------------------------------------------------------------------------------------------


def test_default_has_all_variants_of_its_level_and_a_control_per_side():
    small = [name for name in names(DEFAULT) if name.startswith("digits-cnn-4/")]
    assert small == [
        "digits-cnn-4/pt/plain",
        "digits-cnn-4/tf/plain",
        "digits-cnn-4/tf-tf_keras/plain",
        "digits-cnn-4/pt/first",
        "digits-cnn-4/tf/first",
        "digits-cnn-4/pt/second",
        "digits-cnn-4/tf-tf_keras/second",
        "digits-cnn-4/pt/only_pt",
        "digits-cnn-4/pt/control",
        "digits-cnn-4/tf/control",
        "digits-cnn-4/tf-tf_keras/control",
    ]
    assert {case.workload.task for case in DEFAULT} == {"digits-cnn", "text-gpt"}


def test_each_effort_adds_rows():
    found = [set(names(cases_of(TECHNIQUE, "module", effort))) for effort in EFFORTS[1:]]
    assert found[0] < found[1] < found[2]
    new = [{name.rpartition("/")[2] for name in more - less} for less, more in pairwise(found)]
    assert new[0] == {"common"}
    assert "rare" in new[1]
    assert any(name.startswith("digits-resnet20") for name in found[2])


def test_a_row_of_some_tasks_has_none_of_others():
    only = Variant("only", measured=Measure(tasks=("text-gpt",)))
    cases = cases_of(replace(TECHNIQUE, variants=(*TECHNIQUE.variants, only)), "module", "full")
    assert {c.workload.task for c in cases} == {"digits-cnn", "text-gpt", "digits-resnet20"}
    assert {c.workload.task for c in cases if c.variant == only} == {"text-gpt"}
    assert [c for c in cases if c.variant != only] == cases_of(TECHNIQUE, "module", "full")


def test_quick_has_the_rows_of_a_default_run_without_controls():
    rows = [case for case in DEFAULT if case.variant.role != "control"]
    assert cases_of(TECHNIQUE, "module", "quick") == rows


def test_ids_are_unique():
    for technique, effort in product([TECHNIQUE, *techniques().values()], EFFORTS):
        ids = [case.id for case in cases_of(technique, "module", effort)]
        assert len(ids) == len(set(ids)), (technique.name, effort)


def test_efforts_grow():
    quick, default, ordinary, full = (EFFORT[name] for name in EFFORTS)
    assert (quick.blocks, default.blocks, ordinary.blocks, full.blocks) == (1, 3, 8, 8)
    assert quick.looks == default.looks == ()
    assert ordinary.looks == full.looks == LOOKS == bounds.LOOKS
    assert quick.repetitions < default.repetitions < full.repetitions
    assert full.train_s is None


def test_a_case_travels_as_json():
    composed = replace(TECHNIQUE, composed_of=("train_step.gradient_clipping",))
    for case in cases_of(composed, "module", "full"):
        message = case.message()
        assert msgspec.json.decode(msgspec.json.encode(message), type=CaseMessage) == message
        assert (message.module, message.composed_of) == ("module", composed.composed_of)
        assert (message.task, message.batch_size, message.mode) == case.work
        assert message.variant == (case.variant.stands_for or case.variant.name)


def test_batch_sizes_are_those_of_the_task():
    assert Workload("text-gpt", "small").batch_size == TASKS["text-gpt"].small_batch
    assert Workload("text-gpt", "compute").batch_size == TASKS["text-gpt"].compute_batch


# Choice -----------------------------------------------------------------------------------------


def test_an_empty_choice_is_everything():
    assert choose(DEFAULT, **NOTHING) == DEFAULT


@pytest.mark.parametrize(
    ("wanted", "field"),
    [
        ({"tasks": {"text-gpt"}}, lambda c: c.workload.task),
        ({"variants": {"first", "control"}}, lambda c: c.variant.name),
        ({"frameworks": {"pt"}}, lambda c: c.framework),
    ],
)
def test_choose_keeps_exactly_what_is_named(wanted, field):
    (allowed,) = wanted.values()
    kept = choose(DEFAULT, **NOTHING | wanted)
    assert kept == [case for case in DEFAULT if field(case) in allowed]
    assert {field(case) for case in kept} == allowed


def test_choices_combine():
    kept = choose(DEFAULT, tasks={"digits-cnn"}, variants={"first"}, frameworks={"tf"})
    assert names(kept) == ["digits-cnn-4/tf/first"]


def test_a_choice_takes_along_its_own_baseline_alone():
    wanted = [c for c in DEFAULT if c.id == "made_up/text-gpt-8/tf-tf_keras/second"]
    assert names(with_baselines(wanted, DEFAULT)) == [
        "text-gpt-8/tf-tf_keras/plain",
        "text-gpt-8/tf-tf_keras/second",
    ]


def test_baselines_bring_nothing_with_them():
    baselines = [case for case in DEFAULT if case.is_baseline]
    assert with_baselines(baselines, DEFAULT) == baselines


def test_baselines_of_another_technique_stay_away():
    other = cases_of(replace(TECHNIQUE, name="other"), "module", "default")
    wanted = [case for case in DEFAULT if case.variant.name == "first"]
    found = with_baselines(wanted, DEFAULT + other)
    assert {case.technique for case in found} == {"made_up"}


# Programs -----------------------------------------------------------------------------------------


def sharing():
    """Two techniques with one work each in common; the second counts its models' parameters."""
    plain = replace(TECHNIQUE.variants[0], program="plain")
    one = replace(TECHNIQUE, variants=(plain, *TECHNIQUE.variants[1:]))
    other = replace(one, name="other", counts=True, workloads=TECHNIQUE.workloads[:1])
    techniques = {each.name: each for each in (one, other)}
    cases = [case for each in (one, other) for case in cases_of(each, "module", "quick")]
    return cases, programs(cases, techniques)


def test_rows_of_one_work_that_run_the_same_program_show_one_of_them():
    cases, shown = sharing()
    assert shown["made_up/digits-cnn-4/pt/plain"] == "other/digits-cnn-4/pt/plain"
    assert shown["other/digits-cnn-4/pt/plain"] == "other/digits-cnn-4/pt/plain"
    assert shown["made_up/text-gpt-8/pt/plain"] == "made_up/text-gpt-8/pt/plain"
    assert shown["made_up/digits-cnn-4/tf-tf_keras/plain"].startswith("other/digits-cnn-4/tf-tf_k")
    assert all(shown[c.id] == c.id for c in cases if not c.is_baseline)


def test_another_allocator_environment_and_a_control_are_programs_of_their_own():
    plain = Variant("plain", role="baseline", program="plain")
    tuned = Variant("tuned", allocator="tuned", program="plain")
    other = Variant("other", environment={"LIBRARY": "1"}, program="plain")
    one = replace(TECHNIQUE, variants=(plain, tuned, other), workloads=TECHNIQUE.workloads[:1])
    cases = cases_of(one, "module", "default")
    assert programs(cases, {"made_up": one}) == own_programs(cases)


def test_a_program_is_measured_once():
    cases, shown = sharing()
    played = Counter(case.id for match in matches_of(cases, shown) for case in match)
    assert "made_up/digits-cnn-4/pt/plain" not in played
    assert "other/digits-cnn-4/pt/plain" in played
    assert set(played) == {shown[case.id] for case in cases}
    both = {case.technique: replace(TECHNIQUE, name=case.technique) for case in cases}
    plan = Plan({"all": cases}, both, EFFORT["default"])
    plan.__dict__["shown"] = shown
    started = {case.id for case in cases if plan.cold_starts(case)}
    assert started == set(shown.values())


# Matches ----------------------------------------------------------------------------------------


def test_a_technique_alone_is_one_match_a_workload():
    cases = cases_of(many_variants(1), "module", "default")
    assert [len(match) for match in matches(cases)] == [8, 5]  # three controls at the first


def test_techniques_meet_where_their_work_is_the_same():
    other = replace(TECHNIQUE, name="other", variants=TECHNIQUE.variants[:2])
    cases = [c for t in (many_variants(1), other) for c in cases_of(t, "module", "quick")]
    first, second = matches(cases)
    for match in (first, second):
        assert {case.technique for case in match} == {"made_up", "other"}
        assert len({case.work for case in match}) == 1


@given(
    count=st.integers(0, 12),
    flavours=st.sampled_from([(None, "keras3"), (None, "tf_keras"), (None, "keras3", "tf_keras")]),
)
def test_matches_deal_out_every_case_once_with_baselines_in_each_part(count, flavours):
    cases = cases_of(many_variants(count, flavours=flavours), "module", "default")
    found = matches(cases)
    played = Counter(case.id for match in found for case in match)
    assert set(played) == {case.id for case in cases}
    assert all(played[case.id] == 1 for case in cases if not case.is_baseline)
    for match in found:
        assert len(match) <= MOST_ALIVE
        assert len({case.work for case in match}) == 1
        bases = {case.side for case in match if case.is_baseline}
        assert {case.side for case in match} <= bases
        assert {"pt", "tf"} == {framework for framework, _ in bases}


@given(count=st.integers(0, 12))
def test_twins_meet(count):
    for match in matches(cases_of(many_variants(count), "module", "default")):
        sides = Counter(case.variant.name for case in match if case.variant.role == "variant")
        assert set(sides.values()) <= {2}  # both frameworks of a variant in the same match


def test_twelve_play_one_match_and_thirteen_two():
    def parts(count):
        variants = tuple(Variant(f"variant{i}", frameworks=("pt",)) for i in range(count))
        baseline = Variant("plain", role="baseline", frameworks=("pt",))
        one = replace(TECHNIQUE, variants=(baseline, *variants), workloads=TECHNIQUE.workloads[:1])
        return [len(match) for match in matches(cases_of(one, "module", "quick"))]

    assert parts(11) == [12]
    assert parts(12) == [12, 2]


def test_matches_hold_as_many_as_fit_into_memory():
    cases = cases_of(many_variants(3), "module", "quick")
    known = Durations(bytes={case.id: 1 << 30 for case in cases})
    small, large = (plan_of(cases, durations=known, room=n << 30) for n in (5, 100))
    assert max(map(len, small.matches())) == 5
    assert len(small.matches()) > len(large.matches()) == 2
    assert {c.id for m in small.matches() for c in m} == {case.id for case in cases}


def test_who_does_not_fit_at_all_plays_with_its_baselines():
    cases = cases_of(many_variants(1), "module", "quick")
    for match in plan_of(cases, room=1).matches():
        assert "plain" in {case.variant.name for case in match}


def test_what_a_row_is_compared_with_comes_along_and_plays_with_it():
    against = Variant("named", against="variant11")
    technique = many_variants(12)
    technique = replace(technique, variants=(*technique.variants, against))
    cases = cases_of(technique, "module", "default")
    chosen = [case for case in cases if case.variant.name == "named"]
    needed = with_baselines(chosen, cases)
    assert {case.variant.name for case in needed} == {"plain", "named", "variant11"}
    gone = {case.id for case in cases if case.variant.name == "variant11"}
    for match in matches(cases, without=gone):
        playing = {(case.variant.name, case.side) for case in match}
        sides = {side for name, side in playing if name == "named"}
        assert {side for name, side in playing if name == "variant11"} == sides


def test_who_has_left_plays_no_more_and_whom_others_need_does():
    cases = cases_of(many_variants(2), "module", "default")
    gone = {c.id for c in cases if c.variant.name == "variant0"}
    found = matches(cases, without=gone)
    assert {c.variant.name for match in found for c in match} == {"plain", "variant1", "control"}
    everybody = {c.id for c in cases if c.variant.role == "variant"}
    assert matches(cases, without=everybody) == []


def test_what_takes_long_is_played_in_few_blocks():
    technique = techniques()["compilation"]
    plan = plan_of(cases_of(technique, "module", "default"), technique=technique)
    long = {case.id for case in plan.every if case.task.blocks == 3}
    assert {id_.split("/")[1] for id_ in long} == {"photos-resnet18-64", "text-gpt-10m-4"}
    assert plan.played_out(2) == set()
    assert plan.played_out(3) == plan.played_out(5) == long
    tasks = {case.task.name for match in plan.matches(plan.played_out(3)) for case in match}
    assert tasks == {"digits-cnn"}


def test_a_quick_run_has_the_small_models_that_are_timed_and_names_the_rest():
    every = [
        case
        for technique in techniques().values()
        for case in cases_of(technique, "module", "quick")
    ]
    found = at_a_glance(every)
    assert all(case.timed and case.task.blocks is None for case in found)
    named = at_a_glance(every, named=True)
    assert named == [case for case in every if not case.task.blocks] != found
    large = [case for case in every if case.task.blocks]
    assert at_a_glance(large, named=True) == large
    assert at_a_glance(large) == []
    assert {"text-gpt-10m", "photos"} <= {c.task.name for c in every} - {c.task.name for c in found}
    plan = plan_of(found[:1], technique=techniques()[found[0].technique])
    plan = replace(plan, left_out=("folder", "schedules"))
    assert "with --technique or -k: folder, schedules" in " ".join(
        remaining.describe(plan, (1, 1)).split()
    )


def test_what_is_probed_alike_is_probed_once():
    names = ("folder", "mapped_arrays", "tuned_folder")
    own = {name: techniques()[name] for name in names}
    cases = {name: cases_of(each, "module", "default") for name, each in own.items()}
    plan = Plan(cases, own, EFFORT["default"])
    alike = [
        case
        for case in plan.every
        if case.framework == "pt" and case.variant.settings.get("loader") == "parallel"
        if "decoder" not in case.variant.settings
    ]
    assert len(alike) == 3
    assert sum(map(plan.probed, alike)) == 1


def test_a_program_plays_on_while_one_that_shows_it_is_open():
    variants = (
        Variant("plain", role="baseline", program="plain"),
        Variant("measured", program="a"),
        Variant("shows", program="a"),
    )
    one = replace(TECHNIQUE, variants=variants, workloads=TECHNIQUE.workloads[:1])
    cases = cases_of(one, "module", "quick")
    shown = programs(cases, {"made_up": one})
    measured, shows = ({c.id for c in cases if c.variant.name == n} for n in ("measured", "shows"))
    played = {c.id for match in matches_of(cases, shown, without=measured) for c in match}
    assert measured < played
    assert matches_of(cases, shown, without=measured | shows) == []


def test_a_baseline_without_company_plays_beside_other_techniques():
    other = replace(TECHNIQUE, name="other", variants=TECHNIQUE.variants[:1])
    alone = cases_of(other, "module", "quick")
    cases = cases_of(many_variants(1), "module", "quick") + alone
    assert {c.id for match in matches(cases) for c in match} >= {case.id for case in alone}
    gone = {c.id for c in cases if not c.is_baseline}
    assert matches(cases, without=gone) == []


def test_no_cases_are_no_matches():
    assert matches([]) == []


# The plan ---------------------------------------------------------------------------------------


def test_the_plan_names_its_parts_and_fits_80_columns():
    plan = plan_of(DEFAULT)
    expected, most = seconds_of(plan)
    text = remaining.describe(plan, (expected, most))
    assert all(len(line) <= 80 for line in text.splitlines()), text
    for word in ("made_up", "plain", "first", "digits-cnn (4)", "text-gpt (8)", "3 blocks of 30"):
        assert word in text
    words = " ".join(text.split())
    assert f"first table after about {clock(plan.durations.of_pass(plan.matches()) + 10)}" in words
    timed = clock(3 * plan.durations.of_pass(plan.matches()) + 10)
    assert f"times with intervals after {timed}, all after" in words
    assert f"all after about {clock(expected + 10)}" in words
    assert expected == most  # nobody leaves, and nobody is trained further
    assert "decided early" not in words
    looked = plan_of(DEFAULT, EFFORT["ordinary"])
    expected, most = seconds_of(looked)
    words = " ".join(remaining.describe(looked, (expected, most)).split())
    assert "3 to 8 blocks" in words
    early = f"at most {clock(most + 10)}"
    assert f"all after about {clock(expected + 10)}, {early}" in words


def test_a_run_that_ends_before_its_plan_promises_no_more():
    plan = plan_of(DEFAULT)
    hours, first = 6 * 3600 + 1310, plan.durations.of_pass(plan.matches()) + 10
    text = remaining.describe(plan, (hours, hours), limit=720)
    assert text.endswith(f"ends after 12 min 0 s; the whole plan takes about "
                         f"{clock(hours + 10)}")  # fmt: skip
    assert "all after" not in text
    early = remaining.describe(plan, (hours, hours), limit=first - 1)
    assert "first table" not in early
    whole = remaining.describe(plan, (60, 60), limit=720)
    assert "all after about 1 min 10 s" in " ".join(whole.split())
    assert whole.endswith("the run ends after 12 min 0 s")


def test_a_long_plan_fits_80_columns():
    plan = plan_of(cases_of(many_variants(20), "module", "default"))
    text = remaining.describe(plan, (1, 2))
    assert all(len(line) <= 80 for line in text.splitlines()), text


def test_more_work_takes_longer():
    def seconds(amount, cases):
        return seconds_of(plan_of(cases, amount))[0]

    less = seconds(Effort(1, 30, 1), DEFAULT)
    assert less < seconds(Effort(8, 30, 1), DEFAULT) < seconds(Effort(8, 30, 8), DEFAULT)
    assert less > seconds(Effort(1, 30, 1), DEFAULT[:3])
    assert seconds(EFFORT["default"], DEFAULT) < seconds(Effort(8, 30, 8), DEFAULT)


def test_training_that_takes_longer_is_planned_so():
    longer = replace(DEFAULT[-1].workload, training=3.0)
    cases = [replace(c, workload=longer) if c.workload.accuracy else c for c in DEFAULT]
    amount = Effort(8, 30, 8, train_s=60)
    none = replace(amount, seeds=0)
    without, usual, more = (
        seconds_of(plan_of(*each, durations=Durations(parents_s=0)))[0]
        for each in ((DEFAULT, none), (DEFAULT, amount), (cases, amount))
    )
    assert usual > without
    assert more - without == pytest.approx(3 * (usual - without))


def test_the_table_of_a_plan_adds_up():
    plan = plan_of(DEFAULT, EFFORT["ordinary"])
    lines = remaining.table(plan, runs.begun(plan)).splitlines()
    assert all(len(line) <= 80 for line in lines)
    expected, most = (seconds + plan.durations.describe_s for seconds in seconds_of(plan))
    assert lines[-1].split("  ")[0] == "total"
    assert lines[-1].endswith(clock(most))
    assert clock(expected) in lines[-1]
    parts = [line[:26].strip() for line in lines[1:]]
    passes = [f"pass {number}" for number in range(1, 9)]
    isolated = ["first calls and memory", "training, 4 seeds"]
    more = ["training, 6 seeds", "training, 8 seeds"]
    assert parts == ["start", *passes[:3], *isolated, *passes[3:], *more, "total"]


def test_where_seeds_are_looked_at_each_look_is_a_part_of_the_plan():
    plan = plan_of(DEFAULT, replace(EFFORT["default"], seeds=6, seed_looks=(4, 6)))
    names = [part.name for part in remaining.parts(plan, runs.begun(plan))]
    assert [n for n in names if "training" in n] == ["training, 4 seeds", "training, 6 seeds"]


def test_what_is_left_follows_the_plan_first_and_the_clock_later(monkeypatch):
    said, now = [], [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    shown = progress.Progress(said.append)

    def left(elapsed, expected):
        now[0] = elapsed
        shown.at("pass", "match", expected, 1000)
        return said[-1].rpartition("about ")[2].removesuffix(" left")

    assert left(0, 1000) == "16 min 40 s"
    # 10 s of the plan took 40: of 990 s that are left, not four times as much.
    assert left(40, 990) == clock(990 * (40 + 200) / (10 + 200))
    # Most of it took twice its time, and so will what is left, or nearly.
    assert left(1800, 100) == clock(100 * (1800 + 200) / (900 + 200))
    assert left(1900, 0) == "0 s"


def test_controls_are_neither_started_cold_nor_trained():
    controls = [case for case in DEFAULT if case.variant.role == "control"]
    plan = plan_of(DEFAULT)
    assert len(controls) == 3
    assert not any(map(plan.cold_starts, controls))
    trained = list(filter(plan.trained, DEFAULT))
    assert all(case.variant.role != "control" for case in trained)
    assert {case.workload.task for case in trained} == {"text-gpt"}


def test_one_control_a_mode_and_side_plays_where_most_do():
    other = replace(TECHNIQUE, name="other")
    few = {"workloads": (Workload("text-gpt", "small"),), "variants": TECHNIQUE.variants[:2]}
    elsewhere = replace(other, name="elsewhere", **few)
    later = [case for one in (other, elsewhere) for case in cases_of(one, "module", "default")]
    every = DEFAULT + later
    controls = [case for case in every if case.variant.role == "control"]
    assert [case.technique for case in controls[::3]] == ["made_up", "other", "elsewhere"]
    assert spare_controls(every) == controls[3:]
    alone = [case for case in later if case.technique == "elsewhere"]
    assert {case.technique for case in spare_controls(alone + DEFAULT)} == {"elsewhere"}


def test_predictions_have_a_control_of_their_own():
    predicted = replace(TECHNIQUE, name="other", workloads=(PREDICTED,))
    assert spare_controls(DEFAULT + cases_of(predicted, "module", "default")) == []


def test_cold_starts_are_repeated_at_the_first_workload_and_probes_follow():
    technique = replace(TECHNIQUE, cold_starts=3, probes=True)
    first, other = DEFAULT[0], next(c for c in DEFAULT if c.workload.task == "text-gpt")
    plan = plan_of([first, other], technique=technique)
    assert (plan.cold_starts(first), plan.cold_starts(other)) == (3, 1)
    assert plan.probed(first)
    warm_only = replace(first, variant=replace(first.variant, measured=WARM))
    assert plan_of([warm_only]).cold_starts(warm_only) == 0


def test_where_no_cold_start_is_repeated_those_of_baselines_tell_how_memory_scatters():
    def starts(technique, effort="default"):
        cases = cases_of(technique, "module", effort)
        plan = plan_of(cases, EFFORT[effort], technique)
        return {(c.workload.task, c.variant.role): plan.cold_starts(c) for c in cases}

    first, other = (w.task for w in TECHNIQUE.workloads[:2])
    assert starts(TECHNIQUE)[first, "baseline"] == 3
    assert starts(TECHNIQUE)[first, "variant"] == 1
    assert starts(TECHNIQUE)[other, "baseline"] == 1
    assert starts(replace(TECHNIQUE, cold_starts=2))[first, "baseline"] == 2
    assert set(starts(TECHNIQUE, "quick").values()) == {0}


def test_a_quick_run_measures_apart_what_is_not_timed():
    untimed = replace(TECHNIQUE, workloads=(Workload("text-gpt", "small", timed=False),))
    for technique, starts, probed in (
        (TECHNIQUE, 0, False),
        (replace(TECHNIQUE, probes=True), 0, False),
        (untimed, 1, False),
        (replace(untimed, probes=True), 0, True),
    ):
        case = cases_of(technique, "module", "quick")[0]
        plan = plan_of([case], EFFORT["quick"], technique)
        assert (plan.cold_starts(case), plan.probed(case)) == (starts, probed)
        assert not plan.trained(case)


def test_predictions_are_cases_of_their_own():
    both = tuple(Workload("digits-cnn", "small", mode=mode) for mode in ("train", "predict"))
    cases = cases_of(replace(TECHNIQUE, workloads=both), "module", "default")
    found = names(cases)
    assert {"digits-cnn-4/pt/plain", "digits-cnn-4-predict/pt/plain"} < set(found)
    assert [len({c.workload.mode for c in match}) for match in matches(cases)] == [1] * 2


def test_what_is_not_timed_plays_no_match_and_has_no_control():
    apart = (Workload("text-gpt", "small", timed=False), Workload("digits-cnn", "small"))
    cases = cases_of(replace(TECHNIQUE, workloads=apart), "module", "default")
    assert "text-gpt-2/pt/plain" in names(cases)
    assert {c.workload.task for match in matches(cases) for c in match} == {"digits-cnn"}
    assert {c.workload.task for c in cases if c.variant.role == "control"} == {"digits-cnn"}


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0 s"), (59.9, "59 s"), (605, "10 min 5 s"), (6720, "1 h 52 min")]
)
def test_clock(seconds, text):
    assert clock(seconds) == text


@pytest.mark.parametrize(
    ("command", "kept"),
    [
        ("pytest bench/ --benchmark-only", "pytest bench/ --benchmark-only"),
        ("pytest --results /some/where/runs -q", "pytest --results .../runs -q"),
        ("pytest --pt-python=/some/where/python", "pytest --pt-python=.../python"),
        ("pytest -k 'pt and bf16' results", "pytest -k 'pt and bf16' results"),
    ],
)
def test_a_record_holds_no_folders_of_who_made_it(command, kept):
    assert without_folders(command) == kept


def test_only_a_quick_run_leaves_out_what_is_proved_in_training_where_no_probe_does_it():
    proved = set()
    for technique in techniques().values():
        every = cases_of(technique, "module", "default")
        asked = {case.id for case in every if case.proved_in_training}
        quick = {case.id for case in cases_of(technique, "module", "quick")}
        assert not asked & quick or technique.probes
        proved |= asked
    assert proved
