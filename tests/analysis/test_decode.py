"""Records edited by hand: one clear line, or whole reports; never a traceback."""

from __future__ import annotations

import json
from contextlib import ExitStack
from unittest import mock

import pytest

from bench.record import SCHEMA_VERSION, decode, encode
from bench.report import content, csv_export, page, tables
from tests import workers
from tests.records import small_run

DELETE = object()
MISTYPED = [DELETE, None, "text", -1, 7.5, 10**400, True, [], [None, 3], {}, {"x": {}}]


def places(value, path=()) -> dict[tuple, tuple]:
    """A path to one field of each kind: entries of a list or of free names stand for each other."""
    found = {}
    entries = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in entries:
        here = (*path, key)
        found.setdefault(tuple("*" if isinstance(k, int) else k for k in here), here)
        if isinstance(inner, dict | list):
            for kind, place in places(inner, here).items():
                found.setdefault(kind, place)
    return found


def smallest() -> dict:
    """The small record with no more cases than it takes to have a field of each kind.

    And pairs of each kind, of which reports are made hundreds of times.
    """
    run = small_run()
    kept = {f"mixed_precision/digits-cnn-64/{name}" for name in ("pt/fp32", "pt/bf16", "tf/fp32")}
    pairs = [c for c in run.comparisons if {c.numerator, c.denominator} <= kept]
    assert {c.kind for c in pairs} == {c.kind for c in run.comparisons}
    small = run.but(cases=[case for case in run.cases if case.id in kept], comparisons=pairs)
    results = json.loads(encode(small))
    assert places(results).keys() == places(json.loads(encode(run))).keys()
    return results


SMALL = json.dumps(smallest())
PLACES = places(json.loads(SMALL))


def changed(path: tuple, value) -> dict:
    """The small record with another value at `path`, or without it."""
    return change(json.loads(SMALL), path, value)


def change(results: dict, path: tuple, value) -> dict:
    """The same record, with another value at `path`, or without it."""
    holder = results
    for key in path[:-1]:
        holder = holder[key]
    if value is DELETE:
        del holder[path[-1]]
    else:
        holder[path[-1]] = value
    return results


def refusal(results: dict) -> str | None:
    try:
        decode(json.dumps(results))
    except ValueError as error:
        return str(error)
    return None


def whole_or_refused(results: dict) -> bool:
    """Whether every report can be made; False where the record is refused with one line."""
    if reason := refusal(results):
        assert len(reason.splitlines()) == 1
        return False
    record = decode(json.dumps(results))
    report = content.build(record)
    with ExitStack() as once:
        for module in (tables, page):
            once.enter_context(mock.patch.object(module, "build", return_value=report))
        for make in (tables.terminal, tables.markdown, page.html, csv_export.csv_text):
            make(record).encode()
    return True


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("ratio", 0), ("ratio", -0.5), ("ci", [0, 1]), ("ci", [1]), ("ci", [1, 2, 3])),
        *(("n", 0), ("n", 2.5), ("look", 0), ("freedom", 0), ("sd", 10.5), ("batch_size", 4.5)),
    ],
)
def test_a_comparison_that_no_run_can_make_is_refused(field, value):
    results = json.loads(SMALL)
    assert refusal(results) is None
    results["comparisons"][0][field] = value
    assert refusal(results).startswith(f"the record: comparisons 0: {field}")


@pytest.mark.parametrize(
    ("field", "value"), [("ratio", 1e-3), ("n", 1), ("look", 1), ("freedom", 0.5), ("sd", 10.0)]
)
def test_a_comparison_of_few_blocks_is_held(field, value):
    results = json.loads(SMALL)
    results["comparisons"][0][field] = value
    assert refusal(results) is None


@pytest.mark.parametrize("bounds", [[1e-9, 1e8], [1e-39, 1e39]])
def test_two_blocks_that_are_far_apart_make_a_wide_interval_and_whole_reports(bounds):
    results = json.loads(SMALL)
    results["comparisons"][0] |= {"ci": bounds, "n": 2, "sd": 10.0}
    results["noise_floor"]["controls"][0] |= {"ci": bounds}
    assert whole_or_refused(results)


@pytest.mark.parametrize(
    ("looks", "fine"),
    [
        (None, True),
        ([], True),
        ([2], True),
        ([3, 5, 8], True),
        (list(range(2, 12)), True),
        (list(range(2, 13)), False),
        ([1, 3], False),
        ([3, 3], False),
        ([5, 3], False),
        ([3.5], False),
    ],
)
def test_looks_are_a_few_rising_numbers(looks, fine):
    assert (refusal(json.loads(SMALL) | {"looks": looks}) is None) is fine


@pytest.mark.parametrize(
    ("version", "said"),
    [
        (SCHEMA_VERSION - 1, "schema 2 is older than this twinbench, which reads 3"),
        (SCHEMA_VERSION + 1, "schema 4 is newer than this twinbench, which reads 3"),
        *((wrong, "not a record of twinbench") for wrong in (True, "3", 3.0)),
        (None, "not a record of twinbench: it has no schema_version"),
    ],
)
def test_only_records_of_this_schema_are_read(version, said):
    assert refusal(json.loads(SMALL) | {"schema_version": version}).startswith(said)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"", "not JSON, or cut off before its end"),
        (SMALL[: len(SMALL) // 2], "not JSON, or cut off before its end"),
        (b"\xff\xfe{}", "not JSON, or cut off before its end"),
        (SMALL.replace("0.024", "NaN"), "not JSON, or cut off before its end"),
        (b"[]", "not a record of twinbench"),
        (b"[" * 100_000 + b"]" * 100_000, "not a record of twinbench"),
        (f'{{"schema_version": 3, "x": {"[" * 10_000 + "]" * 10_000}}}', "nested too deeply"),
    ],
)
def test_what_is_no_record_is_one_clear_line(text, said):
    with pytest.raises(ValueError, match=r"^[^\n]*$") as caught:
        decode(text)
    assert said in str(caught.value)


def test_contenders_of_a_block_play_the_same_rounds():
    results = json.loads(SMALL)
    timed = [case for case in results["cases"] if (case["timing"] or {}).get("step_s")]
    for case, rounds in zip(timed, (3, 4), strict=False):
        case["timing"]["step_s"] = {"7": {"0": [0.1] * rounds}}
    assert "rounds" in refusal(results)
    timed[1]["timing"]["step_s"] = {"8": {"0": [0.1] * 4}}  # another match
    assert refusal(results) is None
    for wrong in ({"a": {"0": [0.1]}}, {"9": {"b": [0.1]}}):
        timed[1]["timing"]["step_s"] = wrong
        assert refusal(results).endswith("expected numbers")


def test_a_hand_edited_environment_gives_one_clear_line_or_whole_reports():
    """Its fields are shown one by one, so that reports are made of all that pass at once."""
    mine = [path for path in PLACES.values() if path[0] == "environment" and len(path) == 2]
    inner = [path for path in PLACES.values() if path[0] == "environment" and len(path) > 2]
    assert mine
    assert inner
    for paths in (mine, inner):
        for value in MISTYPED:
            results = json.loads(SMALL)
            for path in paths:
                reason = refusal(changed(path, value))
                assert not reason or len(reason.splitlines()) == 1
                if not reason and path[: len(path) - 1] not in paths:
                    change(results, path, value)
            assert whole_or_refused(results), value


@pytest.mark.parametrize("top", sorted(json.loads(SMALL).keys() - {"environment"}))
def test_a_hand_edited_record_gives_one_clear_line_or_whole_reports(top):
    mine = [path for path in PLACES.values() if path[0] == top]
    assert mine
    for place, path in enumerate(mine):
        for number, value in enumerate(MISTYPED):
            if workers.campaign() or (place + number) % 2 == 0:
                whole_or_refused(changed(path, value))


def test_what_may_be_missing_leaves_whole_reports():
    assert whole_or_refused(json.loads(SMALL))
    for number in range(3):
        for field in ("memory", "accuracy", "certificate", "evidence", "reason"):
            assert whole_or_refused(changed(("cases", number, field), None)), field
            assert whole_or_refused(changed(("cases", number, field), DELETE)), field
        for field in ("timing", "metrics"):
            assert whole_or_refused(changed(("cases", number, field), DELETE)), field
