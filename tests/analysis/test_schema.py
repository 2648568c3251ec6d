"""Records edited by hand: one clear line, or whole reports; never a traceback."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings

from bench.analysis.schema import check
from bench.report import page, tidy
from bench.report.tables import markdown, terminal
from tests.report.test_report import records, small

DELETE = object()
MISTYPED = [DELETE, None, "text", -1, 7.5, 10**400, True, [], [None, 3], {}, {"x": {}}]
SMALL = json.dumps(small())


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


PLACES = places(json.loads(SMALL))


def changed(path: tuple, value) -> dict:
    """The small record with another value at `path`, or without it."""
    results = holder = json.loads(SMALL)
    for key in path[:-1]:
        holder = holder[key]
    if value is DELETE:
        del holder[path[-1]]
    else:
        holder[path[-1]] = value
    return results


def refusal(results: dict) -> str | None:
    try:
        check(results)
    except ValueError as error:
        return str(error)
    return None


def whole_or_refused(results: dict) -> bool:
    """Whether every report can be made; False where the record is refused with one line."""
    if reason := refusal(results):
        assert len(reason.splitlines()) == 1
        return False
    for make in (terminal, markdown, page.html, tidy.csv_text):
        make(results).encode()
    return True


@pytest.mark.parametrize("top", json.loads(SMALL))
def test_a_hand_edited_record_gives_one_clear_line_or_whole_reports(top):
    mine = [path for path in PLACES.values() if path[0] == top]
    assert mine
    for path in mine:
        for value in MISTYPED:
            whole_or_refused(changed(path, value))


def test_what_may_be_missing_leaves_whole_reports():
    assert whole_or_refused(json.loads(SMALL))
    for field in ("timing", "memory", "accuracy", "metrics", "certificate", "evidence", "reason"):
        for number in range(3):
            assert whole_or_refused(changed(("cases", number, field), None)), field
            assert whole_or_refused(changed(("cases", number, field), DELETE)), field


@settings(max_examples=30, deadline=None)
@given(records())
def test_any_valid_record_makes_whole_reports(results):
    assert whole_or_refused(results)
