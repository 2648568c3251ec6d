"""What is a number to reckon with, what a pair of bounds, and what stands at a path."""

from __future__ import annotations

from math import inf, nan

import pytest

from bench.analysis.values import at, is_number, is_pair


@pytest.mark.parametrize("value", [0, -3, 2.5, 9.9e99, -9.9e99, 10**99])
def test_finite_numbers_are_reckoned_with(value):
    assert is_number(value)


@pytest.mark.parametrize("value", [1e100, -1e100, inf, -inf, nan, 10**400, True, "1", None, [1]])
def test_nothing_else_is(value):
    assert not is_number(value)


def test_a_pair_is_two_numbers():
    assert is_pair([1, 2.5])
    assert is_pair((1, 2))
    for other in (None, 1, [1], [1, 2, 3], [1, None], [None, 1], "12", {"a": 1, "b": 2}):
        assert not is_pair(other)


def test_a_path_that_breaks_off_has_nothing():
    assert at({"a": {"b": 0}}, "a", "b") == 0
    assert at({"a": {"b": 0}}) == {"a": {"b": 0}}
    for path in (("b",), ("a", "c"), ("a", "b", "c")):
        assert at({"a": {"b": 0}}, *path) is None
    assert at(None, "a") is None
