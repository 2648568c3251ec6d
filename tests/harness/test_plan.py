"""Which cases a run has, how they are chosen, and how they are split into matches."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.harness.command import without_folders
from bench.harness.plan import (
    EFFORT,
    EFFORTS,
    FRAMEWORKS,
    MOST_CONTENDERS,
    WARM,
    Effort,
    Technique,
    Variant,
    Workload,
    cases_of,
    choose,
    matches,
    repeated_controls,
    with_baselines,
)
from bench.harness.progress import clock
from bench.harness.schedule import Plan, techniques, trained
from shared.specs import TASKS

TECHNIQUE = Technique(
    family="faults",
    name="made_up",
    title="Made up",
    variants=(
        Variant("plain", role="baseline", effort="quick", flavours=(None, "keras3", "tf_keras")),
        Variant("first", effort="quick"),
        Variant("second", effort="quick", flavours=(None, "tf_keras")),
        Variant("only_pt", frameworks=("pt",)),
        Variant("rare", effort="full"),
    ),
    workloads=(
        Workload("digits-cnn", "small"),
        Workload("text-gpt", "compute", accuracy=True),
        Workload("digits-resnet20", "compute", effort="full"),
    ),
)
DEFAULT = cases_of(TECHNIQUE, "module", "default")
NOTHING = {"tasks": set(), "variants": set(), "frameworks": set()}


def many_variants(count, *, flavours=(None, "keras3")):
    variants = (
        Variant("plain", role="baseline", flavours=(None, "keras3", "tf_keras")),
        *(Variant(f"variant{i}", flavours=flavours) for i in range(count)),
    )
    return replace(TECHNIQUE, variants=variants, workloads=TECHNIQUE.workloads[:2])


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


def test_full_adds_variants_and_workloads():
    full = cases_of(TECHNIQUE, "module", "full")
    assert set(names(DEFAULT)) < set(names(full))
    assert {case.variant.name for case in full} >= {"rare"}
    assert {case.workload.task for case in full} >= {"digits-resnet20"}


def test_quick_is_one_variant_a_side_on_one_workload_without_controls():
    assert names(cases_of(TECHNIQUE, "module", "quick")) == [
        "digits-cnn-4/pt/plain",
        "digits-cnn-4/tf/plain",
        "digits-cnn-4/tf-tf_keras/plain",
        "digits-cnn-4/pt/first",
        "digits-cnn-4/tf/first",
        "digits-cnn-4/tf-tf_keras/second",
    ]


@pytest.mark.parametrize("technique", techniques().values(), ids=lambda t: t.name)
def test_every_technique_of_this_project_measures_something_when_quick(technique):
    quick = cases_of(technique, "module", "quick")
    assert {case.framework for case in quick} == set(FRAMEWORKS)
    per_side = Counter((c.framework, c.flavour) for c in quick if not c.is_baseline)
    assert set(per_side.values()) == {1}
    assert any(case.is_baseline for case in quick)


@pytest.mark.parametrize("effort", EFFORTS)
@pytest.mark.parametrize("technique", [TECHNIQUE, *techniques().values()], ids=lambda t: t.name)
def test_ids_are_unique(technique, effort):
    ids = [case.id for case in cases_of(technique, "module", effort)]
    assert len(ids) == len(set(ids))


def test_efforts_grow_and_keep_thirty_rounds():
    quick, default, full = (EFFORT[name] for name in EFFORTS)
    assert (quick.blocks, default.blocks, full.blocks) == (1, 8, 20)
    assert min(effort.rounds for effort in EFFORT.values()) >= 30
    assert default.seeds == 8


def test_a_case_travels_as_json():
    message = DEFAULT[0].message()
    assert message["module"] == "module"
    assert (message["task"], message["batch_size"]) == ("digits-cnn", 4)
    assert message["variant"]["name"] == "plain"


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


# Matches ----------------------------------------------------------------------------------------


def test_a_small_technique_is_one_match_a_workload():
    cases = cases_of(many_variants(1), "module", "default")
    assert [len(match) for match in matches(cases)] == [8, 5]  # three controls at the first
    for match in matches(cases):
        assert len({case.workload for case in match}) == 1


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
        assert len(match) <= MOST_CONTENDERS
        assert len({case.workload for case in match}) == 1
        own = [case for case in cases if case.workload == match[0].workload]
        assert {c.id for c in own if c.is_baseline} <= {c.id for c in match}


@given(count=st.integers(0, 12))
def test_twins_meet_and_controls_play_in_the_first_part(count):
    found = matches(cases_of(many_variants(count), "module", "default"))
    for match in found:
        sides = Counter(case.variant.name for case in match if not case.is_baseline)
        controls = sides.pop("control", 0)  # one for each framework and flavour
        assert set(sides.values()) <= {2}  # both frameworks of a variant in the same match
        assert (controls == 3) == (match is found[0])


def test_a_match_of_eight_is_not_split_and_one_of_nine_is():
    def parts(count):
        variants = tuple(Variant(f"variant{i}", frameworks=("pt",)) for i in range(count))
        baseline = Variant("plain", role="baseline", frameworks=("pt",))
        one = replace(TECHNIQUE, variants=(baseline, *variants), workloads=TECHNIQUE.workloads[:1])
        cases = [c for c in cases_of(one, "module", "default") if c.variant.role != "control"]
        return [len(match) for match in matches(cases)]

    assert parts(7) == [8]
    assert parts(8) == [8, 2]


def test_no_cases_are_no_matches():
    assert matches([]) == []


# The plan ---------------------------------------------------------------------------------------


def test_the_plan_names_its_parts_and_fits_80_columns():
    plan = Plan({"made_up": DEFAULT}, {"made_up": TECHNIQUE}, Effort(8, 30, 8))
    text = plan.describe()
    assert all(len(line) <= 80 for line in text.splitlines()), text
    for word in ("made_up", "plain", "first", "digits-cnn (4)", "text-gpt (8)", "8 blocks"):
        assert word in text
    assert clock(plan.parts.seconds) in text
    labels = [label for label, _ in plan.parts.steps]
    assert sum("block" in label for label in labels) == 8
    assert sum("cold start" in label for label in labels) == len(DEFAULT) - 3  # the controls
    assert sum("accuracy" in label for label in labels) == len(trained(DEFAULT))


def test_a_long_plan_fits_80_columns():
    cases = cases_of(many_variants(20), "module", "default")
    text = Plan({"made_up": cases}, {"made_up": TECHNIQUE}, Effort(8, 30, 8)).describe()
    assert all(len(line) <= 80 for line in text.splitlines()), text


def test_more_work_takes_longer():
    def seconds(amount, cases):
        return Plan({"made_up": cases}, {"made_up": TECHNIQUE}, amount).parts.seconds

    less = seconds(Effort(1, 30, 1), DEFAULT)
    assert less < seconds(Effort(8, 30, 1), DEFAULT) < seconds(Effort(8, 30, 8), DEFAULT)
    assert less > seconds(Effort(1, 30, 1), DEFAULT[:3])


def test_training_that_takes_longer_is_planned_so():
    longer = replace(DEFAULT[-1].workload, training=3.0)
    cases = [replace(c, workload=longer) if c.workload.accuracy else c for c in DEFAULT]
    amount = Effort(8, 30, 8, train_s=60)
    plans = [Plan({"made_up": some}, {"made_up": TECHNIQUE}, amount) for some in (DEFAULT, cases)]
    steps = [[s for label, s in p.parts.steps if "accuracy" in label] for p in plans]
    assert len(steps[0]) == len(trained(DEFAULT))
    assert steps[1] == [3 * seconds for seconds in steps[0]]


def test_controls_are_neither_started_cold_nor_trained():
    controls = [case for case in DEFAULT if case.variant.role == "control"]
    plan = Plan({"made_up": DEFAULT}, {"made_up": TECHNIQUE}, Effort(8, 30, 8))
    assert len(controls) == 3
    assert not any(map(plan.apart, controls))
    assert all(case.variant.role != "control" for case in trained(DEFAULT))
    assert {case.workload.task for case in trained(DEFAULT)} == {"text-gpt"}


def test_a_workload_is_controlled_once_a_run():
    other = replace(TECHNIQUE, name="other")
    elsewhere = replace(other, workloads=(Workload("text-gpt", "small"),), name="elsewhere")
    later = [case for one in (other, elsewhere) for case in cases_of(one, "module", "default")]
    every = DEFAULT + later
    controls = [case for case in every if case.variant.role == "control"]
    assert [case.technique for case in controls[::3]] == ["made_up", "other", "elsewhere"]
    assert repeated_controls(every) == controls[3:6]
    assert repeated_controls(later) == []


def test_cold_starts_are_repeated_and_probes_follow_but_a_quick_run_starts_once():
    technique = replace(TECHNIQUE, cold_starts=3, probes=True)
    case = DEFAULT[0]
    for blocks, starts in ((8, 3), (1, 1)):
        plan = Plan({"made_up": [case]}, {"made_up": technique}, Effort(blocks, 30, 1))
        assert plan.apart(case) == ["cold start"] * starts + ["probe"]
    plan = Plan({"made_up": [case]}, {"made_up": TECHNIQUE}, Effort(8, 30, 1))
    assert plan.apart(case) == ["cold start"]
    warm_only = replace(case, variant=replace(case.variant, measured=WARM))
    assert plan.apart(warm_only) == []


def test_predictions_are_cases_of_their_own():
    both = tuple(Workload("digits-cnn", "small", mode=mode) for mode in ("train", "predict"))
    cases = cases_of(replace(TECHNIQUE, workloads=both), "module", "default")
    found = names(cases)
    assert {"digits-cnn-4/pt/plain", "digits-cnn-4-predict/pt/plain"} < set(found)
    assert [len({c.workload.mode for c in match}) for match in matches(cases)] == [1] * 3


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
