"""What earlier records tell of how long a run takes."""

import json
from dataclasses import replace

import pytest

from bench.harness import durations, remaining
from bench.harness.durations import BEGINNING, Durations, learned
from bench.harness.plan import EFFORT
from bench.harness.selection import cases_of
from bench.record import Accuracy, Block, ColdStart, Conditions, Environment, Timing, encode
from tests import records
from tests.harness import runs
from tests.harness.faulty import SMALL

HERE = Environment(cpu="a cpu", isa=["avx2"], logical_cores=2, threads=2)
ELSEWHERE = HERE.but(cpu="x")
CASES = [case for case in cases_of(SMALL, "module", "quick") if case.timed]
FIRST, *OTHERS = CASES
BLOCKS = 3
IN_A_BLOCK = (*BEGINNING, "rounds")


def record(usual=1.0, **others):
    """A record in which each part took each case `usual` seconds; training two at a time."""
    parts = (*IN_A_BLOCK, "cold", "training")
    blocks = [
        Block(match=0, block=number, peak_bytes=size and size * usual)
        for number, size in enumerate((1000, None, 500))
    ]
    cases = [
        records.case(
            case.variant.name,
            id=case.id,
            program=case.id,
            role=case.variant.role,
            seconds={p: usual * (BLOCKS if p in IN_A_BLOCK else 4) for p in parts},
            blocks=blocks,
            cold_starts=[ColdStart()] * 4,
            accuracy=Accuracy(per_seed=[90.0] * 4),
        )
        for case in CASES
    ]
    whole = {part: sum(case.seconds[part] for case in cases) for part in parts}
    whole |= {"training": whole["training"] / 2, "describe": 7.0, "parents": 4.0 * BLOCKS}
    conditions = [Conditions(match=0, block=block) for block in range(BLOCKS)]
    fields = {"environment": HERE, "rounds": 20, "seconds": whole, "blocks": conditions}
    return records.record(**{"cases": cases} | fields | others)


@pytest.fixture
def results(tmp_path, monkeypatch):
    """Write records, the oldest first, and learn from them."""
    monkeypatch.setattr(durations, "PUBLISHED", tmp_path / "published.json")

    def learn(*records, published=None, rounds=20):
        for number, each in enumerate(records):
            folder = tmp_path / f"2026-01-0{number + 1}T00-00-00Z"
            folder.mkdir(exist_ok=True)
            (folder / "results.json").write_bytes(encode(each))
        if published:
            durations.PUBLISHED.write_bytes(encode(published))
        return learned(tmp_path, HERE, rounds)

    return learn


def test_the_plan_of_the_same_run_takes_what_the_run_took(results):
    """All parts together, whatever overlapped."""
    found = record()
    plan = runs.plan_of(CASES, EFFORT["default"], SMALL, durations=results(found))
    parts = {part.name: part.most for part in remaining.parts(plan, runs.begun(plan))}
    took = found.seconds
    a_pass = sum(took[part] for part in (*IN_A_BLOCK, "parents")) / BLOCKS
    assert parts["pass 1"] == parts["pass 3"] == pytest.approx(a_pass)
    trained = parts["training, 4 seeds"] - plan.durations.parents_s
    assert trained == pytest.approx(took["training"])
    cold = parts["first calls and memory"] - plan.durations.parents_s
    starts = sum(map(plan.cold_starts, CASES))  # of each case the record has four
    assert starts > len(CASES)
    assert cold == pytest.approx(took["cold"] / 4 * starts / len(CASES))
    assert plan.durations.describe_s == 7.0


def test_the_newest_record_of_this_machine_counts(results):
    found = results(record(usual=5.0), record(usual=2.0), record(9.0, environment=ELSEWHERE))
    assert found.of("block", FIRST) == pytest.approx(2.0 * len(IN_A_BLOCK))
    assert found.memory(FIRST) == 2000


def speed(float32, **others):
    return HERE.but(peak_flops={"float32": float32}, **others)


def test_seconds_of_another_class_of_the_same_processor_are_not_learned(results):
    """Of both that the processor may be, the newest record's: nothing is measured before a run."""
    slow, quick = (
        record(usual, environment=speed(flops)) for usual, flops in ((4.0, 2e11), (2.0, 4e11))
    )
    quick = quick.but(cases=quick.cases[:1])
    found = results(slow, quick, published=record(usual=3.0, environment=ELSEWHERE))
    assert found.of("cold", FIRST) == pytest.approx(2.0 * len(CASES))
    assert found.of("cold", OTHERS[0]) == pytest.approx(3.0)  # not the 4.0 of the slow one
    found = results(quick, slow)
    assert found.of("cold", OTHERS[0]) == pytest.approx(4.0)


@pytest.mark.parametrize(("here", "seconds"), [(speed(2e11), 4.0), (speed(4.1e11), 2.0)])
def test_of_a_run_that_is_taken_up_the_class_is_measured(results, tmp_path, here, seconds):
    results(record(4.0, environment=speed(2e11)), record(2.0, environment=speed(4e11)))
    assert learned(tmp_path, here, 20).of("cold", FIRST) == pytest.approx(seconds)


def test_a_gpu_is_not_known_before_a_framework_is_asked(results):
    found = results(record(2.0, environment=HERE.but(gpu={"name": "a GPU"})))
    assert found.of("cold", FIRST) == pytest.approx(2.0)


def test_what_this_machine_has_not_measured_the_published_record_tells(results):
    here = record(usual=2.0)
    here = here.but(cases=here.cases[:1])
    found = results(here, published=record(usual=3.0, environment=ELSEWHERE))
    assert found.of("cold", FIRST) == pytest.approx(
        2.0 * len(CASES)
    )  # a part's whole is shared out
    assert found.of("cold", OTHERS[0]) == pytest.approx(3.0)


QUICKER = speed(4e11, cpu="A quicker one", isa=["avx2", "avx512f", "avx512_bf16"])


def planned(durations):
    """What a plan with these durations says, in words and part by part."""
    plan = runs.plan_of(CASES, EFFORT["ordinary"], SMALL, durations=durations)
    state = runs.begun(plan)
    said = remaining.describe(plan, remaining.seconds_left(plan, state))
    parts = remaining.table(plan, state)
    assert max(map(len, [*said.splitlines(), *parts.splitlines()])) <= 80
    return " ".join(said.split()), parts


def test_a_plan_by_the_times_of_another_machine_says_so_and_promises_no_end(results):
    """Until there is a record of this machine, which has its own seconds."""
    said, parts = planned(results(published=record(environment=QUICKER)))
    assert (
        "these times are from another machine (A quicker one (AVX-512, bfloat16), 2 processors, 400"
        in said
    )
    assert "this machine has no avx512f, avx512_bf16" in said
    assert "early" not in said + parts
    said, parts = planned(results(record(), published=record(environment=QUICKER)))
    assert "another machine" not in said
    assert ", at most " in said
    assert "at most" in parts


def test_the_times_of_another_machine_are_scaled_once_this_one_s_speed_is_measured(results):
    found, mine = results(published=record(environment=QUICKER)), at_other_work(FIRST)
    found.seconds["block"][mine.id] = 7.0  # of a user's model, which was timed here
    before = {part: found.of(part, FIRST) for part in ("block", "cold", "training")}
    for _ in range(2):  # the second time nothing is left to scale
        found.follow(speed(1e11))
        after = {part: found.of(part, FIRST) for part in before}
        assert after == pytest.approx({part: 4 * took for part, took in before.items()})
    assert found.of("block", mine) == 7.0
    assert "another machine" not in planned(found)[0]


def test_what_this_class_of_machine_lacks_is_scaled_to_its_speed(results):
    here = record(usual=2.0, environment=speed(1e11))
    here = here.but(cases=here.cases[:1])
    found = results(here, published=record(usual=3.0, environment=QUICKER))
    assert found.of("cold", FIRST) == pytest.approx(2.0 * len(CASES))
    assert found.of("cold", OTHERS[0]) == pytest.approx(4 * 3.0)


def test_seconds_of_a_cpu_are_not_scaled_to_a_gpu(results):
    found = results(published=record(environment=QUICKER))
    before = found.of("cold", FIRST)
    found.follow(speed(4e13, gpu={"name": "a GPU"}))
    assert found.of("cold", FIRST) == before


def test_the_run_s_own_blocks_tell_more_than_other_runs(results):
    found = results(record(usual=2.0))
    before = [found.of("block", case) for case in CASES]
    found.note_match(CASES, 3.0)
    assert found.of_match(CASES) == pytest.approx(3.0)
    after = [found.of("block", case) for case in CASES]
    assert after == pytest.approx([3.0 * each / sum(before) for each in before])
    found.note_match(CASES[:1], 9.0)
    assert [found.of("block", case) for case in CASES] == pytest.approx([9.0, *after[1:]])


def test_fewer_rounds_take_less(results):
    assert results(record(), rounds=10).of("block", FIRST) == pytest.approx(len(IN_A_BLOCK) - 0.5)


def test_more_rounds_take_no_more_where_blocks_end_by_time(results):
    found = record()
    of_case = next(case for case in found.cases if case.id == FIRST.id)
    for played, more in ((20, 0.5), (3, 0.0)):
        timing = Timing(step_s={"0": {"0": [0.3] * played}})
        cases = [of_case.but(timing=timing) if c is of_case else c for c in found.cases]
        took = results(found.but(cases=cases), rounds=30).of("block", FIRST)
        assert took == pytest.approx(len(IN_A_BLOCK) + more)


def edited(**of_a_case):
    """A record of which one case was edited by hand, or written by another version."""
    found = json.loads(encode(record()))
    found["cases"][0] |= of_a_case
    return json.dumps(found)


def edited_top(**fields):
    return json.dumps(json.loads(encode(record())) | fields)


@pytest.mark.parametrize(
    "damage",
    [
        *("", "{", "[]", '{"schema_version": 3}', '{"schema_version": 2}'),
        *(edited(program=None, role="baseline", id="x"), edited(blocks=None)),
        *(edited(seconds={"cold": "1"}), edited_top(blocks=[{}])),
        *(edited_top(environment=[1]), edited(seconds={"cold": 1e999})),
        edited_top(seconds=dict.fromkeys(IN_A_BLOCK, 0.0) | {"describe": None}),
    ],
)
def test_what_can_not_be_read_tells_nothing(results, tmp_path, damage):
    results(record())
    (tmp_path / "2026-02-01T00-00-00Z").mkdir()
    (tmp_path / "2026-02-01T00-00-00Z" / "results.json").write_text(damage)
    assert results().of("block", FIRST) == pytest.approx(float(len(IN_A_BLOCK)))


def test_what_nobody_knows_is_that_of_the_technique_s_others_or_usual(results):
    here = record(usual=2.0)
    rest = here.cases[1:]
    here = here.but(cases=rest, seconds=here.seconds | {"cold": 8.0 * len(rest)})
    assert results(here).of("cold", FIRST) == pytest.approx(2.0)
    assert results(here).of("probe", FIRST) == durations.USUAL_S["probe"]


def at_other_work(case):
    """The same row with another task, which nobody has measured."""
    found = replace(case, workload=replace(case.workload, task="digits-few"))
    assert found.id != case.id
    return found


def test_a_row_at_other_work_tells_more_than_other_rows_of_its_technique():
    """What is compiled starts slowly whatever the model, and its baseline never."""
    known = {FIRST.id: 20.0} | {case.id: 1.0 for case in OTHERS}
    assert Durations(seconds={"cold": known}).of("cold", at_other_work(FIRST)) == 20.0


def test_other_rows_of_its_framework_tell_more_than_those_of_the_other():
    one, other = (next(c for c in CASES if c.framework == name) for name in ("pt", "tf"))
    assert one.technique == other.technique
    unknown = replace(one, variant=replace(one.variant, name="new"))
    found = Durations(seconds={"cold": {one.id: 20.0, other.id: 1.0}}).of("cold", unknown)
    assert found == 20.0


def test_what_ran_the_same_program_tells_how_long_it_takes(results):
    """In another technique's name: a run by name measures the baseline itself."""
    base = next(case for case in CASES if case.is_baseline)
    found, other = record(usual=9.0), base.id.replace("faulty/", "other/")
    shows = {"program": other, "seconds": {}, "blocks": [], "cold_starts": []}
    found = records.with_case(found, base.id, **shows)
    measured = record(usual=1.0).cases[CASES.index(base)].but(id=other, program=other)
    seconds = {part: s for part, s in found.seconds.items() if part in ("describe", "parents")}
    durations = results(found.but(cases=[*found.cases, measured], seconds=seconds))
    assert durations.of("cold", base) == pytest.approx(1.0)
    assert durations.of("block", base) == pytest.approx(len(IN_A_BLOCK))
    control = replace(base, variant=replace(base.variant, name="control", role="control"))
    assert durations.of("block", control) == pytest.approx(len(IN_A_BLOCK))
    assert durations.of("block", CASES[-1]) == pytest.approx(9.0 * len(IN_A_BLOCK))


def test_who_shared_another_s_training_trains_for_itself_where_that_is_not_planned():
    base = next(case for case in CASES if case.is_baseline)
    for planned, expected in ((CASES, 30.0), ([*CASES, replace(base, technique="other")], 0.5)):
        found = Durations(seconds={"training": {base.id: 0.5, "other" + base.id[6:]: 30.0}})
        found.note_same(base.id, "other" + base.id[6:], "baseline")
        found.note_alone(planned)
        assert found.of("training", base) == expected


@pytest.mark.parametrize(
    ("took", "expected"),
    [(20.0, 24.0), (1.0, 5.0), (0.5, 2.5)],  # beyond the baseline as much; less in its proportion
)
def test_a_slower_baseline_makes_all_rows_of_its_work_slower(took, expected):
    row = next(case for case in CASES if not case.is_baseline)
    elsewhere = at_other_work(row)
    found = Durations(seconds={"cold": {row.id: took, "a/here/x/plain": 1.0, "a/there/x/p": 5.0}})
    for case, plain in ((row, "a/here/x/plain"), (elsewhere, "a/there/x/p")):
        _, work, side, _ = case.id.split("/")
        found.baselines[work, side] = {plain}
    assert found.of("cold", elsewhere) == pytest.approx(expected)
    assert found.of("probe", elsewhere) == durations.USUAL_S["probe"]
