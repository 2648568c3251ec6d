"""What is a number to reckon with, and what a record keeps of others."""

from __future__ import annotations

from math import inf, nan

import numpy as np
import pytest

from bench.analysis.values import finite, is_number
from bench.record import Accuracy, Metric


@pytest.mark.parametrize("value", [0, -3, 2.5, 9.9e99, -9.9e99, 10**99])
def test_finite_numbers_are_reckoned_with(value):
    assert is_number(value)


@pytest.mark.parametrize("value", [1e100, -1e100, inf, -inf, nan, 10**400, True, "1", None, [1]])
def test_nothing_else_is(value):
    assert not is_number(value)


@pytest.mark.parametrize("value", [nan, inf, -inf, 1e101])
def test_what_is_no_number_is_none_wherever_it_stands(value):
    kept = finite(Accuracy(metric="accuracy", per_seed=[1.5, value], mean=value))
    assert (kept.metric, kept.per_seed, kept.mean) == ("accuracy", [1.5, None], None)
    assert finite({"a": [(value, 2)]}) == {"a": [(None, 2)]}
    assert finite({"a": Metric(value=value, unit="s")})["a"].value is None


def test_floats_are_python_s_own():
    assert type(finite([np.float64(1.5)])[0]) is float
    assert finite((True, "nan", None, 3)) == (True, "nan", None, 3)
